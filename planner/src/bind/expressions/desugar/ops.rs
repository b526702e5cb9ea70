//! What the rewritten expressions are made of: our operators, as text in the AST, and calls.

use millrace_common::SqlType;
use millrace_rpc::catalog::ColumnType;
use sqlparser::ast::*;

/// Our operators, as they travel in `BinaryOperator::Custom`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// A number's text (left operand).
    Number,
    /// A cast of the left operand.
    Cast(SqlType),
    /// The left operand as the value of a column (right operand: its name) of this type.
    Assign(SqlType),
    /// Unary minus of the left operand.
    Negate,
    /// Unary plus of the left operand: itself, if it is a number.
    Plus,
    /// The left operand without its sign.
    Absolute,
    /// The left operand with its bits turned.
    Complement,
    /// The left operand as a number of rows, for the clause that the right one names.
    Rows,
    Distinct,
    NotDistinct,
    /// The right operand, as an element of a list that is compared with the left one.
    Element,
    /// A parameter (right operand) whose type is looked up or remembered.
    Parameter,
    /// The left operand's list of arguments and one more, or those of another list.
    Argument,
    /// A call of the named function or construct with the left operand's list of arguments.
    Call(&'static str),
    /// The left operand, or the row of the table of that name (right operand) as a document. `padded`: an
    /// outer join may leave the row out.
    Row {
        padded: bool,
    },
    /// The left operand, or the text of the row of the table of that name.
    RowText {
        padded: bool,
    },
    /// Whether the left operand, or all columns of the table of that name, are NULL or are not.
    RowTest {
        not_null: bool,
    },
}

/// Constructs that are resolved as calls: their results need a common type.
const CONSTRUCTS: [&str; 21] = [
    ANY,
    ARRAY,
    ITEM,
    SLICE,
    SCALAR,
    VALUES,
    SERIES,
    "case",
    "coalesce",
    "greatest",
    "least",
    "nullif",
    "pg_typeof",
    "array_length",
    "array_upper",
    "array_lower",
    "cardinality",
    "array_ndims",
    "array_position",
    "array_remove",
    "array_replace",
];

/// The construct by which the elements of a column of VALUES get a common type: one of them and the others.
pub const VALUES: &str = "#values";

/// `ARRAY[…]`: its elements get a common type.
pub const ARRAY: &str = "#array";

/// An element of an array, or a part of a document: the value and its subscripts.
pub const ITEM: &str = "#item";

/// `array[from:to]`.
pub const SLICE: &str = "#slice";

/// The one argument, which may not be an array.
pub const SCALAR: &str = "#scalar";

/// `op ANY (array)`.
pub const ANY: &str = "#any";

/// `generate_series` as an array of its arguments' type.
pub const SERIES: &str = "#series";

/// The name of a call that [`crate::bind::expressions::operators`] resolves by types.
pub(super) fn resolved_name(name: &str) -> Option<&'static str> {
    let name = match name {
        "pow" => "power",
        "json_build_object" => "jsonb_build_object",
        "json_build_array" => "jsonb_build_array",
        "json_object" => "jsonb_object",
        "json_typeof" => "jsonb_typeof",
        "json_array_length" => "jsonb_array_length",
        "json_extract_path" => "jsonb_extract_path",
        "json_extract_path_text" => "jsonb_extract_path_text",
        "json_strip_nulls" => "jsonb_strip_nulls",
        "to_json" | "array_to_json" | "row_to_json" => "to_jsonb",
        name => name,
    };
    CONSTRUCTS
        .iter()
        .find(|c| **c == name)
        .copied()
        .or_else(|| millrace_functions::call::defs().get_key_value(name).map(|(k, _)| *k))
}

