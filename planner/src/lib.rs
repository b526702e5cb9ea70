//! SQL text → AST → DataFusion logical plan → stream plan → job graph (docs/design.md §5).
//!
//! The front half lives in [`parser`], [`ast`], [`bind`], [`functions`] and [`optimizer`]: text to an
//! optimised logical plan that both batch execution and the stream planner take. PostgreSQL's
//! semantics are in the plan itself (as functions of ours), so that both compute the same.

pub mod ast;
pub mod bind;
pub mod catalog;
pub mod codec;
pub mod error;
pub mod explain;
mod explain_expr;
pub mod frame;
pub mod functions;
pub mod graph;
pub mod graph_state;
mod group_keys;
pub mod interrupt;
mod operands;
pub mod optimizer;
pub mod parser;
pub mod passes;
pub mod stream;
pub mod tree;
pub mod window_call;

pub use ast::{ParsedStatement, Statement};
pub use bind::{Binder, BoundQuery, SessionInfo, check_view_volatility};
pub use catalog::CatalogView;
pub use error::sql_error_from_datafusion;
pub use interrupt::Interrupt;
pub use optimizer::batch_rules;
pub use parser::parse;
