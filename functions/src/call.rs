//! Functions declared by their PostgreSQL signatures: resolution of overloads, and the loop over rows.
//!
//! An overload names its argument types, its result and a function of one row that reads typed columns
//! ([`Args`]) and appends to a typed builder ([`Out`]): nothing is allocated for a row but what the
//! result needs. Calls are resolved by PostgreSQL's rules (its manual's chapter "Function Type Resolution"),
//! with literals of unknown type, by [`resolve`].

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use arrow::array::*;
use arrow::datatypes::*;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::{
    ColumnarValue, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
    Volatility,
};
use millrace_common::json::Doc;
use millrace_common::keys::with_one_nan;
use millrace_common::types::{Element, UNCONSTRAINED_NUMERIC, UUID_BYTES};
use millrace_common::{SqlError, SqlType};
use regex::Regex;

use super::numeric::Num;
use crate::error::{external, undefined_function};
use crate::interrupt;

/// A function of one row: appends exactly one value to the builder.
pub type Eval = fn(&Args, &mut Out) -> Result<(), SqlError>;

#[derive(Clone, Copy)]
pub struct Overload {
    pub args: &'static [SqlType],
    /// The last argument's type may be repeated.
    pub variadic: bool,
    pub returns: SqlType,
    pub eval: Eval,
}

pub struct Def {
    pub name: &'static str,
    pub overloads: Vec<Overload>,
    pub volatility: Volatility,
    /// NULL where any argument is NULL.
    pub strict: bool,
    /// Takes arguments of every type, as their output text.
    pub any: bool,
    /// Takes arguments of every type, as what `to_jsonb` makes of them.
    pub documents: bool,
    /// PostgreSQL has it; here it is 0A000.
    pub absent: bool,
}

impl Def {
    pub fn new(name: &'static str, overloads: &[Overload]) -> Def {
        let overloads = overloads.to_vec();
        Def {
            name,
            overloads,
            volatility: Volatility::Immutable,
            strict: true,
            any: false,
            documents: false,
            absent: false,
        }
    }

    /// A function that is refused by name, whatever its arguments.
    pub fn absent(name: &'static str) -> Def {
        Def { absent: true, ..Def::new(name, &[]) }
    }

    pub fn volatile(mut self) -> Def {
        self.volatility = Volatility::Volatile;
        self
    }

    pub fn takes_nulls(mut self) -> Def {
        self.strict = false;
        self
    }

    pub fn documents(mut self) -> Def {
        self.any = true;
        self.documents = true;
        self
    }

    pub fn any(mut self) -> Def {
        self.any = true;
        self
    }
}

/// An overload of fixed arity.
pub const fn over(args: &'static [SqlType], returns: SqlType, eval: Eval) -> Overload {
    Overload { args, variadic: false, returns, eval }
}

/// All functions declared this way.
pub fn defs() -> &'static HashMap<&'static str, Arc<ScalarUDF>> {
    static ALL: OnceLock<HashMap<&'static str, Arc<ScalarUDF>>> = OnceLock::new();
    ALL.get_or_init(|| {
        let all = super::math::defs()
            .into_iter()
            .chain(super::strings::defs())
            .chain(super::patterns::defs())
            .chain(super::jsonb::defs())
            .chain(super::bytea::defs())
            .chain(super::times::defs())
            .chain(super::zones::defs());
        all.map(|def| (def.name, Arc::new(ScalarUDF::from(Call::new(def))))).collect()
    })
}

/// The overload that a call means, by the types of its arguments (`None`: unknown), or why there is none.
pub fn resolve<'a>(
    udf: &'a ScalarUDF,
    args: &[Option<DataType>],
) -> Result<&'a Overload, SqlError> {
    let call = udf.inner().downcast_ref::<Call>();
    let call = call.ok_or_else(|| SqlError::internal("not a declared function"))?;
    if call.def.absent {
        return Err(SqlError::unsupported(format!("the function {}", udf.name())));
    }
    call.resolve(args).ok_or_else(|| {
        let types: Vec<String> = args.iter().map(crate::types::type_name).collect();
        undefined_function(&format!("{}({})", udf.name(), types.join(", ")))
    })
}

