//! Aggregates over frames whose start moves. Where DataFusion's cannot take rows back (`string_agg`, `bool_and` …)
//! the rows of the frame are kept, and each result is computed from them anew.

use std::collections::VecDeque;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, UInt64Array};
use arrow::compute::{concat, take};
use arrow::datatypes::{DataType, FieldRef, Schema};
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::function::{
    AccumulatorArgs, AggregateFunctionSimplification, StateFieldsArgs,
};
use datafusion::logical_expr::utils::AggregateOrderSensitivity;
use datafusion::logical_expr::{
    Accumulator, AggregateUDF, AggregateUDFImpl, GroupsAccumulator, ReversedUDAF, SetMonotonicity,
    Signature, StatisticsArgs,
};
use datafusion::physical_expr::PhysicalSortExpr;
use millrace_common::SqlError;

use super::distinct_list;
use super::interruptible_aggregates::interruptible;
use crate::error::external;
use crate::expr::ExprRef;

/// Rows come one by one: up to so many are kept as one array, which also lets go of the batches they came in.
const CHUNK: usize = 256;

/// The function, over any frame.
pub fn with_sliding_frames(inner: Arc<AggregateUDF>) -> Arc<AggregateUDF> {
    Arc::new(AggregateUDF::from(Sliding { inner }))
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Sliding {
    inner: Arc<AggregateUDF>,
}

impl Sliding {
    /// DataFusion may compute a window from its end, where the order is at hand that way round, and takes this
    /// one for a function that does not mind. With an ORDER BY of its own it does not.
    fn backwards(&self, args: &AccumulatorArgs) -> bool {
        self.name() == "array_agg" && args.is_reversed && args.order_bys.is_empty()
    }

    /// For frames that only grow.
    fn plain(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        if self.backwards(&args) {
            return Ok(Box::new(Kept::new(&self.inner, &args, true)));
        }
        if let Some(sorted) = distinct_list::accumulator(&self.inner, &args)? {
            return Ok(sorted);
        }
        // The planner may ask for the opposite order, to have one for several aggregates, and for the rows from the
        // end. Distinct values are sorted when they are shown, and know nothing of the end.
        if args.is_distinct && args.is_reversed && !args.order_bys.is_empty() {
            let order: Vec<PhysicalSortExpr> =
                args.order_bys.iter().map(|by| by.reverse()).collect();
            let asked = AccumulatorArgs { order_bys: &order, is_reversed: false, ..args };
            return self.inner.accumulator(asked);
        }
        self.inner.accumulator(args)
    }
}

impl AggregateUDFImpl for Sliding {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn aliases(&self) -> &[String] {
        self.inner.aliases()
    }

    fn signature(&self) -> &Signature {
        self.inner.signature()
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        self.inner.return_type(args)
    }

    fn return_field(&self, args: &[FieldRef]) -> Result<FieldRef> {
        self.inner.return_field(args)
    }

    fn is_nullable(&self) -> bool {
        self.inner.is_nullable()
    }

    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        self.inner.coerce_types(args)
    }

    fn accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        self.plain(args).map(interruptible)
    }

    fn create_sliding_accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        if self.backwards(&args) {
            return Ok(interruptible(Box::new(Kept::new(&self.inner, &args, true))));
        }
        let theirs = self.inner.create_sliding_accumulator(args.clone())?;
        Ok(interruptible(match theirs.supports_retract_batch() {
            true => theirs,
            false => Box::new(Kept::new(&self.inner, &args, false)),
        }))
    }

    fn state_fields(&self, args: StateFieldsArgs) -> Result<Vec<FieldRef>> {
        self.inner.state_fields(args)
    }

    fn groups_accumulator_supported(&self, args: AccumulatorArgs) -> bool {
        self.inner.groups_accumulator_supported(args)
    }

    fn create_groups_accumulator(
        &self,
        args: AccumulatorArgs,
    ) -> Result<Box<dyn GroupsAccumulator>> {
        self.inner.create_groups_accumulator(args)
    }

    fn with_beneficial_ordering(
        self: Arc<Self>,
        beneficial: bool,
    ) -> Result<Option<Arc<dyn AggregateUDFImpl>>> {
        let changed = AggregateUDF::clone(&self.inner).with_beneficial_ordering(beneficial)?;
        Ok(changed.map(|f| Arc::new(Sliding { inner: Arc::new(f) }) as Arc<dyn AggregateUDFImpl>))
    }

    fn order_sensitivity(&self) -> AggregateOrderSensitivity {
        self.inner.order_sensitivity()
    }

    fn simplify(&self) -> Option<AggregateFunctionSimplification> {
        self.inner.simplify()
    }

    fn reverse_expr(&self) -> ReversedUDAF {
        match self.inner.reverse_udf() {
            ReversedUDAF::Reversed(f) => ReversedUDAF::Reversed(with_sliding_frames(f)),
            other => other,
        }
    }

    fn is_descending(&self) -> Option<bool> {
        self.inner.is_descending()
    }

    fn value_from_stats(&self, args: &StatisticsArgs) -> Option<ScalarValue> {
        self.inner.value_from_stats(args)
    }

    fn default_value(&self, data_type: &DataType) -> Result<ScalarValue> {
        self.inner.default_value(data_type)
    }

    fn supports_null_handling_clause(&self) -> bool {
        self.inner.supports_null_handling_clause()
    }

    fn supports_within_group_clause(&self) -> bool {
        self.inner.supports_within_group_clause()
    }

    fn set_monotonicity(&self, data_type: &DataType) -> SetMonotonicity {
        self.inner.inner().set_monotonicity(data_type)
    }
}

