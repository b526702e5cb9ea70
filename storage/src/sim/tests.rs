//! Promises of the simulated store: its times, what it counts, and its faults.

use tokio::time::sleep;

use super::*;

fn path(name: &str) -> Path {
    Path::from(name)
}

#[tokio::test(start_paused = true)]
async fn latencies_follow_the_profile_and_the_seed() {
    async fn times(seed: u64) -> Vec<Duration> {
        let store = SimStore::in_memory(Profile::S3, seed);
        store.put(&path("a"), "x".into()).await.unwrap();
        let mut times = Vec::new();
        for _ in 0..500 {
            let start = Instant::now();
            store.get(&path("a")).await.unwrap();
            times.push(start.elapsed());
        }
        times
    }
    let (a, b) = (times(1).await, times(1).await);
    assert_eq!(a, b, "the same seed gives the same times");
    let mut sorted = times(2).await;
    assert_ne!(a, sorted);
    sorted.sort();
    let (p50, p99) = (sorted[250].as_millis(), sorted[495].as_millis());
    assert!((24..38).contains(&p50), "median {p50} ms");
    assert!((90..300).contains(&p99), "p99 {p99} ms");
}

#[tokio::test(start_paused = true)]
async fn puts_have_times_of_their_own_where_they_are_given() {
    let second = Duration::from_secs(1);
    let profile = Profile { puts: Some((second, second)), ..Profile::INSTANT };
    let store = SimStore::in_memory(profile, 1);
    let start = Instant::now();
    store.put(&path("a"), "x".into()).await.unwrap();
    assert_eq!(start.elapsed(), second);
    store.get(&path("a")).await.unwrap();
    assert_eq!(start.elapsed(), second, "a get takes none");
}

#[tokio::test(start_paused = true)]
async fn requests_that_begin_later_meet_another_profile() {
    let slow = Duration::from_secs(5);
    let profile = Profile { p50: slow, p99: slow, ..Profile::INSTANT };
    let store = SimStore::in_memory(profile, 1);
    let start = Instant::now();
    let other = store.clone();
    let under_way = tokio::spawn(async move { other.put(&path("a"), "x".into()).await });
    sleep(Duration::from_secs(1)).await;
    store.set_profile(Profile::INSTANT);
    store.put(&path("b"), "x".into()).await.unwrap();
    assert_eq!(start.elapsed(), Duration::from_secs(1));
    under_way.await.unwrap().unwrap();
    assert_eq!(start.elapsed(), slow, "what was under way stays as slow");
}

#[tokio::test(start_paused = true)]
async fn parallel_requests_are_one_round_and_chains_are_many() {
    let store = SimStore::in_memory(Profile::S3, 1);
    for i in 0..8 {
        store.put(&path(&format!("o/{i}")), "x".into()).await.unwrap();
    }
    let at_once = futures::future::join_all((0..8).map(|i| {
        let (store, name) = (store.clone(), path(&format!("o/{i}")));
        async move { store.get(&name).await.unwrap() }
    }));
    assert_eq!(store.count_rounds(at_once).await.1, 1);
    let chain = async {
        for i in 0..5 {
            store.get(&path(&format!("o/{i}"))).await.unwrap();
        }
    };
    assert_eq!(store.count_rounds(chain).await.1, 5);
    assert_eq!(store.stats().gets, 13);
    assert!(store.stats().dollars > 0.0);
}

