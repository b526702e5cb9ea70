//! `SimStore`: a slow, faulty and countable object store over any other (docs/design.md §14).
//!
//! Latencies are log-normal, drawn from a seed, so that answers come in a random but repeatable order.
//! It runs on tokio's clock: under a paused clock a test with an S3 profile takes no real time. Benchmarks ask for
//! the system's, which is finer.
//! Faults: refused requests, lost answers (done, but reported as failed), torn writes (a prefix of
//! the object stays), a full disk, short and damaged reads, "503 Slow Down" at random or above a rate, reset
//! connections, and a switch that hangs reads. They may be confined to one kind of request.
//!
//! **Dependent rounds** are the length of the longest chain of requests in which each began after
//! another had ended: parallel requests are one round, a read that needed another's result is two.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

mod record;
mod timer;

pub use record::RequestRecord;

use record::Asked;
use timer::Timer;

const STORE: &str = "simulated store";
/// z-value of the 99th percentile of a normal distribution.
const Z99: f64 = 2.326_347_9;

/// How a kind of store behaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Profile {
    pub p50: Duration,
    pub p99: Duration,
    /// Of puts, where they take another time than the other requests: median and 99th percentile.
    pub puts: Option<(Duration, Duration)>,
    /// Of the store, all requests together. 0: unlimited.
    pub bytes_per_second: u64,
    /// 0: unlimited.
    pub requests_per_second: u64,
    /// Dollars per million puts and lists, and per million gets.
    pub put_dollars: f64,
    pub get_dollars: f64,
}

impl Profile {
    const fn new(
        p50_us: u64,
        p99_us: u64,
        megabytes: u64,
        put_dollars: f64,
        get_dollars: f64,
    ) -> Profile {
        Profile {
            p50: Duration::from_micros(p50_us),
            p99: Duration::from_micros(p99_us),
            puts: None,
            bytes_per_second: megabytes << 20,
            requests_per_second: 0,
            put_dollars,
            get_dollars,
        }
    }

    /// No latency, no limits, no cost: only counting and faults.
    pub const INSTANT: Profile = Profile::new(0, 0, 0, 0.0, 0.0);
    pub const NVME: Profile = Profile::new(70, 300, 2_000, 0.0, 0.0);
    pub const DFS: Profile = Profile::new(1_500, 6_000, 1_000, 0.0, 0.0);
    pub const S3_EXPRESS: Profile = Profile::new(5_000, 15_000, 1_000, 1.13, 0.03);
    pub const S3: Profile = Profile::new(30_000, 150_000, 800, 5.0, 0.4);

    /// Median and 99th percentile of a kind of request.
    fn times(&self, kind: RequestKind) -> (Duration, Duration) {
        let puts = self.puts.filter(|_| kind == RequestKind::Put);
        puts.unwrap_or((self.p50, self.p99))
    }

    /// By the name that benchmarks and settings use.
    pub fn by_name(name: &str) -> Option<Profile> {
        Some(match name {
            "instant" => Profile::INSTANT,
            "nvme" => Profile::NVME,
            "dfs" => Profile::DFS,
            "s3-express" => Profile::S3_EXPRESS,
            "s3" => Profile::S3,
            _ => return None,
        })
    }
}

/// Probabilities per request, 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Refused, nothing done.
    pub error: f64,
    /// Done, but the answer is an error; a list breaks off in the middle.
    pub lost_answer: f64,
    /// Not answered, before [`SimStore::answer_hung`]: the caller's time-out decides.
    pub hang: f64,
    /// A write fails and leaves a prefix of the object.
    pub torn_write: f64,
    /// A write finds no space; nothing done.
    pub disk_full: f64,
    /// A read returns fewer bytes than asked for.
    pub short_read: f64,
    /// A read returns a flipped bit.
    pub damaged_read: f64,
    /// Answered with 503 Slow Down, nothing done.
    pub slow_down: f64,
    /// Requests a second above which they are answered with 503 Slow Down; 0: unlimited. A tenth of a second's may
    /// come at once.
    pub slow_down_above: u64,
    /// The connection is reset, nothing done.
    pub reset: f64,
    /// The kind of requests that all this happens to; `None`: all.
    pub only: Option<RequestKind>,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    Put,
    Get,
    List,
    Delete,
}

