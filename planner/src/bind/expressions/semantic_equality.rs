//! Lists and `nullif` of values that are equal without having the same bytes: floats, intervals and documents. And lists
//! with a CASE over columns.
//!
//! DataFusion compares the items of `x IN (a, b)` by bytes. Of floats, which have two zeros, they are
//! brought into one form. Others become `x = ANY (ARRAY[a, b])`, which compares by value
//! ([`millrace_functions::quantified`]), and `nullif(a, b)` a function that does.
//!
//! DataFusion makes a set of the items that have one value for no rows at all, which it takes for constants. `CASE a WHEN …`
//! over columns has: NULL. Such lists become `x = ANY (ARRAY[a, b])`, too. An item may also become a CASE later
//! ([`crate::optimizer::lists`]).

use datafusion::common::tree_node::Transformed;
use datafusion::common::{DFSchema, Result};
use datafusion::logical_expr::expr::{InList, ScalarFunction};
use datafusion::logical_expr::{Expr, ExprSchemable, LogicalPlan, lit};
use millrace_common::SqlError;
use millrace_functions::arrays::NULL_IF;
use millrace_functions::canonical::canonical;
use millrace_functions::error::external;
use millrace_functions::tree::Walk;
use millrace_functions::{byte_order, functions, quantified};

use crate::bind::rewrites::plan::{PlanRewrite, change_expressions};

/// Compares items of lists by value.
pub const COMPARE_BY_VALUE: PlanRewrite =
    PlanRewrite::new("compare by value", |plan, _| rewrite(plan));

/// Writes out the comparisons of a plan, those of its subqueries too.
fn rewrite(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    change_expressions(
        plan,
        |e| Ok(is_concerned(e)),
        |e, schema| {
            Ok(match written_out(&e, schema)? {
                Some(new) => Transformed::yes(new),
                None => Transformed::no(e),
            })
        },
    )
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
        Expr::InList(InList { expr, list, negated })
            if by_value(expr)? || has_case_of_columns(list)? =>
        {
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

fn has_case_of_columns(list: &[Expr]) -> Result<bool> {
    let is_case =
        |e: &Expr| Ok(matches!(e, Expr::Case(_)) && (e.any_column_refs() || e.contains_outer()));
    for item in list {
        if item.any(is_case)? {
            return Ok(true);
        }
    }
    Ok(false)
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

    #[test]
    fn an_item_of_a_list_has_the_value_of_its_row() {
        let sql = "SELECT count(*) FROM (VALUES (5), (6)) AS v (x) \
                   WHERE 5 IN (CASE x WHEN 5 THEN x WHEN 6 THEN 0 END, 7)";
        assert_eq!(rows(sql), ["1"]);
        let sql = "SELECT count(*) FROM (VALUES (5), (6)) AS v (x) \
                   WHERE 5 NOT IN (1 + CASE x WHEN 5 THEN 4 WHEN 6 THEN 0 END, 7)";
        assert_eq!(rows(sql), ["1"]);
    }

    const V: &str =
        "(VALUES (1, 5, NULL, 5), (2, NULL, NULL, 0), (3, NULL, 6, 5)) AS v (id, a, b, x)";

    /// The rows of [`V`], by their `id`, for which a condition is true.
    fn found(condition: &str) -> Vec<String> {
        rows(&format!("SELECT id FROM {V} WHERE {condition} ORDER BY id"))
    }

    /// The optimiser writes a CASE for it.
    #[test]
    fn coalesce_in_a_list_has_the_value_of_its_row() {
        assert_eq!(found("x IN (coalesce(a, b, 0), 7, 8, 9)"), ["1", "2"]);
        assert_eq!(found("x NOT IN (coalesce(a, b, 0), 7, 8, 9)"), ["3"]);
        assert_eq!(found("x + 1 IN (coalesce(a, b, 0) + 1, 70)"), ["1", "2"]);
        assert_eq!(found("x = ANY (ARRAY[coalesce(a, b, 0), 7, 8, 9])"), ["1", "2"]);
    }

    #[test]
    fn a_column_of_a_subquery_in_a_list_has_the_value_of_its_row() {
        let case = "CASE WHEN a > 0 THEN a WHEN b > 0 THEN 1 ELSE 0 END";
        let s = format!("SELECT id, x, {case} AS c FROM {V}");
        let filter = "WHERE x IN (c, 7, 8, 9) ORDER BY id";
        assert_eq!(rows(&format!("SELECT id FROM ({s}) AS s {filter}")), ["1", "2"]);
        assert_eq!(rows(&format!("WITH s AS ({s}) SELECT id FROM s {filter}")), ["1", "2"]);
    }

    /// Its count over no rows, which a CASE adds, is not the one of all.
    #[test]
    fn a_count_in_a_list_has_the_value_of_its_row() {
        let count = "SELECT count(*) FROM (VALUES (1), (1), (1), (1), (1), (3)) AS w (k) \
                     WHERE w.k = v.id";
        assert_eq!(found(&format!("x IN (70, ({count}), 80, 90)")), ["1", "2"]);
    }

    #[test]
    fn a_case_without_columns_in_a_list_has_the_value_of_its_row() {
        let random = "CASE WHEN random() < 0 THEN 1 WHEN random() >= 0 THEN 5 ELSE 0 END";
        assert_eq!(found(&format!("x IN ({random}, 7, 8, 9)")), ["1", "3"]);
        let exists = |k| format!("EXISTS (SELECT 1 FROM (VALUES ({k})) AS w{k} (k) WHERE k = id)");
        let case = format!("CASE WHEN {} THEN 5 WHEN {} THEN 6 ELSE 0 END", exists(1), exists(3));
        assert_eq!(found(&format!("x IN ({case}, 70, 80, 90)")), ["1", "2"]);
    }

    /// What is computed while a statement is bound has not been simplified.
    #[test]
    fn a_case_in_a_list_of_constants_has_its_value() {
        let five = "CASE WHEN 1 > 2 THEN 1 WHEN 1 < 2 THEN 5 ELSE 0 END";
        let last = format!("CASE WHEN 5 IN ({five}, 7) THEN 2 ELSE 1 END");
        assert_eq!(rows(&format!("SELECT count(*) FROM generate_series(1, {last})")), ["2"]);
    }
}
