//! Parses, hands to `cli`, turns the outcome into an exit code.

fn main() {}
