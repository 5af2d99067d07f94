//! The faces of a node: what speaks to it from outside.

pub mod local;
