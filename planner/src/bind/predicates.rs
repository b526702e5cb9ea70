//! EXISTS, IN and comparisons with ANY or ALL of a subquery as values of a SELECT list, spelled out as scalar
//! subqueries.
//!
//! DataFusion decorrelates such predicates in filters only. As a value, EXISTS is `count(*) > 0` of the
//! subquery; IN has three results, so its NULLs are asked for one by one: it is NULL where nothing
//! matches and either side has a NULL to compare with.
//!
//! A row that is looked for IN a subquery becomes EXISTS, in filters, where NULL is as good as false.

use std::ops::ControlFlow;

use millrace_common::SqlError;
use sqlparser::ast::*;

use super::desugar::row_items;
use super::table_functions::reads_columns;

const EXISTS: &str = r##"SELECT (SELECT count(*) > 0 FROM (SELECT 1) AS "#s")"##;

const IN: &str = r##"SELECT CASE
    WHEN (SELECT count(*) > 0 FROM (SELECT 1) AS "#s"("#v") WHERE "#x" = "#v") THEN true
    WHEN "#x" IS NULL AND (SELECT count(*) > 0 FROM (SELECT 1) AS "#s"("#v")) THEN NULL
    WHEN (SELECT count(*) > 0 FROM (SELECT 1) AS "#s"("#v") WHERE "#v" IS NULL) THEN NULL
    ELSE false END"##;

/// Rewrites the predicates of a SELECT list; those of its subqueries are left for their own turn.
pub fn spell_out_predicates(items: &mut [SelectItem]) -> Result<(), SqlError> {
    for item in items {
        let (SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. }) = item else {
            continue;
        };
        spell_out_in(e, true)?;
    }
    Ok(())
}

/// `exists`: EXISTS too.
fn spell_out_in(e: &mut Expr, exists: bool) -> Result<(), SqlError> {
    match e.visit(&mut SpellOut { depth: 0, exists }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(e) => Err(*e),
    }
}

struct SpellOut {
    /// Subqueries that the visitor is in.
    depth: usize,
    exists: bool,
}

impl VisitorMut for SpellOut {
    type Break = Box<SqlError>;

    fn pre_visit_query(&mut self, _: &mut Query) -> ControlFlow<Box<SqlError>> {
        self.depth += 1;
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, _: &mut Query) -> ControlFlow<Box<SqlError>> {
        self.depth -= 1;
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<Box<SqlError>> {
        if self.depth > 0 || (!self.exists && matches!(expr, Expr::Exists { .. })) {
            return ControlFlow::Continue(());
        }
        match spelled_out(expr) {
            Ok(Some(new)) => *expr = new,
            Ok(None) => {}
            Err(e) => return ControlFlow::Break(Box::new(e)),
        }
        ControlFlow::Continue(())
    }
}

fn spelled_out(expr: &Expr) -> Result<Option<Expr>, SqlError> {
    Ok(match expr {
        Expr::Exists { subquery, negated } => {
            let exists = match counted(subquery)? {
                Some(count) => Expr::Subquery(Box::new(count)),
                None => fill(EXISTS, subquery, None)?,
            };
            Some(negate(*negated, exists))
        }
        Expr::InSubquery { expr, subquery, negated } if !matches!(**expr, Expr::Tuple(_)) => {
            let any = Some((&**expr, &BinaryOperator::Eq));
            Some(negate(*negated, fill(IN, subquery, any)?))
        }
        Expr::AnyOp { left, compare_op, right, .. } => match (&**right, opposite(compare_op)) {
            (Expr::Subquery(q), Some(_)) => Some(fill(IN, q, Some((&**left, compare_op)))?),
            _ => None,
        },
        // Not all of them: the opposite holds for one.
        Expr::AllOp { left, compare_op, right } => match (&**right, opposite(compare_op)) {
            (Expr::Subquery(q), Some(op)) => Some(negate(true, fill(IN, q, Some((&**left, &op)))?)),
            _ => None,
        },
        _ => None,
    })
}

/// Rewrites the predicates of a filter that would not have PostgreSQL's result: rows IN subqueries; what is not a
/// column NOT IN one; and those whose NULL matters, because they do not stand alone or under AND and OR.
pub fn spell_out_filter(filter: &mut Expr) -> Result<(), SqlError> {
    spell_out_under(filter, true)
}

/// `alone`: under nothing but AND, where NOT IN is a join that knows NULLs.
fn spell_out_under(filter: &mut Expr, alone: bool) -> Result<(), SqlError> {
    match filter {
        Expr::Nested(inner) => spell_out_under(inner, alone),
        Expr::BinaryOp { left, op: BinaryOperator::And, right } => {
            spell_out_under(left, alone)?;
            spell_out_under(right, alone)
        }
        Expr::BinaryOp { left, op: BinaryOperator::Or, right } => {
            spell_out_under(left, false)?;
            spell_out_under(right, false)
        }
        Expr::UnaryOp { op: UnaryOperator::Not, expr }
            if let Some(mut inner) = in_subquery(expr) =>
        {
            if let Expr::InSubquery { negated, .. } = &mut inner {
                *negated = !*negated;
            }
            *filter = inner;
            spell_out_under(filter, alone)
        }
        Expr::InSubquery { expr, subquery, negated } => {
            if let Some(row) = row_items(expr) {
                *filter = row_in(row, subquery, *negated)?;
            } else if *negated && (!alone || !reads_columns(expr)) {
                spell_out_in(filter, false)?;
            }
            Ok(())
        }
        Expr::AnyOp { .. } | Expr::AllOp { .. } => Ok(()),
        _ => spell_out_in(filter, false),
    }
}

fn in_subquery(e: &Expr) -> Option<Expr> {
    match e {
        Expr::Nested(inner) => in_subquery(inner),
        Expr::InSubquery { .. } => Some(e.clone()),
        _ => None,
    }
}

/// `EXISTS (SELECT 1 FROM (subquery) AS s (…) WHERE row = s)`. A row is not in a subquery if it surely differs
/// from all of that.
fn row_in(row: Vec<Expr>, subquery: &Query, negated: bool) -> Result<Expr, SqlError> {
    let names: Vec<String> = (0..row.len()).map(|i| format!("\"#v{i}\"")).collect();
    let equal: Vec<String> =
        names.iter().enumerate().map(|(i, name)| format!("\"#x{i}\" = {name}")).collect();
    let (equal, surely) = (equal.join(" AND "), if negated { "IS NOT FALSE" } else { "" });
    let not = if negated { "NOT " } else { "" };
    let template = format!(
        "SELECT {not}EXISTS (SELECT 1 FROM (SELECT 1) AS \"#s\" ({}) WHERE ({equal}) {surely})",
        names.join(", ")
    );
    let mut expr = only_item(&template)?;
    let _ = VisitMut::visit(&mut expr, &mut FillRow { subquery, row });
    Ok(expr)
}

struct FillRow<'a> {
    subquery: &'a Query,
    row: Vec<Expr>,
}

