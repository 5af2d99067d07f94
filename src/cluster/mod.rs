//! Draft.
pub mod identity;
pub mod peer;
pub mod proto;
pub mod tls;
pub mod token;
