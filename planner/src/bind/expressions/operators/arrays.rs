//! Functions and operators of arrays, and the operators that arrays share with documents.

use std::sync::Arc;

use datafusion::arrow::datatypes::{DataType, Field};
use datafusion::common::{DFSchema, Result, ScalarValue};
use datafusion::error::DataFusionError;
use datafusion::logical_expr::expr::Case;
use datafusion::logical_expr::{Expr, ScalarUDF, lit};
use millrace_common::types::Element;
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_functions::error::external;
use millrace_functions::functions;
use millrace_functions::quantified::compare_any;
use millrace_functions::types::common_type;
use millrace_functions::types::type_name;
use sqlparser::ast::BinaryOperator;

use super::coercion::{cast_expr, implicit};
use super::{OperatorPlanner, Seen, describe, no_operator};

fn known(name: &str) -> Result<Arc<ScalarUDF>> {
    let none = || external(SqlError::internal(format!("no function {name}")));
    functions().scalar(name).ok_or_else(none)
}

fn no_subscripts(t: &Seen) -> DataFusionError {
    let name = type_name(t);
    let message = format!("cannot subscript type {name} because it does not support subscripting");
    external(SqlError::new(SqlState::DATATYPE_MISMATCH, message))
}

/// The argument of an aggregate that makes an array of its values.
pub(super) fn scalar(args: Vec<Expr>, seen: &[Seen]) -> Result<Expr> {
    match (<[Expr; 1]>::try_from(args), seen) {
        (Ok(_), [Some(DataType::List(_))]) => {
            let e = SqlError::unsupported("an array of more than one dimension");
            Err(external(e.with_hint("jsonb_agg makes a document of arrays.")))
        }
        (Ok([value]), _) => Ok(value),
        (Err(_), _) => Err(external(SqlError::internal("one argument is expected"))),
    }
}

impl OperatorPlanner {
    /// `op ANY (array)`: the array's elements and the value as one type.
    pub(super) fn any(&self, args: Vec<Expr>, seen: &[Seen]) -> Result<Expr> {
        let types: Vec<String> = seen.iter().take(2).map(type_name).collect();
        let (Ok([value, list, op]), [vt, lt, _]) = (<[Expr; 3]>::try_from(args), seen) else {
            return Err(external(SqlError::internal("ANY without its operands")));
        };
        let symbol = match &op {
            Expr::Literal(v, _) => v.try_as_str().flatten().unwrap_or("=").to_owned(),
            _ => "=".to_owned(),
        };
        let none = || external(no_operator(&types.join(&format!(" {symbol} ANY "))));
        let any = |list, value| compare_any().call(vec![list, value, op.clone()]);
        let array = |t: &DataType| DataType::List(Arc::new(Field::new_list_field(t.clone(), true)));
        let (value, list, vt, item) = match (vt, lt) {
            (None, Some(DataType::List(item))) => {
                let t = item.data_type().clone();
                (self.coerce_unknown_like(value, &t)?, list, t.clone(), t)
            }
            (Some(vt), None) => {
                let list = self.coerce_unknown_like(list, &array(vt))?;
                (value, list, vt.clone(), vt.clone())
            }
            (Some(vt), Some(DataType::List(item))) => {
                (value, list, vt.clone(), item.data_type().clone())
            }
            (None, None) => {
                let text = DataType::Utf8;
                let list = self.coerce_unknown_like(list, &array(&text))?;
                (self.coerce_unknown_like(value, &text)?, list, text.clone(), text)
            }
            _ => return Err(none()),
        };
        if vt == item {
            return Ok(any(list, value));
        }
        let Some(common) = common_type(&vt, &item) else { return Err(none()) };
        let list = match (SqlType::from_arrow(&common).ok().and_then(Element::of), item == common) {
            (_, true) => list,
            (Some(element), false) => {
                cast_expr(list, &array(&item), SqlType::Array(element)).map_err(external)?
            }
            (None, false) => return Err(none()),
        };
        Ok(any(list, self.implicit(value, &vt, &common)?))
    }

