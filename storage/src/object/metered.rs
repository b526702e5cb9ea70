//! Counts, bounds and repeats requests.
//!
//! Every request has a time-out that grows with its payload; a read's includes its body. Requests that
//! can be repeated without harm are, with jittered exponential back-off, up to a bound (puts and deletes longer, while the
//! store throttles or cannot be reached, lists while it throttles); then the error says what happened. **A create is
//! never repeated**: a lost answer to one that succeeded would come back as "already exists". It ends as
//! [`UnknownOutcome`] and the caller reads the object to find out. All but reads wait for their turn where the store has
//! asked for fewer requests ([`super::pace`]).

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt};
use millrace_common::EnvHandle;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions,
    PutOptions, PutPayload, PutResult, Result,
};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};

use super::Failure;
use super::listing::Listing;
use super::pace::{Again, Pace, PaceStats, RequestClass};
use super::watch::PutWatch;
use crate::error::{TimedOut, UnknownOutcome, find, is_disk_full};

const STORE: &str = "object store";

/// As an extension of a read: its caller bounds and repeats it, because it must know of every failure.
#[derive(Clone, Copy, Debug)]
pub struct OneAttempt {
    /// An earlier attempt failed.
    pub again: bool,
}

#[derive(Clone, Debug)]
pub struct MeterOptions {
    /// Of a request without payload.
    pub request_timeout: Duration,
    /// Payload bytes that earn a request one more second.
    pub bytes_per_second: u64,
    /// Attempts of a request that may be repeated.
    pub attempts: u32,
    /// Wait before the second attempt; doubles from there.
    pub backoff: Duration,
    pub max_backoff: Duration,
    /// For how long a write of a unique name or a delete is repeated at least, where the store asks for fewer requests,
    /// does not answer, or cannot be reached, and a list where it asks for fewer: a failed write would restart jobs, and
    /// these ask even more of the store.
    pub write_patience: Duration,
    /// Where the random part of a wait comes from.
    pub env: EnvHandle,
}

impl Default for MeterOptions {
    fn default() -> MeterOptions {
        MeterOptions {
            request_timeout: Duration::from_secs(10),
            bytes_per_second: 2 << 20,
            attempts: 4,
            backoff: Duration::from_millis(50),
            max_backoff: Duration::from_secs(2),
            write_patience: Duration::from_secs(120),
            env: EnvHandle::default(),
        }
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        #[derive(Debug, Default)]
        struct Counters { $($name: AtomicU64),* }

        /// Requests since the store was opened; the difference of two is what happened in between.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct RequestStats { $($(#[$doc])* pub $name: u64),* }

        impl Counters {
            fn snapshot(&self) -> RequestStats {
                RequestStats { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }

        impl std::ops::Sub for RequestStats {
            type Output = RequestStats;
            fn sub(self, earlier: RequestStats) -> RequestStats {
                RequestStats { $($name: self.$name.saturating_sub(earlier.$name)),* }
            }
        }
    };
}

counters! {
    puts,
    gets,
    lists,
    deletes,
    bytes_written,
    bytes_read,
    /// Attempts beyond the first; also counted as requests.
    retries,
    timeouts,
    /// Requests that failed for good; "not found" and "already exists" are answers, not failures.
    errors,
}

impl RequestStats {
    pub fn requests(&self) -> u64 {
        self.puts + self.gets + self.lists + self.deletes
    }
}

/// Clones are one: they share counts and limits.
#[derive(Clone, Debug)]
pub struct Metered {
    pub(super) inner: Arc<dyn ObjectStore>,
    pub(super) options: MeterOptions,
    counters: Arc<Counters>,
    pub(super) pace: Arc<Pace>,
    asked: Arc<Mutex<Asked>>,
}

/// What the store has been asked and has not answered.
#[derive(Debug, Default)]
struct Asked {
    /// Since when: the first of it began then, or another request was answered then, whichever is later.
    since: Option<Instant>,
    under_way: usize,
}

/// A request under way. Dropped, nobody waits for it any more.
struct UnderWay<'a>(&'a Metered);

impl UnderWay<'_> {
    fn end<T>(self, result: &Result<T>) {
        let is_answered = match result {
            Ok(_) => true,
            Err(error) => is_answer(error) || Failure::of(error) == Failure::SlowDown,
        };
        let store = self.0;
        drop(self);
        if is_answered {
            let now = store.options.env.now();
            let mut asked = store.asked.lock();
            asked.since = (asked.under_way > 0).then_some(now);
        }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.asked.lock().under_way -= 1;
    }
}

impl Metered {
    pub fn wrap(inner: Arc<dyn ObjectStore>, options: MeterOptions) -> Arc<Metered> {
        let pace = Pace::new(options.env.clone());
        let (counters, asked) = (Arc::default(), Arc::default());
        Arc::new(Metered { inner, options, counters, pace, asked })
    }

