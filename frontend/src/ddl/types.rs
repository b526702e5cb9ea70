//! Type names in definitions.

use millrace_common::{SqlError, SqlType};
use millrace_rpc::catalog::ColumnType;
use sqlparser::ast::DataType;

/// The type of a column as it is declared.
pub fn column_type(t: &DataType) -> Result<ColumnType, SqlError> {
    sql_type(t)?;
    millrace_planner::bind::types::column_type(t)
}

/// The SQL type a column is declared with.
pub fn sql_type(t: &DataType) -> Result<SqlType, SqlError> {
    let name = t.to_string().to_lowercase();
    if matches!(
        name.as_str(),
        "serial" | "bigserial" | "smallserial" | "serial4" | "serial8" | "serial2"
    ) {
        return Err(SqlError::unsupported(format!("the type {name}"))
            .with_hint("Use bigint; a table without a primary key has a hidden row id."));
    }
    millrace_planner::bind::types::sql_type(t)
}
