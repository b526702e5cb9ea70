//! EXISTS, IN and comparisons with ANY or ALL of a subquery as values of a SELECT list, spelled out as scalar
//! subqueries.
//!
//! DataFusion decorrelates such predicates in filters only. As a value, EXISTS is `count(*) > 0` of the
//! subquery; IN has three results, so its NULLs are asked for one by one: it is NULL where nothing
//! matches and either side has a NULL to compare with.
//!
//! A row that is looked for IN a subquery becomes EXISTS, in filters, where NULL is as good as false. A row that is
//! compared with a subquery's one row becomes a subquery of the comparison.

use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;

use crate::bind::expressions::clause_expressions::{any_own, try_change_own};
use crate::bind::expressions::desugar::{Copies, row_items};
use crate::bind::relations::table_functions::reads_columns;
use crate::bind::rewrites::ast::AstRewrite;
use crate::bind::spans::misplaced_calls;
use crate::parser::walk;

const EXISTS: &str = r##"SELECT (SELECT count(*) > 0 FROM (SELECT 1) AS "#s")"##;

const IN: &str = r##"SELECT CASE
    WHEN (SELECT count(*) > 0 FROM (SELECT 1) AS "#s"("#v") WHERE "#x" = "#v") THEN true
    WHEN "#x" IS NULL AND (SELECT count(*) > 0 FROM (SELECT 1) AS "#s"("#v")) THEN NULL
    WHEN (SELECT count(*) > 0 FROM (SELECT 1) AS "#s"("#v") WHERE "#v" IS NULL) THEN NULL
    ELSE false END"##;

/// The same of a subquery within which there are more of these, which would be there three times for each of them: what
/// there is to know but for the rows that match is asked in one go.
const IN_OF_FEW: &str = r##"SELECT CASE
    WHEN (SELECT count(*) > 0 FROM (SELECT 1) AS "#s"("#v") WHERE "#x" = "#v") THEN true
    WHEN (SELECT CASE WHEN count(CASE WHEN "#v" IS NULL THEN 1 END) > 0 THEN 2
                      WHEN count(*) > 0 THEN 1 ELSE 0 END FROM (SELECT 1) AS "#s"("#v"))
        > CASE WHEN "#x" IS NULL THEN 0 ELSE 1 END THEN NULL
    ELSE false END"##;

/// The same of one within which they are nested deep: all is asked in one go, by which the values that are
/// looked for are compared with all rows, one by one.
const IN_OF_MANY: &str = r##"SELECT (SELECT CASE
    WHEN count(CASE WHEN "#x" = "#v" THEN 1 END) > 0 THEN true
    WHEN count(CASE WHEN ("#x" = "#v") IS NULL THEN 1 END) > 0 THEN NULL
    ELSE false END FROM (SELECT 1) AS "#s"("#v"))"##;

/// Levels of such predicates within a subquery from which on it is there once.
const MANY_LEVELS: usize = 3;

/// Spells out EXISTS, IN, ANY and ALL of subqueries where they are values, and rows that are compared with subqueries.
pub const SPELL_OUT_PREDICATES: AstRewrite = AstRewrite {
    name: "spell out predicates",
    select: |select, cx| {
        spell_out_predicates(&mut select.projection, &mut cx.copies)?;
        for filter in [&mut select.selection, &mut select.having].into_iter().flatten() {
            spell_out_filter(filter, &mut cx.copies)?;
        }
        Ok(())
    },
    expr: |expr, cx| compare_row(expr, &mut cx.copies),
    ..AstRewrite::NONE
};

/// Rewrites the predicates of a SELECT list; those of its subqueries are left for their own turn.
fn spell_out_predicates(items: &mut [SelectItem], copies: &mut Copies) -> Result<(), SqlError> {
    for item in items {
        let (SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. }) = item else {
            continue;
        };
        spell_out_in(e, true, copies)?;
    }
    Ok(())
}