    pub fn stats(&self) -> RequestStats {
        self.counters.snapshot()
    }

    /// How requests other than reads are held back at this moment.
    pub fn pace_stats(&self) -> PaceStats {
        self.pace.stats()
    }

    /// For how long the store has answered nothing, or nothing but errors of its own, while it was asked something; zero:
    /// all was answered. Who has asked may have given up: another request shows how it is now.
    pub fn unanswered(&self) -> Duration {
        let since = self.asked.lock().since;
        since.map_or(Duration::ZERO, |since| self.options.env.elapsed(since))
    }

    fn begin_request(&self) -> UnderWay<'_> {
        let now = self.options.env.now();
        let mut asked = self.asked.lock();
        asked.since.get_or_insert(now);
        asked.under_way += 1;
        UnderWay(self)
    }

    fn limit(&self, bytes: u64) -> Duration {
        self.options.request_timeout
            + Duration::from_secs(bytes / self.options.bytes_per_second.max(1))
    }

    /// One attempt within its time-out, which does not count the wait for its turn.
    async fn attempt<T, F>(
        &self,
        kind: &Kind,
        limit: Duration,
        request: impl FnOnce() -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        if let Some(class) = kind.class {
            let _held = kind.watch.as_ref().map(PutWatch::hold);
            self.pace.turn(class).await;
        }
        let under_way = kind.class.map(|class| self.pace.begin(class));
        let began = self.options.env.now();
        let asked = self.begin_request();
        let result = match timeout(limit, request()).await {
            Ok(result) => result,
            Err(_) => Err(self.timed_out(limit)),
        };
        asked.end(&result);
        drop(under_way);
        if let Some(class) = kind.class {
            match &result {
                Err(error) if !is_answer(error) => self.pace.failed(Failure::of(error)),
                _ => self.pace.answered(class, self.options.env.elapsed(began), kind.bytes),
            }
        }
        result
    }

    pub(super) fn timed_out(&self, after: Duration) -> Error {
        add(&self.counters.timeouts, 1);
        Error::Generic { store: STORE, source: Box::new(TimedOut { after }) }
    }

    /// Attempts until one succeeds, fails for good, or there were enough for long enough.
    async fn repeat<T, F>(
        &self,
        kind: Kind,
        limit: Duration,
        mut request: impl FnMut() -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let mut attempts =
            Attempts { watch: kind.watch.clone(), ..Attempts::new(self, kind.class) };
        loop {
            match self.attempt(&kind, limit, &mut request).await {
                Ok(value) => return Ok(value),
                Err(error) => attempts.failed(error).await?,
            }
        }
    }

    /// Doubles a time, halved by chance so that clients do not march in step.
    fn backoff(&self, attempt: u32) -> Duration {
        let full = self.options.backoff.saturating_mul(1 << attempt.min(16).saturating_sub(1));
        full.min(self.options.max_backoff).mul_f64(0.5 + self.options.env.random_fraction() / 2.0)
    }

    pub(super) fn count_failure(&self, error: &Error) {
        if !is_answer(error) {
            add(&self.counters.errors, 1);
        }
    }

    pub(super) fn count_list(&self) {
        add(&self.counters.lists, 1);
    }

    /// One read with its body.
    async fn get_once(&self, location: &Path, options: &GetOptions) -> Result<GetResult> {
        add(&self.counters.gets, 1);
        let mut result = self.inner.get_opts(location, options.clone()).await?;
        if options.head {
            return Ok(result);
        }
        let (meta, range) = (result.meta.clone(), result.range.clone());
        let attributes = std::mem::take(&mut result.attributes);
        let bytes: Bytes = result.bytes().await?;
        add(&self.counters.bytes_read, bytes.len() as u64);
        let payload = GetResultPayload::Stream(stream::once(async move { Ok(bytes) }).boxed());
        Ok(GetResult { payload, meta, range, attributes })
    }

    async fn create(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
        limit: Duration,
    ) -> Result<PutResult> {
        let kind = Kind::of(RequestClass::Append, payload.content_length() as u64).watched(&opts);
        let put = || self.inner.put_opts(location, payload, opts);
        let error = match self.attempt(&kind, limit, put).await {
            Ok(result) => return Ok(result),
            Err(e) => e,
        };
        self.count_failure(&error);
        if !may_pass(&error) || find::<UnknownOutcome>(&error).is_some() {
            return Err(error);
        }
        Err(Error::Generic {
            store: STORE,
            source: Box::new(UnknownOutcome { cause: Arc::new(error) }),
        })
    }
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// What is known of a request before it is sent.
struct Kind {
    /// `None`: a read, which does not wait here.
    class: Option<RequestClass>,
    /// Of its payload.
    bytes: u64,
    /// Of a put: to be told how it goes on.
    watch: Option<PutWatch>,
}

