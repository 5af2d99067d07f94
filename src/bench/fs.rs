//! vLLM's own files tier, for comparison.
