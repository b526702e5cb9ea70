//! A relation's snapshot and changes as rows: what subscription cursors and SUBSCRIBE read.
//!
//! Rows carry `_epoch`, `_op` (`insert`, `delete`; `progress` for a mark without a row) and `_weight`, then the
//! relation's columns. A feed is pulled: whoever reads slowly holds nobody up, it only falls behind; behind
//! what is kept it ends with an error that says from where to go on.

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray, new_null_array};
use arrow::datatypes::{DataType, Field as ArrowField, Schema, SchemaRef};
use futures::StreamExt;
use futures::stream::BoxStream;
use millrace_common::encoding::datetime::parse_timestamptz_in;
use millrace_common::zone::Zone;
use millrace_common::{DeltaChunk, Epoch, RelationId, SqlError, SqlState, SqlType};
use millrace_rpc::catalog::Relation;

use crate::cluster::{BatchStream, Cluster, FollowStep, ScanRequest};
use crate::dml::rows::arrow_error;
use crate::wire::Field;

/// How often a feed that asks for progress is told that nothing has changed, at least.
const PROGRESS: Duration = Duration::from_secs(1);

/// A relation being followed.
pub struct ChangeFeed {
    cluster: Arc<dyn Cluster>,
    pub relation: Arc<Relation>,
    /// Visible columns.
    columns: Vec<usize>,
    schema: SchemaRef,
    /// Everything through this epoch has been given out.
    seen: Epoch,
    snapshot: Option<BatchStream>,
    /// The change of one epoch, partly given out.
    change: Option<(Epoch, BoxStream<'static, Result<DeltaChunk, SqlError>>)>,
}

impl ChangeFeed {
    /// Follows the relation after `seen`; with `snapshot` its rows at that epoch come first.
    pub async fn new(
        cluster: Arc<dyn Cluster>,
        relation: Arc<Relation>,
        seen: Epoch,
        snapshot: bool,
    ) -> Result<ChangeFeed, SqlError> {
        let columns: Vec<usize> =
            (0..relation.columns.len()).filter(|i| !relation.columns[*i].hidden).collect();
        let mut fields = vec![
            ArrowField::new("_epoch", DataType::Int64, false),
            ArrowField::new("_op", DataType::Utf8, false),
            ArrowField::new("_weight", DataType::Int64, true),
        ];
        for &i in &columns {
            let c = &relation.columns[i];
            fields.push(ArrowField::new(&c.name, c.sql_type()?.to_arrow(), true));
        }
        let snapshot = match snapshot {
            true => {
                let request = ScanRequest { columns: columns.clone(), ..ScanRequest::default() };
                Some(cluster.scan(&relation, seen, request).await?)
            }
            false => None,
        };
        let schema = Arc::new(Schema::new(fields));
        Ok(ChangeFeed { cluster, relation, columns, schema, seen, snapshot, change: None })
    }

    /// Output columns.
    pub fn fields(&self) -> Result<Vec<Field>, SqlError> {
        let field = |name: &str, t: SqlType| Field {
            name: name.to_owned(),
            type_oid: t.oid(),
            type_len: t.typlen(),
            typmod: t.typmod(),
            told: Default::default(),
        };
        let mut fields = vec![
            field("_epoch", SqlType::BigInt),
            field("_op", SqlType::Text),
            field("_weight", SqlType::BigInt),
        ];
        for &i in &self.columns {
            let c = &self.relation.columns[i];
            fields.push(field(&c.name, c.sql_type()?));
        }
        Ok(fields)
    }

    /// Everything through this epoch has been given out.
    pub fn seen(&self) -> Epoch {
        self.seen
    }

    /// The next rows among what is there now and is not newer than `upto`; `None`: there are none.
    pub async fn ready(&mut self, upto: Epoch) -> Result<Option<RecordBatch>, SqlError> {
        loop {
            if let Some(rows) = self.open_rows().await? {
                return Ok(Some(rows));
            }
            match self.cluster.follow_now(RelationId(self.relation.id), self.seen) {
                Some(FollowStep::Change(epoch)) if epoch <= upto => self.open(epoch).await?,
                _ => return Ok(None),
            }
        }
    }

