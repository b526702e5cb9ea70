//! A change of leader restarts no job: the next one goes on with what runs, and takes over what was sealed.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{Epoch, Generation, RelationId};
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::log::{Entry, ProcessRole, RaiseGenerations};
use millrace_rpc::services::{ComputeService, Cut};
use millrace_rpc::version::{CommitGroup, GroupMember, JobCommit};
use tokio::task::JoinHandle;

use super::cluster::{beat, leader_of, placed, process, registered};
use super::fake::{Behaviour, Cluster, Fake, Stream};
use super::store::TestStore;
use super::{relation, table, view};
use crate::members::PROCESS_LEASE;

/// No wait of a test lasts longer, on the paused clock.
const LIMIT: Duration = Duration::from_secs(60);

/// A leader with the table `t` and the view `v` of it, and a process for them.
async fn led() -> (Cluster, RelationId, RelationId) {
    let (cluster, _) = leader_of(&TestStore::new(), Arc::default()).await;
    registered(&cluster.meta, process(1, ProcessRole::Compute, "a:1")).await;
    let t = cluster.created(table("t")).await;
    let v = cluster.created(view("v", &[t])).await;
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v]).await, [1, 1]);
    (cluster, t, v)
}

/// The leader is lost; the processes are not.
async fn lost(cluster: Cluster) -> (Arc<TestStore>, Arc<Fake>) {
    let Cluster { meta, fake, store } = cluster;
    meta.shutdown().await;
    (store, fake)
}

/// Another one takes over from one that is lost.
async fn next(cluster: Cluster) -> Cluster {
    let (store, fake) = lost(cluster).await;
    leader_of(&store, fake).await.0
}

fn inserting(fake: &Arc<Fake>, table: RelationId) -> JoinHandle<Epoch> {
    let fake = Arc::clone(fake);
    tokio::spawn(async move { fake.insert(table).await.unwrap() })
}

async fn done(inserting: JoinHandle<Epoch>) -> Epoch {
    tokio::time::timeout(LIMIT, inserting).await.unwrap().unwrap()
}

/// What a leader asked for that was lost before it was answered.
async fn cut(
    cluster: (&Arc<TestStore>, &Arc<Fake>),
    job: RelationId,
    epoch: Epoch,
    number: u64,
) -> JobCommit {
    let generation = cluster.1.tasks_of(job).0;
    cluster.1.cut(job, generation, Cut { epoch, number, record: 0 }).await.unwrap()
}

fn commits(cluster: &Cluster, job: RelationId) -> u64 {
    cluster.meta.version(job).unwrap().commits
}

#[tokio::test(start_paused = true)]
async fn jobs_that_have_nothing_to_do_go_on() {
    let (cluster, t, v) = led().await;
    let before = [t, v].map(|id| (placed(&cluster.meta, id), cluster.fake.starts_of(id)));
    let mut cluster = cluster;
    for n in 2..=4 {
        cluster = next(cluster).await;
        cluster.insert(t).await;
        assert_eq!(cluster.read(&[t, v]).await, [n, n]);
    }
    assert_eq!(before, [t, v].map(|id| (placed(&cluster.meta, id), cluster.fake.starts_of(id))));
    assert!(!cluster.fake.is_stopped(t) && !cluster.fake.is_stopped(v));
    // What is made under the new leader is as before.
    let w = cluster.created(view("w", &[t, v])).await;
    assert_eq!(cluster.read(&[w]).await, [8]);
}

/// Not even where one process has run out of jobs.
#[tokio::test(start_paused = true)]
async fn no_job_is_moved_because_the_leader_changes() {
    let (cluster, t, v) = led().await;
    let first = placed(&cluster.meta, t).0;
    let second = registered(&cluster.meta, process(2, ProcessRole::Compute, "b:1")).await;
    let mut views = vec![v];
    for name in ["w", "x", "y"] {
        views.push(cluster.created(view(name, &[t])).await);
    }
    let (left, gone): (Vec<RelationId>, Vec<RelationId>) =
        views.into_iter().partition(|id| placed(&cluster.meta, *id).0 == first);
    assert!(!left.is_empty() && !gone.is_empty());
    cluster.meta.drop_relations(&gone).await.unwrap();
    // The table's process has at least two jobs more than the other.
    let jobs: Vec<RelationId> = left.into_iter().chain([t]).collect();
    let before = jobs.iter().map(|id| placed(&cluster.meta, *id)).collect::<Vec<_>>();
    let cluster = next(cluster).await;
    beat(&cluster.meta, second).await.unwrap();
    cluster.insert(t).await;
    assert_eq!(before, jobs.iter().map(|id| placed(&cluster.meta, *id)).collect::<Vec<_>>());
    // One that comes now is given some.
    let third = registered(&cluster.meta, process(3, ProcessRole::Compute, "c:1")).await;
    assert!(jobs.iter().any(|id| [second, third].contains(&placed(&cluster.meta, *id).0)));
}

