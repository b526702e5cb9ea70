//! Whom the leader asks how much there is of a source, and what it shows of that.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{Epoch, JobId, RelationId};
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::log::ProcessRole;
use millrace_rpc::services::MetaService;

use super::cluster::{beat, leader_of, placed, process, registered};
use super::fake::{Behaviour, Cluster};
use super::store::TestStore;
use super::{relation, view};
use crate::members::PROCESS_LEASE;
use crate::meta::Meta;
use crate::source::SourceState;

/// Of the tests' clock.
const LIMIT: Duration = Duration::from_secs(300);

async fn source(cluster: &Cluster, name: &str) -> RelationId {
    cluster.create(relation(name, RelationKind::Source, &[])).await
}

/// The source's content comes to end there.
async fn reaches(meta: &Meta, source: RelationId, offset: u64) {
    let mut changes = meta.changes(source).unwrap();
    let reached = async {
        while meta.source_offsets(source, Epoch::MAX) != [(0, offset)] {
            changes.changed().await.unwrap();
        }
    };
    tokio::time::timeout(LIMIT, reached).await.expect("the source advances");
}

fn state(meta: &Meta, source: RelationId) -> (SourceState, Option<String>) {
    let report = meta.source_report(source).unwrap();
    (report.state, report.reason)
}

async fn comes_to(meta: &Meta, source: RelationId, wanted: SourceState) {
    let come = async {
        while state(meta, source).0 != wanted {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let come = tokio::time::timeout(LIMIT, come).await;
    assert!(come.is_ok(), "it is {:?}", state(meta, source));
}

fn cut_off() -> Behaviour {
    Behaviour { is_cut_off: true, ..Behaviour::default() }
}

#[tokio::test(start_paused = true)]
async fn a_process_with_a_reader_is_asked_and_another_one_when_it_is_lost() {
    let (cluster, fenced) = leader_of(&TestStore::new(), Arc::default()).await;
    let (meta, fake) = (Arc::clone(&cluster.meta), Arc::clone(&cluster.fake));
    for (nonce, address) in [(1, "a:1"), (2, "b:1"), (3, "c:1")] {
        registered(&meta, process(nonce, ProcessRole::Compute, address)).await;
    }
    let s = source(&cluster, "s").await;
    let u = cluster.created(view("u", &[s])).await;
    let v = cluster.created(view("v", &[s])).await;
    let (lost, other) = (placed(&meta, u).0, placed(&meta, v).0);
    assert!(lost != other && lost != 0 && other != 0);
    fake.offer(s, 100);
    reaches(&meta, s, 100).await;
    let asked = fake.take_polls(s);
    assert!(asked.iter().all(|reader| *reader == u), "who has answered is asked again: {asked:?}");

    // It does not answer, and is not lost yet.
    fake.behave(u, cut_off());
    fake.offer(s, 200);
    reaches(&meta, s, 200).await;
    let asked = fake.take_polls(s);
    assert_eq!(asked.last(), Some(&v));
    assert_eq!(state(&meta, s), (SourceState::Running, None));

    // Its jobs go elsewhere.
    let live: Vec<u64> = meta.processes().iter().map(|p| p.incarnation).collect();
    fake.behave(u, Behaviour::default());
    while fenced.lock().is_empty() {
        tokio::time::sleep(PROCESS_LEASE / 10).await;
        for process in live.iter().filter(|process| **process != lost) {
            beat(&meta, *process).await.unwrap();
        }
    }
    assert_eq!(*fenced.lock(), [lost]);
    fake.take_polls(s);
    fake.offer(s, 300);
    reaches(&meta, s, 300).await;
    let on: Vec<u64> = fake.take_polls(s).iter().map(|reader| placed(&meta, *reader).0).collect();
    assert!(!on.is_empty() && on.iter().all(|process| *process == other), "{on:?}");
    assert_eq!(state(&meta, s), (SourceState::Running, None));
}

#[tokio::test(start_paused = true)]
async fn a_source_that_does_not_answer_delays_no_other() {
    let cluster = Cluster::new().await;
    let (meta, fake) = (&cluster.meta, &cluster.fake);
    let (s, t) = (source(&cluster, "s").await, source(&cluster, "t").await);
    fake.behave(s, Behaviour { hang: true, ..Behaviour::default() });
    fake.offer(s, 100);
    for (name, of) in [("u", s), ("v", t)] {
        cluster.created(view(name, &[of])).await;
    }
    for offset in [100, 200] {
        fake.offer(t, offset);
        reaches(meta, t, offset).await;
    }
    assert_eq!(fake.take_polls(s).len(), 1, "it is asked once at a time");
    comes_to(meta, s, SourceState::Failing).await;
    let reason = state(meta, s).1.unwrap();
    assert!(reason.contains("does not answer"), "{reason}");
    fake.behave(s, Behaviour::default());
    reaches(meta, s, 100).await;
    comes_to(meta, s, SourceState::Running).await;
}

#[tokio::test(start_paused = true)]
async fn a_process_that_is_away_for_long_is_a_failure_of_the_source() {
    let cluster = Cluster::new().await;
    let (meta, fake) = (&cluster.meta, &cluster.fake);
    let s = source(&cluster, "s").await;
    let v = cluster.created(view("v", &[s])).await;
    fake.offer(s, 100);
    reaches(meta, s, 100).await;
    comes_to(meta, s, SourceState::Running).await;
    // What is logged is computed, and nothing new comes to it.
    cluster.read(&[v]).await;
    fake.behave(v, cut_off());
    fake.take_polls(s);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(fake.take_polls(s).len() > 10, "it is asked again and again");
    assert_eq!(state(meta, s), (SourceState::Running, None));
    comes_to(meta, s, SourceState::Failing).await;
    fake.behave(v, Behaviour::default());
    fake.offer(s, 200);
    reaches(meta, s, 200).await;
    assert_eq!(state(meta, s), (SourceState::Running, None));
}

/// It is shown why, though no job that reads it runs.
#[tokio::test(start_paused = true)]
async fn what_is_wrong_with_a_source_is_shown_while_its_readers_cannot_start() {
    let cluster = Cluster::new().await;
    let (meta, fake) = (&cluster.meta, &cluster.fake);
    let s = source(&cluster, "s").await;
    comes_to(meta, s, SourceState::Idle).await;
    assert_eq!(fake.take_polls(s), [] as [JobId; 0], "nobody reads it");
    fake.behave(s, Behaviour { fail_poll: Some("planted".into()), ..Behaviour::default() });
    let fails = Behaviour { fail_start: Some("planted".into()), ..Behaviour::default() };
    let v = RelationId(s.0 + 1);
    fake.behave(v, fails);
    assert_eq!(cluster.create(view("v", &[s])).await, v);
    comes_to(meta, s, SourceState::Failing).await;
    assert_eq!(state(meta, s).1.as_deref(), Some("planted"));
    fake.behave(s, Behaviour::default());
    fake.offer(s, 100);
    comes_to(meta, s, SourceState::Idle).await;
    assert!(meta.source_offsets(s, Epoch::MAX).is_empty(), "it does not advance");
    fake.behave(v, Behaviour::default());
    reaches(meta, s, 100).await;
}
