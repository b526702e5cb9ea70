//! Values and their types: PostgreSQL's literals, casts, operators and functions.
//!
//! The AST is spelled out in terms that one hook of the planner sees with types ([`desugar`],
//! [`operators`]); in the plan, what depends on the session's zone or compares values without the same bytes
//! becomes calls of ours.

pub(super) mod clause_expressions;
pub mod desugar;
pub(super) mod guarded_cases;
pub(super) mod null_types;
pub mod operators;
pub(super) mod semantic_equality;
pub mod stored_expressions;
pub mod types;
pub mod volatility;
pub mod zones;