/// A status other than success, in the words of `object_store`'s own errors.
#[derive(Debug, thiserror::Error)]
#[error("Server returned non-2xx status code: {0} Slow Down: injected failure")]
struct HttpStatus(u16);

/// What the store has been asked.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SimStats {
    pub puts: u64,
    pub gets: u64,
    pub lists: u64,
    pub deletes: u64,
    pub bytes_written: u64,
    pub bytes_read: u64,
    pub dollars: f64,
    pub faults: u64,
    /// See the module's description.
    pub rounds: u64,
}

impl SimStats {
    pub fn requests(&self) -> u64 {
        self.puts + self.gets + self.lists + self.deletes
    }
}

enum Fate {
    Fine,
    Refused,
    SlowDown,
    Reset,
    AnswerLost,
    Hung,
    Torn,
    Full,
}

struct State {
    profile: Profile,
    random: StdRng,
    stats: SimStats,
    faults: Faults,
    /// What happens from the next put of an object below this prefix on.
    faults_after: Option<(String, Faults)>,
    /// Longest chain that has ended.
    depth: u64,
    /// When the pipe is free again.
    bandwidth_free: Option<Instant>,
    requests_free: Option<Instant>,
    /// When the next request is within the rate of [`Faults::slow_down_above`].
    within_rate: Option<Instant>,
    /// Requests that have ended, if they are recorded.
    record: Option<Vec<RequestRecord>>,
}

/// Which reads hang.
#[derive(Clone, Debug, Default)]
enum Hang {
    #[default]
    None,
    All,
    Below(String),
}

#[derive(Clone)]
pub struct SimStore {
    inner: Arc<dyn ObjectStore>,
    state: Arc<Mutex<State>>,
    hang: Arc<watch::Sender<Hang>>,
    answered: Arc<Notify>,
    timer: Timer,
}

impl SimStore {
    pub fn new(inner: Arc<dyn ObjectStore>, profile: Profile, seed: u64) -> SimStore {
        let state = State {
            profile,
            random: StdRng::seed_from_u64(seed),
            stats: SimStats::default(),
            faults: Faults::default(),
            faults_after: None,
            depth: 0,
            bandwidth_free: None,
            requests_free: None,
            within_rate: None,
            record: None,
        };
        SimStore {
            inner,
            state: Arc::new(Mutex::new(state)),
            hang: Arc::new(watch::Sender::new(Hang::None)),
            answered: Arc::default(),
            timer: Timer::default(),
        }
    }

    /// Over memory.
    pub fn in_memory(profile: Profile, seed: u64) -> SimStore {
        SimStore::new(Arc::new(object_store::memory::InMemory::new()), profile, seed)
    }

    /// Waits end within some tenth of a millisecond, by the clock of the system: for benchmarks. Without it they end
    /// one to two milliseconds late, by tokio's clock, which a test may pause.
    pub fn on_system_clock(self) -> SimStore {
        SimStore { timer: Timer::thread(), ..self }
    }

    /// Requests that begin from now on meet another kind of store.
    pub fn set_profile(&self, profile: Profile) {
        self.state.lock().profile = profile;
    }

    pub fn set_faults(&self, faults: Faults) {
        self.state.lock().faults = faults;
    }

    /// The faults of the requests that begin when the next object below this prefix has been put.
    pub fn set_faults_after(&self, prefix: &str, faults: Faults) {
        self.state.lock().faults_after = Some((prefix.to_owned(), faults));
    }

    /// From now on reads wait for [`SimStore::release_reads`]; only those below `prefix` if given.
    pub fn hang_reads(&self, prefix: Option<&str>) {
        let hang = prefix.map_or(Hang::All, |p| Hang::Below(p.to_string()));
        self.hang.send_replace(hang);
    }

    pub fn release_reads(&self) {
        self.hang.send_replace(Hang::None);
    }

    /// Requests that hang by [`Faults::hang`] now are done and answered after all.
    pub fn answer_hung(&self) {
        self.answered.notify_waiters();
    }

    pub fn stats(&self) -> SimStats {
        let state = self.state.lock();
        SimStats { rounds: state.depth, ..state.stats }
    }

