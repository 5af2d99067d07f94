//! A batch of an engine's cache events, from any bytes.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = spark_kv::engine::events::wire::read(bytes);
});
