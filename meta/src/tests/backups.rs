//! Named backups: what they name stays until they are released, whoever leads, and can be restored elsewhere.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{RelationId, SqlError};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::log::{CreateBackup, DeleteObjects, EditVersion, Entry, SetSetting};
use millrace_rpc::operator::{BackupOverview, OperatorService};
use millrace_rpc::version::{RunMeta, VersionEdit};
use millrace_storage::sim::{Faults, Profile, RequestKind, SimStore};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{ObjectStore, ObjectStoreExt};

use super::fake::Cluster;
use super::fold::object;
use super::{relation, table, view};
use crate::backup::copy::{Copied, Purpose, Which, copy};
use crate::backup::files::BackupFiles;
use crate::log::LogStore;
use crate::state::MetaState;

/// Rounds of the collector until all that may go is gone: processes have applied the last record by then.
const ROUNDS: usize = 20;
const RETENTION: Duration = Duration::from_millis(100);
/// Of a copy that has not ended.
const MARK: &str = "meta/copying";

async fn exists(store: &dyn ObjectStore, name: &str) -> bool {
    store.head(&Path::from(name)).await.is_ok()
}

async fn collect(cluster: &Cluster) {
    for _ in 0..ROUNDS {
        tokio::time::sleep(RETENTION).await;
        cluster.meta.collection(true).await.unwrap();
    }
}

/// The table has a run in a new object.
async fn add_run(cluster: &Cluster, table: RelationId, n: u8) -> String {
    let name = object(n);
    cluster.store.put(&Path::from(name.as_str()), name.clone().into()).await.unwrap();
    let state = cluster.meta.state_for_tests();
    let add = RunMeta {
        run_id: u64::from(n),
        table_id: state.relations[&table].first_table_id,
        object: name.clone(),
        length: name.len() as u64,
        ..RunMeta::default()
    };
    let edit = VersionEdit { add_runs: vec![add], ..VersionEdit::default() };
    let edit = EditVersion { job: table.0, edit, ..EditVersion::default() };
    cluster.meta.apply(Entry::EditVersion(edit)).await.unwrap();
    name
}

/// A table with a run, where garbage goes soon.
async fn with_run() -> (Cluster, RelationId, String) {
    let (cluster, t) = Cluster::with_table().await;
    let value = Some(format!("{} ms", RETENTION.as_millis()));
    let retention = SetSetting { name: "object_retention".into(), value };
    cluster.meta.apply(Entry::SetSetting(retention)).await.unwrap();
    let run = add_run(&cluster, t, 1).await;
    (cluster, t, run)
}

async fn backups(cluster: &Cluster) -> Vec<BackupOverview> {
    cluster.meta.backups().await.unwrap().backups
}

async fn files(cluster: &Cluster) -> usize {
    LogStore::new(Arc::clone(&cluster.store) as _).list_backups().await.unwrap().len()
}

async fn restore(cluster: &Cluster, to: &Arc<InMemory>, which: &str) -> Result<Copied, SqlError> {
    let from = Arc::clone(&cluster.store) as Arc<dyn ObjectStore>;
    copy(from, Arc::clone(to) as _, "here", Which::Backup(which), Purpose::Run).await
}

async fn opened(store: &Arc<InMemory>) -> MetaState {
    LogStore::new(Arc::clone(store) as _).open().await.unwrap().state
}

#[tokio::test(start_paused = true)]
async fn what_a_backup_names_stays_until_it_is_released_whoever_leads() {
    let (cluster, t, run) = with_run().await;
    let made = cluster.meta.create_backup("one".into(), None).await.unwrap();
    assert_eq!((made.objects, made.bytes, made.kept_objects), (1, run.len() as u64, 0));
    assert!(made.is_complete && made.record == cluster.meta.record());
    let later = add_run(&cluster, t, 2).await;
    cluster.meta.drop_relations(&[t]).await.unwrap();
    collect(&cluster).await;
    assert!(exists(&*cluster.store, &run).await, "the backup names it");
    assert!(!exists(&*cluster.store, &later).await, "it came after the backup");
    let delete = Entry::DeleteObjects(DeleteObjects { names: vec![run.clone()] });
    assert!(cluster.meta.apply(delete).await.is_err(), "the log does not allow it either");

    let cluster = cluster.restart().await;
    collect(&cluster).await;
    assert!(exists(&*cluster.store, &run).await, "the next leader knows of it");
    assert_eq!(backups(&cluster).await[0], BackupOverview { kept_objects: 1, ..made });
    let again = cluster.meta.create_backup("one".into(), None).await.unwrap_err();
    assert!(SqlError::from(again).message.contains("there is a backup \"one\" already"));

    cluster.meta.release_backup("one".into(), None).await.unwrap();
    assert_eq!((backups(&cluster).await.len(), files(&cluster).await), (0, 0));
    collect(&cluster).await;
    assert!(!exists(&*cluster.store, &run).await, "nothing names it any more");
    let unknown = cluster.meta.release_backup("one".into(), None).await.unwrap_err();
    assert!(SqlError::from(unknown).message.contains("there is no backup \"one\""));
}

