//! Conditions of inner joins that have subqueries, as conditions of the query: there every subquery is
//! known, and an inner join makes no difference between the two.
//!
//! They stay where they are if a later join of the same item is RIGHT or FULL, which would pad the rows that they let
//! through, or if a name that is not qualified might mean another table's column in WHERE.

use std::ops::ControlFlow;

use sqlparser::ast::*;

use crate::bind::expressions::clause_expressions::any_own;
use crate::bind::rewrites::ast::AstRewrite;
use crate::parser::walk;

/// Moves conditions with subqueries from joins to WHERE.
pub const MOVE_JOIN_CONDITIONS: AstRewrite = AstRewrite {
    name: "move join conditions",
    select: |select, _| {
        move_to_where(select);
        Ok(())
    },
    ..AstRewrite::NONE
};

/// Moves the conditions of a SELECT's joins that have subqueries to WHERE.
fn move_to_where(select: &mut Select) {
    let alone = select.from.len() == 1;
    let mut moved = Vec::new();
    for from in &mut select.from {
        let count = from.joins.len();
        let padded = from.joins.iter().rposition(|join| pads_left(&join.join_operator));
        let joins = from.joins.iter_mut().enumerate();
        for (at, join) in joins.skip(padded.map_or(0, |at| at + 1)) {
            let (JoinOperator::Join(by) | JoinOperator::Inner(by)) = &mut join.join_operator else {
                continue;
            };
            let JoinConstraint::On(on) = by else { continue };
            if !has_subquery(on) {
                continue;
            }
            let last = alone && at + 1 == count;
            let mut all = Vec::new();
            conjuncts(on, &mut all);
            let (away, stays): (Vec<Expr>, Vec<Expr>) =
                all.into_iter().partition(|e| has_subquery(e) && (last || is_qualified(e)));
            let nothing = || Expr::value(Value::Boolean(true));
            *on = stays.into_iter().reduce(and).unwrap_or_else(nothing);
            moved.extend(away);
        }
    }
    if !moved.is_empty() {
        let all = select.selection.take().into_iter().map(nested).chain(moved);
        select.selection = all.reduce(and);
    }
}

/// Whether a join gives rows that its left side has not.
fn pads_left(operator: &JoinOperator) -> bool {
    use JoinOperator as J;
    matches!(operator, J::Right(_) | J::RightOuter(_) | J::FullOuter(_))
}

fn conjuncts(e: &Expr, all: &mut Vec<Expr>) {
    match e {
        Expr::BinaryOp { left, op: BinaryOperator::And, right } => {
            conjuncts(left, all);
            conjuncts(right, all);
        }
        Expr::Nested(inner) => conjuncts(inner, all),
        other => all.push(nested(other.clone())),
    }
}

fn and(a: Expr, b: Expr) -> Expr {
    Expr::BinaryOp { left: Box::new(a), op: BinaryOperator::And, right: Box::new(b) }
}

fn nested(e: Expr) -> Expr {
    match e {
        Expr::Nested(_) => e,
        other => Expr::Nested(Box::new(other)),
    }
}

fn has_subquery(e: &Expr) -> bool {
    struct Subquery;
    impl Visitor for Subquery {
        type Break = ();

        fn pre_visit_query(&mut self, _: &Query) -> ControlFlow<()> {
            ControlFlow::Break(())
        }
    }
    walk::visit(e, &mut Subquery).is_break()
}

/// Whether all names of an expression say their tables.
fn is_qualified(e: &Expr) -> bool {
    !any_own(e, |e| matches!(e, Expr::Identifier(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(sql: &str) -> String {
        let mut query = crate::parser::parse_query(sql).unwrap();
        if let SetExpr::Select(select) = query.body.as_mut() {
            move_to_where(select);
        }
        query.to_string()
    }

    #[test]
    fn conditions_with_subqueries_move_behind_inner_joins_only() {
        let all =
            moved("SELECT 1 FROM a JOIN b ON a.x = b.x AND b.y IN (SELECT z FROM c) WHERE p OR q");
        let expected =
            "SELECT 1 FROM a JOIN b ON (a.x = b.x) WHERE (p OR q) AND (b.y IN (SELECT z FROM c))";
        assert_eq!(all, expected);
        for same in [
            "SELECT 1 FROM a LEFT JOIN b ON b.y IN (SELECT z FROM c)",
            "SELECT 1 FROM a JOIN b ON b.y IN (SELECT z FROM c) RIGHT JOIN d ON d.x = a.x",
            "SELECT 1 FROM a JOIN b ON a.x = b.x WHERE (p)",
        ] {
            assert_eq!(moved(same), same);
        }
    }
}
