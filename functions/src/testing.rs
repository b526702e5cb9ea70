//! Calls of functions, written as SQL writes them, for the tests beside each family.
//!
//! A scalar case is an expression of literals (`'1.5'::numeric(4,2)`, `7`, `NULL`), casts, calls and one arithmetic
//! operator at a time, and its result as `psql` prints the expression's cast to text, or `error` and the SQLSTATE. It
//! means the same in PostgreSQL, where each expected result was taken from.
//!
//! An expression is computed of constants and again of columns of several rows. An aggregate is computed of all rows
//! at once, of every split in two parts that are merged, and, where it takes rows back, after rows were retracted. All ways must
//! come to the same result.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::{DataType, Field, FieldRef, Schema};
use datafusion::common::config::ConfigOptions;
use datafusion::common::{Result as PlanResult, ScalarValue};
use datafusion::logical_expr::type_coercion::functions::fields_with_udf;
use datafusion::logical_expr::{
    Accumulator, ColumnarValue, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF,
};
use datafusion::physical_expr::PhysicalSortExpr;
use datafusion::physical_expr::aggregate::{AggregateExprBuilder, AggregateFunctionExpr};
use millrace_common::types::Element;
use millrace_common::{SqlError, SqlType};

use crate::arith::{ArithOp, operands};
use crate::error::sql_error_from_datafusion;
use crate::{call, cast, error, expr, functions};

/// Rows of a column that stands for a constant.
const COPIES: usize = 2;

/// Fails with all cases whose expression has another result than the case says.
pub fn check(cases: &[(&str, &str)]) {
    let one = |(expression, expected): &(&str, &str)| {
        let found = caught(|| scalar(expression));
        (found != *expected).then(|| format!("{expression}: {found}, expected {expected}"))
    };
    report(cases.iter().filter_map(one).collect());
}

/// Fails with all aggregates that have another result than the case says: a name, which may come after `distinct` and before
/// `order by` and the number of a column (from 1), the columns' types, separated by `|`, the rows, separated by `;`,
/// and the result.
pub fn check_aggregates(cases: &[(&str, &str, &str, &str)]) {
    let one = |(call, types, rows, expected): &(&str, &str, &str, &str)| {
        let found = caught(|| aggregate(call, types, rows));
        (found != *expected)
            .then(|| format!("{call} of {types}: {rows}: {found}, expected {expected}"))
    };
    report(cases.iter().filter_map(one).collect());
}

/// So that all cases that fail are listed.
fn caught(case: impl FnOnce() -> String) -> String {
    let found = catch_unwind(AssertUnwindSafe(case));
    found.unwrap_or_else(|_| "a panic (see above)".to_owned())
}

