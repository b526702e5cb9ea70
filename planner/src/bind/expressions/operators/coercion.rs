//! Casts, explicit and implicit: how an expression gets the type that its place asks for.

use std::collections::BTreeMap;
use std::sync::Arc;

use datafusion::arrow::datatypes::{DataType, Field};
use datafusion::common::metadata::FieldMetadata;
use datafusion::common::{DFSchema, Result, ScalarValue};
use datafusion::logical_expr::expr::Placeholder;
use datafusion::logical_expr::{Expr, ScalarUDF, lit};
use millrace_common::types::Element;
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_functions::cast::{assignable, cast_function, parse_number};
use millrace_functions::error::external;
use millrace_functions::numeric::Num;
use millrace_functions::types::{common_type, type_name};

use super::comparison::is_char;
use super::{OperatorPlanner, Seen, is_text};

impl OperatorPlanner {
    /// An implicit cast of an argument; a numeric keeps its scale.
    pub(super) fn implicit_to(&self, e: Expr, from: &DataType, to: SqlType) -> Result<Expr> {
        match (from, to) {
            (DataType::Decimal128(_, _), SqlType::Numeric(None)) => Ok(e),
            (t, SqlType::Numeric(None)) if t.is_integer() => {
                implicit(e, from, &DataType::Decimal128(38, 0))
            }
            (t, SqlType::Text) if is_text(t) => Ok(e),
            (from, to) if *from == to.to_arrow() => Ok(e),
            (DataType::Decimal128(_, _), _) => cast_expr(e, from, to).map_err(external),
            (from, to) => self.implicit(e, from, &to.to_arrow()),
        }
    }

    /// [`implicit`], where the zone may matter.
    pub(super) fn implicit(&self, e: Expr, from: &DataType, to: &DataType) -> Result<Expr> {
        if matches!(e, Expr::Literal(_, _)) && self.zones.matters(from, to) {
            let cast = datafusion::logical_expr::Cast::new(Box::new(e), to.clone());
            return Ok(Expr::Cast(cast));
        }
        implicit(e, from, to)
    }

    /// Values of one construct, as the type that they have in common.
    pub(super) fn to_common(
        &self,
        construct: &str,
        args: Vec<Expr>,
        seen: &[Seen],
    ) -> Result<Vec<Expr>> {
        let mut common: Seen = None;
        for t in seen.iter().flatten() {
            common = Some(match common {
                None => t.clone(),
                Some(c) => match common_type(&c, t) {
                    Some(c) => c,
                    None => {
                        let (a, b) = (type_name(&Some(c)), type_name(&Some(t.clone())));
                        return Err(external(SqlError::new(
                            SqlState::DATATYPE_MISMATCH,
                            format!("{construct} types {a} and {b} cannot be matched"),
                        )));
                    }
                },
            });
        }
        let common = common.unwrap_or(DataType::Utf8);
        let Ok(target) = SqlType::from_arrow(&common) else { return Ok(args) };
        args.into_iter()
            .zip(seen)
            .map(|(e, t)| match t {
                None => self.coerce_unknown_like(e, &common).and_then(|e| match &e {
                    Expr::Literal(v, _) if v.data_type() != common => {
                        implicit(e.clone(), &v.data_type(), &common)
                    }
                    _ => Ok(e),
                }),
                Some(t) if *t == common => Ok(e),
                Some(t) => match target {
                    SqlType::Numeric(_) => implicit(e, t, &common),
                    _ => cast_expr(e, t, target).map_err(external),
                },
            })
            .collect()
    }

    /// An operand that has to be boolean.
    pub(super) fn boolean(&self, e: Expr, place: &str, schema: &DFSchema) -> Result<Expr> {
        match self.seen(&e, schema)? {
            Some(DataType::Boolean) => Ok(e),
            None => match e {
                Expr::Literal(_, _) | Expr::Placeholder(_) => {
                    self.coerce_unknown(e, SqlType::Boolean)
                }
                e => Ok(e),
            },
            Some(t) => {
                let message = format!(
                    "argument of {place} must be type boolean, not type {}",
                    type_name(&Some(t))
                );
                Err(external(SqlError::new(SqlState::DATATYPE_MISMATCH, message)))
            }
        }
    }

    /// An explicit cast.
    pub(super) fn cast(&self, e: Expr, to: SqlType, schema: &DFSchema) -> Result<Expr> {
        // What is read of a text that is written out is known at once.
        let written = matches!(&e, Expr::Literal(ScalarValue::Utf8(_), Some(m)) if m.is_empty());
        match self.seen(&e, schema)?.filter(|_| !written) {
            None if to == SqlType::Numeric(None) => self.coerce_unknown_like(e, &to.to_arrow()),
            None => self.coerce_unknown(e, to).map(as_text),
            // The column says that it is padded, which texts of other types are not.
            Some(from)
                if matches!(to, SqlType::Text | SqlType::Varchar(None)) && is_char(&e, schema)? =>
            {
                Ok(cast_function(&from, to).map_err(external)?.call(vec![e]))
            }
            Some(from) => cast_expr(e, &from, to).map_err(external),
        }
    }

    /// An assignment cast to the type of the column of a name.
    pub(super) fn assign(
        &self,
        e: Expr,
        column: &Expr,
        to: SqlType,
        schema: &DFSchema,
    ) -> Result<Expr> {
        let Some(from) = self.seen(&e, schema)? else { return self.coerce_unknown(e, to) };
        // Rows have no type of ours: whoever stores them says what is wrong.
        if SqlType::from_arrow(&from).is_err() {
            return Ok(e);
        }
        if !assignable(&from, to) {
            let name = match column {
                Expr::Literal(ScalarValue::Utf8(Some(name)), _) => name.as_str(),
                _ => "",
            };
            let from = type_name(&Some(from));
            let message =
                format!("column \"{name}\" is of type {to} but expression is of type {from}");
            return Err(external(
                SqlError::new(SqlState::DATATYPE_MISMATCH, message)
                    .with_hint("You will need to rewrite or cast the expression."),
            ));
        }
        self.cast(e, to, schema)
    }