/// The leader was lost before it told the process what the log has.
#[tokio::test(start_paused = true)]
async fn what_the_log_has_and_no_process_was_told_is_told_by_the_next_leader() {
    let (cluster, t, v) = led().await;
    let starts = [t, v].map(|id| cluster.fake.starts_of(id));
    cluster.fake.set_stream(Stream::Broken);
    let number = commits(&cluster, t);
    let inserted = inserting(&cluster.fake, t);
    let committed = async {
        while commits(&cluster, t) == number {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LIMIT, committed).await.unwrap();
    let (store, fake) = lost(cluster).await;
    assert!(!inserted.is_finished(), "nobody has told that it is committed");
    fake.set_stream(Stream::Sound);
    let (cluster, _) = leader_of(&store, fake).await;
    done(inserted).await;
    assert_eq!(cluster.read(&[t, v]).await, [2, 2]);
    assert_eq!(starts, [t, v].map(|id| cluster.fake.starts_of(id)));
}

/// Two epochs of the table and one of the view, of which only the processes know.
#[tokio::test(start_paused = true)]
async fn what_was_sealed_and_is_not_in_the_log_is_logged_once() {
    let (cluster, t, v) = led().await;
    let before = [t, v].map(|id| (placed(&cluster.meta, id), cluster.fake.starts_of(id)));
    let (of_t, of_v) = (commits(&cluster, t), commits(&cluster, v));
    let head = cluster.meta.head();
    let (store, fake) = lost(cluster).await;
    let at = (&store, &fake);
    cut(at, v, head.next(0), of_v + 1).await;
    let first = inserting(&fake, t);
    tokio::task::yield_now().await;
    cut(at, t, Epoch::ZERO, of_t + 1).await;
    let second = inserting(&fake, t);
    tokio::task::yield_now().await;
    cut(at, t, Epoch::ZERO, of_t + 2).await;
    let third = inserting(&fake, t);
    let (cluster, _) = leader_of(&store, fake).await;
    let (first, second, third) = (done(first).await, done(second).await, done(third).await);
    assert!(first < second && second < third, "{first} {second} {third}");
    assert_eq!(cluster.read(&[t, v]).await, [4, 4]);
    assert_eq!(commits(&cluster, t), of_t + 3);
    assert_eq!(before, [t, v].map(|id| (placed(&cluster.meta, id), cluster.fake.starts_of(id))));
}

/// A cut may wait until what was sealed before is concluded, which is for the new leader to do.
#[tokio::test(start_paused = true)]
async fn a_cut_that_is_under_way_ends_when_what_is_before_it_is_logged() {
    let (cluster, t, v) = led().await;
    let starts = [t, v].map(|id| cluster.fake.starts_of(id));
    let of_t = commits(&cluster, t);
    let (store, fake) = lost(cluster).await;
    let first = inserting(&fake, t);
    tokio::task::yield_now().await;
    cut((&store, &fake), t, Epoch::ZERO, of_t + 1).await;
    let second = inserting(&fake, t);
    tokio::task::yield_now().await;
    fake.set_cutting(t, true);
    let cutting = {
        let (store, fake) = (Arc::clone(&store), Arc::clone(&fake));
        tokio::spawn(async move {
            while fake.in_flight(t) > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            cut((&store, &fake), t, Epoch::ZERO, of_t + 2).await;
            fake.set_cutting(t, false);
        })
    };
    let (cluster, _) = leader_of(&store, fake).await;
    let (first, second) = (done(first).await, done(second).await);
    assert!(first < second);
    cutting.await.unwrap();
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v]).await, [4, 4]);
    assert_eq!(starts, [t, v].map(|id| cluster.fake.starts_of(id)));
}