    /// `ARRAY[…]`, of elements that have a type in common.
    pub(super) fn array(&self, args: Vec<Expr>, seen: &[Seen]) -> Result<Expr> {
        if seen.iter().any(|t| matches!(t, Some(DataType::List(_)))) {
            let e = SqlError::unsupported("an array of more than one dimension");
            return Err(external(e));
        }
        let elements = self.to_common("ARRAY", args, seen)?;
        Ok(known("make_array")?.call(elements))
    }

    /// `array[n]`, or a part of a document.
    pub(super) fn item(&self, args: Vec<Expr>, seen: &[Seen], schema: &DFSchema) -> Result<Expr> {
        let (mut args, mut seen) = (args.into_iter(), seen.iter());
        let (Some(value), Some(t)) = (args.next(), seen.next()) else {
            return Err(external(SqlError::internal("a subscript of nothing")));
        };
        let keys = args.zip(seen);
        match t {
            Some(DataType::LargeUtf8) => {
                let path = keys.map(|(key, t)| self.step(key, t)).collect::<Result<Vec<_>>>()?;
                let path = known("make_array")?.call(path);
                self.call("jsonb_follow", vec![value, path], schema)
            }
            Some(DataType::List(_)) => {
                let keys = keys.map(|(key, t)| self.subscript(key, t));
                let mut keys = keys.collect::<Result<Vec<_>>>()?;
                let key = match (keys.pop(), keys.is_empty()) {
                    (Some(only), true) => only,
                    // It has one dimension.
                    _ => lit(ScalarValue::Int64(None)),
                };
                Ok(known("array_item")?.call(vec![value, key]))
            }
            t => Err(no_subscripts(t)),
        }
    }

    /// `array[from:to]`.
    pub(super) fn slice(&self, args: Vec<Expr>, seen: &[Seen]) -> Result<Expr> {
        let (Ok([value, from, to]), [t, ft, tt]) = (<[Expr; 3]>::try_from(args), seen) else {
            return Err(external(SqlError::internal("a slice without bounds")));
        };
        match t {
            Some(DataType::LargeUtf8) => {
                let message = "jsonb subscript does not support slices";
                Err(external(SqlError::new(SqlState::DATATYPE_MISMATCH, message)))
            }
            Some(DataType::List(_)) => {
                let (from, to) = (self.subscript(from, ft)?, self.subscript(to, tt)?);
                Ok(known("array_slice_of")?.call(vec![value, from, to]))
            }
            t => Err(no_subscripts(t)),
        }
    }

    /// `width_bucket(value, thresholds)`.
    pub(super) fn bucket(&self, args: Vec<Expr>, seen: &[Seen]) -> Result<Expr> {
        let types: Vec<String> = seen.iter().map(type_name).collect();
        let none = || {
            let call = format!("width_bucket({})", types.join(", "));
            external(millrace_functions::error::undefined_function(&call))
        };
        let (Ok([value, list]), [vt, lt]) = (<[Expr; 2]>::try_from(args), seen) else {
            return Err(none());
        };
        let (value, list) = match (vt, lt) {
            (None, Some(DataType::List(item))) => {
                (self.coerce_unknown_like(value, item.data_type())?, list)
            }
            (Some(t), None) => {
                let array = DataType::List(Arc::new(Field::new_list_field(t.clone(), true)));
                (value, self.coerce_unknown_like(list, &array)?)
            }
            (Some(t), Some(DataType::List(item))) if common_type(t, item.data_type()).is_some() => {
                (value, list)
            }
            _ => return Err(none()),
        };
        Ok(known("width_bucket_of")?.call(vec![value, list]))
    }

