//! The operators of stream plans, a file each: how a plan gets one, and all that the passes, the fragmenter and EXPLAIN
//! ask of it ([`OperatorRules`], [`OperatorLine`]).
//!
//! The passes walk the plan; what they ask of an operator is answered here. No method has a default, so an operator
//! does not compile before it has answered them all. Its settings are declared in `millrace_graph`.

mod aggregate;
mod buffer;
mod exchange;
mod expand;
mod filter;
mod hop;
mod join;
mod lookup;
mod project;
mod repeat;
mod root;
pub mod rules;
mod scan;
mod stamp;
mod top_n;
mod union;
mod unnest;
mod values;
mod window;

pub use rules::{Input, LineContext, Lowered, OperatorLine, OperatorRules, RowIdentity};