impl Op {
    fn encode(self) -> BinaryOperator {
        BinaryOperator::Custom(match self {
            Op::Number => "#number".into(),
            Op::Cast(t) => format!("#cast:{}", encoded(t)),
            Op::Assign(t) => format!("#assign:{}", encoded(t)),
            Op::Negate => "#negate".into(),
            Op::Plus => "#plus".into(),
            Op::Absolute => "#absolute".into(),
            Op::Complement => "#complement".into(),
            Op::Rows => "#rows".into(),
            Op::Distinct => "#distinct".into(),
            Op::NotDistinct => "#notdistinct".into(),
            Op::Element => "#element".into(),
            Op::Parameter => "#parameter".into(),
            Op::Argument => "#argument".into(),
            Op::Call(name) => format!("#call:{name}"),
            Op::Row { padded: false } => "#row".into(),
            Op::Row { padded: true } => "#paddedrow".into(),
            Op::RowText { padded: false } => "#rowtext".into(),
            Op::RowText { padded: true } => "#paddedrowtext".into(),
            Op::RowTest { not_null: false } => "#rownull".into(),
            Op::RowTest { not_null: true } => "#rownotnull".into(),
        })
    }

    pub fn decode(op: &BinaryOperator) -> Option<Op> {
        let BinaryOperator::Custom(text) = op else { return None };
        Some(match text.as_str() {
            "#number" => Op::Number,
            "#negate" => Op::Negate,
            "#plus" => Op::Plus,
            "#absolute" => Op::Absolute,
            "#complement" => Op::Complement,
            "#rows" => Op::Rows,
            "#distinct" => Op::Distinct,
            "#notdistinct" => Op::NotDistinct,
            "#element" => Op::Element,
            "#parameter" => Op::Parameter,
            "#argument" => Op::Argument,
            "#row" => Op::Row { padded: false },
            "#paddedrow" => Op::Row { padded: true },
            "#rowtext" => Op::RowText { padded: false },
            "#paddedrowtext" => Op::RowText { padded: true },
            "#rownull" => Op::RowTest { not_null: false },
            "#rownotnull" => Op::RowTest { not_null: true },
            _ if text.starts_with("#call:") => Op::Call(resolved_name(&text[6..])?),
            _ => match text.strip_prefix("#assign:") {
                Some(t) => Op::Assign(decoded(t)?),
                None => Op::Cast(decoded(text.strip_prefix("#cast:")?)?),
            },
        })
    }
}

fn encoded(t: SqlType) -> String {
    let t = ColumnType::from(t);
    format!("{}:{}", t.oid, t.typmod)
}

fn decoded(text: &str) -> Option<SqlType> {
    let (oid, typmod) = text.split_once(':')?;
    ColumnType { oid: oid.parse().ok()?, typmod: typmod.parse().ok()? }.to_sql().ok()
}

pub(super) fn null() -> Box<Expr> {
    Box::new(Expr::value(Value::Null))
}

pub(in crate::bind) fn string(text: impl Into<String>) -> Expr {
    Expr::value(Value::SingleQuotedString(text.into()))
}

pub(super) fn ours(op: Op, left: Expr, right: Box<Expr>) -> Expr {
    Expr::BinaryOp { left: Box::new(left), op: op.encode(), right }
}

/// A table's name where its row may be meant.
pub(in crate::bind) fn row_op(name: Ident, table: &str, padded: bool) -> Expr {
    ours(Op::Row { padded }, Expr::Identifier(name), Box::new(string(table)))
}

/// The same, as text.
pub(in crate::bind) fn row_text(name: Ident, table: &str, padded: bool) -> Expr {
    ours(Op::RowText { padded }, Expr::Identifier(name), Box::new(string(table)))
}

/// The same, asked whether it is NULL.
pub(in crate::bind) fn row_test(name: Ident, table: &str, not_null: bool) -> Expr {
    ours(Op::RowTest { not_null }, Expr::Identifier(name), Box::new(string(table)))
}

pub(super) fn binary(left: Expr, op: BinaryOperator, right: Expr) -> Expr {
    Expr::BinaryOp { left: Box::new(left), op, right: Box::new(right) }
}

pub(super) fn cast(e: Expr, t: SqlType) -> Expr {
    ours(Op::Cast(t), e, null())
}

