//! Subqueries in expressions: EXISTS, IN, ANY and ALL, scalar ones, arrays, and what is lateral in FROM.
//!
//! They are spelled out as joins and aggregates that batch runs and views maintain, where DataFusion's
//! decorrelation would leave them or would have another result.

pub(super) mod array_query;
pub(super) mod empty_scalars;
pub(super) mod join_conditions;
pub(super) mod join_filters;
pub mod lateral;
pub(super) mod null_keys;
pub(super) mod outer_aggregates;
pub(super) mod outer_references;
pub mod predicates;
pub mod scalar;
pub(super) mod unique;
