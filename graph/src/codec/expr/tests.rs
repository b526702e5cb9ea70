//! Stored expressions are what they were: round trips, golden bytes, and what is refused.

use std::sync::Arc;

use arrow::array::{ArrayRef, Decimal128Array, Int64Array, RecordBatch, StringArray};
use arrow::array::{BooleanArray, IntervalMonthDayNanoArray, TimestampMicrosecondArray};
use arrow::datatypes::{DataType, Field, IntervalMonthDayNano, Schema, i256};
use datafusion::common::ScalarValue;
use datafusion::common::config::ConfigOptions;
use datafusion::common::metadata::FieldMetadata;
use datafusion::logical_expr::{ColumnarValue, Operator, Volatility, create_udf};
use datafusion::physical_expr::expressions::{
    BinaryExpr, CaseExpr, CastExpr, Column, InListExpr, IsNotNullExpr, IsNullExpr, LikeExpr,
    Literal, NegativeExpr, NotExpr, TryCastExpr, UnKnownColumn, lit,
};
use datafusion::physical_expr::{PhysicalExpr, ScalarFunctionExpr};
use millrace_common::{SqlError, SqlState};
use millrace_functions::expr::ExprRef;
use millrace_functions::functions;
use proptest::prelude::*;

use super::message::{self, Expression, Kind, Node};
use super::*;
use crate::codec::proto::Nothing;

/// The stack of the server's threads (`millrace_frontend::STACK_BYTES`).
const STACK_BYTES: usize = 32 << 20;

fn batch() -> RecordBatch {
    let texts = ["one", "", "3", "x_%", "Ünï"].map(Some).into_iter().chain([None]);
    let us = [0, 1, -1, 1_700_000_000_000_000, 5, i64::MIN / 4].map(Some);
    let zoned = TimestampMicrosecondArray::from(us.to_vec()).with_timezone("+00:00");
    let amounts = Decimal128Array::from(vec![Some(0), Some(-150), Some(7), None, Some(99), None]);
    let spans = [0, 1, -2, 3, 400, 0].map(|n| Some(IntervalMonthDayNano::new(n, 1 - n, 5)));
    let a = Int64Array::from(vec![Some(1), None, Some(-7), Some(i64::MAX), Some(0), Some(3)]);
    let p = [Some(true), None, Some(false), Some(true), None, Some(false)];
    let columns: [(&str, ArrayRef); 7] = [
        ("a", Arc::new(a)),
        ("b", Arc::new(Int64Array::from(vec![4, 5, 0, -1, 2, i64::MIN]))),
        ("t", Arc::new(texts.collect::<StringArray>())),
        ("d", Arc::new(amounts.with_precision_and_scale(12, 2).unwrap())),
        ("ts", Arc::new(zoned)),
        ("p", Arc::new(BooleanArray::from(p.to_vec()))),
        ("i", Arc::new(IntervalMonthDayNanoArray::from(spans.to_vec()))),
    ];
    let columns = columns.map(|(name, values)| (name, values, true));
    RecordBatch::try_from_iter_with_nullable(columns).unwrap()
}

fn column(name: &str) -> ExprRef {
    Arc::new(Column::new_with_schema(name, &batch().schema()).unwrap())
}

fn binary(left: ExprRef, op: Operator, right: ExprRef) -> ExprRef {
    Arc::new(BinaryExpr::new(left, op, right))
}

/// A call of a function of the registry, typed by the function itself.
fn call(name: &str, args: Vec<ExprRef>) -> ExprRef {
    let function = functions().scalar(name).unwrap();
    let options = Arc::new(ConfigOptions::default());
    Arc::new(ScalarFunctionExpr::try_new(function, args, &batch().schema(), options).unwrap())
}

/// Expressions that no operator has taken yet, by type.
#[derive(Default)]
struct Pool {
    numbers: Vec<ExprRef>,
    texts: Vec<ExprRef>,
    conditions: Vec<ExprRef>,
}

