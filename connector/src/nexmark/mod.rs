//! The Nexmark generator as a source: one stream of persons, auctions and bids (1 : 3 : 46),
//! deterministic by seed and event number, three relations over it.
//!
//! The events are those of the public `nexmark` crate with its default settings but for the gap
//! between events, bit for bit (a test compares), made column by column: only the columns a plan
//! reads are built, and random draws that only feed other columns are skipped or stopped at.
//!
//! Split `i` of `n` holds the events whose number is `i` modulo `n`; offset `k` of a split is its
//! `k`-th event of any kind, so offsets count events, not rows.

mod events;
mod reader;
mod rng;

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use async_trait::async_trait;
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_rpc::catalog::Relation;

use crate::generated::Pace;
use crate::{ConnectorError, Known, OpenResult, Polled, ROW_ID, ReadFrom, Source, options};

pub use events::Kind;

/// Event time of event 0: 2015-07-15 00:00:00 UTC, in milliseconds.
pub const BASE_TIME_MS: u64 = 1_436_918_400_000;
/// The seed whose events equal the crate's.
pub const DEFAULT_SEED: u64 = 42;
/// Event time between two events, in nanoseconds.
const DEFAULT_GAP_NS: u64 = 10_000;

const OPTIONS: &[&str] = &[
    "connector",
    "table",
    "event.num",
    "event.rate",
    "event.gap.ns",
    "splits",
    "seed",
    "rate_limit",
];

/// What decides the stream's content.
#[derive(Clone, Copy, Debug)]
pub struct StreamConfig {
    /// Microseconds of event time an event, as the crate's f32 arithmetic has it.
    pub gap_us: f32,
    /// Mixed into every event's seed; 0 for [`DEFAULT_SEED`].
    pub seed_mask: u64,
}

impl StreamConfig {
    pub fn new(gap_ns: u64, seed: u64) -> StreamConfig {
        let differs = seed ^ DEFAULT_SEED;
        StreamConfig {
            gap_us: gap_ns as f32 / 1_000.0,
            seed_mask: differs.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        }
    }
}

/// One of the three relations.
pub struct NexmarkSource {
    kind: Kind,
    /// Which generated column each declared column is; `ROW_ID` last.
    columns: Vec<usize>,
    schema: SchemaRef,
    config: StreamConfig,
    pace: Pace,
}

impl NexmarkSource {
    /// Reads and checks the WITH clause and the declared columns.
    pub fn new(relation: &Relation) -> Result<NexmarkSource, SqlError> {
        options::only_known(relation, OPTIONS)?;
        let table = options::required(relation, "table", "'bid'")?;
        let kind = Kind::parse(table).ok_or_else(|| {
            options::invalid(format!("invalid value for option \"table\": \"{table}\""))
                .with_hint("Give 'person', 'auction' or 'bid'.")
        })?;
        let event_num = options::number(relation, "event.num", u64::MAX, 0, "a number of events")?;
        let event_rate =
            options::number(relation, "event.rate", 0, 0, "events a second, 0 for no limit")?;
        let gap = options::number(
            relation,
            "event.gap.ns",
            DEFAULT_GAP_NS,
            1,
            "nanoseconds of event time between two events",
        )?;
        let splits =
            options::number(relation, "splits", 1u32, 1, "a number of splits, at least 1")?;
        let seed = options::number(relation, "seed", DEFAULT_SEED, 0, "a number")?;
        let (columns, schema) = resolve_columns(relation, kind)?;
        Ok(NexmarkSource {
            kind,
            columns,
            schema,
            config: StreamConfig::new(gap, seed),
            pace: Pace { splits, total: event_num, rate: event_rate },
        })
    }

    fn reader(&self, split: u32, offset: u64, columns: &[usize]) -> OpenResult {
        if split >= self.pace.splits {
            return Err(ConnectorError::NoSuchSplit(split));
        }
        let wanted = columns
            .iter()
            .map(|&c| self.columns.get(c).copied().ok_or(ConnectorError::NoSuchColumn(c)))
            .collect::<Result<Vec<_>, _>>()?;
        let schema = Arc::new(self.schema.project(columns)?);
        Ok(Box::new(reader::Reader {
            kind: self.kind,
            config: self.config,
            wanted,
            schema,
            splits: u64::from(self.pace.splits),
            split: u64::from(split),
            offset,
        }))
    }
}

#[async_trait]
impl Source for NexmarkSource {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    async fn poll(&self, known: &Known) -> Result<Polled, ConnectorError> {
        Ok(self.pace.poll(known))
    }

    fn open(&self, at: ReadFrom, columns: &[usize]) -> OpenResult {
        self.reader(at.split, at.offset, columns)
    }
}

/// Maps declared columns to generated ones by name; any order and any subset is fine.
fn resolve_columns(relation: &Relation, kind: Kind) -> Result<(Vec<usize>, SchemaRef), SqlError> {
    let known = kind.columns();
    let mut positions = Vec::new();
    let mut fields = Vec::new();
    for column in relation.columns.iter().filter(|c| !c.hidden) {
        let Some(at) = known.iter().position(|(name, _)| *name == column.name) else {
            let names: Vec<&str> = known.iter().map(|(n, _)| *n).collect();
            return Err(SqlError::new(
                SqlState::UNDEFINED_COLUMN,
                format!("nexmark {} has no column \"{}\"", kind.name(), column.name),
            )
            .with_hint(format!("Its columns are: {}.", names.join(", "))));
        };
        let declared = column.sql_type()?;
        let expected = known[at].1;
        if declared.to_arrow() != expected.to_arrow() {
            return Err(SqlError::new(
                SqlState::DATATYPE_MISMATCH,
                format!(
                    "column \"{}\" of nexmark {} is {expected}, not {declared}",
                    column.name,
                    kind.name()
                ),
            ));
        }
        positions.push(at);
        fields.push(Field::new(&column.name, expected.to_arrow(), column.nullable));
    }
    positions.push(known.len());
    fields.push(Field::new(ROW_ID, DataType::Int64, false));
    Ok((positions, Arc::new(Schema::new(fields))))
}

pub(crate) type ColumnList = &'static [(&'static str, SqlType)];

#[cfg(test)]
mod tests;
