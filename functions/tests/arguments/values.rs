//! Values at the edges of their types.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use arrow::datatypes::{
    DataType, Field, IntervalDayTime, IntervalMonthDayNano, IntervalUnit, TimeUnit, i256,
};
use datafusion::common::ScalarValue as V;

/// Characters of a long text, elements of a long array.
const LONG: usize = 3_000;

/// Types that functions are tried with; those that they want come from their signatures besides.
pub fn types() -> Vec<DataType> {
    let list = |t: DataType| DataType::List(Arc::new(Field::new_list_field(t, true)));
    vec![
        DataType::Null,
        DataType::Boolean,
        DataType::Int32,
        DataType::Int64,
        DataType::Float64,
        DataType::Decimal128(38, 10),
        DataType::Utf8,
        DataType::LargeUtf8,
        DataType::Binary,
        DataType::Date32,
        DataType::Time64(TimeUnit::Microsecond),
        DataType::Timestamp(TimeUnit::Microsecond, None),
        DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())),
        DataType::Interval(IntervalUnit::MonthDayNano),
        list(DataType::Int32),
        list(DataType::Utf8),
        list(DataType::LargeUtf8),
    ]
}

/// Fewer of them, for functions of many arguments.
pub fn common_types() -> Vec<DataType> {
    let list = |t: DataType| DataType::List(Arc::new(Field::new_list_field(t, true)));
    vec![
        DataType::Int32,
        DataType::Int64,
        DataType::Float64,
        DataType::Decimal128(38, 10),
        DataType::Utf8,
        DataType::LargeUtf8,
        DataType::Timestamp(TimeUnit::Microsecond, None),
        DataType::Interval(IntervalUnit::MonthDayNano),
        list(DataType::Int32),
    ]
}

/// Texts that are read as a value, a pattern or the name of something.
const TEXTS: &[&str] = &[
    "",
    "a",
    " ",
    "é💥ẞ",
    "0",
    "-1",
    "2147483647",
    "-9223372036854775808",
    "1e999999999",
    "NaN",
    "-Infinity",
    "%",
    "_%_",
    "\\",
    "{",
    "{}",
    "{1,NULL,2}",
    "{\"a\",b",
    "null",
    "[1, 2]",
    "{\"a\": [1]}",
    "$.a",
    "FMRN",
    "RN",
    "FMth9990.0099PR",
    "9.99EEEE",
    "999V999999999999",
    "YYYY-MM-DD HH24:MI:SS.US TZH:TZM",
    "FMMonth DDDth IYYY-IW J",
    "Y,YYY WW W Q CC BC",
    "%2147483647$s",
    "%99999999s",
    "%-*s",
    "%s %I %L",
    "(a*)*b",
    "((a{1,60}){1,60}){1,60}",
    "a{1000}",
    "(?=a)\\1",
    "[[:alpha:]",
    "(((((((((((",
    "g",
    "gin",
    "hex",
    "base64",
    "escape",
    "UTF8",
    "month",
    "century",
    "microseconds",
    "epoch",
    "Europe/Berlin",
    "-15:59:59",
    "UTC+99",
    "2024-02-30",
    "294276-12-31 23:59:59.999999",
    "4713-01-01 BC",
    "178000000 years",
    "-2147483648 mons -2147483648 days",
    "P1Y",
    "1 day ago",
    "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
];

fn texts() -> Vec<String> {
    let mut all: Vec<String> = TEXTS.iter().map(|text| text.to_string()).collect();
    all.extend(
        ["9", "a", "9,", "%", "(", "[", "{\"a\":", "YYYY", "\\", "é"].map(|s| s.repeat(LONG)),
    );
    all.push(format!("9.{}", "9".repeat(LONG)));
    all.push(format!("{}1{}", "[".repeat(500), "]".repeat(500)));
    all
}

/// Documents in canonical text.
fn documents() -> Vec<String> {
    let plain = ["null", "true", "0", "-1.50", "\"\"", "\"a\"", "[]", "{}", "[1, \"a\", null]"];
    let mut all: Vec<String> = plain.map(str::to_owned).into();
    all.push("{\"a\": [1, {\"b\": null}], \"bb\": \"x\"}".into());
    all.push(format!("{}1{}", "[".repeat(500), "]".repeat(500)));
    all.push(format!("{}1{}", "{\"a\": ".repeat(500), "}".repeat(500)));
    all.push("9".repeat(1000));
    all.push(format!("\"{}\"", "x".repeat(LONG)));
    all.push(format!("[{}]", vec!["1"; LONG].join(", ")));
    all
}

