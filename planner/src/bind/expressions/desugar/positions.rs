//! Numbers that are no values: those of rows in LIMIT, OFFSET and FETCH, and positions in GROUP BY and ORDER BY.

use millrace_common::{SqlError, SqlState, SqlType};
use millrace_functions::window_fn::WITH_TIES;
use sqlparser::ast::*;

use super::ops::{Op, call, null, number_text, ours, string, take, unwrap_number};
use crate::bind::ordering::limits;
use crate::bind::rewrites::ast::AstRewrite;

/// Keeps positions and numbers of rows as they are written, and checks these.
pub const KEEP_POSITIONS: AstRewrite = AstRewrite {
    name: "keep positions",
    query: |query, cx| {
        // Within others it may name what is theirs.
        if cx.queries == 1
            && let Some(LimitClause::LimitOffset { limit, offset, .. }) = &query.limit_clause
        {
            let limit = limit.iter().map(|e| (e, "LIMIT"));
            let mut counts = limit.chain(offset.iter().map(|o| (&o.value, "OFFSET")));
            counts.try_for_each(|(e, clause)| limits::check(e, clause))?;
        }
        Ok(())
    },
    query_done: |query, _| {
        fetch_to_limit(query)?;
        if let Some(OrderBy { kind: OrderByKind::Expressions(exprs), .. }) = &mut query.order_by {
            exprs.iter_mut().for_each(|o| unwrap_number(&mut o.expr));
        }
        if let Some(LimitClause::LimitOffset { limit, offset, .. }) = &mut query.limit_clause {
            // NULL is no limit.
            let _ = limit.take_if(|e| is_null(e));
            let _ = offset.take_if(|o| is_null(&o.value));
            let mut counts =
                limit.iter().chain(offset.iter().map(|o| &o.value)).filter_map(number_text);
            counts.try_for_each(limits::check_size)?;
            limit.iter_mut().for_each(|limit| unwrap_limit(limit, "LIMIT"));
            offset.iter_mut().for_each(|o| unwrap_limit(&mut o.value, "OFFSET"));
        }
        Ok(())
    },
    select_done: |select, _| {
        if let GroupByExpr::Expressions(exprs, _) = &mut select.group_by {
            exprs.iter_mut().for_each(unwrap_number);
        }
        Ok(())
    },
    ..AstRewrite::NONE
};

/// FETCH FIRST n ROWS ONLY is the standard's LIMIT n.
fn fetch_to_limit(query: &mut Query) -> Result<(), SqlError> {
    let Some(fetch) = query.fetch.take() else { return Ok(()) };
    if fetch.percent {
        return Err(SqlError::unsupported("FETCH FIRST … PERCENT"));
    }
    let one = || Expr::value(Value::Number("1".into(), false));
    let mut quantity = fetch.quantity.unwrap_or_else(one);
    if fetch.with_ties {
        number_text(&quantity).map_or(Ok(()), limits::check_size)?;
        unwrap_limit(&mut quantity, "LIMIT");
        quantity = call(WITH_TIES, [quantity]);
    }
    match &mut query.limit_clause {
        None => {
            let limit = Some(quantity);
            query.limit_clause =
                Some(LimitClause::LimitOffset { limit, offset: None, limit_by: Vec::new() });
        }
        Some(LimitClause::LimitOffset { limit: limit @ None, .. }) => *limit = Some(quantity),
        Some(_) => {
            return Err(SqlError::new(
                SqlState::SYNTAX_ERROR,
                "multiple LIMIT clauses not allowed",
            ));
        }
    }
    Ok(())
}

fn is_null(e: &Expr) -> bool {
    match e {
        Expr::Nested(inner) => is_null(inner),
        Expr::Value(v) => v.value == Value::Null,
        _ => false,
    }
}

/// A whole number stays as it is; everything else becomes a bigint, in which LIMIT counts.
fn unwrap_limit(e: &mut Expr, clause: &str) {
    if number_text(e).is_some_and(|text| text.parse::<i64>().is_ok()) {
        return unwrap_number(e);
    }
    match e {
        Expr::Value(v) if matches!(v.value, Value::Number(_, _)) => {}
        // Its rows are counted elsewhere.
        Expr::Function(f)
            if f.name == ObjectName::from(vec![Ident::with_quote('"', WITH_TIES)]) => {}
        Expr::BinaryOp { op, right, .. } if Op::decode(op) == Some(Op::Parameter) => {
            *e = ours(Op::Cast(SqlType::BigInt), take(right), null());
        }
        other => *other = ours(Op::Rows, take(other), Box::new(string(clause))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bind::rewrites::testing::{assert_rewritten, rewritten};

    #[test]
    fn rows_are_limited_by_numbers() {
        let cases = [
            ("SELECT a FROM t FETCH FIRST 3 ROWS ONLY", "SELECT a FROM t LIMIT 3"),
            ("SELECT a FROM t LIMIT NULL", "SELECT a FROM t"),
            ("SELECT a FROM t LIMIT 2 OFFSET 1", "SELECT a FROM t LIMIT 2 OFFSET 1"),
        ];
        assert_rewritten(KEEP_POSITIONS, &cases);
    }

    #[test]
    fn a_limit_names_no_column() {
        let e = rewritten(KEEP_POSITIONS, "SELECT a FROM t LIMIT a").unwrap_err();
        assert_eq!(e.state, SqlState("42P10"));
    }
}
