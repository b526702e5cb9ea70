//! What an operator asks for again by the same id, of the same leader and of the next one: it is done once.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{RelationId, SqlError};
use millrace_rpc::control::{Heartbeat, MetaControl};
use millrace_rpc::log::ProcessRole;
use millrace_rpc::operator::{BackupOverview, OperatorService};
use millrace_rpc::version::StatementId;

use super::cluster::{beat, leader_of, placed, process, registered};
use super::fake::{Cluster, Stream};
use super::store::TestStore;
use super::{table, view};
use crate::meta::Meta;

fn id(number: u64) -> Option<StatementId> {
    Some(StatementId { frontend: 1, number })
}

/// A leader of two processes, with a table on the first one and a view on the second.
async fn led() -> (Cluster, [u64; 2], [RelationId; 2]) {
    let (cluster, _) = leader_of(&TestStore::new(), Arc::default()).await;
    let first = registered(&cluster.meta, process(1, ProcessRole::Compute, "a:1")).await;
    let t = cluster.created(table("t")).await;
    let v = cluster.created(view("v", &[t])).await;
    let second = registered(&cluster.meta, process(2, ProcessRole::Compute, "b:1")).await;
    assert_eq!((placed(&cluster.meta, t).0, placed(&cluster.meta, v).0), (first, second));
    (cluster, [first, second], [t, v])
}

/// Another one takes over from a leader that is lost; the processes are not.
pub async fn next(cluster: Cluster) -> Cluster {
    let Cluster { meta, fake, store } = cluster;
    meta.shutdown().await;
    drop(meta);
    leader_of(&store, fake).await.0
}

async fn backups(meta: &Meta) -> Vec<BackupOverview> {
    meta.backups().await.unwrap().backups
}

/// One by the time, and one with a name.
async fn ask_for_two(meta: &Meta) -> [BackupOverview; 2] {
    let by_time = meta.create_backup(String::new(), id(1)).await.unwrap();
    [by_time, meta.create_backup("one".into(), id(2)).await.unwrap()]
}

#[tokio::test(start_paused = true)]
async fn a_backup_is_made_once_whoever_is_asked_again() {
    let (cluster, _) = leader_of(&TestStore::new(), Arc::default()).await;
    let both = ask_for_two(&cluster.meta).await;
    assert!(both[0].name.starts_with("20") && both[0].record < both[1].record, "{both:?}");
    // One that is called by the time would have another name by now.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(ask_for_two(&cluster.meta).await, both);
    let cluster = next(cluster).await;
    assert_eq!(ask_for_two(&cluster.meta).await, both);
    assert_eq!(backups(&cluster.meta).await, both);
    // Another request is not taken for one of these.
    let other = cluster.meta.create_backup("one".into(), id(3)).await.unwrap_err();
    assert!(SqlError::from(other).message.contains("there is a backup \"one\" already"));
}

#[tokio::test(start_paused = true)]
async fn a_backup_is_released_once_whoever_is_asked_again() {
    let (cluster, _) = leader_of(&TestStore::new(), Arc::default()).await;
    let meta = &cluster.meta;
    meta.create_backup("one".into(), id(1)).await.unwrap();
    let released = meta.release_backup("one".into(), id(2)).await.unwrap();
    assert!(released.name == "one" && released.record > 0, "{released:?}");
    let gone = meta.create_backup("one".into(), id(1)).await.unwrap_err();
    assert!(SqlError::from(gone).message.contains("has been released meanwhile"));
    // Another one of that name is left alone.
    let later = meta.create_backup("one".into(), id(3)).await.unwrap();
    let name_alone = BackupOverview { name: "one".into(), ..BackupOverview::default() };
    assert_eq!(meta.release_backup("one".into(), id(2)).await.unwrap(), name_alone);
    let cluster = next(cluster).await;
    assert_eq!(cluster.meta.release_backup("one".into(), id(2)).await.unwrap(), name_alone);
    assert_eq!(backups(&cluster.meta).await, [later]);
}

