//! What is written for nothing is given up, every object of it and no other (docs/design.md §9, garbage collection).

use std::collections::BTreeSet;
use std::sync::Arc;

use arrow::array::{BinaryArray, Int64Array, RecordBatch};
use futures::TryStreamExt;
use millrace_common::access::AccessClass;
use millrace_common::{Epoch, RelationId};
use millrace_rpc::version::JobVersion;
use millrace_storage::given_up::GivenUp;
use millrace_storage::stage::Repeated;
use millrace_storage::{JobStore, Persisted, StateStore, StoreOptions};
use object_store::ObjectStore;
use object_store::memory::InMemory;

use crate::numbers::{TABLE, desc, schema};

struct World {
    memory: Arc<InMemory>,
    given_up: Arc<GivenUp>,
    store: Arc<StateStore>,
}

impl World {
    /// Commits beyond so many bytes go into runs.
    async fn new(direct_run_bytes: usize) -> World {
        let memory = Arc::new(InMemory::new());
        let given_up = Arc::<GivenUp>::default();
        let options = StoreOptions::new(Arc::clone(&memory) as _, 1);
        let given = Arc::clone(&given_up);
        let options =
            StoreOptions { inline_bytes: 0, direct_run_bytes, given_up: given, ..options };
        let store = StateStore::open(options).await.unwrap();
        World { memory, given_up, store }
    }

    async fn job(&self) -> Arc<JobStore> {
        let tables = vec![desc(AccessClass::PointUpdate)];
        self.store.open_job(RelationId(20_000), tables, &JobVersion::default()).await.unwrap()
    }

    async fn objects(&self) -> BTreeSet<String> {
        let listed = self.memory.list(None).map_ok(|o| o.location.to_string());
        listed.try_collect().await.unwrap()
    }

    fn given_up(&self) -> BTreeSet<String> {
        self.given_up.take(usize::MAX).into_iter().collect()
    }
}

fn rows(n: i64) -> (BinaryArray, RecordBatch) {
    let key = BinaryArray::from_iter_values([[0u8, 0, 7]]);
    let n = Int64Array::from_iter_values([n]);
    (key, RecordBatch::try_new(schema(), vec![Arc::new(n)]).unwrap())
}

async fn persist(job: &Arc<JobStore>, commit: u64) -> Persisted {
    let mut writer = job.writer(TABLE).unwrap();
    let (keys, values) = rows(1);
    writer.write(keys, None, values);
    job.persist(commit, writer.seal().unwrap()).await.unwrap()
}

/// As slices and as runs.
#[tokio::test]
async fn void_epochs_give_up_what_they_have_written_and_published_ones_nothing() {
    for direct_run_bytes in [usize::MAX, 0] {
        let world = World::new(direct_run_bytes).await;
        let job = world.job().await;
        let mut held = Vec::new();
        for commit in 1..=10 {
            job.stage(vec![7; 100].into()).await.unwrap();
            held.push(persist(&job, commit).await);
        }
        let void = world.objects().await;
        assert!(void.len() >= 10);
        assert!(world.given_up().is_empty(), "they may still be committed");
        drop(held);
        assert_eq!(world.given_up(), void);
        job.stage(vec![7; 100].into()).await.unwrap();
        let persisted = persist(&job, 1).await;
        job.publish(Epoch(1), persisted);
        assert!(world.objects().await.len() > void.len());
        assert!(world.given_up().is_empty(), "the log names them");
    }
}

#[tokio::test]
async fn a_flush_is_given_up_with_the_job_unless_it_took_effect() {
    for applied in [false, true] {
        let world = World::new(usize::MAX).await;
        let job = world.job().await;
        let persisted = persist(&job, 1).await;
        job.publish(Epoch(1), persisted);
        let before = world.objects().await;
        let edit = job.flush().await.unwrap();
        let flushed: BTreeSet<String> = &world.objects().await - &before;
        assert_eq!(flushed.len(), 1);
        if applied {
            job.apply_edit(&edit);
        }
        assert!(world.given_up().is_empty(), "the log may still take it");
        world.store.close_job(RelationId(20_000));
        drop(job);
        assert_eq!(world.given_up(), if applied { BTreeSet::new() } else { flushed });
    }
}

#[tokio::test]
async fn a_load_that_comes_to_nothing_is_given_up() {
    let world = World::new(usize::MAX).await;
    let job = world.job().await;
    let mut staging = job.begin_staging(TABLE, Repeated::Add).unwrap();
    let (keys, values) = rows(1);
    staging.write(keys, None, values).unwrap();
    staging.spill().await.unwrap();
    let runs = staging.keep();
    drop(staging);
    let linked = job.link(1, &runs).unwrap();
    assert!(world.given_up().is_empty(), "the log may come to name it");
    drop(linked);
    assert_eq!(world.given_up(), world.objects().await);
}
