//! Gated batches and the timestamp-aware cache (docs/design.md §7).
