//! PostgreSQL's functions of arrays where DataFusion's differ: NULL elements are equal to each other where elements are
//! looked for and to nothing where arrays are compared as sets, texts are PostgreSQL's, results are integers.

use std::cmp::Ordering;
use std::sync::Arc;

use arrow::array::*;
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::compute::kernels::cmp;
use arrow::compute::kernels::length::length;
use arrow::compute::{cast, interleave, nullif, take};
use arrow::datatypes::{DataType, Field, Int32Type, Int64Type};
use datafusion::common::Result;
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};
use millrace_common::keys::KeyCodec;
use millrace_common::{SqlError, SqlState};

use super::byte_order::comparable;
use super::min_max::ARRAY_ORDER;
use super::size_limits::check_bytes;
use crate::error::{external, undefined_function};
use crate::interrupt;
use crate::types::{common_type, type_name};

/// What the arguments are taken as, and the result's type; `None`: there is no such function.
pub(super) type Types = fn(&[DataType]) -> Option<(Vec<DataType>, DataType)>;
pub(super) type Eval = fn(&[ArrayRef]) -> Result<ArrayRef, SqlError>;

struct ArrayFunction {
    name: &'static str,
    types: Types,
    eval: Eval,
    /// NULL where any argument is NULL.
    strict: bool,
    signature: Signature,
}

impl std::fmt::Debug for ArrayFunction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for ArrayFunction {
    fn eq(&self, other: &ArrayFunction) -> bool {
        self.name == other.name
    }
}

impl Eq for ArrayFunction {}

impl std::hash::Hash for ArrayFunction {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl ArrayFunction {
    fn resolve(&self, args: &[DataType]) -> Result<(Vec<DataType>, DataType)> {
        (self.types)(args).ok_or_else(|| {
            let name = |t: &DataType| type_name(&Some(t.clone()).filter(|t| !t.is_null()));
            let types: Vec<String> = args.iter().map(name).collect();
            let operator = match self.name {
                "array_has_all" => "@>",
                "array_has_any" => "&&",
                name => {
                    let call = format!("{name}({})", types.join(", "));
                    return external(undefined_function(&call));
                }
            };
            let message =
                format!("operator does not exist: {}", types.join(&format!(" {operator} ")));
            external(SqlError::new(SqlState::UNDEFINED_FUNCTION, message))
        })
    }
}

impl ScalarUDFImpl for ArrayFunction {
    fn name(&self) -> &str {
        self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        Ok(self.resolve(args)?.0)
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        Ok(self.resolve(args)?.1)
    }

