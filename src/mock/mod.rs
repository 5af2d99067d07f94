//! An engine without a model: real rows, real block hashes, the plugin's side of the door, OpenAI's interface.

pub mod client;
