//! `jsonb_agg` over windows. As an aggregate of groups it is `array_agg`, made a document (see the planner's `bind`).

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::{DataType, Field, FieldRef};
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::function::{AccumulatorArgs, StateFieldsArgs};
use datafusion::logical_expr::utils::AggregateOrderSensitivity;
use datafusion::logical_expr::{
    Accumulator, AggregateUDF, AggregateUDFImpl, Signature, Volatility,
};
use millrace_common::{SqlError, SqlType};

use super::aggregates::{list_state, lists_of, undefined_aggregate};
use super::jsonb::documents;
use crate::error::external;

/// `jsonb_agg(value)`, of values of any type.
pub fn jsonb_agg() -> Arc<AggregateUDF> {
    static F: OnceLock<Arc<AggregateUDF>> = OnceLock::new();
    Arc::clone(F.get_or_init(|| {
        let signature = Signature::user_defined(Volatility::Immutable);
        Arc::new(AggregateUDF::from(JsonbAgg { signature, aliases: vec!["json_agg".to_owned()] }))
    }))
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct JsonbAgg {
    signature: Signature,
    aliases: Vec<String>,
}

impl AggregateUDFImpl for JsonbAgg {
    fn name(&self) -> &str {
        "jsonb_agg"
    }

    fn aliases(&self) -> &[String] {
        &self.aliases
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        match args {
            [DataType::Null] => Ok(vec![DataType::Utf8]),
            [_] => Ok(args.to_vec()),
            _ => Err(external(undefined_aggregate(self.name(), args))),
        }
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        Ok(SqlType::Jsonb.to_arrow())
    }

    fn accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        if args.is_distinct || !args.order_bys.is_empty() {
            return Err(external(SqlError::unsupported(
                "DISTINCT or ORDER BY in jsonb_agg over a window",
            )));
        }
        Ok(Box::new(Listed { items: VecDeque::new(), bytes: 0 }))
    }

    fn state_fields(&self, _: StateFieldsArgs) -> Result<Vec<FieldRef>> {
        let item = Arc::new(Field::new_list_field(DataType::LargeUtf8, true));
        Ok(vec![Arc::new(Field::new("items", DataType::List(item), true))])
    }

    /// Of rows as they come.
    fn order_sensitivity(&self) -> AggregateOrderSensitivity {
        AggregateOrderSensitivity::Insensitive
    }
}

/// The documents of a frame's rows.
#[derive(Debug)]
struct Listed {
    items: VecDeque<Box<str>>,
    bytes: usize,
}

impl Listed {
    fn add(&mut self, documents: &ArrayRef) {
        for item in documents.as_string::<i64>() {
            let item = item.unwrap_or("null");
            self.bytes += item.len();
            self.items.push_back(item.into());
        }
    }
}

impl Accumulator for Listed {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        for value in values.iter().take(1) {
            self.add(&documents(value).map_err(external)?);
        }
        Ok(())
    }

    /// Frames let go of their rows in the order in which they came.
    fn retract_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        for _ in 0..values.first().map_or(0, |v| v.len()) {
            let gone = self.items.pop_front();
            self.bytes -= gone.map_or(0, |item| item.len());
        }
        Ok(())
    }

    fn supports_retract_batch(&self) -> bool {
        true
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        if self.items.is_empty() {
            return Ok(ScalarValue::LargeUtf8(None));
        }
        let mut text = String::with_capacity(self.bytes + 2 * self.items.len());
        text.push('[');
        for (i, item) in self.items.iter().enumerate() {
            if i > 0 {
                text.push_str(", ");
            }
            text.push_str(item);
        }
        text.push(']');
        Ok(ScalarValue::LargeUtf8(Some(text)))
    }

    fn size(&self) -> usize {
        size_of::<Listed>() + self.bytes + self.items.capacity() * size_of::<Box<str>>()
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        let item = |i: &str| ScalarValue::LargeUtf8(Some(i.to_string()));
        let all: Vec<ScalarValue> = self.items.iter().map(|i| item(i)).collect();
        Ok(vec![list_state(&all, &DataType::LargeUtf8)])
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        lists_of(states)?.iter().flatten().for_each(|list| self.add(&list));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::check_aggregates;

    #[test]
    fn values_in_the_order_of_rows() {
        check_aggregates(&[
            ("jsonb_agg", "int4", "2; 1; NULL", "[2, 1, null]"),
            ("jsonb_agg", "text", "a\"b; ä", "[\"a\\\"b\", \"ä\"]"),
            ("jsonb_agg", "numeric(4,2)", "1.50; -0.05", "[1.50, -0.05]"),
            ("jsonb_agg", "jsonb", "{\"a\": 1}; [1]", "[{\"a\": 1}, [1]]"),
            ("jsonb_agg", "timestamp", "2024-02-29 13:14", "[\"2024-02-29T13:14:00\"]"),
            ("jsonb_agg", "bool", "t; f", "[true, false]"),
            ("jsonb_agg", "int4[]", "{1,2}; {}", "[[1, 2], []]"),
            ("jsonb_agg", "float8", "NaN; 1.5", "[\"NaN\", 1.5]"),
            ("json_agg", "int4", "1", "[1]"),
        ]);
    }

    #[test]
    fn of_no_rows_it_is_null() {
        check_aggregates(&[("jsonb_agg", "int4", "", "NULL")]);
    }

    #[test]
    fn order_and_distinct_are_refused_over_windows() {
        check_aggregates(&[
            ("distinct jsonb_agg", "int4", "1", "error 0A000"),
            ("jsonb_agg order by 1", "int4", "1", "error 0A000"),
        ]);
    }
}
