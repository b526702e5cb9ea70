//! Strict serializable reads over several views.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{Epoch, RelationId, SqlState};
use millrace_rpc::catalog::RelationKind;

use crate::log::LEADER_LEASE;

use super::fake::{Behaviour, Cluster};
use super::{relation, table, view};

fn slow(ms: u64) -> Behaviour {
    Behaviour { cut_takes: Duration::from_millis(ms), ..Behaviour::default() }
}

#[tokio::test(start_paused = true)]
async fn a_read_sees_everything_acknowledged_before_it() {
    let (c, t, v) = Cluster::with_view().await;
    let w = c.created(view("w", &[v])).await;
    for n in 1..=20 {
        c.insert(t).await;
        assert_eq!(c.read(&[w]).await, [n]);
        assert_eq!(c.read(&[t, v, w]).await, [n, n, n]);
    }
}

/// Another server has taken over the store and written to it. Without a write of its own the first one reads
/// nothing of that; it must not answer with what was there before.
#[tokio::test(start_paused = true)]
async fn a_server_that_was_deposed_answers_no_read() {
    let (c, t) = Cluster::with_table().await;
    c.insert(t).await;
    let other = Cluster::on(Arc::clone(&c.store), Arc::default()).await;
    tokio::time::advance(LEADER_LEASE).await;
    let error = c.meta.read_epoch(&[t], None, true).await.unwrap_err();
    assert_eq!(error.state, SqlState::ADMIN_SHUTDOWN, "{error}");
    assert!(error.message.contains("another server"), "{error}");
    assert_eq!(c.meta.flush().await.unwrap_err().state, SqlState::ADMIN_SHUTDOWN);
    other.meta.read_epoch(&[t], None, true).await.unwrap();
}

/// Views of different speed over a table that never rests: every read finds one epoch at which all of
/// them are exact, sees all that was acknowledged, and needs no quiet moment.
#[tokio::test(start_paused = true)]
async fn busy_views_of_different_speed_are_read_at_one_epoch() {
    let c = Arc::new(Cluster::new().await);
    let t = c.created(table("t")).await;
    let u = c.created(table("u")).await;
    let v = c.created(view("v", &[t])).await;
    let w = c.created(view("w", &[t, u])).await;
    let x = c.created(view("x", &[v, w])).await;
    c.fake.behave(v, slow(30));
    c.fake.behave(w, slow(170));
    c.fake.behave(x, slow(55));
    for id in [t, u] {
        let c = Arc::clone(&c);
        tokio::spawn(async move {
            loop {
                c.insert(id).await;
                tokio::time::sleep(Duration::from_millis(7)).await;
            }
        });
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut last = 0;
    for _ in 0..20 {
        let acknowledged = c.fake.value_at(t, Epoch::MAX);
        let r = c.read(&[t, u, v, w, x]).await;
        assert_eq!((r[2], r[3], r[4]), (r[0], r[0] + r[1], 2 * r[0] + r[1]), "{r:?}");
        assert!(r[0] >= acknowledged && r[0] >= last);
        last = r[0];
        tokio::time::sleep(Duration::from_millis(130)).await;
    }
}

/// Nobody waits, and still a view over two busy views makes progress: they meet on the grid.
#[tokio::test(start_paused = true)]
async fn a_view_over_two_busy_views_is_never_starved() {
    let c = Arc::new(Cluster::new().await);
    let t = c.created(table("t")).await;
    let v = c.created(view("v", &[t])).await;
    let w = c.created(view("w", &[t])).await;
    let x = c.created(view("x", &[v, w])).await;
    c.fake.behave(v, slow(110));
    c.fake.behave(w, slow(730));
    let writer = Arc::clone(&c);
    tokio::spawn(async move {
        loop {
            writer.insert(t).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let lag = c.meta.job_status(x).unwrap().lag_ms;
        assert!(lag <= 12_000, "{lag} ms behind");
    }
    for epoch in c.fake.cuts_of(x) {
        assert_eq!(c.fake.value_at(x, epoch), 2 * c.fake.value_at(t, epoch));
    }
    assert!(c.fake.cuts_of(x).len() > 5);
}

#[tokio::test(start_paused = true)]
async fn a_laggard_is_named_when_time_is_up() {
    let (c, t, v) = Cluster::with_view().await;
    let w = c.created(view("w", &[v])).await;
    c.fake.behave(v, Behaviour { hang: true, ..Behaviour::default() });
    c.insert(t).await;
    let error =
        c.meta.read_epoch(&[w, t], Some(Duration::from_millis(300)), true).await.unwrap_err();
    assert_eq!(error.state, SqlState::QUERY_CANCELED);
    assert!(error.message.contains("\"v\"") && error.message.contains("300 ms"), "{error}");
    let detail = error.into_parts().detail.unwrap_or_default();
    let age = detail.split("does not have yet is ").nth(1).and_then(|d| d.split(' ').next());
    let age: u64 = age.and_then(|ms| ms.parse().ok()).unwrap_or_default();
    assert!(age >= 300, "{detail}");
    assert_eq!(c.read(&[t]).await, [1]);
    c.meta.read_epoch(&[w], None, false).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_relation_being_created_is_not_readable_and_says_how_far_it_is() {
    let (c, t) = Cluster::with_table().await;
    c.insert(t).await;
    let v = RelationId(t.0 + 1);
    c.fake.behave(v, Behaviour { backfill_steps: 100, ..slow(100) });
    assert_eq!(c.create(view("v", &[t])).await, v);
    tokio::time::sleep(Duration::from_millis(500)).await;
    for fresh in [true, false] {
        let error = c.meta.read_epoch(&[v], None, fresh).await.unwrap_err();
        assert_eq!(error.state, SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE);
        assert!(error.detail.as_deref().unwrap().contains("of about 100 rows"));
    }
    c.meta.flush().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn flush_returns_when_all_views_have_everything() {
    let (c, t, v) = Cluster::with_view().await;
    let w = c.created(view("w", &[v, t])).await;
    c.fake.behave(v, slow(400));
    let epoch = c.insert(t).await;
    c.meta.flush().await.unwrap();
    assert!(c.meta.frontier(w).unwrap() >= epoch);
    assert_eq!(c.fake.value_at(w, Epoch::MAX), 2);
}

#[tokio::test(start_paused = true)]
async fn jobs_read_through_plain_views() {
    let (c, t) = Cluster::with_table().await;
    let plain = c.created(relation("p", RelationKind::View, &[t])).await;
    let v = c.created(view("v", &[plain])).await;
    c.insert(t).await;
    assert_eq!(c.read(&[v]).await, [1]);
    assert_eq!(c.meta.catalog().base_relations(&[plain]), [t]);
    let error = c.meta.drop_relations(&[t]).await.unwrap_err();
    assert_eq!(error.state, SqlState::DEPENDENT_OBJECTS_STILL_EXIST);
    let all = c.meta.catalog().cascade(&[t]);
    assert_eq!(all, [v, plain, t]);
    c.meta.drop_relations(&all).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_view_of_constants_is_exact_everywhere() {
    let (c, t) = Cluster::with_table().await;
    let v = c.created(view("v", &[])).await;
    let epoch = c.insert(t).await;
    assert!(c.meta.read_epoch(&[t, v], None, true).await.unwrap() >= epoch);
}