impl VisitorMut for FillRow<'_> {
    type Break = ();

    fn post_visit_table_factor(&mut self, factor: &mut TableFactor) -> ControlFlow<()> {
        if let TableFactor::Derived { subquery, .. } = factor {
            **subquery = self.subquery.clone();
        }
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<()> {
        if let Expr::Identifier(i) = &*expr
            && let Some(at) = i.value.strip_prefix("#x").and_then(|n| n.parse::<usize>().ok())
            && let Some(value) = self.row.get(at)
        {
            *expr = Expr::Nested(Box::new(value.clone()));
        }
        ControlFlow::Continue(())
    }
}

/// A plain SELECT with its list replaced by `count(*) > 0`: a form that decorrelates.
fn counted(subquery: &Query) -> Result<Option<Query>, SqlError> {
    let SetExpr::Select(select) = subquery.body.as_ref() else { return Ok(None) };
    let grouped = !matches!(&select.group_by, GroupByExpr::Expressions(e, _) if e.is_empty());
    let calls = select.projection.iter().any(|item| item.to_string().contains('('));
    if grouped
        || calls
        || select.having.is_some()
        || select.distinct.is_some()
        || subquery.limit_clause.is_some()
        || subquery.fetch.is_some()
    {
        return Ok(None);
    }
    let mut count = crate::parser::parse_query("SELECT count(*) > 0")?;
    let mut query = subquery.clone();
    query.order_by = None;
    if let (SetExpr::Select(to), SetExpr::Select(from)) = (query.body.as_mut(), count.body.as_mut())
    {
        to.projection = std::mem::take(&mut from.projection);
    }
    Ok(Some(query))
}

/// The comparison that holds exactly where this one does not, NULLs aside.
pub(super) fn opposite(op: &BinaryOperator) -> Option<BinaryOperator> {
    use BinaryOperator as B;
    Some(match op {
        B::Eq => B::NotEq,
        B::NotEq => B::Eq,
        B::Lt => B::GtEq,
        B::LtEq => B::Gt,
        B::Gt => B::LtEq,
        B::GtEq => B::Lt,
        _ => return None,
    })
}

fn negate(negated: bool, e: Expr) -> Expr {
    let nested = Expr::Nested(Box::new(e));
    match negated {
        true => Expr::UnaryOp { op: UnaryOperator::Not, expr: Box::new(nested) },
        false => nested,
    }
}

/// A template with its subquery, and the value that is looked for by a comparison, put in.
pub(super) fn fill(
    template: &str,
    subquery: &Query,
    value: Option<(&Expr, &BinaryOperator)>,
) -> Result<Expr, SqlError> {
    let mut expr = only_item(template)?;
    let _ = VisitMut::visit(&mut expr, &mut Fill { subquery, value });
    Ok(expr)
}

/// The last item of a SELECT list.
fn only_item(template: &str) -> Result<Expr, SqlError> {
    let bad = || SqlError::internal("a template of the binder does not parse");
    let mut query = crate::parser::parse_query(template)?;
    let SetExpr::Select(select) = query.body.as_mut() else { return Err(bad()) };
    match select.projection.pop() {
        Some(SelectItem::UnnamedExpr(expr)) => Ok(expr),
        _ => Err(bad()),
    }
}

struct Fill<'a> {
    subquery: &'a Query,
    value: Option<(&'a Expr, &'a BinaryOperator)>,
}

impl VisitorMut for Fill<'_> {
    type Break = ();

    fn post_visit_table_factor(&mut self, factor: &mut TableFactor) -> ControlFlow<()> {
        if let TableFactor::Derived { subquery, .. } = factor {
            **subquery = self.subquery.clone();
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<()> {
        if let Expr::BinaryOp { left, op: op @ BinaryOperator::Eq, .. } = expr
            && matches!(&**left, Expr::Identifier(i) if i.value == "#x")
            && let Some((_, wanted)) = self.value
        {
            *op = wanted.clone();
        }
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<()> {
        if let (Expr::Identifier(i), Some((value, _))) = (&*expr, self.value)
            && i.value == "#x"
        {
            *expr = Expr::Nested(Box::new(value.clone()));
        }
        ControlFlow::Continue(())
    }
}
