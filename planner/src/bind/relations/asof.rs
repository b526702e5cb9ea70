//! `l ASOF [LEFT] JOIN r MATCH_CONDITION (l.t >= r.t) ON l.k = r.k`: every left row with the one right row of its
//! keys that is nearest by the condition; with LEFT also left rows that have none.
//!
//! [`mark`] turns the syntax into an ordinary join whose condition calls `asof_match`; [`rewrite`] then makes
//! an ordinary plan of that join, which batch and views both know:
//!
//! ```text
//! Projection: l.*, latest(r.*) AS r.*
//!   Filter: NOT is_right [AND latest(is_right) IS NOT NULL]
//!     Window: latest(…) OVER (PARTITION BY keys ORDER BY time, tie, r.*)
//!       Union: left rows, right rows (those with keys and a time)
//! ```
//!
//! The order is descending by time for `<=` and `<`. `tie` puts right rows before left ones of the same time
//! where equal times match, else behind. Of right rows of the same time the last one by their columns counts,
//! so that the result is a function of the content.

use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::tree_node::Transformed;
use datafusion::common::{Column, JoinType, Result, ScalarValue};
use datafusion::logical_expr::expr::WindowFunction;
use datafusion::logical_expr::utils::split_conjunction;
use datafusion::logical_expr::{
    BinaryExpr, Expr, ExprFunctionExt, ExprSchemable, Join, LogicalPlan, LogicalPlanBuilder,
    Operator, ident, lit, not,
};
use millrace_common::{SqlError, SqlState};
use millrace_functions::asof::{Place, latest};
use millrace_functions::error::{external, sql_error_from_datafusion};
use millrace_functions::tree::WalkPlan;
use millrace_functions::window_fn::ASOF_MATCH;
use sqlparser::ast::{
    BinaryOperator, Expr as SqlExpr, FunctionArg, FunctionArgExpr, FunctionArguments,
    JoinConstraint, JoinOperator, TableFactor, TableWithJoins,
};

use crate::bind::rewrites::ast::AstRewrite;
use crate::bind::rewrites::plan::PlanRewrite;
use crate::parser::ASOF_LEFT;

const TIME: &str = "#time";
const TIE: &str = "#tie";
const RIGHT: &str = "#right";
const MET: &str = "#met";

/// Turns ASOF joins into joins on a call of `asof_match`.
pub const MARK_ASOF: AstRewrite = AstRewrite {
    name: "mark asof",
    select: |select, _| select.from.iter_mut().try_for_each(mark),
    ..AstRewrite::NONE
};

/// Turns the ASOF joins of a FROM item into joins on a call of `asof_match`.
fn mark(from: &mut TableWithJoins) -> Result<(), SqlError> {
    mark_factor(&mut from.relation)?;
    for join in &mut from.joins {
        mark_factor(&mut join.relation)?;
        if let JoinOperator::AsOf { match_condition, constraint } = &join.join_operator {
            join.join_operator = marked(match_condition, constraint)?;
        }
    }
    Ok(())
}

fn mark_factor(factor: &mut TableFactor) -> Result<(), SqlError> {
    match factor {
        TableFactor::NestedJoin { table_with_joins, .. } => mark(table_with_joins),
        _ => Ok(()),
    }
}

