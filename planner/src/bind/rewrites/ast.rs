//! Rewrites of the AST. Some take a statement as a whole; the others take nodes of it, in one walk.
//!
//! The walk reaches a query before its SELECT, a SELECT before what stands in it, and an expression before
//! its parts. At a node every rewrite has its turn before the walk goes on, so that what one of them writes
//! is walked as well.

use std::ops::ControlFlow;

use millrace_common::SqlError;
use millrace_functions::interrupt;
use sqlparser::ast::{Expr, Query, Select, TableFactor, Visit, VisitMut, VisitorMut};

use crate::bind::SessionInfo;
use crate::bind::aggregates::{filters, grouping};
use crate::bind::desugar::Copies;
use crate::bind::desugar::expressions::SPELL_OUT_EXPRESSIONS;
use crate::bind::desugar::positions::KEEP_POSITIONS;
use crate::bind::desugar::returned_sets::UNNEST_SETS;
use crate::bind::desugar::unsupported::REFUSE_CLAUSES;
use crate::bind::names::{internal_calls, outer_outputs, output_names, scopes, using, whole_rows};
use crate::bind::ordering::order;
use crate::bind::relations::{asof, table_functions, unions, values};
use crate::bind::spans::operator_spans;
use crate::bind::subqueries::{array_query, join_conditions, predicates};
use crate::bind::windows::{frame_bounds, named};
use crate::catalog::CatalogView;
use crate::parser::walk;

/// What the rewrites of one statement share.
pub struct AstContext<'a> {
    pub catalog: &'a dyn CatalogView,
    pub session: &'a SessionInfo,
    /// What the walk's rewrites have copied.
    pub copies: Copies,
    /// Queries that the walk is in.
    pub queries: usize,
}

impl<'a> AstContext<'a> {
    pub fn new(catalog: &'a dyn CatalogView, session: &'a SessionInfo) -> AstContext<'a> {
        AstContext { catalog, session, copies: Copies::default(), queries: 0 }
    }
}

/// What is rewritten.
pub enum Whole<'a> {
    Query(&'a mut Query),
    /// An expression that is of no query: a default, a generated column.
    Expr(&'a mut Expr),
}

/// What a rewrite does to one kind of node: it changes the node, or refuses it.
pub type At<T> = fn(&mut T, &mut AstContext<'_>) -> Result<(), SqlError>;

fn stays<T>(_: &mut T, _: &mut AstContext<'_>) -> Result<(), SqlError> {
    Ok(())
}

/// A rewrite of the AST, made of [`AstRewrite::NONE`] and what it does to the nodes that it changes or checks.
#[derive(Clone, Copy)]
pub struct AstRewrite {
    pub name: &'static str,
    /// Before the walk.
    pub whole: fn(&mut Whole<'_>, &mut AstContext<'_>) -> Result<(), SqlError>,
    pub query: At<Query>,
    /// What stands in the query is rewritten.
    pub query_done: At<Query>,
    pub select: At<Select>,
    /// What stands in the SELECT is rewritten.
    pub select_done: At<Select>,
    pub from_item: At<TableFactor>,
    pub expr: At<Expr>,
    /// The expression's parts are rewritten.
    pub expr_done: At<Expr>,
}

impl AstRewrite {
    /// Every node stays as it is.
    pub const NONE: AstRewrite = AstRewrite {
        name: "",
        whole: |_, _| Ok(()),
        query: stays,
        query_done: stays,
        select: stays,
        select_done: stays,
        from_item: stays,
        expr: stays,
        expr_done: stays,
    };
}

/// A rewrite at its place in the list.
pub struct AstEntry {
    pub rewrite: AstRewrite,
    /// The ones it has to stand behind; none, if it goes by nothing that others change.
    pub after: &'static [&'static str],
}

const fn entry(rewrite: AstRewrite, after: &'static [&'static str]) -> AstEntry {
    AstEntry { rewrite, after }
}

