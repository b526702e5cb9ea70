//! Walks of statements.
//!
//! The parser's `Visit` has a function for each kind of node and compiles all of them again for each visitor. Here every
//! visitor goes through one that calls it by reference, so that they are compiled once.

use std::ops::ControlFlow;

use sqlparser::ast::{
    Expr, ObjectName, Query, Select, Statement, TableFactor, ValueWithSpan, Visit, VisitMut,
    Visitor, VisitorMut,
};

/// A visitor and what it broke with.
struct Walk<'v, V, B> {
    visitor: &'v mut V,
    broke: Option<B>,
}

impl<V, B> Walk<'_, V, B> {
    fn keep(&mut self, flow: ControlFlow<B>) -> ControlFlow<()> {
        match flow {
            ControlFlow::Continue(()) => ControlFlow::Continue(()),
            ControlFlow::Break(with) => {
                self.broke = Some(with);
                ControlFlow::Break(())
            }
        }
    }

    fn end(self) -> ControlFlow<B> {
        self.broke.map_or(ControlFlow::Continue(()), ControlFlow::Break)
    }
}

macro_rules! walks {
    ($hooks:ident, $by_reference:ident, $visitor:ident, $($method:ident: $node:ty,)*) => {
        trait $hooks {
            $(fn $method(&mut self, node: $node) -> ControlFlow<()>;)*
        }

        impl<V: $visitor> $hooks for Walk<'_, V, V::Break> {
            $(fn $method(&mut self, node: $node) -> ControlFlow<()> {
                let flow = self.visitor.$method(node);
                self.keep(flow)
            })*
        }

        struct $by_reference<'v>(&'v mut dyn $hooks);

        impl $visitor for $by_reference<'_> {
            type Break = ();

            $(fn $method(&mut self, node: $node) -> ControlFlow<()> {
                self.0.$method(node)
            })*
        }
    };
}

walks! {
    Hooks, ByReference, Visitor,
    pre_visit_query: &Query,
    post_visit_query: &Query,
    pre_visit_select: &Select,
    post_visit_select: &Select,
    pre_visit_relation: &ObjectName,
    post_visit_relation: &ObjectName,
    pre_visit_table_factor: &TableFactor,
    post_visit_table_factor: &TableFactor,
    pre_visit_expr: &Expr,
    post_visit_expr: &Expr,
    pre_visit_statement: &Statement,
    post_visit_statement: &Statement,
    pre_visit_value: &ValueWithSpan,
    post_visit_value: &ValueWithSpan,
}

walks! {
    HooksMut, ByReferenceMut, VisitorMut,
    pre_visit_query: &mut Query,
    post_visit_query: &mut Query,
    pre_visit_select: &mut Select,
    post_visit_select: &mut Select,
    pre_visit_relation: &mut ObjectName,
    post_visit_relation: &mut ObjectName,
    pre_visit_table_factor: &mut TableFactor,
    post_visit_table_factor: &mut TableFactor,
    pre_visit_expr: &mut Expr,
    post_visit_expr: &mut Expr,
    pre_visit_statement: &mut Statement,
    post_visit_statement: &mut Statement,
    pre_visit_value: &mut ValueWithSpan,
    post_visit_value: &mut ValueWithSpan,
}

/// Shows a visitor a node and all within it, until it breaks.
pub fn visit<V: Visitor>(node: &(impl Visit + ?Sized), visitor: &mut V) -> ControlFlow<V::Break> {
    let mut walk = Walk { visitor, broke: None };
    let _ = node.visit(&mut ByReference(&mut walk));
    walk.end()
}

/// [`visit`] of a node that the visitor may change.
pub fn visit_mut<V: VisitorMut>(
    node: &mut (impl VisitMut + ?Sized),
    visitor: &mut V,
) -> ControlFlow<V::Break> {
    let mut walk = Walk { visitor, broke: None };
    let _ = node.visit(&mut ByReferenceMut(&mut walk));
    walk.end()
}

/// Calls `look` with each expression of a node, those around others first, until it breaks.
pub fn expressions<B>(
    node: &(impl Visit + ?Sized),
    look: impl FnMut(&Expr) -> ControlFlow<B>,
) -> ControlFlow<B> {
    visit(node, &mut Look(look))
}

/// Has `change` change each expression of a node, those within others first, until it breaks.
pub fn expressions_mut<B>(
    node: &mut (impl VisitMut + ?Sized),
    change: impl FnMut(&mut Expr) -> ControlFlow<B>,
) -> ControlFlow<B> {
    visit_mut(node, &mut Change(change))
}

struct Look<F>(F);

impl<B, F: FnMut(&Expr) -> ControlFlow<B>> Visitor for Look<F> {
    type Break = B;

    fn pre_visit_expr(&mut self, e: &Expr) -> ControlFlow<B> {
        (self.0)(e)
    }
}

struct Change<F>(F);

impl<B, F: FnMut(&mut Expr) -> ControlFlow<B>> VisitorMut for Change<F> {
    type Break = B;

    fn post_visit_expr(&mut self, e: &mut Expr) -> ControlFlow<B> {
        (self.0)(e)
    }
}

#[cfg(test)]
mod tests {
    use sqlparser::dialect::PostgreSqlDialect;
    use sqlparser::parser::Parser;

    use super::*;

    fn query(sql: &str) -> Statement {
        Parser::parse_sql(&PostgreSqlDialect {}, sql).unwrap().remove(0)
    }

    #[test]
    fn a_walk_ends_where_it_breaks() {
        let mut seen = vec![];
        let flow = expressions(&query("SELECT a, b + 1, c"), |e| {
            seen.push(e.to_string());
            match e {
                Expr::BinaryOp { .. } => ControlFlow::Break("sum"),
                _ => ControlFlow::Continue(()),
            }
        });
        assert_eq!(flow, ControlFlow::Break("sum"));
        assert_eq!(seen, ["a", "b + 1"]);
    }

    #[test]
    fn expressions_within_others_are_changed_first() {
        let mut statement = query("SELECT a + (SELECT b)");
        let mut order = vec![];
        let flow: ControlFlow<()> = expressions_mut(&mut statement, |e| {
            order.push(e.to_string());
            if let Expr::Identifier(name) = e {
                name.value.push('x');
            }
            ControlFlow::Continue(())
        });
        assert_eq!(flow, ControlFlow::Continue(()));
        assert_eq!(order, ["a", "b", "(SELECT bx)", "ax + (SELECT bx)"]);
        assert_eq!(statement.to_string(), "SELECT ax + (SELECT bx)");
    }
}
