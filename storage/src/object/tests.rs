//! Promises of object stores: what may be opened, what is refused, who wins a race, what is repeated.

use std::time::Duration;

use futures::StreamExt;
use millrace_common::{EnvHandle, SqlError, SqlState};
use object_store::{GetOptions, ObjectStoreExt};

use super::*;
use crate::sim::{Faults, Profile, RequestKind, SimStore};

fn path(name: &str) -> Path {
    Path::from(name)
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Flaw {
    /// Overwrites on create, like servers that ignore If-None-Match.
    IgnoresCondition,
    /// Looks first and writes then.
    ChecksThenWrites,
    /// Tells all but the first that they lost, and keeps what they sent.
    KeepsLast,
}

/// A store that does not do what a create asks for.
#[derive(Debug)]
struct Careless(InMemory, Flaw);

impl std::fmt::Display for Careless {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("careless store")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Careless {
    async fn put_opts(
        &self,
        at: &Path,
        payload: PutPayload,
        _: PutOptions,
    ) -> object_store::Result<object_store::PutResult> {
        let overwrite = || self.0.put_opts(at, payload.clone(), PutOptions::default());
        match self.1 {
            Flaw::IgnoresCondition => overwrite().await,
            Flaw::ChecksThenWrites => {
                if self.0.head(at).await.is_ok() {
                    return Err(object_store::Error::AlreadyExists {
                        path: at.to_string(),
                        source: "it is there".into(),
                    });
                }
                tokio::task::yield_now().await;
                overwrite().await
            }
            Flaw::KeepsLast => {
                let created = self.0.put_opts(at, payload.clone(), create_only()).await;
                overwrite().await?;
                created
            }
        }
    }
    async fn put_multipart_opts(
        &self,
        at: &Path,
        opts: object_store::PutMultipartOptions,
    ) -> object_store::Result<Box<dyn object_store::MultipartUpload>> {
        self.0.put_multipart_opts(at, opts).await
    }
    async fn get_opts(
        &self,
        at: &Path,
        options: GetOptions,
    ) -> object_store::Result<object_store::GetResult> {
        self.0.get_opts(at, options).await
    }
    fn delete_stream(
        &self,
        at: futures::stream::BoxStream<'static, object_store::Result<Path>>,
    ) -> futures::stream::BoxStream<'static, object_store::Result<Path>> {
        self.0.delete_stream(at)
    }
    fn list(
        &self,
        prefix: Option<&Path>,
    ) -> futures::stream::BoxStream<'static, object_store::Result<object_store::ObjectMeta>> {
        self.0.list(prefix)
    }
    async fn list_with_delimiter(
        &self,
        prefix: Option<&Path>,
    ) -> object_store::Result<object_store::ListResult> {
        self.0.list_with_delimiter(prefix).await
    }
    async fn copy_opts(
        &self,
        from: &Path,
        to: &Path,
        options: object_store::CopyOptions,
    ) -> object_store::Result<()> {
        self.0.copy_opts(from, to, options).await
    }
}

/// Lists what it is told to.
struct Scripted {
    inner: SimStore,
    items: Box<dyn Fn() -> Vec<object_store::Result<object_store::ObjectMeta>> + Send + Sync>,
}

impl std::fmt::Debug for Scripted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("scripted store")
    }
}

