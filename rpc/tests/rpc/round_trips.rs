//! Every request arrives as it was sent, and every answer comes back as it was given: between processes, and in one
//! through bytes.

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use futures::StreamExt;
use millrace_common::{DeltaChunk, Epoch, Generation, RelationId, TableId};
use millrace_rpc::call_error::CallError;
use millrace_rpc::catalog::Relation;
use millrace_rpc::control::{
    DefineAnswer, DefineRequest, GiveBackLocksRequest, Heartbeat, ReadEpoch, SessionsTold,
    TakeLockAnswer, TakeLockRequest,
};
use millrace_rpc::dml::{
    DmlAnswer, DmlKind, EntryFlag, InsertConflict, LoadKind, OnRepeat, ReadRows, ReadSet,
    TableChange, TableRead,
};
use millrace_rpc::log::{LogRecord, RegisterProcess};
use millrace_rpc::read::{KeyRange, ReadAnswer, ReadRequest, WantedRows};
use millrace_rpc::rows::encoded_batches;
use millrace_rpc::services::{CompactionTask, Cut, LivePart, MergedTable, PartKind, StartJob};
use millrace_rpc::source_poll::PollSource;
use millrace_rpc::stream::{Acknowledged, AppliedRecord, EntryOutcome, StreamError, StreamMessage};
use millrace_rpc::version::{StatementId, VersionEdit};

use crate::fake::{Clients, FAILING, LIMIT, REFUSALS, encoded, error, found, networked, polled};
use crate::filled;

const JOB: RelationId = RelationId(7);
const GENERATION: Generation = Generation(3);
const STATEMENT: StatementId = StatementId { frontend: 2, number: 1 << 40 };

async fn both<F: Future<Output = ()>>(test: impl Fn(Clients) -> F) {
    tokio::time::timeout(LIMIT, test(encoded())).await.unwrap();
    tokio::time::timeout(LIMIT, test(networked().await)).await.unwrap();
}

fn shown(what: impl std::fmt::Debug) -> Vec<String> {
    vec![format!("{what:?}")]
}

fn relation() -> Relation {
    filled::one("millrace.catalog.Relation")
}

fn record() -> AppliedRecord {
    let record: LogRecord = filled::one("millrace.log.LogRecord");
    let outcome = |at: usize| match at % 2 {
        0 => EntryOutcome::Applied(Epoch(at as u64)),
        _ => EntryOutcome::Void("void".into()),
    };
    let outcomes: Vec<_> = (0..record.entries.len()).map(outcome).collect();
    AppliedRecord { record: Arc::new(record), outcomes: outcomes.into() }
}

fn rows(n: usize, width: usize) -> DeltaChunk {
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..n as i64));
    let texts: ArrayRef =
        Arc::new(StringArray::from_iter_values((0..n).map(|i| format!("{i:width$}"))));
    let batch = RecordBatch::try_from_iter([("id", ids), ("text", texts)]).unwrap();
    let weights = Int64Array::from_iter_values((0..n).map(|i| if i % 2 == 0 { 1 } else { -1 }));
    DeltaChunk::new(batch, Some(weights))
}

