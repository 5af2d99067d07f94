//! A segment's first page, from any bytes.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spark_kv::store::laws::head(bytes));