fn report(wrong: Vec<String>) {
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The result of an expression as text, or `error` and its SQLSTATE.
pub fn scalar(expression: &str) -> String {
    let mut reader = Reader { rest: expression };
    let value = reader.expression();
    assert!(value.is_err() || reader.rest.is_empty(), "not read: {}", reader.rest);
    shown(value.map(|v| v.scalar))
}

fn shown(value: Result<ScalarValue, SqlError>) -> String {
    match value {
        Ok(value) => text_of(&value.to_array().unwrap(), 0),
        Err(e) => format!("error {}", e.state.0),
    }
}

fn text_of(array: &ArrayRef, row: usize) -> String {
    let text = cast::to_text(array).unwrap();
    match text.is_null(row) {
        true => "NULL".to_owned(),
        false => text.as_string::<i32>().value(row).to_owned(),
    }
}

/// The SQL type of a name as `psql` takes it.
pub fn sql_type(name: &str) -> SqlType {
    if let Some(element) = name.strip_suffix("[]") {
        return SqlType::Array(Element::of(sql_type(element)).unwrap());
    }
    let (base, modifiers) = name.split_once('(').unwrap_or((name, ""));
    let modifiers: Vec<i32> = modifiers
        .trim_end_matches(')')
        .split(',')
        .filter(|m| !m.is_empty())
        .map(|m| m.parse().unwrap())
        .collect();
    let length = modifiers.first().map(|n| *n as u32);
    match base {
        "bool" => SqlType::Boolean,
        "int2" => SqlType::SmallInt,
        "int4" => SqlType::Int,
        "int8" => SqlType::BigInt,
        "float4" => SqlType::Real,
        "float8" => SqlType::Double,
        "numeric" => SqlType::Numeric(
            modifiers
                .first()
                .map(|p| (*p as u8, modifiers.get(1).copied().unwrap_or_default() as i8)),
        ),
        "text" => SqlType::Text,
        "varchar" => SqlType::Varchar(length),
        "char" => SqlType::Char(length.unwrap_or(1)),
        "bytea" => SqlType::Bytea,
        "date" => SqlType::Date,
        "time" => SqlType::Time,
        "timestamp" => SqlType::Timestamp,
        "timestamptz" => SqlType::Timestamptz,
        "interval" => SqlType::Interval,
        "uuid" => SqlType::Uuid,
        "jsonb" => SqlType::Jsonb,
        other => panic!("no type {other}"),
    }
}

/// A value, and whether it is a literal without a type.
struct Value {
    scalar: ScalarValue,
    unknown: bool,
}

impl Value {
    fn known(scalar: ScalarValue) -> Value {
        Value { scalar, unknown: false }
    }

    fn text(&self) -> Option<String> {
        match &self.scalar {
            ScalarValue::Utf8(text) => text.clone(),
            _ => None,
        }
    }

    /// As the binder casts explicitly.
    fn cast(self, to: SqlType) -> Result<Value, SqlError> {
        if self.scalar.is_null() {
            return ScalarValue::try_from(to.to_arrow())
                .map(Value::known)
                .map_err(sql_error_from_datafusion);
        }
        if !self.unknown {
            cast::cast_function(&self.scalar.data_type(), to)?;
        }
        let array = self.scalar.to_array().map_err(sql_error_from_datafusion)?;
        let array = cast::convert(&array, to)?;
        let scalar = ScalarValue::try_from_array(&array, 0).map_err(sql_error_from_datafusion)?;
        Ok(Value::known(scalar))
    }

    /// As a function takes an argument.
    fn coerced(&self, to: &DataType) -> Result<ScalarValue, SqlError> {
        if self.scalar.data_type() == *to {
            return Ok(self.scalar.clone());
        }
        if let Ok(t) = SqlType::from_arrow(to) {
            let array = self.scalar.to_array().map_err(sql_error_from_datafusion)?;
            let array = match array.data_type() {
                DataType::Null => arrow::compute::cast(&array, to)
                    .map_err(|e| SqlError::internal(e.to_string()))?,
                _ => cast::convert(&array, t)?,
            };
            if array.data_type() == to {
                return ScalarValue::try_from_array(&array, 0).map_err(sql_error_from_datafusion);
            }
        }
        self.scalar.cast_to(to).map_err(sql_error_from_datafusion)
    }
}

/// What is left to read of an expression.
struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn skip(&mut self, token: &str) -> bool {
        let rest = self.rest.trim_start();
        match rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest.trim_start();
                true
            }
            None => false,
        }
    }

    fn take_while(&mut self, part: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !part(c)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken
    }

    fn expression(&mut self) -> Result<Value, SqlError> {
        let left = self.term()?;
        let all = [ArithOp::Add, ArithOp::Sub, ArithOp::Mul, ArithOp::Div, ArithOp::Mod];
        match all.into_iter().find(|op| self.skip(op.symbol())) {
            Some(op) => operate(op, left, self.term()?),
            None => Ok(left),
        }
    }

    fn term(&mut self) -> Result<Value, SqlError> {
        let mut value = self.atom()?;
        while self.skip("::") {
            let letters = self.take_while(|c| c.is_alphanumeric());
            let mut name = letters.to_owned();
            if self.skip("(") {
                name += &format!("({})", self.take_while(|c| c != ')'));
                self.skip(")");
            }
            if self.skip("[]") {
                name += "[]";
            }
            value = value.cast(sql_type(&name))?;
        }
        Ok(value)
    }

    fn atom(&mut self) -> Result<Value, SqlError> {
        if self.skip("(") {
            let value = self.expression()?;
            assert!(self.skip(")"), "no closing parenthesis: {}", self.rest);
            return Ok(value);
        }
        if self.rest.starts_with('\'') {
            return Ok(self.literal());
        }
        if self.rest.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
            let number = self.take_while(|c| c.is_alphanumeric() || c == '.' || c == '-');
            return cast::parse_number(number).map(Value::known);
        }
        let name = self.take_while(|c| c.is_alphanumeric() || c == '_' || c == '#');
        if !self.skip("(") {
            return Ok(match name {
                "NULL" => Value { scalar: ScalarValue::Null, unknown: true },
                "true" => Value::known(ScalarValue::Boolean(Some(true))),
                "false" => Value::known(ScalarValue::Boolean(Some(false))),
                other => panic!("not a value: {other:?} before {}", self.rest),
            });
        }
        let mut args = Vec::new();
        while !self.skip(")") {
            args.push(self.expression()?);
            self.skip(",");
        }
        let function = functions().scalar(name);
        let function = function.ok_or_else(|| error::undefined_function(name))?;
        invoke(function.as_ref(), &args).map(Value::known)
    }

    /// A literal in quotes; two of them are one in it.
    fn literal(&mut self) -> Value {
        let mut text = String::new();
        loop {
            assert!(self.rest.starts_with('\''), "no closing quote");
            self.rest = &self.rest[1..];
            text += self.take_while(|c| c != '\'');
            if !self.rest.starts_with("''") {
                break;
            }
            text.push('\'');
            self.rest = &self.rest[1..];
        }
        self.rest = &self.rest[1..];
        Value { scalar: ScalarValue::from(text), unknown: true }
    }
}

