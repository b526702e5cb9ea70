//! A job that fails or hangs delays nobody, and goes at once when dropped.

use std::time::Duration;

use millrace_common::SqlState;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::fake::{Behaviour, Cluster};
use super::view;
use crate::status::JobState;

fn hang() -> Behaviour {
    Behaviour { hang: true, ..Behaviour::default() }
}

fn failing(reason: &str) -> Behaviour {
    Behaviour { fail_cut: Some(reason.to_owned()), ..Behaviour::default() }
}

#[tokio::test(start_paused = true)]
async fn hanging_and_failing_views_do_not_delay_a_third() {
    let (c, t) = Cluster::with_table().await;
    let (stuck, broken) =
        (c.created(view("stuck", &[t])).await, c.created(view("broken", &[t])).await);
    let good = c.created(view("good", &[t])).await;
    c.fake.behave(stuck, hang());
    c.fake.behave(broken, failing("bad row"));
    for n in 1..=50 {
        let begun = Instant::now();
        c.insert(t).await;
        assert_eq!(c.read(&[good, t]).await, [n, n]);
        assert!(begun.elapsed() < Duration::from_millis(50));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(
        matches!(c.meta.job_status(broken).unwrap().state, JobState::Failed { reason, .. } if reason == "bad row")
    );
    assert!(c.meta.job_status(stuck).unwrap().lag_ms > 1_000);
    c.meta.flush().await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn dropping_a_hanging_job_returns_at_once() {
    let (c, t, v) = Cluster::with_view().await;
    c.fake.behave(v, hang());
    c.insert(t).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let begun = Instant::now();
    c.meta.drop_relations(&[v]).await.unwrap();
    assert!(begun.elapsed() < Duration::from_millis(100));
    assert!(c.meta.job_status(v).is_none() && c.meta.catalog().relation(v).is_none());
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(c.fake.is_stopped(v));
    // The name is free again.
    c.created(view("v", &[t])).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_that_cannot_start_says_why_and_the_rest_starts() {
    let (c, t) = Cluster::with_table().await;
    let (bad, good) = (c.created(view("bad", &[t])).await, c.created(view("good", &[t])).await);
    let fail_start = Some("the graph has version 9".to_owned());
    c.fake.behave(bad, Behaviour { fail_start, ..Behaviour::default() });
    let c = c.restart().await;
    c.insert(t).await;
    assert_eq!(c.read(&[good]).await, [1]);
    let error = c.meta.read_epoch(&[bad], None, true).await.unwrap_err();
    assert_eq!(error.state, SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE);
    assert_eq!(error.detail.as_deref(), Some("the graph has version 9"));
    // Its last content stays readable, and it recovers by itself when the cause is gone.
    c.meta.read_epoch(&[bad], None, false).await.unwrap();
    c.fake.behave(bad, Behaviour::default());
    tokio::time::sleep(Duration::from_secs(40)).await;
    assert_eq!(c.read(&[bad, good]).await, [1, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_creation_that_fails_tells_its_waiter_and_one_that_is_cancelled_too() {
    let (c, t) = Cluster::with_table().await;
    c.insert(t).await;
    let v = c.create(view("v", &[t])).await;
    c.fake.behave(v, failing("no such function"));
    let error = c.meta.wait_created(v, &CancellationToken::new()).await;
    if let Err(error) = error {
        assert!(error.message.contains("no such function"), "{error}");
    }
    let w = c.create(view("w", &[t])).await;
    c.fake.behave(w, hang());
    let cancel = CancellationToken::new();
    let stop = cancel.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(50)).await;
        stop.cancel();
    });
    match c.meta.wait_created(w, &cancel).await {
        Ok(()) => {}
        Err(error) => assert_eq!(error.state, SqlState::QUERY_CANCELED),
    }
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_panics_says_so_and_starts_again() {
    let (c, t) = Cluster::with_table().await;
    let (bad, good) = (c.created(view("bad", &[t])).await, c.created(view("good", &[t])).await);
    c.fake.behave(bad, Behaviour { panic_in_cut: true, ..Behaviour::default() });
    c.insert(t).await;
    assert_eq!(c.read(&[good]).await, [1]);
    let failed = || c.meta.job_status(bad).unwrap().state;
    while !matches!(failed(), JobState::Failed { reason, .. } if reason.contains("planted")) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    c.fake.behave(bad, Behaviour::default());
    tokio::time::sleep(Duration::from_secs(40)).await;
    assert_eq!(c.read(&[bad, good]).await, [1, 1]);
}
