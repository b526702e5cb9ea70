//! An in-memory object store that counts requests and misbehaves on command.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use parking_lot::Mutex;

/// What happens to the next put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is done, and then reported to exist already (a retried create).
    ExistsAfterSuccess,
    /// It is done, but the answer is lost.
    LostAnswer,
    /// It is not done, and an error says nothing of use.
    NotDone,
    /// The connection hangs for good after the put was done.
    HangAfterSuccess,
}

#[derive(Debug, Default)]
pub struct TestStore {
    inner: InMemory,
    faults: Mutex<VecDeque<Fault>>,
    /// How long a put of a log record takes.
    put_takes: Mutex<Duration>,
    requests: AtomicU64,
    listed: Arc<AtomicU64>,
    refuses_lists: AtomicBool,
}

impl TestStore {
    pub fn new() -> Arc<TestStore> {
        Arc::default()
    }

    /// Queues a fault for the next put of a log record.
    pub fn inject(&self, fault: Fault) {
        self.faults.lock().push_back(fault);
    }

    pub fn set_put_takes(&self, takes: Duration) {
        *self.put_takes.lock() = takes;
    }

    /// From now on, lists of all objects below a prefix fail, or do not.
    pub fn refuse_lists(&self, refuses: bool) {
        self.refuses_lists.store(refuses, Ordering::Relaxed);
    }

    pub fn faults_left(&self) -> usize {
        self.faults.lock().len()
    }

    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Objects that lists have returned.
    pub fn listed(&self) -> u64 {
        self.listed.load(Ordering::Relaxed)
    }

    fn count(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }
}

impl fmt::Display for TestStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("test store")
    }
}

fn lost() -> Error {
    Error::Generic { store: "test", source: "connection reset".into() }
}

#[async_trait]
impl ObjectStore for TestStore {
    async fn put_opts(
        &self,
        to: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        self.count();
        let is_record = to.as_ref().starts_with("meta/log/");
        let fault = if is_record { self.faults.lock().pop_front() } else { None };
        let takes = *self.put_takes.lock();
        if is_record && !takes.is_zero() {
            tokio::time::sleep(takes).await;
        }
        if fault == Some(Fault::NotDone) {
            return Err(lost());
        }
        let done = self.inner.put_opts(to, payload, opts).await?;
        match fault {
            Some(Fault::ExistsAfterSuccess) => Err(Error::AlreadyExists {
                path: to.to_string(),
                source: "precondition failed".into(),
            }),
            Some(Fault::LostAnswer) => Err(lost()),
            Some(Fault::HangAfterSuccess) => std::future::pending().await,
            _ => Ok(done),
        }
    }

    async fn put_multipart_opts(
        &self,
        to: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.count();
        self.inner.put_multipart_opts(to, opts).await
    }

    async fn get_opts(&self, from: &Path, options: GetOptions) -> Result<GetResult> {
        self.count();
        self.inner.get_opts(from, options).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.count();
        self.inner.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.count();
        if self.refuses_lists.load(Ordering::Relaxed) {
            return futures::stream::iter([Err(lost())]).boxed();
        }
        let listed = Arc::clone(&self.listed);
        let count = move |_: &Result<ObjectMeta>| {
            listed.fetch_add(1, Ordering::Relaxed);
        };
        self.inner.list(prefix).inspect(count).boxed()
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.count();
        let listed = Arc::clone(&self.listed);
        let count = move |_: &Result<ObjectMeta>| {
            listed.fetch_add(1, Ordering::Relaxed);
        };
        self.inner.list_with_offset(prefix, offset).inspect(count).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.count();
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.count();
        self.inner.copy_opts(from, to, options).await
    }
}
