//! A rewrite of the AST before planning, so that PostgreSQL's rules for literals, casts and
//! operators can be applied where types are known.
//!
//! `SqlToRel` has one hook that sees the types of an expression's parts: binary operators. So
//! everything that needs types becomes one, with a custom operator ([`Op`]) that
//! [`super::operators`] resolves: casts, numbers, parameters, unary minus, elements of IN lists. BETWEEN,
//! simple CASE, EXTRACT and their like are spelled out as comparisons and functions. Numbers that are not
//! values (LIMIT, ORDER BY 1, window frames) keep their form.

mod calls;
mod comparisons;
mod copies;
pub(in crate::bind) mod expressions;
mod literals;
mod ops;
mod patterns;
pub(in crate::bind) mod positions;
pub(in crate::bind) mod returned_sets;
mod subscripts;
pub(in crate::bind) mod unsupported;

use millrace_functions::functions;

pub(in crate::bind) use comparisons::row_items;
pub use copies::{Copies, size};
pub(in crate::bind) use literals::interval_text;
pub use ops::{ANY, ARRAY, ITEM, Op, SCALAR, SERIES, SLICE, VALUES, assigned, plain_call};
pub(in crate::bind) use ops::{call, resolved, row_op, row_test, row_text, string, take};
pub(in crate::bind) use returned_sets::returns_rows;

/// Whether a name is that of a function of single values.
pub(in crate::bind) fn is_scalar(name: &str) -> bool {
    ops::resolved_name(name).is_some()
        || calls::SPELLED.contains(&name)
        || functions().scalar(name).is_some()
}
