//! Rows too wide for a join or an unnest.
//!
//! They copy each row once for every partner or element, thousands to a batch. How wide a row is shows only when it is
//! there: their inputs are measured, and where a batch of copies of the widest row would not fit, the query
//! begins again with batches of fewer rows ([`super::batch_size`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use arrow::array::{Array, ArrayRef, AsArray, OffsetSizeTrait};
use arrow::datatypes::{ArrowNativeType, DataType};
use datafusion::common::JoinType;
use datafusion::common::tree_node::Transformed;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::joins::{
    CrossJoinExec, HashJoinExec, NestedLoopJoinExec, SortMergeJoinExec,
};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::unnest::UnnestExec;
use futures::StreamExt;
use millrace_functions::size_limits;
use millrace_functions::tree::Walk;

use super::one_input::{OneInput, Operation, StreamResult};
use super::over;

/// How a run of a plan goes on: it answers, or turns out to be too wide and begins again. Its tasks run beside each
/// other: whichever is first decides.
#[derive(Debug, Default)]
pub struct Outcome(AtomicU8);

const ANSWERS: u8 = 1;
const TOO_WIDE: u8 = 2;

impl Outcome {
    /// Before the first rows go to the client: whether they may.
    pub fn answer(&self) -> bool {
        self.decide(ANSWERS)
    }

    /// Before a row that is too wide fails the run: whether it may.
    fn begin_again(&self) -> bool {
        self.decide(TOO_WIDE)
    }

    fn decide(&self, how: u8) -> bool {
        match self.0.compare_exchange(0, how, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => true,
            Err(decided) => decided == how,
        }
    }
}

/// The error of a run that is too wide.
pub fn too_wide() -> DataFusionError {
    match size_limits::check_bytes(i64::MAX) {
        Err(e) => DataFusionError::External(Box::new(e)),
        Ok(()) => DataFusionError::Internal("nothing is too large".to_owned()),
    }
}

/// A plan that measures the rows of which joins and unnests make several.
pub fn measured(plan: Arc<dyn ExecutionPlan>) -> Result<Transformed<Arc<dyn ExecutionPlan>>> {
    plan.rewrite_up(|node| {
        let is_measured = |input: &&Arc<dyn ExecutionPlan>| input.is::<Measured>();
        if !copies_rows(&node) || node.children().iter().all(is_measured) {
            return Ok(Transformed::no(node));
        }
        let measure = |input: &Arc<dyn ExecutionPlan>| -> Arc<dyn ExecutionPlan> {
            Arc::new(OneInput::new(Measure, Arc::clone(input)))
        };
        let inputs = node.children().into_iter().map(measure).collect();
        Ok(Transformed::yes(over(node, inputs)?))
    })
}

fn copies_rows(node: &Arc<dyn ExecutionPlan>) -> bool {
    if let Some(join) = node.downcast_ref::<HashJoinExec>() {
        return gives_pairs(*join.join_type());
    }
    if let Some(join) = node.downcast_ref::<SortMergeJoinExec>() {
        return gives_pairs(join.join_type());
    }
    node.is::<NestedLoopJoinExec>() || node.is::<CrossJoinExec>() || node.is::<UnnestExec>()
}

/// Other joins give each row once at most.
fn gives_pairs(join: JoinType) -> bool {
    matches!(join, JoinType::Inner | JoinType::Left | JoinType::Right | JoinType::Full)
}

/// Fails as a call does whose results are too large, when copies of its widest row would not fit a batch.
#[derive(Clone, Debug)]
pub struct Measure;

pub type Measured = OneInput<Measure>;

impl Operation for Measure {
    const NAME: &'static str = "Measured";
    const KEEPS_ORDER: bool = true;

