//! Objects by name and names by OID: `regclass` and its like.

use millrace_common::{SqlError, SqlState};

use super::{Body, Entry, int, text};
use crate::catalog::SystemTables;
use crate::catalog::columns::SYSTEM_TABLES;
use crate::catalog::objects::{
    TYPES, format_type, namespaces, quote_ident, system_table, type_named,
};
use crate::catalog::procedures::{procedure_name, procedure_named};
use crate::catalog::rows::Cell;

pub(super) const FUNCTIONS: &[Entry] = &[
    ("format_type", 't', |_, a| {
        let digits = int(a, 1)?;
        Ok(int(a, 0)?.map(|oid| format_type(oid, digits)).into())
    }),
    ("pg_get_userbyid", 'n', |t, a| Ok(int(a, 0)?.map(|oid| user_name(t, oid)).into())),
    ("to_regclass", 'o', |t, a| Ok(text(a, 0).and_then(|n| relation_oid(t, n)).into())),
    ("to_regtype", 'o', |_, a| Ok(text(a, 0).and_then(type_oid).into())),
    ("to_regnamespace", 'o', |t, a| Ok(text(a, 0).and_then(|n| schema_oid(t, n)).into())),
    ("to_regrole", 'o', |t, a| Ok(text(a, 0).and_then(|n| role_oid(t, n)).into())),
    ("to_regproc", 'o', |_, a| Ok(text(a, 0).and_then(procedure_oid).into())),
    ("to_regprocedure", 'o', |_, a| Ok(text(a, 0).and_then(procedure_oid).into())),
    ("#oid", 'o', |_, a| Ok(int(a, 0)?.into())),
    ("#regclass_in", 'o', |t, a| {
        known(relation_oid(t, text(a, 0).unwrap_or_default()), "relation", a)
    }),
    ("#regtype_in", 'o', |_, a| known(type_oid(text(a, 0).unwrap_or_default()), "type", a)),
    ("#regnamespace_in", 'o', |t, a| {
        known(schema_oid(t, text(a, 0).unwrap_or_default()), "schema", a)
    }),
    ("#regrole_in", 'o', |t, a| known(role_oid(t, text(a, 0).unwrap_or_default()), "role", a)),
    ("#regproc_in", 'o', |_, a| {
        known(procedure_oid(text(a, 0).unwrap_or_default()), "function", a)
    }),
    ("#regclass_out", 't', |t, a| {
        let oid = told(a, "relation", |name| relation_oid(t, name))?;
        Ok(oid.map(|oid| relation_name(t, oid)).into())
    }),
    ("#regtype_out", 't', |_, a| {
        Ok(told(a, "type", type_oid)?.map(|oid| format_type(oid, None)).into())
    }),
    ("#regnamespace_out", 't', |t, a| {
        let name = |oid: i64| {
            let found = namespaces(t.catalog()).into_iter().find(|n| n.0 == oid);
            found.map_or_else(|| oid.to_string(), |n| quote_ident(&n.1))
        };
        let oid = told(a, "schema", |name| number(name).or_else(|| schema_oid(t, name)))?;
        Ok(oid.map(name).into())
    }),
    ("#regrole_out", 't', |t, a| {
        let oid = told(a, "role", |name| number(name).or_else(|| role_oid(t, name)))?;
        Ok(oid.map(|oid| user_name(t, oid)).into())
    }),
    ("#regprocedure_in", 'o', |_, a| {
        known(procedure_oid(text(a, 0).unwrap_or_default()), "function", a)
    }),
    ("#regoper_in", 'o', |_, a| known(number(text(a, 0).unwrap_or_default()), "operator", a)),
    ("#regoperator_in", 'o', |_, a| known(number(text(a, 0).unwrap_or_default()), "operator", a)),
    ("#regproc_out", 't', PROCEDURE_OUT),
    ("#regprocedure_out", 't', PROCEDURE_OUT),
    ("#regoper_out", 't', OPERATOR_OUT),
    ("#regoperator_out", 't', OPERATOR_OUT),
];

const PROCEDURE_OUT: Body =
    |_, a| Ok(told(a, "function", procedure_oid)?.map(procedure_name).into());
const OPERATOR_OUT: Body = |_, a| Ok(told(a, "operator", number)?.map(operator_name).into());

/// The OID that is to be shown as a name: a number, or what a text stands for.
fn told(
    args: &[Cell],
    what: &str,
    find: impl Fn(&str) -> Option<i64>,
) -> Result<Option<i64>, SqlError> {
    match text(args, 0) {
        None => int(args, 0),
        Some(name) => match known(find(name), what, args)? {
            Cell::Int(oid) => Ok(Some(oid)),
            _ => Ok(None),
        },
    }
}

/// The OID that a text is itself.
fn number(text: &str) -> Option<i64> {
    text.trim().parse().ok()
}

/// With or without the types of its arguments.
fn procedure_oid(name: &str) -> Option<i64> {
    let plain = name.split('(').next().unwrap_or(name).trim();
    let plain = plain.strip_prefix("pg_catalog.").unwrap_or(plain);
    procedure_named(plain).or_else(|| number(plain))
}

/// Operators are not listed: each is its number.
fn operator_name(oid: i64) -> String {
    oid.to_string()
}

/// A value of `reg…` input that must exist.
fn known(oid: Option<i64>, what: &str, args: &[Cell]) -> Result<Cell, SqlError> {
    match (oid, text(args, 0)) {
        (Some(oid), _) => Ok(oid.into()),
        (None, None) => Ok(int(args, 0)?.into()),
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

fn user_name(t: &SystemTables, oid: i64) -> String {
    let found = t.roles().into_iter().find(|r| r.0 == oid);
    found.map_or_else(|| format!("unknown (OID={oid})"), |r| r.1)
}

fn role_oid(t: &SystemTables, name: &str) -> Option<i64> {
    t.roles().into_iter().find(|r| r.1 == name).map(|r| r.0)
}

fn schema_oid(t: &SystemTables, name: &str) -> Option<i64> {
    namespaces(t.catalog()).into_iter().find(|n| n.1 == name).map(|n| n.0)
}

/// Types that no column has, by which psql sorts functions.
const PSEUDO_TYPES: [(i64, &str); 4] =
    [(2249, "record"), (2278, "void"), (2279, "trigger"), (3838, "event_trigger")];

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
            let pseudo = || PSEUDO_TYPES.iter().find(|t| t.1 == name).map(|t| t.0);
            type_named(plain).map(|t| t.0).or_else(array).or_else(pseudo)
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
    let indexes = t.indexes();
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
    if let Some(i) = t.indexes().iter().find(|i| i.oid == oid) {
        return shown(&i.table.schema, &i.name);
    }
    match SYSTEM_TABLES.iter().find(|s| i64::from(s.2) == oid) {
        Some(s) => shown(s.0, s.1),
        None if oid == 0 => "-".to_owned(),
        None => oid.to_string(),
    }
}

/// An argument that is an OID or a name.
pub(super) fn relation_argument(t: &SystemTables, args: &[Cell]) -> Result<Option<i64>, SqlError> {
    match args.first() {
        Some(Cell::Text(name)) => match relation_oid(t, name) {
            Some(oid) => Ok(Some(oid)),
            None => Err(SqlError::new(
                SqlState::UNDEFINED_TABLE,
                format!("relation \"{name}\" does not exist"),
            )),
        },
        _ => int(args, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
