//! `extract` and `date_part` with PostgreSQL's fields and types.

use std::sync::{Arc, OnceLock};

use arrow::array::*;
use arrow::datatypes::*;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::{
    ColumnarValue, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
    Volatility,
};
use millrace_common::{SqlError, SqlState, SqlType};

use super::text::{civil_from_days, days_from_civil};
use crate::error::external;

const DAY_US: i64 = 86_400_000_000;

pub fn functions() -> Vec<Arc<ScalarUDF>> {
    static ALL: OnceLock<Vec<Arc<ScalarUDF>>> = OnceLock::new();
    ALL.get_or_init(|| {
        let udf = |name, output| {
            let signature = Signature::any(2, Volatility::Immutable);
            Arc::new(ScalarUDF::from(Extract { name, output, signature }))
        };
        // EXTRACT is numeric; seconds have six digits after the point.
        vec![udf("extract", DataType::Decimal128(38, 6)), udf("date_part", DataType::Float64)]
    })
    .clone()
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Extract {
    name: &'static str,
    output: DataType,
    signature: Signature,
}

/// The parts of a value that fields are computed from. For intervals `days` are the interval's.
struct Parts {
    year: i64,
    month: i64,
    day: i64,
    /// Days since 1970; `None` for intervals and times.
    date: Option<i64>,
    us: i64,
    /// Microseconds of the whole.
    epoch: i128,
}

fn of_timestamp(t: i64) -> Parts {
    let days = t.div_euclid(DAY_US);
    let (year, month, day) = civil_from_days(days);
    let (month, day) = (i64::from(month), i64::from(day));
    Parts { year, month, day, date: Some(days), us: t.rem_euclid(DAY_US), epoch: t.into() }
}

fn of_interval(i: IntervalMonthDayNano) -> Parts {
    let us = i.nanoseconds / 1000;
    let years = i128::from(i.months / 12) * 31_557_600_000_000;
    let months = i128::from(i.months % 12) * 30 * i128::from(DAY_US);
    Parts {
        year: i64::from(i.months / 12),
        month: i64::from(i.months % 12),
        day: i64::from(i.days),
        date: None,
        us,
        epoch: years + months + i128::from(i.days) * i128::from(DAY_US) + i128::from(us),
    }
}

/// A field's value in millionths.
fn field(parts: &Parts, name: &str) -> Option<i128> {
    let whole = |v: i64| Some(i128::from(v) * 1_000_000);
    let year = parts.year;
    match name {
        "microsecond" | "microseconds" | "us" | "usec" => whole(parts.us % 60_000_000),
        "millisecond" | "milliseconds" | "ms" | "msec" => {
            Some(i128::from(parts.us % 60_000_000) * 1000)
        }
        "second" | "seconds" | "sec" | "s" => Some(i128::from(parts.us % 60_000_000)),
        "minute" | "minutes" | "min" | "m" => whole(parts.us / 60_000_000 % 60),
        "hour" | "hours" | "hr" | "h" => whole(parts.us / 3_600_000_000),
        "day" | "days" | "d" => whole(parts.day),
        "month" | "months" | "mon" => whole(parts.month),
        "quarter" => whole((parts.month - 1).max(0) / 3 + 1),
        "year" | "years" | "y" => {
            whole(if parts.date.is_some() && year <= 0 { year - 1 } else { year })
        }
        "decade" => whole(year.div_euclid(10)),
        "century" => whole(if year > 0 { (year + 99) / 100 } else { year / 100 - 1 }),
        "millennium" => whole(if year > 0 { (year + 999) / 1000 } else { year / 1000 - 1 }),
        "epoch" => Some(parts.epoch),
        "dow" => whole((parts.date? + 4).rem_euclid(7)),
        "isodow" => whole((parts.date? + 3).rem_euclid(7) + 1),
        "doy" => whole(parts.date? - days_from_civil(year, 1, 1) + 1),
        "week" => whole(iso_week(parts.date?).1),
        "isoyear" => whole(iso_week(parts.date?).0),
        "julian" => {
            let day = i128::from(parts.date? + 2_440_588) * 1_000_000;
            Some(day + i128::from(parts.us) * 1_000_000 / i128::from(DAY_US))
        }
        "timezone" | "timezone_hour" | "timezone_minute" => Some(0),
        _ => None,
    }
}

/// Whether a time has this field.
pub fn is_field(name: &str) -> bool {
    field(&of_timestamp(0), name).is_some()
}

/// ISO year and week of a day: the week belongs to the year of its Thursday.
pub fn iso_week(days: i64) -> (i64, i64) {
    let thursday = days - (days + 3).rem_euclid(7) + 3;
    let year = civil_from_days(thursday).0;
    (year, (thursday - days_from_civil(year, 1, 1)) / 7 + 1)
}

/// Digits after the point of a field's numeric.
fn digits(name: &str, date: bool) -> i8 {
    match name {
        "second" | "seconds" | "sec" | "secs" | "s" => 6,
        "millisecond" | "milliseconds" | "ms" | "msec" | "msecs" => 3,
        "epoch" if !date => 6,
        "julian" if !date => 20,
        _ => 0,
    }
}

/// Fields of a time of day, which a date does not have.
fn is_time_field(name: &str) -> bool {
    let names = ["micro", "milli", "us", "ms", "sec", "s", "min", "m", "hour", "h", "timezone"];
    names.iter().any(|n| if n.len() > 2 { name.starts_with(n) } else { name == *n })
        && !name.starts_with("millenn")
}

impl Extract {
    fn result_type(&self, name: &str, of: &DataType) -> DataType {
        match &self.output {
            DataType::Decimal128(p, _) => {
                DataType::Decimal128(*p, digits(name, matches!(of, DataType::Date32)))
            }
            t => t.clone(),
        }
    }

    fn compute(&self, name: &str, array: &ArrayRef) -> Result<ArrayRef> {
        let unknown = |t: &str| {
            external(SqlError::new(
                SqlState::INVALID_PARAMETER_VALUE,
                format!("unit \"{name}\" not recognized for type {t}"),
            ))
        };
        // PostgreSQL computes date_part of a date from its midnight.
        let kind = match array.data_type() {
            DataType::Date32 if self.name == "date_part" => SqlType::Timestamp.to_arrow(),
            t => t.clone(),
        };
        let kind = crate::types::type_name(&Some(kind));
        let of_zone = name.starts_with("timezone");
        let unsupported = match array.data_type() {
            DataType::Date32 => of_zone || (self.name == "extract" && is_time_field(name)),
            DataType::Time64(_) => of_zone || (!is_time_field(name) && name != "epoch"),
            DataType::Timestamp(_, None) | DataType::Interval(_) => of_zone,
            _ => false,
        };
        if unsupported && field(&of_timestamp(0), name).is_some() {
            return Err(external(SqlError::new(
                SqlState::FEATURE_NOT_SUPPORTED,
                format!("unit \"{name}\" not supported for type {kind}"),
            )));
        }
        let get = |p: Parts| field(&p, name).ok_or_else(|| unknown(&kind));
        let values: Decimal128Array = match array.data_type() {
            DataType::Timestamp(TimeUnit::Microsecond, _) => array
                .as_primitive::<TimestampMicrosecondType>()
                .try_unary(|t| get(of_timestamp(t)))?,
            DataType::Date32 => array
                .as_primitive::<Date32Type>()
                .try_unary(|d| get(of_timestamp(i64::from(d) * DAY_US)))?,
            DataType::Time64(TimeUnit::Microsecond) => {
                array.as_primitive::<Time64MicrosecondType>().try_unary(|us| {
                    get(Parts { year: 0, month: 0, day: 0, date: None, us, epoch: us.into() })
                })?
            }
            DataType::Interval(IntervalUnit::MonthDayNano) => array
                .as_primitive::<IntervalMonthDayNanoType>()
                .try_unary(|i| get(of_interval(i)))?,
            DataType::Null => {
                return Ok(new_null_array(&self.result_type(name, array.data_type()), array.len()));
            }
            _ => {
                return Err(external(SqlError::new(
                    SqlState::UNDEFINED_FUNCTION,
                    format!("function {}(unknown, {kind}) does not exist", self.name),
                )));
            }
        };
        Ok(match self.output {
            DataType::Float64 => {
                Arc::new(values.unary::<_, Float64Type>(|v| v as f64 / 1e6)) as ArrayRef
            }
            _ => {
                let digits = digits(name, matches!(array.data_type(), DataType::Date32));
                let scaled = values
                    .try_unary::<_, Decimal128Type, _>(|v| super::cast::fit(v, 6, 38, digits));
                Arc::new(scaled.map_err(external)?.with_precision_and_scale(38, digits)?)
            }
        })
    }
}

impl ScalarUDFImpl for Extract {
    fn name(&self) -> &str {
        self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _args: &[DataType]) -> Result<DataType> {
        Ok(self.output.clone())
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> Result<FieldRef> {
        let t = match args.scalar_arguments.first() {
            Some(Some(ScalarValue::Utf8(Some(name)))) => {
                let of = args.arg_fields.get(1).map_or(&DataType::Null, |f| f.data_type());
                self.result_type(&name.to_lowercase(), of)
            }
            _ => self.output.clone(),
        };
        Ok(Arc::new(Field::new(self.name(), t, true)))
    }

    fn is_strict(&self) -> bool {
        true
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let name = match &args.args[0] {
            ColumnarValue::Scalar(ScalarValue::Utf8(Some(name))) => name.to_lowercase(),
            _ => return Err(external(SqlError::unsupported("a field that is not a constant"))),
        };
        Ok(match &args.args[1] {
            ColumnarValue::Array(a) => ColumnarValue::Array(self.compute(&name, a)?),
            ColumnarValue::Scalar(s) => {
                let one = self.compute(&name, &s.to_array()?)?;
                ColumnarValue::Scalar(ScalarValue::try_from_array(&one, 0)?)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn fields_of_a_timestamp() {
        check(&[
            ("extract('year', '2024-02-29 13:14:15.678901'::timestamp)", "2024"),
            ("extract('month', '2024-02-29 13:14:15.678901'::timestamp)", "2"),
            ("extract('day', '2024-02-29 13:14:15.678901'::timestamp)", "29"),
            ("extract('hour', '2024-02-29 13:14:15.678901'::timestamp)", "13"),
            ("extract('minute', '2024-02-29 13:14:15.678901'::timestamp)", "14"),
            ("extract('second', '2024-02-29 13:14:15.678901'::timestamp)", "15.678901"),
            ("extract('milliseconds', '2024-02-29 13:14:15.678901'::timestamp)", "15678.901"),
            ("extract('microseconds', '2024-02-29 13:14:15.678901'::timestamp)", "15678901"),
            ("extract('quarter', '2024-12-31'::timestamp)", "4"),
            ("extract('doy', '2024-12-31'::timestamp)", "366"),
            ("extract('dow', '2024-03-03'::timestamp)", "0"),
            ("extract('isodow', '2024-03-03'::timestamp)", "7"),
            ("extract('epoch', '2024-02-29 13:14:15.678901'::timestamptz)", "1709212455.678901"),
            ("extract('epoch', '1969-12-31 23:59:59.5'::timestamp)", "-0.500000"),
            ("extract('julian', '2024-02-29'::date)", "2460370"),
            ("extract('YEAR', '2024-02-29'::date)", "2024"),
            ("extract('year', NULL::timestamp)", "NULL"),
            ("extract('timezone', '2024-02-29 13:14'::timestamptz)", "0"),
        ]);
    }

    #[test]
    fn years_before_and_at_the_turns_of_centuries() {
        check(&[
            ("extract('year', '0044-03-15 BC'::date)", "-44"),
            ("extract('century', '2000-12-31'::date)", "20"),
            ("extract('century', '2001-01-01'::date)", "21"),
            ("extract('century', '0001-01-01 BC'::date)", "-1"),
            ("extract('millennium', '2000-12-31'::date)", "2"),
            ("extract('millennium', '2001-01-01'::date)", "3"),
            ("extract('millennium', '1001-01-01 BC'::date)", "-2"),
            ("extract('decade', '1999-12-31'::date)", "199"),
            ("extract('decade', '0001-01-01'::date)", "0"),
            ("extract('decade', '0012-01-01 BC'::date)", "-2"),
        ]);
    }

    #[test]
    fn iso_weeks_belong_to_the_year_of_their_thursday() {
        check(&[
            ("extract('week', '2021-01-03'::date)", "53"),
            ("extract('isoyear', '2021-01-03'::date)", "2020"),
            ("extract('week', '2020-12-31'::date)", "53"),
            ("extract('week', '2018-12-31'::date)", "1"),
            ("extract('isoyear', '2018-12-31'::date)", "2019"),
            ("extract('week', '2005-01-01'::timestamp)", "53"),
        ]);
    }

    #[test]
    fn fields_of_intervals_and_times() {
        check(&[
            ("extract('year', '-1 year -2 mons'::interval)", "-1"),
            ("extract('month', '14 mons'::interval)", "2"),
            ("extract('day', '40 days'::interval)", "40"),
            ("extract('hour', '50:00'::interval)", "50"),
            ("extract('second', '-1.5 seconds'::interval)", "-1.500000"),
            ("extract('minute', '-90 minutes'::interval)", "-30"),
            ("extract('quarter', '7 mons'::interval)", "3"),
            ("extract('epoch', '1 year 1 mon 1 day 1 second'::interval)", "34236001.000000"),
            ("extract('hour', '13:14:15.5'::time)", "13"),
            ("extract('second', '13:14:15.5'::time)", "15.500000"),
            ("extract('epoch', '00:01:00.5'::time)", "60.500000"),
        ]);
    }

    #[test]
    fn date_part_is_a_float() {
        check(&[
            ("date_part('second', '2024-02-29 13:14:15.678901'::timestamp)", "15.678901"),
            ("date_part('epoch', '2024-02-29'::date)", "1709164800"),
            ("date_part('hour', '2024-02-29'::date)", "0"),
            ("date_part('year', '1 year'::interval)", "1"),
            ("date_part('week', NULL::date)", "NULL"),
        ]);
    }

    #[test]
    fn fields_that_a_type_does_not_have() {
        check(&[
            ("extract('hour', '2024-02-29'::date)", "error 0A000"),
            ("extract('day', '13:14'::time)", "error 0A000"),
            ("extract('timezone', '2024-02-29'::timestamp)", "error 0A000"),
            ("date_part('fortnight', '2024-02-29'::date)", "error 22023"),
            ("date_part('timezone', '1 day'::interval)", "error 0A000"),
        ]);
    }
}