impl std::fmt::Display for Scripted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("scripted store")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Scripted {
    async fn put_opts(
        &self,
        at: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<object_store::PutResult> {
        self.inner.put_opts(at, payload, options).await
    }
    async fn put_multipart_opts(
        &self,
        at: &Path,
        options: object_store::PutMultipartOptions,
    ) -> object_store::Result<Box<dyn object_store::MultipartUpload>> {
        self.inner.put_multipart_opts(at, options).await
    }
    async fn get_opts(
        &self,
        at: &Path,
        options: GetOptions,
    ) -> object_store::Result<object_store::GetResult> {
        self.inner.get_opts(at, options).await
    }
    fn delete_stream(
        &self,
        at: futures::stream::BoxStream<'static, object_store::Result<Path>>,
    ) -> futures::stream::BoxStream<'static, object_store::Result<Path>> {
        self.inner.delete_stream(at)
    }
    fn list(
        &self,
        _: Option<&Path>,
    ) -> futures::stream::BoxStream<'static, object_store::Result<object_store::ObjectMeta>> {
        futures::stream::iter((self.items)()).boxed()
    }
    async fn list_with_delimiter(
        &self,
        prefix: Option<&Path>,
    ) -> object_store::Result<object_store::ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }
    async fn copy_opts(
        &self,
        from: &Path,
        to: &Path,
        options: object_store::CopyOptions,
    ) -> object_store::Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

async fn names(store: &dyn ObjectStore) -> Vec<String> {
    let all: Vec<_> = store.list(None).collect().await;
    all.into_iter().map(|o| o.unwrap().location.to_string()).collect()
}

#[tokio::test]
async fn a_store_without_conditional_put_is_refused() {
    let store = Careless(InMemory::new(), Flaw::IgnoresCondition);
    let error = probe(&store, &EnvHandle::default()).await.unwrap_err();
    assert!(error.to_string().contains("careless store"), "{error}");
    assert_eq!(SqlError::from(error).state, SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE);
    assert!(names(&store).await.is_empty());
}

#[tokio::test]
async fn a_store_that_lets_two_creators_win_is_refused() {
    let store = Careless(InMemory::new(), Flaw::ChecksThenWrites);
    create(&store, "a", "one".into()).await.unwrap();
    let second = create(&store, "a", "two".into()).await;
    assert!(
        matches!(second, Err(StorageError::AlreadyExists { .. })),
        "who asks later is refused: {second:?}"
    );
    store.delete(&path("a")).await.unwrap();
    let error = probe(&store, &EnvHandle::default()).await.unwrap_err().to_string();
    assert!(error.contains("lets two creators of a key win"), "{error}");
    assert!(names(&store).await.is_empty());
}

#[tokio::test]
async fn a_store_that_keeps_what_a_loser_sent_is_refused() {
    let store = Careless(InMemory::new(), Flaw::KeepsLast);
    let error = probe(&store, &EnvHandle::default()).await.unwrap_err().to_string();
    assert!(error.contains("other bytes than the winner's"), "{error}");
}

#[tokio::test]
async fn a_probe_whose_answers_are_lost_asks_the_object_who_won() {
    for seed in 0..50 {
        let sim = SimStore::in_memory(Profile::INSTANT, seed);
        let only = Some(RequestKind::Put);
        sim.set_faults(Faults { lost_answer: 0.5, error: 0.1, only, ..Faults::default() });
        probe(&sim, &EnvHandle::default()).await.unwrap();
    }
    let sim = SimStore::in_memory(Profile::INSTANT, 1);
    sim.set_faults(Faults { error: 1.0, ..Faults::default() });
    let error = probe(&sim, &EnvHandle::default()).await.unwrap_err();
    assert!(matches!(error, StorageError::Io { operation: "write", .. }), "{error}");
}

#[tokio::test]
async fn good_stores_pass_the_probe_and_keep_nothing_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let file = format!("file://{}", dir.path().join("a b").display());
    for url in ["memory:", dir.path().join("new/deep").to_str().unwrap(), &file] {
        let store = open_object_store(url).unwrap();
        probe(&*store, &EnvHandle::default()).await.unwrap();
        assert!(names(&*store).await.is_empty(), "{url}");
        assert_eq!((store.stats().puts, store.stats().gets), (16, 1), "{url}");
    }
}

