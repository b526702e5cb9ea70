//! Where in the text a name stands that an error is about.

use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::{Expr, Ident, ObjectName, Visit, Visitor};
use sqlparser::tokenizer::Location;

use super::names::fold;
use crate::parser::position_of;

/// Adds the position of the first identifier that the message names.
pub fn with_position<T: Visit>(e: SqlError, node: &T, sql: &str) -> SqlError {
    let names = [
        SqlState::UNDEFINED_COLUMN,
        SqlState::UNDEFINED_TABLE,
        SqlState::UNDEFINED_FUNCTION,
        SqlState::AMBIGUOUS_COLUMN,
    ];
    if !names.contains(&e.state) {
        return e;
    }
    let Some(name) = subject(&e.message) else { return e };
    match find(node, &name).and_then(|at| position_of(sql, at)) {
        Some(position) => e.with_position(position),
        None => e,
    }
}

/// The last part of the name that the message is about: quoted, or the second word.
fn subject(message: &str) -> Option<String> {
    let name = match message.split('"').nth(1) {
        Some(quoted) => quoted,
        None => message.split_whitespace().nth(1)?.split('(').next()?,
    };
    name.rsplit('.').next().map(str::to_owned)
}

/// Whether a query names an identifier anywhere.
pub fn names_identifier<T: Visit>(node: &T, name: &str) -> bool {
    find(node, name).is_some()
}

fn find<T: Visit>(node: &T, name: &str) -> Option<Location> {
    match node.visit(&mut Finder { name }) {
        ControlFlow::Break(at) => Some(at),
        ControlFlow::Continue(()) => None,
    }
}

struct Finder<'a> {
    name: &'a str,
}

impl Finder<'_> {
    /// The start of a dotted name whose last part is the one looked for.
    fn check(&self, parts: &[Ident]) -> ControlFlow<Location> {
        match (parts.first(), parts.last()) {
            (Some(first), Some(last)) if fold(last) == self.name => {
                ControlFlow::Break(first.span.start)
            }
            _ => ControlFlow::Continue(()),
        }
    }

    fn check_name(&self, name: &ObjectName) -> ControlFlow<Location> {
        let parts: Vec<Ident> = name.0.iter().filter_map(|p| p.as_ident()).cloned().collect();
        self.check(&parts)
    }
}

impl Visitor for Finder<'_> {
    type Break = Location;

    fn pre_visit_relation(&mut self, relation: &ObjectName) -> ControlFlow<Location> {
        self.check_name(relation)
    }

    fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<Location> {
        match expr {
            Expr::Identifier(i) => self.check(std::slice::from_ref(i)),
            Expr::CompoundIdentifier(parts) => self.check(parts),
            Expr::Function(f) => self.check_name(&f.name),
            _ => ControlFlow::Continue(()),
        }
    }
}
