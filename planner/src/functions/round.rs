//! `round`, `floor` and `ceil`: numerics lose their digits, floats round ties to even.

use std::sync::{Arc, OnceLock};

use arrow::array::*;
use arrow::datatypes::*;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::{
    ColumnarValue, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
    Volatility,
};
use millrace_common::SqlError;

use super::cast::{div_round, fit};
use crate::error::external;

pub fn functions() -> Vec<Arc<ScalarUDF>> {
    static ALL: OnceLock<Vec<Arc<ScalarUDF>>> = OnceLock::new();
    ALL.get_or_init(|| {
        [Kind::Round, Kind::Floor, Kind::Ceil]
            .map(|kind| {
                let signature = Signature::user_defined(Volatility::Immutable);
                let aliases = match kind {
                    Kind::Ceil => vec!["ceiling".to_owned()],
                    _ => Vec::new(),
                };
                Arc::new(ScalarUDF::from(Round { kind, signature, aliases }))
            })
            .into()
    })
    .clone()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Round,
    Floor,
    Ceil,
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Round {
    kind: Kind,
    signature: Signature,
    aliases: Vec<String>,
}

/// Digits to keep, from a constant second argument.
fn digits(v: Option<&ScalarValue>) -> Option<i32> {
    match v {
        Some(ScalarValue::Int32(Some(n))) => Some(*n),
        Some(ScalarValue::Int64(Some(n))) => i32::try_from(*n).ok(),
        _ => None,
    }
}

impl Round {
    fn apply(&self, array: &ArrayRef, keep: i32) -> Result<ArrayRef> {
        Ok(match array.data_type() {
            DataType::Decimal128(_, scale) => {
                let scale = i32::from(*scale);
                let out = keep.clamp(0, 38) as i8;
                let kind = self.kind;
                let values: Decimal128Array = array
                    .as_primitive::<Decimal128Type>()
                    .try_unary(|v| to_digits(v, scale, keep, out, kind))
                    .map_err(external)?;
                Arc::new(values.with_precision_and_scale(38, out)?)
            }
            _ => {
                let array = arrow::compute::cast(array, &DataType::Float64)?;
                let kind = self.kind;
                let values =
                    array.as_primitive::<Float64Type>().unary::<_, Float64Type>(|v| match kind {
                        Kind::Round => v.round_ties_even(),
                        Kind::Floor => v.floor(),
                        Kind::Ceil => v.ceil(),
                    });
                Arc::new(values)
            }
        })
    }
}

/// `v / 10^scale` rounded to `keep` digits after the point (before it, if negative), at scale `out`.
fn to_digits(v: i128, scale: i32, keep: i32, out: i8, kind: Kind) -> Result<i128, SqlError> {
    let drop = scale - keep;
    let (value, scale) = match drop {
        39.. => return Ok(0),
        1..=38 => {
            let unit = 10i128.pow(drop as u32);
            let kept = match kind {
                Kind::Round => div_round(v, unit),
                Kind::Floor => v.div_euclid(unit),
                Kind::Ceil => -(-v).div_euclid(unit),
            };
            (kept, keep)
        }
        _ => (v, scale),
    };
    fit(value, scale, 38, out)
}

impl ScalarUDFImpl for Round {
    fn name(&self) -> &str {
        match self.kind {
            Kind::Round => "round",
            Kind::Floor => "floor",
            Kind::Ceil => "ceil",
        }
    }

    fn aliases(&self) -> &[String] {
        &self.aliases
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    /// Two arguments: a numeric. One: a numeric stays, everything else is a float.
    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        match (self.kind, args) {
            (_, [t @ DataType::Decimal128(_, _)]) => Ok(vec![t.clone()]),
            (_, [t]) if t.is_numeric() || *t == DataType::Null => Ok(vec![DataType::Float64]),
            (Kind::Round, [t @ DataType::Decimal128(_, _), n]) if n.is_integer() => {
                Ok(vec![t.clone(), n.clone()])
            }
            (Kind::Round, [t, n]) if t.is_integer() && n.is_integer() => {
                Ok(vec![DataType::Decimal128(38, 0), n.clone()])
            }
            _ => {
                let names: Vec<String> = args
                    .iter()
                    .map(|t| crate::bind::operators::type_name(&Some(t.clone())))
                    .collect();
                Err(external(SqlError::new(
                    millrace_common::SqlState::UNDEFINED_FUNCTION,
                    format!("function {}({}) does not exist", self.name(), names.join(", ")),
                )))
            }
        }
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        Ok(match args.first() {
            Some(DataType::Decimal128(_, _)) => DataType::Decimal128(38, 0),
            _ => DataType::Float64,
        })
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> Result<FieldRef> {
        let t = match args.arg_fields.first().map(|f| f.data_type()) {
            Some(DataType::Decimal128(_, _)) => {
                let keep = digits(args.scalar_arguments.get(1).copied().flatten()).unwrap_or(0);
                DataType::Decimal128(38, keep.clamp(0, 38) as i8)
            }
            _ => DataType::Float64,
        };
        Ok(Arc::new(Field::new(self.name(), t, true)))
    }

    fn is_strict(&self) -> bool {
        true
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let keep = match args.args.get(1) {
            None => 0,
            Some(ColumnarValue::Scalar(s)) => digits(Some(s)).unwrap_or(0),
            Some(ColumnarValue::Array(_)) => {
                let what = "round() to a number of digits that is not a constant";
                return Err(external(SqlError::unsupported(what)));
            }
        };
        Ok(match &args.args[0] {
            ColumnarValue::Array(a) => ColumnarValue::Array(self.apply(a, keep)?),
            ColumnarValue::Scalar(s) => {
                let one = self.apply(&s.to_array()?, keep)?;
                ColumnarValue::Scalar(ScalarValue::try_from_array(&one, 0)?)
            }
        })
    }
}