impl Pool {
    fn number(&mut self, n: i64) -> ExprRef {
        self.numbers.pop().unwrap_or_else(|| match n % 4 {
            0 => column("a"),
            1 => column("b"),
            2 => lit(ScalarValue::Int64(None)),
            _ => lit(n),
        })
    }

    fn text(&mut self, n: i64) -> ExprRef {
        self.texts.pop().unwrap_or_else(|| match n % 3 {
            0 => column("t"),
            1 => lit(ScalarValue::Utf8(None)),
            _ => lit(n.to_string()),
        })
    }

    fn condition(&mut self, n: i64) -> ExprRef {
        self.conditions.pop().unwrap_or_else(|| match n % 3 {
            0 => column("p"),
            1 => lit(ScalarValue::Boolean(None)),
            _ => lit(n > 0),
        })
    }

    fn number_from(&mut self, kind: u8, n: i64) {
        use Operator as O;
        const OPS: [Operator; 6] =
            [O::Plus, O::Minus, O::Multiply, O::BitwiseAnd, O::BitwiseOr, O::BitwiseXor];
        let op = OPS[n.rem_euclid(6) as usize];
        let made: ExprRef = match kind {
            0 => Arc::new(NegativeExpr::new(self.number(n))),
            1 => binary(self.number(n), op, self.number(n / 2)),
            2 => call("pg_add", vec![self.number(n), self.number(n / 2)]),
            3 => call("pg_div", vec![self.number(n), self.number(n / 2)]),
            4 => call("cast_to_int8", vec![self.text(n)]),
            5 => Arc::new(TryCastExpr::new(self.text(n), DataType::Int64)),
            6 => {
                let target = Field::new("n", DataType::Int64, n % 2 == 0);
                let inner = Arc::new(CastExpr::new(self.condition(n), DataType::Int8, None));
                Arc::new(CastExpr::new_with_target_field(inner, Arc::new(target), None))
            }
            _ => {
                let compared = (n % 2 == 0).then(|| self.number(n));
                let when = |pool: &mut Pool| match &compared {
                    Some(_) => pool.number(n),
                    None => pool.condition(n),
                };
                let branches = (0..1 + n.rem_euclid(3)).map(|_| (when(self), self.number(n)));
                let branches = branches.collect();
                let otherwise = (n % 3 == 0).then(|| self.number(n));
                Arc::new(CaseExpr::try_new(compared, branches, otherwise).unwrap())
            }
        };
        self.numbers.push(made);
    }

    fn text_from(&mut self, kind: u8, n: i64) {
        let made = match kind {
            0 => call("upper", vec![self.text(n)]),
            1 => binary(self.text(n), Operator::StringConcat, self.text(n / 2)),
            2 => call("cast_to_text", vec![self.number(n)]),
            _ => call("cast_to_varchar", vec![self.text(n), lit(n.rem_euclid(5) as i32)]),
        };
        self.texts.push(made);
    }

