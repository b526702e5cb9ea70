//! The expressions of a clause that are its own: those of subqueries have names of their own, and their own turn.

use std::ops::ControlFlow;

use crate::parser::walk;
use sqlparser::ast::{Expr, Query, Visit, VisitMut, Visitor, VisitorMut};

/// Changes every expression that is no subquery's, inner ones first.
pub fn change_own(clause: &mut impl VisitMut, mut change: impl FnMut(&mut Expr)) {
    let _: Result<(), ()> = try_change_own(clause, |e| {
        change(e);
        Ok(())
    });
}

/// [`change_own`] up to the first error.
pub fn try_change_own<E>(
    clause: &mut impl VisitMut,
    change: impl FnMut(&mut Expr) -> Result<(), E>,
) -> Result<(), E> {
    match walk::visit_mut(clause, &mut Change { change, queries: 0 }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(e) => Err(e),
    }
}

/// Whether an expression that is no subquery's is `wanted`; stops at the first.
pub fn any_own(clause: &impl Visit, wanted: impl FnMut(&Expr) -> bool) -> bool {
    walk::visit(clause, &mut Look { wanted, queries: 0 }).is_break()
}

struct Change<F> {
    change: F,
    queries: usize,
}

impl<E, F: FnMut(&mut Expr) -> Result<(), E>> VisitorMut for Change<F> {
    type Break = E;

    fn pre_visit_query(&mut self, _: &mut Query) -> ControlFlow<E> {
        self.queries += 1;
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, _: &mut Query) -> ControlFlow<E> {
        self.queries -= 1;
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, e: &mut Expr) -> ControlFlow<E> {
        if self.queries > 0 {
            return ControlFlow::Continue(());
        }
        match (self.change)(e) {
            Ok(()) => ControlFlow::Continue(()),
            Err(e) => ControlFlow::Break(e),
        }
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