fn int32s() -> [i32; 8] {
    [i32::MIN, -1, 0, 1, 7, 40, 1_000_000_000, i32::MAX]
}

fn int64s() -> [i64; 9] {
    [i64::MIN, -1, 0, 1, 7, 40, 2_000_000_000, 1_000_000_000_000, i64::MAX]
}

fn floats() -> [f64; 11] {
    let inf = f64::INFINITY;
    [f64::NAN, inf, -inf, f64::MAX, f64::MIN, f64::MIN_POSITIVE, 0.0, -0.0, 0.5, -1.0, 1e18]
}

/// Digits of a decimal; the scale is that of the type.
fn decimals(precision: u8) -> Vec<i128> {
    let most = 10i128.checked_pow(precision.min(38).into()).map_or(i128::MAX, |p| p - 1);
    vec![-most, -1, 0, 1, 15_000_000_000i128.min(most), most / 3, most]
}

fn intervals() -> Vec<IntervalMonthDayNano> {
    [
        (0, 0, 0),
        (0, 0, 1_000),
        (0, 1, 0),
        (1, 0, -1_000),
        (-1, 40, 90_000_000_000_000),
        (i32::MAX, i32::MAX, i64::MAX),
        (i32::MIN, i32::MIN, i64::MIN),
        (i32::MIN, i32::MAX, 0),
    ]
    .map(|(months, days, ns)| IntervalMonthDayNano::new(months, days, ns))
    .into()
}

fn some<T, F: Fn(Option<T>) -> V>(values: impl IntoIterator<Item = T>, make: F) -> Vec<V> {
    let mut all: Vec<V> = values.into_iter().map(|v| make(Some(v))).collect();
    all.push(make(None));
    all
}

fn bytes() -> Vec<Vec<u8>> {
    vec![vec![], vec![0], b"\\x00".to_vec(), vec![0xff; 3], b"abc".to_vec(), vec![b'a'; LONG]]
}

fn times(t: &DataType) -> Option<Vec<V>> {
    const DAY: i64 = 86_400;
    let clock = |unit: i64| [0, 1, DAY * unit - 1, DAY * unit / 3];
    Some(match t {
        // The calendar's ends, 4714 BC and 5874897.
        DataType::Date32 => some([-2_440_588, -719_528, 0, 19_000, 2_145_042_905], V::Date32),
        DataType::Date64 => some([0, i64::MAX], V::Date64),
        DataType::Time32(TimeUnit::Second) => some([0, 1, 86_399], V::Time32Second),
        DataType::Time32(TimeUnit::Millisecond) => some([0, 1, 86_399_999], V::Time32Millisecond),
        DataType::Time64(TimeUnit::Microsecond) => some(clock(1_000_000), V::Time64Microsecond),
        DataType::Time64(TimeUnit::Nanosecond) => some(clock(1_000_000_000), V::Time64Nanosecond),
        DataType::Timestamp(TimeUnit::Microsecond, zone) => {
            let ends = [-210_866_803_200_000_000, -1, 0, 1_700_000_000_123_456, i64::MAX];
            some(ends, |v| V::TimestampMicrosecond(v, zone.clone()))
        }
        DataType::Timestamp(TimeUnit::Second, zone) => {
            some([-1, 0, 1_700_000_000], |v| V::TimestampSecond(v, zone.clone()))
        }
        DataType::Timestamp(TimeUnit::Millisecond, zone) => {
            some([-1, 0, 1_700_000_000_123], |v| V::TimestampMillisecond(v, zone.clone()))
        }
        DataType::Timestamp(TimeUnit::Nanosecond, zone) => {
            some([i64::MIN, -1, 0, i64::MAX], |v| V::TimestampNanosecond(v, zone.clone()))
        }
        DataType::Interval(IntervalUnit::MonthDayNano) => {
            some(intervals(), V::IntervalMonthDayNano)
        }
        DataType::Interval(IntervalUnit::YearMonth) => some(int32s(), V::IntervalYearMonth),
        DataType::Interval(IntervalUnit::DayTime) => {
            let ends = [(0, 0), (i32::MAX, i32::MAX), (i32::MIN, i32::MIN)];
            some(ends.map(|(d, ms)| IntervalDayTime::new(d, ms)), V::IntervalDayTime)
        }
        _ => return None,
    })
}

