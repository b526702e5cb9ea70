//! The system column `tableoid`: the OID of the table that a row is from.
//!
//! All rows of a table of ours have the same, so a query that names it gets the number. Tables of users that are
//! joined do not have it: for a row that an outer join makes up it would be NULL. What a WITH defines or a FROM
//! computes has none, and a name that stands for it is no table's.

use sqlparser::ast::*;

use super::columns::SYSTEM_TABLES;
use super::objects::system_table;
use super::rewrite::call;
use crate::cluster::CatalogSnapshot;
use crate::dml::rows::table_in_hand;
use crate::query::SessionCatalog;
use crate::query::catalog_view::fold;

const NAME: &str = "tableoid";

/// What is in one FROM: the names it goes by, and the OIDs of what has them.
pub(super) type Scope = Vec<(String, Option<i64>)>;

/// What the names of a FROM stand for.
pub(super) struct Tables<'a> {
    pub catalog: &'a CatalogSnapshot,
    pub search_path: &'a [String],
}

/// The queries under way, and what their WITHs define. A query of a WITH sees those before it.
#[derive(Default)]
pub(super) struct Defined(Vec<Names>);

struct Names {
    names: Vec<String>,
    /// How many may be named where the walk is.
    seen: usize,
}

impl Defined {
    /// The walk comes to a query.
    pub fn enter(&mut self, query: &Query) {
        let with = query.with.as_ref();
        let names: Vec<String> =
            with.into_iter().flat_map(|w| &w.cte_tables).map(|c| fold(&c.alias.name)).collect();
        let seen = if with.is_some_and(|w| w.recursive) { names.len() } else { 0 };
        self.0.push(Names { names, seen });
    }

    /// The walk leaves a query: the one around it has one more definition behind it, as long as there are any.
    pub fn leave(&mut self) {
        self.0.pop();
        if let Some(around) = self.0.last_mut() {
            around.seen = (around.seen + 1).min(around.names.len());
        }
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|with| with.names[..with.seen].iter().any(|n| n == name))
    }
}

impl Tables<'_> {
    /// What is in the FROM of a SELECT.
    pub fn scope(&self, select: &Select, defined: &Defined) -> Scope {
        let alone = matches!(select.from.as_slice(), [only] if only.joins.is_empty());
        let mut found = Scope::new();
        for table in &select.from {
            self.note(table, alone, defined, &mut found);
        }
        found
    }

    fn note(&self, table: &TableWithJoins, alone: bool, defined: &Defined, found: &mut Scope) {
        let joined = table.joins.iter().map(|j| &j.relation);
        for factor in std::iter::once(&table.relation).chain(joined) {
            match factor {
                TableFactor::NestedJoin { table_with_joins, alias: None } => {
                    self.note(table_with_joins, false, defined, found);
                }
                TableFactor::Table { name, alias, args: None, .. } => {
                    let Ok((schema, table)) = SessionCatalog::split_name(name) else { continue };
                    let own = schema.is_some() || !defined.has(&table);
                    let oid = if own { self.oid(schema.as_deref(), &table, alone) } else { None };
                    found.push((alias.as_ref().map_or(table, |a| fold(&a.name)), oid));
                }
                TableFactor::Table { alias, .. }
                | TableFactor::Derived { alias, .. }
                | TableFactor::TableFunction { alias, .. }
                | TableFactor::Function { alias, .. }
                | TableFactor::UNNEST { alias, .. }
                | TableFactor::NestedJoin { alias, .. } => {
                    found.push((alias.as_ref().map_or(String::new(), |a| fold(&a.name)), None));
                }
                _ => found.push((String::new(), None)),
            }
        }
    }

    fn oid(&self, schema: Option<&str>, name: &str, alone: bool) -> Option<i64> {
        let user = match schema {
            Some(schema) => self.catalog.get(schema, name),
            None => match table_in_hand(name) {
                Some(id) => self.catalog.by_id(id),
                None => self.search_path.iter().find_map(|s| self.catalog.get(s, name)),
            },
        };
        match user {
            // A column of the user's own goes before.
            Some(r) if !alone || r.columns.iter().any(|c| c.name == NAME) => None,
            Some(r) => Some(i64::from(r.id)),
            None => system_table(schema.unwrap_or("pg_catalog"), name).map(|s| i64::from(s.2)),
        }
    }
}

fn is_named(e: &Expr) -> bool {
    let last = match e {
        Expr::Identifier(i) => Some(i),
        Expr::CompoundIdentifier(parts) => parts.last(),
        _ => None,
    };
    last.is_some_and(|i| i.quote_style.is_none() && fold(i) == NAME)
}

/// The number behind `tableoid` or `t.tableoid`; the innermost scope is the last.
pub(super) fn value(e: &Expr, scopes: &[Scope]) -> Option<Expr> {
    if !is_named(e) {
        return None;
    }
    let oid = match e {
        Expr::CompoundIdentifier(parts) => {
            let [.., table, _] = parts.as_slice() else { return None };
            let table = fold(table);
            // The first that goes by the name hides those further out.
            scopes.iter().rev().find_map(|s| s.iter().find(|(name, _)| *name == table))?.1?
        }
        _ => match scopes.last()?.as_slice() {
            [(_, Some(oid))] => *oid,
            _ => return None,
        },
    };
    let number = Expr::value(Value::Number(oid.to_string(), false));
    Some(call("#oid", [number]))
}

/// Whether an expression is a column of a system table that names a function (`regproc`).
pub(super) fn is_procedure(e: &Expr, scopes: &[Scope]) -> bool {
    let has = |oid: i64, column: &str| {
        let table = SYSTEM_TABLES.iter().find(|s| i64::from(s.2) == oid);
        table.is_some_and(|s| s.4.split_whitespace().any(|c| c.strip_suffix(":r") == Some(column)))
    };
    match e {
        Expr::Nested(e) => is_procedure(e, scopes),
        Expr::CompoundIdentifier(parts) => {
            let [.., table, column] = parts.as_slice() else { return false };
            let table = fold(table);
            let found = scopes.iter().rev().flatten().find(|(name, _)| *name == table);
            found.and_then(|(_, oid)| *oid).is_some_and(|oid| has(oid, &fold(column)))
        }
        Expr::Identifier(column) => {
            let column = fold(column);
            scopes.iter().rev().flatten().any(|(_, oid)| oid.is_some_and(|oid| has(oid, &column)))
        }
        _ => false,
    }
}