fn marked(condition: &SqlExpr, constraint: &JoinConstraint) -> Result<JoinOperator, SqlError> {
    // The parser wraps the condition where the join is LEFT.
    let (condition, left) = match condition {
        SqlExpr::Function(f) if f.name.to_string() == format!("\"{ASOF_LEFT}\"") => {
            (only_argument(&f.args).unwrap_or(condition), true)
        }
        other => (other, false),
    };
    let mut condition = condition;
    while let SqlExpr::Nested(inner) = condition {
        condition = inner;
    }
    let SqlExpr::BinaryOp { left: a, op, right: b } = condition else {
        return Err(no_comparison());
    };
    if !matches!(
        op,
        BinaryOperator::Gt | BinaryOperator::GtEq | BinaryOperator::Lt | BinaryOperator::LtEq
    ) {
        return Err(no_comparison());
    }
    let on = match constraint {
        JoinConstraint::On(on) => on.clone(),
        JoinConstraint::None => {
            return Err(SqlError::unsupported("an ASOF join without keys")
                .with_hint("Write ON l.key = r.key behind the match condition."));
        }
        _ => return Err(SqlError::unsupported("an ASOF join with USING or NATURAL")),
    };
    let symbol = SqlExpr::value(sqlparser::ast::Value::SingleQuotedString(op.to_string()));
    let call = crate::bind::expressions::desugar::call(
        ASOF_MATCH,
        [a.as_ref().clone(), b.as_ref().clone(), symbol],
    );
    let both = SqlExpr::BinaryOp {
        left: Box::new(call),
        op: BinaryOperator::And,
        right: Box::new(SqlExpr::Nested(Box::new(on))),
    };
    let on = JoinConstraint::On(both);
    Ok(if left { JoinOperator::LeftOuter(on) } else { JoinOperator::Inner(on) })
}

fn only_argument(args: &FunctionArguments) -> Option<&SqlExpr> {
    match args {
        FunctionArguments::List(list) => match list.args.as_slice() {
            [FunctionArg::Unnamed(FunctionArgExpr::Expr(e))] => Some(e),
            _ => None,
        },
        _ => None,
    }
}

fn no_comparison() -> SqlError {
    SqlError::new(
        SqlState::SYNTAX_ERROR,
        "MATCH_CONDITION must be one comparison of a left and a right column with >=, >, <= or <",
    )
}

/// Makes windows of ASOF joins.
pub const LATEST_OF_ASOF: PlanRewrite = PlanRewrite::new("latest of asof", |plan, _| rewrite(plan));

/// Rewrites every join on a call of `asof_match`.
fn rewrite(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    plan.rewrite_down_with_subqueries(|node| match asof_of(&node) {
        Some(join) => Ok(Transformed::yes(Asof::of(join)?.plan(join)?)),
        None => Ok(Transformed::no(node)),
    })
    .map(|t| t.data)
    .map_err(sql_error_from_datafusion)
}

fn asof_of(plan: &LogicalPlan) -> Option<&Join> {
    let LogicalPlan::Join(join) = plan else { return None };
    let marked = split_conjunction(join.filter.as_ref()?).into_iter().any(|e| call(e).is_some());
    marked.then_some(join)
}

fn call(e: &Expr) -> Option<&[Expr]> {
    match e {
        Expr::ScalarFunction(f) if f.func.name() == ASOF_MATCH => Some(&f.args),
        _ => None,
    }
}

/// What an ASOF join says.
struct Asof {
    /// Pairs of expressions over the left and the right side.
    keys: Vec<(Expr, Expr)>,
    times: (Expr, Expr),
    /// The nearest right time is above.
    ahead: bool,
    /// Equal times match.
    or_equal: bool,
    /// Conditions on right rows alone.
    right: Vec<Expr>,
}