/// What an expression is as the value of a column, by PostgreSQL's assignment casts: an error (42804) where there is
/// none. The length of a text is left to whoever stores it, who refuses what is too long.
pub fn assigned(e: Expr, column: &str, t: SqlType) -> Expr {
    let t = match t {
        SqlType::Varchar(_) | SqlType::Char(_) => SqlType::Text,
        t => t,
    };
    ours(Op::Assign(t), Expr::Nested(Box::new(e)), Box::new(string(column)))
}

/// A call of a function, by a name that needs no folding.
pub(in crate::bind) fn call(name: &str, args: impl IntoIterator<Item = Expr>) -> Expr {
    if let Some(name) = resolved_name(name) {
        return resolved(name, args);
    }
    plain_call(name, args)
}

/// A call of a function, by a name that needs no folding, that is looked up like any other.
pub fn plain_call(name: &str, args: impl IntoIterator<Item = Expr>) -> Expr {
    let args = args.into_iter().map(|a| FunctionArg::Unnamed(FunctionArgExpr::Expr(a))).collect();
    Expr::Function(Function {
        name: ObjectName::from(vec![Ident::with_quote('"', name)]),
        uses_odbc_syntax: false,
        parameters: FunctionArguments::None,
        args: FunctionArguments::List(FunctionArgumentList {
            duplicate_treatment: None,
            args,
            clauses: Vec::new(),
        }),
        filter: None,
        null_treatment: None,
        over: None,
        within_group: Vec::new(),
    })
}

/// A call that is resolved by the types of its arguments.
pub(in crate::bind) fn resolved(name: &'static str, args: impl IntoIterator<Item = Expr>) -> Expr {
    ours(Op::Call(name), listed(args.into_iter().collect()), null())
}

/// Arguments as a list of lists where they are many: a tree of them must not become deep.
fn listed(args: Vec<Expr>) -> Expr {
    const WIDTH: usize = 16;
    let parts = match args.len() {
        0..=WIDTH => args,
        count => {
            let size = count.div_ceil(WIDTH);
            let (mut args, mut parts) = (args.into_iter(), Vec::with_capacity(WIDTH));
            while args.len() > 0 {
                parts.push(listed(args.by_ref().take(size).collect()));
            }
            parts
        }
    };
    let none = Expr::value(Value::Null);
    parts.into_iter().fold(none, |list, arg| ours(Op::Argument, list, Box::new(arg)))
}

/// The elements of an array that was spelled out.
pub(super) fn array_elements(e: &Expr) -> Option<Vec<Expr>> {
    fn collect(list: &Expr, items: &mut Vec<Expr>) -> bool {
        let Expr::BinaryOp { left, op, right } = list else { return false };
        if Op::decode(op) != Some(Op::Argument) {
            return false;
        }
        collect(left, items);
        if !collect(right, items) {
            items.push(right.as_ref().clone());
        }
        true
    }
    let Expr::BinaryOp { left, op, .. } = e else { return None };
    let mut items = Vec::new();
    (Op::decode(op) == Some(Op::Call(ARRAY)) && collect(left, &mut items)).then_some(items)
}

pub(in crate::bind) fn take(e: &mut Expr) -> Expr {
    std::mem::replace(e, Expr::value(Value::Null))
}

/// The text of a number that was rewritten.
pub(super) fn number_text(e: &Expr) -> Option<&str> {
    match e {
        Expr::BinaryOp { left, op, .. } if Op::decode(op) == Some(Op::Number) => match &**left {
            Expr::Value(v) => match &v.value {
                Value::SingleQuotedString(s) => Some(s),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    }
}

/// Gives a number back its plain form.
pub(super) fn unwrap_number(e: &mut Expr) {
    if let Some(text) = number_text(e) {
        *e = Expr::value(Value::Number(text.to_owned(), false));
    }
}

pub(super) fn negate_if(negated: bool, e: Expr) -> Expr {
    let nested = Expr::Nested(Box::new(e));
    match negated {
        true => Expr::UnaryOp { op: UnaryOperator::Not, expr: Box::new(nested) },
        false => nested,
    }
}
