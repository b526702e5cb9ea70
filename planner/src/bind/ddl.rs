//! CREATE TABLE and CREATE SOURCE: a checked list of catalog columns and the key.

use millrace_common::{SqlError, SqlState};
use millrace_rpc::catalog::{Column, ColumnType, Watermark};
use sqlparser::ast::{ColumnDef, ColumnOption, Expr, Ident, TableConstraint};

use super::names::fold;
use super::types::sql_type;
use crate::ast::TableDefinition;
use crate::parser::folded;

/// What a definition declares, names folded, types resolved.
#[derive(Clone, Debug)]
pub struct TableSpec {
    /// The declared columns; a hidden `_row_id` is not among them.
    pub columns: Vec<Column>,
    /// Positions of the declared primary key; empty without one.
    pub primary_key: Vec<u32>,
    pub watermark: Option<Watermark>,
}

/// Checks a definition that has columns (not CREATE TABLE … AS without a list).
pub fn table_spec(table: &TableDefinition) -> Result<TableSpec, SqlError> {
    let mut columns: Vec<Column> = Vec::new();
    let mut key: Vec<u32> = Vec::new();
    for def in &table.columns {
        let column = column(def, &mut key, columns.len() as u32)?;
        if columns.iter().any(|c| c.name == column.name) {
            return Err(SqlError::new(
                SqlState::DUPLICATE_COLUMN,
                format!("column \"{}\" specified more than once", column.name),
            ));
        }
        columns.push(column);
    }
    for constraint in &table.constraints {
        let TableConstraint::PrimaryKey(pk) = constraint else {
            return Err(SqlError::unsupported(constraint_name(constraint)));
        };
        if !key.is_empty() {
            return Err(several_keys(table));
        }
        for column in &pk.columns {
            let Expr::Identifier(name) = &column.column.expr else {
                return Err(SqlError::unsupported("a primary key over an expression"));
            };
            key.push(position(&columns, name, "named in key")?);
        }
    }
    for (i, &k) in key.iter().enumerate() {
        if key[..i].contains(&k) {
            let name = &columns[k as usize].name;
            return Err(SqlError::new(
                SqlState::DUPLICATE_COLUMN,
                format!("column \"{name}\" appears twice in primary key constraint"),
            ));
        }
        columns[k as usize].nullable = false;
    }
    let watermark = match &table.watermark {
        Some(w) => Some(Watermark {
            column: position(&columns, &w.column, "of the watermark")?,
            expr_sql: w.text.clone(),
            expr: Default::default(),
        }),
        None => None,
    };
    Ok(TableSpec { columns, primary_key: key, watermark })
}

fn several_keys(table: &TableDefinition) -> SqlError {
    SqlError::new(
        SqlState::INVALID_TABLE_DEFINITION,
        format!("multiple primary keys for table \"{}\" are not allowed", table.name),
    )
}

fn column(def: &ColumnDef, key: &mut Vec<u32>, position: u32) -> Result<Column, SqlError> {
    let mut column = Column {
        name: fold(&def.name),
        sql_type: ColumnType::from(sql_type(&def.data_type)?),
        nullable: true,
        default_sql: None,
        hidden: false,
        ..Column::default()
    };
    if column.name == super::ROW_ID {
        return Err(SqlError::new(
            SqlState::DUPLICATE_COLUMN,
            format!("column name \"{}\" is reserved", column.name),
        ));
    }
    for option in &def.options {
        match &option.option {
            ColumnOption::Null => column.nullable = true,
            ColumnOption::NotNull => column.nullable = false,
            ColumnOption::Default(e) => column.default_sql = Some(folded::to_sql(e)?),
            ColumnOption::PrimaryKey(_) => {
                if !key.is_empty() {
                    return Err(SqlError::new(
                        SqlState::INVALID_TABLE_DEFINITION,
                        "multiple primary keys for a table are not allowed",
                    ));
                }
                key.push(position);
            }
            other => {
                let text = other.to_string();
                let name = text.split(['(', ' ']).next().unwrap_or("this").to_uppercase();
                return Err(SqlError::unsupported(format!("the column constraint {name}")));
            }
        }
    }
    Ok(column)
}

fn position(columns: &[Column], name: &Ident, what: &str) -> Result<u32, SqlError> {
    let folded = fold(name);
    match columns.iter().position(|c| c.name == folded) {
        Some(i) => Ok(i as u32),
        None => Err(SqlError::new(
            SqlState::UNDEFINED_COLUMN,
            format!("column \"{folded}\" {what} does not exist"),
        )),
    }
}

fn constraint_name(c: &TableConstraint) -> &'static str {
    match c {
        TableConstraint::Unique(_) => "a UNIQUE constraint",
        TableConstraint::ForeignKey(_) => "a FOREIGN KEY constraint",
        TableConstraint::Check(_) => "a CHECK constraint",
        _ => "this table constraint",
    }
}