    /// A subscript of an array.
    fn subscript(&self, key: Expr, t: &Seen) -> Result<Expr> {
        match t {
            None => self.coerce_unknown(key, SqlType::Int),
            Some(t) if t.is_integer() => Ok(key),
            Some(t) if t.is_numeric() => cast_expr(key, t, SqlType::BigInt).map_err(external),
            Some(_) => {
                let message = "array subscript must have type integer";
                Err(external(SqlError::new(SqlState::DATATYPE_MISMATCH, message)))
            }
        }
    }

    /// A subscript of a document: a step of a path.
    fn step(&self, key: Expr, t: &Seen) -> Result<Expr> {
        match t {
            None => self.coerce_unknown(key, SqlType::Text),
            Some(DataType::Utf8 | DataType::Utf8View) => Ok(key),
            Some(t) if t.is_integer() => cast_expr(key, t, SqlType::Text).map_err(external),
            t => {
                let message = format!("subscript type {} is not supported", type_name(t));
                let hint = "jsonb subscript must be coercible to either integer or text.";
                let e = SqlError::new(SqlState::DATATYPE_MISMATCH, message).with_hint(hint);
                Err(external(e))
            }
        }
    }

    /// `generate_series` as an array: of integers, if all arguments are, or of times.
    pub(super) fn series(&self, args: Vec<Expr>, seen: &[Seen]) -> Result<Expr> {
        let types: Vec<String> = seen.iter().map(type_name).collect();
        let none = || {
            let call = format!("generate_series({})", types.join(", "));
            external(millrace_functions::error::undefined_function(&call))
        };
        if !(2..=3).contains(&args.len()) {
            return Err(none());
        }
        let list = functions().scalar("generate_series").ok_or_else(none)?;
        let any = |wanted: fn(&DataType) -> bool| seen.iter().flatten().any(wanted);
        if any(|t| matches!(t, DataType::Date32 | DataType::Timestamp(_, _))) {
            return Ok(list.call(self.series_of_times(args, seen, &none)?));
        }
        if any(|t| t.is_decimal()) {
            let e = SqlError::unsupported("generate_series of numeric in this place");
            return Err(external(e.with_hint("Write it in FROM.")));
        }
        if !any(DataType::is_integer) {
            return Err(none());
        }
        let wide = seen.iter().any(|t| matches!(t, Some(DataType::Int64)));
        let mut bounds = Vec::with_capacity(args.len());
        for (arg, t) in args.into_iter().zip(seen) {
            bounds.push(match t {
                None => self.coerce_unknown(arg, SqlType::BigInt)?,
                Some(t) if t.is_integer() => implicit(arg, t, &DataType::Int64)?,
                Some(_) => return Err(none()),
            });
        }
        let call = list.call(bounds);
        match wide {
            true => Ok(call),
            false => {
                let int4 = SqlType::Array(Element::Int);
                let int8 = SqlType::Array(Element::BigInt).to_arrow();
                cast_expr(call, &int8, int4).map_err(external)
            }
        }
    }

