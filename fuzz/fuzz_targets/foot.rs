//! Foot and trailer of a segment, from any bytes.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| spark_kv::store::laws::foot(bytes));
