//! `||`: of texts, bytes, documents and arrays.

use datafusion::arrow::datatypes::DataType;
use datafusion::common::{DFSchema, Result, ScalarValue};
use datafusion::logical_expr::Expr;
use millrace_common::SqlType;
use millrace_functions::call;
use millrace_functions::error::external;
use millrace_functions::functions;
use millrace_functions::size_limits::text_concat;

use super::coercion::cast_expr;
use super::{OperatorPlanner, Seen, describe, is_text, no_operator};

impl OperatorPlanner {
    fn concat_arrays(&self, left: Expr, right: Expr, lt: &Seen, rt: &Seen) -> Result<Expr> {
        let none = || external(no_operator(&describe("||", lt, rt)));
        let item = |t: &Seen| match t {
            Some(DataType::List(item)) => Some(item.data_type().clone()),
            _ => None,
        };
        let fit = |e: Expr, t: &Seen, to: &DataType| match t {
            None => self.coerce_unknown_like(e, to),
            Some(t) if t == to => Ok(e),
            Some(t) => match (SqlType::from_arrow(t), SqlType::from_arrow(to)) {
                (Ok(a), Ok(b)) if call::implicit_cast(a, b) => cast_expr(e, t, b).map_err(external),
                _ => Err(none()),
            },
        };
        let (name, args) = match (item(lt), item(rt)) {
            (Some(a), Some(b)) if a == b => ("array_concat", vec![left, right]),
            (Some(a), None) if is_word(&right) => {
                ("array_append", vec![left, self.coerce_unknown_like(right, &a)?])
            }
            (None, Some(b)) if is_word(&left) => {
                ("array_prepend", vec![self.coerce_unknown_like(left, &b)?, right])
            }
            (Some(_), None) if rt.is_none() => {
                let to = lt.clone().unwrap_or(DataType::Null);
                ("array_concat", vec![left, self.coerce_unknown_like(right, &to)?])
            }
            (None, Some(_)) if lt.is_none() => {
                let to = rt.clone().unwrap_or(DataType::Null);
                ("array_concat", vec![self.coerce_unknown_like(left, &to)?, right])
            }
            (Some(a), None) => ("array_append", vec![left, fit(right, rt, &a)?]),
            (None, Some(b)) => ("array_prepend", vec![fit(left, lt, &b)?, right]),
            _ => return Err(none()),
        };
        let function = functions().scalar(name).ok_or_else(none)?;
        Ok(function.call(args))
    }

    pub(super) fn concat(&self, left: Expr, right: Expr, schema: &DFSchema) -> Result<Expr> {
        let (lt, rt) = (self.seen(&left, schema)?, self.seen(&right, schema)?);
        let list = |t: &Seen| matches!(t, Some(DataType::List(_) | DataType::LargeList(_)));
        if list(&lt) || list(&rt) {
            return self.concat_arrays(left, right, &lt, &rt);
        }
        let json = |t: &Seen| matches!(t, Some(DataType::LargeUtf8));
        if (json(&lt) && (json(&rt) || rt.is_none())) || (json(&rt) && lt.is_none()) {
            return self.call("jsonb_concat", vec![left, right], schema);
        }
        let texty = |t: &Seen| t.as_ref().is_none_or(is_text);
        let bytes = |t: &Seen| matches!(t, Some(DataType::Binary));
        if (bytes(&lt) || bytes(&rt))
            && (bytes(&lt) || lt.is_none())
            && (bytes(&rt) || rt.is_none())
        {
            return self.call("bytea_concat", vec![left, right], schema);
        }
        if !texty(&lt) && !texty(&rt) {
            return Err(external(no_operator(&describe("||", &lt, &rt))));
        }
        let to_text = |e: Expr, t: &Seen| match t {
            None => self.coerce_unknown(e, SqlType::Text),
            Some(t) if is_text(t) => Ok(e),
            Some(t) => cast_expr(e, t, SqlType::Text).map_err(external),
        };
        let (left, right) = (to_text(left, &lt)?, to_text(right, &rt)?);
        Ok(text_concat().call(vec![left, right]))
    }
}

/// A literal that is not the text of an array.
fn is_word(e: &Expr) -> bool {
    matches!(e, Expr::Literal(ScalarValue::Utf8(Some(text)), _) if !text.trim_start().starts_with('{'))
}
