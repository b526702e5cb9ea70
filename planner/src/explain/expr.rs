//! Expressions as SQL text, for EXPLAIN: operators infix, strings quoted, casts as `value::type`.

use std::fmt::Write;

use datafusion::common::ScalarValue;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::ScalarFunctionExpr;
use datafusion::physical_expr::expressions::{
    BinaryExpr, CastExpr, Column, IsNotNullExpr, IsNullExpr, Literal, NotExpr, TryCastExpr,
};
use datafusion::physical_expr_common::physical_expr::fmt_sql;
use millrace_common::SqlType;
use millrace_functions::expr::ExprRef;

/// Our functions that are operators in SQL.
const INFIX: [(&str, &str, u8); 5] = [
    ("pg_add", "+", 40),
    ("pg_sub", "-", 40),
    ("pg_mul", "*", 45),
    ("pg_div", "/", 45),
    ("pg_mod", "%", 45),
];

/// An expression with its columns' own names.
pub fn expr_text(e: &ExprRef) -> String {
    let mut out = String::new();
    write_expr(&mut out, e, 0);
    out
}

/// `outer`: how strongly what is around binds; a weaker operator gets parentheses.
fn write_expr(out: &mut String, e: &ExprRef, outer: u8) {
    if let Some(c) = e.downcast_ref::<Column>() {
        out.push_str(c.name());
    } else if let Some(l) = e.downcast_ref::<Literal>() {
        out.push_str(&literal(l.value()));
    } else if let Some(b) = e.downcast_ref::<BinaryExpr>() {
        let operator = b.op().to_string();
        infix(out, [b.left(), b.right()], &operator, precedence(b.op()), outer);
    } else if let Some(f) = e.downcast_ref::<ScalarFunctionExpr>() {
        function(out, f, outer);
    } else if let Some(c) = e.downcast_ref::<CastExpr>() {
        cast(out, c.expr(), &type_name(c.cast_type()));
    } else if let Some(c) = e.downcast_ref::<TryCastExpr>() {
        cast(out, c.expr(), &type_name(c.cast_type()));
    } else if let Some(n) = e.downcast_ref::<IsNullExpr>() {
        postfix(out, n.arg(), " IS NULL", outer);
    } else if let Some(n) = e.downcast_ref::<IsNotNullExpr>() {
        postfix(out, n.arg(), " IS NOT NULL", outer);
    } else if let Some(n) = e.downcast_ref::<NotExpr>() {
        out.push_str("NOT ");
        write_expr(out, n.arg(), 50);
    } else {
        let _ = write!(out, "{}", fmt_sql(e.as_ref()));
    }
}

fn precedence(op: &Operator) -> u8 {
    match op {
        Operator::Or => 5,
        Operator::And => 10,
        other => other.precedence().max(15),
    }
}

fn infix(out: &mut String, [left, right]: [&ExprRef; 2], op: &str, own: u8, outer: u8) {
    let parens = own < outer;
    out.push_str(if parens { "(" } else { "" });
    write_expr(out, left, own);
    let _ = write!(out, " {op} ");
    write_expr(out, right, own + 1);
    out.push_str(if parens { ")" } else { "" });
}

fn postfix(out: &mut String, e: &ExprRef, text: &str, outer: u8) {
    let parens = outer > 20;
    out.push_str(if parens { "(" } else { "" });
    write_expr(out, e, 30);
    out.push_str(text);
    out.push_str(if parens { ")" } else { "" });
}

fn cast(out: &mut String, e: &ExprRef, to: &str) {
    write_expr(out, e, 60);
    let _ = write!(out, "::{to}");
}

fn function(out: &mut String, f: &ScalarFunctionExpr, outer: u8) {
    let name = f.fun().name();
    if let (Some((_, op, own)), [left, right]) = (INFIX.iter().find(|(n, ..)| *n == name), f.args())
    {
        return infix(out, [left, right], op, *own, outer);
    }
    if let (Some(_), [arg]) = (name.strip_prefix("cast_to_"), f.args()) {
        return cast(out, arg, &type_name(f.return_type()));
    }
    out.push_str(name);
    out.push('(');
    for (i, arg) in f.args().iter().enumerate() {
        out.push_str(if i > 0 { ", " } else { "" });
        write_expr(out, arg, 0);
    }
    out.push(')');
}

fn type_name(t: &arrow::datatypes::DataType) -> String {
    SqlType::from_arrow(t).map_or_else(|_| t.to_string(), |t| t.to_string())
}

fn literal(value: &ScalarValue) -> String {
    match value {
        ScalarValue::Utf8(Some(s))
        | ScalarValue::LargeUtf8(Some(s))
        | ScalarValue::Utf8View(Some(s)) => {
            format!("'{}'", s.replace('\'', "''"))
        }
        ScalarValue::IntervalMonthDayNano(Some(i)) => interval(i.months, i.days, i.nanoseconds),
        other => other.to_string(),
    }
}

fn interval(months: i32, days: i32, nanos: i64) -> String {
    let mut parts = Vec::new();
    if months != 0 {
        parts.push(format!("{months} months"));
    }
    if days != 0 {
        parts.push(format!("{days} days"));
    }
    if nanos != 0 || parts.is_empty() {
        parts.push(format!("{} seconds", nanos as f64 / 1e9));
    }
    format!("interval '{}'", parts.join(" "))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use datafusion::physical_expr::expressions::lit;

    use super::*;

    fn column(name: &str) -> ExprRef {
        Arc::new(Column::new(name, 0))
    }

    fn binary(l: ExprRef, op: Operator, r: ExprRef) -> ExprRef {
        Arc::new(BinaryExpr::new(l, op, r))
    }

    #[test]
    fn parentheses_only_where_they_matter() {
        let a = || binary(column("a"), Operator::Eq, lit("it's"));
        let or = binary(a(), Operator::Or, a());
        let and = binary(Arc::clone(&or), Operator::And, Arc::new(IsNullExpr::new(column("b"))));
        assert_eq!(expr_text(&or), "a = 'it''s' OR a = 'it''s'");
        assert_eq!(expr_text(&and), "(a = 'it''s' OR a = 'it''s') AND b IS NULL");
        let minus = |l, r| binary(l, Operator::Minus, r);
        let nested = minus(column("a"), minus(column("b"), column("c")));
        assert_eq!(expr_text(&nested), "a - (b - c)");
    }
}
