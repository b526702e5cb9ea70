//! What a client of S3 is promised, asked by the client that Millrace itself uses.

use std::path::Path as FilePath;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use millrace_common::EnvHandle;
use millrace_s3::{Options, Server};
use millrace_storage::object::{create_only, probe};
use millrace_storage::sim::Faults;
use object_store::aws::{AmazonS3, AmazonS3Builder, S3ConditionalPut};
use object_store::path::Path;
use object_store::{
    Error, GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutOptions, RetryConfig,
    UpdateVersion,
};

const BUCKET: &str = "test-bucket";

fn builder(server: &Server) -> AmazonS3Builder {
    AmazonS3Builder::new()
        .with_bucket_name(BUCKET)
        .with_region("us-east-1")
        .with_endpoint(server.endpoint())
        .with_allow_http(true)
        .with_access_key_id("millrace")
        .with_secret_access_key("millrace-secret")
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
}

fn client(server: &Server) -> Arc<AmazonS3> {
    Arc::new(builder(server).build().expect("the options are complete"))
}

async fn start(dir: &FilePath) -> Server {
    Server::start(Options::new(dir, BUCKET)).await.expect("the server starts")
}

async fn names(store: &AmazonS3, prefix: Option<&str>) -> Vec<String> {
    let prefix = prefix.map(Path::from);
    let all: Vec<_> = store.list(prefix.as_ref()).try_collect().await.expect("a list");
    all.into_iter().map(|m| m.location.to_string()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_many_creators_wins_and_its_bytes_stay() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path()).await;
    let store = client(&server);
    for round in 0..5 {
        let path = Path::from(format!("log/{round}"));
        let racers = (0..32).map(|i| {
            let (store, path) = (Arc::clone(&store), path.clone());
            tokio::spawn(async move {
                match store.put_opts(&path, format!("racer {i}").into(), create_only()).await {
                    Ok(_) => Some(i),
                    Err(Error::AlreadyExists { .. }) => None,
                    Err(e) => panic!("{e}"),
                }
            })
        });
        let outcomes = futures::future::join_all(racers).await;
        let winners: Vec<i32> = outcomes.into_iter().filter_map(|r| r.unwrap()).collect();
        assert_eq!(winners.len(), 1, "{winners:?}");
        let bytes = store.get(&path).await.unwrap().bytes().await.unwrap();
        assert_eq!(bytes, format!("racer {}", winners[0]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_with_an_old_entity_tag_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path()).await;
    let store = client(&server);
    let path = Path::from("counter");
    let mut tag = store.put(&path, "0".into()).await.unwrap().e_tag;
    let if_match = |e_tag: &Option<String>| {
        let version = UpdateVersion { e_tag: e_tag.clone(), version: None };
        PutOptions::from(PutMode::Update(version))
    };
    for n in 1..10 {
        let put = store.put_opts(&path, n.to_string().into(), if_match(&tag)).await.unwrap();
        let old = store.put_opts(&path, "late".into(), if_match(&tag)).await;
        assert!(matches!(old, Err(Error::Precondition { .. })), "{old:?}");
        tag = put.e_tag;
    }
    assert_eq!(store.head(&path).await.unwrap().e_tag, tag);
    let options = GetOptions { if_none_match: tag.clone(), ..GetOptions::default() };
    let same = store.get_opts(&path, options).await;
    assert!(matches!(same, Err(Error::NotModified { .. })), "{same:?}");
    let options = GetOptions { if_match: Some("\"other\"".into()), ..GetOptions::default() };
    let other = store.get_opts(&path, options).await;
    assert!(matches!(other, Err(Error::Precondition { .. })), "{other:?}");
    let missing = store.put_opts(&Path::from("no"), "x".into(), if_match(&tag)).await;
    assert!(matches!(missing, Err(Error::Precondition { .. })), "{missing:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ranges_are_the_bytes_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path()).await;
    let store = client(&server);
    let path = Path::from("a/b");
    let bytes: Bytes = (0..100_000u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>().into();
    store.put(&path, bytes.clone().into()).await.unwrap();
    let get = |range: GetRange| {
        let options = GetOptions { range: Some(range), ..GetOptions::default() };
        let (store, path) = (Arc::clone(&store), path.clone());
        async move { store.get_opts(&path, options).await?.bytes().await }
    };
    assert_eq!(get(GetRange::Bounded(5..77)).await.unwrap(), bytes.slice(5..77));
    assert_eq!(get(GetRange::Bounded(399_990..500_000)).await.unwrap(), bytes.slice(399_990..));
    assert_eq!(get(GetRange::Offset(399_000)).await.unwrap(), bytes.slice(399_000..));
    assert_eq!(get(GetRange::Suffix(7)).await.unwrap(), bytes.slice(399_993..));
    let beyond = get(GetRange::Bounded(400_000..400_001)).await.unwrap_err();
    assert!(beyond.to_string().contains("416"), "{beyond}");
    let parts = store.get_ranges(&path, &[0..4, 200_000..200_004]).await.unwrap();
    assert_eq!(parts, [bytes.slice(0..4), bytes.slice(200_000..200_004)]);
    store.put(&Path::from("empty"), Bytes::new().into()).await.unwrap();
    let empty = store.get(&Path::from("empty")).await.unwrap().bytes().await.unwrap();
    assert!(empty.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_of_several_pages_are_complete_and_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path()).await;
    let store = client(&server);
    let mut expected: Vec<String> =
        (0..2345).map(|n| format!("data/{:02}/{n:05}", n % 7)).collect();
    // Many at once: the files of all are synced.
    let puts = futures::stream::iter(expected.clone()).map(|name| {
        let store = Arc::clone(&store);
        async move { store.put(&Path::from(name), "x".into()).await.map(|_| ()) }
    });
    puts.buffer_unordered(32).try_collect::<()>().await.unwrap();
    for name in ["data.txt", "datb/x", "a b+c&d<e>/ü", "zz"] {
        store.put(&Path::from(name), "x".into()).await.unwrap();
        expected.push(Path::from(name).to_string());
    }
    expected.sort();
    assert_eq!(names(&store, None).await, expected);
    let below: Vec<_> = expected.iter().filter(|n| n.starts_with("data/03/")).cloned().collect();
    assert_eq!(names(&store, Some("data/03")).await, below);
    assert!(names(&store, Some("nothing")).await.is_empty());
    let offset = Path::from("data/05/01000");
    let after: Vec<_> = store.list_with_offset(None, &offset).try_collect().await.unwrap();
    let after: Vec<_> = after.into_iter().map(|m| m.location.to_string()).collect();
    let later: Vec<_> = expected.iter().filter(|n| n.as_str() > offset.as_ref()).cloned().collect();
    assert_eq!(after, later);
    let level = store.list_with_delimiter(Some(&Path::from("data"))).await.unwrap();
    let prefixes: Vec<_> = level.common_prefixes.iter().map(ToString::to_string).collect();
    assert_eq!(prefixes, (0..7).map(|n| format!("data/{n:02}")).collect::<Vec<_>>());
    assert!(level.objects.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn deletes_of_one_and_of_many() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path()).await;
    let store = client(&server);
    let paths: Vec<Path> = (0..30).map(|n| Path::from(format!("d/{n:02}"))).collect();
    for path in &paths {
        store.put(path, "x".into()).await.unwrap();
    }
    store.delete(&paths[0]).await.unwrap();
    let gone = store.get(&paths[0]).await;
    assert!(matches!(gone, Err(Error::NotFound { .. })), "{gone:?}");
    // The first is gone already, which is no error.
    let doomed = futures::stream::iter(paths.into_iter().take(29).map(Ok)).boxed();
    let deleted: Vec<_> = store.delete_stream(doomed).try_collect().await.unwrap();
    assert_eq!(deleted.len(), 29);
    assert_eq!(names(&store, None).await, ["d/29"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_in_parts_is_there_when_it_is_complete() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path()).await;
    let store = client(&server);
    let path = Path::from("large/object");
    let part = |n: u8| vec![n; 5 << 20];
    let mut upload = store.put_multipart(&path).await.unwrap();
    for n in 0..3 {
        upload.put_part(part(n).into()).await.unwrap();
    }
    assert!(names(&store, None).await.is_empty(), "it is not there before");
    upload.complete().await.unwrap();
    let bytes = store.get(&path).await.unwrap().bytes().await.unwrap();
    assert_eq!(bytes, [part(0), part(1), part(2)].concat());
    let mut dropped = store.put_multipart(&Path::from("other")).await.unwrap();
    dropped.put_part(part(9).into()).await.unwrap();
    dropped.abort().await.unwrap();
    assert_eq!(names(&store, None).await, ["large/object"]);
    let files = walk(&dir.path().join(".uploads"));
    assert!(files.is_empty(), "parts stay behind: {files:?}");
}

fn walk(dir: &FilePath) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { files.extend(walk(&path)) } else { files.push(path) }
    }
    files
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials_and_missing_buckets_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path()).await;
    let path = Path::from("x");
    let wrong = builder(&server).with_secret_access_key("wrong").build().unwrap();
    let error = wrong.put(&path, "x".into()).await.unwrap_err();
    assert!(matches!(error, Error::PermissionDenied { .. }), "{error}");
    let unknown = builder(&server).with_access_key_id("nobody").build().unwrap();
    let error = unknown.get(&path).await.unwrap_err();
    assert!(matches!(error, Error::PermissionDenied { .. }), "{error}");
    let anonymous = builder(&server).with_skip_signature(true).build().unwrap();
    let error = anonymous.get(&path).await.unwrap_err();
    assert!(matches!(error, Error::PermissionDenied { .. }), "{error}");
    let elsewhere = builder(&server).with_bucket_name("missing").build().unwrap();
    let error = elsewhere.put(&path, "x".into()).await.unwrap_err();
    assert!(error.to_string().contains("NoSuchBucket"), "{error}");
    assert!(names(&client(&server), None).await.is_empty(), "nothing was written");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_keeps_everything() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path()).await;
    let store = client(&server);
    store.put(&Path::from("a/b"), "kept".into()).await.unwrap();
    let tag = store.head(&Path::from("a/b")).await.unwrap().e_tag;
    let second = Server::start(Options::new(dir.path(), BUCKET)).await.err().unwrap();
    assert!(second.to_string().contains("another process"), "{second}");
    server.stop().await;
    let mut options = Options::new(dir.path(), "another-bucket");
    options.buckets.clear();
    let server = Server::start(options).await.unwrap();
    let store = client(&server);
    let found = store.get(&Path::from("a/b")).await.unwrap();
    assert_eq!(found.meta.e_tag, tag);
    assert_eq!(found.bytes().await.unwrap(), "kept");
    assert_eq!(names(&store, None).await, ["a/b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_probe_takes_the_server_and_refuses_the_racy_one() {
    let (good, racy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = start(good.path()).await;
    let store = client(&server);
    probe(&*store, &EnvHandle::default()).await.unwrap();
    assert!(names(&store, None).await.is_empty());
    let options = Options { racy: true, ..Options::new(racy.path(), BUCKET) };
    let server = Server::start(options).await.unwrap();
    let store = client(&server);
    // One after the other it refuses the second, as it should.
    let path = Path::from("x");
    store.put_opts(&path, "first".into(), create_only()).await.unwrap();
    let second = store.put_opts(&path, "second".into(), create_only()).await;
    assert!(matches!(second, Err(Error::AlreadyExists { .. })), "{second:?}");
    let error = probe(&*store, &EnvHandle::default()).await.unwrap_err().to_string();
    assert!(error.contains("lets two creators of a key win"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_reach_the_client() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path()).await;
    let store = client(&server);
    let path = Path::from("x");
    store.put(&path, "0123456789".into()).await.unwrap();
    for (faults, told) in [
        (Faults { slow_down: 1.0, ..Faults::default() }, "503"),
        (Faults { error: 1.0, ..Faults::default() }, "500"),
        (Faults { short_read: 1.0, ..Faults::default() }, "HTTP error"),
        (Faults { reset: 1.0, ..Faults::default() }, "error sending request"),
    ] {
        server.store().set_faults(faults);
        let got = async { store.get(&path).await?.bytes().await };
        let error = got.await.unwrap_err().to_string();
        assert!(error.contains(told), "{told}: {error}");
    }
    server.store().set_faults(Faults { disk_full: 1.0, ..Faults::default() });
    let error = store.put(&path, "x".into()).await.unwrap_err().to_string();
    assert!(error.contains("507"), "{error}");
    server.store().set_faults(Faults::default());
    let bytes = store.get(&path).await.unwrap().bytes().await.unwrap();
    assert_eq!(bytes, "0123456789");
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_that_no_file_can_have_are_refused_and_stay_in_their_bucket() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path()).await;
    let store = client(&server);
    let long = "x".repeat(300);
    for key in ["a#1", "../other-bucket/x", "a/../../x", long.as_str()] {
        let Ok(path) = Path::parse(key) else { continue };
        let error = store.put(&path, "x".into()).await.unwrap_err().to_string();
        assert!(error.contains("400"), "{key}: {error}");
    }
    assert!(names(&store, None).await.is_empty());
}