#[tokio::test(start_paused = true)]
async fn a_job_is_moved_once_whoever_is_asked_again() {
    let (cluster, [first, second], [_, v]) = led().await;
    assert_eq!(cluster.meta.move_job(v, first, id(1)).await.unwrap().jobs, [v.0]);
    // Somebody else has it moved on.
    assert_eq!(cluster.meta.move_job(v, second, id(2)).await.unwrap().jobs, [v.0]);
    let there = placed(&cluster.meta, v);
    let again = cluster.meta.move_job(v, first, id(1)).await.unwrap();
    assert_eq!((again.jobs.len(), placed(&cluster.meta, v)), (0, there));
    let cluster = next(cluster).await;
    // What is done needs no process that answers.
    cluster.fake.set_stream(Stream::Broken);
    let again = cluster.meta.move_job(v, first, id(1)).await.unwrap();
    assert_eq!((again.jobs.len(), placed(&cluster.meta, v)), (0, there));
    cluster.fake.set_stream(Stream::Sound);
    beat(&cluster.meta, first).await.unwrap();
    assert_eq!(cluster.meta.move_job(v, first, id(3)).await.unwrap().jobs, [v.0]);
}

/// Whether an operator has placed a job where it runs.
fn is_by_operator(cluster: &Cluster, id: RelationId) -> bool {
    cluster.meta.state_for_tests().jobs[&id].by_operator
}

#[tokio::test(start_paused = true)]
async fn what_an_operator_has_moved_stays_until_that_is_undone() {
    let (cluster, [_, second], [t, v]) = led().await;
    let u = cluster.created(table("u")).await;
    assert!([t, u, v].iter().all(|id| !is_by_operator(&cluster, *id)));
    // It is there already.
    assert_eq!(cluster.meta.move_job(v, second, id(1)).await.unwrap().jobs, [0u32; 0]);
    assert_eq!(cluster.meta.move_job(t, second, id(2)).await.unwrap().jobs, [t.0, u.0]);
    assert!([t, u, v].iter().all(|id| is_by_operator(&cluster, *id)));
    let cluster = next(cluster).await;
    let before = placed(&cluster.meta, v);
    for _ in 0..2 {
        assert_eq!(cluster.meta.move_job(v, 0, id(3)).await.unwrap().jobs, [0u32; 0]);
        assert!(!is_by_operator(&cluster, v) && is_by_operator(&cluster, t));
    }
    assert_eq!(placed(&cluster.meta, v), before, "it has no reason to run elsewhere");
    cluster.meta.move_job(u, 0, id(4)).await.unwrap();
    assert!([t, u].iter().all(|id| !is_by_operator(&cluster, *id)), "tables are one group");
    let error = cluster.meta.move_job(RelationId(999), 0, id(5)).await.unwrap_err();
    assert!(error.to_string().contains("there is no job 999"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_process_is_drained_once_whoever_is_asked_again() {
    let (cluster, [first, second], [t, _]) = led().await;
    assert_eq!(cluster.meta.drain(first, false, id(1)).await.unwrap().jobs, [t.0]);
    assert_eq!(cluster.meta.drain(first, false, id(1)).await.unwrap().jobs, [0u32; 0]);
    // Somebody else has it take jobs again.
    cluster.meta.drain(first, true, id(2)).await.unwrap();
    let cluster = next(cluster).await;
    cluster.meta.drain(first, false, id(1)).await.unwrap();
    assert!(!cluster.meta.state_for_tests().processes.is_drained(first));

    cluster.meta.drain(first, false, id(3)).await.unwrap();
    assert!(cluster.meta.state_for_tests().processes.is_drained(first));
    let leaving = Heartbeat { incarnation: second, leaving: true, ..Heartbeat::default() };
    cluster.meta.beat(leaving).await.unwrap();
    let refused = cluster.meta.drain(first, false, id(4)).await.unwrap_err();
    assert!(refused.to_string().contains("the only one"), "{refused}");
    assert!(cluster.meta.drain(first, false, id(3)).await.is_ok(), "it was done before");
}