    /// The next rows, however long that takes; with `progress` also rows that say how far nothing more
    /// will come.
    pub async fn next(&mut self, progress: bool) -> Result<RecordBatch, SqlError> {
        loop {
            let before = self.seen;
            let begun = self.snapshot.is_some() || self.change.is_some();
            if let Some(rows) = self.open_rows().await? {
                return Ok(rows);
            }
            if progress && (begun || self.seen > before) {
                return self.mark();
            }
            let id = RelationId(self.relation.id);
            let step = self.cluster.follow(id, self.seen, progress.then_some(PROGRESS)).await?;
            match step {
                FollowStep::Change(epoch) => self.open(epoch).await?,
                FollowStep::Unchanged(epoch) => {
                    self.seen = epoch;
                    return self.mark();
                }
            }
        }
    }

    async fn open(&mut self, epoch: Epoch) -> Result<(), SqlError> {
        let changes = self.cluster.changes(&self.relation, self.seen, epoch).await;
        self.change = Some((epoch, changes.map_err(|e| self.placed(e))?));
        Ok(())
    }

    /// Rows of the snapshot or the change that is open.
    async fn open_rows(&mut self) -> Result<Option<RecordBatch>, SqlError> {
        if let Some(snapshot) = &mut self.snapshot {
            while let Some(batch) = snapshot.next().await {
                let batch = batch?;
                if batch.num_rows() > 0 {
                    return self.rows(self.seen, &DeltaChunk::inserts(batch)).map(Some);
                }
            }
            self.snapshot = None;
        }
        while let Some((epoch, changes)) = &mut self.change {
            let epoch = *epoch;
            match changes.next().await {
                Some(Ok(chunk)) => {
                    let batch = chunk.batch.project(&self.columns).map_err(arrow_error)?;
                    let chunk = DeltaChunk::new(batch, chunk.weights);
                    if !chunk.is_empty() {
                        return self.rows(epoch, &chunk).map(Some);
                    }
                }
                Some(Err(e)) => return Err(self.placed(e)),
                None => {
                    self.change = None;
                    self.seen = epoch;
                }
            }
        }
        Ok(None)
    }

    fn rows(&self, epoch: Epoch, chunk: &DeltaChunk) -> Result<RecordBatch, SqlError> {
        let n = chunk.num_rows();
        let op = |i| if chunk.weight(i) > 0 { "insert" } else { "delete" };
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(Int64Array::from_value(epoch.0 as i64, n)),
            Arc::new(StringArray::from_iter_values((0..n).map(op))),
            Arc::new(chunk.weights_array()),
        ];
        columns.extend(chunk.batch.columns().iter().cloned());
        RecordBatch::try_new(Arc::clone(&self.schema), columns).map_err(arrow_error)
    }

    /// Nothing more will come through `seen`.
    fn mark(&self) -> Result<RecordBatch, SqlError> {
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(Int64Array::from_value(self.seen.0 as i64, 1)),
            Arc::new(StringArray::from(vec!["progress"])),
        ];
        let rest = self.schema.fields().iter().skip(2);
        columns.extend(rest.map(|f| new_null_array(f.data_type(), 1)));
        RecordBatch::try_new(Arc::clone(&self.schema), columns).map_err(arrow_error)
    }

    /// Says from where to go on.
    fn placed(&self, e: SqlError) -> SqlError {
        if e.state != SqlState::SNAPSHOT_TOO_OLD {
            return e;
        }
        SqlError::new(
            e.state,
            format!("the changes of \"{}\" after epoch {} are no longer kept", self.relation.name, self.seen),
        )
        .with_detail(e.into_parts().message)
        .with_hint("Start again with the snapshot, and keep changes for longer with CREATE SUBSCRIPTION … WITH (retention = …).")
    }
}

/// An epoch or a point in time as a statement gives it: an epoch's number, or a timestamp.
pub fn parse_epoch(text: &str, zone: Option<Zone>) -> Result<Epoch, SqlError> {
    if let Ok(number) = text.trim().parse::<u64>() {
        return Ok(Epoch(number));
    }
    let us = parse_timestamptz_in(text, zone.unwrap_or(Zone::Fixed(0)))?;
    u64::try_from(us / 1_000).map(Epoch::from_millis).map_err(|_| {
        SqlError::new(SqlState::INVALID_PARAMETER_VALUE, format!("\"{text}\" is before 1970"))
    })
}
