//! A first scan finds the versions that it reads, however far apart its inputs are.

use std::time::Duration;

use millrace_common::{Epoch, RelationId};

use super::fake::{Behaviour, Cluster};
use super::{table, view};
use crate::status::JobState;

/// Longer than `snapshot_retention`.
const LONG: u64 = 90;

fn broken() -> Behaviour {
    Behaviour { fail_cut: Some("planted".to_owned()), ..Behaviour::default() }
}

/// A view of one table that has stood still for longer than versions are kept, and another table that has not.
async fn far_apart() -> (Cluster, RelationId, RelationId, RelationId) {
    let (c, t, v) = Cluster::with_view().await;
    c.meta.set_setting("snapshot_retention", Some("30s")).await.unwrap();
    let u = c.created(table("u")).await;
    c.insert(t).await;
    assert_eq!(c.read(&[v]).await, [1]);
    c.fake.behave(v, broken());
    for _ in 0..LONG {
        c.insert(t).await;
        c.insert(u).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let stands = c.meta.frontier(v).unwrap();
    assert!(given(&c, u) > stands, "{} {stands}: they are not far apart", given(&c, u));
    (c, t, u, v)
}

/// What the worker was told.
fn given(c: &Cluster, id: RelationId) -> Epoch {
    c.meta.horizon_for_tests(id)
}

#[tokio::test(start_paused = true)]
async fn a_view_of_inputs_that_are_far_apart_begins_when_they_meet() {
    let (c, t, u, v) = far_apart().await;
    let w = c.create(view("w", &[v, u])).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(c.fake.cuts_of(w).is_empty(), "it reads what may be gone");
    let state = c.meta.job_status(w).unwrap().state;
    assert_eq!(state, JobState::WaitingForInputs { inputs: vec![v] });
    // Nothing is written again and again meanwhile.
    let before = c.meta.state_for_tests().number;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(c.meta.state_for_tests().number < before + 10);

    c.fake.behave(v, Behaviour::default());
    c.meta.wait_created(w, &Default::default()).await.unwrap();
    let scan = *c.fake.cuts_of(w).first().unwrap();
    assert!(scan >= given(&c, u), "{scan} {}", given(&c, u));
    c.insert(t).await;
    let rows = LONG as i64;
    assert_eq!(c.read(&[v, u, w]).await, [rows + 2, rows, 2 * rows + 2]);
}

/// From the moment its epoch is fixed, a scan keeps what it reads.
#[tokio::test(start_paused = true)]
async fn a_long_scan_keeps_the_versions_of_its_epoch() {
    let (c, t, v) = Cluster::with_view().await;
    c.meta.set_setting("snapshot_retention", Some("30s")).await.unwrap();
    c.insert(t).await;
    assert_eq!(c.read(&[v]).await, [1]);
    let slow =
        Behaviour { backfill_steps: 30, cut_takes: Duration::from_secs(5), ..Behaviour::default() };
    // Its id is the next one.
    c.fake.behave(RelationId(v.0 + 1), slow);
    let w = c.create(view("w", &[t, v])).await;
    assert_eq!(w.0, v.0 + 1);
    for _ in 0..LONG {
        c.insert(t).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let scan = c.fake.cuts_of(w)[0];
    assert!(c.meta.job_status(w).unwrap().version.backfill.is_some(), "it is over");
    assert!(given(&c, t) <= scan && given(&c, v) <= scan);
    c.meta.wait_created(w, &Default::default()).await.unwrap();
    assert!(c.fake.cuts_of(w).iter().take(30).all(|cut| *cut == scan), "it began once");
}