fn operate(op: ArithOp, left: Value, right: Value) -> Result<Value, SqlError> {
    let (mut l, mut r) = (left.scalar.data_type(), right.scalar.data_type());
    if left.unknown {
        l = op.unknown_left(&r);
    } else if right.unknown {
        r = op.unknown_right(&l);
    }
    let taken = operands(op, &l, &r).ok_or_else(|| error::undefined_function(op.symbol()))?;
    let args = [left.coerced(&taken.left)?, right.coerced(&taken.right)?];
    computed(&op.function(), &args, None).map(Value::known)
}

fn invoke(udf: &ScalarUDF, args: &[Value]) -> Result<ScalarValue, SqlError> {
    if call::declared_types(udf).is_none() {
        let field =
            |v: &Value| -> FieldRef { Arc::new(Field::new("a", v.scalar.data_type(), true)) };
        let fields: Vec<FieldRef> = args.iter().map(field).collect();
        let taken = fields_with_udf(&fields, udf).map_err(sql_error_from_datafusion)?;
        let args = args.iter().zip(taken).map(|(a, field)| a.coerced(field.data_type()));
        return computed(udf, &args.collect::<Result<Vec<_>, _>>()?, None);
    }
    let types: Vec<Option<DataType>> =
        args.iter().map(|a| (!a.unknown).then(|| a.scalar.data_type())).collect();
    let overload = call::resolve(udf, &types)?;
    let wanted = overload.types(args.len()).unwrap();
    let given: Vec<DataType> = args
        .iter()
        .zip(&wanted)
        .map(|(a, t)| if a.unknown { t.to_arrow() } else { a.scalar.data_type() })
        .collect();
    let taken = udf.coerce_types(&given).map_err(sql_error_from_datafusion)?;
    let any = call::takes_any(udf);
    let one = |(a, t): (&Value, &DataType)| match (any, a.text()) {
        (true, Some(text)) => Ok(ScalarValue::from(text)),
        (true, None) => Ok(a.scalar.clone()),
        _ => a.coerced(t),
    };
    let args = args.iter().zip(&taken).map(one).collect::<Result<Vec<_>, SqlError>>()?;
    let folded = call::fold(overload, &args, udf)?;
    computed(udf, &args, Some(folded))
}