    /// Starts counting anew. Requests under way count for what comes.
    pub fn reset_stats(&self) {
        let mut state = self.state.lock();
        state.stats = SimStats::default();
        state.depth = 0;
    }

    /// From now on each request is recorded when it ends, until they are taken.
    pub fn record_requests(&self) {
        self.state.lock().record = Some(Vec::new());
    }

    /// The requests that have ended since they are recorded, in the order in which they ended.
    pub fn take_requests(&self) -> Vec<RequestRecord> {
        self.state.lock().record.take().unwrap_or_default()
    }

    /// The dependent rounds that `work` takes, with its result. Nothing else should use the store.
    pub async fn count_rounds<T>(&self, work: impl Future<Output = T>) -> (T, u64) {
        self.state.lock().depth = 0;
        let result = work.await;
        (result, self.state.lock().depth)
    }

    /// Counts a request and waits as long as it would take. Returns its fate and chain position.
    async fn begin(&self, kind: RequestKind, bytes: u64, of: Asked<'_>) -> Begun {
        let (mut fate, until, depth, record) = {
            let mut state = self.state.lock();
            let profile = state.profile;
            let record = state.record.is_some().then(|| of.record(kind, state.depth + 1));
            state.count(kind, bytes, &profile);
            let fate = state.fate(kind);
            let until = state.schedule(kind, bytes, &profile);
            (fate, until, state.depth + 1, record)
        };
        if let Some(until) = until {
            self.timer.sleep_until(until).await;
        }
        if matches!(fate, Fate::Hung) {
            self.answered.notified().await;
            fate = Fate::Fine;
        }
        Begun { fate, depth, record, state: Arc::clone(&self.state) }
    }

    /// Waits while the switch hangs reads of `location`.
    async fn while_hung(&self, location: &Path) {
        let mut hang = self.hang.subscribe();
        let free = |hang: &Hang| match hang {
            Hang::None => true,
            Hang::All => false,
            Hang::Below(prefix) => !location.as_ref().starts_with(prefix.as_str()),
        };
        // The sender lives as long as the store.
        let _ = hang.wait_for(free).await;
    }

    fn spoil(&self, bytes: Bytes) -> Bytes {
        let mut state = self.state.lock();
        let faults = state.faults;
        if bytes.is_empty() {
            return bytes;
        }
        if state.chance(faults.short_read) {
            let keep = state.random.random_range(0..bytes.len());
            return bytes.slice(..keep);
        }
        if state.chance(faults.damaged_read) {
            let mut damaged = bytes.to_vec();
            let at = state.random.random_range(0..damaged.len());
            damaged[at] ^= 1 << state.random.random_range(0..8u32);
            return damaged.into();
        }
        bytes
    }

    /// The answer to a list, which `list` asks for.
    fn listed(
        &self,
        list: impl FnOnce() -> BoxStream<'static, Result<ObjectMeta>> + Send + 'static,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let store = self.clone();
        let answer = async move {
            let begun = store.begin(RequestKind::List, 0, Asked::default()).await;
            if let Some(error) = begun.fate.refusal() {
                return stream::iter([Err(error)]).boxed();
            }
            if !matches!(begun.fate, Fate::AnswerLost) {
                return list();
            }
            let mut all: Vec<_> = list().collect().await;
            all.truncate(all.len() / 2);
            all.push(Err(refused()));
            stream::iter(all).boxed()
        };
        stream::once(answer).flatten().boxed()
    }

    async fn tear(&self, location: &Path, payload: &PutPayload, opts: PutOptions) {
        let mut whole: Vec<u8> = payload.iter().flat_map(|b| b.iter().copied()).collect();
        whole.truncate(whole.len() / 2);
        let _ = self.inner.put_opts(location, whole.into(), opts).await;
    }
}

/// A request under way; its end lengthens the longest chain.
struct Begun {
    fate: Fate,
    depth: u64,
    record: Option<RequestRecord>,
    state: Arc<Mutex<State>>,
}

impl Drop for Begun {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        state.depth = state.depth.max(self.depth);
        if let (Some(all), Some(own)) = (&mut state.record, self.record.take()) {
            all.push(RequestRecord { ended: Instant::now(), ..own });
        }
    }
}