    fn execute(node: &OneInput<Self>, partition: usize, context: Arc<TaskContext>) -> StreamResult {
        let rows = context.session_config().batch_size();
        let outcome = context.session_config().get_extension::<Outcome>();
        let batches = node.input.execute(partition, context)?;
        let measured = batches.map(move |batch| {
            let batch = batch?;
            // One row cannot be divided.
            if let Some(outcome) = outcome.as_ref().filter(|_| rows > 1)
                && widest(batch.columns()).saturating_mul(rows) > size_limits::most_bytes()
                && outcome.begin_again()
            {
                return Err(too_wide());
            }
            Ok(batch)
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(node.input.schema(), measured)))
    }
}

/// Bytes that the widest row takes, at most.
fn widest(columns: &[ArrayRef]) -> usize {
    columns.iter().map(|c| widest_value(c.as_ref())).fold(0, usize::saturating_add)
}

fn widest_value(array: &dyn Array) -> usize {
    match array.data_type() {
        DataType::Utf8 => longest(array.as_string::<i32>().value_offsets()),
        DataType::LargeUtf8 => longest(array.as_string::<i64>().value_offsets()),
        DataType::Binary => longest(array.as_binary::<i32>().value_offsets()),
        DataType::LargeBinary => longest(array.as_binary::<i64>().value_offsets()),
        DataType::List(_) => {
            let lists = array.as_list::<i32>();
            let offsets = lists.value_offsets();
            let (Some(first), Some(last)) = (offsets.first(), offsets.last()) else { return 0 };
            let elements = lists.values().slice(first.as_usize(), (last - first).as_usize());
            let most = elements.to_data().get_slice_memory_size().unwrap_or(usize::MAX);
            longest(offsets).saturating_mul(widest_value(elements.as_ref())).min(most)
        }
        DataType::Struct(_) => widest(array.as_struct().columns()),
        DataType::Dictionary(..) => widest_value(array.as_any_dictionary().values().as_ref()),
        other => other.primitive_width().unwrap_or(size_of::<u128>()),
    }
}

/// The longest of the ranges between offsets.
fn longest<O: OffsetSizeTrait>(offsets: &[O]) -> usize {
    offsets.windows(2).map(|of| (of[1] - of[0]).as_usize()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int32Array, ListArray, StringArray, StructArray};
    use arrow::datatypes::{Field, Int32Type};

    use super::*;

    #[test]
    fn a_run_answers_or_begins_again() {
        let outcome = Outcome::default();
        assert!(outcome.answer() && outcome.answer());
        assert!(!outcome.begin_again());
        let outcome = Outcome::default();
        assert!(outcome.begin_again() && outcome.begin_again());
        assert!(!outcome.answer());
    }

    #[test]
    fn the_widest_row_is_that_of_the_slice() {
        let texts = StringArray::from(vec![Some("a"), None, Some("four"), Some("seventh")]);
        assert_eq!(widest_value(&texts), 7);
        assert_eq!(widest_value(&texts.slice(0, 3)), 4);
        assert_eq!(widest_value(&texts.slice(1, 1)), 0);
        assert_eq!(widest_value(&texts.slice(0, 0)), 0);
    }

    #[test]
    fn a_row_is_as_wide_as_its_columns_fields_and_elements() {
        let numbers: ArrayRef = Arc::new(Int32Array::from(vec![1, 2, 3]));
        let texts: ArrayRef = Arc::new(StringArray::from(vec!["a", "bb", "ccc"]));
        assert_eq!(widest(&[Arc::clone(&numbers), Arc::clone(&texts)]), 7);
        let fields = vec![
            (Arc::new(Field::new("n", DataType::Int32, true)), numbers),
            (Arc::new(Field::new("t", DataType::Utf8, true)), texts),
        ];
        assert_eq!(widest_value(&StructArray::from(fields)), 7);
        let lists = [Some(vec![Some(1); 5]), None, Some(vec![Some(1); 2])];
        let lists = ListArray::from_iter_primitive::<Int32Type, _, _>(lists);
        assert_eq!(widest_value(&lists), 20);
        assert_eq!(widest_value(&lists.slice(1, 2)), 8);
    }
}
