//! Parts of the lines of EXPLAIN, the same for stream plans and job graphs.

use std::fmt::Write;
use std::sync::Arc;

use arrow::compute::SortOptions;
use arrow::datatypes::Schema;
use datafusion::physical_expr::expressions::Column;
use millrace_functions::expr::{ExprRef, replace_columns};
use millrace_rpc::catalog::RowStorage;

use super::expr::expr_text;
use crate::stream::plan::Identity;

/// Names that tell columns apart.
pub fn column(schema: &Schema, c: usize) -> String {
    let Some(field) = schema.fields().get(c) else { return format!("#{c}") };
    let twice = schema.fields().iter().filter(|f| f.name() == field.name()).count() > 1;
    if twice { format!("{}#{c}", field.name()) } else { field.name().clone() }
}

/// All columns of a schema.
pub fn all_columns(schema: &Schema) -> String {
    let all: Vec<usize> = (0..schema.fields().len()).collect();
    list(schema, &all)
}

pub fn list(schema: &Schema, columns: &[usize]) -> String {
    columns.iter().map(|&c| column(schema, c)).collect::<Vec<_>>().join(", ")
}

pub fn order_list(schema: &Schema, order: &[(usize, SortOptions)]) -> String {
    let one = |(c, o): &(usize, SortOptions)| {
        let direction = if o.descending { " desc" } else { "" };
        // PostgreSQL's default is NULLS LAST ascending, FIRST descending.
        let nulls = match (o.descending, o.nulls_first) {
            (false, true) => " nulls first",
            (true, false) => " nulls last",
            _ => "",
        };
        format!("{}{direction}{nulls}", column(schema, *c))
    };
    order.iter().map(one).collect::<Vec<_>>().join(", ")
}

pub fn text(e: &ExprRef, input: &Schema) -> String {
    let named =
        replace_columns(e, |c| Some(Arc::new(Column::new(&column(input, c), c)) as ExprRef));
    expr_text(named.as_ref().unwrap_or(e))
}

pub fn duration(us: i64) -> String {
    match us {
        us if us % 1_000_000 == 0 => format!("{}s", us / 1_000_000),
        us if us % 1_000 == 0 => format!("{}ms", us / 1_000),
        us => format!("{us}us"),
    }
}

pub fn by_order(group: &[usize], order: &[(usize, SortOptions)], input: &Schema) -> String {
    let mut line = String::new();
    if !group.is_empty() {
        let _ = write!(line, " by ({})", list(input, group));
    }
    if !order.is_empty() {
        let _ = write!(line, " order ({})", order_list(input, order));
    }
    line
}

/// The columns that tell rows of a group and order apart.
pub fn told_apart(identity: &Identity, input: &Schema) -> String {
    match identity.0.as_slice() {
        [] => String::new(),
        columns => format!(", identity ({})", list(input, columns)),
    }
}

/// The key of rows in order within their groups.
pub fn ordered_key(
    group: &[usize],
    order: &[(usize, SortOptions)],
    unique_key: &[usize],
    storage: RowStorage,
    input: &Schema,
) -> String {
    let mut key: Vec<String> = vec![];
    for columns in [list(input, group), order_list(input, order), list(input, unique_key)] {
        key.extend((!columns.is_empty()).then_some(columns));
    }
    if storage == RowStorage::Multiset {
        key.push("all others".into());
    }
    format!("({})", key.join(", "))
}

/// The vnode columns, where they are not simply the whole key.
pub fn vnode(schema: &Schema, vnode: &[usize], key: &[usize]) -> String {
    if vnode == key { String::new() } else { format!(" vnode ({})", list(schema, vnode)) }
}

/// The numbers of its state tables.
pub fn state(tables: &[usize]) -> String {
    let numbers: Vec<String> = tables.iter().map(usize::to_string).collect();
    format!(" [state {}]", numbers.join(", "))
}
