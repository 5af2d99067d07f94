//! The store's identity, from any bytes.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spark_kv::store::laws::identity(bytes));