#[tokio::test(start_paused = true)]
async fn a_backup_that_was_left_half_way_is_brought_to_its_end() {
    let (cluster, _, _) = with_run().await;
    for name in ["a", "b"] {
        // The leader that was asked for it ends here.
        let entry = CreateBackup { name: name.into() };
        cluster.meta.apply(Entry::CreateBackup(entry)).await.unwrap();
    }
    assert_eq!(files(&cluster).await, 0);
    let error = restore(&cluster, &Arc::default(), "a").await.unwrap_err();
    assert!(error.message.contains("is not complete"), "{error:?}");
    let cluster = cluster.restart().await;
    collect(&cluster).await;
    assert_eq!(files(&cluster).await, 2, "the collector's round wrote them");
    assert!(backups(&cluster).await.iter().all(|b| b.is_complete));
    assert!(restore(&cluster, &Arc::default(), "a").await.is_ok());
    // And one that ended between the record of a release and what follows from it.
    let release = millrace_rpc::log::ReleaseBackup { name: "a".into() };
    cluster.meta.apply(Entry::ReleaseBackup(release)).await.unwrap();
    let cluster = cluster.restart().await;
    collect(&cluster).await;
    assert_eq!(files(&cluster).await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_backup_whose_state_cannot_be_written_keeps_no_other_from_its_own() {
    let (cluster, t, _) = with_run().await;
    let entry = CreateBackup { name: "lost".into() };
    cluster.meta.apply(Entry::CreateBackup(entry)).await.unwrap();
    // Its leader ended there, and the log has been cut off since.
    add_run(&cluster, t, 2).await;
    let log = LogStore::new(Arc::clone(&cluster.store) as _);
    log.put_snapshot(&cluster.meta.state_for_tests()).await.unwrap();
    assert!(log.delete(vec![LogStore::record_path(1)]).await.is_empty());
    let made = cluster.meta.create_backup("one".into(), None).await.unwrap();
    assert!(made.is_complete);
    let complete: Vec<bool> = backups(&cluster).await.iter().map(|b| b.is_complete).collect();
    assert_eq!(complete, [false, true]);
    assert!(restore(&cluster, &Arc::default(), "one").await.is_ok());
    cluster.meta.release_backup("lost".into(), None).await.unwrap();
    assert_eq!(backups(&cluster).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_knows_of_no_later_one_leaves_the_state_of_its_backup_alone() {
    let (cluster, _, _) = with_run().await;
    let log = LogStore::new(Arc::clone(&cluster.store) as _);
    let released = cluster.meta.create_backup("released".into(), None).await.unwrap().record;
    let release = millrace_rpc::log::ReleaseBackup { name: "released".into() };
    cluster.meta.apply(Entry::ReleaseBackup(release)).await.unwrap();
    // A later leader has made a backup at a record that this one has not seen.
    let later = MetaState { number: cluster.meta.record() + 1, ..MetaState::default() };
    let made = later.number;
    log.put_backup(later).await.unwrap();
    let files = BackupFiles::new(Arc::clone(&cluster.meta.shared), log.clone());
    files.settle().await.unwrap();
    let left = log.list_backups().await.unwrap();
    assert!(!left.contains(&released), "its release is known");
    assert!(left.contains(&made), "nothing is known of it here");
}

#[tokio::test(start_paused = true)]
async fn a_backup_has_the_state_as_of_its_record() {
    let (cluster, t, _) = with_run().await;
    for _ in 0..3 {
        cluster.insert(t).await;
    }
    let made = cluster.meta.create_backup("one".into(), None).await.unwrap();
    let expected = cluster.meta.state_for_tests();
    assert_eq!(expected.number, made.record);
    // Written later than the log has gone on.
    let log = LogStore::new(Arc::clone(&cluster.store) as _);
    log.delete(vec![LogStore::backup_path(made.record)]).await;
    cluster.insert(t).await;
    cluster.created(view("late", &[t])).await;
    let files = BackupFiles::new(Arc::clone(&cluster.meta.shared), log.clone());
    files.settle().await.unwrap();
    let state = log.read_backup(made.record).await.unwrap().unwrap();
    let bytes = |state: &MetaState| state.to_snapshot();
    assert_eq!(bytes(&state), bytes(&expected));
}

#[tokio::test(start_paused = true)]
async fn a_backup_is_restored_while_the_original_goes_on() {
    let (cluster, t, run) = with_run().await;
    let v = cluster.created(view("v", &[t])).await;
    let sink = |name, target: u32| Relation { target, ..relation(name, RelationKind::Sink, &[t]) };
    let u = cluster.created(table("u")).await;
    let (out, inside) =
        (cluster.create(sink("out", 0)).await, cluster.create(sink("inside", u.0)).await);
    let made = cluster.meta.create_backup(String::new(), None).await.unwrap();
    assert!(made.name.starts_with("20") && made.name.contains('T'), "{}", made.name);
    add_run(&cluster, t, 2).await;
    cluster.created(view("late", &[t])).await;
    cluster.meta.drop_relations(&[inside, out, v]).await.unwrap();
    collect(&cluster).await;

    let target = Arc::<InMemory>::default();
    let copied = restore(&cluster, &target, &made.name).await.unwrap();
    assert_eq!((copied.record, copied.objects, copied.paused_sinks), (made.record, 1, 1));
    assert!(exists(&*target, &run).await && !exists(&*target, &object(2)).await);
    assert!(!exists(&*target, MARK).await);
    let (state, original) = (opened(&target).await, cluster.meta.state_for_tests());
    assert!(state.relations.contains_key(&v) && state.relation_named("public", "late").is_none());
    assert!(state.is_paused_sink(out) && !state.is_paused_sink(inside));
    assert!(state.backups.iter().next().is_none() && !state.objects.has_garbage());
    assert!(state.processes.live().is_empty() && state.term >= original.term + 1_000);
    let other = Arc::<InMemory>::default();
    restore(&cluster, &other, &made.record.to_string()).await.unwrap();
    assert_ne!(opened(&other).await.term, state.term, "they are apart, too");
    let ids = [original.store_id, state.store_id, opened(&other).await.store_id];
    assert!(ids.iter().all(Option::is_some), "{ids:?}");
    assert!(ids[0] != ids[1] && ids[0] != ids[2] && ids[1] != ids[2], "{ids:?}");
    // A copy that is kept is of the original.
    let from = Arc::clone(&cluster.store) as Arc<dyn ObjectStore>;
    let (kept, which) = (Arc::<InMemory>::default(), Which::Backup(&made.name));
    copy(from, Arc::clone(&kept) as _, "here", which, Purpose::Keep).await.unwrap();
    assert_eq!(opened(&kept).await.store_id, original.store_id);

    for (which, part) in [("nothing", made.name.as_str()), ("7777", made.name.as_str())] {
        let error = restore(&cluster, &Arc::default(), which).await.unwrap_err();
        let hint = error.hint.clone().unwrap_or_default();
        assert!(error.message.contains("there is no backup") && hint.contains(part), "{error:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_restored_store_has_higher_terms_than_the_original_has_by_then() {
    let (cluster, _, _) = with_run().await;
    cluster.meta.create_backup("one".into(), None).await.unwrap();
    let state = cluster.meta.state_for_tests();
    let (number, term) = (state.number + 1_000, state.term + 5_000_000);
    let log = LogStore::new(Arc::clone(&cluster.store) as _);
    log.put_snapshot(&MetaState { number, term, ..state }).await.unwrap();
    let target = Arc::<InMemory>::default();
    restore(&cluster, &target, "one").await.unwrap();
    assert!(opened(&target).await.term >= term + 1_000);
}

#[tokio::test(start_paused = true)]
async fn a_restore_that_was_cut_off_is_repeated_and_other_targets_are_refused() {
    let (cluster, t, run) = with_run().await;
    let second = add_run(&cluster, t, 2).await;
    for name in ["one", "two"] {
        cluster.meta.create_backup(name.into(), None).await.unwrap();
        add_run(&cluster, t, if name == "one" { 3 } else { 4 }).await;
    }
    // It ends in the middle.
    let hidden = cluster.store.get(&Path::from(second.as_str())).await.unwrap().bytes().await;
    cluster.store.delete(&Path::from(second.as_str())).await.unwrap();
    let target = Arc::<InMemory>::default();
    let error = restore(&cluster, &target, "one").await.unwrap_err();
    assert!(error.message.contains(&second), "{error:?}");
    assert!(exists(&*target, &run).await && opened(&target).await.number == 0);
    let mark = target.get(&Path::from(MARK)).await.unwrap().bytes().await.unwrap();
    cluster.store.put(&Path::from(second.as_str()), hidden.unwrap().into()).await.unwrap();
    let other = restore(&cluster, &target, "two").await.unwrap_err();
    assert!(other.message.contains("has left behind"), "{other:?}");
    assert_eq!(restore(&cluster, &target, "one").await.unwrap().objects, 2);
    let again = restore(&cluster, &target, "one").await.unwrap_err();
    assert!(again.message.contains("holds a database already"), "{again:?}");
    // It was cut off when it had only to say that it is complete.
    target.put(&Path::from(MARK), mark.clone().into()).await.unwrap();
    assert_eq!(restore(&cluster, &target, "one").await.unwrap().objects, 2);
    assert!(!exists(&*target, MARK).await);
    // A server has led there since.
    let record = LogStore::record_path(opened(&target).await.number + 1);
    target.put(&Path::from(MARK), mark.into()).await.unwrap();
    target.put(&record, "record".into()).await.unwrap();
    let again = restore(&cluster, &target, "one").await.unwrap_err();
    assert!(again.message.contains("holds a database already"), "{again:?}");

    let used = Arc::<InMemory>::default();
    used.put(&Path::from("mine.txt"), "text".into()).await.unwrap();
    let error = restore(&cluster, &used, "one").await.unwrap_err();
    assert!(error.message.contains("is not empty: it holds \"mine.txt\""), "{error:?}");
}

/// Into one target.
#[tokio::test(start_paused = true)]
async fn of_two_copies_that_begin_at_the_same_time_one_is_refused() {
    let (cluster, t, _) = with_run().await;
    for (name, later) in [("one", 2), ("two", 3)] {
        cluster.meta.create_backup(name.into(), None).await.unwrap();
        add_run(&cluster, t, later).await;
    }
    let request = Duration::from_millis(10);
    let profile = Profile { p50: request, p99: request, ..Profile::INSTANT };
    let target: Arc<dyn ObjectStore> = Arc::new(SimStore::in_memory(profile, 1));
    let restored = |which: &'static str| {
        let from = Arc::clone(&cluster.store) as Arc<dyn ObjectStore>;
        copy(from, Arc::clone(&target), "here", Which::Backup(which), Purpose::Run)
    };
    let (one, two) = tokio::join!(restored("one"), restored("two"));
    let refused: Vec<SqlError> = [one, two].into_iter().filter_map(Result::err).collect();
    let is_told = |error: &SqlError| error.message.contains("has left behind");
    assert!(refused.len() == 1 && refused.iter().all(is_told), "{refused:?}");
    assert_eq!(LogStore::new(target).list_snapshots().await.unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_copy_goes_on_where_the_store_refuses_something_now_and_then() {
    let (cluster, t, _) = with_run().await;
    for n in 2..=20 {
        add_run(&cluster, t, n).await;
    }
    cluster.meta.create_backup("one".into(), None).await.unwrap();
    let sim = SimStore::in_memory(Profile::INSTANT, 1);
    let only = Some(RequestKind::Put);
    sim.set_faults_after(
        "data/",
        Faults { error: 0.1, lost_answer: 0.2, only, ..Faults::default() },
    );
    let from = Arc::clone(&cluster.store) as Arc<dyn ObjectStore>;
    let (to, which) = (Arc::new(sim.clone()), Which::Backup("one"));
    let copied = copy(from, to, "here", which, Purpose::Run).await.unwrap();
    assert_eq!(copied.objects, 20);
    assert!(sim.stats().faults > 0);
}

/// A copy may lie anywhere, also below the folder of the original's objects.
#[tokio::test(start_paused = true)]
async fn what_is_restored_below_the_objects_of_the_original_is_not_collected_with_them() {
    let (cluster, _, run) = with_run().await;
    cluster.meta.create_backup("one".into(), None).await.unwrap();
    let from = Arc::clone(&cluster.store) as Arc<dyn ObjectStore>;
    let to: Arc<dyn ObjectStore> = Arc::new(PrefixStore::new(Arc::clone(&from), "data/copy"));
    copy(from, Arc::clone(&to), "here", Which::Backup("one"), Purpose::Run).await.unwrap();
    // The next leader deletes what this one has written and nothing names.
    let left = object(2);
    cluster.store.put(&Path::from(left.as_str()), "left".into()).await.unwrap();
    let cluster = cluster.restart().await;
    collect(&cluster).await;
    assert!(!exists(&*cluster.store, &left).await);
    assert!(exists(&*to, &run).await, "it is another store's");
}
