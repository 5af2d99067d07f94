//! A record's page, from any bytes.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spark_kv::store::laws::record(bytes));