    fn is_strict(&self) -> bool {
        self.strict
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        super::size_limits::leave_large(&args.args)?;
        let rows = args.number_rows;
        let arrays: Vec<ArrayRef> =
            args.args.iter().map(|a| a.to_array(rows)).collect::<Result<_>>()?;
        Ok(ColumnarValue::Array((self.eval)(&arrays).map_err(external)?))
    }
}

pub(super) fn internal(e: impl std::fmt::Display) -> SqlError {
    SqlError::internal(e.to_string())
}

pub(super) fn list(column: &ArrayRef) -> Result<&ListArray, SqlError> {
    column.as_list_opt::<i32>().ok_or_else(|| internal("no column of arrays"))
}

fn ints(column: &ArrayRef) -> Result<&Int32Array, SqlError> {
    column.as_primitive_opt::<Int32Type>().ok_or_else(|| internal("no column of integers"))
}

fn longs(column: &ArrayRef) -> Result<&Int64Array, SqlError> {
    column.as_primitive_opt::<Int64Type>().ok_or_else(|| internal("no column of bigints"))
}

/// Where the elements of a row lie.
pub(super) fn range(lists: &ListArray, row: usize) -> std::ops::Range<usize> {
    let offsets = lists.value_offsets();
    offsets[row] as usize..offsets[row + 1] as usize
}

/// Bytes that are equal where values of the two columns are, NULLs among them.
fn identities(a: &ArrayRef, b: &ArrayRef) -> Result<(BinaryArray, BinaryArray), SqlError> {
    let of = |values: &ArrayRef| -> Result<BinaryArray, SqlError> {
        let codec = KeyCodec::new([values.data_type().clone()]).map_err(internal)?;
        let rows = codec.rows(std::slice::from_ref(values)).map_err(internal)?;
        Ok(BinaryArray::from_iter_values(rows.iter().map(|r| r.data())))
    };
    let (a, b) = two_comparable(a, b)?;
    Ok((of(&a)?, of(&b)?))
}

fn two_comparable(a: &ArrayRef, b: &ArrayRef) -> Result<(ArrayRef, ArrayRef), SqlError> {
    let columns = comparable(&[Arc::clone(a), Arc::clone(b)])?;
    match <[ArrayRef; 2]>::try_from(columns) {
        Ok([a, b]) => Ok((a, b)),
        Err(_) => Err(internal("two columns are compared")),
    }
}

/// An array of elements at the given places of `values`, one for each length.
fn listed(
    like: &ListArray,
    values: ArrayRef,
    lengths: Vec<usize>,
    nulls: Option<NullBuffer>,
) -> Result<ArrayRef, SqlError> {
    let DataType::List(item) = like.data_type() else { return Err(internal("no array")) };
    let offsets = OffsetBuffer::from_lengths(lengths);
    let lists = ListArray::try_new(Arc::clone(item), offsets, values, nulls);
    Ok(Arc::new(lists.map_err(internal)?))
}

pub(super) fn array_of(t: &DataType) -> DataType {
    DataType::List(Arc::new(Field::new_list_field(t.clone(), true)))
}

/// The elements that `add` puts into a list of each row, and how many they are; those of NULL are none.
fn new_elements<P>(
    lists: &ListArray,
    mut add: impl FnMut(usize, &mut Vec<P>),
) -> (Vec<P>, Vec<usize>) {
    let (mut elements, mut lengths) = (Vec::new(), Vec::with_capacity(lists.len()));
    for row in 0..lists.len() {
        let before = elements.len();
        if lists.is_valid(row) {
            add(row, &mut elements);
        }
        lengths.push(elements.len() - before);
    }
    (elements, lengths)
}

/// `array_remove(array, element)`.
fn remove(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [array, element] = args else { return Err(internal("array_remove of two")) };
    let lists = list(array)?;
    let (values, gone) = identities(lists.values(), element)?;
    let (kept, lengths) = new_elements(lists, |row, kept: &mut Vec<u32>| {
        let stays = |i: &usize| values.value(*i) != gone.value(row);
        kept.extend(range(lists, row).filter(stays).map(|i| i as u32));
    });
    let kept = take(lists.values(), &UInt32Array::from(kept), None).map_err(internal)?;
    listed(lists, kept, lengths, lists.nulls().cloned())
}

/// 54000 where an array is made of more bytes of texts than a batch may have: what is put in many times is there once
/// before. `places`: the column that each of them is of, and where it stands there.
fn check_texts<'a>(
    columns: &[&ArrayRef],
    places: impl Iterator<Item = &'a (usize, usize)>,
) -> Result<(), SqlError> {
    let lengths = columns.iter().map(|column| text_lengths(column));
    let lengths = lengths.collect::<Result<Vec<_>, SqlError>>()?;
    let of = |&(column, at): &(usize, usize)| match lengths.get(column) {
        Some(Some(lengths)) => lengths.value(at),
        _ => ELEMENT_BYTES,
    };
    check_bytes(places.map(of).fold(0i64, i64::saturating_add))
}

/// The bytes of texts; `None`: the column has none.
fn text_lengths(column: &ArrayRef) -> Result<Option<Int64Array>, SqlError> {
    if !matches!(column.data_type(), DataType::Utf8 | DataType::LargeUtf8 | DataType::Binary) {
        return Ok(None);
    }
    let lengths = length(column).and_then(|lengths| cast(&lengths, &DataType::Int64));
    Ok(Some(longs(&lengths.map_err(internal)?)?.clone()))
}

