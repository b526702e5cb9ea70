//! How large a plan is once everything in it is written out.
//!
//! A query of a WITH is planned once, and each reference to it shares that plan; so does a view within
//! another. But every later pass goes through what is shared as often as it is referred to: twenty queries
//! of which each reads the one before twice are a million. So plans are measured, in the time that their
//! parts take, before anything goes through them; and references are counted before a plan is made, since
//! that goes through some of them too.

use std::collections::HashMap;
use std::ops::ControlFlow;

use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::error::Result;
use datafusion::logical_expr::LogicalPlan;
use millrace_common::{SqlError, SqlState};
use millrace_functions::error::sql_error_from_datafusion;
use sqlparser::ast::{ObjectName, Query, Visitor};

use crate::bind::names::fold;
use crate::bind::rewrites::plan::PlanRewrite;
use crate::parser::walk;

/// Steps that a plan may have.
pub const MAX_STEPS: usize = 16_384;

/// Refuses plans that are too large.
pub const REFUSE_LARGE_PLANS: PlanRewrite = PlanRewrite::new("refuse large plans", |plan, _| {
    check(&plan)?;
    Ok(plan)
});

/// 54001 for a plan that is too large.
fn check(plan: &LogicalPlan) -> std::result::Result<(), SqlError> {
    refuse_beyond(steps(plan, &mut HashMap::new()).map_err(sql_error_from_datafusion)?)
}

/// 54001 for a query that refers to too many relations once the queries of its WITHs are written out.
pub fn check_references(query: &Query) -> std::result::Result<(), SqlError> {
    let mut references = References { queries: vec![Frame::default()] };
    let _ = walk::visit(query, &mut references);
    refuse_beyond(references.queries.first().map_or(0, |all| all.relations))
}

/// The queries that are being visited, each within the one before.
struct References {
    queries: Vec<Frame>,
}

/// What is known of a query so far.
#[derive(Default)]
struct Frame {
    /// Relations that it refers to, with those of the queries in it.
    relations: usize,
    /// The queries of its WITH by name: where they are, and the relations they refer to.
    named: HashMap<String, (*const Query, usize)>,
}

impl Visitor for References {
    type Break = ();

    fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<()> {
        let ctes = query.with.iter().flat_map(|with| &with.cte_tables);
        // One that refers to itself is a relation then.
        let named = ctes.map(|cte| (fold(&cte.alias.name), (&raw const *cte.query, 1))).collect();
        self.queries.push(Frame { relations: 0, named });
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, query: &Query) -> ControlFlow<()> {
        let Some(done) = self.queries.pop() else { return ControlFlow::Continue(()) };
        let Some(outer) = self.queries.last_mut() else { return ControlFlow::Continue(()) };
        match outer.named.values_mut().find(|(at, _)| std::ptr::eq(*at, query)) {
            Some((_, relations)) => *relations = done.relations.max(1),
            None => outer.relations = outer.relations.saturating_add(done.relations),
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_relation(&mut self, name: &ObjectName) -> ControlFlow<()> {
        let name = match name.0.as_slice() {
            [part] => part.as_ident().map(fold),
            _ => None,
        };
        let known = name.and_then(|name| {
            self.queries.iter().rev().find_map(|query| query.named.get(&name).map(|(_, n)| *n))
        });
        if let Some(query) = self.queries.last_mut() {
            query.relations = query.relations.saturating_add(known.unwrap_or(1));
        }
        ControlFlow::Continue(())
    }
}

fn refuse_beyond(steps: usize) -> std::result::Result<(), SqlError> {
    if steps <= MAX_STEPS {
        return Ok(());
    }
    let message = "statement is too complex: its plan has too many steps";
    let hint = format!(
        "A plan may have {MAX_STEPS} steps. A query of WITH or a view counts each time that it is referred to; a materialized view or a table counts once."
    );
    Err(SqlError::new(SqlState::STATEMENT_TOO_COMPLEX, message).with_hint(hint))
}

/// The nodes below one and itself. `known`: those of nodes that have been counted, by where they are.
fn steps(plan: &LogicalPlan, known: &mut HashMap<*const LogicalPlan, usize>) -> Result<usize> {
    if let Some(steps) = known.get(&std::ptr::from_ref(plan)) {
        return Ok(*steps);
    }
    let mut sum = 1usize;
    for input in plan.inputs() {
        sum = sum.saturating_add(steps(input, known)?);
    }
    plan.apply_subqueries(|subquery| {
        // The node itself is made for this call; what is in it stays.
        if let LogicalPlan::Subquery(subquery) = subquery {
            sum = sum.saturating_add(steps(&subquery.subquery, known)?.saturating_add(1));
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    known.insert(std::ptr::from_ref(plan), sum);
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parser::parse_query;

    fn refused(sql: &str) -> bool {
        let checked = check_references(&parse_query(sql).unwrap());
        checked.is_err_and(|e| e.state == SqlState::STATEMENT_TOO_COMPLEX && e.hint.is_some())
    }

    /// Each query refers to the one before twice.
    fn doubled(levels: usize) -> String {
        let query = |i: usize| format!(", c{i} AS (SELECT * FROM c{0}, c{0} d)", i - 1);
        let queries: String = (1..=levels).map(query).collect();
        format!("WITH c0 AS (SELECT 1 FROM t){queries} SELECT * FROM c{levels}")
    }

    #[test]
    fn references_count_as_often_as_they_are_made() {
        // 2^14 relations are as many as a plan may have steps.
        assert!(!refused(&doubled(14)));
        assert!(refused(&doubled(15)));
        assert!(refused(&doubled(200)));
    }

    #[test]
    fn queries_of_with_are_known_where_they_are_in_scope() {
        let within = doubled(13);
        assert!(!refused(&format!("SELECT * FROM ({within}) a, ({within}) b")));
        assert!(refused(&format!("SELECT * FROM ({within}) a, ({within}) b, ({within}) c")));
        // c13 without is a table.
        assert!(!refused(&format!("SELECT 1 FROM c13, c13 a, c13 b, ({within}) d")));
        // A query of an outer WITH, referred to from an inner one.
        let inner = "SELECT * FROM (WITH d AS (SELECT 1 FROM c13, c13 x) SELECT 1 FROM d, d y) z";
        assert!(refused(&within.replace("SELECT * FROM c13", inner)));
    }
}
