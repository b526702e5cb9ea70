//! A system table under construction: columns by name, filled row by row.
//!
//! Kinds: `b` boolean, `s`/`d`/`i` integers of 2, 4 and 8 bytes, `f`/`g` floats, `o` oid, `n` name,
//! `c` "char", `t` text, `z` timestamptz, `a` text[], `v` int2vector, `k` smallint[], `l` integer[],
//! `w` oidvector, `r` regproc. OIDs are computed with as bigint;
//! the field's metadata ([`TYPE_OID`]) tells what a client is told.

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, Float32Array, Float64Array, Int16Array, Int32Array, Int64Array,
    ListBuilder, PrimitiveBuilder, RecordBatch, StringArray, StringBuilder,
    TimestampMicrosecondArray,
};
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Field, Int16Type, Int32Type, Int64Type, Schema,
};
use millrace_common::SqlType;

/// Key of the field metadata that holds the OID of the type a client sees.
pub const TYPE_OID: &str = "millrace.type_oid";

/// One value.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Ints(Vec<i64>),
    Texts(Vec<String>),
}

macro_rules! cell_from {
    ($($t:ty => $make:expr),* $(,)?) => { $(impl From<$t> for Cell {
        fn from(v: $t) -> Cell { $make(v) }
    })* };
}

cell_from! {
    &str => |v: &str| Cell::Text(v.to_owned()),
    String => Cell::Text,
    &String => |v: &String| Cell::Text(v.clone()),
    bool => Cell::Bool,
    i64 => Cell::Int,
    f64 => Cell::Float,
    i32 => |v| Cell::Int(i64::from(v)),
    i16 => |v| Cell::Int(i64::from(v)),
    u32 => |v| Cell::Int(i64::from(v)),
    Vec<i64> => Cell::Ints,
    Vec<String> => Cell::Texts,
}

impl<T: Into<Cell>> From<Option<T>> for Cell {
    fn from(v: Option<T>) -> Cell {
        v.map_or(Cell::Null, Into::into)
    }
}

/// The Arrow field of a column.
pub fn field(name: &str, kind: char) -> Field {
    let list = |t| DataType::List(Arc::new(Field::new("item", t, true)));
    let (t, oid) = match kind {
        'b' => (DataType::Boolean, 0),
        's' => (DataType::Int16, 0),
        'd' => (DataType::Int32, 0),
        'i' => (DataType::Int64, 0),
        'f' => (DataType::Float32, 0),
        'g' => (DataType::Float64, 0),
        'o' => (DataType::Int64, 26),
        'r' => (DataType::Int64, 24),
        'n' => (DataType::Utf8, 19),
        'c' => (DataType::Utf8, 18),
        'z' => (SqlType::Timestamptz.to_arrow(), 0),
        'a' => (list(DataType::Utf8), 0),
        'v' => (list(DataType::Int16), 22),
        'k' => (list(DataType::Int16), 0),
        'l' => (list(DataType::Int32), 0),
        'w' => (list(DataType::Int64), 30),
        _ => (DataType::Utf8, 0),
    };
    let field = Field::new(name, t, true);
    match oid {
        0 => field,
        oid => field.with_metadata(HashMap::from([(TYPE_OID.to_owned(), oid.to_string())])),
    }
}

