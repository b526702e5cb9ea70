//! Jobs that leave their inputs' changes unread are detached, hold nothing, and come back by a rebuild.

use std::time::Duration;

use millrace_common::{Epoch, RelationId, SqlError, SqlState};
use millrace_rpc::catalog::RelationKind;

use super::fake::{Behaviour, Cluster};
use super::{paused, relation, table, view};
use crate::gc::horizon;
use crate::status::JobState;

fn broken() -> Behaviour {
    Behaviour { fail_cut: Some("planted".to_owned()), ..Behaviour::default() }
}

/// Inserts a row a second for so long.
async fn insert_for(c: &Cluster, table: RelationId, seconds: u64) {
    for _ in 0..seconds {
        c.insert(table).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// What the job may need of the table's versions.
fn held(c: &Cluster, table: RelationId) -> Epoch {
    let state = c.meta.state_for_tests();
    horizon(&state, table, Epoch::MAX, 0, &|_, _| Epoch::ZERO)
}

async fn refused(c: &Cluster, ids: &[RelationId]) -> SqlError {
    let began = tokio::time::Instant::now();
    let error = c.meta.read_epoch(ids, None, true).await.unwrap_err();
    assert_eq!(began.elapsed(), Duration::ZERO, "told at once");
    error
}

async fn with_short_retention() -> (Cluster, RelationId, RelationId, RelationId) {
    let (c, t, v) = Cluster::with_view().await;
    let w = c.created(view("w", &[v])).await;
    c.meta.set_setting("changelog_retention", Some("20s")).await.unwrap();
    c.insert(t).await;
    assert_eq!(c.read(&[t, v, w]).await, [1, 1, 1]);
    (c, t, v, w)
}

#[tokio::test(start_paused = true)]
async fn a_failing_view_is_detached_and_holds_nothing() {
    let (c, t, v, w) = with_short_retention().await;
    let before = c.meta.frontier(v).unwrap();
    c.fake.behave(v, broken());
    insert_for(&c, t, 15).await;
    assert!(matches!(c.meta.job_status(v).unwrap().state, JobState::Failed { .. }));
    assert!(held(&c, t) <= before.max(c.meta.frontier(v).unwrap()), "its changes are kept");
    insert_for(&c, t, 60).await;
    let JobState::Detached { reason } = c.meta.job_status(v).unwrap().state else {
        panic!("{:?}", c.meta.job_status(v).unwrap().state)
    };
    assert!(reason.contains("planted") && reason.contains("changelog_retention"), "{reason}");
    assert_eq!(held(&c, t), Epoch::MAX, "nothing is kept for it");

    for ids in [&[v][..], &[w], &[t, w]] {
        let error = refused(&c, ids).await;
        assert_eq!(error.state, SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE);
        assert_eq!(error.message, "relation \"v\" is detached");
        assert!(error.detail.as_ref().unwrap().contains("planted"));
        assert!(error.hint.as_ref().unwrap().starts_with("ALTER MATERIALIZED VIEW v REBUILD"));
    }
    for id in [v, w] {
        let epoch = c.meta.read_epoch(&[id], None, false).await.unwrap();
        assert_eq!(c.fake.value_at(id, epoch), 1, "its old content is readable");
        let state = c.meta.state_for_tests();
        assert!(horizon(&state, id, Epoch::MAX, 0, &|_, _| Epoch::ZERO) <= epoch, "and kept");
    }
    // It is the same after a restart, and its tasks do not run.
    let cuts = c.fake.cuts_of(v).len();
    let c = c.restart().await;
    assert!(matches!(c.meta.job_status(v).unwrap().state, JobState::Detached { .. }));
    refused(&c, &[w]).await;
    c.insert(t).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(c.fake.cuts_of(v).len(), cuts);
    c.meta.flush().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_rebuilt_view_is_exact_again_and_so_is_what_reads_it() {
    let (c, t, v, w) = with_short_retention().await;
    c.fake.behave(v, broken());
    insert_for(&c, t, 90).await;
    assert!(matches!(c.meta.job_status(v).unwrap().state, JobState::Detached { .. }));
    let old = c.meta.read_epoch(&[w], None, false).await.unwrap();

    let steps = Behaviour {
        backfill_steps: 8,
        cut_takes: Duration::from_millis(500),
        ..Behaviour::default()
    };
    c.fake.behave(v, steps);
    let generation = c.meta.job_status(v).unwrap().generation;
    c.meta.rebuild(v).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(matches!(c.meta.job_status(v).unwrap().state, JobState::Rebuilding { .. }));
    let error = refused(&c, &[w]).await;
    assert_eq!(error.message, "relation \"v\" is not up to date: it is being rebuilt");
    // What it had is what is read meanwhile, also by a reader that a restart opens anew.
    let c = c.restart().await;
    assert_eq!(c.meta.read_epoch(&[w], None, false).await.unwrap(), old);
    assert_eq!(c.fake.value_at(w, old), 1);
    c.insert(t).await;

    c.meta.wait_rebuilt(v, &Default::default()).await.unwrap();
    let status = c.meta.job_status(v).unwrap();
    assert!(status.generation > generation);
    assert_eq!(c.read(&[t, v, w]).await, [92, 92, 92]);
    c.insert(t).await;
    assert_eq!(c.read(&[t, v, w]).await, [93, 93, 93]);
    // Between the old and the new content nothing is known, and nothing is kept.
    let version = c.meta.version(v).unwrap();
    assert!(version.swapped_from < version.swapped_at && !version.is_rebuilding());
    let state = c.meta.state_for_tests();
    let between = Epoch(version.swapped_at - 1);
    assert!(state.exact_at_most(v, between).unwrap().0 <= version.swapped_from);
    let now = horizon(&state, v, between, 0, &|_, _| Epoch::ZERO);
    assert_eq!(now, Epoch(version.swapped_from), "who has the old content can go on");
}

#[tokio::test(start_paused = true)]
async fn a_view_is_rebuilt_by_itself_if_the_settings_say_so() {
    let (c, t, v, w) = with_short_retention().await;
    let x = c.created(view("x", &[v, t])).await;
    c.meta.set_setting("detached_views", Some("rebuild")).await.unwrap();
    c.fake.behave(v, broken());
    insert_for(&c, t, 60).await;
    c.fake.behave(v, Behaviour::default());
    insert_for(&c, t, 120).await;
    assert_eq!(c.read(&[t, v, w, x]).await, [181, 181, 181, 362]);
}

/// A view of a detached view cannot be rebuilt before that one: there is no epoch at which its inputs meet.
#[tokio::test(start_paused = true)]
async fn what_joins_a_detached_view_is_detached_too_and_rebuilt_after_it() {
    let (c, t, v, _) = with_short_retention().await;
    let x = c.created(view("x", &[v, t])).await;
    c.fake.behave(v, broken());
    insert_for(&c, t, 90).await;
    let JobState::Detached { reason } = c.meta.job_status(x).unwrap().state else {
        panic!("{:?}", c.meta.job_status(x).unwrap().state)
    };
    assert!(reason.contains("it reads \"v\", which is detached"), "{reason}");
    let error = c.meta.rebuild(x).await.unwrap_err();
    assert_eq!(error.state, SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE);
    // Nor does a new view begin.
    let y = c.create(view("y", &[v, t])).await;
    let error = c.meta.wait_created(y, &Default::default()).await.unwrap_err();
    assert_eq!(error.message, "relation \"v\" is detached");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(c.meta.frontier(y), None);
    c.fake.behave(v, Behaviour::default());
    c.meta.rebuild(v).await.unwrap();
    c.meta.rebuild(x).await.unwrap();
    c.meta.wait_rebuilt(x, &Default::default()).await.unwrap();
    assert_eq!(c.read(&[t, v, x, y]).await, [91, 91, 182, 182]);
}

/// A first scan that takes longer than changes are kept: there is nothing to read, and a rebuild begins it again.
#[tokio::test(start_paused = true)]
async fn a_first_scan_that_takes_too_long_is_detached() {
    let (c, t) = Cluster::with_table().await;
    c.meta.set_setting("changelog_retention", Some("20s")).await.unwrap();
    c.insert(t).await;
    let v = RelationId(t.0 + 1);
    let slow = Behaviour {
        backfill_steps: 1_000,
        cut_takes: Duration::from_secs(1),
        ..Behaviour::default()
    };
    c.fake.behave(v, slow);
    assert_eq!(c.create(view("v", &[t])).await, v);
    let never = Default::default();
    let created = c.meta.wait_created(v, &never);
    let (created, ()) = tokio::join!(created, insert_for(&c, t, 60));
    let error = created.unwrap_err();
    assert_eq!(error.message, "relation \"v\" is detached");
    assert!(error.detail.as_ref().unwrap().contains("its first scan took too long"));
    assert_eq!(held(&c, t), Epoch::MAX);
    assert!(c.meta.read_epoch(&[v], None, false).await.is_err(), "there is no content");
    c.fake.behave(v, Behaviour::default());
    c.meta.rebuild(v).await.unwrap();
    c.meta.wait_rebuilt(v, &Default::default()).await.unwrap();
    assert_eq!(c.read(&[t, v]).await, [61, 61]);
}

/// A sink goes on from where it is or not at all.
#[tokio::test(start_paused = true)]
async fn a_paused_sink_is_detached_by_its_own_retention() {
    let (c, t) = Cluster::with_table().await;
    let mut sink = relation("k", RelationKind::Sink, &[t]);
    sink.options.push(millrace_rpc::catalog::OptionEntry {
        name: "changelog_retention".to_owned(),
        value: "20s".to_owned(),
    });
    let k = c.created(sink).await;
    let other = c.created(relation("other", RelationKind::Sink, &[t])).await;
    for id in [k, other] {
        c.meta.alter_relation(paused(id, true)).await.unwrap();
    }
    insert_for(&c, t, 60).await;
    let JobState::Detached { reason } = c.meta.job_status(k).unwrap().state else {
        panic!("{:?}", c.meta.job_status(k).unwrap().state)
    };
    assert!(reason.contains("it was paused"), "{reason}");
    assert_eq!(c.meta.job_status(other).unwrap().state, JobState::Paused);
    // Resuming is not enough, whoever asks for it.
    c.meta.alter_relation(paused(k, false)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(matches!(c.meta.job_status(k).unwrap().state, JobState::Detached { .. }));
    c.meta.rebuild(k).await.unwrap();
    c.meta.wait_rebuilt(k, &Default::default()).await.unwrap();
    assert_eq!(c.meta.job_status(k).unwrap().state, JobState::Running);
    let epoch = c.insert(t).await;
    c.meta.flush().await.unwrap();
    assert_eq!(c.fake.value_at(k, epoch), 61);
}

/// Changes are counted in bytes too; a server that was down is not held against its jobs.
#[tokio::test(start_paused = true)]
async fn bytes_count_and_downtime_does_not() {
    let (c, t, v) = Cluster::with_view().await;
    c.meta.set_setting("changelog_retention", Some("1h")).await.unwrap();
    c.meta.set_setting("changelog_retention_bytes", Some("5000")).await.unwrap();
    tokio::time::sleep(Duration::from_secs(900)).await;
    c.fake.behave(t, Behaviour { commit_bytes: 1_000, ..Behaviour::default() });
    insert_for(&c, t, 60).await;
    assert_eq!(c.meta.job_status(v).unwrap().state, JobState::Running);
    c.fake.behave(v, broken());
    insert_for(&c, t, 30).await;
    let JobState::Detached { reason } = c.meta.job_status(v).unwrap().state else {
        panic!("{:?}", c.meta.job_status(v).unwrap().state)
    };
    assert!(reason.contains("changelog_retention_bytes keeps 5000"), "{reason}");

    let u = c.created(table("u")).await;
    let x = c.created(view("x", &[u])).await;
    c.insert(u).await;
    c.fake.behave(x, broken());
    c.insert(u).await;
    c.meta.shutdown().await;
    tokio::time::sleep(Duration::from_secs(7_200)).await;
    c.fake.behave(x, Behaviour { cut_takes: Duration::from_secs(60), ..Behaviour::default() });
    let c = c.restart().await;
    insert_for(&c, u, 300).await;
    assert_eq!(c.meta.job_status(x).unwrap().state, JobState::Running);
    assert!(c.meta.read_epoch(&[x], Some(Duration::from_secs(600)), true).await.is_ok());
}