/// `exists`: EXISTS too.
fn spell_out_in(e: &mut Expr, exists: bool, copies: &mut Copies) -> Result<(), SqlError> {
    try_change_own(e, |expr| {
        if !exists && matches!(expr, Expr::Exists { .. }) {
            return Ok(());
        }
        if let Some(new) = spelled_out(expr, copies)? {
            *expr = new;
        }
        Ok(())
    })
}

fn spelled_out(expr: &Expr, copies: &mut Copies) -> Result<Option<Expr>, SqlError> {
    Ok(match expr {
        Expr::Exists { subquery, negated } => {
            let exists = match counted(subquery)? {
                Some(count) => Expr::Subquery(Box::new(count)),
                None => fill(EXISTS, subquery, None, copies)?,
            };
            Some(negate(*negated, exists))
        }
        Expr::InSubquery { expr, subquery, negated } if let Some(row) = row_items(expr) => {
            Some(negate(*negated, row_in_value(row, &BinaryOperator::Eq, subquery, copies)?))
        }
        Expr::AnyOp { left, .. } | Expr::AllOp { left, .. } if row_items(left).is_some() => {
            row_quantified(expr, false, copies)?
        }
        Expr::InSubquery { expr, subquery, negated } => {
            let any = Some((&**expr, &BinaryOperator::Eq));
            Some(negate(*negated, fill(form_of(expr, subquery), subquery, any, copies)?))
        }
        Expr::AnyOp { left, compare_op, right, .. } => match (&**right, opposite(compare_op)) {
            (Expr::Subquery(q), Some(_)) => {
                Some(fill(form_of(left, q), q, Some((&**left, compare_op)), copies)?)
            }
            _ => None,
        },
        // Not all of them: the opposite holds for one.
        Expr::AllOp { left, compare_op, right } => match (&**right, opposite(compare_op)) {
            (Expr::Subquery(q), Some(op)) => {
                Some(negate(true, fill(form_of(left, q), q, Some((&**left, &op)), copies)?))
            }
            _ => None,
        },
        _ => None,
    })
}

/// The form in which `x IN (subquery)` is spelled out. Each of them is there for what stands in it, and again for what
/// stands in that.
fn form_of(x: &Expr, subquery: &Query) -> &'static str {
    match levels_within(subquery) {
        0 => IN,
        MANY_LEVELS.. if is_plain(x) => IN_OF_MANY,
        _ => IN_OF_FEW,
    }
}

/// Whether an expression has no calls and subqueries, which may not stand in an aggregate.
fn is_plain(e: &Expr) -> bool {
    match e {
        Expr::Identifier(_) | Expr::CompoundIdentifier(_) | Expr::Value(_) => true,
        Expr::Nested(e) | Expr::Cast { expr: e, .. } | Expr::UnaryOp { expr: e, .. } => is_plain(e),
        Expr::BinaryOp { left, right, .. } => is_plain(left) && is_plain(right),
        _ => false,
    }
}

/// How many IN, ANY and ALL of subqueries stand within each other in a query.
fn levels_within(query: &Query) -> usize {
    let mut levels = Levels::default();
    let _ = walk::visit(query, &mut levels);
    levels.most
}

#[derive(Default)]
struct Levels {
    now: usize,
    most: usize,
}

fn is_quantified(e: &Expr) -> bool {
    match e {
        Expr::InSubquery { .. } => true,
        Expr::AnyOp { right, .. } | Expr::AllOp { right, .. } => subquery_of(right).is_some(),
        _ => false,
    }
}

impl Visitor for Levels {
    type Break = ();

    fn pre_visit_expr(&mut self, e: &Expr) -> ControlFlow<()> {
        self.now += usize::from(is_quantified(e));
        self.most = self.most.max(self.now);
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, e: &Expr) -> ControlFlow<()> {
        self.now -= usize::from(is_quantified(e));
        ControlFlow::Continue(())
    }
}

