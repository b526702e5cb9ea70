//! Functions over the catalogs, as DataFusion functions of one statement.
//!
//! They run row by row: catalogs are small and the functions look things up. Names that begin with
//! `#` are written by [`super::rewrite`] only (casts to `regclass` and the like).

mod definitions;
mod locks;
mod names;
mod rights;
mod sessions;
mod sizes;
mod values;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::num::{IntErrorKind, ParseIntError};
use std::ops::ControlFlow;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::{DataType, FieldRef, Int64Type};
use datafusion::common::Result as DfResult;
use datafusion::logical_expr::{
    ColumnarValue, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
    TypeSignature, Volatility,
};
use millrace_common::encoding::{invalid_text, out_of_range};
use millrace_common::{SqlError, SqlState, SqlType};
use sqlparser::ast::{Expr, FunctionArg, FunctionArgExpr, FunctionArguments, Visit};

use super::SystemTables;
use super::rewrite::function_name;
use super::rows::{Cell, array, field};
use crate::query::snapshot_table::external;
use crate::session::params::note_type;
use millrace_planner::parser::walk;

type Body = fn(&SystemTables, &[Cell]) -> Result<Cell, SqlError>;
/// Name, kind of the result as in [`super::rows`], and what it does, which is its description.
type Entry = (&'static str, char, Body);

static PARTS: [&[Entry]; 7] = [
    rights::FUNCTIONS,
    definitions::FUNCTIONS,
    sessions::FUNCTIONS,
    locks::FUNCTIONS,
    sizes::FUNCTIONS,
    names::FUNCTIONS,
    values::FUNCTIONS,
];

struct CatalogFunction {
    name: &'static str,
    /// Kind of the result, as in [`super::rows`].
    kind: char,
    body: Body,
    signature: Signature,
    tables: Arc<SystemTables>,
}

impl fmt::Debug for CatalogFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for CatalogFunction {
    fn eq(&self, other: &CatalogFunction) -> bool {
        self.name == other.name && Arc::ptr_eq(&self.tables, &other.tables)
    }
}

impl Eq for CatalogFunction {}

impl Hash for CatalogFunction {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl ScalarUDFImpl for CatalogFunction {
    fn name(&self) -> &str {
        self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> DfResult<DataType> {
        Ok(field(self.name, self.kind).data_type().clone())
    }

    fn return_field_from_args(&self, _: ReturnFieldArgs) -> DfResult<FieldRef> {
        Ok(Arc::new(field(self.name, self.kind)))
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> DfResult<ColumnarValue> {
        let rows = args.number_rows;
        if acts(self.name) {
            let types: Vec<DataType> = args.args.iter().map(ColumnarValue::data_type).collect();
            check_numbers(self.name, &types).map_err(external)?;
        }
        if self.name == sizes::COLUMN_SIZE
            && let Some(value) = args.args.first()
        {
            let sizes = sizes::of_values(&value.to_array(rows)?).map_err(external)?;
            return Ok(ColumnarValue::Array(array(self.kind, &sizes)));
        }
        let columns = args
            .args
            .iter()
            .map(|a| a.to_array(rows).and_then(|a| cells(&a).map_err(external)))
            .collect::<DfResult<Vec<_>>>()?;
        let mut out = Vec::with_capacity(rows);
        let mut row: Vec<Cell> = Vec::with_capacity(columns.len());
        for i in 0..rows {
            row.clear();
            row.extend(columns.iter().map(|c| c[i].clone()));
            out.push((self.body)(&self.tables, &row).map_err(external)?);
        }
        Ok(ColumnarValue::Array(array(self.kind, &out)))
    }
}

/// A column as cells.
fn cells(column: &ArrayRef) -> Result<Vec<Cell>, SqlError> {
    let cast =
        |t: &DataType| arrow::compute::cast(column, t).map_err(crate::dml::rows::arrow_error);
    Ok(match column.data_type() {
        DataType::Null => vec![Cell::Null; column.len()],
        DataType::Boolean => column.as_boolean().iter().map(Cell::from).collect(),
        t if t.is_integer() => {
            cast(&DataType::Int64)?.as_primitive::<Int64Type>().iter().map(Cell::from).collect()
        }
        DataType::List(_) | DataType::LargeList(_) => {
            let item = arrow::datatypes::Field::new("item", DataType::Utf8, true);
            let list = cast(&DataType::List(Arc::new(item)))?;
            let texts = |a: ArrayRef| {
                a.as_string::<i32>().iter().flatten().map(str::to_owned).collect::<Vec<_>>()
            };
            list.as_list::<i32>().iter().map(|v| v.map(texts).into()).collect()
        }
        _ => cast(&DataType::Utf8)?.as_string::<i32>().iter().map(Cell::from).collect(),
    })
}

/// An argument that is a number; `None`: it is NULL, or not given.
fn int(args: &[Cell], i: usize) -> Result<Option<i64>, SqlError> {
    match args.get(i) {
        None | Some(Cell::Null) => Ok(None),
        Some(Cell::Int(v)) => Ok(Some(*v)),
        Some(Cell::Text(t)) => number(t).map(Some),
        Some(Cell::Bool(_) | Cell::Float(_) | Cell::Ints(_) | Cell::Texts(_)) => {
            let message = "a number is wanted where the function is given another value";
            Err(SqlError::new(SqlState::UNDEFINED_FUNCTION, message))
        }
    }
}

/// A number that is written as a text: a literal whose type nobody has told.
pub(crate) fn number(text: &str) -> Result<i64, SqlError> {
    let digits = text.trim();
    digits.parse::<i64>().map_err(|e: ParseIntError| match e.kind() {
        IntErrorKind::PosOverflow | IntErrorKind::NegOverflow => out_of_range("bigint", text),
        _ => invalid_text("bigint", text),
    })
}

/// Refuses arguments that no number can be made of, for functions that are called with numbers.
pub(crate) fn check_numbers(name: &str, types: &[DataType]) -> Result<(), SqlError> {
    let fits = |t: &DataType| {
        t.is_integer() || matches!(t, DataType::Utf8 | DataType::Utf8View | DataType::Null)
    };
    if types.iter().all(fits) {
        return Ok(());
    }
    let shown = |t: &DataType| match SqlType::from_arrow(t) {
        Ok(SqlType::Numeric(_)) => "numeric".to_owned(),
        Ok(t) => t.to_string(),
        Err(_) => t.to_string(),
    };
    let shown: Vec<String> = types.iter().map(shown).collect();
    let message = format!("function {name}({}) does not exist", shown.join(", "));
    Err(SqlError::new(SqlState::UNDEFINED_FUNCTION, message).with_hint(
        "No function matches the given name and argument types. You might need to add explicit type casts.",
    ))
}

/// Parameters that are arguments of functions which act: drivers send a number for what they are told is one.
pub fn infer_parameters<V: Visit>(statement: &V, types: &mut Vec<Option<DataType>>) {
    let _ = walk::expressions(statement, |e| {
        if let Expr::Function(f) = e
            && let FunctionArguments::List(list) = &f.args
            && acts(&function_name(f))
        {
            let locks = !sessions::ACTING.contains(&function_name(f).as_str());
            let wide = locks && list.args.len() == 1;
            let number = if wide { DataType::Int64 } else { DataType::Int32 };
            for arg in &list.args {
                if let FunctionArg::Unnamed(FunctionArgExpr::Expr(arg)) = arg {
                    note_type(arg, number.clone(), types);
                }
            }
        }
        ControlFlow::<()>::Continue(())
    });
}

fn text(args: &[Cell], i: usize) -> Option<&str> {
    match args.get(i) {
        Some(Cell::Text(t)) => Some(t),
        _ => None,
    }
}

/// Whether a function does something beyond telling its value.
fn acts(name: &str) -> bool {
    locks::FUNCTIONS.iter().any(|f| f.0 == name) || sessions::ACTING.contains(&name)
}

/// The names of all functions.
pub fn names() -> impl Iterator<Item = &'static str> {
    PARTS.iter().flat_map(|part| part.iter()).map(|f| f.0)
}

/// The function of a name.
pub fn lookup(tables: &Arc<SystemTables>, name: &str) -> Option<Arc<ScalarUDF>> {
    let (name, kind, body) = *PARTS.iter().flat_map(|part| part.iter()).find(|f| f.0 == name)?;
    // What acts upon something is called for each row, and by nobody who only wants to know its value.
    let volatility = if acts(name) { Volatility::Volatile } else { Volatility::Stable };
    let signature =
        Signature::one_of(vec![TypeSignature::VariadicAny, TypeSignature::Nullary], volatility);
    let function = CatalogFunction { name, kind, body, signature, tables: tables.clone() };
    Some(Arc::new(ScalarUDF::new_from_impl(function)))
}

const NULL: Body = |_, _| Ok(Cell::Null);
const TRUE: Body = |_, _| Ok(Cell::Bool(true));
const FALSE: Body = |_, _| Ok(Cell::Bool(false));