    /// A number of rows, by an assignment cast.
    pub(super) fn rows(&self, e: Expr, clause: &Expr, schema: &DFSchema) -> Result<Expr> {
        match self.seen(&e, schema)? {
            Some(from) if !assignable(&from, SqlType::BigInt) => {
                let clause = match clause {
                    Expr::Literal(ScalarValue::Utf8(Some(name)), _) => name.as_str(),
                    _ => "",
                };
                let message = format!(
                    "argument of {clause} must be type bigint, not type {}",
                    type_name(&Some(from))
                );
                Err(external(SqlError::new(SqlState::DATATYPE_MISMATCH, message)))
            }
            _ => self.cast(e, SqlType::BigInt, schema),
        }
    }

    /// Gives something of unknown type the type that its place asks for.
    pub(super) fn coerce_unknown(&self, e: Expr, to: SqlType) -> Result<Expr> {
        match e {
            Expr::Literal(ScalarValue::Utf8(Some(text)), _) => {
                let metadata = to.metadata().map(|one| FieldMetadata::from(BTreeMap::from([one])));
                Ok(Expr::Literal(self.zones.literal(&text, to).map_err(external)?, metadata))
            }
            Expr::Literal(_, _) => Ok(Expr::Literal(ScalarValue::try_from(&to.to_arrow())?, None)),
            Expr::Placeholder(p) => {
                self.parameters.note(&p.id, Some(to.to_arrow()));
                Ok(placeholder(p.id, to.to_arrow()))
            }
            Expr::Alias(a) => self.coerce_unknown(*a.expr, to),
            e => cast_expr(e, &DataType::Utf8, to).map_err(external),
        }
    }

    pub(super) fn coerce_unknown_like(&self, e: Expr, like: &DataType) -> Result<Expr> {
        let to = SqlType::from_arrow(like).map_err(external)?;
        // A literal keeps its own scale: it is compared or computed by value.
        if let (SqlType::Numeric(_), Expr::Literal(ScalarValue::Utf8(Some(text)), _)) = (to, &e)
            && let Ok(number) = parse_number(text.trim())
            && let Some(number) = exact(number)
        {
            return Ok(Expr::Literal(number, None));
        }
        self.coerce_unknown(e, to)
    }
}

/// Whether an expression is a literal whose type PostgreSQL does not know: not what a cast has made a text.
pub fn is_unknown(e: &Expr) -> bool {
    matches!(e, Expr::Literal(ScalarValue::Null, _) | Expr::Literal(ScalarValue::Utf8(_), None))
}

/// A literal text that is one for certain: it has metadata, of which there may be none.
pub(super) fn as_text(e: Expr) -> Expr {
    match e {
        Expr::Literal(text @ ScalarValue::Utf8(_), None) => {
            Expr::Literal(text, Some(FieldMetadata::default()))
        }
        e => e,
    }
}

/// A number as a numeric with the digits that it has.
fn exact(number: ScalarValue) -> Option<ScalarValue> {
    match number {
        ScalarValue::Int32(Some(v)) => Num::new(v.into(), 0).to_scalar().ok(),
        ScalarValue::Int64(Some(v)) => Num::new(v.into(), 0).to_scalar().ok(),
        v @ ScalarValue::Decimal128(_, _, _) => Some(v),
        _ => None,
    }
}

pub(super) fn placeholder(id: String, t: DataType) -> Expr {
    let field = Arc::new(Field::new(&id, t, true));
    Expr::Placeholder(Placeholder::new_with_field(id, Some(field)))
}

/// An implicit cast between numbers or dates, which never fails where PostgreSQL's would not.
pub(super) fn implicit(e: Expr, from: &DataType, to: &DataType) -> Result<Expr> {
    if from == to {
        return Ok(e);
    }
    match e {
        Expr::Placeholder(p) => Ok(placeholder(p.id, to.clone())),
        e if matches!((from, to), (DataType::Time64(_), DataType::Interval(_))) => {
            cast_expr(e, from, SqlType::Interval).map_err(external)
        }
        Expr::Literal(v, _) => Ok(lit(v.cast_to(to)?)),
        e => Ok(Expr::Cast(datafusion::logical_expr::Cast::new(Box::new(e), to.clone()))),
    }
}

/// `e::to` by our cast functions.
pub fn cast_expr(e: Expr, from: &DataType, to: SqlType) -> Result<Expr, SqlError> {
    let arrow = to.to_arrow();
    let plain = !matches!(to, SqlType::Varchar(Some(_)) | SqlType::Char(_));
    if *from == arrow && plain {
        return Ok(e);
    }
    let function: Arc<ScalarUDF> = cast_function(from, to)?;
    Ok(match to {
        SqlType::Array(Element::Varchar(Some(n))) => function.call(vec![e, lit(n as i32)]),
        SqlType::Array(Element::Numeric(Some((p, s)))) => {
            function.call(vec![e, lit(i32::from(p)), lit(i32::from(s))])
        }
        SqlType::Varchar(Some(n)) | SqlType::Char(n) => function.call(vec![e, lit(n as i32)]),
        SqlType::Numeric(Some((p, s))) => {
            function.call(vec![e, lit(i32::from(p)), lit(i32::from(s))])
        }
        _ => function.call(vec![e]),
    })
}