impl State {
    fn chance(&mut self, probability: f64) -> bool {
        let hit = probability > 0.0 && self.random.random::<f64>() < probability;
        self.stats.faults += u64::from(hit);
        hit
    }

    /// An object has been put.
    fn note_put(&mut self, location: &Path) {
        let is_awaited =
            |(prefix, _): &mut (String, Faults)| location.as_ref().starts_with(prefix.as_str());
        if let Some((_, faults)) = self.faults_after.take_if(is_awaited) {
            self.faults = faults;
        }
    }

    fn fate(&mut self, kind: RequestKind) -> Fate {
        let faults = self.faults;
        if faults.only.is_some_and(|only| only != kind) {
            return Fate::Fine;
        }
        if self.exceeds(faults.slow_down_above) || self.chance(faults.slow_down) {
            Fate::SlowDown
        } else if self.chance(faults.reset) {
            Fate::Reset
        } else if self.chance(faults.error) {
            Fate::Refused
        } else if self.chance(faults.lost_answer) {
            Fate::AnswerLost
        } else if self.chance(faults.hang) {
            Fate::Hung
        } else if matches!(kind, RequestKind::Put) && self.chance(faults.torn_write) {
            Fate::Torn
        } else if matches!(kind, RequestKind::Put) && self.chance(faults.disk_full) {
            Fate::Full
        } else {
            Fate::Fine
        }
    }

    /// Whether this request is one too many for a rate.
    fn exceeds(&mut self, per_second: u64) -> bool {
        if per_second == 0 {
            return false;
        }
        let now = Instant::now();
        let next = self.within_rate.map_or(now, |next| next.max(now));
        let exceeds = next > now + Duration::from_millis(100);
        self.stats.faults += u64::from(exceeds);
        if !exceeds {
            self.within_rate = Some(next + Duration::from_secs(1).div_f64(per_second as f64));
        }
        exceeds
    }

    fn count(&mut self, kind: RequestKind, bytes: u64, profile: &Profile) {
        let stats = &mut self.stats;
        let (counter, dollars) = match kind {
            RequestKind::Put => (&mut stats.puts, profile.put_dollars),
            RequestKind::Get => (&mut stats.gets, profile.get_dollars),
            RequestKind::List => (&mut stats.lists, profile.put_dollars),
            RequestKind::Delete => (&mut stats.deletes, 0.0),
        };
        *counter += 1;
        stats.dollars += dollars / 1e6;
        if matches!(kind, RequestKind::Put) {
            stats.bytes_written += bytes;
        }
    }

    /// When the request ends; `None`: at once.
    fn schedule(&mut self, kind: RequestKind, bytes: u64, profile: &Profile) -> Option<Instant> {
        let now = Instant::now();
        let mut end = now + self.latency(profile.times(kind));
        if profile.requests_per_second > 0 {
            let every = Duration::from_secs(1)
                / profile.requests_per_second.min(u64::from(u32::MAX)) as u32;
            let start = self.requests_free.map_or(now, |free| free.max(now));
            self.requests_free = Some(start + every);
            end += start - now;
        }
        end = end.max(self.transfer(bytes, profile).unwrap_or(end));
        (end > now).then_some(end)
    }

    /// When the pipe has carried these bytes too.
    fn transfer(&mut self, bytes: u64, profile: &Profile) -> Option<Instant> {
        if profile.bytes_per_second == 0 || bytes == 0 {
            return None;
        }
        let now = Instant::now();
        let takes = Duration::from_secs_f64(bytes as f64 / profile.bytes_per_second as f64);
        let free = self.bandwidth_free.map_or(now, |free| free.max(now)) + takes;
        self.bandwidth_free = Some(free);
        Some(free)
    }