struct Call {
    def: Def,
    signature: Signature,
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.def.name)
    }
}

impl PartialEq for Call {
    fn eq(&self, other: &Call) -> bool {
        self.def.name == other.def.name
    }
}

impl Eq for Call {}

impl std::hash::Hash for Call {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.def.name.hash(state);
    }
}

impl Overload {
    /// The types that `n` arguments are read as, if the overload takes as many.
    pub fn types(&self, n: usize) -> Option<Vec<SqlType>> {
        match (self.variadic, n.cmp(&self.args.len())) {
            (_, std::cmp::Ordering::Equal) => Some(self.args.to_vec()),
            (true, std::cmp::Ordering::Greater) => {
                let last = self.args.last()?;
                let more = std::iter::repeat_n(*last, n - self.args.len());
                Some(self.args.iter().copied().chain(more).collect())
            }
            _ => None,
        }
    }
}

fn same(from: SqlType, to: SqlType) -> bool {
    use SqlType as T;
    match (from, to) {
        (T::Numeric(_), T::Numeric(_)) => true,
        (T::Text | T::Varchar(_), T::Text | T::Varchar(_)) => true,
        (a, b) => a == b,
    }
}

/// PostgreSQL's implicit casts.
pub fn implicit_cast(from: SqlType, to: SqlType) -> bool {
    use SqlType as T;
    same(from, to)
        || matches!(
            (from, to),
            (T::SmallInt, T::Int | T::BigInt | T::Numeric(_) | T::Real | T::Double)
                | (T::Int, T::BigInt | T::Numeric(_) | T::Real | T::Double)
                | (T::BigInt, T::Numeric(_) | T::Real | T::Double)
                | (T::Numeric(_), T::Real | T::Double)
                | (T::Real, T::Double)
                | (T::Date, T::Timestamp | T::Timestamptz)
                | (T::Timestamp, T::Timestamptz)
                | (T::Time, T::Interval)
        )
}

/// The type of its category that wins when several would do.
fn preferred(t: SqlType) -> bool {
    use SqlType as T;
    matches!(t, T::Double | T::Text | T::Timestamptz | T::Interval | T::Boolean)
}

impl Call {
    fn new(def: Def) -> Call {
        let signature = Signature::user_defined(def.volatility);
        Call { def, signature }
    }

    fn resolve(&self, args: &[Option<DataType>]) -> Option<&Overload> {
        if self.def.any {
            return self.def.overloads.iter().find(|o| o.types(args.len()).is_some());
        }
        let seen: Vec<Option<SqlType>> = args
            .iter()
            .map(|t| t.as_ref().map(SqlType::from_arrow).transpose())
            .collect::<Result<_, SqlError>>()
            .ok()?;
        let mut fits: Vec<(&Overload, Vec<SqlType>)> = self
            .def
            .overloads
            .iter()
            .filter_map(|o| Some((o, o.types(args.len())?)))
            .filter(|(_, types)| {
                seen.iter().zip(types).all(|(s, t)| s.is_none_or(|s| implicit_cast(s, *t)))
            })
            .collect();
        let keep_best = |fits: &mut Vec<(&Overload, Vec<SqlType>)>,
                         good: &dyn Fn(Option<SqlType>, SqlType) -> bool| {
            let score =
                |types: &[SqlType]| seen.iter().zip(types).filter(|(s, t)| good(**s, **t)).count();
            let best = fits.iter().map(|(_, t)| score(t)).max().unwrap_or(0);
            fits.retain(|(_, t)| score(t) == best);
        };
        keep_best(&mut fits, &|s, t| s.is_some_and(|s| same(s, t)));
        keep_best(&mut fits, &|s, t| s.is_some_and(|s| same(s, t) || preferred(t)));
        keep_best(&mut fits, &|s, t| s.is_none() && matches!(t, SqlType::Text));
        keep_best(&mut fits, &|s, t| s.is_none() && preferred(t));
        fits.first().map(|(o, _)| *o)
    }

