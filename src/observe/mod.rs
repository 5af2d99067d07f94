//! What is known about this node and told to people.
