//! Functions over the catalogs, as DataFusion functions of one statement.
//!
//! They run row by row: catalogs are small and the functions look things up. Names that begin with
//! `#` are written by [`super::rewrite`] only (casts to `regclass` and the like).

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::{DataType, FieldRef, Int64Type};
use datafusion::common::Result as DfResult;
use datafusion::logical_expr::{
    ColumnarValue, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
    TypeSignature, Volatility,
};
use millrace_common::{SqlError, SqlState};
use millrace_rpc::catalog::RelationKind;

use super::SystemTables;
use super::columns::SYSTEM_TABLES;
use super::objects::{
    ROLES, TYPES, columns, format_type, indexes, namespaces, quote_ident, relkind, system_table,
    type_named,
};
use super::pg::view_text;
use super::rows::{Cell, array, field};
use crate::query::snapshot_table::external;

type Body = fn(&SystemTables, &[Cell]) -> Result<Cell, SqlError>;

struct CatalogFunction {
    name: &'static str,
    /// Kind of the result, as in [`super::rows`].
    kind: char,
    body: Body,
    signature: Signature,
    tables: Arc<SystemTables>,
}

impl fmt::Debug for CatalogFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for CatalogFunction {
    fn eq(&self, other: &CatalogFunction) -> bool {
        self.name == other.name && Arc::ptr_eq(&self.tables, &other.tables)
    }
}

impl Eq for CatalogFunction {}