    /// By the types after coercion; text stands for what was unknown, if nothing takes it as it is.
    fn overload(&self, args: &[DataType]) -> Result<&Overload> {
        let known: Vec<_> = args.iter().map(|t| (!t.is_null()).then(|| t.clone())).collect();
        let text = |t: &DataType| matches!(t, DataType::Utf8 | DataType::Null);
        let loose = || args.iter().map(|t| (!text(t)).then(|| t.clone())).collect::<Vec<_>>();
        self.resolve(&known).or_else(|| self.resolve(&loose())).ok_or_else(|| {
            let types: Vec<String> = known.iter().map(crate::types::type_name).collect();
            external(undefined_function(&format!("{}({})", self.def.name, types.join(", "))))
        })
    }
}

/// The scale of a numeric result, where it does not depend on the values.
fn known_scale(name: &str, args: usize, second: Option<&ScalarValue>) -> Option<i8> {
    match (name, args) {
        ("round" | "trunc", 1) | ("div" | "factorial", _) => Some(0),
        ("round" | "trunc", 2) => match second {
            Some(ScalarValue::Int32(Some(n))) => Some((*n).clamp(0, 38) as i8),
            _ => None,
        },
        _ => None,
    }
}

/// The Arrow type that an argument of a type is given as: numerics keep their scale.
fn taken_as(t: SqlType, given: &DataType) -> DataType {
    match (t, given) {
        (SqlType::Numeric(None), DataType::Decimal128(_, _)) => given.clone(),
        (SqlType::Numeric(None), t) if t.is_integer() => DataType::Decimal128(38, 0),
        (t, _) => t.to_arrow(),
    }
}

