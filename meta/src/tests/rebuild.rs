//! A rebuild shows from the moment that it is ordered until its end, so that who waits for rebuilds misses none.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::RelationId;

use super::fake::{Behaviour, Cluster};
use super::view;
use crate::status::JobState;

/// The table `t`, the view `v` of it and the view `x` of both, and both views detached.
async fn detached() -> (Cluster, RelationId, RelationId, RelationId) {
    let (c, t, v) = Cluster::with_view().await;
    let x = c.created(view("x", &[v, t])).await;
    c.meta.set_setting("changelog_retention", Some("20s")).await.unwrap();
    let broken = Behaviour { fail_cut: Some("planted".to_owned()), ..Behaviour::default() };
    c.fake.behave(v, broken);
    for _ in 0..90 {
        c.insert(t).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    for id in [v, x] {
        assert!(matches!(c.meta.job_status(id).unwrap().state, JobState::Detached { .. }));
    }
    (c, t, v, x)
}

/// The log has the rebuild, and its driver has not begun: it waits for the tasks of the generation before, which do not
/// stop.
#[tokio::test(start_paused = true)]
async fn a_rebuild_shows_before_its_driver_begins() {
    let (c, t, v, _) = detached().await;
    c.fake.behave(v, Behaviour { hang: true, ..Behaviour::default() });
    c.meta.rebuild(v).await.unwrap();
    let handle = c.meta.shared.job(v).unwrap();
    let status = c.meta.job_status(v).unwrap();
    assert!(handle.generation().unwrap() < status.generation, "the driver has not begun");
    assert!(matches!(handle.state(), JobState::Detached { .. }), "nor said anything");
    assert!(matches!(status.state, JobState::Rebuilding { .. }), "{:?}", status.state);
    assert!(status.is_being_rebuilt());
    c.fake.behave(v, Behaviour::default());
    c.meta.wait_rebuilt(v, &Default::default()).await.unwrap();
    assert!(!c.meta.job_status(v).unwrap().is_being_rebuilt());
    assert_eq!(c.read(&[t, v]).await, [90, 90]);
}

/// Whatever state it is in when somebody begins to wait.
#[tokio::test(start_paused = true)]
async fn a_rebuild_is_waited_for_in_every_state_that_it_goes_through() {
    let (c, t, v, x) = detached().await;
    let steps = Behaviour {
        backfill_steps: 3,
        cut_takes: Duration::from_millis(500),
        ..Behaviour::default()
    };
    c.fake.behave(v, steps.clone());
    c.fake.behave(x, Behaviour { fail_start: Some("planted".to_owned()), ..steps.clone() });
    let mut changes = c.meta.shared.changes.watch([x]);
    c.meta.rebuild(v).await.unwrap();
    c.meta.rebuild(x).await.unwrap();
    let (mut seen, mut waiting) = (BTreeSet::new(), Vec::new());
    loop {
        changes.mark_seen();
        let status = c.meta.job_status(x).unwrap();
        let has_ended = status.version.backfill.is_none();
        assert_eq!(status.is_being_rebuilt(), !has_ended, "{:?}", status.state);
        if has_ended {
            break;
        }
        let state = status.state.name();
        seen.insert(state);
        let meta = Arc::clone(&c.meta);
        let wait = tokio::spawn(async move { meta.wait_rebuilt(x, &Default::default()).await });
        waiting.push(wait);
        if state == "failed" {
            for wait in waiting.drain(..) {
                assert!(wait.await.unwrap().is_err(), "it is told and not passed over");
            }
            c.fake.behave(x, steps.clone());
        }
        assert!(waiting.iter().all(|wait| !wait.is_finished()), "{state}");
        changes.changed().await;
    }
    assert_eq!(seen, BTreeSet::from(["failed", "rebuilding", "waiting"]));
    for wait in waiting {
        wait.await.unwrap().unwrap();
    }
    assert_eq!(c.read(&[t, v, x]).await, [90, 90, 180]);
}
