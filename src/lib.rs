//! # spark-kv
//!
//! One program per box. It starts vLLM, keeps every KV row the boxes ever computed on their drives, brings rows back
//! to whichever box needs them, and routes each request to where it finishes soonest.

pub mod api;
pub mod base;
pub mod cli;
pub mod cluster;
pub mod engine;
pub mod keeper;
pub mod meter;
pub mod mock;
pub mod observe;
pub mod router;
pub mod settings;
pub mod store;
pub mod tasks;
pub mod transfer;