    fn latency(&mut self, (p50, p99): (Duration, Duration)) -> Duration {
        if p50.is_zero() {
            return Duration::ZERO;
        }
        // Box-Muller: one normal variate of two uniform ones.
        let (u, v): (f64, f64) = (self.random.random(), self.random.random());
        let normal = (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos();
        let sigma = (p99.as_secs_f64() / p50.as_secs_f64()).ln() / Z99;
        // Six sigma: the tail is bounded, so that no test waits for an hour.
        p50.mul_f64((sigma * normal.clamp(-6.0, 6.0)).exp())
    }
}

fn refused() -> Error {
    Error::Generic { store: STORE, source: "injected failure".into() }
}

impl Fate {
    /// The answer to a request that was not done.
    fn refusal(&self) -> Option<Error> {
        match self {
            Fate::Refused => Some(refused()),
            Fate::SlowDown => {
                Some(Error::Generic { store: STORE, source: Box::new(HttpStatus(503)) })
            }
            Fate::Reset => {
                let source = Box::new(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
                Some(Error::Generic { store: STORE, source })
            }
            _ => None,
        }
    }
}

impl fmt::Debug for SimStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimStore")
            .field("inner", &self.inner)
            .field("profile", &self.state.lock().profile)
            .finish()
    }
}

impl fmt::Display for SimStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "simulated {}", self.inner)
    }
}

#[async_trait]
impl ObjectStore for SimStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        let begun = self
            .begin(RequestKind::Put, payload.content_length() as u64, Asked::of(location))
            .await;
        if let Some(error) = begun.fate.refusal() {
            return Err(error);
        }
        match begun.fate {
            Fate::Full => {
                let source = Box::new(std::io::Error::from(std::io::ErrorKind::StorageFull));
                Err(Error::Generic { store: STORE, source })
            }
            Fate::Torn if opts.mode == PutMode::Overwrite => {
                self.tear(location, &payload, opts).await;
                Err(refused())
            }
            Fate::AnswerLost => {
                let _ = self.inner.put_opts(location, payload, opts).await;
                Err(refused())
            }
            // Creates are atomic in every store that passes the probe.
            _ => {
                let done = self.inner.put_opts(location, payload, opts).await?;
                self.state.lock().note_put(location);
                Ok(done)
            }
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let _begun = self.begin(RequestKind::Put, 0, Asked::of(location)).await;
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let asked = Asked { location: Some(location), range: options.range.as_ref() };
        let begun = self.begin(RequestKind::Get, 0, asked).await;
        self.while_hung(location).await;
        if let Some(error) = begun.fate.refusal() {
            return Err(error);
        }
        if matches!(begun.fate, Fate::AnswerLost) {
            return Err(refused());
        }
        let head = options.head;
        let mut result = self.inner.get_opts(location, options).await?;
        if head {
            return Ok(result);
        }
        let (meta, range) = (result.meta.clone(), result.range.clone());
        let attributes = std::mem::take(&mut result.attributes);
        let bytes = result.bytes().await?;
        let until = {
            let mut state = self.state.lock();
            state.stats.bytes_read += bytes.len() as u64;
            let profile = state.profile;
            state.transfer(bytes.len() as u64, &profile)
        };
        if let Some(until) = until {
            self.timer.sleep_until(until).await;
        }
        let bytes = self.spoil(bytes);
        let payload = GetResultPayload::Stream(stream::once(async move { Ok(bytes) }).boxed());
        Ok(GetResult { payload, meta, range, attributes })
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        locations
            .map(move |location| {
                let store = store.clone();
                async move {
                    let location = location?;
                    let begun = store.begin(RequestKind::Delete, 0, Asked::of(&location)).await;
                    if let Some(error) = begun.fate.refusal() {
                        return Err(error);
                    }
                    store.inner.delete(&location).await?;
                    match begun.fate {
                        Fate::AnswerLost => Err(refused()),
                        _ => Ok(location),
                    }
                }
            })
            .buffered(16)
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (inner, prefix) = (Arc::clone(&self.inner), prefix.cloned());
        self.listed(move || inner.list(prefix.as_ref()))
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let (inner, prefix, offset) = (Arc::clone(&self.inner), prefix.cloned(), offset.clone());
        self.listed(move || inner.list_with_offset(prefix.as_ref(), &offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let _begun = self.begin(RequestKind::List, 0, Asked::default()).await;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let _begun = self.begin(RequestKind::Put, 0, Asked::of(to)).await;
        self.inner.copy_opts(from, to, options).await
    }
}

#[cfg(test)]
mod tests;
