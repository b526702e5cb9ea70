//! Who may see and do what: everybody everything, as far as names are found.

use super::{Body, Entry, FALSE, TRUE, int};
use crate::catalog::SystemTables;
use crate::catalog::columns::SYSTEM_TABLES;
use crate::catalog::objects::relkind;

const VISIBLE: Body = |_, args| Ok(int(args, 0)?.map(|_| true).into());

pub(super) const FUNCTIONS: &[Entry] = &[
    ("pg_table_is_visible", 'b', |t, a| Ok(int(a, 0)?.map(|oid| visible(t, oid)).into())),
    ("pg_type_is_visible", 'b', VISIBLE),
    ("pg_function_is_visible", 'b', VISIBLE),
    ("pg_operator_is_visible", 'b', VISIBLE),
    ("pg_opclass_is_visible", 'b', VISIBLE),
    ("pg_opfamily_is_visible", 'b', VISIBLE),
    ("pg_collation_is_visible", 'b', VISIBLE),
    ("pg_conversion_is_visible", 'b', VISIBLE),
    ("pg_statistics_obj_is_visible", 'b', VISIBLE),
    ("pg_ts_config_is_visible", 'b', VISIBLE),
    ("pg_ts_dict_is_visible", 'b', VISIBLE),
    ("pg_ts_parser_is_visible", 'b', VISIBLE),
    ("pg_ts_template_is_visible", 'b', VISIBLE),
    ("pg_relation_is_publishable", 'b', FALSE),
    ("pg_is_other_temp_schema", 'b', FALSE),
    ("pg_has_role", 'b', TRUE),
    ("has_table_privilege", 'b', TRUE),
    ("has_schema_privilege", 'b', TRUE),
    ("has_database_privilege", 'b', TRUE),
    ("has_column_privilege", 'b', TRUE),
    ("has_any_column_privilege", 'b', TRUE),
    ("has_function_privilege", 'b', TRUE),
    ("has_sequence_privilege", 'b', TRUE),
    ("has_type_privilege", 'b', TRUE),
    ("has_foreign_data_wrapper_privilege", 'b', TRUE),
    ("has_server_privilege", 'b', TRUE),
    ("has_tablespace_privilege", 'b', TRUE),
    ("has_language_privilege", 'b', TRUE),
    ("has_parameter_privilege", 'b', TRUE),
    ("pg_relation_is_updatable", 'd', |t, a| {
        // INSERT, UPDATE and DELETE.
        Ok(int(a, 0)?.map(|oid| if is_table(t, oid) { 28i64 } else { 0 }).into())
    }),
    ("pg_column_is_updatable", 'b', |t, a| Ok(int(a, 0)?.map(|oid| is_table(t, oid)).into())),
    ("row_security_active", 'b', FALSE),
];

fn is_table(t: &SystemTables, oid: i64) -> bool {
    let relation = u32::try_from(oid).ok().and_then(|id| t.catalog().by_id(id));
    relation.is_some_and(|r| relkind(r) == "r")
}

/// A relation is visible when its bare name finds it.
fn visible(t: &SystemTables, oid: i64) -> bool {
    let seen = |schema: &str, name: &str| {
        let first = t.search_path.iter().find(|s| t.catalog().get(s, name).is_some());
        first.map_or_else(|| t.search_path.iter().any(|s| s == schema), |s| s == schema)
    };
    if let Some(r) = u32::try_from(oid).ok().and_then(|id| t.catalog().by_id(id)) {
        return seen(&r.schema, &r.name);
    }
    if let Some(i) = t.indexes().iter().find(|i| i.oid == oid) {
        return t.search_path.contains(&i.table.schema);
    }
    SYSTEM_TABLES.iter().any(|s| i64::from(s.2) == oid && s.0 == "pg_catalog")
}