/// The rows of a frame, and the call as it was made, for an accumulator per result.
#[derive(Debug)]
struct Kept {
    inner: Arc<AggregateUDF>,
    return_field: FieldRef,
    schema: Schema,
    ignore_nulls: bool,
    order_bys: Vec<PhysicalSortExpr>,
    is_reversed: bool,
    name: String,
    is_distinct: bool,
    exprs: Vec<ExprRef>,
    expr_fields: Vec<FieldRef>,
    /// The rows come last row first.
    backwards: bool,
    /// Arguments, of the rows that came first in front. No entry is without rows.
    rows: VecDeque<Vec<ArrayRef>>,
}

fn count(columns: &[ArrayRef]) -> usize {
    columns.first().map_or(0, |c| c.len())
}

fn reversed(columns: &[ArrayRef]) -> Result<Vec<ArrayRef>> {
    let order = UInt64Array::from_iter_values((0..count(columns) as u64).rev());
    columns.iter().map(|c| Ok(take(c, &order, None)?)).collect()
}

impl Kept {
    fn new(inner: &Arc<AggregateUDF>, args: &AccumulatorArgs, backwards: bool) -> Kept {
        Kept {
            inner: Arc::clone(inner),
            return_field: Arc::clone(&args.return_field),
            schema: args.schema.clone(),
            ignore_nulls: args.ignore_nulls,
            order_bys: args.order_bys.to_vec(),
            is_reversed: args.is_reversed && !backwards,
            name: args.name.to_owned(),
            is_distinct: args.is_distinct,
            exprs: args.exprs.to_vec(),
            expr_fields: args.expr_fields.to_vec(),
            backwards,
            rows: VecDeque::new(),
        }
    }

    /// An accumulator of the rows that are kept.
    fn filled(&self) -> Result<Box<dyn Accumulator>> {
        let mut fresh = self.inner.accumulator(AccumulatorArgs {
            return_field: Arc::clone(&self.return_field),
            schema: &self.schema,
            ignore_nulls: self.ignore_nulls,
            order_bys: &self.order_bys,
            is_reversed: self.is_reversed,
            name: &self.name,
            is_distinct: self.is_distinct,
            exprs: &self.exprs,
            expr_fields: &self.expr_fields,
        })?;
        if self.backwards {
            for columns in self.rows.iter().rev() {
                fresh.update_batch(&reversed(columns)?)?;
            }
        } else {
            for columns in &self.rows {
                fresh.update_batch(columns)?;
            }
        }
        Ok(fresh)
    }
}