#[tokio::test]
async fn compute() {
    both(async |clients| {
        let (compute, fake) = (&clients.compute, &clients.fake);
        let start = StartJob { job: JOB, generation: GENERATION, record: 1 << 40, parallelism: 4 };
        compute.start_job(start).await.unwrap();
        assert_eq!(fake.seen(), shown(start));
        assert_eq!(compute.adopt_job(JOB, GENERATION, 0, 3).await.unwrap(), None);
        let running = compute.adopt_job(JOB, GENERATION, 1 << 40, 4).await.unwrap().unwrap();
        assert_eq!((running.number, running.horizon), ((1 << 40) + 1, Epoch((1 << 40) + 2)));
        assert_eq!(running.sealed, vec![filled::one("millrace.version.JobCommit"); 2]);
        assert!(running.is_cutting);
        let asked = [(JOB, GENERATION, 0, 3), (JOB, GENERATION, 1u64 << 40, 4)].map(shown);
        assert_eq!(fake.seen(), asked.concat());
        let failed = compute.adopt_job(FAILING, GENERATION, 1, 0).await.unwrap_err();
        assert_eq!(failed.message, error().message);
        fake.seen();
        let cut = Cut { epoch: Epoch(1 << 50), number: 9, record: 17 };
        let commit = compute.cut(JOB, GENERATION, cut).await.unwrap();
        assert_eq!(commit, filled::one("millrace.version.JobCommit"));
        assert_eq!(fake.seen(), shown((JOB, GENERATION, cut)));
        let message =
            StreamMessage { records: vec![record(), record()], horizons: vec![(JOB, Epoch(8))] };
        let at = compute.apply_records(message.clone()).await.unwrap();
        assert_eq!(at, Acknowledged { received: 9, behind: vec![(RelationId(3), 8)] });
        assert_eq!(fake.seen(), shown(message));
        let gap = compute.apply_records(StreamMessage::default()).await;
        assert!(matches!(gap, Err(StreamError::Gap { next: 4 })));
        let later = compute.applied_since(at.clone()).await;
        assert_eq!(later, Acknowledged { received: 10, ..at });
        let edit: VersionEdit = filled::one("millrace.version.VersionEdit");
        compute.prepare_edit(JOB, GENERATION, edit.clone()).await;
        assert_eq!(fake.seen(), shown((JOB, GENERATION, edit)));
        compute.abort_epoch(JOB, GENERATION, error()).await;
        let seen = fake.seen().remove(0);
        assert!(seen.contains("a key exists") && seen.contains("t_pkey"), "{seen}");
        let handles = vec![filled::one("millrace.version.PublishHandle")];
        compute.publish(JOB, GENERATION, handles.clone()).await.unwrap();
        assert_eq!(fake.seen(), shown((JOB, GENERATION, handles)));
        compute.stop_job(JOB, GENERATION).await;
        assert_eq!(fake.seen(), shown((JOB, GENERATION)));
        for record in [0, 1, 1 << 40] {
            let poll = PollSource {
                source: JOB,
                reader: RelationId(8),
                record,
                offsets: vec![(0, 1 << 40), (1 << 31, 2)],
                started_ms: 3,
                now_ms: 1 << 41,
            };
            let answer = compute.poll_source(poll.clone()).await.unwrap();
            assert_eq!(shown(answer), shown(polled(record)));
            assert_eq!(fake.seen(), shown(poll));
        }
        let poll = PollSource { source: FAILING, ..PollSource::default() };
        let failed = compute.poll_source(poll).await.unwrap_err();
        assert_eq!(failed.message, error().message);
    })
    .await;
}

#[tokio::test]
async fn compactor() {
    both(async |clients| {
        let cleaned = MergedTable { position: Some(0), bound: Some(-(1 << 40)) };
        for table in [MergedTable::default(), cleaned] {
            let task = CompactionTask {
                task_id: 1,
                job: JOB,
                relation: relation(),
                inputs: vec![filled::one("millrace.version.RunMeta")],
                table,
                target_level: 2,
                horizon: Epoch(3),
                bottom: true,
            };
            let edit = clients.compactor.compact(task.clone()).await.unwrap();
            assert_eq!(edit, filled::one("millrace.version.VersionEdit"));
            assert_eq!(clients.fake.seen(), shown(task));
        }
        let kinds =
            [PartKind::Run { run_id: 4, meta_length: 5 }, PartKind::Slice, PartKind::Staged];
        let part =
            |kind| LivePart { job: JOB, object: "o".into(), offset: 1 << 40, length: 9, kind };
        let parts: Vec<LivePart> = kinds.map(part).into();
        let moved = clients.compactor.copy_parts(parts.clone()).await.unwrap();
        assert_eq!(moved, filled::one("millrace.log.MoveParts"));
        assert_eq!(clients.fake.seen(), shown(parts));
    })
    .await;
}

