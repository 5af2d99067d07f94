//! Faces: what others reach over HTTP.

pub mod admin;
