//! What the worker says of sources, as the log describes them.

use millrace_common::SqlState;
use millrace_connector::ROW_ID;
use millrace_rpc::catalog::OptionEntry;
use millrace_rpc::source_poll::{More, PollSource};

use super::*;

/// A connector that makes numbers from 0 on, both columns the same.
pub(super) fn numbers() -> Vec<OptionEntry> {
    let option = |(name, value): (&str, &str)| OptionEntry {
        name: name.to_string(),
        value: value.to_string(),
    };
    let options =
        [("connector", "datagen"), ("fields.id.kind", "sequence"), ("fields.v.kind", "sequence")];
    options.map(option).to_vec()
}

impl Cluster {
    /// A source of numbers, both columns the same.
    pub async fn source(&self, id: u32) -> JobId {
        let mut relation = relation(id, RelationKind::Source);
        relation.options = numbers();
        let row_id =
            Column { name: ROW_ID.to_string(), hidden: true, ..relation.columns[0].clone() };
        relation.columns.push(row_id);
        relation.append_only = true;
        let version = JobVersion { epoch: self.meta.next_epoch().0, ..JobVersion::default() };
        self.end_at(Epoch(version.epoch), 0);
        let id = self.register(logged(relation, version, Vec::new(), 1), None);
        self.start(id).await.unwrap();
        id
    }

    /// So many rows of the source are there at an epoch.
    pub fn end_at(&self, epoch: Epoch, rows: u64) {
        self.meta.offsets.lock().push((epoch.0, vec![(0, rows)]));
    }
}

/// Rows that there are ten seconds after the source's creation.
async fn rows_of(c: &Cluster, source: JobId) -> Result<Vec<(u32, u64)>, SqlError> {
    let poll = PollSource { source, now_ms: 10_000, ..PollSource::default() };
    let polled = c.worker.poll_source(poll).await?;
    assert_eq!((polled.more, polled.offsets_per_row), (More::WithTime, 1));
    Ok(polled.available)
}

#[tokio::test]
async fn a_source_is_asked_as_the_log_describes_it_now() {
    let c = Cluster::new(ExecOptions::default()).await;
    let unknown = rows_of(&c, RelationId(1)).await.unwrap_err();
    assert_eq!(unknown.state, SqlState::UNDEFINED_TABLE);
    let source = c.source(1).await;
    assert_eq!(rows_of(&c, source).await.unwrap(), [(0, 100)]);
    let alter = |name: &str, value: &str| {
        let option = OptionEntry { name: name.to_string(), value: value.to_string() };
        let mut jobs = c.meta.jobs.lock();
        jobs.get_mut(&source).unwrap().start.relation.options.push(option);
    };
    alter("rows_per_second", "50");
    assert_eq!(rows_of(&c, source).await.unwrap(), [(0, 500)]);
    alter("speed", "9");
    let refused = rows_of(&c, source).await.unwrap_err();
    assert!(refused.message.contains("\"speed\""), "{refused}");
}
