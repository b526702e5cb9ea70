//! SQL text → AST → DataFusion logical plan → stream plan → job graph (docs/design.md §5).
//!
//! The front half lives in [`parser`], [`ast`], [`bind`] and [`optimizer`]: text to an optimised logical
//! plan that both batch execution and the stream planner take. PostgreSQL's semantics are in the plan
//! itself (as functions of ours), so that both compute the same.

pub mod ast;
pub mod bind;
pub mod catalog;
pub mod explain;
mod group_keys;
mod operands;
pub mod optimizer;
pub mod parser;
pub mod passes;
pub mod stream;

pub use ast::{ParsedStatement, Statement};
pub use bind::{Binder, BoundQuery, SessionInfo, check_view_volatility};
pub use catalog::CatalogView;
pub use optimizer::batch_rules;
pub use parser::parse;