fn numbers(t: &DataType) -> Option<Vec<V>> {
    Some(match t {
        DataType::Int8 => some([i8::MIN, -1, 0, 1, i8::MAX], V::Int8),
        DataType::Int16 => some([i16::MIN, -1, 0, 1, i16::MAX], V::Int16),
        DataType::Int32 => some(int32s(), V::Int32),
        DataType::Int64 => some(int64s(), V::Int64),
        DataType::UInt8 => some([0, 1, u8::MAX], V::UInt8),
        DataType::UInt16 => some([0, 1, u16::MAX], V::UInt16),
        DataType::UInt32 => some([0, 1, u32::MAX], V::UInt32),
        DataType::UInt64 => some([0, 1, u64::MAX], V::UInt64),
        DataType::Float32 => some(floats().map(|v| v as f32), V::Float32),
        DataType::Float64 => some(floats(), V::Float64),
        DataType::Decimal128(p, s) => some(decimals(*p), |v| V::Decimal128(v, *p, *s)),
        DataType::Decimal256(p, s) => {
            some(decimals(*p).into_iter().map(i256::from_i128), |v| V::Decimal256(v, *p, *s))
        }
        _ => return None,
    })
}

thread_local! {
    static MADE: RefCell<HashMap<DataType, Rc<Vec<V>>>> = RefCell::new(HashMap::new());
}

/// Values of a type, made once; none of a type that is not known here.
fn of(t: &DataType) -> Rc<Vec<V>> {
    if let Some(made) = MADE.with_borrow(|made| made.get(t).cloned()) {
        return made;
    }
    let new = Rc::new(make(t));
    MADE.with_borrow_mut(|made| made.insert(t.clone(), Rc::clone(&new)));
    new
}

/// Whether there are values of a type.
pub fn known(t: &DataType) -> bool {
    !of(t).is_empty()
}

fn make(t: &DataType) -> Vec<V> {
    if let Some(found) = numbers(t).or_else(|| times(t)) {
        return found;
    }
    match t {
        DataType::Null => vec![V::Null],
        DataType::Boolean => some([true, false], V::Boolean),
        DataType::Utf8 => some(texts(), V::Utf8),
        DataType::Utf8View => some(texts(), V::Utf8View),
        DataType::LargeUtf8 => some(documents(), V::LargeUtf8),
        DataType::Binary => some(bytes(), V::Binary),
        DataType::LargeBinary => some(bytes(), V::LargeBinary),
        DataType::BinaryView => some(bytes(), V::BinaryView),
        DataType::FixedSizeBinary(16) => {
            some([vec![0; 16], vec![0xff; 16]], |v| V::FixedSizeBinary(16, v))
        }
        DataType::List(item) => lists_of(item.data_type()),
        _ => Vec::new(),
    }
}

fn lists_of(item: &DataType) -> Vec<V> {
    let elements = of(item);
    let (Some(first), false) = (elements.first(), item.is_nested()) else { return Vec::new() };
    let list = |items: &[V]| V::List(V::new_list_nullable(items, item));
    let few: Vec<V> = elements.iter().filter(|e| e.size() < 200).take(4).cloned().collect();
    let null = V::try_from(DataType::List(Arc::new(Field::new_list_field(item.clone(), true))));
    let long = vec![first.clone(); LONG];
    let mut all = vec![list(&[]), list(&elements[elements.len() - 1..]), list(&few), list(&long)];
    all.extend(elements.iter().filter(|e| e.size() < 200).map(|e| list(std::slice::from_ref(e))));
    all.extend(null);
    all
}

/// Lists of values of these types: all of them where these are few, else `most` that are drawn, the same each time.
pub fn lists(types: &[DataType], most: usize) -> Vec<Vec<V>> {
    let columns: Vec<Rc<Vec<V>>> = types.iter().map(of).collect();
    let all = columns.iter().map(|c| c.len()).fold(1usize, usize::saturating_mul);
    let nth = |mut n: usize| {
        let pick = |column: &Rc<Vec<V>>| {
            let value = column[n % column.len()].clone();
            n /= column.len();
            value
        };
        columns.iter().map(pick).collect::<Vec<V>>()
    };
    if all <= most {
        return (0..all).map(nth).collect();
    }
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as usize
    };
    (0..most).map(|_| columns.iter().map(|c| c[draw() % c.len()].clone()).collect()).collect()
}