/// `array_replace(array, from, to)`.
fn replace(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [array, from, to] = args else { return Err(internal("array_replace of three")) };
    let lists = list(array)?;
    let (values, gone) = identities(lists.values(), from)?;
    let (places, lengths) = new_elements(lists, |row, places: &mut Vec<(usize, usize)>| {
        places.extend(range(lists, row).map(|i| match values.value(i) == gone.value(row) {
            true => (1, row),
            false => (0, i),
        }));
    });
    check_texts(&[lists.values(), to], places.iter())?;
    let values = interleave(&[lists.values().as_ref(), to.as_ref()], &places).map_err(internal)?;
    listed(lists, values, lengths, lists.nulls().cloned())
}

/// `array_position(array, element [, from])`.
fn position(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [array, element, from @ ..] = args else { return Err(internal("array_position of two")) };
    let lists = list(array)?;
    let (values, wanted) = identities(lists.values(), element)?;
    let from = from.first().map(ints).transpose()?;
    let one = |row: usize| {
        let start = match from {
            _ if lists.is_null(row) => return Ok(None),
            Some(from) if from.is_null(row) => {
                let message = "initial position must not be null";
                return Err(SqlError::new(SqlState("22004"), message));
            }
            Some(from) => from.value(row),
            None => 1,
        };
        let places = (1i32..).zip(range(lists, row)).filter(|(n, _)| *n >= start);
        let mut found = places.filter(|(_, i)| values.value(*i) == wanted.value(row));
        Ok(found.next().map(|(n, _)| n))
    };
    let found = (0..lists.len()).map(one).collect::<Result<Int32Array, SqlError>>()?;
    Ok(Arc::new(found))
}

/// `array_positions(array, element)`.
fn positions(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [array, element] = args else { return Err(internal("array_positions of two")) };
    let lists = list(array)?;
    let (values, wanted) = identities(lists.values(), element)?;
    let mut out = ListBuilder::new(Int32Builder::new());
    for row in 0..lists.len() {
        let places = (1i32..).zip(range(lists, row));
        let found = places.filter(|(_, i)| values.value(*i) == wanted.value(row));
        found.for_each(|(n, _)| out.values().append_value(n));
        out.append(lists.is_valid(row));
    }
    Ok(Arc::new(out.finish()))
}

/// `array_dims(array)`; an empty array has none.
fn dims(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let lists = list(args.first().ok_or_else(|| internal("array_dims of one"))?)?;
    let one = |row: usize| match range(lists, row).len() {
        n if n > 0 && lists.is_valid(row) => Some(format!("[1:{n}]")),
        _ => None,
    };
    Ok(Arc::new(StringArray::from_iter((0..lists.len()).map(one))))
}

/// `array_ndims(array)`; an empty array has none.
fn ndims(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let lists = list(args.first().ok_or_else(|| internal("array_ndims of one"))?)?;
    let some = |row: &usize| lists.is_valid(*row) && !range(lists, *row).is_empty();
    let one = |row: usize| Some(row).filter(some).map(|_| 1i32);
    Ok(Arc::new((0..lists.len()).map(one).collect::<Int32Array>()))
}

/// `trim_array(array, n)`: without the last `n` elements.
fn trim(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [array, counts] = args else { return Err(internal("trim_array of two")) };
    let (lists, counts) = (list(array)?, ints(counts)?);
    let (mut kept, mut lengths, mut valid) = (Vec::new(), Vec::new(), Vec::new());
    for row in 0..lists.len() {
        valid.push(lists.is_valid(row) && counts.is_valid(row));
        if !valid[row] {
            lengths.push(0);
            continue;
        }
        let places = range(lists, row);
        let left = usize::try_from(counts.value(row)).ok();
        let left = left.and_then(|n| places.len().checked_sub(n)).ok_or_else(|| {
            let most = places.len();
            let message = format!("number of elements to trim must be between 0 and {most}");
            SqlError::new(SqlState("2202E"), message)
        })?;
        lengths.push(left);
        kept.extend(places.take(left).map(|i| i as u32));
    }
    let kept = take(lists.values(), &UInt32Array::from(kept), None).map_err(internal)?;
    listed(lists, kept, lengths, Some(NullBuffer::from(valid)))
}

/// Bytes of an element in arrow's memory, at least.
const ELEMENT_BYTES: i64 = 8;