#[test]
fn urls_that_mean_nothing_are_refused() {
    for url in ["", "ftp://host/x", "s3:///x", "file://host/x"] {
        let error = open_object_store(url).map(|_| ()).unwrap_err();
        assert_eq!(SqlError::from(error).state, SqlState::INVALID_PARAMETER_VALUE, "{url}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_one_of_many_creators_wins() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_object_store(dir.path().to_str().unwrap()).unwrap();
    for round in 0..20 {
        let name = format!("meta/log/{round:020}");
        let racers = (0..16).map(|i| {
            let (store, name) = (Arc::clone(&store), name.clone());
            tokio::spawn(async move {
                let won = create(&*store, &name, format!("writer {i}").into_bytes().into()).await;
                match won {
                    Ok(()) => Some(i),
                    Err(StorageError::AlreadyExists { .. }) => None,
                    Err(e) => panic!("{e}"),
                }
            })
        });
        let results = futures::future::join_all(racers).await;
        let winners: Vec<i32> = results.into_iter().filter_map(|r| r.unwrap()).collect();
        assert_eq!(winners.len(), 1, "{winners:?}");
        let content = store.get(&path(&name)).await.unwrap().bytes().await.unwrap();
        assert_eq!(content, format!("writer {}", winners[0]));
    }
    assert_eq!(names(&*store).await.len(), 20, "no temporary files are listed");
    let files = std::fs::read_dir(dir.path().join("meta/log")).unwrap().count();
    assert_eq!(files, 20, "no temporary files stay");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_first_writers_of_a_new_directory_all_succeed() {
    let dir = tempfile::tempdir().unwrap();
    let store = local::DurableLocal::open(dir.path(), EnvHandle::default()).unwrap();
    for round in 0..100 {
        let put = |n: u32| {
            let store = store.clone();
            let name = format!("data/{round}/{n}.seg");
            tokio::spawn(async move { store.put(&path(&name), "x".into()).await })
        };
        for put in (0..8).map(put).collect::<Vec<_>>() {
            put.await.unwrap().unwrap();
        }
    }
}

#[tokio::test]
async fn a_local_directory_reads_ranges_and_says_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_object_store(dir.path().to_str().unwrap()).unwrap();
    store.put(&path("data/1/2.seg"), "0123456789".into()).await.unwrap();
    store.put(&path("data/1/2.seg"), "abcdefghij".into()).await.unwrap();
    assert_eq!(store.get_range(&path("data/1/2.seg"), 2..5).await.unwrap(), "cde");
    assert_eq!(store.get_range(&path("data/1/2.seg"), 8..50).await.unwrap(), "ij");
    assert!(store.get_range(&path("data/1/2.seg"), 10..12).await.is_err());
    assert_eq!(store.head(&path("data/1/2.seg")).await.unwrap().size, 10);
    let missing = store.get_range(&path("data/1/3.seg"), 0..1).await.unwrap_err();
    assert!(matches!(missing, object_store::Error::NotFound { .. }));
    store.delete(&path("data/1/2.seg")).await.unwrap();
    assert!(names(&*store).await.is_empty());
}

#[tokio::test]
async fn a_store_that_cannot_be_written_says_so() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("data"), "a file where a folder should be").unwrap();
    let store = open_with(
        dir.path().to_str().unwrap(),
        MeterOptions { attempts: 2, backoff: Duration::from_millis(1), ..MeterOptions::default() },
    )
    .unwrap();
    let error = store.put(&path("data/1/1.seg"), "x".into()).await.unwrap_err();
    let error = StorageError::from_store("write", "data/1/1.seg", error);
    assert_eq!(SqlError::from(error).state, SqlState::IO_ERROR);
    assert_eq!(store.stats().retries, 1);
}

fn wrapped(sim: &SimStore) -> Arc<Metered> {
    Metered::wrap(Arc::new(sim.clone()), MeterOptions::default())
}