/// Whether an argument must be a constant.
fn is_literal(function: &str, argument: usize) -> bool {
    match function {
        "extract" | "date_part" => argument == 0,
        "hop_windows" | "tumble_start" | "window_end" => argument > 0,
        _ => false,
    }
}

/// The result of constants, unless the binder has folded them, after a comparison with that of columns.
fn computed(
    udf: &ScalarUDF,
    args: &[ScalarValue],
    folded: Option<ScalarValue>,
) -> Result<ScalarValue, SqlError> {
    let constants = args.iter().cloned().map(ColumnarValue::Scalar).collect();
    let constant = run(udf, constants).and_then(|v| ScalarValue::try_from_array(&v, 0));
    let column = |(i, value): (usize, &ScalarValue)| match is_literal(udf.name(), i) {
        true => ColumnarValue::Scalar(value.clone()),
        false => ColumnarValue::Array(value.to_array_of_size(COPIES).unwrap()),
    };
    let columns = args.iter().enumerate().map(column).collect();
    let columns = run(udf, columns).map_err(sql_error_from_datafusion);
    let constant = constant.map_err(sql_error_from_datafusion);
    let volatile = udf.signature().volatility == datafusion::logical_expr::Volatility::Volatile;
    for row in (0..COPIES).filter(|_| !volatile) {
        let of_column = match &columns {
            Ok(array) => text_of(array, row),
            Err(e) => format!("error {}", e.state.0),
        };
        let of_constants = shown(constant.clone());
        assert_eq!(significant(&of_column), significant(&of_constants), "{} {args:?}", udf.name());
    }
    match folded {
        Some(folded) => Ok(folded),
        None => constant,
    }
}

/// A number without the zeros that end its fraction: the scale of a column is one for all rows.
fn significant(text: &str) -> &str {
    let number = text.chars().all(|c| c.is_ascii_digit() || c == '.' || c == '-');
    match number && text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => text,
    }
}

/// An array of as many rows as the call has: one of constants.
fn run(udf: &ScalarUDF, args: Vec<ColumnarValue>) -> PlanResult<ArrayRef> {
    let arrays = args.iter().any(|a| matches!(a, ColumnarValue::Array(_)));
    let rows = if arrays { COPIES } else { 1 };
    let field = |v: &ColumnarValue| -> FieldRef { Arc::new(Field::new("a", v.data_type(), true)) };
    let arg_fields: Vec<FieldRef> = args.iter().map(field).collect();
    let constants: Vec<Option<&ScalarValue>> = args
        .iter()
        .map(|a| match a {
            ColumnarValue::Scalar(s) => Some(s),
            ColumnarValue::Array(_) => None,
        })
        .collect();
    let of_call = ReturnFieldArgs { arg_fields: &arg_fields, scalar_arguments: &constants };
    let return_field = udf.return_field_from_args(of_call)?;
    let config_options = Arc::new(ConfigOptions::default());
    let returns = return_field.data_type().clone();
    let call =
        ScalarFunctionArgs { args, arg_fields, number_rows: rows, return_field, config_options };
    let found = udf.invoke_with_args(call)?.into_array(rows)?;
    assert_eq!(found.data_type(), &returns, "{} returns another type than it says", udf.name());
    Ok(found)
}

fn aggregate(call: &str, types: &str, rows: &str) -> String {
    let types: Vec<SqlType> = types.split('|').map(|t| sql_type(t.trim())).collect();
    let values = |at: usize| -> Vec<ScalarValue> {
        let rows = rows.split(';').map(str::trim).filter(|row| !row.is_empty());
        let one = |row: &str| {
            let text = row.split('|').nth(at).unwrap().trim();
            match text {
                "NULL" => ScalarValue::try_from(types[at].to_arrow()).unwrap(),
                text => cast::fold_literal(text, types[at]).unwrap(),
            }
        };
        rows.map(one).collect()
    };
    let columns: Vec<ArrayRef> = (0..types.len())
        .map(|at| match values(at) {
            none if none.is_empty() => arrow::array::new_empty_array(&types[at].to_arrow()),
            some => ScalarValue::iter_to_array(some).unwrap(),
        })
        .collect();
    match built(call, &columns) {
        Ok((function, columns)) => shown(over_rows(&function, &columns)),
        Err(e) => format!("error {}", sql_error_from_datafusion(e).state.0),
    }
}