/// All rewrites of the AST, in their order.
pub static AST_REWRITES: &[AstEntry] = &[
    // The ones behind it write calls of such functions themselves.
    entry(internal_calls::HIDE_INTERNAL_CALLS, &[]),
    // Goes by joins and lists as they are written; says what the catalog knows in terms that the walk needs
    // no catalog for.
    entry(scopes::RESOLVE_SCOPES, &["hide internal calls"]),
    // Here the walk begins, with names that mean what they say.
    entry(outer_outputs::NAME_OUTER_OUTPUTS, &["resolve scopes"]),
    // Puts a set operation into a SELECT of its own, in which its outputs would not be found to be named.
    entry(unions::TYPE_UNIONS_IN_WITH, &["name outer outputs"]),
    // By the names that outputs have been given.
    entry(order::PART_ORDER_NAMES, &["name outer outputs"]),
    // What DISTINCT is ordered by is looked for in the list, which still has windows by name.
    entry(named::WRITE_OUT_ORDER_WINDOWS, &["part order names"]),
    // Their columns are not the catalog's: the scopes know a function by its call.
    entry(table_functions::SPELL_OUT_TABLE_FUNCTIONS, &["resolve scopes"]),
    // Joins in parentheses and NATURAL ones are written out by the scopes. Windows of ORDER BY may name merged columns.
    entry(using::SPELL_OUT_USING, &["resolve scopes", "write out order windows"]),
    // Tells kinds of expressions by their spelling.
    entry(values::TYPE_VALUES, &[]),
    // A name without a table that is still there is no merged column.
    entry(join_conditions::MOVE_JOIN_CONDITIONS, &["spell out using"]),
    // Takes calls of its own; the query that it makes of one is walked in turn.
    entry(array_query::SPELL_OUT_ARRAY_QUERIES, &[]),
    // The name of a function in FROM is its column's by now where it has one only.
    entry(whole_rows::MARK_WHOLE_ROWS, &["spell out table functions"]),
    // While columns are merged a name alone is not the table's column of that name: expressions are compared
    // afterwards.
    entry(grouping::SPELL_OUT_GROUPING, &["spell out using"]),
    // A row that is shown has the name of its table.
    entry(output_names::NAME_COLUMNS, &["mark whole rows"]),
    // The calls of arrays that they become would have other names.
    entry(UNNEST_SETS, &["name columns"]),
    // Likewise; and a condition that has become the query's is one of its filters.
    entry(predicates::SPELL_OUT_PREDICATES, &["name columns", "move join conditions"]),
    // Its condition stays with the join, whatever it has in it.
    entry(asof::MARK_ASOF, &["move join conditions"]),
    // Takes the definitions away, which ORDER BY names as well.
    entry(named::WRITE_OUT_WINDOWS, &["write out order windows"]),
    // Comparisons with rows of subqueries are known by their operators, which have another form when places are noted.
    entry(operator_spans::NOTE_OPERATORS, &["spell out predicates"]),
    // Tells what cannot fail by its spelling.
    entry(filters::GUARD_FILTERS, &[]),
    // Frames stand in the calls that the windows are of.
    entry(frame_bounds::CHECK_FRAMES, &["write out windows"]),
    // Parts that are rewritten have lost their places, names and spelling, by which the ones before it go.
    entry(
        SPELL_OUT_EXPRESSIONS,
        &[
            "note operators",
            "guard filters",
            "check frames",
            "spell out array queries",
            "type values",
        ],
    ),
    // Puts back the numbers that are no values.
    entry(KEEP_POSITIONS, &["spell out expressions"]),
    // What is wrong with a clause that has a meaning is told first.
    entry(REFUSE_CLAUSES, &[]),
];

/// Rewrites a query in place.
pub fn rewrite_query(query: &mut Query, cx: AstContext<'_>) -> Result<(), SqlError> {
    rewrite_query_by(AST_REWRITES, query, cx)
}

/// [`rewrite_query`] by the rewrites of a list.
pub(super) fn rewrite_query_by(
    list: &[AstEntry],
    query: &mut Query,
    mut cx: AstContext<'_>,
) -> Result<(), SqlError> {
    whole(list, Whole::Query(query), &mut cx)?;
    nodes(list, query, cx)
}

/// Rewrites a scalar expression in place.
pub fn rewrite_expr(expr: &mut Expr, mut cx: AstContext<'_>) -> Result<(), SqlError> {
    whole(AST_REWRITES, Whole::Expr(expr), &mut cx)?;
    nodes(AST_REWRITES, expr, cx)
}

fn whole(list: &[AstEntry], mut node: Whole<'_>, cx: &mut AstContext<'_>) -> Result<(), SqlError> {
    list.iter().try_for_each(|entry| (entry.rewrite.whole)(&mut node, cx))
}

fn nodes<T: VisitMut + Visit>(
    list: &[AstEntry],
    node: &mut T,
    cx: AstContext<'_>,
) -> Result<(), SqlError> {
    let copies = Copies::of(&*node);
    match walk::visit_mut(node, &mut Nodes { list, cx: AstContext { copies, ..cx } }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(e) => Err(*e),
    }
}

/// The walk that gives each rewrite its nodes.
struct Nodes<'a> {
    list: &'a [AstEntry],
    cx: AstContext<'a>,
}

type Flow = ControlFlow<Box<SqlError>>;

impl<'a> Nodes<'a> {
    fn each(
        &mut self,
        mut run: impl FnMut(&AstRewrite, &mut AstContext<'a>) -> Result<(), SqlError>,
    ) -> Flow {
        let cx = &mut self.cx;
        flow(self.list.iter().try_for_each(|entry| run(&entry.rewrite, cx)))
    }
}

fn flow(done: Result<(), SqlError>) -> Flow {
    match done {
        Ok(()) => ControlFlow::Continue(()),
        Err(e) => ControlFlow::Break(Box::new(e)),
    }
}

impl VisitorMut for Nodes<'_> {
    type Break = Box<SqlError>;

    fn pre_visit_query(&mut self, query: &mut Query) -> Flow {
        self.cx.queries += 1;
        self.each(|rewrite, cx| (rewrite.query)(query, cx))
    }

    fn post_visit_query(&mut self, query: &mut Query) -> Flow {
        self.cx.queries -= 1;
        self.each(|rewrite, cx| (rewrite.query_done)(query, cx))
    }

    fn pre_visit_select(&mut self, select: &mut Select) -> Flow {
        // What is spelled out may have its subqueries more than once.
        flow(interrupt::check())?;
        self.each(|rewrite, cx| (rewrite.select)(select, cx))
    }

    fn post_visit_select(&mut self, select: &mut Select) -> Flow {
        self.each(|rewrite, cx| (rewrite.select_done)(select, cx))
    }

    fn pre_visit_table_factor(&mut self, factor: &mut TableFactor) -> Flow {
        self.each(|rewrite, cx| (rewrite.from_item)(factor, cx))
    }

    fn pre_visit_expr(&mut self, expr: &mut Expr) -> Flow {
        flow(self.cx.copies.meet())?;
        self.each(|rewrite, cx| (rewrite.expr)(expr, cx))
    }

    fn post_visit_expr(&mut self, expr: &mut Expr) -> Flow {
        self.each(|rewrite, cx| (rewrite.expr_done)(expr, cx))
    }
}
