//! An engine's stream as the router mends and reads it, from any bytes.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spark_kv::router::laws::stream(bytes));
