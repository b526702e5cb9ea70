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
    /// Unary minus of the left operand.
    Negate,
    Distinct,
    NotDistinct,
    /// The right operand, as an element of a list that is compared with the left one.
    Element,
    /// A parameter (right operand) whose type is looked up or remembered.
    Parameter,
    /// The left operand's list of arguments and one more.
    Argument,
    /// A call of the named function or construct with the left operand's list of arguments.
    Call(&'static str),
}

/// Constructs that are resolved as calls: their results need a common type.
const CONSTRUCTS: [&str; 16] = [
    ANY,
    VALUES,
    SERIES,
    "case",
    "coalesce",
    "greatest",
    "least",
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

/// `op ANY (array)`.
pub const ANY: &str = "#any";

/// `generate_series` as an array of its arguments' type.
pub const SERIES: &str = "#series";

/// The name of a call that [`crate::bind::operators`] resolves by types.
pub(super) fn resolved_name(name: &str) -> Option<&'static str> {
    let name = match name {
        "pow" => "power",
        "json_build_object" => "jsonb_build_object",
        "json_build_array" => "jsonb_build_array",
        "json_typeof" => "jsonb_typeof",
        "json_array_length" => "jsonb_array_length",
        "json_extract_path" => "jsonb_extract_path",
        "json_extract_path_text" => "jsonb_extract_path_text",
        "json_strip_nulls" => "jsonb_strip_nulls",
        "to_json" | "array_to_json" => "to_jsonb",
        name => name,
    };
    CONSTRUCTS
        .iter()
        .find(|c| **c == name)
        .copied()
        .or_else(|| crate::functions::call::defs().get_key_value(name).map(|(k, _)| *k))
}

impl Op {
    fn encode(self) -> BinaryOperator {
        BinaryOperator::Custom(match self {
            Op::Number => "#number".into(),
            Op::Cast(t) => {
                let t = ColumnType::from(t);
                format!("#cast:{}:{}", t.oid, t.typmod)
            }
            Op::Negate => "#negate".into(),
            Op::Distinct => "#distinct".into(),
            Op::NotDistinct => "#notdistinct".into(),
            Op::Element => "#element".into(),
            Op::Parameter => "#parameter".into(),
            Op::Argument => "#argument".into(),
            Op::Call(name) => format!("#call:{name}"),
        })
    }

    pub fn decode(op: &BinaryOperator) -> Option<Op> {
        let BinaryOperator::Custom(text) = op else { return None };
        Some(match text.as_str() {
            "#number" => Op::Number,
            "#negate" => Op::Negate,
            "#distinct" => Op::Distinct,
            "#notdistinct" => Op::NotDistinct,
            "#element" => Op::Element,
            "#parameter" => Op::Parameter,
            "#argument" => Op::Argument,
            _ if text.starts_with("#call:") => Op::Call(resolved_name(&text[6..])?),
            _ => {
                let (oid, typmod) = text.strip_prefix("#cast:")?.split_once(':')?;
                let t = ColumnType { oid: oid.parse().ok()?, typmod: typmod.parse().ok()? };
                Op::Cast(t.to_sql().ok()?)
            }
        })
    }
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

pub(super) fn binary(left: Expr, op: BinaryOperator, right: Expr) -> Expr {
    Expr::BinaryOp { left: Box::new(left), op, right: Box::new(right) }
}

pub(super) fn cast(e: Expr, t: SqlType) -> Expr {
    ours(Op::Cast(t), e, null())
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
    let list = args
        .into_iter()
        .fold(Expr::value(Value::Null), |list, arg| ours(Op::Argument, list, Box::new(arg)));
    ours(Op::Call(name), list, null())
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
