//! Sinks: a query's changes, brought to a target outside (docs/design.md §4, "Sinks").
//!
//! A [`SinkTarget`] is given one [`Publication`] after the other: the net change of one commit, which is in
//! the log by then. After a failure or a crash it may be given the last one again, so it either tells from the
//! sequence that it has it, or writes the same bytes to the same place: nothing arrives twice.

mod format;
mod fs;
#[cfg(feature = "kafka")]
mod kafka;
mod postgres;

use std::sync::Arc;

use arrow::array::ArrayRef;
use async_trait::async_trait;
use bytes::BytesMut;
use millrace_common::encoding::Column;
use millrace_common::{DeltaChunk, Epoch, SqlError, SqlState, SqlType};
use millrace_rpc::catalog::Relation;

use crate::error::ConnectorError;
use crate::options::{self, invalid};

/// Option that names a sink for ever, given at its creation: another sink of the same name, or in another
/// database, has another.
pub const SINK_ID: &str = "sink.id";
/// Options that every sink has, whatever its connector.
const COMMON: &[&str] = &[
    "connector",
    "type",
    "primary_key",
    "force_append_only",
    "snapshot",
    "commit_interval",
    "changelog_retention",
    "format",
    "encode",
    SINK_ID,
];

/// The change of one commit.
#[derive(Clone, Debug)]
pub struct Publication {
    /// 1, 2, 3 …: with the sink's id it tells a repeated publication.
    pub sequence: u64,
    /// The last sequence that the target has said to have; 0: none.
    pub known: u64,
    pub epoch: Epoch,
    /// Net rows, in the order in which they apply. In a chunk every row occurs once, and old and new row
    /// of a key are next to each other.
    pub chunks: Vec<DeltaChunk>,
}

/// Where a sink's changes go.
#[async_trait]
pub trait SinkTarget: Send + Sync {
    /// Whether the target can be reached and fits; before the sink is created.
    async fn check(&self) -> Result<(), ConnectorError>;

    /// Returns when the target has the change for good. Repeating it changes nothing.
    async fn publish(&self, change: &Publication) -> Result<(), ConnectorError>;
}

/// What a sink makes of changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SinkType {
    /// New rows only.
    AppendOnly,
    /// The newest row of each key, and deletions by key.
    Upsert,
    /// Every change with its old and new row.
    Changelog,
}

/// What `FORMAT` and `type` of a sink's definition say, checked against each other and its connector.
pub fn sink_type(relation: &Relation) -> Result<SinkType, SqlError> {
    let by_format = match relation.option("format") {
        None => None,
        Some("PLAIN") => Some(SinkType::AppendOnly),
        Some("UPSERT") => Some(SinkType::Upsert),
        Some("DEBEZIUM") => Some(SinkType::Changelog),
        Some(other) => {
            return Err(SqlError::unsupported(format!("FORMAT {other} of a sink"))
                .with_hint("Formats of sinks: PLAIN, UPSERT, DEBEZIUM."));
        }
    };
    let by_type = match relation.option("type") {
        None => None,
        Some("append-only") => Some(SinkType::AppendOnly),
        Some("upsert") => Some(SinkType::Upsert),
        Some("debezium") => Some(SinkType::Changelog),
        Some(other) => {
            return Err(invalid(format!("invalid value for option \"type\": \"{other}\""))
                .with_hint("Give 'append-only', 'upsert' or 'debezium'."));
        }
    };
    match (by_format, by_type) {
        (Some(a), Some(b)) if a != b => {
            Err(invalid("option \"type\" contradicts the FORMAT clause")
                .with_hint("Leave one of them out."))
        }
        (Some(t), _) | (None, Some(t)) => Ok(t),
        (None, None) => Ok(SinkType::AppendOnly),
    }
}

/// Opens the target that a sink's catalog entry describes.
pub fn create_target(relation: &Relation) -> Result<Arc<dyn SinkTarget>, SqlError> {
    match relation.option("connector") {
        Some("fs") => Ok(Arc::new(fs::FsTarget::new(relation)?)),
        Some("postgres") => Ok(Arc::new(postgres::PostgresTarget::new(relation)?)),
        Some("blackhole") => {
            known(relation, &[])?;
            Ok(Arc::new(Blackhole))
        }
        #[cfg(feature = "kafka")]
        Some("kafka") => Ok(Arc::new(kafka::KafkaTarget::new(relation)?)),
        #[cfg(not(feature = "kafka"))]
        Some("kafka") => Err(SqlError::unsupported("connector \"kafka\" in this build")
            .with_hint("Build with the feature \"kafka\".")),
        Some(other) => Err(invalid(format!("unknown sink connector \"{other}\""))
            .with_hint("Available sink connectors: blackhole, fs, kafka, postgres.")),
        None => Err(invalid("missing option \"connector\"").with_hint(
            "Add WITH (connector = 'fs', path = '/exports/orders'), or write INTO a table.",
        )),
    }
}