impl Kind {
    const READ: Kind = Kind { class: None, bytes: 0, watch: None };

    fn of(class: RequestClass, bytes: u64) -> Kind {
        Kind { class: Some(class), bytes, watch: None }
    }

    fn watched(self, options: &PutOptions) -> Kind {
        Kind { watch: PutWatch::of(options), ..self }
    }
}

/// Attempts of one request.
pub(super) struct Attempts<'a> {
    store: &'a Metered,
    class: Option<RequestClass>,
    began: Instant,
    failed: u32,
    again: Option<Again>,
    watch: Option<PutWatch>,
}

impl<'a> Attempts<'a> {
    pub fn new(store: &'a Metered, class: Option<RequestClass>) -> Attempts<'a> {
        let began = store.options.env.now();
        Attempts { store, class, began, failed: 0, again: None, watch: None }
    }

    /// After a failed attempt: returns when the next one is due, or the error if there is none.
    pub async fn failed(&mut self, error: Error) -> Result<()> {
        let (store, options) = (self.store, &self.store.options);
        self.failed += 1;
        let is_patient = options.env.elapsed(self.began) < options.write_patience
            && match (self.class, Failure::of(&error)) {
                // A start would wait for long before it says that there is no store.
                (Some(RequestClass::List), failure) => failure == Failure::SlowDown,
                (Some(_), failure) => failure.passes(),
                (None, _) => false,
            };
        if self.failed >= options.attempts && !is_patient || !may_pass(&error) {
            store.count_failure(&error);
            return Err(error);
        }
        PutWatch::note_failed(self.watch.as_ref(), &error);
        if self.again.is_none() {
            self.again = self.class.map(|class| store.pace.again(class));
        }
        tracing::debug!(%error, self.failed, "object store request failed, trying again");
        sleep(store.backoff(self.failed)).await;
        add(&store.counters.retries, 1);
        Ok(())
    }
}

/// A definite answer of the store about the object.
fn is_answer(error: &Error) -> bool {
    matches!(
        error,
        Error::NotFound { .. }
            | Error::AlreadyExists { .. }
            | Error::Precondition { .. }
            | Error::NotModified { .. }
    )
}

/// Whether another attempt may end differently.
fn may_pass(error: &Error) -> bool {
    matches!(error, Error::Generic { .. } | Error::JoinError { .. }) && !is_disk_full(error)
}

impl fmt::Display for Metered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for Metered {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        let bytes = payload.content_length() as u64;
        let limit = self.limit(bytes);
        let result = if opts.mode == PutMode::Overwrite {
            self.repeat(Kind::of(RequestClass::Put, bytes).watched(&opts), limit, || {
                add(&self.counters.puts, 1);
                self.inner.put_opts(location, payload.clone(), opts.clone())
            })
            .await
        } else {
            add(&self.counters.puts, 1);
            self.create(location, payload, opts, limit).await
        };
        if result.is_ok() {
            add(&self.counters.bytes_written, bytes);
        }
        result
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        add(&self.counters.puts, 1);
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let expected = match &options.range {
            Some(GetRange::Bounded(r)) => r.end.saturating_sub(r.start),
            Some(GetRange::Suffix(n)) => *n,
            _ => 64 << 20,
        };
        if let Some(attempt) = options.extensions.get::<OneAttempt>() {
            add(&self.counters.retries, u64::from(attempt.again));
            let asked = self.begin_request();
            let result = self.get_once(location, &options).await;
            asked.end(&result);
            return result;
        }
        self.repeat(Kind::READ, self.limit(expected), || self.get_once(location, &options)).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        /// Deleted at a time.
        const PARALLEL: usize = 8;
        let store = self.clone();
        let delete = move |location: Result<Path>| {
            let store = store.clone();
            async move {
                let location = location?;
                let kind = Kind::of(RequestClass::Delete, 0);
                let request = || {
                    add(&store.counters.deletes, 1);
                    store.inner.delete(&location)
                };
                store.repeat(kind, store.options.request_timeout, request).await?;
                Ok(location)
            }
        };
        locations.map(delete).buffered(PARALLEL).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        Listing::new(self, prefix, None).into_stream()
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        Listing::new(self, prefix, Some(offset)).into_stream()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.repeat(Kind::of(RequestClass::List, 0), self.options.request_timeout, || {
            add(&self.counters.lists, 1);
            self.inner.list_with_delimiter(prefix)
        })
        .await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        add(&self.counters.puts, 1);
        let kind = Kind::of(RequestClass::Put, 0);
        let copy = || self.inner.copy_opts(from, to, options);
        self.attempt(&kind, self.limit(64 << 20), copy).await
    }
}