/// Rewrites the predicates of a filter that would not have PostgreSQL's result: rows IN subqueries; what is not a
/// column NOT IN one; and those whose NULL matters, because they do not stand alone or under AND and OR.
fn spell_out_filter(filter: &mut Expr, copies: &mut Copies) -> Result<(), SqlError> {
    spell_out_under(filter, true, copies)
}

/// `alone`: under nothing but AND, where NOT IN is a join that knows NULLs.
fn spell_out_under(filter: &mut Expr, alone: bool, copies: &mut Copies) -> Result<(), SqlError> {
    match filter {
        Expr::Nested(inner) => spell_out_under(inner, alone, copies),
        Expr::BinaryOp { left, op: BinaryOperator::And, right } => {
            spell_out_under(left, alone, copies)?;
            spell_out_under(right, alone, copies)
        }
        Expr::BinaryOp { left, op: BinaryOperator::Or, right } => {
            spell_out_under(left, false, copies)?;
            spell_out_under(right, false, copies)
        }
        Expr::UnaryOp { op: UnaryOperator::Not, expr }
            if let Some(mut inner) = in_subquery(expr) =>
        {
            if let Expr::InSubquery { negated, .. } = &mut inner {
                *negated = !*negated;
            }
            *filter = inner;
            spell_out_under(filter, alone, copies)
        }
        Expr::InSubquery { expr, subquery, negated } => {
            if let Some(row) = row_items(expr) {
                *filter = row_in(row, subquery, *negated, copies)?;
            } else if *negated && (!alone || !reads_columns(expr)) {
                spell_out_in(filter, false, copies)?;
            }
            Ok(())
        }
        Expr::AnyOp { .. } | Expr::AllOp { .. } => {
            if let Some(new) = row_quantified(filter, true, copies)? {
                *filter = new;
            }
            Ok(())
        }
        _ => spell_out_in(filter, false, copies),
    }
}

fn in_subquery(e: &Expr) -> Option<Expr> {
    match e {
        Expr::Nested(inner) => in_subquery(inner),
        Expr::InSubquery { .. } => Some(e.clone()),
        _ => None,
    }
}

/// `(a, b) = (SELECT x, y …)` as `(SELECT (a, b) = (x, y) FROM (SELECT x, y …) AS s (x, y))`: it is NULL of
/// no row, and of more than one there is an error.
fn compare_row(expr: &mut Expr, copies: &mut Copies) -> Result<(), SqlError> {
    use BinaryOperator as B;
    let Expr::BinaryOp { left, op, right } = expr else { return Ok(()) };
    let (Some(row), Some(subquery)) = (row_items(left), subquery_of(right)) else { return Ok(()) };
    if !matches!(op, B::Eq | B::NotEq | B::Lt | B::LtEq | B::Gt | B::GtEq) {
        return Ok(());
    }
    check_width(&row, subquery)?;
    let (values, columns) = (row_names("#x", row.len()), row_names("#v", row.len()));
    if has_calls_of_groups(&row) {
        // The row stays where it is, and each of its columns has a subquery.
        let value = |i: usize| format!("(SELECT \"#v{i}\" FROM (SELECT 1) AS \"#s\" ({columns}))");
        let others: Vec<String> = (0..row.len()).map(value).collect();
        let template = format!("SELECT ROW({values}) {op} ROW({})", others.join(", "));
        *expr = Expr::Nested(Box::new(filled(&template, row, subquery, copies)?));
        return Ok(());
    }
    // Of one column they are no rows but for the word.
    let template = format!(
        "SELECT (SELECT ROW({values}) {op} ROW({columns}) FROM (SELECT 1) AS \"#s\" ({columns}))"
    );
    *expr = filled(&template, row, subquery, copies)?;
    Ok(())
}

/// Whether a row has aggregates or window functions: within a subquery they would be of that.
fn has_calls_of_groups(row: &[Expr]) -> bool {
    let is_call = |e: &Expr| matches!(e, Expr::Function(f) if f.over.is_some() || misplaced_calls::is_aggregate(f));
    row.iter().any(|e| any_own(e, is_call))
}