/// Refuses options that neither all sinks nor this connector have, and malformed common ones.
fn known(relation: &Relation, own: &[&str]) -> Result<(), SqlError> {
    known_with(relation, own, |_| false)
}

/// The same, where options of some names are handed on.
fn known_with(
    relation: &Relation,
    own: &[&str],
    passed: impl Fn(&str) -> bool,
) -> Result<(), SqlError> {
    let all: Vec<&str> = COMMON.iter().chain(own).copied().collect();
    let known = |name: &str| all.contains(&name) || passed(name);
    if let Some(o) = relation.options.iter().find(|o| !known(&o.name)) {
        let shown: Vec<&str> = all.into_iter().filter(|n| *n != SINK_ID).collect();
        return Err(invalid(format!("unknown option \"{}\"", o.name))
            .with_hint(format!("Options of this connector: {}.", shown.join(", "))));
    }
    check_common(relation)
}

/// Checks the options that every sink has.
pub fn check_common(relation: &Relation) -> Result<(), SqlError> {
    flag(relation, "force_append_only", false)?;
    flag(relation, "snapshot", true)?;
    for name in ["commit_interval", "changelog_retention"] {
        if let Some(duration) = relation.option(name) {
            millrace_common::settings::parse_duration(duration)?;
        }
    }
    Ok(())
}

/// A boolean option.
pub fn flag(relation: &Relation, name: &str, default: bool) -> Result<bool, SqlError> {
    let Some(text) = relation.option(name) else { return Ok(default) };
    millrace_common::settings::parse_bool(text).ok_or_else(|| {
        invalid(format!("invalid value for option \"{name}\": \"{text}\""))
            .with_hint("Give true or false.")
    })
}

/// What separates the fields of CSV.
fn delimiter(relation: &Relation) -> Result<u8, SqlError> {
    match relation.option("delimiter").unwrap_or(",").as_bytes() {
        [one] if one.is_ascii() && !b"\"\n\r".contains(one) => Ok(*one),
        _ => Err(invalid("option \"delimiter\" must be one one-byte character")),
    }
}

/// A published column.
#[derive(Clone, Debug)]
struct SinkColumn {
    name: String,
    sql_type: SqlType,
}

/// What sinks of all kinds need of their definition.
#[derive(Clone, Debug)]
struct Definition {
    id: String,
    name: String,
    kind: SinkType,
    columns: Vec<SinkColumn>,
    /// Positions of the key; empty: none.
    key: Vec<usize>,
}

impl Definition {
    fn of(relation: &Relation) -> Result<Definition, SqlError> {
        let shown = relation.columns.iter().filter(|c| !c.hidden);
        let columns: Vec<SinkColumn> = shown
            .map(|c| Ok(SinkColumn { name: c.name.clone(), sql_type: c.sql_type()? }))
            .collect::<Result<_, SqlError>>()?;
        let key: Vec<usize> = relation.key.iter().map(|k| *k as usize).collect();
        // A key of hidden columns tells rows apart here, and means nothing outside.
        let key = if key.iter().all(|k| *k < columns.len()) { key } else { Vec::new() };
        Ok(Definition {
            id: relation.option(SINK_ID).unwrap_or("0").to_owned(),
            name: relation.name.clone(),
            kind: sink_type(relation)?,
            columns,
            key,
        })
    }
}

/// One change of a chunk, by positions of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Insert(usize),
    Delete(usize),
    Update { old: usize, new: usize },
}

/// A chunk with its columns ready to be printed.
struct Rows<'a> {
    chunk: &'a DeltaChunk,
    columns: Vec<Column>,
}