/// `array_fill(element, array[length])`.
fn fill(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [element, sizes] = args else { return Err(internal("array_fill of two")) };
    let sizes = list(sizes)?;
    let counts = ints(sizes.values())?;
    let absent = || {
        let message = "dimension array or low bound array cannot be null";
        SqlError::new(SqlState("22004"), message)
    };
    let too_large = || {
        let message = "array size exceeds the maximum allowed (134217727)";
        SqlError::new(SqlState("54000"), message)
    };
    let texts = text_lengths(element)?;
    let (mut places, mut lengths, mut total) = (Vec::new(), Vec::new(), 0i64);
    for row in 0..sizes.len() {
        if sizes.is_null(row) {
            return Err(absent());
        }
        let dimensions = range(sizes, row);
        let count = match dimensions.len() {
            0 => 0,
            1 if counts.is_null(dimensions.start) => {
                return Err(SqlError::new(SqlState("22004"), "dimension values cannot be null"));
            }
            1 => counts.value(dimensions.start),
            _ => return Err(SqlError::unsupported("arrays of more than one dimension")),
        };
        let count = usize::try_from(count).map_err(|_| too_large())?;
        let bytes = texts.as_ref().map_or(0, |texts| texts.value(row)).max(ELEMENT_BYTES);
        total = total.saturating_add((count as i64).saturating_mul(bytes));
        check_bytes(total)?;
        lengths.push(count);
        places.extend(std::iter::repeat_n(row as u32, count));
    }
    let values = take(element, &UInt32Array::from(places), None).map_err(internal)?;
    let item = Arc::new(Field::new_list_field(values.data_type().clone(), true));
    let offsets = OffsetBuffer::from_lengths(lengths);
    Ok(Arc::new(ListArray::try_new(item, offsets, values, None).map_err(internal)?))
}

/// Of an element that is looked at.
const ITEM_BYTES: usize = 16;

/// Whether each left array has all (`every`) or any of the right one's elements. NULL elements are nowhere.
fn has(args: &[ArrayRef], every: bool) -> Result<ArrayRef, SqlError> {
    let [left, right] = args else { return Err(internal("sets of elements are two")) };
    let (left, right) = (list(left)?, list(right)?);
    let (has, wanted) = identities(left.values(), right.values())?;
    let (present, asked) = (left.values(), right.values());
    let mut out = BooleanBuilder::with_capacity(left.len());
    let mut known: std::collections::HashSet<&[u8]> = std::collections::HashSet::new();
    for row in 0..left.len() {
        if left.is_null(row) || right.is_null(row) {
            out.append_null();
            continue;
        }
        interrupt::step((range(left, row).len() + range(right, row).len()) * ITEM_BYTES)?;
        known.clear();
        let valid = range(left, row).filter(|i| present.is_valid(*i));
        known.extend(valid.map(|i| has.value(i)));
        let mut found =
            range(right, row).map(|i| asked.is_valid(i) && known.contains(wanted.value(i)));
        out.append_value(if every { found.all(|f| f) } else { found.any(|f| f) });
    }
    Ok(Arc::new(out.finish()))
}

/// `array_cat(a, b)`; what is NULL adds nothing.
fn cat(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [left, right] = args else { return Err(internal("array_cat of two")) };
    let (left, right) = (list(left)?, list(right)?);
    let (mut places, mut lengths, mut valid) = (Vec::new(), Vec::new(), Vec::new());
    for row in 0..left.len() {
        let before = places.len();
        for (side, lists) in [left, right].into_iter().enumerate() {
            if lists.is_valid(row) {
                interrupt::step(range(lists, row).len() * ITEM_BYTES)?;
                places.extend(range(lists, row).map(|i| (side, i)));
            }
        }
        lengths.push(places.len() - before);
        valid.push(left.is_valid(row) || right.is_valid(row));
    }
    let sides = [left.values().as_ref(), right.values().as_ref()];
    let values = interleave(&sides, &places).map_err(internal)?;
    listed(left, values, lengths, Some(NullBuffer::from(valid)))
}

