//! Which column, table or function a name means, and what a query's columns are called.
//!
//! Scopes tell what the items of FROM have by the catalog; joins that merge columns by their names are
//! written out, `*` where it repeats names, and names of outer queries where DataFusion would take them for
//! something else.

pub(super) mod ambiguous;
pub(super) mod internal_calls;
mod natural;
pub(super) mod outer_names;
pub(super) mod outer_outputs;
pub mod output_names;
pub mod outputs;
pub(super) mod scopes;
pub(super) mod star_expansion;
pub(super) mod using;
pub(super) mod whole_rows;

pub use output_names::{
    column_name, fold, hidden_name, is_column, makes_rows, own_name, repeated_name, shown,
    table_alias, without_marks,
};
