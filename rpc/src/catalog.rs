//! Catalog entries: what meta keeps of every relation.

use millrace_common::error::ErrorObject;
use millrace_common::types::Element;
use millrace_common::{SqlError, SqlType};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum RelationKind {
    Unspecified = 0,
    Table = 1,
    Source = 2,
    /// A plain view: a stored query, no job.
    View = 3,
    MaterializedView = 4,
    Index = 5,
    Sink = 6,
    /// A hold on another relation's changelog; no job, no rows of its own.
    Subscription = 7,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Column {
    #[prost(string, tag = "1")]
    pub name: String,
    /// `SqlType` in serde's compact text; see [`Column::sql_type`].
    #[prost(message, required, tag = "2")]
    pub sql_type: ColumnType,
    #[prost(bool, tag = "3")]
    pub nullable: bool,
    /// SQL text of the DEFAULT expression.
    #[prost(string, optional, tag = "4")]
    pub default_sql: Option<String>,
    /// Not shown and not part of `*` (the row id of a table without a key).
    #[prost(bool, tag = "5")]
    pub hidden: bool,
    /// SQL text of the expression of a generated column.
    #[prost(string, optional, tag = "20")]
    pub generated_sql: Option<String>,
    /// `INCLUDE …`: what the connector puts here (key, partition, offset, timestamp, file …).
    #[prost(string, optional, tag = "21")]
    pub include: Option<String>,
}

/// A [`SqlType`] as stored: its PostgreSQL OID and typmod.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct ColumnType {
    #[prost(uint32, tag = "1")]
    pub oid: u32,
    #[prost(int32, tag = "2")]
    pub typmod: i32,
}

impl ColumnType {
    /// The digits of seconds that a column's values are rounded to; `None`: all.
    pub fn second_digits(self) -> Option<u32> {
        const TIMES: [SqlType; 4] =
            [SqlType::Time, SqlType::Timestamp, SqlType::Timestamptz, SqlType::Interval];
        let timed = TIMES.iter().any(|time| time.oid() == self.oid);
        u32::try_from(self.typmod).ok().filter(|_| timed).map(|m| m & 0xffff).filter(|d| *d < 6)
    }
}

impl From<SqlType> for ColumnType {
    fn from(t: SqlType) -> ColumnType {
        ColumnType { oid: t.oid(), typmod: t.typmod() }
    }
}

impl ColumnType {
    /// The SQL type; an unknown OID (a newer catalog) is an error.
    pub fn to_sql(self) -> Result<SqlType, SqlError> {
        let typmod = self.typmod;
        Ok(match self.oid {
            16 => SqlType::Boolean,
            17 => SqlType::Bytea,
            20 => SqlType::BigInt,
            21 => SqlType::SmallInt,
            23 => SqlType::Int,
            25 => SqlType::Text,
            700 => SqlType::Real,
            701 => SqlType::Double,
            1042 if typmod > 4 => SqlType::Char((typmod - 4) as u32),
            1042 => SqlType::Text,
            1043 => SqlType::Varchar((typmod >= 4).then(|| (typmod - 4) as u32)),
            1082 => SqlType::Date,
            1083 => SqlType::Time,
            1114 => SqlType::Timestamp,
            1184 => SqlType::Timestamptz,
            1186 => SqlType::Interval,
            1700 if typmod >= 4 => {
                let packed = typmod - 4;
                // The scale is an 11-bit signed number, as in PostgreSQL 15.
                let scale = ((packed & 0x7ff) ^ 0x400) - 0x400;
                SqlType::Numeric(Some(((packed >> 16) as u8, scale as i8)))
            }
            1700 => SqlType::Numeric(None),
            2950 => SqlType::Uuid,
            3802 => SqlType::Jsonb,

            other => match Element::ALL.into_iter().find(|e| e.array_oid() == other) {
                Some(e) => {
                    let scalar = ColumnType { oid: e.scalar().oid(), typmod }.to_sql()?;
                    SqlType::Array(Element::of(scalar).unwrap_or(e))
                }
                None => {
                    let message = format!("unknown type oid {other} in the catalog");
                    return Err(SqlError::internal(message));
                }
            },
        })
    }
}

impl Column {
    pub fn sql_type(&self) -> Result<SqlType, SqlError> {
        self.sql_type.to_sql()
    }
}

/// How a table treats an INSERT whose key exists (§12).
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum OnConflict {
    /// PostgreSQL's error 23505.
    Error = 0,
    Overwrite = 1,
    Ignore = 2,
}