    fn condition_from(&mut self, kind: u8, n: i64) {
        use Operator as O;
        const OPS: [Operator; 8] = [
            O::Eq,
            O::NotEq,
            O::Lt,
            O::LtEq,
            O::Gt,
            O::GtEq,
            O::IsDistinctFrom,
            O::IsNotDistinctFrom,
        ];
        let op = OPS[n.rem_euclid(8) as usize];
        let made: ExprRef = match kind {
            0 => binary(self.number(n), op, self.number(n / 2)),
            1 => binary(self.text(n), op, self.text(n / 2)),
            2 => binary(column("ts"), op, lit(zoned(Some(n)))),
            3 => binary(column("d"), op, lit(ScalarValue::Decimal128(Some(n.into()), 12, 2))),
            4 => Arc::new(NotExpr::new(self.condition(n))),
            5 => Arc::new(IsNullExpr::new(self.text(n))),
            6 => Arc::new(IsNotNullExpr::new(self.number(n))),
            7 => {
                let pattern = lit(["o%", "_", "%\\%", "ü%", ""][n.rem_euclid(5) as usize]);
                Arc::new(LikeExpr::new(n % 2 == 0, n % 3 == 0, self.text(n), pattern))
            }
            8 => {
                let items = (0..n.rem_euclid(4)).map(|_| self.number(n));
                // Which DataFusion takes for a constant; the planner makes no such list.
                let list = items.filter(|item| !has_case(item)).collect();
                let value = self.number(n);
                let schema = batch().schema();
                Arc::new(InListExpr::try_new(value, list, n % 2 == 0, &schema).unwrap())
            }
            9 => binary(self.condition(n), Operator::And, self.condition(n / 2)),
            _ => binary(self.condition(n), Operator::Or, self.condition(n / 2)),
        };
        self.conditions.push(made);
    }
}

fn has_case(e: &ExprRef) -> bool {
    e.is::<CaseExpr>() || e.children().into_iter().any(has_case)
}

/// Expressions over [`batch`].
fn expressions() -> impl Strategy<Value = Vec<ExprRef>> {
    let step = (0..3u8, 0..11u8, -100..100i64);
    proptest::collection::vec(step, 1..40).prop_map(|steps| {
        let mut pool = Pool::default();
        for (of, kind, n) in steps {
            match of {
                0 => pool.number_from(kind % 8, n),
                1 => pool.text_from(kind % 4, n),
                _ => pool.condition_from(kind, n),
            }
        }
        [pool.numbers, pool.texts, pool.conditions].concat()
    })
}

fn zoned(us: Option<i64>) -> ScalarValue {
    ScalarValue::TimestampMicrosecond(us, Some("+00:00".into()))
}

fn list(values: &[Option<i64>]) -> ScalarValue {
    let values: Vec<ScalarValue> = values.iter().map(|v| ScalarValue::Int64(*v)).collect();
    ScalarValue::List(ScalarValue::new_list_nullable(&values, &DataType::Int64))
}

/// Literals of every type, and NULLs of them.
fn literals() -> impl Strategy<Value = ScalarValue> {
    use ScalarValue as S;
    let n = || any::<Option<i64>>();
    let numbers = prop_oneof![
        Just(S::Null),
        any::<Option<bool>>().prop_map(S::Boolean),
        any::<Option<i8>>().prop_map(S::Int8),
        any::<Option<i16>>().prop_map(S::Int16),
        any::<Option<i32>>().prop_map(S::Int32),
        n().prop_map(S::Int64),
        any::<Option<u8>>().prop_map(S::UInt8),
        any::<Option<u16>>().prop_map(S::UInt16),
        any::<Option<u32>>().prop_map(S::UInt32),
        any::<Option<u64>>().prop_map(S::UInt64),
        any::<Option<u32>>().prop_map(|v| S::Float32(v.map(f32::from_bits))),
        any::<Option<u64>>().prop_map(|v| S::Float64(v.map(f64::from_bits))),
        (any::<Option<i128>>(), -38..=38i8).prop_map(|(v, scale)| S::Decimal128(v, 38, scale)),
        n().prop_map(|v| S::Decimal256(v.map(|v| i256::from_parts(v as u128, v.into())), 76, 3)),
    ];
    let times = prop_oneof![
        any::<Option<i32>>().prop_map(S::Date32),
        n().prop_map(S::Date64),
        any::<Option<i32>>().prop_map(S::Time32Second),
        any::<Option<i32>>().prop_map(S::Time32Millisecond),
        n().prop_map(S::Time64Microsecond),
        n().prop_map(S::Time64Nanosecond),
        n().prop_map(|v| S::TimestampSecond(v, None)),
        n().prop_map(|v| S::TimestampMillisecond(v, Some("Europe/Berlin".into()))),
        n().prop_map(zoned),
        n().prop_map(|v| S::TimestampNanosecond(v, None)),
        n().prop_map(S::DurationSecond),
        n().prop_map(S::DurationMillisecond),
        n().prop_map(S::DurationMicrosecond),
        n().prop_map(S::DurationNanosecond),
        any::<Option<(i32, i32, i64)>>().prop_map(|v| {
            S::IntervalMonthDayNano(v.map(|(m, d, ns)| IntervalMonthDayNano::new(m, d, ns)))
        }),
    ];
    let bytes = || any::<Option<Vec<u8>>>();
    let strings = prop_oneof![
        any::<Option<String>>().prop_map(S::Utf8),
        any::<Option<String>>().prop_map(S::LargeUtf8),
        any::<Option<String>>().prop_map(S::Utf8View),
        bytes().prop_map(S::Binary),
        bytes().prop_map(S::LargeBinary),
        bytes().prop_map(S::BinaryView),
        any::<Option<[u8; 16]>>().prop_map(|v| S::FixedSizeBinary(16, v.map(Vec::from))),
    ];
    let scalars = prop_oneof![numbers, times, strings].boxed();
    let nested = scalars.clone().prop_flat_map(|like| {
        let of = like.data_type();
        let null = S::try_new_null(&of).unwrap();
        proptest::collection::vec(any::<bool>(), 0..4).prop_map(move |which| {
            let pick = |here| if here { like.clone() } else { null.clone() };
            let values: Vec<S> = which.into_iter().map(pick).collect();
            S::List(S::new_list_nullable(&values, &of))
        })
    });
    let deeper = nested.clone().prop_map(|inner| {
        let of = inner.data_type();
        S::List(S::new_list_nullable(&[inner], &of))
    });
    prop_oneof![4 => scalars, 2 => nested, 1 => deeper]
}