/// A column of cells; a cell of another kind is NULL.
pub fn array(kind: char, cells: &[Cell]) -> ArrayRef {
    let ints = || cells.iter().map(|c| if let Cell::Int(i) = c { Some(*i) } else { None });
    let texts =
        || cells.iter().map(|c| if let Cell::Text(t) = c { Some(t.as_str()) } else { None });
    match kind {
        'b' => Arc::new(
            cells
                .iter()
                .map(|c| if let Cell::Bool(b) = c { Some(*b) } else { None })
                .collect::<BooleanArray>(),
        ),
        's' => {
            Arc::new(ints().map(|i| i.and_then(|i| i16::try_from(i).ok())).collect::<Int16Array>())
        }
        'd' => {
            Arc::new(ints().map(|i| i.and_then(|i| i32::try_from(i).ok())).collect::<Int32Array>())
        }
        'i' | 'o' | 'r' => Arc::new(ints().collect::<Int64Array>()),
        'z' => Arc::new(ints().collect::<TimestampMicrosecondArray>().with_timezone("UTC")),
        'f' => Arc::new(ints().map(|i| i.map(|i| i as f32)).collect::<Float32Array>()),
        'g' => Arc::new(cells.iter().map(float).collect::<Float64Array>()),
        'a' => {
            let mut b = ListBuilder::new(StringBuilder::new());
            for cell in cells {
                match cell {
                    Cell::Texts(v) => b.append_value(v.iter().map(Some)),
                    _ => b.append_null(),
                }
            }
            Arc::new(b.finish())
        }
        'v' | 'k' => lists::<Int16Type>(cells, |i| i16::try_from(i).ok()),
        'l' => lists::<Int32Type>(cells, |i| i32::try_from(i).ok()),
        'w' => lists::<Int64Type>(cells, Some),
        _ => Arc::new(texts().collect::<StringArray>()),
    }
}

fn float(cell: &Cell) -> Option<f64> {
    match cell {
        Cell::Float(f) => Some(*f),
        Cell::Int(i) => Some(*i as f64),
        _ => None,
    }
}

/// A column of lists of integers; one that has no place in the type is NULL.
fn lists<T: ArrowPrimitiveType>(cells: &[Cell], element: fn(i64) -> Option<T::Native>) -> ArrayRef {
    let mut b = ListBuilder::new(PrimitiveBuilder::<T>::new());
    for cell in cells {
        match cell {
            Cell::Ints(v) => b.append_value(v.iter().map(|i| element(*i))),
            _ => b.append_null(),
        }
    }
    Arc::new(b.finish())
}

/// Rows of one table.
pub struct Rows {
    names: Vec<&'static str>,
    kinds: Vec<char>,
    columns: Vec<Vec<Cell>>,
}

impl Rows {
    /// `spec`: `name:kind …`.
    pub fn new(spec: &'static str) -> Rows {
        let (names, kinds): (Vec<_>, Vec<_>) = spec
            .split_whitespace()
            .map(|c| {
                let (name, kind) = c.split_once(':').unwrap_or((c, "t"));
                (name, kind.chars().next().unwrap_or('t'))
            })
            .unzip();
        let columns = names.iter().map(|_| Vec::new()).collect();
        Rows { names, kinds, columns }
    }

    /// A row; columns not named get false, 0, or NULL.
    pub fn push<const N: usize>(&mut self, values: [(&str, Cell); N]) {
        for (column, kind) in self.columns.iter_mut().zip(&self.kinds) {
            column.push(match kind {
                'b' => Cell::Bool(false),
                's' | 'd' | 'i' | 'o' | 'r' | 'f' | 'g' => Cell::Int(0),
                'c' => Cell::Text(String::new()),
                _ => Cell::Null,
            });
        }
        for (name, value) in values {
            let at = self.names.iter().position(|n| *n == name);
            debug_assert!(at.is_some(), "no column {name}");
            if let Some(last) = at.and_then(|i| self.columns[i].last_mut()) {
                *last = value;
            }
        }
    }

    pub fn finish(self) -> Option<RecordBatch> {
        let fields: Vec<Field> =
            self.names.iter().zip(&self.kinds).map(|(n, k)| field(n, *k)).collect();
        let arrays = self.columns.iter().zip(&self.kinds).map(|(c, k)| array(*k, c)).collect();
        RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).ok()
    }
}

/// Adds a row: `row!(rows; column: value, …)`.
macro_rules! row {
    ($rows:expr; $($name:ident: $v:expr),* $(,)?) => {
        $rows.push([$((stringify!($name), $crate::catalog::rows::Cell::from($v))),*])
    };
}
pub(crate) use row;