#[tokio::test]
async fn meta_for_workers() {
    both(async |clients| {
        let (meta, fake) = (&clients.meta, &clients.fake);
        let process: RegisterProcess = filled::one("millrace.log.RegisterProcess");
        assert_eq!(meta.register_process(process.clone()).await.unwrap(), 41);
        assert_eq!(fake.seen(), shown(process));
        let mut records = meta.follow(1 << 40).await.unwrap();
        let first = records.next().await.unwrap().unwrap();
        assert_eq!(first.horizons, [(RelationId(2), Epoch(1 << 40))]);
        let gap = records.next().await.unwrap();
        assert!(matches!(gap, Err(CallError::Gap { next: 8 })));
        meta.request_cut(JOB).await.unwrap();
        meta.request_compaction(JOB).await.unwrap();
        assert_eq!(fake.seen(), [shown(("cut", JOB)), shown(("compaction", JOB))].concat());
        let edit =
            filled::one::<millrace_rpc::version::VersionEdit>("millrace.version.VersionEdit");
        assert!(meta.commit_edit(JOB, GENERATION, edit.clone()).await.unwrap());
        assert_eq!(fake.seen(), shown((JOB, GENERATION, edit)));
        meta.report_failure(JOB, GENERATION, error()).await.unwrap();
        assert!(fake.seen().remove(0).contains("a key exists"));
        let heartbeat: Heartbeat = filled::one("millrace.rpc.Heartbeat");
        assert_eq!(meta.beat(heartbeat.clone()).await.unwrap(), 77);
        assert_eq!(fake.seen(), shown(heartbeat));
        assert_eq!(meta.jobs().await.unwrap(), filled::one("millrace.rpc.JobReports"));
    })
    .await;
}

#[tokio::test]
async fn meta_for_frontends() {
    both(async |clients| {
        let (meta, fake) = (&clients.meta, &clients.fake);
        for definition in filled::all::<DefineRequest>("millrace.rpc.DefineRequest") {
            let answer = meta.define(definition.clone()).await.unwrap();
            assert_eq!(answer, DefineAnswer { relation: Some(16384), record: 12 });
            assert_eq!(fake.seen(), shown(definition));
        }
        meta.wait_created(JOB).await.unwrap();
        meta.wait_rebuilt(JOB).await.unwrap();
        fake.seen();
        for timeout in [None, Some(Duration::from_millis(1500))] {
            let read = meta.read_epoch(&[JOB, FAILING], timeout, true).await.unwrap();
            assert_eq!(read, ReadEpoch { epoch: Epoch(300), record: 20, catalog_version: 12 });
            assert_eq!(fake.seen(), shown(([JOB, FAILING], timeout, true)));
        }
        meta.flush().await.unwrap();
        assert_eq!(fake.seen(), shown("flush"));
        let told: SessionsTold = filled::one("millrace.rpc.SessionsTold");
        let wanted = meta.tell_sessions(told.clone()).await.unwrap();
        assert_eq!(wanted, filled::one("millrace.rpc.SessionsWanted"));
        assert_eq!(fake.seen(), shown(told));
        let sessions = meta.sessions(5).await.unwrap();
        assert_eq!(sessions, filled::one("millrace.rpc.SessionsAnswer"));
        assert_eq!(fake.seen(), shown(5u64));
        let take: TakeLockRequest = filled::one("millrace.rpc.TakeLockRequest");
        let answer = meta.take_lock(take).await.unwrap();
        assert_eq!(answer, TakeLockAnswer { taken: true, term: 21 });
        assert_eq!(fake.seen(), shown(take));
        let back: GiveBackLocksRequest = filled::one("millrace.rpc.GiveBackLocksRequest");
        meta.give_back_locks(back.clone()).await.unwrap();
        assert_eq!(fake.seen(), shown(back));
        assert_eq!(meta.locks().await.unwrap(), vec![filled::one("millrace.rpc.ListedLock")]);
    })
    .await;
}

