//! Who looks, after a record, only at the jobs that it may end misses no generation that has ended.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::JobId;
use millrace_rpc::catalog::Relation;
use millrace_rpc::log::{AlterRelation, Entry, LogRecord};
use proptest::prelude::*;

use super::fake::{Behaviour, Cluster};
use super::fold::{history, run};
use super::table;
use crate::endings::MayEnd;
use crate::fold::apply;
use crate::log::LogStore;
use crate::state::{JobRecord, MetaState};

/// The jobs that are gone, run elsewhere or have another generation.
fn ended(before: &MetaState, after: &MetaState) -> Vec<JobId> {
    let place = |job: &JobRecord| (job.version.generation, job.process);
    let goes_on = |id: &JobId, job: &JobRecord| after.jobs.get(id).map(place) == Some(place(job));
    before.jobs.iter().filter(|(id, job)| !goes_on(id, job)).map(|(id, _)| *id).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn no_ended_generation_is_missed(history in history()) {
        let (records, states) = run(&history);
        for (record, pair) in records.iter().zip(states.windows(2)) {
            let may_end = MayEnd::of([record]);
            for id in ended(&pair[0], &pair[1]) {
                prop_assert!(may_end.includes(id), "{} ends with {:?}", id, record);
            }
        }
    }
}

fn name(entry: &Entry) -> &'static str {
    match entry {
        Entry::AlterRelation(_) => "alter",
        Entry::Commit(_) => "commit",
        Entry::Detach(_) => "detach",
        Entry::DropRelations(_) => "drop",
        Entry::DropSchema(_) => "drop schema",
        Entry::RaiseGenerations(_) => "raise",
        Entry::Rebuild(_) => "rebuild",
        _ => "other",
    }
}

fn names(record: &LogRecord) -> impl Iterator<Item = &'static str> {
    record.entries.iter().filter_map(|entry| entry.entry.as_ref()).map(name)
}

/// What the random histories do not have, too.
#[tokio::test(start_paused = true)]
async fn no_generation_that_a_leader_ends_is_missed() {
    let (c, t, v) = Cluster::with_view().await;
    c.meta.create_schema("s", false).await.unwrap();
    c.created(Relation { schema: "s".to_owned(), ..table("u") }).await;
    c.insert(t).await;
    c.meta.rebuild(v).await.unwrap();
    c.meta.wait_rebuilt(v, &Default::default()).await.unwrap();
    let more_tasks = AlterRelation { id: v.0, parallelism: Some(3), ..AlterRelation::default() };
    c.meta.alter_relation(more_tasks).await.unwrap();
    c.meta.set_setting("changelog_retention", Some("20s")).await.unwrap();
    let broken = Behaviour { fail_cut: Some("planted".to_owned()), ..Behaviour::default() };
    c.fake.behave(v, broken);
    for _ in 0..90 {
        c.insert(t).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    c.meta.drop_schema("s", true).await.unwrap();
    c.meta.drop_relations(&[v]).await.unwrap();

    let log = LogStore::new(Arc::clone(&c.store) as _);
    let (mut state, mut seen) = (MetaState::default(), BTreeSet::new());
    for replayed in log.replay(1, usize::MAX).await.unwrap() {
        let (record, before) = (replayed.record, state.clone());
        apply(&mut state, &record, 0);
        let may_end = MayEnd::of([&record]);
        for id in ended(&before, &state) {
            assert!(may_end.includes(id), "{id} ends with {record:?}");
            seen.extend(names(&record));
        }
    }
    for what in ["alter", "commit", "detach", "drop", "drop schema", "raise", "rebuild"] {
        assert!(seen.contains(what), "{what} is not among {seen:?}");
    }
}