impl<'a> Rows<'a> {
    fn new(chunk: &'a DeltaChunk) -> Result<Rows<'a>, SqlError> {
        let columns = chunk.batch.columns().iter().map(Column::new).collect::<Result<_, _>>()?;
        Ok(Rows { chunk, columns })
    }

    /// The chunk's changes in order; a row of weight n is n changes.
    fn changes(&self, key: &[usize]) -> Result<Vec<Change>, SqlError> {
        let rows = self.chunk.num_rows();
        let same_key = neighbours(&self.chunk.batch, key)?;
        let mut out = Vec::with_capacity(rows);
        let mut row = 0;
        while row < rows {
            let weight = self.chunk.weight(row);
            if row + 1 < rows && same_key(row) {
                let next = self.chunk.weight(row + 1);
                match (weight, next) {
                    (-1, 1) => out.push(Change::Update { old: row, new: row + 1 }),
                    (1, -1) => out.push(Change::Update { old: row + 1, new: row }),
                    _ => {
                        push_times(&mut out, row, weight);
                        row += 1;
                        continue;
                    }
                }
                row += 2;
                continue;
            }
            push_times(&mut out, row, weight);
            row += 1;
        }
        Ok(out)
    }

    /// The text of a value; `None`: NULL.
    fn text<'b>(
        &self,
        row: usize,
        column: usize,
        buffer: &'b mut BytesMut,
    ) -> Result<Option<&'b str>, SqlError> {
        let Some(values) = self.columns.get(column) else {
            return Err(SqlError::internal("a sink's row lacks a column"));
        };
        if values.is_null(row) {
            return Ok(None);
        }
        buffer.clear();
        values.put_text(row, buffer)?;
        match std::str::from_utf8(buffer) {
            Ok(text) => Ok(Some(text)),
            Err(_) => Err(SqlError::new(SqlState::DATA_CORRUPTED, "a text is not UTF-8")),
        }
    }
}

fn push_times(out: &mut Vec<Change>, row: usize, weight: i64) {
    let change = if weight > 0 { Change::Insert(row) } else { Change::Delete(row) };
    out.extend(std::iter::repeat_n(change, weight.unsigned_abs() as usize));
}

/// Whether a row and the next have the same key.
fn neighbours(
    batch: &arrow::record_batch::RecordBatch,
    key: &[usize],
) -> Result<impl Fn(usize) -> bool + use<>, SqlError> {
    use arrow::array::make_comparator;
    use arrow::compute::SortOptions;
    let mut comparators = Vec::with_capacity(key.len());
    for &k in key {
        let column: &ArrayRef = batch
            .columns()
            .get(k)
            .ok_or_else(|| SqlError::internal("a sink's key names a column it does not have"))?;
        let comparator = make_comparator(column, column, SortOptions::default())
            .map_err(|e| SqlError::from(ConnectorError::from(e)))?;
        comparators.push(comparator);
    }
    let keyed = !comparators.is_empty();
    Ok(move |row| keyed && comparators.iter().all(|compare| compare(row, row + 1).is_eq()))
}

/// Takes everything and keeps nothing.
struct Blackhole;

#[async_trait]
impl SinkTarget for Blackhole {
    async fn check(&self) -> Result<(), ConnectorError> {
        Ok(())
    }

    async fn publish(&self, _: &Publication) -> Result<(), ConnectorError> {
        Ok(())
    }
}

/// A required option, for the connectors.
fn required<'a>(relation: &'a Relation, name: &str, example: &str) -> Result<&'a str, SqlError> {
    options::required(relation, name, example)
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int64Array, RecordBatch};

    use super::*;

    #[test]
    fn neighbours_of_one_key_are_an_update_and_weights_repeat() {
        let column = |v: &[i64]| Arc::new(Int64Array::from(v.to_vec())) as ArrayRef;
        let batch = RecordBatch::try_from_iter([
            ("k", column(&[1, 1, 2, 3, 4, 4])),
            ("v", column(&[10, 11, 20, 30, 41, 40])),
        ])
        .unwrap();
        let weights = Int64Array::from(vec![-1, 1, 3, -1, 1, -1]);
        let chunk = DeltaChunk::new(batch, Some(weights));
        let rows = Rows::new(&chunk).unwrap();
        use Change::*;
        let keyed = rows.changes(&[0]).unwrap();
        let insert = Insert(2);
        assert_eq!(
            keyed,
            [
                Update { old: 0, new: 1 },
                insert,
                insert,
                insert,
                Delete(3),
                Update { old: 5, new: 4 }
            ]
        );
        let plain = rows.changes(&[]).unwrap();
        assert_eq!(plain.len(), 8);
        assert_eq!(plain[..2], [Delete(0), Insert(1)]);
    }
}