/// The rows of `generate_subscripts(array, dimension [, reverse])` as an array.
fn subscripts(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [array, dimension, reverse @ ..] = args else {
        return Err(internal("generate_subscripts of two"));
    };
    let (lists, dimension) = (list(array)?, ints(dimension)?);
    let reverse = reverse.first().and_then(|r| r.as_boolean_opt());
    let mut out = ListBuilder::new(Int32Builder::new());
    for row in 0..lists.len() {
        let known = lists.is_valid(row) && dimension.is_valid(row);
        let backwards = reverse.is_some_and(|r| r.is_valid(row) && r.value(row));
        let length = if known && dimension.value(row) == 1 { range(lists, row).len() } else { 0 };
        for n in 1..=length as i32 {
            out.values().append_value(if backwards { length as i32 + 1 - n } else { n });
        }
        out.append(known);
    }
    Ok(Arc::new(out.finish()))
}

/// `array_to_string(array, between [, null])`.
fn to_string(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [array, between, nulls @ ..] = args else { return Err(internal("array_to_string of two")) };
    let lists = list(array)?;
    let values = match lists.values().data_type() {
        DataType::Boolean => {
            let letters = lists.values().as_boolean().iter();
            let letters = letters.map(|b| b.map(|b| if b { "t" } else { "f" }));
            Arc::new(StringArray::from_iter(letters)) as ArrayRef
        }
        _ => super::cast::to_text(lists.values())?,
    };
    let text = |column: &ArrayRef| column.as_string_opt::<i32>().cloned();
    let none = || internal("array_to_string of no text");
    let (values, between) = (text(&values).ok_or_else(none)?, text(between).ok_or_else(none)?);
    let nulls = nulls.first().and_then(text);
    let mut out = StringBuilder::new();
    for row in 0..lists.len() {
        if lists.is_null(row) || between.is_null(row) {
            out.append_null();
            continue;
        }
        let absent = nulls.as_ref().filter(|n| n.is_valid(row)).map(|n| n.value(row));
        let shown = range(lists, row)
            .filter_map(|i| if values.is_valid(i) { Some(values.value(i)) } else { absent });
        let shown: Vec<&str> = shown.collect();
        let bytes: usize = shown.iter().map(|s| s.len() + between.value(row).len()).sum();
        check_bytes((out.values_slice().len() as i64).saturating_add(bytes as i64))?;
        interrupt::step(bytes)?;
        out.append_value(shown.join(between.value(row)));
        check_bytes(out.values_slice().len() as i64)?;
    }
    Ok(Arc::new(out.finish()))
}

/// `array[n]`; NULL where there is no such element.
fn item(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [array, places] = args else { return Err(internal("an element's array and place")) };
    let (lists, places) = (list(array)?, longs(places)?);
    let one = |row: usize| {
        if lists.is_null(row) || places.is_null(row) {
            return None;
        }
        let elements = range(lists, row);
        let at = usize::try_from(places.value(row)).ok()?.checked_sub(1)?;
        (at < elements.len()).then_some((elements.start + at) as u32)
    };
    let wanted: UInt32Array = (0..lists.len()).map(one).collect();
    take(lists.values(), &wanted, None).map_err(internal)
}

/// `array[from:to]`: as much of it as there is.
fn slice(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [array, from, to] = args else { return Err(internal("a slice's array and bounds")) };
    let (lists, from, to) = (list(array)?, longs(from)?, longs(to)?);
    let (mut kept, mut lengths, mut valid) = (Vec::new(), Vec::new(), Vec::new());
    for row in 0..lists.len() {
        let before = kept.len();
        valid.push(lists.is_valid(row) && from.is_valid(row) && to.is_valid(row));
        if valid[row] {
            let elements = range(lists, row);
            let last = to.value(row).min(elements.len() as i64);
            let places = from.value(row).max(1)..=last;
            kept.extend(places.map(|n| elements.start as u32 + (n - 1) as u32));
        }
        lengths.push(kept.len() - before);
    }
    let kept = take(lists.values(), &UInt32Array::from(kept), None).map_err(internal)?;
    listed(lists, kept, lengths, Some(NullBuffer::from(valid)))
}

