//! What rows are put together by and what is computed of them: GROUP BY, DISTINCT ON, FILTER.
//!
//! Columns that depend on a grouped primary key are grouped by too, and aggregates that keep the order of
//! their input are told it.

pub(super) mod distinct_on;
pub(super) mod filters;
pub(super) mod functional_dependency;
pub(super) mod grouping;
pub(super) mod ordered_input;