impl Asof {
    fn of(join: &Join) -> Result<Asof> {
        let of = |e: &Expr, plan: &LogicalPlan| {
            let columns = e.column_refs();
            !columns.is_empty() && columns.iter().all(|c| plan.schema().has_column(c))
        };
        let sides = |a: &Expr, b: &Expr| -> Option<(Expr, Expr, bool)> {
            if of(a, &join.left) && of(b, &join.right) {
                Some((a.clone(), b.clone(), false))
            } else if of(b, &join.left) && of(a, &join.right) {
                Some((b.clone(), a.clone(), true))
            } else {
                None
            }
        };
        let (mut keys, mut right, mut matched) = (vec![], vec![], None);
        for e in join.filter.iter().flat_map(split_conjunction) {
            if let Some([a, b, Expr::Literal(ScalarValue::Utf8(Some(op)), _)]) = call(e) {
                let (l, r, swapped) = sides(a, b).ok_or_else(|| external(no_comparison()))?;
                let above = op.starts_with('>') != swapped;
                matched = Some((l, r, !above, op.ends_with('=')));
                continue;
            }
            match e {
                Expr::BinaryExpr(BinaryExpr { left: a, op: Operator::Eq, right: b }) => {
                    match sides(a, b) {
                        Some((l, r, _)) => keys.push((l, r)),
                        None if of(e, &join.right) => right.push(e.clone()),
                        None => return Err(other_condition()),
                    }
                }
                e if of(e, &join.right) => right.push(e.clone()),
                _ => return Err(other_condition()),
            }
        }
        for (l, r) in &join.on {
            keys.push((l.clone(), r.clone()));
        }
        if keys.is_empty() {
            let e = SqlError::unsupported("an ASOF join without keys");
            return Err(external(
                e.with_hint("Write ON l.key = r.key behind the match condition."),
            ));
        }
        let Some((l, r, ahead, or_equal)) = matched else {
            return Err(external(SqlError::internal("an ASOF join without its match condition")));
        };
        Ok(Asof { keys, times: (l, r), ahead, or_equal, right })
    }

    /// The type of both times, and its width in keys.
    fn time_width(&self, join: &Join) -> Result<(DataType, usize)> {
        let (l, r) = (&self.times.0, &self.times.1);
        let (l, r) = (l.get_type(join.left.schema())?, r.get_type(join.right.schema())?);
        let refused = |what: String| {
            external(SqlError::unsupported(what).with_hint("Cast both to one type of fixed size."))
        };
        let name = |t: &DataType| millrace_functions::types::type_name(&Some(t.clone()));
        match l.primitive_width() {
            _ if l != r => {
                Err(refused(format!("matching {} with {} in an ASOF join", name(&l), name(&r))))
            }
            Some(width) => Ok((l, width)),
            None => Err(refused(format!("matching {} in an ASOF join", name(&l)))),
        }
    }

    fn plan(&self, join: &Join) -> Result<LogicalPlan> {
        let (_, width) = self.time_width(join)?;
        let union = LogicalPlanBuilder::from(self.left(join)?).union(self.right(join)?)?;
        let right = join.right.schema().fields().len();
        let place = Place { offset: width + 2, right: !self.or_equal };
        let carried = |value: &str, name: &str| -> Result<Expr> {
            let args = vec![ident(value), ident(RIGHT), lit(place.encode())];
            let order = [ident(TIME).sort(!self.ahead, true), ident(TIE).sort(true, true)];
            let ties = (0..right).map(|i| ident(right_name(i)).sort(true, true));
            let call = Expr::from(WindowFunction::new(latest(), args))
                .partition_by((0..self.keys.len()).map(|i| ident(key_name(i))).collect())
                .order_by(order.into_iter().chain(ties).collect())
                .build()?;
            Ok(call.alias(name))
        };
        let mut calls = vec![carried(RIGHT, MET)?];
        for i in 0..right {
            calls.push(carried(&right_name(i), &met_name(i))?);
        }
        let mut kept = not(ident(RIGHT));
        if join.join_type != JoinType::Left {
            kept = kept.and(ident(MET).is_not_null());
        }
        let left = join.left.schema().fields().len();
        let output = join.schema.iter().enumerate().map(|(i, (qualifier, field))| {
            let column = match i.checked_sub(left) {
                // The very column that rows are in order of, so that its watermark is known.
                None if self.is_time(join, i) => ident(TIME),
                None => ident(left_name(i)),
                Some(r) => ident(met_name(r)),
            };
            match qualifier {
                Some(q) => column.alias_qualified(Some(q.clone()), field.name()),
                None => column.alias(field.name()),
            }
        });
        union.window(calls)?.filter(kept)?.project(output.collect::<Vec<_>>())?.build()
    }

    fn is_time(&self, join: &Join, left: usize) -> bool {
        let column = Column::from(join.left.schema().qualified_field(left));
        self.times.0 == Expr::Column(column)
    }