/// `array_cmp(a, b)`: negative, zero or positive, as their order is.
fn compare(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [left, right] = args else { return Err(internal("array_cmp of two")) };
    let (a, b) = two_comparable(left, right)?;
    let codec = KeyCodec::with_options([(a.data_type().clone(), ARRAY_ORDER)]);
    let codec = codec.map_err(internal)?;
    let a = codec.rows(std::slice::from_ref(&a)).map_err(internal)?;
    let b = codec.rows(std::slice::from_ref(&b)).map_err(internal)?;
    let one = |row: usize| {
        let order: Ordering = a.row(row).data().cmp(b.row(row).data());
        (left.is_valid(row) && right.is_valid(row)).then_some(order as i32)
    };
    Ok(Arc::new((0..left.len()).map(one).collect::<Int32Array>()))
}

/// `nullif` of values that may be equal without having the same bytes.
fn null_if(args: &[ArrayRef]) -> Result<ArrayRef, SqlError> {
    let [a, b] = args else { return Err(internal("nullif of two")) };
    let (x, y) = two_comparable(a, b)?;
    let equal = cmp::eq(&x, &y).map_err(internal)?;
    nullif(a, &equal).map_err(internal)
}

fn alike(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    match args {
        [a, b] if a == b => Some((args.to_vec(), a.clone())),
        _ => None,
    }
}

/// An array and a value of its elements' type.
fn with_element(args: &[DataType]) -> Option<Vec<DataType>> {
    match args {
        [DataType::List(item), DataType::Null] => {
            Some(vec![args[0].clone(), item.data_type().clone()])
        }
        [DataType::List(item), t] => {
            let common = common_type(item.data_type(), t)?;
            match common == *item.data_type() {
                true => Some(vec![args[0].clone(), common]),
                false => Some(vec![array_of(&common), common]),
            }
        }
        _ => None,
    }
}

/// Two arrays as ones of the type that their elements have in common.
fn two_arrays(args: &[DataType]) -> Option<Vec<DataType>> {
    let [a, b] = args else { return None };
    match (a, b) {
        (DataType::List(_), DataType::Null) => Some(vec![a.clone(), a.clone()]),
        (DataType::Null, DataType::List(_)) => Some(vec![b.clone(), b.clone()]),
        (DataType::List(x), DataType::List(y)) => {
            let common = match (x.data_type(), y.data_type()) {
                (t, DataType::Null) | (DataType::Null, t) => t.clone(),
                (x, y) => common_type(x, y)?,
            };
            Some(vec![array_of(&common), array_of(&common)])
        }
        _ => None,
    }
}

/// Two arrays of one type, for operators. Numerics of any scale are one; so are integers, because catalogs
/// have wider ones in places.
fn same_arrays(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    if let [DataType::List(a), DataType::List(b)] = args {
        let (a, b) = (a.data_type(), b.data_type());
        let unknown = a.is_null() || b.is_null();
        let alike = (a.is_decimal() && b.is_decimal()) || (a.is_integer() && b.is_integer());
        if !unknown && a != b && !alike {
            return None;
        }
    }
    Some((two_arrays(args)?, DataType::Boolean))
}

fn subscripted(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    let whole = |t: &DataType| t.is_integer() || t.is_null();
    let taken = match args {
        [array @ DataType::List(_), n] if whole(n) => vec![array.clone(), DataType::Int32],
        [array @ DataType::List(_), n, DataType::Boolean] if whole(n) => {
            vec![array.clone(), DataType::Int32, DataType::Boolean]
        }
        _ => return None,
    };
    Some((taken, array_of(&DataType::Int32)))
}

fn concatenated(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    let types = two_arrays(args)?;
    let array = types.first()?.clone();
    Some((types, array))
}

fn one_array(args: &[DataType], result: DataType) -> Option<(Vec<DataType>, DataType)> {
    match args {
        [DataType::List(_)] => Some((args.to_vec(), result)),
        _ => None,
    }
}

fn removed(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    let types = with_element(args)?;
    let array = types.first()?.clone();
    Some((types, array))
}

fn replaced(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    let [array, from, to] = args else { return None };
    let types = with_element(&[array.clone(), from.clone()])?;
    let types = with_element(&[types[0].clone(), to.clone()])?;
    let (array, element) = (types[0].clone(), types[1].clone());
    Some((vec![array.clone(), element.clone(), element], array))
}

