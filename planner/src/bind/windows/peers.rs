//! What the rows of a window are peers by, where DataFusion sees it otherwise than PostgreSQL or not at all.

use datafusion::arrow::datatypes::DataType;
use datafusion::common::{DFSchema, Result};
use datafusion::logical_expr::expr::WindowFunctionParams;
use datafusion::logical_expr::{
    Expr, ExprSchemable, WindowFrame, WindowFrameBound, WindowFrameUnits, lit,
};

use crate::bind::ordering::sort_keys;

/// Orders and parts by the lengths of intervals and the order of documents, where equal ones may be written otherwise.
pub fn by_value(params: &mut WindowFunctionParams, schema: &DFSchema) -> Result<()> {
    let order = params.order_by.iter_mut().map(|by| &mut by.expr);
    for e in params.partition_by.iter_mut().chain(order) {
        *e = sort_keys::key_of(e, schema)?;
    }
    Ok(())
}

/// Makes RANGE without distances GROUPS, which is the same, where the order is of a type that DataFusion has
/// no RANGE over. With distances, which are measured elsewhere, it is the frame of a function that looks at
/// places only.
pub fn by_groups(params: &mut WindowFunctionParams, schema: &DFSchema) -> Result<()> {
    let Some(first) = params.order_by.first_mut() else { return Ok(()) };
    let frame = &params.window_frame;
    if frame.units != WindowFrameUnits::Range || has_range(&first.expr.get_type(schema)?) {
        return Ok(());
    }
    if matches!(first.expr, Expr::Literal(..)) {
        // All rows are peers by any constant.
        first.expr = lit(1i64);
        return Ok(());
    }
    let near = |b: &WindowFrameBound| b.is_unbounded() || matches!(b, WindowFrameBound::CurrentRow);
    params.window_frame = match near(&frame.start_bound) && near(&frame.end_bound) {
        true => WindowFrame::new_bounds(
            WindowFrameUnits::Groups,
            frame.start_bound.clone(),
            frame.end_bound.clone(),
        ),
        false => WindowFrame::new(None),
    };
    Ok(())
}

fn has_range(order: &DataType) -> bool {
    use DataType as D;
    !matches!(
        order,
        D::Time32(_)
            | D::Time64(_)
            | D::Interval(_)
            | D::Binary
            | D::LargeBinary
            | D::BinaryView
            | D::FixedSizeBinary(_)
    )
}