impl ScalarUDFImpl for Call {
    fn name(&self) -> &str {
        self.def.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        let overload = self.overload(args)?;
        if self.def.any {
            return Ok(args.to_vec());
        }
        let types = overload.types(args.len()).unwrap_or_default();
        Ok(types.into_iter().zip(args).map(|(t, given)| taken_as(t, given)).collect())
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        Ok(self.overload(args)?.returns.to_arrow())
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> Result<FieldRef> {
        let types: Vec<DataType> = args.arg_fields.iter().map(|f| f.data_type().clone()).collect();
        let mut t = self.return_type(&types)?;
        if let (DataType::Decimal128(p, _), Some(scale)) = (
            &t,
            known_scale(
                self.def.name,
                types.len(),
                args.scalar_arguments.get(1).copied().flatten(),
            ),
        ) {
            t = DataType::Decimal128(*p, scale);
        }
        Ok(Arc::new(Field::new(self.name(), t, true)))
    }

    fn is_strict(&self) -> bool {
        self.def.strict
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        super::size_limits::leave_large(&args.args)?;
        let types: Vec<DataType> = args.args.iter().map(|a| a.data_type()).collect();
        let overload = self.overload(&types)?;
        let constant = self.def.volatility != Volatility::Volatile
            && args.args.iter().all(|a| matches!(a, ColumnarValue::Scalar(_)));
        let rows = if constant { 1 } else { args.number_rows };
        let out = run(overload, &args.args, rows, &self.def).map_err(external)?;
        let out = out.finish(args.return_field.data_type()).map_err(external)?;
        Ok(match constant {
            true => ColumnarValue::Scalar(ScalarValue::try_from_array(&out, 0)?),
            false => ColumnarValue::Array(out),
        })
    }
}

/// The types of the arguments of each of a declared function's overloads, and whether the last may be repeated.
pub fn declared_types(udf: &ScalarUDF) -> Option<Vec<(Vec<SqlType>, bool)>> {
    let call = udf.inner().downcast_ref::<Call>()?;
    Some(call.def.overloads.iter().map(|o| (o.args.to_vec(), o.variadic)).collect())
}

/// Whether the function takes arguments of every type.
pub fn takes_any(udf: &ScalarUDF) -> bool {
    udf.inner().downcast_ref::<Call>().is_some_and(|c| c.def.any)
}

/// Whether it takes them as what `to_jsonb` makes of them.
pub fn takes_documents(udf: &ScalarUDF) -> bool {
    udf.inner().downcast_ref::<Call>().is_some_and(|c| c.def.documents)
}

/// A call of constants, computed now. Its numerics keep the scale that PostgreSQL gives the value.
pub fn fold(
    overload: &Overload,
    args: &[ScalarValue],
    udf: &ScalarUDF,
) -> Result<ScalarValue, SqlError> {
    let call = udf.inner().downcast_ref::<Call>();
    let call = call.ok_or_else(|| SqlError::internal("not a declared function"))?;
    let args: Vec<ColumnarValue> = args.iter().cloned().map(ColumnarValue::Scalar).collect();
    match run(overload, &args, 1, &call.def)? {
        Out::Numeric(values) => match values.into_iter().next().flatten() {
            Some(n) => n.to_scalar(),
            None => Ok(ScalarValue::Decimal128(None, 38, 0)),
        },
        out => {
            let array = out.finish(&overload.returns.to_arrow())?;
            ScalarValue::try_from_array(&array, 0).map_err(crate::error::sql_error_from_datafusion)
        }
    }
}

fn run(o: &Overload, args: &[ColumnarValue], rows: usize, def: &Def) -> Result<Out, SqlError> {
    let types = o.types(args.len()).unwrap_or_default();
    let mut columns = Vec::with_capacity(args.len());
    for (value, t) in args.iter().zip(types) {
        columns.push(Column::new(value, t, def.documents)?);
    }
    let mut args = Args { columns, row: 0, regex: RefCell::new(None) };
    let mut out = Out::new(o.returns, rows);
    let mut made = 0;
    for row in 0..rows {
        args.row = row;
        interrupt::step(ROW_BYTES.saturating_add_signed((out.made() - made) as isize))?;
        made = out.made();
        if def.strict && args.columns.iter().any(|c| c.is_null(row)) {
            out.null();
        } else {
            (o.eval)(&args, &mut out)?;
            super::size_limits::check_bytes(out.made())?;
        }
    }
    Ok(out)
}

/// Of a call of which nothing else is known.
const ROW_BYTES: usize = 64;

/// One argument: a column, or a constant of one row.
struct Column {
    array: ArrayRef,
    scale: i8,
    constant: bool,
}

impl Column {
    fn new(value: &ColumnarValue, t: SqlType, document: bool) -> Result<Column, SqlError> {
        let df = crate::error::sql_error_from_datafusion;
        let (array, constant) = match value {
            ColumnarValue::Array(a) => (Arc::clone(a), false),
            ColumnarValue::Scalar(s) => (s.to_array().map_err(df)?, true),
        };
        let wanted = taken_as(t, array.data_type());
        let array = match array.data_type() {
            _ if document => super::jsonb::documents(&array)?,
            given if *given == wanted => array,
            DataType::Boolean if t == SqlType::Text => {
                let letters =
                    array.as_boolean().iter().map(|b| b.map(|b| if b { "t" } else { "f" }));
                Arc::new(StringArray::from_iter(letters))
            }
            _ => super::cast::convert(&array, t)?,
        };
        let scale = match array.data_type() {
            DataType::Decimal128(_, s) => *s,
            _ => 0,
        };
        Ok(Column { array, scale, constant })
    }

    fn at(&self, row: usize) -> usize {
        if self.constant { 0 } else { row }
    }