impl Hash for CatalogFunction {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl ScalarUDFImpl for CatalogFunction {
    fn name(&self) -> &str {
        self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> DfResult<DataType> {
        Ok(field(self.name, self.kind).data_type().clone())
    }

    fn return_field_from_args(&self, _: ReturnFieldArgs) -> DfResult<FieldRef> {
        Ok(Arc::new(field(self.name, self.kind)))
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> DfResult<ColumnarValue> {
        let rows = args.number_rows;
        let columns = args
            .args
            .iter()
            .map(|a| a.to_array(rows).and_then(|a| cells(&a).map_err(external)))
            .collect::<DfResult<Vec<_>>>()?;
        let mut out = Vec::with_capacity(rows);
        let mut row: Vec<Cell> = Vec::with_capacity(columns.len());
        for i in 0..rows {
            row.clear();
            row.extend(columns.iter().map(|c| c[i].clone()));
            out.push((self.body)(&self.tables, &row).map_err(external)?);
        }
        Ok(ColumnarValue::Array(array(self.kind, &out)))
    }
}

/// A column as cells.
fn cells(column: &ArrayRef) -> Result<Vec<Cell>, SqlError> {
    let cast =
        |t: &DataType| arrow::compute::cast(column, t).map_err(crate::dml::rows::arrow_error);
    Ok(match column.data_type() {
        DataType::Null => vec![Cell::Null; column.len()],
        DataType::Boolean => column.as_boolean().iter().map(Cell::from).collect(),
        t if t.is_integer() => {
            cast(&DataType::Int64)?.as_primitive::<Int64Type>().iter().map(Cell::from).collect()
        }
        DataType::List(_) | DataType::LargeList(_) => {
            let item = arrow::datatypes::Field::new("item", DataType::Utf8, true);
            let list = cast(&DataType::List(Arc::new(item)))?;
            let texts = |a: ArrayRef| {
                a.as_string::<i32>().iter().flatten().map(str::to_owned).collect::<Vec<_>>()
            };
            list.as_list::<i32>().iter().map(|v| v.map(texts).into()).collect()
        }
        _ => cast(&DataType::Utf8)?.as_string::<i32>().iter().map(Cell::from).collect(),
    })
}

fn int(args: &[Cell], i: usize) -> Option<i64> {
    match args.get(i) {
        Some(Cell::Int(v)) => Some(*v),
        Some(Cell::Text(t)) => t.trim().parse().ok(),
        _ => None,
    }
}

fn text(args: &[Cell], i: usize) -> Option<&str> {
    match args.get(i) {
        Some(Cell::Text(t)) => Some(t),
        _ => None,
    }
}

/// The function of a name; its description is its body.
pub fn lookup(tables: &Arc<SystemTables>, name: &str) -> Option<Arc<ScalarUDF>> {
    let (name, kind, body) = *FUNCTIONS.iter().find(|f| f.0 == name)?;
    let signature = Signature::one_of(
        vec![TypeSignature::VariadicAny, TypeSignature::Nullary],
        Volatility::Stable,
    );
    let function = CatalogFunction { name, kind, body, signature, tables: tables.clone() };
    Some(Arc::new(ScalarUDF::new_from_impl(function)))
}

const NULL: Body = |_, _| Ok(Cell::Null);
const TRUE: Body = |_, _| Ok(Cell::Bool(true));
const FALSE: Body = |_, _| Ok(Cell::Bool(false));
const VISIBLE: Body = |_, args| Ok(int(args, 0).map(|_| true).into());

static FUNCTIONS: &[(&str, char, Body)] = &[
    ("pg_table_is_visible", 'b', |t, a| Ok(int(a, 0).map(|oid| visible(t, oid)).into())),
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
    ("pg_is_in_recovery", 'b', FALSE),
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
    ("format_type", 't', |_, a| Ok(int(a, 0).map(|oid| format_type(oid, int(a, 1))).into())),
    ("pg_get_userbyid", 'n', |_, a| Ok(int(a, 0).map(user_name).into())),
    ("pg_get_expr", 't', |_, a| Ok(text(a, 0).into())),
    ("pg_get_viewdef", 't', |t, a| {
        let oid = relation_argument(t, a)?;
        Ok(oid.and_then(|oid| view_of(t, oid)).into())
    }),
    ("pg_get_indexdef", 't', |t, a| {
        let index =
            int(a, 0).and_then(|oid| indexes(t.catalog()).into_iter().find(|i| i.oid == oid));
        Ok(index.map(|i| i.definition(int(a, 1).unwrap_or(0))).into())
    }),
    ("pg_get_constraintdef", 't', |t, a| {
        let index = int(a, 0)
            .and_then(|oid| indexes(t.catalog()).into_iter().find(|i| i.oid == oid && i.primary));
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
    ("pg_encoding_to_char", 'n', |_, a| {
        Ok(int(a, 0).map(|e| if e == 6 { "UTF8" } else { "" }).into())
    }),
    ("pg_char_to_encoding", 'd', |_, a| {
        Ok(text(a, 0)
            .map(|e| if e.replace('-', "").eq_ignore_ascii_case("utf8") { 6i64 } else { -1 })
            .into())
    }),
    ("pg_client_encoding", 'n', |_, _| Ok("UTF8".into())),
    ("getdatabaseencoding", 'n', |_, _| Ok("UTF8".into())),
    ("current_schema", 'n', |t, _| Ok(schemas(t, false).into_iter().next().into())),
    ("current_schemas", 'a', |t, a| Ok(schemas(t, a.first() == Some(&Cell::Bool(true))).into())),
    ("current_setting", 't', |t, a| match (text(a, 0), a.get(1)) {
        (None, _) => Ok(Cell::Null),
        (Some(name), missing) => match t.settings.get(name) {
            Ok(value) => Ok(value.into()),
            Err(_) if missing == Some(&Cell::Bool(true)) => Ok(Cell::Null),
            Err(e) => Err(e),
        },
    }),
    ("version", 't', |t, _| {
        let pg = t.settings.get("server_version").unwrap_or_default();
        Ok(format!(
            "PostgreSQL {pg} (Millrace {}), compiled by rustc, 64-bit",
            env!("CARGO_PKG_VERSION")
        )
        .into())
    }),
    ("pg_backend_pid", 'd', |t, _| Ok(t.pid.into())),
    ("pg_size_pretty", 't', |_, a| Ok(int(a, 0).map(size_pretty).into())),
    ("pg_relation_size", 'i', |t, a| size_of(t, a, Size::Rows)),
    ("pg_table_size", 'i', |t, a| size_of(t, a, Size::Rows)),
    ("pg_indexes_size", 'i', |t, a| size_of(t, a, Size::Indexes)),
    ("pg_total_relation_size", 'i', |t, a| size_of(t, a, Size::All)),
    ("pg_database_size", 'i', |t, a| {
        let all = || t.shared.cluster.jobs().iter().map(|j| j.state_bytes()).sum::<u64>() as i64;
        Ok(a.first().filter(|c| **c != Cell::Null).map(|_| all()).into())
    }),
    ("pg_cancel_backend", 'b', |t, a| Ok(int(a, 0).map(|pid| t.shared.cancel_pid(pid)).into())),
    ("txid_current", 'i', |t, _| Ok((t.shared.next_statement().number as i64).into())),
    ("txid_current_if_assigned", 'i', NULL),
    ("pg_my_temp_schema", 'o', |_, _| Ok(0i64.into())),
    ("inet_server_addr", 't', |_, _| Ok("127.0.0.1".into())),
    ("inet_client_addr", 't', |_, _| Ok("127.0.0.1".into())),
    ("inet_server_port", 'd', NULL),
    ("inet_client_port", 'd', NULL),
    ("pg_advisory_unlock_all", 't', |_, _| Ok("".into())),
    // It is a statement of its own that waits; here is only its type.
    ("pg_sleep", 't', |_, _| Err(SqlError::unsupported("pg_sleep within a query"))),
    ("set_config", 't', |_, _| {
        Err(SqlError::unsupported("set_config within a query")
            .with_hint("SELECT set_config(name, value, is_local) by itself sets it; so does SET."))
    }),
    ("quote_ident", 't', |_, a| Ok(text(a, 0).map(quote_ident).into())),
    ("quote_literal", 't', |_, a| Ok(text(a, 0).map(quote_literal).into())),
    ("quote_nullable", 't', |_, a| Ok(text(a, 0).map_or("NULL".to_owned(), quote_literal).into())),
    ("to_regclass", 'o', |t, a| Ok(text(a, 0).and_then(|n| relation_oid(t, n)).into())),
    ("to_regtype", 'o', |_, a| Ok(text(a, 0).and_then(type_oid).into())),
    ("to_regnamespace", 'o', |t, a| Ok(text(a, 0).and_then(|n| schema_oid(t, n)).into())),
    ("to_regrole", 'o', |_, a| Ok(text(a, 0).and_then(role_oid).into())),
    ("#oid", 'o', |_, a| Ok(int(a, 0).into())),
    ("#regclass_in", 'o', |t, a| {
        known(relation_oid(t, text(a, 0).unwrap_or_default()), "relation", a)
    }),
    ("#regtype_in", 'o', |_, a| known(type_oid(text(a, 0).unwrap_or_default()), "type", a)),
    ("#regnamespace_in", 'o', |t, a| {
        known(schema_oid(t, text(a, 0).unwrap_or_default()), "schema", a)
    }),
    ("#regrole_in", 'o', |_, a| known(role_oid(text(a, 0).unwrap_or_default()), "role", a)),
    ("#regproc_in", 'o', |_, a| known(None, "function", a)),
    ("#regclass_out", 't', |t, a| Ok(int(a, 0).map(|oid| relation_name(t, oid)).into())),
    ("#regtype_out", 't', |_, a| Ok(int(a, 0).map(|oid| format_type(oid, None)).into())),
    ("#regnamespace_out", 't', |t, a| {
        let name = |oid: i64| {
            let found = namespaces(t.catalog()).into_iter().find(|n| n.0 == oid);
            found.map_or_else(|| oid.to_string(), |n| quote_ident(&n.1))
        };
        Ok(int(a, 0).map(name).into())
    }),
    ("#regrole_out", 't', |_, a| Ok(int(a, 0).map(user_name).into())),
    ("#regproc_out", 't', |_, a| {
        let name = |oid: i64| match oid {
            0 => "-".to_owned(),
            750 => "array_in".to_owned(),
            751 => "array_out".to_owned(),
            3 => "heap_tableam_handler".to_owned(),
            330 => "bthandler".to_owned(),
            oid => oid.to_string(),
        };
        Ok(int(a, 0).map(name).into())
    }),
    ("#any_eq", 'b', |_, a| Ok(any_eq(a).into())),
    ("#vector_get", 'i', |_, a| {
        let Some(Cell::Texts(v)) = a.first() else { return Ok(Cell::Null) };
        let at = int(a, 1).and_then(|i| usize::try_from(i).ok());
        Ok(at.and_then(|i| v.get(i)).and_then(|s| s.parse::<i64>().ok()).into())
    }),
    ("#no_texts", 'a', |_, _| Ok(Cell::Texts(vec![]))),
    ("#options", 'a', |_, a| {
        let Some(Cell::Texts(options)) = a.first() else { return Ok(Cell::Texts(vec![])) };
        let shown = |o: &String| {
            let (name, value) = o.split_once('=').unwrap_or((o, ""));
            format!("{} {}", quote_ident(name), quote_literal(value))
        };
        Ok(Cell::Texts(options.iter().map(shown).collect()))
    }),
];

/// A value of `reg…` input that must exist.
fn known(oid: Option<i64>, what: &str, args: &[Cell]) -> Result<Cell, SqlError> {
    match (oid, text(args, 0)) {
        (Some(oid), _) => Ok(oid.into()),
        (None, None) => Ok(int(args, 0).into()),
        (None, Some(name)) => {
            let state = match what {
                "relation" => SqlState::UNDEFINED_TABLE,
                "schema" => SqlState::INVALID_SCHEMA_NAME,
                _ => SqlState::UNDEFINED_OBJECT,
            };
            Err(SqlError::new(state, format!("{what} \"{name}\" does not exist")))
        }
    }
}

fn user_name(oid: i64) -> String {
    ROLES
        .iter()
        .find(|r| r.0 == oid)
        .map_or_else(|| format!("unknown (OID={oid})"), |r| r.1.to_owned())
}

fn role_oid(name: &str) -> Option<i64> {
    ROLES.iter().find(|r| r.1 == name).map(|r| r.0)
}

fn schema_oid(t: &SystemTables, name: &str) -> Option<i64> {
    namespaces(t.catalog()).into_iter().find(|n| n.1 == name).map(|n| n.0)
}

fn type_oid(name: &str) -> Option<i64> {
    if let Ok(oid) = name.parse::<i64>() {
        return Some(oid);
    }
    let name = name.trim().to_lowercase();
    let name = name.strip_prefix("pg_catalog.").unwrap_or(&name);
    match name.strip_suffix("[]") {
        Some(item) => type_named(item).map(|t| t.4),
        None => {
            let plain = name.split('(').next().unwrap_or(name).trim();
            let array = || TYPES.iter().find(|t| name.strip_prefix('_') == Some(t.1)).map(|t| t.4);
            type_named(plain).map(|t| t.0).or_else(array)
        }
    }
}

/// The parts of a written name, folded.
fn name_parts(name: &str) -> Vec<String> {
    let (mut parts, mut quoted) = (vec![String::new()], false);
    for c in name.trim().chars() {
        match c {
            '"' => quoted = !quoted,
            '.' if !quoted => parts.push(String::new()),
            c => {
                if let Some(part) = parts.last_mut() {
                    if quoted { part.push(c) } else { part.extend(c.to_lowercase()) }
                }
            }
        }
    }
    parts
}

fn relation_oid(t: &SystemTables, name: &str) -> Option<i64> {
    if let Ok(oid) = name.trim().parse::<i64>() {
        return Some(oid);
    }
    let parts = name_parts(name);
    let (schema, name) = match parts.as_slice() {
        [name] => (None, name.as_str()),
        [schema, name] | [_, schema, name] => (Some(schema.as_str()), name.as_str()),
        _ => return None,
    };
    let indexes = indexes(t.catalog());
    let in_schema = |schema: &str| {
        let relation = t.catalog().get(schema, name).map(|r| i64::from(r.id));
        let index =
            || indexes.iter().find(|i| i.name == name && i.table.schema == schema).map(|i| i.oid);
        let system = || system_table(schema, name).map(|s| i64::from(s.2));
        relation.or_else(index).or_else(system)
    };
    match schema {
        Some(schema) => in_schema(schema),
        None => in_schema("pg_catalog").or_else(|| t.search_path.iter().find_map(|s| in_schema(s))),
    }
}

/// A relation's name, with its schema where that is not searched.
fn relation_name(t: &SystemTables, oid: i64) -> String {
    let shown = |schema: &str, name: &str| {
        if t.search_path.iter().any(|s| s == schema) || schema == "pg_catalog" {
            quote_ident(name)
        } else {
            format!("{}.{}", quote_ident(schema), quote_ident(name))
        }
    };
    if let Some(r) = u32::try_from(oid).ok().and_then(|id| t.catalog().by_id(id)) {
        return shown(&r.schema, &r.name);
    }
    if let Some(i) = indexes(t.catalog()).iter().find(|i| i.oid == oid) {
        return shown(&i.table.schema, &i.name);
    }
    match SYSTEM_TABLES.iter().find(|s| i64::from(s.2) == oid) {
        Some(s) => shown(s.0, s.1),
        None if oid == 0 => "-".to_owned(),
        None => oid.to_string(),
    }
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
    if let Some(i) = indexes(t.catalog()).iter().find(|i| i.oid == oid) {
        return t.search_path.contains(&i.table.schema);
    }
    SYSTEM_TABLES.iter().any(|s| i64::from(s.2) == oid && s.0 == "pg_catalog")
}

/// What of a relation is measured.
#[derive(Clone, Copy, PartialEq)]
enum Size {
    Rows,
    Indexes,
    All,
}

/// Bytes of a relation, in memory and in the store; NULL for one that does not exist.
fn size_of(t: &SystemTables, args: &[Cell], what: Size) -> Result<Cell, SqlError> {
    let Some(oid) = relation_argument(t, args)? else { return Ok(Cell::Null) };
    let Some(relation) = u32::try_from(oid).ok().and_then(|id| t.catalog().by_id(id)) else {
        return Ok(Cell::Null);
    };
    let index = |id: u32| {
        let found = t.catalog().by_id(id);
        found.is_some_and(|r| {
            r.kind == RelationKind::Index as i32 && r.depends_on.contains(&relation.id)
        })
    };
    let mut bytes = 0;
    for job in t.shared.cluster.jobs() {
        if job.relation == relation.id {
            bytes += match what {
                Size::Rows => {
                    let own = job.tables.iter().filter(|t| t.id == relation.first_table_id);
                    own.map(|t| t.bytes()).sum()
                }
                Size::Indexes => 0,
                Size::All => job.state_bytes(),
            };
        } else if what != Size::Rows && index(job.relation) {
            bytes += job.state_bytes();
        }
    }
    Ok((bytes as i64).into())
}

/// An argument that is an OID or a name.
fn relation_argument(t: &SystemTables, args: &[Cell]) -> Result<Option<i64>, SqlError> {
    match args.first() {
        Some(Cell::Text(name)) => match relation_oid(t, name) {
            Some(oid) => Ok(Some(oid)),
            None => Err(SqlError::new(
                SqlState::UNDEFINED_TABLE,
                format!("relation \"{name}\" does not exist"),
            )),
        },
        _ => Ok(int(args, 0)),
    }
}

fn view_of(t: &SystemTables, oid: i64) -> Option<String> {
    let r = t.catalog().by_id(u32::try_from(oid).ok()?)?;
    let view = matches!(relkind(r), "v" | "m") && columns(r).next().is_some();
    view.then(|| view_text(r))
}

fn schemas(t: &SystemTables, implicit: bool) -> Vec<String> {
    let exists = |s: &&String| t.catalog().schemas.contains(s) || s.as_str() == "pg_catalog";
    let named = t.search_path.iter().filter(exists).cloned();
    let system = implicit && !t.search_path.iter().any(|s| s == "pg_catalog");
    system.then(|| "pg_catalog".to_owned()).into_iter().chain(named).collect()
}

/// `left = ANY (array)` by the values' text; an array may be text in braces.
fn any_eq(args: &[Cell]) -> Option<bool> {
    let left = match args.first()? {
        Cell::Null | Cell::Ints(_) | Cell::Texts(_) => return None,
        Cell::Bool(b) => (if *b { "true" } else { "false" }).to_owned(),
        Cell::Int(i) => i.to_string(),
        Cell::Text(t) => t.clone(),
    };
    match args.get(1)? {
        Cell::Texts(v) => Some(v.contains(&left)),
        Cell::Text(t) => {
            Some(crate::encoding::array::array_items(t)?.into_iter().flatten().any(|i| i == left))
        }
        _ => None,
    }
}

pub fn quote_literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if quoted.contains('\\') {
        format!("E'{}'", quoted.replace('\\', "\\\\"))
    } else {
        format!("'{quoted}'")
    }
}

/// PostgreSQL's rounding: a unit is used up to ten thousand of it. Beyond bytes twice the size is
/// kept, so that the half can be rounded.
fn size_pretty(bytes: i64) -> String {
    if bytes.unsigned_abs() < 10 * 1024 {
        return format!("{bytes} bytes");
    }
    let mut twice = bytes / 512;
    for unit in ["kB", "MB", "GB", "TB"] {
        if twice.unsigned_abs() < 20 * 1024 - 1 {
            return format!("{} {unit}", (twice + twice.signum()) / 2);
        }
        twice /= 1024;
    }
    format!("{} PB", (twice + twice.signum()) / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_printed_as_postgresql_does() {
        let shown = |n| size_pretty(n);
        assert_eq!(shown(0), "0 bytes");
        assert_eq!(shown(10_239), "10239 bytes");
        assert_eq!(shown(10_240), "10 kB");
        assert_eq!(shown(1_048_576), "1024 kB");
        assert_eq!(shown(10_485_760), "10 MB");
        assert_eq!(shown(-20_480), "-20 kB");
    }

    #[test]
    fn names_are_folded_and_quoted() {
        assert_eq!(name_parts("Public.\"My.Table\""), ["public", "My.Table"]);
        assert_eq!(quote_ident("select"), "\"select\"");
        assert_eq!(quote_ident("my_table1"), "my_table1");
        assert_eq!(quote_ident("Mixed"), "\"Mixed\"");
    }

    #[test]
    fn types_are_found_by_every_spelling() {
        assert_eq!(type_oid("integer[]"), Some(1007));
        assert_eq!(type_oid("_int4"), Some(1007));
        assert_eq!(type_oid("character varying(3)"), Some(1043));
        assert_eq!(type_oid("hstore"), None);
    }
}