#[tokio::test]
async fn statements() {
    both(async |clients| {
        let (dml, fake) = (&clients.dml, &clients.fake);
        let before = encoded_batches();
        let on_conflict = InsertConflict::Nothing;
        let kinds = [
            DmlKind::Insert { on_conflict },
            DmlKind::Feed { on_conflict: InsertConflict::Overwrite },
            DmlKind::Change,
            DmlKind::Upsert,
            DmlKind::Replicate,
        ];
        for (at, kind) in kinds.into_iter().enumerate() {
            // The last one in several messages.
            let delta = if at == 4 { rows(3000, 2000) } else { rows(3, 1) };
            let entered = EntryFlag::default();
            let applied = dml.apply_dml(JOB, STATEMENT, delta.clone(), kind, &entered);
            let finish = async {
                entered.wait().await;
                fake.finish.notify_one();
            };
            let (applied, ()) = tokio::join!(applied, finish);
            let rows = delta.num_rows() as u64;
            let expected = DmlAnswer::Applied { epoch: Epoch(300), rows, late: 1 };
            assert_eq!(applied.unwrap(), expected);
            let sent = (JOB, STATEMENT, &delta.batch, delta.weights_array(), kind);
            assert!(fake.seen() == shown(sent), "{kind:?}");
        }
        assert!(encoded_batches() > before + 9, "one batch a message");
        let entered = EntryFlag::default();
        let none = dml.apply_dml(JOB, STATEMENT, rows(0, 1), DmlKind::Change, &entered).await;
        assert_eq!((none.unwrap(), entered.is_set()), (DmlAnswer::Conflict, false));
        let failed = dml.apply_dml(FAILING, STATEMENT, rows(1, 1), DmlKind::Change, &entered).await;
        assert!(matches!(failed, Err(CallError::Sql(e)) if e.message == error().message));
        assert_eq!(dml.allocate_row_ids(JOB, 8).await.unwrap(), 1008);
        fake.seen();
        for tables in [&[][..], &[JOB], &[JOB, JOB]] {
            let is_over = dml.abandon(tables, STATEMENT).await.unwrap();
            assert_eq!(is_over, tables.len() == 1);
            assert_eq!(fake.seen(), shown((tables, STATEMENT)));
        }
        assert!(matches!(dml.abandon(&[FAILING], STATEMENT).await, Err(CallError::Sql(_))));
    })
    .await;
}

#[tokio::test]
async fn reads() {
    both(async |clients| {
        let (reads, fake) = (&clients.reads, &clients.fake);
        reads.connect().await.unwrap();
        let range = |from: &[u8], until: &[u8]| KeyRange {
            from: from.to_vec().into(),
            until: until.to_vec().into(),
        };
        let request = |rows, limit, commits| ReadRequest {
            job: JOB,
            generation: GENERATION,
            commits,
            epoch: Epoch(1 << 50),
            table: TableId(70),
            columns: vec![2, 0],
            rows,
            limit,
            max_bytes: 1 << 40,
        };
        let keys = vec![vec![0, 0xff].into(), vec![].into()];
        let ranges = vec![range(&[], &[1]), range(&[0, 0xff], &[1, 0])];
        for (rows, limit) in [
            (WantedRows::Keys(keys), None),
            (WantedRows::Ranges(ranges), Some(1 << 33)),
            (WantedRows::Any, Some(0)),
        ] {
            let asked = request(rows, limit, 1 << 40);
            let ReadAnswer::Rows(answer) = reads.read(asked.clone()).await.unwrap() else {
                panic!("it is not refused")
            };
            assert_eq!(answer.positions, found().positions);
            assert_eq!(answer.chunks.len(), found().chunks.len());
            for (told, expected) in answer.chunks.iter().zip(found().chunks) {
                assert_eq!(told.batch, expected.batch);
                assert_eq!(told.weights_array(), expected.weights_array());
            }
            assert_eq!(fake.seen(), shown(asked));
        }
        for (commits, why) in (0..).zip(REFUSALS) {
            let answer = reads.read(request(WantedRows::Any, None, commits)).await.unwrap();
            assert!(matches!(answer, ReadAnswer::Refused(told) if told == why), "{answer:?}");
        }
        let failing = ReadRequest { job: FAILING, ..request(WantedRows::Any, None, 0) };
        let failed = reads.read(failing).await;
        assert!(matches!(failed, Err(CallError::Sql(e)) if e.message == error().message));
    })
    .await;
}

