//! FILTER guards what an aggregate is computed of: PostgreSQL does not look at the argument where the filter
//! is not true. Here arguments are columns, computed for all rows before the filter applies; so an argument
//! that can fail is only computed where the filter is true.

use sqlparser::ast::*;

use crate::bind::expressions::desugar::{resolved, take};
use crate::bind::rewrites::ast::AstRewrite;

/// Computes what an aggregate is of only where its FILTER is true.
pub const GUARD_FILTERS: AstRewrite = AstRewrite {
    name: "guard filters",
    expr: |expr, _| {
        if let Expr::Function(function) = expr {
            guard(function);
        }
        Ok(())
    },
    ..AstRewrite::NONE
};

/// `f(arg) FILTER (WHERE c)` as `f(CASE WHEN c THEN arg END) FILTER (WHERE c)`.
fn guard(function: &mut Function) {
    let Some(filter) = &function.filter else { return };
    // Of an ordered-set aggregate the argument is a constant.
    if !function.within_group.is_empty() {
        return;
    }
    let FunctionArguments::List(list) = &mut function.args else { return };
    if let Some(FunctionArg::Unnamed(FunctionArgExpr::Expr(arg))) = list.args.first_mut()
        && can_fail(arg)
    {
        let value = take(arg);
        *arg = resolved("case", [filter.as_ref().clone(), value]);
    }
}

fn can_fail(arg: &Expr) -> bool {
    !matches!(
        arg,
        Expr::Identifier(_) | Expr::CompoundIdentifier(_) | Expr::Value(_) | Expr::Tuple(_)
    )
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    /// 10 is divided by 5 only.
    #[test]
    fn what_does_not_pass_a_filter_is_not_computed() {
        let sql = "SELECT sum(10 / a) FILTER (WHERE a <> 0) FROM (VALUES (0), (5)) AS v (a)";
        assert_eq!(rows(sql), ["2"]);
    }
}
