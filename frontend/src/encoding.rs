//! Values on the wire: what [`millrace_common::encoding`] says of a type, as messages to a client.

pub use millrace_common::encoding::*;

use arrow::datatypes::DataType;
use millrace_common::SqlError;

use crate::wire::Field;

/// The RowDescription of columns. `types` are the SQL types as the planner knows them, where it does.
pub fn describe_column(name: &str, t: &DataType) -> Result<Field, SqlError> {
    let (type_oid, type_len, typmod) = describe_type(t)?;
    Ok(Field { name: name.to_owned(), type_oid, type_len, typmod, told: Default::default() })
}

/// The Arrow type of a parameter that a client declared by OID; `None`: to be inferred.
pub fn type_of_oid(oid: u32) -> Result<Option<DataType>, SqlError> {
    Ok(match oid {
        0 | 705 => None,
        // oid, xid, cid, regclass, regtype, regproc
        26 | 28 | 29 | 2205 | 2206 | 24 => Some(DataType::Int64),
        // name, "char", bpchar, json arrive as their text
        18 | 19 | 1042 | 114 => Some(DataType::Utf8),
        _ if scalar_of_array(oid).is_some() => scalar_of_array(oid).map(|t| {
            DataType::List(std::sync::Arc::new(arrow::datatypes::Field::new(
                "item",
                t.to_arrow(),
                true,
            )))
        }),
        _ => {
            let sql = millrace_rpc::catalog::ColumnType { oid, typmod: -1 }
                .to_sql()
                .map_err(|_| SqlError::unsupported(format!("a parameter of type oid {oid}")))?;
            Some(sql.to_arrow())
        }
    })
}

/// Appends the DataRow messages of rows `from..to`.
pub fn put_rows(
    columns: &[Column],
    formats: &[i16],
    rows: std::ops::Range<usize>,
    out: &mut crate::wire::Backend,
) -> Result<(), SqlError> {
    for row in rows {
        out.data_row(columns.len(), |data| {
            for (i, column) in columns.iter().enumerate() {
                column.put_field(row, crate::wire::format_of(formats, i), data)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}
