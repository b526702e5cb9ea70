//! Arithmetic as PostgreSQL computes it: which operand types each operator takes, what it
//! returns, and functions (`pg_add`, …) that compute whole arrays with its errors.
//!
//! Numerics are Decimal128 with 38 digits: + and − have the larger scale, × the sum of scales (at most
//! 18 where that is not the scale of an operand), ÷ at least 16. An operand of unconstrained numeric
//! makes the result unconstrained.

use std::sync::{Arc, OnceLock};

use arrow::datatypes::*;
use datafusion::common::Result;
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};
use millrace_common::SqlError;
use millrace_common::types::UNCONSTRAINED_NUMERIC;

use super::kernels;
use crate::error::external;
use crate::plain::PlainScalar;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ArithOp {
    Add,
    Sub,
    Mul,
    Div,
    Mod,
}

/// What an operator's operands are cast to, and its result.
pub struct Operands {
    pub left: DataType,
    pub right: DataType,
    pub output: DataType,
}

impl ArithOp {
    pub fn symbol(self) -> &'static str {
        match self {
            ArithOp::Add => "+",
            ArithOp::Sub => "-",
            ArithOp::Mul => "*",
            ArithOp::Div => "/",
            ArithOp::Mod => "%",
        }
    }

    pub fn function(self) -> Arc<ScalarUDF> {
        static ALL: OnceLock<Vec<Arc<ScalarUDF>>> = OnceLock::new();
        let all = ALL.get_or_init(|| {
            [ArithOp::Add, ArithOp::Sub, ArithOp::Mul, ArithOp::Div, ArithOp::Mod]
                .map(|op| Arc::new(ScalarUDF::from(Arith::new(op))))
                .into()
        });
        Arc::clone(&all[self as usize])
    }

    /// The type an unknown right operand takes.
    pub fn unknown_right(self, left: &DataType) -> DataType {
        match (self, left) {
            (ArithOp::Add | ArithOp::Sub, DataType::Date32) if self == ArithOp::Sub => {
                DataType::Date32
            }
            (ArithOp::Add, DataType::Timestamp(_, _) | DataType::Time64(_) | DataType::Date32) => {
                interval()
            }
            (ArithOp::Mul | ArithOp::Div, DataType::Interval(_)) => DataType::Float64,
            _ => left.clone(),
        }
    }

    pub fn unknown_left(self, right: &DataType) -> DataType {
        match (self, right) {
            (ArithOp::Add, DataType::Timestamp(_, _) | DataType::Time64(_) | DataType::Date32) => {
                interval()
            }
            (ArithOp::Sub, DataType::Interval(_)) => interval(),
            (ArithOp::Mul, DataType::Interval(_)) => DataType::Float64,
            _ => right.clone(),
        }
    }
}

fn interval() -> DataType {
    DataType::Interval(IntervalUnit::MonthDayNano)
}

fn int_rank(t: &DataType) -> Option<u8> {
    match t {
        DataType::Int8 | DataType::UInt8 | DataType::Int16 => Some(0),
        DataType::UInt16 | DataType::Int32 => Some(1),
        DataType::UInt32 | DataType::Int64 | DataType::UInt64 => Some(2),
        _ => None,
    }
}

fn int_of(rank: u8) -> DataType {
    [DataType::Int16, DataType::Int32, DataType::Int64][rank as usize].clone()
}

/// Digits that hold every integer of a rank.
fn int_digits(rank: u8) -> u8 {
    [5, 10, 19][rank as usize]
}