fn round_trip(e: &ExprRef) -> ExprRef {
    let bytes = encode_expr(e).unwrap();
    let loaded = decode_expr(&bytes, &batch().schema()).unwrap();
    assert_eq!(format!("{e:?}"), format!("{loaded:?}"));
    assert_eq!(bytes, encode_expr(&loaded).unwrap(), "encoding again differs");
    loaded
}

fn outcome(e: &ExprRef) -> Result<ArrayRef, String> {
    let batch = batch();
    let value = e.evaluate(&batch).and_then(|v| v.into_array(batch.num_rows()));
    value.map_err(|e| e.to_string())
}

fn bytes_of(nodes: Vec<Kind>) -> Vec<u8> {
    let nodes = nodes.into_iter().map(|kind| Node { kind: Some(kind) }).collect();
    Expression { nodes }.encode_to_vec()
}

fn refusal(bytes: &[u8]) -> String {
    decode_expr(bytes, &batch().schema()).unwrap_err().to_string()
}

proptest! {
    #[test]
    fn a_stored_expression_gives_what_it_gave(list in expressions()) {
        for e in &list {
            prop_assert_eq!(outcome(e), outcome(&round_trip(e)));
        }
    }

    #[test]
    fn a_literal_of_any_type_is_the_same_once_stored(value in literals()) {
        let literal: ExprRef = Arc::new(Literal::new(value.clone()));
        let loaded = round_trip(&literal);
        let loaded = loaded.downcast_ref::<Literal>().unwrap().value();
        prop_assert_eq!(loaded.data_type(), value.data_type());
        prop_assert_eq!(loaded, &value);
    }

    #[test]
    fn garbage_is_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
        let _ = decode_expr(&bytes, &batch().schema());
    }

    #[test]
    fn damage_is_an_error_or_another_expression(
        list in expressions(),
        value in literals(),
        at in any::<prop::sample::Index>(),
        bits in 1..=255u8,
    ) {
        for e in list.iter().chain([&lit(value)]) {
            let mut bytes = encode_expr(e).unwrap().to_vec();
            let at = at.index(bytes.len());
            let _ = decode_expr(&bytes[..at], &batch().schema());
            bytes[at] ^= bits;
            let _ = decode_expr(&bytes, &batch().schema());
        }
    }
}