    fn is_null(&self, row: usize) -> bool {
        self.array.is_null(self.at(row))
    }
}

/// The arguments of one row.
pub struct Args {
    columns: Vec<Column>,
    row: usize,
    /// The last pattern that was compiled.
    regex: RefCell<Option<(String, Arc<Regex>)>>,
}

macro_rules! accessor {
    ($name:ident, $arrow:ty, $native:ty) => {
        pub fn $name(&self, i: usize) -> $native {
            let c = &self.columns[i];
            c.array.as_primitive::<$arrow>().value(c.at(self.row))
        }
    };
}

impl Args {
    pub fn len(&self) -> usize {
        self.columns.len()
    }

    pub fn is_null(&self, i: usize) -> bool {
        self.columns[i].is_null(self.row)
    }

    accessor!(i16, Int16Type, i16);
    accessor!(int, Int32Type, i32);
    accessor!(big, Int64Type, i64);
    accessor!(real, Float32Type, f32);
    accessor!(float, Float64Type, f64);
    accessor!(date, Date32Type, i32);
    accessor!(time, Time64MicrosecondType, i64);
    accessor!(timestamp, TimestampMicrosecondType, i64);
    accessor!(interval, IntervalMonthDayNanoType, IntervalMonthDayNano);

    pub fn boolean(&self, i: usize) -> bool {
        let c = &self.columns[i];
        c.array.as_boolean().value(c.at(self.row))
    }

    pub fn text(&self, i: usize) -> &str {
        let c = &self.columns[i];
        c.array.as_string::<i32>().value(c.at(self.row))
    }

    /// The elements of an array of texts.
    pub fn texts(&self, i: usize) -> Vec<Option<&str>> {
        let c = &self.columns[i];
        let list = c.array.as_list::<i32>();
        let (from, to) = match list.offsets().windows(2).nth(c.at(self.row)) {
            Some(ends) => (ends[0] as usize, ends[1] as usize),
            None => (0, 0),
        };
        let values = list.values().as_string::<i32>();
        (from..to).map(|at| (!values.is_null(at)).then(|| values.value(at))).collect()
    }

    /// A document of the type `jsonb`.
    pub fn doc(&self, i: usize) -> Doc<'_> {
        let c = &self.columns[i];
        Doc(c.array.as_string::<i64>().value(c.at(self.row)))
    }

    /// The text, or `None` for NULL.
    pub fn text_or_null(&self, i: usize) -> Option<&str> {
        (!self.is_null(i)).then(|| self.text(i))
    }

    pub fn bytes(&self, i: usize) -> &[u8] {
        let c = &self.columns[i];
        c.array.as_binary::<i32>().value(c.at(self.row))
    }

    pub fn numeric(&self, i: usize) -> Num {
        let c = &self.columns[i];
        Num::new(c.array.as_primitive::<Decimal128Type>().value(c.at(self.row)), c.scale)
    }

    /// A regular expression, compiled once while it stays the same.
    pub fn regex(
        &self,
        key: &str,
        compile: impl FnOnce() -> Result<Regex, SqlError>,
    ) -> Result<Arc<Regex>, SqlError> {
        let mut kept = self.regex.borrow_mut();
        if let Some((k, regex)) = kept.as_ref()
            && k == key
        {
            return Ok(Arc::clone(regex));
        }
        let regex = Arc::new(compile()?);
        *kept = Some((key.to_owned(), Arc::clone(&regex)));
        Ok(regex)
    }
}

/// Where results go.
pub enum Out {
    Boolean(BooleanBuilder),
    Int(Int32Builder),
    BigInt(Int64Builder),
    Real(Float32Builder),
    Double(Float64Builder),
    Numeric(Vec<Option<Num>>),
    Text(StringBuilder),
    Bytea(BinaryBuilder),
    Date(Date32Builder),
    Time(Time64MicrosecondBuilder),
    Timestamp(TimestampMicrosecondBuilder),
    Interval(IntervalMonthDayNanoBuilder),
    Uuid(FixedSizeBinaryBuilder),
    Jsonb(LargeStringBuilder),
    Texts(ListBuilder<StringBuilder>),
    Jsons(ListBuilder<LargeStringBuilder>),
}