/// Resolves an operator; `None`: PostgreSQL has none for these types.
pub fn operands(op: ArithOp, left: &DataType, right: &DataType) -> Option<Operands> {
    let same = |t: DataType| Some(Operands { left: t.clone(), right: t.clone(), output: t });
    let (li, ri) = (int_rank(left), int_rank(right));
    if let (Some(a), Some(b)) = (li, ri) {
        return same(int_of(a.max(b)));
    }
    if left.is_numeric() && right.is_numeric() {
        if left.is_floating() || right.is_floating() {
            if op == ArithOp::Mod {
                return None;
            }
            let real = |t: &DataType| matches!(t, DataType::Float32 | DataType::Float16);
            let narrow = real(left) && real(right);
            return same(if narrow { DataType::Float32 } else { DataType::Float64 });
        }
        let decimal = |t: &DataType, rank: Option<u8>| match (t, rank) {
            (DataType::Decimal128(_, _), _) => Some(t.clone()),
            (_, Some(rank)) => Some(DataType::Decimal128(int_digits(rank), 0)),
            _ => None,
        };
        let (l, r) = (decimal(left, li)?, decimal(right, ri)?);
        let output = decimal_output(op, &l, &r)?;
        return Some(Operands { left: l, right: r, output });
    }
    datetime_operands(op, left, right)
}

/// The scale rules of the module's head.
fn decimal_output(op: ArithOp, l: &DataType, r: &DataType) -> Option<DataType> {
    let (DataType::Decimal128(lp, ls), DataType::Decimal128(rp, rs)) = (l, r) else { return None };
    if (*lp, *ls) == UNCONSTRAINED_NUMERIC || (*rp, *rs) == UNCONSTRAINED_NUMERIC {
        return Some(DataType::Decimal128(UNCONSTRAINED_NUMERIC.0, UNCONSTRAINED_NUMERIC.1));
    }
    let larger = *ls.max(rs);
    let scale = match op {
        ArithOp::Add | ArithOp::Sub | ArithOp::Mod => larger,
        ArithOp::Mul => (ls + rs).min(larger.max(18)),
        ArithOp::Div => larger.max(16),
    };
    // One digit less than unconstrained numeric's precision where the scale is its: they stay apart.
    let precision = if (38, scale) == UNCONSTRAINED_NUMERIC { 37 } else { 38 };
    Some(DataType::Decimal128(precision, scale))
}