/// A row that is looked for among those of a subquery stands within it.
fn check_calls(row: &[Expr]) -> Result<(), SqlError> {
    if has_calls_of_groups(row) {
        let message = "an aggregate in a row that is compared with the rows of a subquery";
        return Err(SqlError::unsupported(message)
            .with_hint("Compute the aggregate in a subquery in FROM, and compare its columns."));
    }
    Ok(())
}

fn subquery_of(e: &Expr) -> Option<&Query> {
    match e {
        Expr::Subquery(query) => Some(query),
        Expr::Nested(inner) => subquery_of(inner),
        _ => None,
    }
}

/// 42601 where a row and a subquery differ in their numbers of columns; `*` is left to the planner.
fn check_width(row: &[Expr], subquery: &Query) -> Result<(), SqlError> {
    let many = match misplaced_calls::width(&subquery.body) {
        Some(width) if width > row.len() => "many",
        Some(width) if width < row.len() => "few",
        _ => return Ok(()),
    };
    Err(SqlError::new(SqlState::SYNTAX_ERROR, format!("subquery has too {many} columns")))
}

fn row_names(prefix: &str, width: usize) -> String {
    let names: Vec<String> = (0..width).map(|i| format!("\"{prefix}{i}\"")).collect();
    names.join(", ")
}

/// How often a template has something more than once, where it is to be put in.
fn repeats(template: &str, what: &str) -> usize {
    template.matches(what).count().saturating_sub(1)
}

/// Where a template has its subquery.
const SUBQUERY: &str = "(SELECT 1) AS";

fn filled(
    template: &str,
    row: Vec<Expr>,
    subquery: &Query,
    copies: &mut Copies,
) -> Result<Expr, SqlError> {
    copies.again(subquery, repeats(template, SUBQUERY))?;
    copies.again(&row, repeats(template, "\"#x0\""))?;
    let mut expr = only_item(template)?;
    let _ = walk::visit_mut(&mut expr, &mut Fill { subquery, value: None, row: &row });
    Ok(expr)
}

/// A row compared with any or all rows of a subquery; `None`: with something else.
fn row_quantified(e: &Expr, filter: bool, copies: &mut Copies) -> Result<Option<Expr>, SqlError> {
    let (each, left, op, right) = match e {
        Expr::AnyOp { left, compare_op, right, .. } => (false, left, compare_op, right),
        Expr::AllOp { left, compare_op, right } => (true, left, compare_op, right),
        _ => return Ok(None),
    };
    let (Some(row), Some(subquery)) = (row_items(left), subquery_of(right)) else {
        return Ok(None);
    };
    Ok(match (each, op) {
        (false, BinaryOperator::Eq) if filter => Some(row_in(row, subquery, false, copies)?),
        (true, BinaryOperator::NotEq) if filter => Some(row_in(row, subquery, true, copies)?),
        _ => match opposite(op) {
            // Not all of them: the opposite holds for one.
            Some(op) if each => Some(negate(true, row_in_value(row, &op, subquery, copies)?)),
            Some(_) => Some(negate(false, row_in_value(row, op, subquery, copies)?)),
            None => None,
        },
    })
}

/// Whether a comparison with a row holds for one row of a subquery, as a value: NULL where it surely holds
/// for none and may for one.
fn row_in_value(
    row: Vec<Expr>,
    op: &BinaryOperator,
    subquery: &Query,
    copies: &mut Copies,
) -> Result<Expr, SqlError> {
    check_width(&row, subquery)?;
    check_calls(&row)?;
    let (values, columns) = (row_names("#x", row.len()), row_names("#v", row.len()));
    let from = format!("FROM (SELECT 1) AS \"#s\" ({columns})");
    let holds = format!("ROW({values}) {op} ROW({columns})");
    let template = format!(
        "SELECT CASE WHEN (SELECT count(*) > 0 {from} WHERE {holds}) THEN true \
         WHEN (SELECT count(*) > 0 {from} WHERE ({holds}) IS NULL) THEN NULL ELSE false END"
    );
    filled(&template, row, subquery, copies)
}