#[tokio::test]
async fn transactions() {
    both(async |clients| {
        let keys = vec![vec![0, 0xff].into(), vec![].into()];
        let read = |rows| TableRead { table: JOB, epoch: Epoch(1 << 50), rows };
        let reads = [ReadRows::All, ReadRows::Keys(keys), ReadRows::Where(vec![1].into())];
        let read = ReadSet { reads: reads.map(read).into(), locks: Some(77) };
        let change = |table, delta| TableChange { table, kind: DmlKind::Change, delta };
        let changes = vec![
            change(JOB, rows(2000, 2000)),
            change(FAILING, rows(1, 1)),
            change(JOB, rows(0, 1)),
        ];
        let entered = EntryFlag::default();
        let applied =
            clients.dml.apply_transaction(STATEMENT, changes.clone(), read.clone(), &entered).await;
        assert_eq!((applied.unwrap(), entered.is_set()), (DmlAnswer::Conflict, true));
        let sent: Vec<_> = changes
            .iter()
            .map(|c| (c.table, c.kind, &c.delta.batch, c.delta.weights_array()))
            .collect();
        assert!(clients.fake.seen() == shown((STATEMENT, sent, read)));
    })
    .await;
}

#[tokio::test]
async fn loads() {
    both(async |clients| {
        let (dml, fake) = (&clients.dml, &clients.fake);
        let kinds = [
            LoadKind::Insert { on_conflict: InsertConflict::Error },
            LoadKind::Replace { read_at: Epoch(4) },
            LoadKind::Change { read_at: Epoch(5), on_repeat: OnRepeat::SecondTime },
        ];
        for kind in kinds {
            let mut load = dml.begin_load(JOB, STATEMENT, kind).await.unwrap();
            assert_eq!(fake.seen(), shown((JOB, STATEMENT, kind)));
            assert!(!load.append(rows(1, 1)).await.unwrap());
            assert!(load.append(rows(3000, 2000)).await.unwrap());
            load.read_at(Epoch(9)).await.unwrap();
            load.rest_on(ReadSet::default()).await.unwrap();
            let entered = EntryFlag::default();
            let applied = load.finish(&entered).await.unwrap();
            assert_eq!(applied, DmlAnswer::Applied { epoch: Epoch(5), rows: 3001, late: 0 });
            assert!(entered.is_set());
            assert_eq!(fake.seen(), [shown(Epoch(9)), shown(ReadSet::default())].concat());
        }
        let mut load = dml.begin_load(JOB, STATEMENT, kinds[0]).await.unwrap();
        let failed = load.append(rows(0, 1)).await;
        assert!(matches!(failed, Err(CallError::Sql(e)) if e.message == error().message));
        assert!(dml.begin_load(FAILING, STATEMENT, kinds[0]).await.is_err());
    })
    .await;
}

#[tokio::test]
async fn locks_and_loads_end_when_their_holder_drops_them() {
    both(async |clients| {
        let (dml, fake) = (&clients.dml, &clients.fake);
        assert!(dml.lock_tables(&[]).await.unwrap().is_none());
        let locks = dml.lock_tables(&[JOB, FAILING]).await.unwrap().unwrap();
        assert_eq!((locks.id, *fake.dropped.borrow()), (77, 0));
        drop(locks);
        fake.was_dropped().await;
        fake.dropped.send_replace(0);
        let kind = LoadKind::Insert { on_conflict: InsertConflict::Error };
        let load = dml.begin_load(JOB, STATEMENT, kind).await.unwrap();
        assert_eq!(*fake.dropped.borrow(), 0);
        drop(load);
        fake.was_dropped().await;
    })
    .await;
}
