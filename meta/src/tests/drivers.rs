//! Drivers: cutting, committing, backfill, restarts, idleness.

use std::time::Duration;

use millrace_common::{RelationId, SqlError};
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::log::AlterRelation;
use millrace_rpc::services::MetaService;

use super::fake::{Behaviour, Cluster, STEP_BYTES};
use super::{paused, relation, view};
use crate::gc::GcOptions;
use crate::status::JobState;

#[tokio::test(start_paused = true)]
async fn a_view_follows_its_table_without_anybody_asking() {
    let (c, t, v) = Cluster::with_view().await;
    let epoch = c.insert(t).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(c.fake.value_at(v, epoch), 1);
    assert!(c.meta.frontier(v).unwrap() >= epoch);
}

#[tokio::test(start_paused = true)]
async fn another_number_of_tasks_is_another_generation_that_goes_on() {
    let (c, t, v) = Cluster::with_view().await;
    c.insert(t).await;
    for id in [v, t] {
        let (before, default) = c.fake.tasks_of(id);
        for (asked, tasks) in [(5, 5), (5, 5), (0, default)] {
            let change =
                AlterRelation { id: id.0, parallelism: Some(asked), ..AlterRelation::default() };
            c.meta.alter_relation(change).await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(c.fake.tasks_of(id).1, tasks);
        }
        let (now, _) = c.fake.tasks_of(id);
        assert_eq!(now.0, before.0 + 2, "the same number begins nothing");
    }
    c.insert(t).await;
    assert_eq!(c.read(&[t, v]).await, [2, 2]);
}

