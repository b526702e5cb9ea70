//! What a relation's columns are to its connector: values it reads, facts about the row (`INCLUDE`),
//! expressions that others compute, the hidden row id.

use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_rpc::catalog::Relation;

use crate::{ConnectorError, ROW_ID};

/// A fact about a row that the connector knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Include {
    /// The message's key (Kafka).
    Key,
    /// The split.
    Partition,
    /// The row's offset in its partition or file.
    Offset,
    /// The message's time (Kafka), or the file's modification time.
    Timestamp,
    /// The file's path.
    File,
}

impl Include {
    pub fn parse(word: &str) -> Option<Include> {
        Some(match word.to_ascii_lowercase().as_str() {
            "key" => Include::Key,
            "partition" => Include::Partition,
            "offset" => Include::Offset,
            "timestamp" => Include::Timestamp,
            "file" => Include::File,
            _ => return None,
        })
    }

    pub fn name(self) -> &'static str {
        match self {
            Include::Key => "key",
            Include::Partition => "partition",
            Include::Offset => "offset",
            Include::Timestamp => "timestamp",
            Include::File => "file",
        }
    }

    pub fn sql_type(self) -> SqlType {
        match self {
            Include::Key => SqlType::Bytea,
            Include::Partition | Include::File => SqlType::Text,
            Include::Offset => SqlType::BigInt,
            Include::Timestamp => SqlType::Timestamptz,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Read from the row.
    Value,
    Include(Include),
    /// Computed by whoever reads the relation; the connector never makes it.
    Generated,
    RowId,
}

/// A relation's columns, in its order.
#[derive(Clone, Debug)]
pub struct Columns {
    pub names: Vec<String>,
    pub types: Vec<SqlType>,
    pub nullable: Vec<bool>,
    pub roles: Vec<Role>,
    pub schema: SchemaRef,
}

impl Columns {
    /// `allowed`: what this connector can say of a row.
    pub fn new(relation: &Relation, allowed: &[Include]) -> Result<Columns, SqlError> {
        let mut columns = Columns {
            names: Vec::new(),
            types: Vec::new(),
            nullable: Vec::new(),
            roles: Vec::new(),
            schema: relation.arrow_schema()?,
        };
        for column in &relation.columns {
            let role = match (&column.include, &column.generated_sql) {
                (Some(word), _) => Role::Include(included(word, allowed)?),
                (None, Some(_)) => Role::Generated,
                (None, None) if column.hidden && column.name == ROW_ID => Role::RowId,
                (None, None) => Role::Value,
            };
            columns.names.push(column.name.clone());
            columns.types.push(column.sql_type()?);
            columns.nullable.push(column.nullable);
            columns.roles.push(role);
        }
        Ok(columns)
    }

    /// Positions of the columns that rows bring, in order.
    pub fn values(&self) -> impl Iterator<Item = usize> {
        (0..self.roles.len()).filter(|&c| self.roles[c] == Role::Value)
    }

    pub fn len(&self) -> usize {
        self.roles.len()
    }

    pub fn is_empty(&self) -> bool {
        self.roles.is_empty()
    }

    /// The schema of some columns: nullable, since what violates NOT NULL is found later.
    pub fn project(&self, wanted: &[usize]) -> Result<SchemaRef, ConnectorError> {
        if let Some(&missing) = wanted.iter().find(|&&c| c >= self.len()) {
            return Err(ConnectorError::NoSuchColumn(missing));
        }
        Ok(Arc::new(self.schema.project(wanted)?))
    }
}

fn included(word: &str, allowed: &[Include]) -> Result<Include, SqlError> {
    Include::parse(word).filter(|i| allowed.contains(i)).ok_or_else(|| {
        let names: Vec<&str> = allowed.iter().map(|i| i.name()).collect();
        let error = SqlError::new(
            SqlState::FEATURE_NOT_SUPPORTED,
            format!("INCLUDE {word} is not supported by this connector"),
        );
        match names.is_empty() {
            true => error,
            false => error.with_hint(format!("It knows {}.", names.join(", "))),
        }
    })
}
