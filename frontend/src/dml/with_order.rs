//! Which queries of a WITH are named where.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use sqlparser::ast::{Query, SetExpr, Statement as Sql, TableFactor, Visitor};

use crate::query::catalog_view::fold;
use millrace_planner::parser::walk;

/// The queries of a WITH that a part of the statement names.
pub struct Named {
    /// How often each is named; what an inner query of the same name takes away counts, too.
    pub counts: Vec<usize>,
    /// Those that are named where no inner query has the name.
    pub certain: BTreeSet<usize>,
}

/// What a query, or a statement that changes rows, names of queries with these names.
pub fn named(query: &Query, names: &[String]) -> Named {
    let none = Named { counts: vec![0; names.len()], certain: BTreeSet::new() };
    let mut names = Names { names, inner: Vec::new(), named: none };
    names.walk(query);
    names.named
}

struct Names<'a> {
    names: &'a [String],
    /// Names of the queries in WITH of the queries that the visitor is in.
    inner: Vec<Vec<String>>,
    named: Named,
}

impl Names<'_> {
    fn walk(&mut self, query: &Query) {
        // The table that is changed is never one of them.
        let _ = match query.body.as_ref() {
            SetExpr::Insert(Sql::Insert(insert)) => {
                self.enter(query);
                let _ = walk::visit(&query.with, self);
                let _ = walk::visit(&insert.source, self);
                let _ = walk::visit(&insert.on, self);
                let _ = walk::visit(&insert.returning, self);
                self.leave()
            }
            SetExpr::Update(Sql::Update(update)) => {
                self.enter(query);
                let _ = walk::visit(&query.with, self);
                let _ = walk::visit(&update.table.joins, self);
                let _ = walk::visit(&update.from, self);
                let _ = walk::visit(&update.assignments, self);
                let _ = walk::visit(&update.selection, self);
                let _ = walk::visit(&update.returning, self);
                self.leave()
            }
            SetExpr::Delete(Sql::Delete(delete)) => {
                self.enter(query);
                let _ = walk::visit(&query.with, self);
                let _ = walk::visit(&delete.using, self);
                let _ = walk::visit(&delete.selection, self);
                let _ = walk::visit(&delete.returning, self);
                self.leave()
            }
            _ => walk::visit(query, self),
        };
    }

    fn enter(&mut self, query: &Query) {
        let own = query.with.iter().flat_map(|w| &w.cte_tables);
        self.inner.push(own.map(|cte| fold(&cte.alias.name)).collect());
    }

    fn leave(&mut self) -> ControlFlow<()> {
        self.inner.pop();
        ControlFlow::Continue(())
    }
}

impl Visitor for Names<'_> {
    type Break = ();

    fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<()> {
        self.enter(query);
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, _: &Query) -> ControlFlow<()> {
        self.leave()
    }

    fn pre_visit_table_factor(&mut self, factor: &TableFactor) -> ControlFlow<()> {
        if let TableFactor::Table { name, args: None, .. } = factor
            && let [part] = name.0.as_slice()
            && let Some(name) = part.as_ident().map(fold)
            && let Some(at) = self.names.iter().position(|n| *n == name)
        {
            self.named.counts[at] += 1;
            if !self.inner.iter().flatten().any(|n| *n == name) {
                self.named.certain.insert(at);
            }
        }
        ControlFlow::Continue(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(sql: &str) -> (Vec<usize>, Vec<usize>) {
        let names = ["a".to_owned(), "b".to_owned()];
        let query = millrace_planner::parser::parse_query(sql).unwrap();
        let named = named(&query, &names);
        (named.counts, named.certain.into_iter().collect())
    }

    #[test]
    fn names_count_where_they_stand_for_rows() {
        assert_eq!(
            of("SELECT * FROM a, s.b, c WHERE a.b IN (SELECT 1 FROM A)"),
            (vec![2, 0], vec![0])
        );
        assert_eq!(of("WITH b AS (SELECT 1) SELECT * FROM b, a"), (vec![1, 1], vec![0]));
        let with = "WITH x AS (DELETE FROM t)";
        let in_with = |sql: &str| {
            let query = millrace_planner::parser::parse_query(&format!("{with} {sql}")).unwrap();
            let named = named(&query, &["a".to_owned(), "b".to_owned()]);
            named.counts
        };
        assert_eq!(in_with("DELETE FROM a USING b WHERE EXISTS (SELECT 1 FROM a)"), [1, 1]);
        assert_eq!(in_with("UPDATE a SET x = (SELECT 1 FROM b) FROM b"), [0, 2]);
        assert_eq!(in_with("INSERT INTO a SELECT * FROM b RETURNING (SELECT 1 FROM a)"), [1, 1]);
    }
}