/// `EXISTS (SELECT 1 FROM (subquery) AS s (…) WHERE row = s)`. A row is not in a subquery if it surely differs
/// from all of that.
fn row_in(
    row: Vec<Expr>,
    subquery: &Query,
    negated: bool,
    copies: &mut Copies,
) -> Result<Expr, SqlError> {
    check_width(&row, subquery)?;
    check_calls(&row)?;
    let names: Vec<String> = (0..row.len()).map(|i| format!("\"#v{i}\"")).collect();
    let equal: Vec<String> =
        names.iter().enumerate().map(|(i, name)| format!("\"#x{i}\" = {name}")).collect();
    let (equal, surely) = (equal.join(" AND "), if negated { "IS NOT FALSE" } else { "" });
    let not = if negated { "NOT " } else { "" };
    let template = format!(
        "SELECT {not}EXISTS (SELECT 1 FROM (SELECT 1) AS \"#s\" ({}) WHERE ({equal}) {surely})",
        names.join(", ")
    );
    filled(&template, row, subquery, copies)
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
pub(in crate::bind) fn opposite(op: &BinaryOperator) -> Option<BinaryOperator> {
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
pub(in crate::bind) fn fill(
    template: &str,
    subquery: &Query,
    value: Option<(&Expr, &BinaryOperator)>,
    copies: &mut Copies,
) -> Result<Expr, SqlError> {
    copies.again(subquery, repeats(template, SUBQUERY))?;
    if let Some((value, _)) = value {
        copies.again(value, repeats(template, "\"#x\""))?;
    }
    let mut expr = only_item(template)?;
    let _ = walk::visit_mut(&mut expr, &mut Fill { subquery, value, row: &[] });
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

/// Fills a template.
struct Fill<'a> {
    subquery: &'a Query,
    /// What is put in for `#x`, and for `=` behind that.
    value: Option<(&'a Expr, &'a BinaryOperator)>,
    /// What is put in for `#x0` and so on.
    row: &'a [Expr],
}

impl<'a> Fill<'a> {
    fn value_of(&self, name: &str) -> Option<&'a Expr> {
        match name.strip_prefix("#x")? {
            "" => self.value.map(|(value, _)| value),
            at => self.row.get(at.parse::<usize>().ok()?),
        }
    }
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
        if let Expr::Identifier(i) = &*expr
            && let Some(value) = self.value_of(&i.value)
        {
            *expr = Expr::Nested(Box::new(value.clone()));
        }
        ControlFlow::Continue(())
    }
}

#[cfg(test)]
mod tests {
    use super::SPELL_OUT_PREDICATES;
    use crate::bind::rewrites::testing::{assert_rewritten, rows};

    #[test]
    fn exists_is_a_count_where_it_is_a_value() {
        let filter = "SELECT a FROM t WHERE EXISTS (SELECT b FROM u WHERE c)";
        let cases = [
            (
                "SELECT EXISTS (SELECT b FROM u WHERE c) FROM t",
                "SELECT ((SELECT count(*) > 0 FROM u WHERE c)) FROM t",
            ),
            (filter, filter),
        ];
        assert_rewritten(SPELL_OUT_PREDICATES, &cases);
    }

    /// 3 is none of 1 and NULL, as far as is known.
    #[test]
    fn in_has_three_results() {
        let sql = "SELECT a, CASE a IN (SELECT b FROM (VALUES (1), (NULL)) AS w (b)) \
                   WHEN true THEN 'in' WHEN false THEN 'not' ELSE 'unknown' END \
                   FROM (VALUES (1), (3)) AS v (a) ORDER BY a";
        assert_eq!(rows(sql), ["1|in", "3|unknown"]);
    }
}
