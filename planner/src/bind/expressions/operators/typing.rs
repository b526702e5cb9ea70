//! Types of expressions. What `get_type` says of a call costs the name of every part of it, at every level: of a long
//! chain of operators, each of which asks for its operands' types, that was most of the time of planning.

use std::sync::Arc;

use datafusion::arrow::datatypes::{DataType, Field};
use datafusion::common::{DFSchema, Result, ScalarValue};
use datafusion::logical_expr::expr::ScalarFunction;
use datafusion::logical_expr::type_coercion::functions::fields_with_udf;
use datafusion::logical_expr::{Expr, ExprSchemable, Operator, ReturnFieldArgs};

/// The type of an expression.
pub(super) fn type_of(e: &Expr, schema: &DFSchema) -> Result<DataType> {
    match e {
        Expr::BinaryExpr(b) if is_boolean(b.op) => Ok(DataType::Boolean),
        // What fails says why by `get_type`.
        Expr::ScalarFunction(f) => call_type(f, schema).map_or_else(|| e.get_type(schema), Ok),
        e => e.get_type(schema),
    }
}

fn call_type(f: &ScalarFunction, schema: &DFSchema) -> Option<DataType> {
    let mut fields = Vec::with_capacity(f.args.len());
    for arg in &f.args {
        fields.push(match arg {
            Expr::ScalarFunction(_) | Expr::BinaryExpr(_) => {
                Arc::new(Field::new("", type_of(arg, schema).ok()?, true))
            }
            arg => arg.to_field(schema).ok()?.1,
        });
    }
    let fields = fields_with_udf(&fields, f.func.as_ref()).ok()?;
    let scalars: Vec<Option<&ScalarValue>> = f.args.iter().map(constant).collect();
    let args = ReturnFieldArgs { arg_fields: &fields, scalar_arguments: &scalars };
    Some(f.func.return_field_from_args(args).ok()?.data_type().clone())
}

fn constant(arg: &Expr) -> Option<&ScalarValue> {
    match arg {
        Expr::Literal(value, _) => Some(value),
        _ => None,
    }
}

fn is_boolean(op: Operator) -> bool {
    use Operator as O;
    matches!(
        op,
        O::And
            | O::Or
            | O::Eq
            | O::NotEq
            | O::Lt
            | O::LtEq
            | O::Gt
            | O::GtEq
            | O::IsDistinctFrom
            | O::IsNotDistinctFrom
    )
}
