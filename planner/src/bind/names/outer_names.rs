//! `customer.id` in a subquery over a table that has a column `customer`, where the outer query reads a
//! table of that name.
//!
//! PostgreSQL looks for a table first, in all enclosing queries. DataFusion takes the name for the column
//! and `id` for a field of it. Columns have no fields here, so a query in which this happened is planned
//! again with other names for the tables that are called so.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Mutex;

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;

use super::output_names::{fold, table_alias};
use crate::parser::walk;

/// Names before a dot that were taken for columns.
#[derive(Debug, Default)]
pub struct TakenForColumns {
    names: Mutex<BTreeSet<String>>,
}

impl TakenForColumns {
    pub fn note(&self, name: &str) {
        self.names.lock().unwrap_or_else(|e| e.into_inner()).insert(name.to_owned());
    }

    pub fn take(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.names.lock().unwrap_or_else(|e| e.into_inner()))
    }
}

/// Gives the tables of a query that are called so other names, where they are named too. An error if no
/// table is called so.
pub fn rename(query: &mut Query, names: &BTreeSet<String>) -> Result<(), SqlError> {
    let mut rename = Rename { names, found: BTreeSet::new() };
    let _ = walk::visit_mut(query, &mut rename);
    match names.iter().find(|n| !rename.found.contains(*n)) {
        Some(name) => {
            let message = format!("missing FROM-clause entry for table \"{name}\"");
            Err(SqlError::new(SqlState::UNDEFINED_TABLE, message))
        }
        None => Ok(()),
    }
}

struct Rename<'a> {
    names: &'a BTreeSet<String>,
    found: BTreeSet<String>,
}

impl Rename<'_> {
    /// The first part of a name with more than one, if it is a table's to be renamed.
    fn renamed(&self, name: &Ident) -> Option<Ident> {
        let name = fold(name);
        self.names.contains(&name).then(|| table_alias(&name))
    }
}

impl VisitorMut for Rename<'_> {
    type Break = ();

    fn pre_visit_table_factor(&mut self, factor: &mut TableFactor) -> ControlFlow<()> {
        let (own, alias) = match factor {
            TableFactor::Table { name, alias, .. } => {
                (name.0.last().and_then(|p| p.as_ident()).cloned(), alias)
            }
            TableFactor::Derived { alias, .. }
            | TableFactor::Function { alias, .. }
            | TableFactor::UNNEST { alias, .. } => (None, alias),
            _ => return ControlFlow::Continue(()),
        };
        let Some(called) = alias.as_ref().map(|a| a.name.clone()).or(own) else {
            return ControlFlow::Continue(());
        };
        if let Some(name) = self.renamed(&called) {
            self.found.insert(fold(&called));
            match alias {
                Some(alias) => alias.name = name,
                None => {
                    let columns = Vec::new();
                    *alias = Some(TableAlias { explicit: true, name, columns, at: None });
                }
            }
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_select(&mut self, select: &mut Select) -> ControlFlow<()> {
        for item in &mut select.projection {
            if let SelectItem::QualifiedWildcard(
                SelectItemQualifiedWildcardKind::ObjectName(table),
                _,
            ) = item
                && let [ObjectNamePart::Identifier(name)] = table.0.as_mut_slice()
                && let Some(new) = self.renamed(name)
            {
                *name = new;
            }
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_expr(&mut self, e: &mut Expr) -> ControlFlow<()> {
        if let Expr::CompoundIdentifier(parts) = e
            && let [table, _] = parts.as_mut_slice()
            && let Some(new) = self.renamed(table)
        {
            *table = new;
        }
        ControlFlow::Continue(())
    }
}
