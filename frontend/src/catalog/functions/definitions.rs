//! Definitions of objects as text.

use super::names::relation_argument;
use super::{Entry, NULL, int, text};
use crate::catalog::SystemTables;
use crate::catalog::objects::{columns, relkind};
use crate::catalog::pg::view_text;

pub(super) const FUNCTIONS: &[Entry] = &[
    ("pg_index_column_has_property", 'b', |t, a| {
        let oid = relation_argument(t, a)?;
        let column = int(a, 1)?.and_then(|n| usize::try_from(n).ok()?.checked_sub(1));
        let index = oid.and_then(|oid| t.indexes().iter().find(|i| i.oid == oid));
        let direction = index.and_then(|i| i.directions().nth(column?));
        let (descending, nulls_first) = direction.unwrap_or_default();
        let has = |p: &str| match p {
            "asc" => Some(!descending),
            "desc" => Some(descending),
            "nulls_first" => Some(nulls_first),
            "nulls_last" => Some(!nulls_first),
            "orderable" | "search_array" | "search_nulls" | "returnable" => Some(true),
            "distance_orderable" => Some(false),
            _ => None,
        };
        Ok(text(a, 2).and_then(|p| has(&p.to_lowercase())).into())
    }),
    ("pg_sequence_last_value", 'i', NULL),
    ("pg_describe_object", 't', NULL),
    ("pg_get_function_arg_default", 't', NULL),
    ("pg_get_expr", 't', |_, a| Ok(text(a, 0).into())),
    ("pg_get_viewdef", 't', |t, a| {
        let oid = relation_argument(t, a)?;
        Ok(oid.and_then(|oid| view_of(t, oid)).into())
    }),
    ("pg_get_indexdef", 't', |t, a| {
        let (oid, column) = (relation_argument(t, a)?, int(a, 1)?.unwrap_or(0));
        let index = oid.and_then(|oid| t.indexes().iter().find(|i| i.oid == oid));
        Ok(index.map(|i| i.definition(column)).into())
    }),
    ("pg_get_constraintdef", 't', |t, a| {
        let index = relation_argument(t, a)?
            .and_then(|oid| t.indexes().iter().find(|i| i.oid == oid && i.primary));
        Ok(index.map(|i| i.constraint()).into())
    }),
    ("pg_get_ruledef", 't', NULL),
    ("pg_get_triggerdef", 't', NULL),
    ("pg_get_partkeydef", 't', NULL),
    ("pg_get_partition_constraintdef", 't', NULL),
    ("pg_get_functiondef", 't', NULL),
    ("pg_get_function_result", 't', NULL),
    ("pg_get_function_arguments", 't', NULL),
    ("pg_get_function_identity_arguments", 't', NULL),
    ("pg_get_function_sqlbody", 't', NULL),
    ("pg_get_statisticsobjdef_columns", 't', NULL),
    ("pg_get_statisticsobjdef", 't', NULL),
    ("pg_get_serial_sequence", 't', NULL),
    ("obj_description", 't', NULL),
    ("col_description", 't', NULL),
    ("shobj_description", 't', NULL),
    ("pg_tablespace_location", 't', |_, _| Ok("".into())),
];

fn view_of(t: &SystemTables, oid: i64) -> Option<String> {
    let r = t.catalog().by_id(u32::try_from(oid).ok()?)?;
    let view = matches!(relkind(r), "v" | "m") && columns(r).next().is_some();
    view.then(|| view_text(r))
}
