//! What must be equal on two nodes so that the rows of one are of use to the other, and how it differs where it does.

use std::collections::BTreeSet;

use super::proto::SpaceFacts;
use crate::base::block::Space;

/// How the facts of both sides compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Match {
    /// One side has no engine, or its facts are not known yet.
    Open,
    Same(Space),
    /// What differs, by name, with both values.
    Differ(Vec<String>),
}

/// What differs, as sentences for an operator.
pub fn differences(ours: &SpaceFacts, theirs: &SpaceFacts) -> Vec<String> {
    let names: BTreeSet<&String> = ours.what.keys().chain(theirs.what.keys()).collect();
    let said = |facts: &SpaceFacts, name: &String| {
        facts.what.get(name).cloned().unwrap_or_else(|| "not known".to_owned())
    };
    let mut list: Vec<String> = names
        .into_iter()
        .filter(|&name| ours.what.get(name) != theirs.what.get(name))
        .map(|name| format!("{name} is {} here and {} there", said(ours, name), said(theirs, name)))
        .collect();
    if list.is_empty() && ours.space != theirs.space {
        let of = |s: Space| format!("{:?} rank {} of {}", s.namespace, s.rank.index, s.rank.of);
        list.push(format!("the namespace is {} here and {} there", of(ours.space), of(theirs.space)));
    }
    list
}