/// A call without its arguments: what damage can make of `cast_to_int8(a)`.
#[test]
fn a_list_with_a_call_that_its_function_does_not_expect_is_read() {
    let typed = Arc::new(Field::new("cast", DataType::Int64, true));
    let cast = functions().scalar("cast_to_int8").unwrap();
    let options = Arc::new(ConfigOptions::default());
    let bare = ScalarFunctionExpr::new("cast_to_int8", cast, vec![], typed, options);
    let columns = vec![column("a")];
    let list = InListExpr::try_new(column("a"), columns, false, &batch().schema()).unwrap();
    let items = vec![column("a"), Arc::new(bare) as ExprRef];
    let list = Arc::new(list).with_new_children(items).unwrap();
    let bytes = encode_expr(&list).unwrap();
    assert_eq!(encode_expr(&decode_expr(&bytes, &batch().schema()).unwrap()).unwrap(), bytes);
}

#[test]
fn metadata_of_literals_and_results_is_kept() {
    let metadata = [("millrace.char".to_owned(), "5".to_owned())];
    let metadata = Some(FieldMetadata::new(metadata.into_iter().collect()));
    let padded = Literal::new_with_metadata(ScalarValue::from("ab"), metadata);
    round_trip(&(Arc::new(padded) as ExprRef));
    let char = call("cast_to_bpchar", vec![column("t"), lit(5i32)]);
    let field = char.return_field(&batch().schema()).unwrap();
    assert_eq!(field.metadata().get("millrace.char").map(String::as_str), Some("5"));
    let loaded = round_trip(&char);
    assert_eq!(loaded.return_field(&batch().schema()).unwrap(), field);
}

/// DataFusion's `to_char`, not PostgreSQL's, which has the name.
#[test]
fn a_function_under_an_alias_is_kept() {
    round_trip_function("date_format", vec![column("ts"), lit("%Y")]);
    round_trip_function("to_char", vec![column("ts"), lit("YYYY")]);
}

fn round_trip_function(name: &str, args: Vec<ExprRef>) {
    let e = call(name, args);
    assert_eq!(outcome(&round_trip(&e)), outcome(&e), "{name}");
}

#[test]
fn lists_and_rows_are_kept() {
    let row: Vec<(&str, ArrayRef)> =
        vec![("n", Arc::new(Int64Array::from(vec![7]))), ("t", Arc::new(StringArray::new_null(1)))];
    let row = arrow::array::StructArray::try_from(row).unwrap();
    for value in [list(&[]), list(&[Some(1), None]), ScalarValue::Struct(Arc::new(row))] {
        round_trip(&lit(ScalarValue::try_new_null(&value.data_type()).unwrap()));
        round_trip(&lit(value));
    }
}

/// A release must read what earlier ones wrote: these bytes stay.
#[test]
fn golden_bytes() {
    let typed = |name: &str, t| Arc::new(Field::new(name, t, true));
    let upper = ScalarFunctionExpr::new(
        "upper",
        functions().scalar("upper").unwrap(),
        vec![column("t")],
        typed("upper", DataType::Utf8),
        Arc::new(ConfigOptions::default()),
    );
    let none = lit(ScalarValue::Decimal128(None, 12, 2));
    let case = CaseExpr::try_new(None, vec![(column("p"), none)], Some(column("d"))).unwrap();
    let shown = CastExpr::new(Arc::new(case), DataType::Utf8, None);
    let letters = ["x", "y"].map(lit).to_vec();
    let one_of = InListExpr::try_new(column("t"), letters, true, &batch().schema()).unwrap();
    let like = LikeExpr::new(false, true, column("t"), lit("a%"));
    let month = ScalarValue::IntervalMonthDayNano(Some(IntervalMonthDayNano::new(1, -2, 3)));
    let span = binary(column("i"), Operator::IsDistinctFrom, lit(month));
    let cases: [(ExprRef, &str); 8] = [
        (binary(column("a"), Operator::Gt, lit(1i64)), GOLDEN[0]),
        (Arc::new(upper), GOLDEN[1]),
        (Arc::new(shown), GOLDEN[2]),
        (Arc::new(one_of), GOLDEN[3]),
        (Arc::new(like), GOLDEN[4]),
        (span, GOLDEN[5]),
        (lit(zoned(Some(-1))), GOLDEN[6]),
        (lit(list(&[Some(1), None])), GOLDEN[7]),
    ];
    for (e, golden) in cases {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        assert_eq!(hex(&encode_expr(&e).unwrap()), golden, "{e}");
        round_trip(&e);
    }
}