    /// Left rows under the names of the union.
    fn left(&self, join: &Join) -> Result<LogicalPlan> {
        let keys = self.keys.iter().map(|k| k.0.clone());
        let own = columns(&join.left, left_name);
        let other = nulls(&join.right, right_name)?;
        let all = self.named(keys, self.times.0.clone(), false, own, other);
        LogicalPlanBuilder::from(join.left.as_ref().clone()).project(all)?.build()
    }

    /// Right rows that can be met.
    fn right(&self, join: &Join) -> Result<LogicalPlan> {
        let mut plan = LogicalPlanBuilder::from(join.right.as_ref().clone());
        for condition in &self.right {
            plan = plan.filter(condition.clone())?;
        }
        for e in self.keys.iter().map(|k| &k.1).chain([&self.times.1]) {
            plan = plan.filter(e.clone().is_not_null())?;
        }
        let keys = self.keys.iter().map(|k| k.1.clone());
        let own = columns(&join.right, right_name);
        let other = nulls(&join.left, left_name)?;
        plan.project(self.named(keys, self.times.1.clone(), true, other, own))?.build()
    }

    fn named(
        &self,
        keys: impl Iterator<Item = Expr>,
        time: Expr,
        is_right: bool,
        left: Vec<Expr>,
        right: Vec<Expr>,
    ) -> Vec<Expr> {
        let tie = is_right != self.or_equal;
        let keys = keys.enumerate().map(|(i, k)| k.alias(key_name(i)));
        let own = [time.alias(TIME), lit(tie).alias(TIE), lit(is_right).alias(RIGHT)];
        keys.chain(own).chain(left).chain(right).collect()
    }
}

fn other_condition() -> datafusion::error::DataFusionError {
    let e = SqlError::unsupported("a condition of an ASOF join beside equalities");
    external(e.with_hint("Conditions of both sides go to WHERE; those of the left side too."))
}

fn key_name(i: usize) -> String {
    format!("#key{i}")
}

fn left_name(i: usize) -> String {
    format!("#left{i}")
}

fn right_name(i: usize) -> String {
    format!("#right{i}")
}

fn met_name(i: usize) -> String {
    format!("#met{i}")
}

fn columns(plan: &Arc<LogicalPlan>, name: fn(usize) -> String) -> Vec<Expr> {
    let one = |(i, field)| Expr::Column(Column::from(field)).alias(name(i));
    plan.schema().iter().enumerate().map(one).collect()
}

fn nulls(plan: &Arc<LogicalPlan>, name: fn(usize) -> String) -> Result<Vec<Expr>> {
    let fields = plan.schema().fields().iter().enumerate();
    fields.map(|(i, f)| Ok(lit(ScalarValue::try_from(f.data_type())?).alias(name(i)))).collect()
}

#[cfg(test)]
mod tests {
    use super::MARK_ASOF;
    use crate::bind::rewrites::testing::{assert_rewritten, rows};

    #[test]
    fn an_asof_join_becomes_a_join_on_a_call() {
        let sql = "SELECT 1 FROM l ASOF JOIN r MATCH_CONDITION (l.t >= r.t) ON l.k = r.k";
        let expected =
            "SELECT 1 FROM l INNER JOIN r ON \"#asof_match\"(l.t, r.t, '>=') AND (l.k = r.k)";
        assert_rewritten(MARK_ASOF, &[(sql, expected)]);
    }

    /// Of 3, 4 and 6 the last that is not behind 5 is 4; of the other key there is none.
    #[test]
    fn a_left_row_has_the_nearest_right_row_of_its_key() {
        let sql = "SELECT l.k, r.t FROM (VALUES (1, 5), (2, 5)) AS l (k, t) \
                   ASOF JOIN (VALUES (1, 3), (1, 4), (1, 6)) AS r (k, t) \
                   MATCH_CONDITION (l.t >= r.t) ON l.k = r.k";
        assert_eq!(rows(sql), ["1|4"]);
    }
}
