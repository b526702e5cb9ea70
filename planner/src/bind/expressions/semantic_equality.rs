//! Lists and `nullif` of values that are equal without having the same bytes: floats, intervals and documents.
//!
//! DataFusion compares the items of `x IN (a, b)` by bytes. Of floats, which have two zeros, they are
//! brought into one form. Others become `x = ANY (ARRAY[a, b])`, which compares by value
//! ([`millrace_functions::quantified`]), and `nullif(a, b)` a function that does.

use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::common::{DFSchema, Result};
use datafusion::logical_expr::expr::{InList, ScalarFunction};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::utils::merge_schema;
use datafusion::logical_expr::{Expr, ExprSchemable, LogicalPlan, lit};
use millrace_common::SqlError;
use millrace_functions::arrays::NULL_IF;
use millrace_functions::canonical::canonical;
use millrace_functions::error::{external, sql_error_from_datafusion};
use millrace_functions::tree::{Walk, WalkPlan};
use millrace_functions::{byte_order, functions, quantified};

use crate::bind::SessionInfo;
use crate::bind::rewrites::plan::PlanRewrite;

/// Compares items of lists by value.
pub struct CompareByValue;

impl PlanRewrite for CompareByValue {
    fn name(&self) -> &'static str {
        "compare by value"
    }

    fn run(
        &self,
        plan: LogicalPlan,
        _: &SessionInfo,
    ) -> std::result::Result<LogicalPlan, SqlError> {
        rewrite(plan)
    }
}

/// Writes out the comparisons of a plan, those of its subqueries too.
fn rewrite(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    let done = plan.rewrite_up_with_subqueries(|node| {
        let mut concerned = false;
        node.apply_expressions(|e| {
            concerned |= e.any(|e| Ok(is_concerned(e)))?;
            Ok(TreeNodeRecursion::Continue)
        })?;
        if !concerned {
            return Ok(Transformed::no(node));
        }
        let schema = merge_schema(&node.inputs());
        let names = NamePreserver::new(&node);
        node.map_expressions(|e| {
            let name = names.save(&e);
            let new = e.rewrite_up(|e| match written_out(&e, &schema)? {
                Some(new) => Ok(Transformed::yes(new)),
                None => Ok(Transformed::no(e)),
            })?;
            Ok(new.update_data(|e| name.restore(e)))
        })
    });
    done.map(|t| t.data).map_err(sql_error_from_datafusion)
}

fn is_concerned(e: &Expr) -> bool {
    match e {
        Expr::InList(_) => true,
        Expr::ScalarFunction(f) => f.func.name() == "nullif",
        _ => false,
    }
}

fn written_out(e: &Expr, schema: &DFSchema) -> Result<Option<Expr>> {
    let by_value = |e: &Expr| {
        let t = e.get_type(schema)?;
        Ok::<_, datafusion::error::DataFusionError>(!t.is_nested() && byte_order::by_value(&t))
    };
    Ok(match e {
        Expr::InList(InList { expr, list, negated }) if by_value(expr)? => {
            let any = equals_any(expr, list.clone())?;
            Some(if *negated { Expr::Not(Box::new(any)) } else { any })
        }
        Expr::InList(InList { expr, list, negated }) if expr.get_type(schema)?.is_floating() => {
            let list = list.iter().cloned().map(canonical_of).collect();
            let expr = Box::new(canonical_of(expr.as_ref().clone()));
            Some(Expr::InList(InList { expr, list, negated: *negated }))
        }
        Expr::ScalarFunction(ScalarFunction { func, args }) if func.name() == "nullif" => {
            let [a, b] = args.as_slice() else { return Ok(None) };
            if !by_value(a)? || !by_value(b)? {
                return Ok(None);
            }
            let function = functions().scalar(NULL_IF);
            let missing = || external(SqlError::internal(format!("no function {NULL_IF}")));
            Some(function.ok_or_else(missing)?.call(vec![a.clone(), b.clone()]))
        }
        _ => None,
    })
}

/// A float in the form in which equal ones have the same bytes.
fn canonical_of(e: Expr) -> Expr {
    match &e {
        Expr::ScalarFunction(f) if f.func == canonical() => e,
        _ => canonical().call(vec![e]),
    }
}

fn equals_any(value: &Expr, list: Vec<Expr>) -> Result<Expr> {
    let make_array = functions().scalar("make_array");
    let missing = || external(SqlError::internal("no function make_array"));
    let array = make_array.ok_or_else(missing)?.call(list);
    Ok(quantified::compare_any().call(vec![array, value.clone(), lit("=")]))
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    /// Both zeros are equal, and so are a day and its hours.
    #[test]
    fn items_of_lists_are_compared_by_value() {
        let sql =
            "SELECT count(*) FROM (VALUES ('0'::float8)) AS v (x) WHERE x IN ('-0'::float8, 5)";
        assert_eq!(rows(sql), ["1"]);
        let sql = "SELECT count(*) FROM (VALUES (interval '1 day')) AS v (x) \
                   WHERE x IN (interval '24 hours', interval '2 days')";
        assert_eq!(rows(sql), ["1"]);
    }
}