/// The call, and the columns that it takes: its arguments and what they are ordered by.
fn built(call: &str, columns: &[ArrayRef]) -> PlanResult<(AggregateFunctionExpr, Vec<ArrayRef>)> {
    let (call, order) = call.split_once(" order by ").unwrap_or((call, ""));
    let (distinct, name) = match call.strip_prefix("distinct ") {
        Some(name) => (true, name),
        None => (false, call),
    };
    let udf = functions().aggregate(name).expect("an aggregate of this name");
    let given: Vec<DataType> = columns.iter().map(|c| c.data_type().clone()).collect();
    let taken = udf.coerce_types(&given).unwrap_or(given);
    let args = if name == "mode" { &columns[..1] } else { columns };
    let cast = |(c, t): (&ArrayRef, &DataType)| arrow::compute::cast(c, t);
    let mut columns = args.iter().zip(&taken).map(cast).collect::<Result<Vec<_>, _>>()?;
    let types = columns.iter().map(|c| c.data_type().clone()).enumerate();
    let fields: Vec<Field> = types.map(|(i, t)| Field::new(format!("c{i}"), t, true)).collect();
    let schema = Arc::new(Schema::new(fields));
    let args = (0..columns.len()).map(|i| expr::column(&schema, i)).collect();
    let mut builder =
        AggregateExprBuilder::new(udf, args).schema(Arc::clone(&schema)).alias("result");
    if distinct {
        builder = builder.distinct();
    }
    if let Some(at) = order.split(' ').next().and_then(|at| at.parse::<usize>().ok()) {
        let descending = order.ends_with(" desc");
        let options = arrow::compute::SortOptions { descending, nulls_first: descending };
        let sort = PhysicalSortExpr { expr: expr::column(&schema, at - 1), options };
        builder = builder.order_by(vec![sort]);
        columns.push(Arc::clone(&columns[at - 1]));
    }
    Ok((builder.build()?, columns))
}

fn part(columns: &[ArrayRef], from: usize, to: usize) -> Vec<ArrayRef> {
    columns.iter().map(|c| c.slice(from, to - from)).collect()
}

fn over_rows(
    function: &AggregateFunctionExpr,
    columns: &[ArrayRef],
) -> Result<ScalarValue, SqlError> {
    let rows = columns[0].len();
    let of = |from, to| -> PlanResult<Box<dyn Accumulator>> {
        let mut state = function.create_accumulator()?;
        state.update_batch(&part(columns, from, to))?;
        Ok(state)
    };
    let whole = of(0, rows).and_then(|mut a| a.evaluate());
    let whole = whole.map_err(sql_error_from_datafusion);
    let expected = shown(whole.clone());
    for middle in 0..=rows {
        let merged = || -> PlanResult<ScalarValue> {
            let mut all = function.create_accumulator()?;
            for (from, to) in [(0, middle), (middle, rows)] {
                let state = of(from, to)?.state()?;
                let state = state.iter().map(ScalarValue::to_array);
                all.merge_batch(&state.collect::<PlanResult<Vec<_>>>()?)?;
            }
            all.evaluate()
        };
        let merged = shown(merged().map_err(sql_error_from_datafusion));
        assert_eq!(merged, expected, "{} merged at row {middle}", function.name());
    }
    // Only window functions take rows back, and they know no DISTINCT.
    if !function.is_distinct()
        && let Ok(mut sliding) = function.create_sliding_accumulator()
        && sliding.supports_retract_batch()
    {
        let mut after = || -> PlanResult<ScalarValue> {
            sliding.update_batch(columns)?;
            sliding.update_batch(columns)?;
            sliding.retract_batch(columns)?;
            sliding.evaluate()
        };
        let after = shown(after().map_err(sql_error_from_datafusion));
        assert_eq!(after, expected, "{} after a retraction", function.name());
    }
    whole
}
