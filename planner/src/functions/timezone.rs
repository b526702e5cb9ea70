//! `timezone(zone, t)`, which `t AT TIME ZONE zone` is: a timestamp with time zone as the zone's local
//! time, and back. The only zone is UTC, as for sessions; there the instant's number stays.

use std::sync::{Arc, OnceLock};

use arrow::datatypes::*;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};
use millrace_common::SqlError;

use crate::error::{external, undefined_function};

pub fn timezone_function() -> Arc<ScalarUDF> {
    static F: OnceLock<Arc<ScalarUDF>> = OnceLock::new();
    Arc::clone(F.get_or_init(|| {
        let signature = Signature::user_defined(Volatility::Immutable);
        Arc::new(ScalarUDF::from(TimeZone { signature }))
    }))
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct TimeZone {
    signature: Signature,
}

fn with_zone() -> DataType {
    DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()))
}

fn without_zone() -> DataType {
    DataType::Timestamp(TimeUnit::Microsecond, None)
}

fn is_utc(zone: &str) -> bool {
    ["utc", "etc/utc", "gmt", "z", "zulu", "uct"].contains(&zone.to_lowercase().as_str())
}

impl ScalarUDFImpl for TimeZone {
    fn name(&self) -> &str {
        "timezone"
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        match args {
            [zone, DataType::Timestamp(_, None)] if zone.is_string() => {
                Ok(vec![DataType::Utf8, without_zone()])
            }
            [zone, DataType::Timestamp(_, Some(_)) | DataType::Date32 | DataType::Utf8]
                if zone.is_string() =>
            {
                Ok(vec![DataType::Utf8, with_zone()])
            }
            _ => {
                let names: Vec<String> = args
                    .iter()
                    .map(|t| crate::bind::operators::type_name(&Some(t.clone())))
                    .collect();
                Err(external(undefined_function(&format!("timezone({})", names.join(", ")))))
            }
        }
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        Ok(match args.get(1) {
            Some(DataType::Timestamp(_, None)) => with_zone(),
            _ => without_zone(),
        })
    }

    fn is_strict(&self) -> bool {
        true
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        match &args.args[0] {
            ColumnarValue::Scalar(ScalarValue::Utf8(Some(zone))) if is_utc(zone) => {}
            ColumnarValue::Scalar(v) if v.is_null() => {
                return Ok(ColumnarValue::Scalar(ScalarValue::try_from(args.return_type())?));
            }
            ColumnarValue::Scalar(v) => {
                let message = format!("the time zone {v}");
                return Err(external(SqlError::unsupported(message).with_hint("Use UTC.")));
            }
            ColumnarValue::Array(_) => {
                return Err(external(SqlError::unsupported("a time zone that is not a constant")));
            }
        }
        // The same microseconds under the other type.
        args.args[1].cast_to(args.return_type(), None)
    }
}