#[tokio::test(start_paused = true)]
async fn reads_and_writes_of_unique_names_are_repeated() {
    let sim = SimStore::in_memory(Profile::S3, 3);
    let store = wrapped(&sim);
    sim.set_faults(Faults { error: 0.3, lost_answer: 0.1, ..Faults::default() });
    let mut failed = 0;
    for i in 0..100 {
        let name = path(&format!("data/1/{i}.seg"));
        if store.put(&name, "abc".into()).await.is_err()
            || store.get_range(&name, 0..3).await.is_err()
        {
            failed += 1;
        }
    }
    assert!(store.stats().retries > 50);
    assert!(failed < 20, "{failed}");
    assert!(store.stats().errors > 0);
}

#[tokio::test(start_paused = true)]
async fn a_write_outlives_a_minute_of_throttling_and_not_an_hour() {
    for faults in [
        Faults { slow_down: 1.0, ..Faults::default() },
        Faults { reset: 1.0, ..Faults::default() },
        Faults { hang: 1.0, ..Faults::default() },
    ] {
        let sim = SimStore::in_memory(Profile::S3, 3);
        let store = wrapped(&sim);
        let name = path("data/1/1.seg");
        sim.set_faults(faults);
        let put = store.put(&name, "abc".into());
        let well_again = async {
            tokio::time::sleep(Duration::from_secs(60)).await;
            sim.set_faults(Faults::default());
        };
        let (written, ()) = tokio::join!(put, well_again);
        written.unwrap();
        assert_eq!(store.get_range(&name, 0..3).await.unwrap(), "abc");
        sim.set_faults(faults);
        assert!(store.put(&name, "abc".into()).await.is_err());
        assert_eq!(store.stats().errors, 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_create_is_never_repeated_and_an_unknown_outcome_is_told() {
    let sim = SimStore::in_memory(Profile::S3, 3);
    let store = wrapped(&sim);
    sim.set_faults(Faults { lost_answer: 1.0, ..Faults::default() });
    let error = create(&*store, "meta/log/1", "x".into()).await.unwrap_err();
    assert!(matches!(error, StorageError::OutcomeUnknown { .. }), "{error}");
    assert_eq!(store.stats().puts, 1);
    sim.set_faults(Faults::default());
    let again = create(&*store, "meta/log/1", "y".into()).await.unwrap_err();
    assert!(matches!(again, StorageError::AlreadyExists { .. }), "{again}");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_is_a_timeout_not_a_wait() {
    let sim = SimStore::in_memory(Profile::DFS, 3);
    let store = wrapped(&sim);
    store.put(&path("data/a"), "x".into()).await.unwrap();
    sim.hang_reads(None);
    let error = store.get_range(&path("data/a"), 0..1).await.unwrap_err();
    let error = StorageError::from_store("read", "data/a", error);
    assert!(matches!(error, StorageError::Timeout { .. }), "{error}");
    assert_eq!(store.stats().timeouts, 4);

    sim.set_faults(Faults { hang: 1.0, ..Faults::default() });
    let error = create(&*store, "meta/log/1", "x".into()).await.unwrap_err();
    assert!(matches!(error, StorageError::OutcomeUnknown { .. }), "{error}");
    let listed = store.list(None).next().await.unwrap();
    assert!(listed.is_err());
}

/// A store that has ceased to answer would else be noticed only when something new is asked.
#[tokio::test(start_paused = true)]
async fn what_is_under_way_is_not_answered_since_another_request_was() {
    const SECOND: Duration = Duration::from_secs(1);
    let sim = SimStore::in_memory(Profile::INSTANT, 3);
    let store = wrapped(&sim);
    sim.set_faults(Faults { hang: 1.0, ..Faults::default() });
    let asking = Arc::clone(&store);
    let first = tokio::spawn(async move { asking.head(&path("first")).await });
    tokio::time::sleep(3 * SECOND).await;
    assert!(store.unanswered() >= 3 * SECOND);

    sim.set_faults(Faults::default());
    store.head(&path("other")).await.unwrap_err();
    tokio::time::sleep(2 * SECOND).await;
    let waits = store.unanswered();
    assert!(waits >= 2 * SECOND && waits < 3 * SECOND, "since the other one: {waits:?}");
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    assert!(store.unanswered() >= 2 * SECOND, "who has asked waits no longer");

    store.head(&path("other")).await.unwrap_err();
    tokio::time::sleep(2 * SECOND).await;
    assert_eq!(store.unanswered(), Duration::ZERO, "nothing is under way");
}

/// What a store may do to a request that the same request repeated outlives.
fn passing() -> [Faults; 5] {
    let none = Faults::default();
    [
        Faults { slow_down: 0.4, ..none },
        Faults { reset: 0.4, ..none },
        Faults { hang: 0.3, ..none },
        Faults { lost_answer: 0.4, ..none },
        Faults { slow_down_above: 20, ..none },
    ]
}

/// Many attempts: chance is to decide nothing.
fn stubborn(sim: &SimStore) -> Arc<Metered> {
    let options = MeterOptions { attempts: 30, ..MeterOptions::default() };
    Metered::wrap(Arc::new(sim.clone()), options)
}

#[tokio::test(start_paused = true)]
async fn lists_and_deletes_outlive_every_fault_that_passes() {
    for (n, faults) in passing().into_iter().enumerate() {
        let sim = SimStore::in_memory(Profile::S3, n as u64 + 1);
        let all: Vec<String> = (0..60).map(|i| format!("data/1/{i:02}.seg")).collect();
        for name in &all {
            sim.put(&path(name), "x".into()).await.unwrap();
        }
        let store = stubborn(&sim);
        sim.set_faults(Faults { only: Some(RequestKind::List), ..faults });
        for _ in 0..30 {
            assert_eq!(names(&*store).await, all, "{faults:?}: each of them once");
        }
        let behind = path("data/1/29.seg");
        let listed: Vec<_> = store.list_with_offset(Some(&path("data")), &behind).collect().await;
        assert_eq!(listed.len(), 30, "{faults:?}");
        assert!(listed.iter().all(|o| o.as_ref().is_ok_and(|o| o.location > behind)));
        let lists = store.stats().retries;
        assert!(lists > 0, "{faults:?}");

        sim.set_faults(Faults { only: Some(RequestKind::Delete), ..faults });
        let deletes = all.iter().map(|name| {
            let (store, name) = (Arc::clone(&store), path(name));
            async move { store.delete(&name).await }
        });
        for deleted in futures::future::join_all(deletes).await {
            deleted.unwrap();
        }
        assert!(names(&sim).await.is_empty(), "{faults:?}");
        let stats = store.stats();
        // Those that would exceed the rate wait, so that none need be refused.
        assert!(stats.retries > lists || faults.slow_down_above > 0, "{faults:?}: {stats:?}");
        assert_eq!(stats.errors, 0, "{faults:?}");
        let is_idle = |c: &Held| (c.waiting, c.in_flight, c.retrying) == (0, 0, 0);
        assert!(store.pace_stats().classes.iter().all(is_idle), "nothing waits any more");
        let slow = faults.slow_down > 0.0 || faults.slow_down_above > 0;
        assert_eq!(store.pace_stats().slow_downs > 0, slow, "{faults:?}");
    }
}

/// A directory is listed in no order: what is missing cannot be told by a name.
#[tokio::test(start_paused = true)]
async fn a_list_without_order_that_breaks_off_is_an_error() {
    let error = || object_store::Error::Generic { store: "test", source: "broken".into() };
    let object = |name: &str| object_store::ObjectMeta {
        location: path(name),
        last_modified: Default::default(),
        size: 1,
        e_tag: None,
        version: None,
    };
    let items = move || vec![Ok(object("b")), Ok(object("a")), Err(error())];
    let sim = SimStore::in_memory(Profile::INSTANT, 1);
    let scripted = Scripted { inner: sim, items: Box::new(items) };
    let store = Metered::wrap(Arc::new(scripted), MeterOptions::default());
    let listed: Vec<_> = store.list(None).collect().await;
    assert_eq!(listed.iter().map(|o| o.is_ok()).collect::<Vec<_>>(), [true, true, false]);
    assert_eq!(store.stats().lists, 1);
}

#[tokio::test(start_paused = true)]
async fn a_throttling_store_is_not_flooded_and_appends_do_not_wait_behind_the_rest() {
    let sim = SimStore::in_memory(Profile::S3, 1);
    let store = wrapped(&sim);
    sim.set_faults(Faults { slow_down_above: 100, ..Faults::default() });
    let put = |i: usize| {
        let store = Arc::clone(&store);
        async move { store.put(&path(&format!("data/1/{i}.seg")), "x".into()).await }
    };
    let flood = |range: std::ops::Range<usize>| futures::future::join_all(range.map(put));
    // Finds out the rate.
    flood(0..600).await.into_iter().for_each(|r| drop(r.unwrap()));
    let (asked, refused) = (sim.stats().puts, store.pace_stats().slow_downs);
    let appends = async {
        let mut slowest = Duration::ZERO;
        for n in 0..20 {
            let began = tokio::time::Instant::now();
            let _ = create(&*store, &format!("meta/log/{n}"), "x".into()).await;
            slowest = slowest.max(began.elapsed());
        }
        slowest
    };
    let (written, slowest) = tokio::join!(flood(600..1_600), appends);
    written.into_iter().for_each(|r| drop(r.unwrap()));
    let (asked, refused) = (sim.stats().puts - asked, store.pace_stats().slow_downs - refused);
    assert!(refused * 3 < asked, "{refused} of {asked} were refused");
    // A thousand puts take ten seconds and more.
    assert!(slowest < Duration::from_secs(1), "an append took {slowest:?}");
    sim.set_faults(Faults::default());
    tokio::time::sleep(Duration::from_secs(60)).await;
    put(0).await.unwrap();
    assert_eq!(store.pace_stats().rate, None, "it has recovered");
}

#[tokio::test(start_paused = true)]
async fn who_watches_a_put_knows_that_it_fails_or_is_held_back() {
    let sim = SimStore::in_memory(Profile::INSTANT, 1);
    let store = wrapped(&sim);
    let put = |watch: &PutWatch| {
        let (store, watch) = (Arc::clone(&store), watch.clone());
        let options = watch.options(PutMode::Overwrite);
        tokio::spawn(async move { store.put_opts(&path("a"), "x".into(), options).await })
    };
    let second = Duration::from_secs(1);
    sim.set_faults(Faults { reset: 1.0, ..Faults::default() });
    let failing = PutWatch::default();
    assert_eq!(failing.progress(), PutProgress::default());
    let done = put(&failing);
    tokio::time::sleep(second).await;
    let told = failing.progress();
    assert!(told.failures > 1 && told.error.unwrap().contains("reset"), "{:?}", failing.progress());
    assert!(!told.held);
    sim.set_faults(Faults::default());
    done.await.unwrap().unwrap();

    // The store complains until hardly any request may start.
    sim.set_faults(Faults { slow_down: 1.0, ..Faults::default() });
    let throttled = put(&PutWatch::default());
    tokio::time::sleep(second * 60).await;
    let watches: Vec<PutWatch> = std::iter::repeat_with(PutWatch::default).take(50).collect();
    let waiting: Vec<_> = watches.iter().map(&put).collect();
    tokio::time::sleep(Duration::from_millis(1)).await;
    let held = |watches: &[PutWatch]| watches.iter().filter(|w| w.progress().held).count();
    assert!(held(&watches) > 40, "{} are held back", held(&watches));
    sim.set_faults(Faults::default());
    for done in waiting.into_iter().chain([throttled]) {
        done.await.unwrap().unwrap();
    }
    assert_eq!(held(&watches), 0);
}
