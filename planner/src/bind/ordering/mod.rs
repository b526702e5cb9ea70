//! ORDER BY and how many rows of an order there are: LIMIT, OFFSET, FETCH.
//!
//! Names in ORDER BY are told apart as outputs and inputs; values whose bytes do not say their order are
//! ordered by keys.

pub(super) mod by_keys;
pub(super) mod float_order;
pub(super) mod limits;
pub(super) mod order;
pub(super) mod repeated_orders;
pub mod sort_keys;
pub mod with_ties;