impl Accumulator for Kept {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        let new = count(values);
        if new == 0 {
            return Ok(());
        }
        if let Some(newest) = self.rows.back_mut()
            && count(newest) + new <= CHUNK
        {
            for (kept, more) in newest.iter_mut().zip(values) {
                *kept = concat(&[&**kept, &**more])?;
            }
        } else {
            self.rows.push_back(values.to_vec());
        }
        Ok(())
    }

    /// Frames let go of their rows in the order in which they came.
    fn retract_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        let mut left = count(values);
        while left > 0 {
            let Some(mut oldest) = self.rows.pop_front() else { break };
            let rows = count(&oldest);
            if rows > left {
                oldest.iter_mut().for_each(|c| *c = c.slice(left, rows - left));
                self.rows.push_front(oldest);
            }
            left = left.saturating_sub(rows);
        }
        Ok(())
    }

    fn supports_retract_batch(&self) -> bool {
        true
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        self.filled()?.evaluate()
    }

    fn size(&self) -> usize {
        let columns = self.rows.iter().flatten();
        size_of::<Kept>()
            + self.rows.capacity() * size_of::<Vec<ArrayRef>>()
            + columns.map(|c| size_of::<ArrayRef>() + c.get_array_memory_size()).sum::<usize>()
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        self.filled()?.state()
    }

    /// Windows are never computed in parts.
    fn merge_batch(&mut self, _: &[ArrayRef]) -> Result<()> {
        Err(external(SqlError::internal("merged states of a moving frame")))
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{AsArray, BooleanArray, Int32Array, RecordBatch, StringArray, UInt32Array};
    use arrow::compute::SortOptions;
    use arrow::datatypes::Field;
    use datafusion::logical_expr::{WindowFrame, WindowFrameBound, WindowFrameUnits};
    use datafusion::physical_expr::expressions::{Column, Literal};
    use datafusion::physical_expr::window::WindowExpr;

    use super::*;
    use crate::window_call::WindowCall;
    use crate::window_call::compile;

    fn rows() -> RecordBatch {
        let columns: [(&str, ArrayRef); 3] = [
            ("id", Arc::new(Int32Array::from(vec![1, 2, 10, 11]))),
            ("h", Arc::new(StringArray::from(vec![Some("a"), None, Some("c"), Some("d")]))),
            ("b", Arc::new(BooleanArray::from(vec![Some(true), Some(false), None, Some(true)]))),
        ];
        RecordBatch::try_from_iter_with_nullable(columns.map(|(n, c)| (n, c, true))).unwrap()
    }

    fn window(function: &str, batch: &RecordBatch, frame: WindowFrame) -> Arc<dyn WindowExpr> {
        let column =
            |i: usize| -> ExprRef { Arc::new(Column::new(batch.schema().field(i).name(), i)) };
        let comma: ExprRef = Arc::new(Literal::new(ScalarValue::from(",")));
        let (args, output_type) = match function {
            "string_agg" => (vec![column(1), comma], DataType::Utf8),
            "array_agg" => {
                let item = Arc::new(Field::new_list_field(DataType::Utf8, true));
                (vec![column(1)], DataType::List(item))
            }
            _ => (vec![column(2)], DataType::Boolean),
        };
        let call = WindowCall {
            function: function.into(),
            aggregate: true,
            args,
            filter: None,
            distinct: false,
            ignore_nulls: false,
            frame,
            numbering: None,
            output_type,
        };
        compile(&call, &[(0, SortOptions::default())], &batch.schema()).unwrap()
    }

    fn preceding(rows: u64) -> WindowFrame {
        let start = WindowFrameBound::Preceding(ScalarValue::UInt64(Some(rows)));
        WindowFrame::new_bounds(WindowFrameUnits::Rows, start, WindowFrameBound::CurrentRow)
    }

    fn texts(values: &ArrayRef) -> Vec<Option<&str>> {
        values.as_string::<i32>().iter().collect()
    }

    #[test]
    fn results_over_two_rows() {
        let batch = rows();
        let run = |f: &str| window(f, &batch, preceding(1)).evaluate(&batch).unwrap();
        let expected = [Some("a"), Some("a"), Some("c"), Some("c,d")];
        assert_eq!(texts(&run("string_agg")), expected);
        let (and, or) = (run("bool_and"), run("bool_or"));
        let truths = |v: &ArrayRef| v.as_boolean().iter().collect::<Vec<_>>();
        assert_eq!(truths(&and), [Some(true), Some(false), Some(false), Some(true)]);
        assert_eq!(truths(&or), [Some(true), Some(true), Some(false), Some(true)]);
        assert_eq!(truths(&run("every")), truths(&and));
    }

    #[test]
    fn frames_that_become_empty() {
        let batch = rows();
        let bound = |n: i32| WindowFrameBound::Preceding(ScalarValue::Int32(Some(n)));
        let frame = WindowFrame::new_bounds(WindowFrameUnits::Range, bound(3), bound(1));
        let values = window("string_agg", &batch, frame).evaluate(&batch).unwrap();
        assert_eq!(texts(&values), [None, Some("a"), None, Some("c")]);
        let after = |n: u64| WindowFrameBound::Following(ScalarValue::UInt64(Some(n)));
        let frame = WindowFrame::new_bounds(WindowFrameUnits::Rows, after(2), after(3));
        let values = window("string_agg", &batch, frame).evaluate(&batch).unwrap();
        assert_eq!(texts(&values), [Some("c,d"), Some("d"), None, None]);
    }

    #[test]
    fn windows_computed_from_their_end_list_rows_in_order() {
        let batch = rows();
        let turned =
            arrow::compute::take_record_batch(&batch, &UInt32Array::from(vec![3, 2, 1, 0]));
        let window = window("array_agg", &batch, preceding(1)).get_reverse_expr().unwrap();
        let values = window.evaluate(&turned.unwrap()).unwrap();
        let lists = values.as_list::<i32>().iter().flatten();
        let lists: Vec<String> = lists
            .map(|l| texts(&l).into_iter().map(|t| t.unwrap_or("-")).collect::<String>())
            .collect();
        assert_eq!(lists, ["cd", "-c", "a-", "a"]);
        let joined = self::window("string_agg", &batch, preceding(1));
        assert!(joined.get_reverse_expr().is_none());
    }

    #[test]
    fn rows_are_let_go_of_across_chunks() {
        let n = 3 * CHUNK;
        let columns: [(&str, ArrayRef); 2] = [
            ("id", Arc::new(Int32Array::from_iter_values(0..n as i32))),
            ("h", Arc::new(StringArray::from(vec!["x"; n]))),
        ];
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let kept = CHUNK + 10;
        let window = window("string_agg", &batch, preceding(kept as u64 - 1));
        let values = window.evaluate(&batch).unwrap();
        for (i, text) in texts(&values).into_iter().enumerate() {
            assert_eq!(text.unwrap().matches('x').count(), kept.min(i + 1), "row {i}");
        }
    }

    #[test]
    fn nothing_is_kept_of_rows_that_left() {
        let (schema, field) = (Schema::empty(), Arc::new(Field::new("b", DataType::Boolean, true)));
        let args = AccumulatorArgs {
            return_field: Arc::clone(&field),
            schema: &schema,
            ignore_nulls: false,
            order_bys: &[],
            is_reversed: false,
            name: "bool_and",
            is_distinct: false,
            exprs: &[],
            expr_fields: &[field],
        };
        let function = super::super::functions().aggregate("bool_and").unwrap();
        let mut frame = function.create_sliding_accumulator(args).unwrap();
        let empty = frame.size();
        let values: ArrayRef = Arc::new(BooleanArray::from(vec![Some(false), None, Some(true)]));
        frame.update_batch(&[Arc::clone(&values)]).unwrap();
        assert_eq!(frame.evaluate().unwrap(), ScalarValue::Boolean(Some(false)));
        frame.retract_batch(&[values.slice(0, 1)]).unwrap();
        assert_eq!(frame.evaluate().unwrap(), ScalarValue::Boolean(Some(true)));
        let full = frame.size();
        frame.retract_batch(&[values.slice(1, 2)]).unwrap();
        assert_eq!(frame.evaluate().unwrap(), ScalarValue::Boolean(None));
        assert!(empty < full && frame.size() < full);
        frame.update_batch(&[values.slice(2, 1)]).unwrap();
        assert_eq!(frame.evaluate().unwrap(), ScalarValue::Boolean(Some(true)));
    }
}
