//! Segments that many jobs share, of which all but one have gone on: what is left moves, and the bucket holds little
//! more than what is alive.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::TryStreamExt;
use millrace::Tuning;
use millrace_common::RelationId;
use millrace_meta::Meta;
use millrace_rpc::version::SliceRef;
use millrace_storage::sim::{Profile, SimStore};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore};
use tokio_postgres::Client;

use super::{Node, PATIENCE, object_bytes, one, run};

const BUSY: usize = 5;
const FLUSH_COMMITS: usize = 4;
const QUIET: usize = 3;
const QUIET_COMMITS: usize = 3;
/// Rows of a commit.
const QUIET_ROWS: usize = 20;
const ROUNDS: usize = 12;

const TUNING: Tuning = Tuning {
    inline_bytes: Some(64),
    flush_commits: Some(FLUSH_COMMITS),
    gc_interval: Some(Duration::from_millis(50)),
    ..Tuning::DEFAULT
};

/// Rows of text that does not compress.
fn insert(table: &str, round: usize, rows: usize) -> String {
    let first = round * rows;
    let last = first + rows - 1;
    format!(
        "INSERT INTO {table} SELECT x, md5(x::text) FROM generate_series({first}, {last}) AS s(x)"
    )
}

/// A table that is seldom written to.
struct Quiet {
    table: String,
    writer: Client,
    commits: usize,
}

impl Quiet {
    async fn create(node: &Node, number: usize) -> Quiet {
        let (table, writer) = (format!("quiet{number}"), node.connect().await);
        run(&writer, &format!("CREATE TABLE {table} (k int PRIMARY KEY, v varchar)")).await;
        Quiet { table, writer, commits: 0 }
    }

    async fn commit(&mut self) {
        run(&self.writer, &insert(&self.table, self.commits, QUIET_ROWS)).await;
        self.commits += 1;
    }

    fn slices(&self, meta: &Meta) -> Vec<SliceRef> {
        let id = meta.catalog().by_name("public", &self.table).expect("it exists").id;
        meta.version(RelationId(id)).expect("it has a version").tail.clone()
    }
}

/// Objects of which less than 30 % is alive: name, size and live bytes.
async fn sparse(meta: &Meta, store: &Arc<dyn ObjectStore>) -> Vec<(String, u64, u64)> {
    let mut live: BTreeMap<String, u64> = BTreeMap::new();
    for job in meta.job_statuses() {
        let runs = job.version.runs.iter().map(|r| (&r.object, r.length));
        for (object, length) in runs.chain(job.version.tail.iter().map(|s| (&s.object, s.length))) {
            *live.entry(object.clone()).or_default() += length;
        }
    }
    let objects: Vec<_> =
        store.list(Some(&Path::from("data"))).try_collect().await.expect("the store lists");
    let named = |o: ObjectMeta| {
        let live = *live.get(o.location.as_ref())?;
        (live * 100 < o.size * 30).then(|| (o.location.to_string(), o.size, live))
    };
    objects.into_iter().filter_map(named).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_live_slice_does_not_keep_what_has_died_around_it() {
    let memory: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    // While a put is under way, the commits that come share the next one.
    let slow = SimStore::new(Arc::clone(&memory), Profile::S3, 1);
    let store: Arc<dyn ObjectStore> = Arc::new(slow.clone());
    let node = Node::start_at(&store, TUNING, Duration::from_millis(1)).await;
    let client = node.connect().await;
    let meta = &node.server().meta;
    let (mut writers, mut quiet) = (Vec::new(), Vec::new());
    for t in 0..QUIET {
        quiet.push(Quiet::create(&node, t).await);
    }
    for t in 0..BUSY {
        run(&client, &format!("CREATE TABLE busy{t} (k int PRIMARY KEY, v varchar)")).await;
        writers.push(node.connect().await);
    }
    let deadline = Instant::now() + PATIENCE;
    for round in 0.. {
        // Which commits share a put depends on when they come: further ones come until what is alive of some has moved.
        let has_moved = meta.rewrite_stats().segments > 0;
        if round >= ROUNDS && has_moved {
            break;
        }
        if round >= QUIET_COMMITS && !has_moved {
            assert!(Instant::now() < deadline, "nothing moves");
            // On a busy machine commits come one after another: the longer a put takes, the more share the next one.
            let times = 1 + round as u32 / 8;
            let (p50, p99) = (Profile::S3.p50 * times, Profile::S3.p99 * times);
            slow.set_profile(Profile { p50, p99, ..Profile::S3 });
            let another = Quiet::create(&node, quiet.len()).await;
            quiet.push(another);
        }
        let inserts = writers.iter().enumerate().map(|(t, writer)| {
            let table = format!("busy{t}");
            async move {
                run(writer, &format!("DELETE FROM {table} WHERE k >= 0")).await;
                run(writer, &insert(&table, round, 1_000)).await;
            }
        });
        let all = quiet.len();
        let writes = quiet.iter_mut().enumerate().map(|(t, quiet)| async move {
            if round < QUIET_COMMITS || !has_moved && t + 1 == all {
                quiet.commit().await;
            }
        });
        tokio::join!(futures::future::join_all(inserts), futures::future::join_all(writes));
    }
    slow.set_profile(Profile::S3);
    let slices = || -> Vec<(u64, u64)> {
        let slices = quiet.iter().flat_map(|q| q.slices(meta));
        slices.map(|s| (s.sequence, s.epoch)).collect()
    };
    let commits = || quiet.iter().map(|q| q.commits);
    assert_eq!(slices().len(), commits().sum::<usize>(), "their slices are alive");
    let before = slices();
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (all, live) = (object_bytes(&memory).await, meta.live_bytes());
        let rewritten = meta.rewrite_stats();
        let sparse = sparse(meta, &memory).await;
        if all <= 2 * live && sparse.is_empty() {
            println!("{all} bytes in the bucket, {live} alive, {rewritten:?}");
            assert!(rewritten.copied_bytes * 10 < rewritten.freed_bytes * 3);
            break;
        }
        assert!(
            Instant::now() < deadline,
            "{all} bytes in the bucket, {live} alive, {rewritten:?}: {sparse:?}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(slices(), before, "they are the same commits in the same order");

    // When what is garbage by now has been deleted, nobody looks any more: it is the silence that is waited for.
    let mut seen = (meta.rewrite_stats(), slow.stats().requests());
    loop {
        tokio::time::sleep(Duration::from_millis(700)).await;
        let now = (meta.rewrite_stats(), slow.stats().requests());
        if now == seen {
            break;
        }
        assert!(Instant::now() < deadline, "an idle server makes requests: {seen:?}, {now:?}");
        seen = now;
    }
    let expected: Vec<_> = commits().map(|commits| (commits * QUIET_ROWS).to_string()).collect();
    drop((client, writers, quiet, node));

    let node = Node::start(&memory, TUNING).await;
    let client = node.connect().await;
    for (t, rows) in expected.iter().enumerate() {
        let count = format!("SELECT count(*) FROM quiet{t} WHERE v = md5(k::text)");
        assert_eq!(one(&client, &count).await, *rows);
    }
    for t in 0..BUSY {
        let count = format!("SELECT count(*) FROM busy{t} WHERE v = md5(k::text)");
        assert_eq!(one(&client, &count).await, "1000");
    }
}