#[tokio::test(start_paused = true)]
async fn data_nobody_waits_for_is_cut_once_an_interval() {
    let (c, t, v) = Cluster::with_view().await;
    let before = c.fake.cuts_of(v).len();
    for _ in 0..200 {
        c.insert(t).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let cuts = c.fake.cuts_of(v).len() - before;
    assert!((6..=12).contains(&cuts), "{cuts} cuts in two seconds");
}

/// With a log that takes a second a record, tasks process an epoch while those before are logged. No two commits of a
/// table share a record, and with it an epoch. Every epoch that is read is exact.
#[tokio::test(start_paused = true)]
async fn the_next_epoch_is_processed_while_the_last_is_logged() {
    let (c, t, v) = Cluster::with_view().await;
    let w = c.created(view("w", &[v, t])).await;
    c.store.set_put_takes(Duration::from_secs(1));
    let cut_takes = Duration::from_millis(600);
    c.fake.behave(v, Behaviour { cut_takes, ..Behaviour::default() });
    let inserts = (0..60).map(|n| {
        let fake = &c.fake;
        async move {
            tokio::time::sleep(Duration::from_millis(300) * n).await;
            fake.insert(t).await.unwrap()
        }
    });
    futures::future::join_all(inserts).await;
    assert_eq!(c.fake.most_in_flight(t), 2);
    assert_eq!(c.fake.most_in_flight(v), 2);
    let committed = c.fake.committed_at(t);
    assert!(committed.is_sorted_by(|a, b| a < b), "{committed:?}");
    assert_eq!(c.read(&[t, v, w]).await, [60, 60, 120]);
}

/// Of the epochs of a table that are on their way when it fails, a prefix is in the log, and no insert is acknowledged
/// that is not.
#[tokio::test(start_paused = true)]
async fn a_table_that_fails_with_two_epochs_on_their_way_loses_nothing_acknowledged() {
    let (c, t) = Cluster::with_table().await;
    c.store.set_put_takes(Duration::from_millis(700));
    let mut acknowledged = 0;
    for round in 0..6 {
        let inserts = (0..8).map(|n| {
            let fake = &c.fake;
            async move {
                tokio::time::sleep(Duration::from_millis(300) * n).await;
                fake.insert(t).await.is_ok()
            }
        });
        let fails = async {
            tokio::time::sleep(Duration::from_millis(900 + 130 * round)).await;
            let generation = c.meta.job_status(t).unwrap().generation;
            c.meta.report_failure(t, generation, SqlError::internal("out of luck"));
        };
        let (inserted, ()) = tokio::join!(futures::future::join_all(inserts), fails);
        acknowledged += inserted.into_iter().filter(|ok| *ok).count() as i64;
        tokio::time::sleep(Duration::from_secs(60)).await;
        c.insert(t).await;
        acknowledged += 1;
    }
    assert_eq!(c.fake.most_in_flight(t), 2);
    let rows = c.meta.job_status(t).unwrap().version.row_count;
    assert!(rows >= acknowledged && acknowledged > 6, "{rows} rows, {acknowledged} acknowledged");
    assert_eq!(c.meta.job_status(t).unwrap().state, JobState::Running);
}

/// The sink `s` of the table `t`.
async fn with_sink() -> (Cluster, RelationId, RelationId) {
    let (c, t) = Cluster::with_table().await;
    let sink = c.created(relation("s", RelationKind::Sink, &[t])).await;
    (c, t, sink)
}

/// While a sink's target takes a change, the next is processed; the fake target sees to it that it is not logged.
#[tokio::test(start_paused = true)]
async fn a_sink_processes_the_next_epoch_while_its_target_takes_the_last() {
    let (c, t, s) = with_sink().await;
    let publish_takes = Duration::from_secs(1);
    c.fake.behave(s, Behaviour { publish_takes, ..Behaviour::default() });
    for _ in 0..20 {
        c.insert(t).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(c.fake.most_staged(s), 2);
    let published = c.fake.published_by(s);
    assert_eq!(published, (1..=published.len() as u64).collect::<Vec<_>>());
    assert_eq!(c.fake.value_at(s, c.meta.head()), 20);
    let status = c.meta.job_status(s).unwrap();
    assert_eq!((status.published, status.staged), (published.len() as u64, 0));
}

/// A sink whose target refuses is shown as stalled whatever else happens to it, waits while it is paused, and then
/// publishes everything in order.
#[tokio::test(start_paused = true)]
async fn a_stalled_sink_says_so_pauses_and_goes_on() {
    let (c, t, s) = with_sink().await;
    let refuses = Some("no".to_owned());
    c.fake.behave(s, Behaviour { fail_publish: refuses.clone(), ..Behaviour::default() });
    for _ in 0..10 {
        c.insert(t).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        let state = c.meta.job_status(s).unwrap().state;
        assert!(
            matches!(&state, JobState::Stalled { reason, .. } if reason.starts_with("no")),
            "{state:?}"
        );
    }
    c.meta.alter_relation(paused(s, true)).await.unwrap();
    c.fake.behave(s, Behaviour::default());
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(c.meta.job_status(s).unwrap().state, JobState::Paused);
    assert!(c.fake.published_by(s).is_empty());
    c.insert(t).await;
    c.meta.alter_relation(paused(s, false)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(c.meta.job_status(s).unwrap().state, JobState::Running);
    let published = c.fake.published_by(s);
    assert_eq!(published, (1..=published.len() as u64).collect::<Vec<_>>());
    assert_eq!(c.fake.value_at(s, c.meta.head()), 11);
    // A failure takes nothing back and repeats nothing.
    let generation = c.meta.job_status(s).unwrap().generation;
    c.meta.report_failure(s, generation, SqlError::internal("out of luck"));
    c.insert(t).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let after = c.fake.published_by(s);
    assert_eq!(after, (1..=published.len() as u64 + 1).collect::<Vec<_>>());
}

/// A view that commits nothing, because what it reads has not changed, still goes on: what reads it must hear of it.
#[tokio::test(start_paused = true)]
async fn who_reads_an_unchanged_view_behind_an_unchanged_view_wakes() {
    let (c, t) = Cluster::with_table().await;
    let slow = Behaviour {
        filters_all: true,
        cut_takes: Duration::from_millis(400),
        ..Behaviour::default()
    };
    c.fake.behave(RelationId(t.0 + 1), slow);
    let v = c.created(view("v", &[t])).await;
    let w = c.created(view("w", &[v])).await;
    let u = c.created(view("u", &[t])).await;
    let y = c.created(view("y", &[w, u])).await;
    for n in 1..5 {
        c.insert(t).await;
        assert_eq!(c.read(&[y]).await, [n]);
    }
    assert_eq!(c.fake.value_at(v, c.meta.head()), 0);
    // Nobody asks: the views follow all the same.
    c.insert(t).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(c.fake.value_at(y, c.meta.head()), 5);
}

/// What was in the log when a driver ended counts; what was not does not.
#[tokio::test(start_paused = true)]
async fn epochs_in_flight_survive_a_failure_and_a_restart() {
    let (c, t, v) = Cluster::with_view().await;
    c.store.set_put_takes(Duration::from_secs(1));
    for round in 0..12_u64 {
        let inserts = (0..8).map(|n| {
            let fake = &c.fake;
            async move {
                tokio::time::sleep(Duration::from_millis(250) * n).await;
                fake.insert(t).await.unwrap()
            }
        });
        let fail = async {
            tokio::time::sleep(Duration::from_millis(1_000 + 170 * round)).await;
            let generation = c.meta.job_status(v).unwrap().generation;
            c.meta.report_failure(v, generation, SqlError::internal("out of luck"));
        };
        futures::future::join(futures::future::join_all(inserts), fail).await;
        while c.meta.job_status(v).unwrap().state != JobState::Running {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let rows = 8 * (round as i64 + 1);
        assert_eq!(c.read(&[t, v]).await, [rows, rows]);
    }
    assert!(c.meta.job_status(v).unwrap().counters.restarts > 0);
    c.store.set_put_takes(Duration::ZERO);
    let c = c.restart().await;
    assert_eq!(c.read(&[t, v]).await, [96, 96]);
}

#[tokio::test(start_paused = true)]
async fn idle_makes_no_requests_and_no_cuts() {
    let (c, t, v) = Cluster::with_view().await;
    c.insert(t).await;
    assert_eq!(c.read(&[t, v]).await, [1, 1]);
    // After the start, objects of earlier processes are looked for once.
    tokio::time::sleep(GcOptions::default().period + Duration::from_secs(1)).await;
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
    let (c, t) = Cluster::with_table().await;
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
    let (c, t, v) = Cluster::with_view().await;
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
    let (c, t) = Cluster::with_table().await;
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
    let (c, t, v) = Cluster::with_view().await;
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

/// A table changes a tenth of a step a second, for an hour, while a view of it cannot run. What it has missed it takes
/// in step by step, without a pause in between.
#[tokio::test(start_paused = true)]
async fn a_view_that_failed_for_an_hour_catches_up_in_steps() {
    let (c, t, v) = Cluster::with_view().await;
    c.fake.behave(t, Behaviour { commit_bytes: STEP_BYTES / 10, ..Behaviour::default() });
    let failing = Some("bad row".to_owned());
    c.fake.behave(v, Behaviour { fail_cut: failing, ..Behaviour::default() });
    let mut inserted = Vec::new();
    for _ in 0..3_600 {
        inserted.push(c.insert(t).await);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let before = c.fake.cuts_of(v).len();
    c.fake.behave(v, Behaviour::default());
    // The longest pause before a failed job starts again.
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert_eq!(c.read(&[t, v]).await, [3_600, 3_600]);
    let cuts = c.fake.cuts_of(v).split_off(before);
    assert!((360..720).contains(&cuts.len()), "{} steps", cuts.len());
    for step in cuts.windows(2) {
        let commits = inserted.iter().filter(|e| **e > step[0] && **e <= step[1]).count();
        assert!(commits <= 11, "{commits} commits in a step");
    }
}

#[tokio::test(start_paused = true)]
async fn a_paused_sink_stands_still_and_holds_up_nobody() {
    let (c, t) = Cluster::with_table().await;
    let s = c.created(relation("s", RelationKind::Sink, &[t])).await;
    c.meta.alter_relation(paused(s, true)).await.unwrap();
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
    c.meta.alter_relation(paused(s, false)).await.unwrap();
    c.meta.flush().await.unwrap();
    assert_eq!(c.fake.value_at(s, c.meta.head()), 1);
    assert_eq!(c.meta.job_status(s).unwrap().state, JobState::Running);
    c.meta.alter_relation(paused(s, true)).await.unwrap();
    c.meta.drop_relations(&[s]).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(c.fake.is_stopped(s));
}