const GOLDEN: [&str; 8] = [
    "0a050a031201610a0a12080a020806120218020a021805",
    "0a070a0508021201740a1c6a1a0a05757070657210011801220d0a0575707065721202080e1801",
    "0a070a0508051201700a0e120c0a060828100c180412020a000a070a0508031201640a064204100118010a0a4a080a061202080e1801",
    "0a070a0508021201740a0b12090a02080e12033a01780a0b12090a02080e12033a01790a06620408011002",
    "0a070a0508021201740a0c120a0a02080e12043a0261250a045a021001",
    "0a070a0508061201690a10120e0a02081612084a060802100318060a02180e",
    "0a1412120a0c082d280332062b30303a303012021801",
    "0a20121e0a10083c3a0c0a046974656d120208061801120a52080a0218020a020a00",
];

#[test]
fn what_a_release_does_not_know_is_named() {
    let result = message::Field {
        name: "f".into(),
        r#type: Some(message::Type { kind: 6, ..Default::default() }),
        ..Default::default()
    };
    let call = |function: &str, version| {
        let (function, result) = (function.to_owned(), Some(result.clone()));
        bytes_of(vec![Kind::Call(message::Call { function, version, arguments: 0, result })])
    };
    let unknown = "is not known to this release";
    assert_eq!(refusal(&call("f", 1)), format!("the function f, version 1, {unknown}"));
    assert_eq!(refusal(&call("pi", 2)), format!("the function pi, version 2, {unknown}"));
    assert!(decode_expr(&call("pi", 1), &Schema::empty()).is_ok());
    // A node of tag 100: one byte of length, two of the tag, and an empty message.
    assert_eq!(refusal(&[10, 3, 0xa2, 6, 0]), format!("the kind of an expression {unknown}"));
    let null = |kind| {
        let r#type = Some(message::Type { kind, ..Default::default() });
        let value = message::Value { kind: Some(message::ValueKind::Null(Nothing {})) };
        let value = Some(value);
        Kind::Literal(message::Literal { r#type, value, ..Default::default() })
    };
    assert_eq!(refusal(&bytes_of(vec![null(99)])), format!("the type number 99 {unknown}"));
    let operator = bytes_of(vec![null(6), null(6), Kind::Binary(99)]);
    assert_eq!(refusal(&operator), format!("the operator 99 {unknown}"));
}

#[test]
fn what_is_no_expression_is_damaged() {
    let not = || Kind::Not(Nothing {});
    let column = |position| Kind::Column(message::Column { position, name: "c".into() });
    let many = Kind::InList(message::InList { negated: false, items: u32::MAX });
    let case = Kind::Case(message::Case { compared: false, branches: 0, otherwise: false });
    let broken =
        [vec![], vec![not()], vec![column(0), column(1)], vec![column(99)], vec![many], vec![case]];
    for nodes in broken {
        let error = decode_expr(&bytes_of(nodes.clone()), &batch().schema()).unwrap_err();
        assert!(matches!(error, CodecError::Damaged(_)), "{nodes:?}: {error}");
    }
}

#[test]
fn what_cannot_be_stored_is_unsupported_by_name() {
    let eval = Arc::new(|args: &[ColumnarValue]| Ok(args[0].clone()));
    let foreign = create_udf("foreign", vec![], DataType::Int64, Volatility::Immutable, eval);
    let options = Arc::new(ConfigOptions::default());
    let result = Arc::new(Field::new("foreign", DataType::Int64, true));
    let foreign = ScalarFunctionExpr::new("foreign", Arc::new(foreign), vec![], result, options);
    let item = Arc::new(Field::new_list_field(DataType::Int64, true));
    let pair = DataType::FixedSizeList(item, 2);
    let cases: [(ExprRef, &str); 4] = [
        (Arc::new(UnKnownColumn::new("c")), "the expression c"),
        (Arc::new(foreign), "the function foreign"),
        (Arc::new(CastExpr::new(column("a"), pair, None)), "the type FixedSizeList"),
        (binary(column("t"), Operator::AtAt, column("t")), "the operator @@"),
    ];
    for (e, named) in cases {
        let error = SqlError::from(encode_expr(&e).unwrap_err());
        assert_eq!(error.state, SqlState::FEATURE_NOT_SUPPORTED);
        assert!(error.message.starts_with(named), "{}", error.message);
    }
}

/// Work on a stack as the server's threads have.
fn on_a_servers_stack(work: impl FnOnce() + Send + 'static) {
    std::thread::Builder::new().stack_size(STACK_BYTES).spawn(work).unwrap().join().unwrap();
}

#[test]
fn deep_expressions_are_stored_and_deeper_ones_refused() {
    on_a_servers_stack(|| {
        let negated = |e: ExprRef| Arc::new(NotExpr::new(e)) as ExprRef;
        let deep = (1..MAX_DEPTH).fold(column("p"), |e, _| negated(e));
        let loaded = decode_expr(&encode_expr(&deep).unwrap(), &batch().schema()).unwrap();
        assert_eq!(outcome(&loaded), outcome(&deep));
        let error = SqlError::from(encode_expr(&negated(deep)).unwrap_err());
        assert_eq!(error.state, SqlState::STATEMENT_TOO_COMPLEX);
    });
}

#[test]
fn a_stored_text_of_many_levels_does_not_exhaust_the_stack() {
    on_a_servers_stack(|| {
        let column = Kind::Column(message::Column { position: 5, name: "p".into() });
        let not = std::iter::repeat_n(Kind::Not(Nothing {}), 1_000_000);
        let bytes = bytes_of([column].into_iter().chain(not).collect());
        let error = decode_expr(&bytes, &batch().schema()).unwrap_err();
        assert!(matches!(error, CodecError::TooDeep), "{error}");
    });
}

/// Calls as deep as `1 + 1 + …` nests them at its longest.
#[test]
fn a_chain_of_calls_is_stored() {
    let sum = (0..128).fold(column("b"), |sum, _| call("pg_add", vec![sum, lit(0i64)]));
    assert_eq!(outcome(&round_trip(&sum)), outcome(&sum));
}

/// Types nest, so their messages do: as deep as protobuf's readers go, and no further.
#[test]
fn a_type_of_many_levels_is_an_error() {
    let mut t = vec![8, 6];
    for _ in 0..10_000 {
        let field = message_of(18, &t);
        t = [vec![8, 60], message_of(58, &field)].concat();
    }
    let literal = message_of(10, &t);
    let bytes = message_of(10, &message_of(18, &literal));
    assert!(matches!(decode_expr(&bytes, &Schema::empty()), Err(CodecError::Damaged(_))));
}

/// A field of protobuf that is a message: its key, its length, itself.
fn message_of(key: u8, message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![key];
    prost::encode_length_delimiter(message.len(), &mut bytes).unwrap();
    bytes.extend(message);
    bytes
}
