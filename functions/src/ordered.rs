//! PostgreSQL's aggregates over the rows of a group in order, in batch: ordered sets (`percentile_cont`,
//! `percentile_disc`, `mode`) and `jsonb_object_agg`. Rows are kept as views keep them
//! ([`super::ordered_entries`]), so that both come to the same result.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BinaryArray, StringArray};
use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, Field, FieldRef};
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::function::{AccumulatorArgs, StateFieldsArgs};
use datafusion::logical_expr::utils::AggregateOrderSensitivity;
use datafusion::logical_expr::{
    Accumulator, AggregateUDF, AggregateUDFImpl, Signature, Volatility,
};
use millrace_common::{SqlError, SqlType};

use super::aggregates::{list_state, lists_of, malformed_state, undefined_aggregate};
use super::cast::{convert, to_text};
use super::ordered_entries::{Nulls, build, entries, order_keys};
use crate::aggregate_kind::AggFunc;
use crate::error::external;

const FUNCTIONS: [(AggFunc, &str); 4] = [
    (AggFunc::PercentileCont, "percentile_cont"),
    (AggFunc::PercentileDisc, "percentile_disc"),
    (AggFunc::Mode, "mode"),
    (AggFunc::JsonbObjectAgg, "jsonb_object_agg"),
];

pub fn functions() -> Vec<Arc<AggregateUDF>> {
    let one = |(func, name): &(AggFunc, &'static str)| {
        let signature = Signature::user_defined(Volatility::Immutable);
        Arc::new(AggregateUDF::from(Ordered { func: *func, name, signature }))
    };
    FUNCTIONS.iter().map(one).collect()
}

/// The function of this name.
pub fn by_name(name: &str) -> Option<AggFunc> {
    FUNCTIONS.iter().find(|f| f.1 == name).map(|f| f.0)
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Ordered {
    func: AggFunc,
    name: &'static str,
    signature: Signature,
}

impl Ordered {
    fn is_ordered_set(&self) -> bool {
        self.func != AggFunc::JsonbObjectAgg
    }

    fn result_type(&self, args: &[DataType]) -> Option<DataType> {
        let list = |t: DataType| DataType::List(Arc::new(Field::new_list_field(t, true)));
        Some(match (self.func, args) {
            (AggFunc::JsonbObjectAgg, _) => SqlType::Jsonb.to_arrow(),
            (AggFunc::PercentileCont, [_, DataType::List(_)]) => list(DataType::Float64),
            (AggFunc::PercentileCont, _) => DataType::Float64,
            (AggFunc::PercentileDisc, [t, DataType::List(_)]) => list(t.clone()),
            (_, [t, ..]) => t.clone(),
            (_, []) => return None,
        })
    }
}

fn sortable(func: AggFunc, name: &str, t: &DataType) -> Result<()> {
    match t {
        DataType::Interval(_) if func == AggFunc::PercentileCont => {
            Err(external(SqlError::unsupported(format!("{name} of intervals"))))
        }
        t if t.is_nested() => Err(external(SqlError::unsupported(format!("{name} of arrays")))),
        _ => Ok(()),
    }
}

impl AggregateUDFImpl for Ordered {
    fn name(&self) -> &str {
        self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        let wanted = if self.func == AggFunc::Mode { 1 } else { 2 };
        if args.len() != wanted {
            return Err(external(undefined_aggregate(self.name, args)));
        }
        if self.func == AggFunc::JsonbObjectAgg {
            return Ok(vec![DataType::Utf8, SqlType::Jsonb.to_arrow()]);
        }
        sortable(self.func, self.name, &args[0])?;
        let float = |t: &DataType| t.is_numeric() || *t == DataType::Null;
        let value = match (self.func, &args[0]) {
            (AggFunc::PercentileCont, t) if float(t) => DataType::Float64,
            (AggFunc::PercentileCont, _) => {
                return Err(external(undefined_aggregate(self.name, args)));
            }
            (_, DataType::Null) => DataType::Utf8,
            (_, t) => t.clone(),
        };
        let fraction = match args.get(1) {
            None => return Ok(vec![value]),
            Some(DataType::List(item)) if float(item.data_type()) => {
                DataType::List(Arc::new(Field::new_list_field(DataType::Float64, true)))
            }
            Some(t) if float(t) || *t == DataType::Utf8 => DataType::Float64,
            Some(_) => return Err(external(undefined_aggregate(self.name, args))),
        };
        Ok(vec![value, fraction])
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        self.result_type(args).ok_or_else(|| external(undefined_aggregate(self.name, args)))
    }

    fn accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        Ok(Box::new(Collecting {
            func: self.func,
            distinct: args.is_distinct,
            output: args.return_field.data_type().clone(),
            options: args.order_bys.iter().map(|o| o.options).collect(),
            fraction: None,
            entries: BTreeMap::new(),
            bytes: 0,
        }))
    }

    fn create_sliding_accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        self.accumulator(args)
    }

    fn state_fields(&self, _: StateFieldsArgs) -> Result<Vec<FieldRef>> {
        let item = Arc::new(Field::new_list_field(DataType::Binary, true));
        Ok(vec![
            Arc::new(Field::new("entries", DataType::List(item), true)),
            Arc::new(Field::new("fraction", DataType::Utf8, true)),
        ])
    }

    fn supports_within_group_clause(&self) -> bool {
        self.is_ordered_set()
    }

    fn with_beneficial_ordering(
        self: Arc<Self>,
        _: bool,
    ) -> Result<Option<Arc<dyn AggregateUDFImpl>>> {
        Ok(Some(self))
    }

    /// Rows are sorted here. What they are sorted by is an argument of an ordered set; of the others it
    /// comes with the arguments where the order matters.
    fn order_sensitivity(&self) -> AggregateOrderSensitivity {
        match self.is_ordered_set() {
            true => AggregateOrderSensitivity::Insensitive,
            false => AggregateOrderSensitivity::SoftRequirement,
        }
    }
}

