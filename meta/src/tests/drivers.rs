//! Drivers: cutting, committing, backfill, restarts, idleness.

use std::time::Duration;

use millrace_common::{RelationId, SqlError};
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::services::MetaService;

use super::fake::{Behaviour, Cluster};
use super::{relation, table, view};
use crate::status::JobState;

#[tokio::test(start_paused = true)]
async fn a_view_follows_its_table_without_anybody_asking() {
    let c = Cluster::new().await;
    let t = c.created(table("t")).await;
    let v = c.created(view("v", &[t])).await;
    let epoch = c.insert(t).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(c.fake.value_at(v, epoch), 1);
    assert!(c.meta.frontier(v).unwrap() >= epoch);
}

#[tokio::test(start_paused = true)]
async fn data_nobody_waits_for_is_cut_once_an_interval() {
    let c = Cluster::new().await;
    let t = c.created(table("t")).await;
    let v = c.created(view("v", &[t])).await;
    let before = c.fake.cuts_of(v).len();
    for _ in 0..200 {
        c.insert(t).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let cuts = c.fake.cuts_of(v).len() - before;
    assert!((6..=12).contains(&cuts), "{cuts} cuts in two seconds");
}

#[tokio::test(start_paused = true)]
async fn idle_makes_no_requests_and_no_cuts() {
    let c = Cluster::new().await;
    let t = c.created(table("t")).await;
    let v = c.created(view("v", &[t])).await;
    c.insert(t).await;
    assert_eq!(c.read(&[t, v]).await, [1, 1]);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let (requests, cuts) = (c.store.requests(), c.fake.cuts_of(v).len());
    tokio::time::sleep(Duration::from_secs(24 * 3_600)).await;
    assert_eq!(c.store.requests(), requests);
    assert_eq!(c.fake.cuts_of(v).len(), cuts);
    // And the idle view is still exact at the head, without having moved.
    assert_eq!(c.meta.frontier(v), Some(c.meta.head()));
    assert_eq!(c.read(&[t, v]).await, [1, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_backfill_resumes_where_it_was_after_a_restart() {
    let c = Cluster::new().await;
    let t = c.created(table("t")).await;
    c.insert(t).await;
    let v = RelationId(t.0 + 1);
    let steps = Behaviour {
        backfill_steps: 10,
        cut_takes: Duration::from_millis(100),
        ..Behaviour::default()
    };
    c.fake.behave(v, steps);
    assert_eq!(c.create(view("v", &[t])).await, v);
    tokio::time::sleep(Duration::from_millis(550)).await;
    let JobState::Creating { rows_read, rows_total: 10 } = c.meta.job_status(v).unwrap().state
    else {
        panic!("{:?}", c.meta.job_status(v))
    };
    assert!((2..10).contains(&rows_read), "{rows_read}");
    let before = c.fake.cuts_of(v).len();
    let c = c.restart().await;
    c.meta.wait_created(v, &Default::default()).await.unwrap();
    assert!(c.fake.cuts_of(v).len() - before <= 10 - rows_read as usize + 1);
    assert_eq!(c.read(&[t, v]).await, [1, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_restart_brings_everything_back_with_new_generations() {
    let c = Cluster::new().await;
    let t = c.created(table("t")).await;
    let v = c.created(view("v", &[t])).await;
    let w = c.created(view("w", &[v, t])).await;
    for _ in 0..3 {
        c.insert(t).await;
    }
    let (incarnation, generation) =
        (c.meta.incarnation(), c.meta.job_status(w).unwrap().generation);
    let c = c.restart().await;
    assert!(c.meta.incarnation() > incarnation);
    assert!(c.meta.job_status(w).unwrap().generation > generation);
    assert_eq!(c.read(&[t, v, w]).await, [3, 3, 6]);
    c.insert(t).await;
    assert_eq!(c.read(&[w, t]).await, [8, 4]);
}

#[tokio::test(start_paused = true)]
async fn a_view_over_a_view_being_created_waits_for_it() {
    let c = Cluster::new().await;
    let t = c.created(table("t")).await;
    c.insert(t).await;
    let a = RelationId(t.0 + 1);
    c.fake.behave(
        a,
        Behaviour {
            backfill_steps: 5,
            cut_takes: Duration::from_millis(200),
            ..Behaviour::default()
        },
    );
    assert_eq!(c.create(view("a", &[t])).await, a);
    let b = c.create(view("b", &[a])).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(c.meta.job_status(b).unwrap().state, JobState::WaitingForInputs { inputs: vec![a] });
    c.meta.wait_created(b, &Default::default()).await.unwrap();
    assert_eq!(c.read(&[a, b, t]).await, [1, 1, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_failure_reported_between_cuts_starts_a_new_generation() {
    let c = Cluster::new().await;
    let t = c.created(table("t")).await;
    let v = c.created(view("v", &[t])).await;
    let before = c.meta.job_status(v).unwrap().generation;
    c.meta.report_failure(v, before, SqlError::internal("out of luck"));
    tokio::time::sleep(Duration::from_millis(10)).await;
    let JobState::Failed { reason, .. } = c.meta.job_status(v).unwrap().state else {
        panic!("not failed")
    };
    assert_eq!(reason, "out of luck");
    tokio::time::sleep(Duration::from_secs(1)).await;
    let status = c.meta.job_status(v).unwrap();
    assert_eq!((status.state, status.counters.restarts), (JobState::Running, 1));
    assert!(status.generation > before);
    // The old generation's word no longer counts.
    c.meta.report_failure(v, before, SqlError::internal("late"));
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(c.meta.job_status(v).unwrap().state, JobState::Running);
    c.insert(t).await;
    assert_eq!(c.read(&[v]).await, [1]);
}

#[tokio::test(start_paused = true)]
async fn a_paused_sink_stands_still_and_holds_up_nobody() {
    let c = Cluster::new().await;
    let t = c.created(table("t")).await;
    let s = c.created(relation("s", RelationKind::Sink, &[t])).await;
    c.meta.alter_relation(s, Vec::new(), Some(true)).await.unwrap();
    let cuts = c.fake.cuts_of(s).len();
    c.insert(t).await;
    c.meta.flush().await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(c.meta.job_status(s).unwrap().state, JobState::Paused);
    let c = c.restart().await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(c.meta.job_status(s).unwrap().state, JobState::Paused);
    assert_eq!(c.fake.cuts_of(s).len(), cuts);
    // Whoever waits after the ALTER waits for the sink too.
    c.meta.alter_relation(s, Vec::new(), Some(false)).await.unwrap();
    c.meta.flush().await.unwrap();
    assert_eq!(c.fake.value_at(s, c.meta.head()), 1);
    assert_eq!(c.meta.job_status(s).unwrap().state, JobState::Running);
    c.meta.alter_relation(s, Vec::new(), Some(true)).await.unwrap();
    c.meta.drop_relations(&[s]).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(c.fake.is_stopped(s));
}
