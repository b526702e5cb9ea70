//! `floor` and `ceil`: numerics lose their digits.

use std::sync::{Arc, OnceLock};

use arrow::array::*;
use arrow::datatypes::*;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};
use millrace_common::SqlError;

use super::cast::fit;
use crate::error::external;

pub fn functions() -> Vec<Arc<ScalarUDF>> {
    static ALL: OnceLock<Vec<Arc<ScalarUDF>>> = OnceLock::new();
    ALL.get_or_init(|| {
        [Kind::Floor, Kind::Ceil]
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
    Floor,
    Ceil,
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Round {
    kind: Kind,
    signature: Signature,
    aliases: Vec<String>,
}

impl Round {
    fn apply(&self, array: &ArrayRef) -> Result<ArrayRef> {
        Ok(match array.data_type() {
            DataType::Decimal128(_, scale) => {
                let scale = i32::from(*scale);
                let kind = self.kind;
                let values: Decimal128Array = array
                    .as_primitive::<Decimal128Type>()
                    .try_unary(|v| whole(v, scale, kind))
                    .map_err(external)?;
                Arc::new(values.with_precision_and_scale(38, 0)?)
            }
            _ => {
                let array = arrow::compute::cast(array, &DataType::Float64)?;
                let kind = self.kind;
                let values =
                    array.as_primitive::<Float64Type>().unary::<_, Float64Type>(|v| match kind {
                        Kind::Floor => v.floor(),
                        Kind::Ceil => v.ceil(),
                    });
                Arc::new(values)
            }
        })
    }
}

/// `v / 10^scale` without digits after the point.
fn whole(v: i128, scale: i32, kind: Kind) -> Result<i128, SqlError> {
    let kept = match 10i128.checked_pow(scale.max(0) as u32) {
        Some(unit) => match kind {
            Kind::Floor => v.div_euclid(unit),
            Kind::Ceil => -(-v).div_euclid(unit),
        },
        None => 0,
    };
    fit(kept, 0, 38, 0)
}

impl ScalarUDFImpl for Round {
    fn name(&self) -> &str {
        match self.kind {
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

    /// A numeric stays, everything else is a float.
    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        match args {
            [t @ DataType::Decimal128(_, _)] => Ok(vec![t.clone()]),
            [t] if t.is_numeric() || *t == DataType::Null => Ok(vec![DataType::Float64]),
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

    fn is_strict(&self) -> bool {
        true
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        Ok(match &args.args[0] {
            ColumnarValue::Array(a) => ColumnarValue::Array(self.apply(a)?),
            ColumnarValue::Scalar(s) => {
                let one = self.apply(&s.to_array()?)?;
                ColumnarValue::Scalar(ScalarValue::try_from_array(&one, 0)?)
            }
        })
    }
}