/// A cut that was under way fails: its job is started again, as always.
#[tokio::test(start_paused = true)]
async fn a_job_that_ends_in_the_cut_that_is_under_way_is_started_again() {
    let (cluster, t, v) = led().await;
    let before = placed(&cluster.meta, v).1;
    let (store, fake) = lost(cluster).await;
    fake.set_cutting(v, true);
    let failing = Arc::clone(&fake);
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        failing.stop_job(v, before).await;
    });
    let (cluster, _) = leader_of(&store, fake).await;
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v]).await, [2, 2]);
    assert_eq!([t, v].map(|id| cluster.fake.starts_of(id)), [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn a_part_that_is_handed_over_twice_is_one() {
    let (cluster, t, v) = led().await;
    let starts = [t, v].map(|id| cluster.fake.starts_of(id));
    [t, v].into_iter().for_each(|id| cluster.fake.hand_over_again(id));
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v]).await, [2, 2]);
    let cluster = next(cluster).await;
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v]).await, [3, 3]);
    assert_eq!(starts, [t, v].map(|id| cluster.fake.starts_of(id)));
}

#[tokio::test(start_paused = true)]
async fn a_job_that_does_not_agree_with_the_log_is_started() {
    let (cluster, t, v) = led().await;
    let before = [t, v].map(|id| placed(&cluster.meta, id).1);
    let (of_t, of_v, head) = (commits(&cluster, t), commits(&cluster, v), cluster.meta.head());
    let (store, fake) = lost(cluster).await;
    // Of each a part is lost.
    cut((&store, &fake), v, head.next(0), of_v + 1).await;
    let lost_with_it = {
        let fake = Arc::clone(&fake);
        tokio::spawn(async move { fake.insert(t).await })
    };
    tokio::task::yield_now().await;
    cut((&store, &fake), t, Epoch::ZERO, of_t + 1).await;
    [t, v].into_iter().for_each(|id| fake.sealed_of(id, |sealed| sealed.clear()));
    let (cluster, _) = leader_of(&store, fake).await;
    assert!(lost_with_it.await.unwrap().is_err());
    tokio::time::sleep(Duration::from_secs(1)).await;
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v]).await, [2, 2]);
    assert_eq!([t, v].map(|id| cluster.fake.starts_of(id)), [2, 2]);
    // Others may have waited for the table's part of a transaction.
    let generations = [Generation(before[0].0 + 1), before[1]];
    assert_eq!([t, v].map(|id| placed(&cluster.meta, id).1), generations);
}

#[tokio::test(start_paused = true)]
async fn an_older_generation_is_not_gone_on_with() {
    let (cluster, t, v) = led().await;
    let before = placed(&cluster.meta, v).1;
    let log = cluster.meta.shared.log().unwrap();
    let raise = Entry::RaiseGenerations(RaiseGenerations { jobs: vec![v.0] });
    log.apply(raise).await.map(drop).unwrap();
    let cluster = next(cluster).await;
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v]).await, [2, 2]);
    assert_eq!([t, v].map(|id| cluster.fake.starts_of(id)), [1, 2]);
    assert_eq!(cluster.fake.tasks_of(v).0, Generation(before.0 + 1));
}

#[tokio::test(start_paused = true)]
async fn a_process_that_is_lost_while_it_is_asked_is_waited_for_no_longer_than_its_lease() {
    let (cluster, t, v) = led().await;
    let second = registered(&cluster.meta, process(2, ProcessRole::Compute, "b:1")).await;
    let first = placed(&cluster.meta, t).0;
    assert_ne!(first, second);
    let (store, fake) = lost(cluster).await;
    fake.behave(t, Behaviour { ignores_adoption: true, ..Behaviour::default() });
    let began = tokio::time::Instant::now();
    let (cluster, fenced) = leader_of(&store, fake).await;
    while placed(&cluster.meta, t).0 != second {
        assert!(began.elapsed() < PROCESS_LEASE + Duration::from_secs(3));
        tokio::time::sleep(Duration::from_millis(200)).await;
        beat(&cluster.meta, second).await.unwrap();
    }
    assert_eq!(*fenced.lock(), [first]);
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v]).await, [2, 2]);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_process_that_cannot_be_reached_at_first_is_asked_again() {
    let (cluster, t, v) = led().await;
    let starts = [t, v].map(|id| cluster.fake.starts_of(id));
    let (store, fake) = lost(cluster).await;
    fake.behave(t, Behaviour { is_cut_off: true, ..Behaviour::default() });
    let (cluster, _) = leader_of(&store, fake).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    cluster.fake.behave(t, Behaviour::default());
    cluster.insert(t).await;
    assert_eq!(cluster.read(&[t, v]).await, [2, 2]);
    assert_eq!(starts, [t, v].map(|id| cluster.fake.starts_of(id)));
}