/// Another list of texts.
fn append_list<'a, O: OffsetSizeTrait>(
    lists: &mut ListBuilder<GenericStringBuilder<O>>,
    items: impl Iterator<Item = Option<&'a str>>,
) {
    items.for_each(|item| lists.values().append_option(item));
    lists.append(true);
}

macro_rules! pusher {
    ($name:ident, $variant:ident, $t:ty) => {
        pub fn $name(&mut self, v: $t) -> Result<(), SqlError> {
            match self {
                Out::$variant(b) => {
                    b.append_value(v);
                    Ok(())
                }
                _ => Err(SqlError::internal(concat!("not a builder of ", stringify!($name)))),
            }
        }
    };
}

impl Out {
    fn new(t: SqlType, rows: usize) -> Out {
        use SqlType as T;
        match t {
            T::Boolean => Out::Boolean(BooleanBuilder::with_capacity(rows)),
            T::SmallInt | T::Int => Out::Int(Int32Builder::with_capacity(rows)),
            T::BigInt => Out::BigInt(Int64Builder::with_capacity(rows)),
            T::Real => Out::Real(Float32Builder::with_capacity(rows)),
            T::Double => Out::Double(Float64Builder::with_capacity(rows)),
            T::Numeric(_) => Out::Numeric(Vec::with_capacity(rows)),
            T::Bytea => Out::Bytea(BinaryBuilder::new()),
            T::Date => Out::Date(Date32Builder::with_capacity(rows)),
            T::Time => Out::Time(Time64MicrosecondBuilder::with_capacity(rows)),
            T::Timestamp | T::Timestamptz => {
                Out::Timestamp(TimestampMicrosecondBuilder::with_capacity(rows))
            }
            T::Interval => Out::Interval(IntervalMonthDayNanoBuilder::with_capacity(rows)),
            T::Uuid => Out::Uuid(FixedSizeBinaryBuilder::with_capacity(rows, UUID_BYTES)),
            T::Jsonb => Out::Jsonb(LargeStringBuilder::new()),
            T::Array(Element::Jsonb) => Out::Jsons(ListBuilder::new(LargeStringBuilder::new())),
            T::Array(_) => Out::Texts(ListBuilder::new(StringBuilder::new())),
            _ => Out::Text(StringBuilder::new()),
        }
    }

    pub fn uuid(&mut self, v: [u8; 16]) -> Result<(), SqlError> {
        match self {
            Out::Uuid(b) => b.append_value(v).map_err(|e| SqlError::internal(e.to_string())),
            _ => Err(SqlError::internal("not a builder of uuid")),
        }
    }

