//! Binder tests over a small catalog, and the functions evaluated in batch.
