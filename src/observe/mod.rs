//! What is known about this node and told to people: the last requests, what is wrong, whether it serves, and the
//! one picture of both boxes that the page, `status` and the peer get.
//!
//! All files here are pure: they are given facts and a time. Who gathers the facts is the node.

pub mod alerts;
pub mod chains;
pub mod health;
pub mod requests;
pub mod state;

/// The beginning of a text of foreign origin, at a letter's border.
fn clip(mut text: String, bytes: usize) -> String {
    if text.len() > bytes {
        let cut = (0..=bytes).rev().find(|&n| text.is_char_boundary(n)).unwrap_or(0);
        text.truncate(cut);
    }
    text
}