/// How a relation's rows lie in its state table (§3, §9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum RowStorage {
    /// A unique key: put and delete by key.
    Keyed = 0,
    /// No key: rows under their own bytes with a multiplicity.
    Multiset = 1,
    /// Never retracted: rows under an arrival sequence.
    Append = 2,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Relation {
    #[prost(uint32, tag = "1")]
    pub id: u32,
    #[prost(string, tag = "2")]
    pub schema: String,
    #[prost(string, tag = "3")]
    pub name: String,
    #[prost(enumeration = "RelationKind", tag = "4")]
    pub kind: i32,
    #[prost(message, repeated, tag = "5")]
    pub columns: Vec<Column>,
    /// Positions in `columns` of the unique key that stores the rows, in key order; the declared
    /// primary key of a table, else a hidden row id, or what the planner derived.
    #[prost(uint32, repeated, tag = "6")]
    pub key: Vec<u32>,
    /// Whether `key` is a PRIMARY KEY the user declared.
    #[prost(bool, tag = "7")]
    pub primary_key: bool,
    #[prost(bool, tag = "8")]
    pub append_only: bool,
    /// The statement as the user wrote it.
    #[prost(string, tag = "9")]
    pub definition: String,
    /// The query text (views, materialized views, sinks).
    #[prost(string, tag = "10")]
    pub query: String,
    /// Relations this one reads or, for an index, belongs to.
    #[prost(uint32, repeated, tag = "11")]
    pub depends_on: Vec<u32>,
    /// The job graph in the planner's versioned protobuf; empty for roots and plain views.
    #[prost(bytes = "bytes", tag = "12")]
    pub graph: prost::bytes::Bytes,
    /// State tables are `first_table_id .. first_table_id + table_count`; the relation's own rows
    /// are the first. Assigned by meta.
    #[prost(uint32, tag = "13")]
    pub first_table_id: u32,
    #[prost(uint32, tag = "14")]
    pub table_count: u32,
    /// Connector options of a source or sink (WITH clause), sorted by name.
    #[prost(message, repeated, tag = "15")]
    pub options: Vec<OptionEntry>,
    #[prost(enumeration = "OnConflict", tag = "16")]
    pub on_conflict: i32,
    #[prost(string, tag = "17")]
    pub owner: String,
    /// `WATERMARK FOR column AS expr`.
    #[prost(message, optional, tag = "18")]
    pub watermark: Option<Watermark>,
    #[prost(uint64, tag = "19")]
    pub created_epoch: u64,
    #[prost(enumeration = "RowStorage", tag = "20")]
    pub storage: i32,
    /// Columns (positions) whose hash decides a row's vnode. Empty: all rows in vnode 0.
    #[prost(uint32, repeated, tag = "21")]
    pub distribution: Vec<u32>,
    /// Columns of a derived relation that have a watermark.
    #[prost(uint32, repeated, tag = "30")]
    pub watermark_columns: Vec<u32>,
    /// FORMAT … ENCODE … of a source or sink.
    #[prost(message, optional, tag = "40")]
    pub format: Option<Format>,
    /// A source that takes nothing in until it is resumed.
    #[prost(bool, tag = "41")]
    pub paused: bool,
    /// Of a sink into a table: that table. 0: none.
    #[prost(uint32, tag = "42")]
    pub target: u32,
    /// The incarnation of the frontend whose session it ends with. 0: it lasts until it is dropped.
    #[prost(uint64, tag = "43")]
    pub ephemeral: u64,
    /// Tasks of each fragment of its job. 0: as many as the server has by default.
    #[prost(uint32, tag = "44")]
    pub parallelism: u32,
}

/// `FORMAT format ENCODE encode`, names in upper case; its options are among the relation's.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Format {
    #[prost(string, tag = "1")]
    pub format: String,
    #[prost(string, tag = "2")]
    pub encode: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct OptionEntry {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub value: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Watermark {
    #[prost(uint32, tag = "1")]
    pub column: u32,
    #[prost(string, tag = "2")]
    pub expr_sql: String,
    /// The same, compiled over the relation's columns, in the planner's encoding.
    #[prost(bytes = "bytes", tag = "3")]
    pub expr: prost::bytes::Bytes,
}

/// The longest name that PostgreSQL has (NAMEDATALEN − 1).
const MAX_IDENTIFIER_BYTES: usize = 63;

impl Relation {
    /// What logs call it: `public.orders (16384)`.
    pub fn label(&self) -> String {
        format!("{}.{} ({})", self.schema, self.name, self.id)
    }

    /// Columns that have a watermark: declared, or derived.
    pub fn watermarked(&self) -> Vec<usize> {
        match &self.watermark {
            Some(w) => vec![w.column as usize],
            None => self.watermark_columns.iter().map(|&c| c as usize).collect(),
        }
    }

    /// Whether rows come in from outside: a source, or a table fed by a connector.
    pub fn has_connector(&self) -> bool {
        let fed = matches!(self.kind(), RelationKind::Source | RelationKind::Table);
        fed && self.option("connector").is_some()
    }

    pub fn option(&self, name: &str) -> Option<&str> {
        self.options.iter().find(|o| o.name == name).map(|o| o.value.as_str())
    }

    /// The name of the primary key's constraint and index: PostgreSQL shortens the table's where both are too long.
    pub fn primary_key_name(&self) -> String {
        const SUFFIX: &str = "_pkey";
        let name = &self.name;
        let end = name.floor_char_boundary(MAX_IDENTIFIER_BYTES - SUFFIX.len());
        format!("{}{SUFFIX}", &name[..end])
    }

    /// The relation as errors name it, or a column of it.
    pub fn error_object(&self, column: Option<&str>) -> ErrorObject {
        let column = column.map(str::to_owned);
        let (schema, table) = (self.schema.clone(), self.name.clone());
        ErrorObject { schema, table, column, constraint: None }
    }

    /// The primary key as errors name it.
    pub fn primary_key_object(&self) -> ErrorObject {
        ErrorObject { constraint: Some(self.primary_key_name()), ..self.error_object(None) }
    }

    /// The Arrow schema of all columns, hidden ones included.
    pub fn arrow_schema(&self) -> Result<arrow_schema::SchemaRef, SqlError> {
        let fields = self
            .columns
            .iter()
            .map(|c| Ok(c.sql_type()?.to_field(&c.name).with_nullable(c.nullable)))
            .collect::<Result<Vec<_>, SqlError>>()?;
        Ok(std::sync::Arc::new(arrow_schema::Schema::new(fields)))
    }
}
