//! A request's body as the router reads and changes it, from any bytes.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spark_kv::router::laws::body(bytes));