#[tokio::test(start_paused = true)]
async fn hung_reads_wait_for_the_switch() {
    let store = SimStore::in_memory(Profile::DFS, 1);
    store.put(&path("data/a"), "x".into()).await.unwrap();
    store.put(&path("meta/a"), "x".into()).await.unwrap();
    store.hang_reads(Some("data/"));
    store.get(&path("meta/a")).await.unwrap();
    let read = tokio::spawn({
        let store = store.clone();
        async move { store.get(&path("data/a")).await.map(|_| ()) }
    });
    sleep(Duration::from_secs(60)).await;
    assert!(!read.is_finished());
    store.release_reads();
    read.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_put_that_hangs_is_done_when_it_is_answered_after_all() {
    let store = SimStore::in_memory(Profile::INSTANT, 1);
    store.set_faults(Faults { hang: 1.0, only: Some(RequestKind::Put), ..Faults::default() });
    let other = store.clone();
    let put = tokio::spawn(async move { other.put(&path("a"), "x".into()).await });
    sleep(Duration::from_secs(60)).await;
    assert!(!put.is_finished() && store.get(&path("a")).await.is_err());
    store.answer_hung();
    put.await.unwrap().unwrap();
    assert_eq!(store.get(&path("a")).await.unwrap().bytes().await.unwrap(), "x");
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_has_been_done() {
    let store = SimStore::in_memory(Profile::INSTANT, 1);
    store.set_faults(Faults { lost_answer: 1.0, ..Faults::default() });
    assert!(store.put(&path("a"), "x".into()).await.is_err());
    store.set_faults(Faults::default());
    assert_eq!(store.get(&path("a")).await.unwrap().bytes().await.unwrap(), "x");
}

#[tokio::test(start_paused = true)]
async fn above_a_rate_reads_are_told_to_slow_down() {
    let store = SimStore::in_memory(Profile::INSTANT, 1);
    store.set_faults(Faults {
        slow_down_above: 100,
        only: Some(RequestKind::Get),
        ..Faults::default()
    });
    for _ in 0..50 {
        store.put(&path("a"), "x".into()).await.unwrap();
    }
    let mut answered = 0;
    for _ in 0..1_000 {
        match store.get(&path("a")).await {
            Ok(_) => answered += 1,
            Err(e) => assert!(format!("{e}").contains("503 Slow Down"), "{e}"),
        }
        sleep(Duration::from_millis(1)).await;
    }
    assert!((100..=115).contains(&answered), "{answered} of 100 a second and a tenth at once");
    store.set_faults(Faults { reset: 1.0, ..Faults::default() });
    assert!(format!("{}", store.get(&path("a")).await.unwrap_err()).contains("reset"));
}

#[tokio::test(start_paused = true)]
async fn bandwidth_and_rate_are_shared() {
    let profile =
        Profile { bytes_per_second: 1 << 20, requests_per_second: 10, ..Profile::INSTANT };
    let store = SimStore::in_memory(profile, 1);
    let start = Instant::now();
    store.put(&path("a"), vec![0; 2 << 20].into()).await.unwrap();
    assert!(start.elapsed() >= Duration::from_secs(2));
    let start = Instant::now();
    for _ in 0..10 {
        store.head(&path("a")).await.unwrap();
    }
    assert!(start.elapsed() >= Duration::from_millis(800), "{:?}", start.elapsed());
}

/// The least of some waits: a machine with other work may be late at any of them.
#[tokio::test]
async fn a_wait_by_the_system_clock_is_as_short_as_a_read_of_a_disk() {
    let profile = Profile {
        p50: Duration::from_micros(70),
        p99: Duration::from_micros(71),
        ..Profile::INSTANT
    };
    let store = SimStore::in_memory(profile, 1).on_system_clock();
    store.put(&path("a"), "x".into()).await.unwrap();
    let mut least = Duration::MAX;
    for _ in 0..200 {
        let start = Instant::now();
        store.get(&path("a")).await.unwrap();
        let took = start.elapsed();
        assert!(took >= Duration::from_micros(65), "{took:?}");
        least = least.min(took);
    }
    assert!(least < Duration::from_millis(1), "{least:?}");
}

#[tokio::test]
async fn waits_by_the_system_clock_end_in_the_order_of_their_times() {
    let timer = Timer::thread();
    let now = Instant::now();
    let ended = Mutex::new(Vec::new());
    let wait = async |ms: u64| {
        timer.sleep_until(now + Duration::from_millis(ms)).await;
        assert!(now.elapsed() >= Duration::from_millis(ms));
        ended.lock().push(ms);
    };
    tokio::join!(wait(1_500), wait(1), wait(700));
    assert_eq!(*ended.lock(), [1, 700, 1_500]);
}