/// The rows of a group.
#[derive(Debug)]
struct Collecting {
    func: AggFunc,
    distinct: bool,
    output: DataType,
    options: Vec<SortOptions>,
    /// The direct argument of a percentile as text; empty: NULL.
    fraction: Option<String>,
    /// How often each entry is there.
    entries: BTreeMap<Box<[u8]>, i64>,
    bytes: usize,
}

impl Collecting {
    fn entries_of(&mut self, values: &[ArrayRef]) -> Result<BinaryArray, SqlError> {
        let ascending = SortOptions { descending: false, nulls_first: false };
        if self.func == AggFunc::JsonbObjectAgg {
            let (separator, value) = (&values[0], to_text(&values[1])?);
            let (keys, options) = match self.options.is_empty() {
                true => (&values[..1], vec![ascending]),
                false => (&values[2..], self.options.clone()),
            };
            return entries(
                Nulls::KeptUnderKeys,
                &value,
                Some(separator),
                &order_keys(keys)?,
                options.into_iter(),
            );
        }
        if let (None, Some(fraction)) = (&self.fraction, values.get(1))
            && !fraction.is_empty()
        {
            let text = to_text(&fraction.slice(0, 1))?;
            let text = text.as_string::<i32>();
            self.fraction = Some(if text.is_null(0) { "" } else { text.value(0) }.to_owned());
        }
        let text = to_text(&values[0])?;
        let options = [self.options.first().copied().unwrap_or(ascending)];
        entries(Nulls::Skipped, &text, None, &order_keys(&values[..1])?, options.into_iter())
    }

    fn count(&mut self, entry: &[u8], by: i64) {
        match self.entries.get_mut(entry) {
            Some(count) => {
                *count += by;
                if *count == 0 {
                    self.entries.remove(entry);
                    self.bytes -= entry.len();
                }
            }
            None => {
                self.bytes += entry.len();
                self.entries.insert(entry.into(), by);
            }
        }
    }

    fn add(&mut self, values: &[ArrayRef], sign: i64) -> Result<()> {
        let entries = self.entries_of(values).map_err(external)?;
        entries.iter().flatten().for_each(|e| self.count(e, sign));
        Ok(())
    }

    fn result(&self) -> Result<ScalarValue, SqlError> {
        let entries = self.entries.iter().map(|(e, n)| (e.as_ref(), *n));
        let fraction = self.fraction.as_deref();
        let text = build(self.func, self.distinct, &self.output, fraction, entries)?;
        let column: ArrayRef = Arc::new(StringArray::from(vec![text.as_deref()]));
        let value = convert(&column, SqlType::from_arrow(&self.output)?)?;
        ScalarValue::try_from_array(&value, 0).map_err(crate::error::sql_error_from_datafusion)
    }
}