    /// An array of texts.
    pub fn texts<'a>(
        &mut self,
        items: impl Iterator<Item = Option<&'a str>>,
    ) -> Result<(), SqlError> {
        match self {
            Out::Texts(b) => {
                append_list(b, items);
                Ok(())
            }
            _ => Err(SqlError::internal("not a builder of text[]")),
        }
    }

    /// An array of documents.
    pub fn jsons<'a>(&mut self, items: impl Iterator<Item = &'a str>) -> Result<(), SqlError> {
        match self {
            Out::Jsons(b) => {
                append_list(b, items.map(Some));
                Ok(())
            }
            _ => Err(SqlError::internal("not a builder of jsonb[]")),
        }
    }

    pusher!(boolean, Boolean, bool);
    pusher!(int, Int, i32);
    pusher!(big, BigInt, i64);
    pusher!(real, Real, f32);
    pusher!(float, Double, f64);
    pusher!(text, Text, &str);
    pusher!(json, Jsonb, &str);
    pusher!(bytes, Bytea, &[u8]);
    pusher!(date, Date, i32);
    pusher!(time, Time, i64);
    pusher!(timestamp, Timestamp, i64);
    pusher!(interval, Interval, IntervalMonthDayNano);

    pub fn numeric(&mut self, v: Num) -> Result<(), SqlError> {
        match self {
            Out::Numeric(values) => {
                values.push(Some(v));
                Ok(())
            }
            _ => Err(SqlError::internal("not a builder of numeric")),
        }
    }

    pub fn null(&mut self) {
        match self {
            Out::Boolean(b) => b.append_null(),
            Out::Int(b) => b.append_null(),
            Out::BigInt(b) => b.append_null(),
            Out::Real(b) => b.append_null(),
            Out::Double(b) => b.append_null(),
            Out::Numeric(b) => b.push(None),
            Out::Text(b) => b.append_null(),
            Out::Bytea(b) => b.append_null(),
            Out::Date(b) => b.append_null(),
            Out::Time(b) => b.append_null(),
            Out::Timestamp(b) => b.append_null(),
            Out::Interval(b) => b.append_null(),
            Out::Uuid(b) => b.append_null(),
            Out::Jsonb(b) => b.append_null(),
            Out::Texts(b) => b.append_null(),
            Out::Jsons(b) => b.append_null(),
        }
    }

    /// Bytes of values of any length so far.
    fn made(&self) -> i64 {
        /// Of an array, besides its letters.
        const ELEMENT: usize = 8;
        let bytes = match self {
            Out::Text(b) => b.values_slice().len(),
            Out::Bytea(b) => b.values_slice().len(),
            Out::Jsonb(b) => b.values_slice().len(),
            Out::Texts(b) => b.values_ref().values_slice().len() + b.values_ref().len() * ELEMENT,
            Out::Jsons(b) => b.values_ref().values_slice().len() + b.values_ref().len() * ELEMENT,
            _ => 0,
        };
        bytes as i64
    }

    fn finish(self, t: &DataType) -> Result<ArrayRef, SqlError> {
        let internal = |e: arrow::error::ArrowError| SqlError::internal(e.to_string());
        Ok(match self {
            Out::Boolean(mut b) => Arc::new(b.finish()),
            Out::Int(mut b) => match t {
                DataType::Int16 => arrow::compute::cast(&b.finish(), t).map_err(internal)?,
                _ => Arc::new(b.finish()),
            },
            Out::BigInt(mut b) => Arc::new(b.finish()),
            Out::Real(mut b) => Arc::new(b.finish()),
            Out::Double(mut b) => with_one_nan(&(Arc::new(b.finish()) as ArrayRef)),
            Out::Numeric(values) => {
                let (p, s) = match t {
                    DataType::Decimal128(p, s) => (*p, *s),
                    _ => UNCONSTRAINED_NUMERIC,
                };
                let mut out = Decimal128Builder::with_capacity(values.len());
                for v in values {
                    out.append_option(v.map(|v| v.to_digits(p, s)).transpose()?);
                }
                Arc::new(out.finish().with_precision_and_scale(p, s).map_err(internal)?)
            }
            Out::Text(mut b) => Arc::new(b.finish()),
            Out::Bytea(mut b) => Arc::new(b.finish()),
            Out::Date(mut b) => Arc::new(b.finish()),
            Out::Time(mut b) => Arc::new(b.finish()),
            Out::Timestamp(mut b) => {
                let zone = match t {
                    DataType::Timestamp(_, zone) => zone.clone(),
                    _ => None,
                };
                Arc::new(b.finish().with_timezone_opt(zone))
            }
            Out::Interval(mut b) => Arc::new(b.finish()),
            Out::Uuid(mut b) => Arc::new(b.finish()),
            Out::Jsonb(mut b) => Arc::new(b.finish()),
            Out::Texts(mut b) => Arc::new(b.finish()),
            Out::Jsons(mut b) => Arc::new(b.finish()),
        })
    }
}

#[cfg(test)]
mod tests;