fn datetime_operands(op: ArithOp, l: &DataType, r: &DataType) -> Option<Operands> {
    use DataType as D;
    let plain = D::Timestamp(TimeUnit::Microsecond, None);
    let is_interval = |t: &D| matches!(t, D::Interval(_));
    let is_int = |t: &D| matches!(int_rank(t), Some(0 | 1));
    let out = |left: &D, right: &D, output: &D| {
        Some(Operands { left: left.clone(), right: right.clone(), output: output.clone() })
    };
    let add = op == ArithOp::Add;
    match (op, l, r) {
        (ArithOp::Add | ArithOp::Sub, D::Date32, i) if is_int(i) => out(l, &D::Int32, l),
        (ArithOp::Add, i, D::Date32) if is_int(i) => out(&D::Int32, r, r),
        (ArithOp::Sub, D::Date32, D::Date32) => out(l, r, &D::Int32),
        (ArithOp::Add | ArithOp::Sub, D::Date32, i) if is_interval(i) => {
            out(&plain, &interval(), &plain)
        }
        (ArithOp::Add, i, D::Date32) if is_interval(i) => out(&interval(), &plain, &plain),
        (ArithOp::Add, D::Timestamp(_, _), D::Time64(_)) => out(l, r, l),
        (ArithOp::Add, D::Time64(_), D::Timestamp(_, _)) => out(l, r, r),
        (ArithOp::Add, D::Date32, D::Time64(_)) => out(&plain, r, &plain),
        (ArithOp::Add, D::Time64(_), D::Date32) => out(l, &plain, &plain),
        (ArithOp::Add | ArithOp::Sub, D::Timestamp(_, _) | D::Time64(_), i) if is_interval(i) => {
            out(l, &interval(), l)
        }
        (ArithOp::Add, i, D::Timestamp(_, _) | D::Time64(_)) if is_interval(i) => {
            out(&interval(), r, r)
        }
        (ArithOp::Sub, D::Timestamp(_, a), D::Timestamp(_, b)) => match a == b {
            true => out(l, r, &interval()),
            false => {
                let tz = D::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
                out(&tz, &tz, &interval())
            }
        },
        (ArithOp::Sub, D::Timestamp(_, _), D::Date32) => out(l, l, &interval()),
        (ArithOp::Sub, D::Date32, D::Timestamp(_, _)) => out(r, r, &interval()),
        (ArithOp::Sub, D::Time64(_), D::Time64(_)) => out(l, r, &interval()),
        (ArithOp::Add | ArithOp::Sub, a, b) if is_interval(a) && is_interval(b) => {
            out(&interval(), &interval(), &interval())
        }
        (ArithOp::Mul | ArithOp::Div, i, n) if is_interval(i) && n.is_numeric() => {
            out(&interval(), &D::Float64, &interval())
        }
        (ArithOp::Mul, n, i) if is_interval(i) && n.is_numeric() => {
            out(&D::Float64, &interval(), &interval())
        }
        _ if add => None,
        _ => None,
    }
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Arith {
    op: ArithOp,
    signature: Signature,
}

impl Arith {
    fn new(op: ArithOp) -> Arith {
        Arith { op, signature: Signature::any(2, Volatility::Immutable) }
    }
}

impl ScalarUDFImpl for Arith {
    fn name(&self) -> &str {
        match self.op {
            ArithOp::Add => "pg_add",
            ArithOp::Sub => "pg_sub",
            ArithOp::Mul => "pg_mul",
            ArithOp::Div => "pg_div",
            ArithOp::Mod => "pg_mod",
        }
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        match operands(self.op, &args[0], &args[1]) {
            Some(o) => Ok(o.output),
            None => Err(external(SqlError::internal(format!(
                "{} of {} and {}",
                self.name(),
                args[0],
                args[1]
            )))),
        }
    }

    fn is_strict(&self) -> bool {
        true
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let output = args.return_field.data_type();
        kernels::binary(self.op, &args.args[0], &args.args[1], args.number_rows, output)
    }
}

pub fn negate_function() -> Arc<ScalarUDF> {
    static F: OnceLock<Arc<ScalarUDF>> = OnceLock::new();
    Arc::clone(F.get_or_init(|| unary("pg_neg", |args| kernels::negate(&args.args[0], false))))
}

pub fn abs_function() -> Arc<ScalarUDF> {
    static F: OnceLock<Arc<ScalarUDF>> = OnceLock::new();
    Arc::clone(F.get_or_init(|| unary("abs", |args| kernels::negate(&args.args[0], true))))
}

/// `-x` or `abs(x)`: both fail where the type has no such value.
fn unary(
    name: &'static str,
    invoke: fn(ScalarFunctionArgs) -> Result<ColumnarValue>,
) -> Arc<ScalarUDF> {
    let signature = Signature::any(1, Volatility::Immutable);
    PlainScalar::new(name, signature, |args| Ok(args[0].clone()), invoke).strict().udf()
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn integers_keep_the_wider_type_and_its_range() {
        check(&[
            ("1 + 2", "3"),
            ("'32767'::int2 + '1'::int2", "error 22003"),
            ("'32767'::int2 + 1", "32768"),
            ("'-32768'::int2 - '1'::int2", "error 22003"),
            ("2147483647 + 1", "error 22003"),
            ("2147483647 + '1'::int8", "2147483648"),
            ("9223372036854775807 + 1", "error 22003"),
            ("'-9223372036854775808'::int8 - 1", "error 22003"),
            ("3037000500 * 3037000500", "error 22003"),
            ("NULL::int4 + 1", "NULL"),
            ("1 + '2'", "3"),
        ]);
    }

    #[test]
    fn division_of_integers_truncates() {
        check(&[
            ("7 / 2", "3"),
            ("-7 / 2", "-3"),
            ("7 / -2", "-3"),
            ("-7 % 3", "-1"),
            ("7 % -3", "1"),
            ("'-2147483648'::int4 / -1", "error 22003"),
            ("'-2147483648'::int4 % -1", "0"),
            ("'-9223372036854775808'::int8 % -1", "0"),
            ("1 / 0", "error 22012"),
            ("1 % 0", "error 22012"),
            ("NULL::int4 / 0", "NULL"),
        ]);
    }

    #[test]
    fn numerics_are_exact() {
        check(&[
            ("0.1 + 0.2", "0.3"),
            ("1.10 + 2.2", "3.30"),
            ("1.5 - 2.25", "-0.75"),
            ("1.50 * 2.0", "3.000"),
            ("-0.5 * 0.5", "-0.25"),
            ("7.5 % 2", "1.5"),
            ("-7.5 % 2", "-1.5"),
            ("(10.0 / 4)::float8", "2.5"),
            ("(1.0 / 3)::numeric(10,5)", "0.33333"),
            ("(-2.0 / 3)::numeric(10,5)", "-0.66667"),
            ("1.5 / 0", "error 22012"),
            ("1.5 % 0", "error 22012"),
            ("1.5 + 1", "2.5"),
            ("1.5 + '9223372036854775807'::int8", "9223372036854775808.5"),
            ("'0.1'::numeric + '0.2'::numeric", "0.3"),
            ("'1.5'::numeric * '1.5'::numeric", "2.25"),
        ]);
    }

    #[test]
    fn numerics_of_more_than_38_digits_are_errors() {
        check(&[
            (
                "'99999999999999999999999999999999999999'::numeric(38,0) + '1'::numeric(38,0)",
                "error 22003",
            ),
            (
                "'99999999999999999999'::numeric(20,0) * '99999999999999999999'::numeric(20,0)",
                "error 22003",
            ),
        ]);
    }

    #[test]
    fn floats_overflow_and_underflow() {
        check(&[
            ("'1e308'::float8 * 10::float8", "error 22003"),
            ("'-1e308'::float8 - '1e308'::float8", "error 22003"),
            ("'1e-308'::float8 / '1e300'::float8", "error 22003"),
            ("'1e-300'::float8 * '1e-300'::float8", "error 22003"),
            ("'Infinity'::float8 + 1::float8", "Infinity"),
            ("'Infinity'::float8 - 'Infinity'::float8", "NaN"),
            ("'Infinity'::float8 * '0'::float8", "NaN"),
            ("'1'::float8 / 'Infinity'::float8", "0"),
            ("'1'::float8 / '0'::float8", "error 22012"),
            ("'NaN'::float8 / '0'::float8", "NaN"),
            ("'NaN'::float8 + 1::float8", "NaN"),
            ("'-0'::float8 * 1::float8", "-0"),
            ("'0'::float8 * -1::float8", "-0"),
            ("'3e38'::float4 * 10::float4", "error 22003"),
            ("'1e-38'::float4 * '1e-38'::float4", "error 22003"),
            ("'0.1'::float4 + '0.2'::float4", "0.3"),
            ("'0.1'::float4 + '0.2'::float8", "0.30000000149011613"),
            ("1.5 + '0.25'::float8", "1.75"),
        ]);
    }

    #[test]
    fn operators_of_other_types_do_not_exist() {
        check(&[
            ("'1'::float8 % '1'::float8", "error 42883"),
            ("'a'::text + 1", "error 42883"),
            ("true + true", "error 42883"),
            ("'2020-01-01'::date + '2020-01-01'::date", "error 42883"),
        ]);
    }

    #[test]
    fn negation_and_absolute_values() {
        check(&[
            ("pg_neg(5)", "-5"),
            ("pg_neg('-32768'::int2)", "error 22003"),
            ("pg_neg('-2147483648'::int4)", "error 22003"),
            ("pg_neg('0'::float8)", "-0"),
            ("pg_neg('NaN'::float8)", "NaN"),
            ("pg_neg(1.50)", "-1.50"),
            ("pg_neg('1 mon -2 days 03:00'::interval)", "-1 mons +2 days -03:00:00"),
            ("pg_neg(NULL::int4)", "NULL"),
            ("abs(-5)", "5"),
            ("abs('-9223372036854775808'::int8)", "error 22003"),
            ("abs('-0'::float8)", "0"),
            ("abs('-Infinity'::float8)", "Infinity"),
            ("abs('NaN'::float8)", "NaN"),
            ("abs(-1.50)", "1.50"),
            ("abs('-1.5'::float4)", "1.5"),
            ("abs(NULL::numeric)", "NULL"),
        ]);
    }
}