    /// The arguments of a series of times. There is none of dates: they are times with a zone.
    fn series_of_times(
        &self,
        args: Vec<Expr>,
        seen: &[Seen],
        none: &dyn Fn() -> DataFusionError,
    ) -> Result<Vec<Expr>> {
        let any = |wanted: fn(&DataType) -> bool| seen.iter().flatten().any(wanted);
        let local = any(|t| matches!(t, DataType::Timestamp(_, None)))
            && !any(|t| matches!(t, DataType::Timestamp(_, Some(_))));
        let ends = if local { SqlType::Timestamp } else { SqlType::Timestamptz };
        let typed = args.into_iter().zip(seen).enumerate().map(|(i, (arg, t))| match (i, t) {
            (0 | 1, None) => self.coerce_unknown(arg, ends),
            (0 | 1, Some(t @ (DataType::Date32 | DataType::Timestamp(_, _)))) => {
                self.implicit(arg, t, &ends.to_arrow())
            }
            (2, None) => self.coerce_unknown(arg, SqlType::Interval),
            (2, Some(DataType::Interval(_))) => Ok(arg),
            _ => Err(none()),
        });
        let typed = typed.collect::<Result<Vec<_>>>()?;
        let zero = |e: &Expr| match e {
            Expr::Literal(ScalarValue::IntervalMonthDayNano(Some(i)), _) => {
                (i.months, i.days, i.nanoseconds) == (0, 0, 0)
            }
            _ => false,
        };
        match typed.get(2) {
            None => Err(none()),
            Some(step) if zero(step) => {
                let message = "step size cannot equal zero";
                Err(external(SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message)))
            }
            Some(_) => Ok(typed),
        }
    }

    /// DataFusion's functions of arrays, with PostgreSQL's names and types.
    pub(super) fn array_function(
        &self,
        name: &str,
        args: Vec<Expr>,
        seen: &[Seen],
    ) -> Result<Expr> {
        let types: Vec<String> = seen.iter().map(type_name).collect();
        let none = || {
            external(millrace_functions::error::undefined_function(&format!(
                "{name}({})",
                types.join(", ")
            )))
        };
        let Some(Some(DataType::List(item))) = seen.first() else { return Err(none()) };
        let theirs = match name {
            "array_upper" | "array_lower" => "array_length",
            "array_remove" => "array_remove_all",
            "array_replace" => "array_replace_all",
            name => name,
        };
        let function = functions().scalar(theirs).ok_or_else(none)?;
        let mut taken = Vec::with_capacity(args.len());
        for (i, (arg, t)) in args.into_iter().zip(seen).enumerate() {
            let element = matches!(name, "array_position" | "array_remove" | "array_replace");
            taken.push(match t {
                None if element && i > 0 => self.coerce_unknown_like(arg, item.data_type())?,
                _ => arg,
            });
        }
        let call = function.call(taken);
        let int = |e| Expr::Cast(datafusion::logical_expr::Cast::new(Box::new(e), DataType::Int32));
        let nullif = functions().scalar("nullif").ok_or_else(none)?;
        Ok(match name {
            "array_remove" | "array_replace" => call,
            // An empty array has no bounds.
            "array_length" | "array_upper" => nullif.call(vec![int(call), lit(0i32)]),
            "array_lower" => {
                let present = nullif.call(vec![int(call), lit(0i32)]).is_not_null();
                Expr::Case(Case {
                    expr: None,
                    when_then_expr: vec![(Box::new(present), Box::new(lit(1i32)))],
                    else_expr: None,
                })
            }
            _ => int(call),
        })
    }

    /// `->`, `@>` and their like, of documents or of arrays.
    pub(super) fn document(
        &self,
        op: BinaryOperator,
        name: &'static str,
        of_arrays: Option<&'static str>,
        left: Expr,
        right: Expr,
        schema: &DFSchema,
    ) -> Result<Expr> {
        let (lt, rt) = (self.seen(&left, schema)?, self.seen(&right, schema)?);
        let json = |t: &Seen| matches!(t, Some(DataType::LargeUtf8));
        let list = |t: &Seen| matches!(t, Some(DataType::List(_)));
        if !name.is_empty() && (json(&lt) || (json(&rt) && lt.is_none())) {
            return self.call(name, vec![left, right], schema);
        }
        if let Some(function) = of_arrays.and_then(|f| functions().scalar(f))
            && (list(&lt) || list(&rt))
        {
            let (left, right) = match (&lt, &rt) {
                (Some(t), None) => (left, self.coerce_unknown_like(right, t)?),
                (None, Some(t)) => (self.coerce_unknown_like(left, t)?, right),
                _ => (left, right),
            };
            return Ok(match op {
                BinaryOperator::ArrowAt => function.call(vec![right, left]),
                _ => function.call(vec![left, right]),
            });
        }
        Err(external(no_operator(&describe(&op.to_string(), &lt, &rt))))
    }
}