impl Accumulator for Collecting {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        self.add(values, 1)
    }

    fn retract_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        self.add(values, -1)
    }

    fn supports_retract_batch(&self) -> bool {
        true
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        self.result().map_err(external)
    }

    fn size(&self) -> usize {
        size_of::<Collecting>() + self.bytes + self.entries.len() * 48
    }

    /// Entries with their counts before them.
    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        let entry = |e: &[u8], n: &i64| {
            ScalarValue::Binary(Some(
                n.to_le_bytes().into_iter().chain(e.iter().copied()).collect(),
            ))
        };
        let all: Vec<ScalarValue> = self.entries.iter().map(|(e, n)| entry(e, n)).collect();
        Ok(vec![list_state(&all, &DataType::Binary), ScalarValue::Utf8(self.fraction.clone())])
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        let bad = malformed_state;
        for list in lists_of(states)?.iter().flatten() {
            for entry in list.as_binary::<i32>().iter().flatten() {
                let (count, entry) = entry.split_at_checked(8).ok_or_else(bad)?;
                let count = i64::from_le_bytes(count.try_into().map_err(|_| bad())?);
                self.count(entry, count);
            }
        }
        let fraction = states[1].as_string::<i32>().iter().flatten().next();
        self.fraction = self.fraction.take().or(fraction.map(str::to_owned));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::check_aggregates;

    #[test]
    fn percentiles_between_rows() {
        check_aggregates(&[
            ("percentile_cont order by 1", "float8|float8", "1|0.5; 2|0.5; 4|0.5; 8|0.5", "3"),
            ("percentile_cont order by 1", "float8|float8", "1|0; 2|0", "1"),
            ("percentile_cont order by 1", "float8|float8", "1|1; 2|1", "2"),
            ("percentile_cont order by 1 desc", "float8|float8", "1|0.25; 2|0.25; 3|0.25", "2.5"),
            ("percentile_cont order by 1", "float8|float8", "NULL|0.5; 3|0.5", "3"),
            ("percentile_cont order by 1", "float8|float8", "NULL|0.5", "NULL"),
            ("percentile_cont order by 1", "float8|float8", "1|1.5", "error 22003"),
            ("percentile_cont order by 1", "float8|float8", "1|-0.1", "error 22003"),
            (
                "percentile_cont order by 1",
                "float8|float8[]",
                "1|{0,0.5,NULL,1}; 3|{0,0.5,NULL,1}",
                "{1,2,NULL,3}",
            ),
            ("percentile_cont order by 1", "int4|float8", "1|0.5; 2|0.5", "1.5"),
        ]);
    }

    #[test]
    fn percentiles_are_rows() {
        check_aggregates(&[
            ("percentile_disc order by 1", "int4|float8", "1|0.5; 2|0.5; 3|0.5; 4|0.5", "2"),
            ("percentile_disc order by 1", "int4|float8", "1|0; 2|0", "1"),
            ("percentile_disc order by 1", "text|float8", "b|0.4; a|0.4; c|0.4", "b"),
            ("percentile_disc order by 1 desc", "text|float8", "b|0.1; a|0.1; c|0.1", "c"),
            ("percentile_disc order by 1", "int4|float8[]", "1|{1,0}; 5|{1,0}", "{5,1}"),
            (
                "percentile_disc order by 1",
                "interval|float8",
                "1 mon|0.9; 29 days|0.9; 31 days|0.9",
                "31 days",
            ),
        ]);
    }

    #[test]
    fn the_most_frequent_value() {
        check_aggregates(&[
            ("mode order by 1", "int4", "2; 1; 2; NULL; NULL; NULL", "2"),
            ("mode order by 1", "int4", "2; 1; 2; 1", "1"),
            ("mode order by 1 desc", "int4", "2; 1; 2; 1", "2"),
            ("mode order by 1", "text", "NULL", "NULL"),
            ("mode order by 1", "float8", "NaN; 1; NaN", "NaN"),
        ]);
    }

    #[test]
    fn objects_of_rows() {
        check_aggregates(&[
            ("jsonb_object_agg", "text|jsonb", "b|1; a|\"x\"; b|2", "{\"a\": \"x\", \"b\": 2}"),
            ("jsonb_object_agg", "text|jsonb", "a|NULL", "{\"a\": null}"),
            ("jsonb_object_agg", "text|jsonb", "NULL|1", "error 22023"),
            ("jsonb_object_agg", "text|jsonb", "", "NULL"),
        ]);
    }
}
