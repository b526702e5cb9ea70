//! WITH before INSERT, UPDATE and DELETE. What follows sees statements without it: an INSERT's source takes the queries
//! in, and where an UPDATE or DELETE names one of them stands a subquery that has them all. A WITH that changes rows
//! itself stays: such a statement is run in parts.

use std::ops::ControlFlow;

use sqlparser::ast::*;

use super::parse_query;
use crate::parser::walk;

/// Whether a query is INSERT, UPDATE, DELETE or MERGE, as it may be in WITH.
pub fn changes_rows(query: &Query) -> bool {
    matches!(
        query.body.as_ref(),
        SetExpr::Insert(_) | SetExpr::Update(_) | SetExpr::Delete(_) | SetExpr::Merge(_)
    )
}

/// Whether the WITH of a query changes rows.
pub fn with_changes_rows(query: &Query) -> bool {
    query.with.iter().flat_map(|w| &w.cte_tables).any(|cte| changes_rows(&cte.query))
}

/// The statement without a WITH before it.
pub fn take_in(statement: Statement) -> Statement {
    let mut query = match statement {
        Statement::Query(query) => query,
        Statement::Prepare { name, data_types, statement } => {
            let statement = Box::new(take_in(*statement));
            return Statement::Prepare { name, data_types, statement };
        }
        other => return other,
    };
    if with_changes_rows(&query) {
        return Statement::Query(query);
    }
    let with = match *query.body {
        SetExpr::Insert(_) | SetExpr::Update(_) | SetExpr::Delete(_) => query.with.take(),
        _ => return Statement::Query(query),
    };
    let mut named = Named { with, hidden: Vec::new() };
    match *query.body {
        SetExpr::Insert(Statement::Insert(mut insert)) => {
            let _ = walk::visit_mut(&mut insert.on, &mut named);
            let _ = walk::visit_mut(&mut insert.returning, &mut named);
            if let (Some(mut with), Some(source)) = (named.with, &mut insert.source) {
                if let Some(inner) = source.with.take() {
                    with.recursive |= inner.recursive;
                    with.cte_tables.extend(inner.cte_tables);
                }
                source.with = Some(with);
            }
            Statement::Insert(insert)
        }
        SetExpr::Update(Statement::Update(mut update)) => {
            // The table that is changed is never one of them.
            let table = update.table.relation.clone();
            let _ = walk::visit_mut(&mut update, &mut named);
            update.table.relation = table;
            Statement::Update(update)
        }
        SetExpr::Delete(Statement::Delete(mut delete)) => {
            let from = delete.from.clone();
            let _ = walk::visit_mut(&mut delete, &mut named);
            delete.from = from;
            Statement::Delete(delete)
        }
        SetExpr::Insert(other) | SetExpr::Update(other) | SetExpr::Delete(other) => other,
        _ => Statement::Query(query),
    }
}

/// Puts the queries of a WITH where they are named.
struct Named {
    with: Option<With>,
    /// What the queries that the visitor is in call by their own WITH.
    hidden: Vec<Vec<String>>,
}

fn folded(name: &Ident) -> String {
    crate::bind::names::fold(name)
}

impl Named {
    fn subquery(&self, name: &ObjectName) -> Option<Box<Query>> {
        let [part] = name.0.as_slice() else { return None };
        let name = part.as_ident()?;
        let with = self.with.as_ref()?;
        let known = with.cte_tables.iter().any(|c| folded(&c.alias.name) == folded(name));
        if !known || self.hidden.iter().flatten().any(|h| *h == folded(name)) {
            return None;
        }
        let mut query = parse_query("SELECT * FROM t").ok()?;
        if let SetExpr::Select(select) = query.body.as_mut()
            && let Some(TableFactor::Table { name: table, .. }) =
                select.from.first_mut().map(|f| &mut f.relation)
        {
            *table = ObjectName::from(vec![name.clone()]);
        }
        query.with = Some(with.clone());
        Some(query)
    }
}

impl VisitorMut for Named {
    type Break = ();

    fn pre_visit_query(&mut self, query: &mut Query) -> ControlFlow<()> {
        let own = query.with.iter().flat_map(|w| &w.cte_tables);
        self.hidden.push(own.map(|c| folded(&c.alias.name)).collect());
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, _: &mut Query) -> ControlFlow<()> {
        self.hidden.pop();
        ControlFlow::Continue(())
    }

    fn post_visit_table_factor(&mut self, factor: &mut TableFactor) -> ControlFlow<()> {
        if let TableFactor::Table { name, alias, args: None, .. } = factor
            && let Some(subquery) = self.subquery(name)
        {
            let alias = alias.take().or_else(|| {
                let name = name.0.first()?.as_ident()?.clone();
                Some(TableAlias { explicit: true, name, columns: Vec::new(), at: None })
            });
            *factor = TableFactor::Derived { lateral: false, subquery, alias, sample: None };
        }
        ControlFlow::Continue(())
    }
}
