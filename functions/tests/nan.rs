//! No scalar function returns another NaN than the one that all values share: comparisons are by bits in many places.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Float32Array, Float64Array};
use arrow::datatypes::{DataType, Field, FieldRef, Float32Type, Float64Type};
use datafusion::common::config::ConfigOptions;
use datafusion::logical_expr::type_coercion::functions::fields_with_udf;
use datafusion::logical_expr::{ColumnarValue, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF};
use millrace_functions::functions;

const VALUES: [f64; 7] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 0.0, 0.5, 2.0];

fn array(t: &DataType, v: f64) -> ArrayRef {
    match t {
        DataType::Float32 => Arc::new(Float32Array::from(vec![v as f32])),
        _ => Arc::new(Float64Array::from(vec![v])),
    }
}

/// Whether every NaN of an array is the one.
fn settled(array: &dyn Array) -> bool {
    match array.data_type() {
        DataType::Float64 => {
            let mut all = array.as_primitive::<Float64Type>().iter().flatten();
            all.all(|v| !v.is_nan() || v.to_bits() == f64::NAN.to_bits())
        }
        DataType::Float32 => {
            let mut all = array.as_primitive::<Float32Type>().iter().flatten();
            all.all(|v| !v.is_nan() || v.to_bits() == f32::NAN.to_bits())
        }
        DataType::List(_) => settled(array.as_list::<i32>().values().as_ref()),
        _ => true,
    }
}

fn result(udf: &ScalarUDF, args: Vec<ArrayRef>) -> Option<ArrayRef> {
    let field =
        |a: &ArrayRef| -> FieldRef { Arc::new(Field::new("a", a.data_type().clone(), true)) };
    let fields: Vec<FieldRef> = args.iter().map(field).collect();
    let taken = fields_with_udf(&fields, udf).ok()?;
    let casts = args.iter().zip(&taken).map(|(a, f)| arrow::compute::cast(a, f.data_type()).ok());
    let args = casts.collect::<Option<Vec<_>>>()?;
    let nothing = vec![None; args.len()];
    let of_call = ReturnFieldArgs { arg_fields: &taken, scalar_arguments: &nothing };
    let return_field = udf.return_field_from_args(of_call).ok()?;
    let call = ScalarFunctionArgs {
        args: args.into_iter().map(ColumnarValue::Array).collect(),
        arg_fields: taken,
        number_rows: 1,
        return_field,
        config_options: Arc::new(ConfigOptions::default()),
    };
    udf.invoke_with_args(call).ok()?.into_array(1).ok()
}

#[test]
fn every_function_returns_the_one_nan() {
    std::panic::set_hook(Box::new(|_| {}));
    let all = functions();
    let mut wrong = Vec::new();
    let mut nans = 0;
    for name in all.scalar_names() {
        let Some(udf) = all.scalar(&name) else { continue };
        for t in [DataType::Float64, DataType::Float32] {
            for (i, a) in VALUES.iter().enumerate() {
                let twos = VALUES.iter().map(|b| vec![array(&t, *a), array(&t, *b)]);
                for args in std::iter::once(vec![array(&t, *a)]).chain(twos) {
                    let what =
                        format!("{name} of {} values of {t}, the first {a} ({i})", args.len());
                    let found =
                        catch_unwind(AssertUnwindSafe(|| result(&udf, args))).ok().flatten();
                    let Some(found) = found else { continue };
                    nans += usize::from(found.data_type().is_floating());
                    if !settled(found.as_ref()) {
                        wrong.push(what);
                    }
                }
            }
        }
    }
    let _ = std::panic::take_hook();
    assert!(nans > 500, "only {nans} results");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
