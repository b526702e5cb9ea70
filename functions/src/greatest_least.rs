//! `greatest` and `least` of values whose order is not that of their bytes: of intervals the longest is the greatest,
//! documents have an order of their own, of arrays a NULL element is greater than all others. Of equal
//! values it is the first.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef};
use arrow::compute::interleave;
use arrow::datatypes::DataType;
use datafusion::logical_expr::ScalarUDF;
use millrace_common::SqlError;
use millrace_common::keys::KeyCodec;

use super::arrays::function;
use super::byte_order::by_value;
use super::min_max::ARRAY_ORDER;
use super::ordered_entries::order_keys;

/// The functions' names, by construct; no names that SQL text can contain unquoted.
const NAMES: [(&str, &str); 2] = [("greatest", "#greatest"), ("least", "#least")];

/// The function that `construct` is for values of a type, if it is not DataFusion's.
pub fn name_for(construct: &str, t: &DataType) -> Option<&'static str> {
    let own = by_value(t) || t.is_list();
    NAMES.into_iter().find(|(name, _)| own && *name == construct).map(|(_, function)| function)
}

pub fn functions() -> Vec<Arc<ScalarUDF>> {
    let [greatest, least] = NAMES.map(|(_, name)| name);
    vec![
        function(greatest, alike, |args| farthest(args, true), false),
        function(least, alike, |args| farthest(args, false), false),
    ]
}

fn alike(args: &[DataType]) -> Option<(Vec<DataType>, DataType)> {
    let first = args.first()?;
    args.iter().all(|t| t == first).then(|| (args.to_vec(), first.clone()))
}

/// Of each row the greatest or least value that is not NULL.
fn farthest(args: &[ArrayRef], greatest: bool) -> Result<ArrayRef, SqlError> {
    let internal = |e: arrow::error::ArrowError| SqlError::internal(e.to_string());
    let keys = order_keys(args)?;
    let Some(first) = keys.first() else {
        return Err(SqlError::internal("the greatest or least of nothing"));
    };
    let codec = KeyCodec::with_options([(first.data_type().clone(), ARRAY_ORDER)]);
    let codec = codec.map_err(internal)?;
    let rows = keys.iter().map(|k| codec.rows(std::slice::from_ref(k)).map_err(internal));
    let rows = rows.collect::<Result<Vec<_>, _>>()?;
    let place = |i: usize| {
        let mut best: Option<usize> = None;
        for arg in (0..args.len()).filter(|&arg| args[arg].is_valid(i)) {
            let better = best.is_none_or(|b| {
                let (new, old) = (rows[arg].row(i), rows[b].row(i));
                if greatest { new > old } else { new < old }
            });
            if better {
                best = Some(arg);
            }
        }
        (best.unwrap_or(0), i)
    };
    let places: Vec<(usize, usize)> = (0..first.len()).map(place).collect();
    let columns: Vec<&dyn Array> = args.iter().map(AsRef::as_ref).collect();
    interleave(&columns, &places).map_err(internal)
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn intervals_by_length() {
        check(&[
            ("#greatest('1 mon'::interval, '31 days'::interval, '100 hours'::interval)", "31 days"),
            ("#least('1 mon'::interval, '29 days 23:59:59'::interval)", "29 days 23:59:59"),
            ("#greatest('24:00'::interval, '1 day'::interval)", "24:00:00"),
            ("#least('1 day'::interval, '24:00'::interval)", "1 day"),
            ("#greatest('-1 day'::interval, NULL::interval)", "-1 days"),
            ("#least(NULL::interval, NULL::interval)", "NULL"),
        ]);
    }

    #[test]
    fn documents_by_kind() {
        check(&[
            ("#greatest('{}'::jsonb, '[1]'::jsonb, 'true'::jsonb)", "{}"),
            ("#least('1'::jsonb, '\"a\"'::jsonb, 'null'::jsonb)", "null"),
            ("#greatest('2'::jsonb, '10'::jsonb)", "10"),
        ]);
    }

    #[test]
    fn a_null_element_is_greater_than_others() {
        check(&[
            ("#greatest('{1,2}'::int4[], '{1,NULL}'::int4[])", "{1,NULL}"),
            ("#least('{2}'::int4[], '{10,1}'::int4[], '{}'::int4[])", "{}"),
            ("#greatest('{1}'::int4[], '{1,0}'::int4[])", "{1,0}"),
        ]);
    }
}
