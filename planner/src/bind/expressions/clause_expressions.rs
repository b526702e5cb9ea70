//! The expressions of a clause that are its own: those of subqueries have names of their own, and their own turn.

use std::ops::ControlFlow;

use crate::parser::walk;
use sqlparser::ast::{Expr, Query, Visit, VisitMut, Visitor, VisitorMut};

/// Changes every expression that is no subquery's, inner ones first.
pub fn change_own(clause: &mut impl VisitMut, change: impl FnMut(&mut Expr)) {
    let _ = walk::visit_mut(clause, &mut Change { change, queries: 0 });
}

/// Whether an expression that is no subquery's is `wanted`; stops at the first.
pub fn any_own(clause: &impl Visit, wanted: impl FnMut(&Expr) -> bool) -> bool {
    walk::visit(clause, &mut Look { wanted, queries: 0 }).is_break()
}

struct Change<F> {
    change: F,
    queries: usize,
}

impl<F: FnMut(&mut Expr)> VisitorMut for Change<F> {
    type Break = ();

    fn pre_visit_query(&mut self, _: &mut Query) -> ControlFlow<()> {
        self.queries += 1;
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, _: &mut Query) -> ControlFlow<()> {
        self.queries -= 1;
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, e: &mut Expr) -> ControlFlow<()> {
        if self.queries == 0 {
            (self.change)(e);
        }
        ControlFlow::Continue(())
    }
}

struct Look<F> {
    wanted: F,
    queries: usize,
}

impl<F: FnMut(&Expr) -> bool> Visitor for Look<F> {
    type Break = ();

    fn pre_visit_query(&mut self, _: &Query) -> ControlFlow<()> {
        self.queries += 1;
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, _: &Query) -> ControlFlow<()> {
        self.queries -= 1;
        ControlFlow::Continue(())
    }

    fn pre_visit_expr(&mut self, e: &Expr) -> ControlFlow<()> {
        match self.queries == 0 && (self.wanted)(e) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}