/// What is committed and perhaps not published, and what is staged and not committed.
#[tokio::test(start_paused = true)]
async fn a_sink_has_each_change_once_and_in_order() {
    let (cluster, t, _) = led().await;
    let s = cluster.created(relation("s", RelationKind::Sink, &[t])).await;
    let target_has = async |cluster: &Cluster, n: u64| {
        let has = async {
            while cluster.fake.published_by(s).last() < Some(&n) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(LIMIT, has).await.unwrap();
    };
    target_has(&cluster, 1).await;
    let starts = cluster.fake.starts_of(s);
    // Committed, and its target is slow to take it.
    let slow = Behaviour { publish_takes: Duration::from_secs(30), ..Behaviour::default() };
    cluster.fake.behave(s, slow);
    let of_s = commits(&cluster, s);
    cluster.insert(t).await;
    let committed = async {
        while commits(&cluster, s) == of_s {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LIMIT, committed).await.unwrap();
    cluster.insert(t).await;
    let (of_s, head) = (commits(&cluster, s), cluster.meta.head());
    let (store, fake) = lost(cluster).await;
    fake.behave(s, Behaviour::default());
    // The next one may have been staged under the leader that is lost.
    if fake.most_staged(s) < 2 {
        cut((&store, &fake), s, head, of_s + 1).await;
    }
    let (cluster, _) = leader_of(&store, fake).await;
    target_has(&cluster, 3).await;
    cluster.insert(t).await;
    target_has(&cluster, 4).await;
    assert_eq!(cluster.fake.published_by(s), [1, 2, 3, 4]);
    assert_eq!(cluster.fake.starts_of(s), starts);
}

/// The parts of a transaction are logged together or not at all.
#[tokio::test(start_paused = true)]
async fn sealed_parts_of_a_transaction_are_logged_as_one_or_void() {
    for is_lost in [false, true] {
        let (cluster, t, _) = led().await;
        let u = cluster.created(table("u")).await;
        let members =
            [t, u].map(|id| GroupMember { job: id.0, generation: placed(&cluster.meta, id).1.0 });
        let numbers = [t, u].map(|id| commits(&cluster, id) + 1);
        let (store, fake) = lost(cluster).await;
        let inserts = [t, u].map(|id| {
            let fake = Arc::clone(&fake);
            tokio::spawn(async move { fake.insert(id).await })
        });
        tokio::task::yield_now().await;
        for (id, number) in [t, u].into_iter().zip(numbers) {
            cut((&store, &fake), id, Epoch::ZERO, number).await;
            let group = CommitGroup { id: 7, members: members.to_vec() };
            fake.sealed_of(id, |sealed| sealed[0].group = Some(group));
        }
        if is_lost {
            fake.sealed_of(u, |sealed| sealed.clear());
        }
        let (cluster, _) = leader_of(&store, fake).await;
        let [of_t, of_u] = inserts;
        let limit = |insert| tokio::time::timeout(LIMIT, insert);
        let of_t = limit(of_t).await.unwrap().unwrap();
        let of_u = limit(of_u).await.unwrap().unwrap();
        match is_lost {
            false => assert_eq!(of_t.unwrap(), of_u.unwrap(), "one epoch"),
            true => assert!(of_t.is_err() && of_u.is_err()),
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        cluster.insert(t).await;
        let more = i64::from(!is_lost);
        assert_eq!(cluster.read(&[t, u]).await, [2 + more, more]);
    }
}
