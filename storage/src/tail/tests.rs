//! Promises of the tail: how many puts there are, and what waits for what.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::future::join_all;
use millrace_common::EnvHandle;
use millrace_common::task::spawn;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::*;
use crate::put_waits::{PutKind, PutWaits};
use crate::sim::{Faults, Profile, RequestKind, SimStore};

/// What a put takes, whatever its size.
const PUT: Duration = Duration::from_millis(40);
const SMALL_SLICE: usize = 1 << 10;
const LARGE_SLICE: usize = 8 << 20;

struct World {
    sim: SimStore,
    tail: Arc<Tail>,
    waits: Arc<PutWaits>,
    env: EnvHandle,
}

impl World {
    fn new() -> World {
        let sim = SimStore::in_memory(Profile { p50: PUT, p99: PUT, ..Profile::INSTANT }, 1);
        let env = EnvHandle::default();
        let namer = Arc::new(ObjectNamer::new(1));
        let tail = Arc::new(Tail::new(Arc::new(sim.clone()), namer, Arc::default(), &env, 100));
        World { sim, tail, waits: Arc::default(), env }
    }

    /// A slice of this size; its reference, and how long it took.
    fn put(&self, bytes: usize) -> JoinHandle<(SliceRef, Duration)> {
        let (tail, waits, env) =
            (Arc::clone(&self.tail), Arc::clone(&self.waits), self.env.clone());
        spawn("a commit", async move {
            let began = Instant::now();
            let waiting = waits.begin(PutKind::Tail, &env);
            let (slice, _) = tail.put(vec![0; bytes].into(), 7, &waiting).await.unwrap();
            (slice, began.elapsed())
        })
    }

    /// What begins from now on gets no answer.
    fn hang_puts(&self, hang: bool) {
        let hang = if hang { 1.0 } else { 0.0 };
        self.sim.set_faults(Faults { hang, only: Some(RequestKind::Put), ..Faults::default() });
    }
}

/// Lets all that is ready run. Sleeps do not end before every task waits.
async fn settle() {
    sleep(Duration::from_micros(1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_lone_slice_pays_one_put_and_no_delay() {
    let world = World::new();
    for n in 1..=3 {
        let (slice, took) = world.put(SMALL_SLICE).await.unwrap();
        assert!(took < PUT + Duration::from_millis(2), "{took:?}");
        assert_eq!((slice.sequence, slice.length), (7, SMALL_SLICE as u64));
        assert_eq!(world.sim.stats().puts, n);
    }
    let (slice, took) = world.put(100).await.unwrap();
    assert_eq!((slice.inline.len(), took), (100, Duration::ZERO));
    assert_eq!(world.sim.stats().puts, 3, "it rides in the log record");
    assert_eq!(world.tail.held_bytes(), 0);
}

/// Jobs that each commit ten times a second, not at the same time: how many puts that makes, and how long it takes.
async fn commits_of(jobs: u64) -> (u64, Duration) {
    let world = Arc::new(World::new());
    let began = Instant::now();
    let job = |n: u64| {
        let world = Arc::clone(&world);
        async move {
            sleep(Duration::from_micros(n * 997 % 100_000)).await;
            for _ in 0..50 {
                let pause = sleep(Duration::from_millis(100));
                let (_, took) = world.put(SMALL_SLICE).await.unwrap();
                assert!(took < PUT * 2, "{took:?}");
                pause.await;
            }
        }
    };
    join_all((0..jobs).map(job)).await;
    (world.sim.stats().puts, began.elapsed())
}

#[tokio::test(start_paused = true)]
async fn the_number_of_puts_does_not_depend_on_the_number_of_jobs() {
    for jobs in [1, 10, 1_000] {
        let (puts, took) = commits_of(jobs).await;
        let most = 2.0 * took.as_secs_f64() / PUT.as_secs_f64();
        assert!(puts as f64 <= most + 1.0, "{jobs} jobs: {puts} puts in {took:?}");
        assert!(jobs > 1 || puts == 50, "a lone job has a put for each commit: {puts}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_small_slice_does_not_wait_for_large_ones() {
    let world = World::new();
    world.hang_puts(true);
    let large: Vec<_> = (0..8).map(|_| world.put(LARGE_SLICE)).collect();
    settle().await;
    world.hang_puts(false);
    let (_, took) = world.put(SMALL_SLICE).await.unwrap();
    assert!(took < PUT + Duration::from_millis(2), "{took:?}");
    assert!(large.iter().all(|put| !put.is_finished()));
    assert_eq!(world.tail.held_bytes(), 8 * LARGE_SLICE);
}

#[tokio::test(start_paused = true)]
async fn a_put_that_hangs_delays_only_what_it_holds() {
    let world = World::new();
    for size in [SMALL_SLICE, LARGE_SLICE] {
        world.put(size).await.unwrap();
        world.hang_puts(true);
        let hung = world.put(size);
        settle().await;
        world.hang_puts(false);
        for _ in 0..10 {
            let (_, took) = world.put(size).await.unwrap();
            assert!(took < PUT * 2, "{took:?}");
        }
        assert!(!hung.is_finished());
        // The job that waits for it knows which one it is.
        let waits = world.waits.read(&world.env);
        let held: Vec<_> = waits.iter().filter(|w| w.object.is_some()).collect();
        assert!(held.iter().all(|w| w.kind == PutKind::Tail && w.waited > PUT * 10), "{waits:?}");
        hung.abort();
        settle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn segments_and_puts_in_flight_are_bounded() {
    for (size, limits) in [(SMALL_SLICE_BYTES, SMALL), (LARGE_SLICE, LARGE)] {
        let world = World::new();
        let count = 6 * limits.segment_bytes / size;
        let began = Instant::now();
        let puts: Vec<_> = (0..count).map(|_| world.put(size)).collect();
        let mut segments: BTreeMap<String, u64> = BTreeMap::new();
        let mut ends = BTreeSet::new();
        for put in puts {
            let (slice, took) = put.await.unwrap();
            *segments.entry(slice.object).or_default() += slice.length;
            ends.insert((took.as_millis() / PUT.as_millis()) as usize);
        }
        assert!(segments.values().all(|bytes| *bytes <= limits.segment_bytes as u64));
        assert_eq!(world.sim.stats().puts, segments.len() as u64);
        assert!(segments.len() <= 8, "{} segments", segments.len());
        // So many rounds of puts at least, and hardly more.
        let rounds = segments.len().div_ceil(limits.in_flight);
        assert!(began.elapsed() >= PUT * rounds as u32, "{:?}", began.elapsed());
        assert!(ends.len() <= rounds + 2, "{ends:?}");
    }
    // One that is larger than a segment has one of its own.
    let world = World::new();
    let (slice, _) = world.put(3 * LARGE.segment_bytes).await.unwrap();
    assert_eq!((slice.offset, slice.length), (0, 3 * LARGE.segment_bytes as u64));
}

#[tokio::test(start_paused = true)]
async fn who_goes_away_takes_nobody_with_it() {
    let world = World::new();
    let first = world.put(SMALL_SLICE);
    settle().await;
    let (gone, stays) = (world.put(SMALL_SLICE), world.put(SMALL_SLICE));
    settle().await;
    gone.abort();
    first.abort();
    let (slice, _) = stays.await.unwrap();
    assert_eq!(slice.length, SMALL_SLICE as u64);
    assert_eq!(slice.offset, 0, "nobody wants the other one, and its bytes are not written");
    assert_eq!(world.sim.stats().puts, 2);
    assert_eq!(world.tail.held_bytes(), 0);
}