fn placed(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    let [array, element, from @ ..] = args else { return None };
    let mut types = with_element(&[array.clone(), element.clone()])?;
    match from {
        [] => {}
        [t] if t.is_integer() || t.is_null() => types.push(DataType::Int32),
        _ => return None,
    }
    Some((types, DataType::Int32))
}

fn all_placed(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    Some((with_element(args)?, array_of(&DataType::Int32)))
}

fn trimmed(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    match args {
        [array @ DataType::List(_), n] if n.is_integer() || n.is_null() => {
            Some((vec![array.clone(), DataType::Int32], array.clone()))
        }
        _ => None,
    }
}

fn picked(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    match args {
        [array @ DataType::List(item), n] if n.is_integer() || n.is_null() => {
            Some((vec![array.clone(), DataType::Int64], item.data_type().clone()))
        }
        _ => None,
    }
}

fn sliced(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    let whole = |t: &DataType| t.is_integer() || t.is_null();
    match args {
        [array @ DataType::List(_), from, to] if whole(from) && whole(to) => {
            Some((vec![array.clone(), DataType::Int64, DataType::Int64], array.clone()))
        }
        _ => None,
    }
}

fn filled(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    match args {
        [t, DataType::List(size)] if !t.is_null() && !t.is_nested() => match size.data_type() {
            DataType::Int32 | DataType::Int16 | DataType::Null => {
                Some((vec![t.clone(), array_of(&DataType::Int32)], array_of(t)))
            }
            _ => None,
        },
        _ => None,
    }
}

fn joined(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    let text = |t: &DataType| matches!(t, DataType::Utf8 | DataType::Utf8View | DataType::Null);
    match args {
        [array @ DataType::List(_), rest @ ..]
            if (1..=2).contains(&rest.len()) && rest.iter().all(text) =>
        {
            let rest = rest.iter().map(|_| DataType::Utf8);
            Some(([array.clone()].into_iter().chain(rest).collect(), DataType::Utf8))
        }
        [DataType::Null, rest @ ..] if !rest.is_empty() => {
            let array = array_of(&DataType::Utf8);
            joined(&[[array].as_slice(), rest].concat())
        }
        _ => None,
    }
}

/// `nullif` by value, for the planner's `bind::expressions::semantic_equality`; not a name that SQL text can
/// contain unquoted.
pub const NULL_IF: &str = "#nullif";

/// All of them, under the names by which the planner's `bind` looks for them.
pub fn functions() -> Vec<Arc<ScalarUDF>> {
    let all: [(&'static str, Types, Eval, bool); 20] = [
        ("array_remove_all", removed, remove, false),
        ("array_replace_all", replaced, replace, false),
        ("array_position", placed, position, false),
        ("array_positions", all_placed, positions, false),
        ("array_item", picked, item, true),
        ("array_slice_of", sliced, slice, true),
        ("array_dims", |args| one_array(args, DataType::Utf8), dims, true),
        ("array_ndims", |args| one_array(args, DataType::Int32), ndims, true),
        ("trim_array", trimmed, trim, true),
        ("array_fill", filled, fill, false),
        ("array_has_all", same_arrays, |args| has(args, true), true),
        ("array_has_any", same_arrays, |args| has(args, false), true),
        ("array_cat", concatenated, cat, false),
        ("array_subscripts", subscripted, subscripts, true),
        ("array_to_string", joined, to_string, false),
        // DataFusion's other names of it.
        ("list_to_string", joined, to_string, false),
        ("array_join", joined, to_string, false),
        ("list_join", joined, to_string, false),
        ("array_cmp", |args| Some((two_arrays(args)?, DataType::Int32)), compare, true),
        (NULL_IF, alike, null_if, false),
    ];
    all.map(|(name, types, eval, strict)| function(name, types, eval, strict)).into()
}

/// A function of whole columns, resolved by the types of its arguments.
pub(super) fn function(
    name: &'static str,
    types: Types,
    eval: Eval,
    strict: bool,
) -> Arc<ScalarUDF> {
    let signature = Signature::user_defined(Volatility::Immutable);
    Arc::new(ScalarUDF::from(ArrayFunction { name, types, eval, strict, signature }))
}

#[cfg(test)]
mod tests;
