//! Passes over the stream plan, in the order `stream::plan_job` runs them. Each takes a tree and
//! gives a tree (or reads properties off it), and has its tests beside it.

pub mod classes;
pub mod exchange;
pub mod identity;
pub mod properties;
pub mod prune;
pub mod rank;
pub mod simplify;
pub mod ttl;
pub mod watermark;

#[cfg(test)]
mod tests;
