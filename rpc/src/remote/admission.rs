//! Which calls a process takes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::poll_fn;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::transport::server::Connected;
use tonic::{Request, Status};

use super::tls::Tls;
use crate::call_error::{BUILD, CallError, PROTOCOL_VERSION};
use crate::store_id::StoreId;

/// Whom an error names that refuses a call: its address is not known.
const CALLER: &str = "the process that calls";
/// How long the log says nothing more of refused calls of one store.
const TELL_AGAIN: Duration = Duration::from_secs(60);
/// Stores that this is kept of at a time.
const MOST_STORES: usize = 100;

/// Names in a call's metadata: protocol version and build of the caller, the term of the leader that it follows, its
/// incarnation, and that of the process that it means to call (0: whoever is there).
pub(super) const PROTOCOL: &str = "millrace-protocol";
pub(super) const CALLER_BUILD: &str = "millrace-build";
pub(super) const TERM: &str = "millrace-term";
pub(super) const INCARNATION: &str = "millrace-incarnation";
pub(super) const TARGET: &str = "millrace-target";
/// The id of the store whose log the caller reads; not there: it has read of none.
pub(super) const STORE: &str = "millrace-store";
/// The request that a call is part of, for the logs.
pub(super) const REQUEST: &str = "millrace-request";

/// Who calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    pub term: u64,
    /// 0: it has none yet.
    pub incarnation: u64,
}

/// The leader that a process knows of.
#[derive(Debug, Default)]
struct Known {
    /// Empty: it knows of none.
    address: String,
    /// When it was last heard of.
    heard: Option<Instant>,
}

/// Whether the log has fenced a process, by its incarnation.
#[derive(Default)]
struct FencedInLog(OnceLock<Box<dyn Fn(u64) -> bool + Send + Sync>>);

impl FencedInLog {
    fn has(&self, incarnation: u64) -> bool {
        self.0.get().is_some_and(|has| has(incarnation))
    }
}

impl fmt::Debug for FencedInLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FencedInLog").field(&self.0.get().is_some()).finish()
    }
}

/// The protocol version that a process speaks.
#[derive(Clone, Copy, Debug)]
struct Spoken(u32);

impl Default for Spoken {
    fn default() -> Spoken {
        Spoken(PROTOCOL_VERSION)
    }
}

/// What a process knows of terms, incarnations and the leader. Invariant: its term never falls.
#[derive(Debug, Default)]
pub struct Admission {
    term: AtomicU64,
    incarnation: AtomicU64,
    /// The term that this process leads; 0: it does not.
    leading: AtomicU64,
    /// For how long the object store has answered this leader nothing, in milliseconds; 0: it does, or was asked nothing.
    log_wait: AtomicU64,
    leader: RwLock<Known>,
    /// That of the log that this process reads; `None`: it has read of none.
    store: RwLock<Option<StoreId>>,
    /// The stores whose calls were refused, and when the log was told so last. `None`: callers that know of none.
    refused: Mutex<BTreeMap<Option<StoreId>, Instant>>,
    fenced: RwLock<BTreeSet<u64>>,
    /// Told when there is one more.
    one_fenced: Notify,
    /// The others that the log has fenced, where this process follows it.
    fenced_in_log: FencedInLog,
    stopping: CancellationToken,
    /// How callers prove who they are. `None`: they need not.
    tls: Option<Tls>,
    protocol: Spoken,
}

impl Admission {
    /// Callers must prove who they are.
    pub fn with_tls(self, tls: Option<Tls>) -> Admission {
        Admission { tls, ..self }
    }

    pub(super) fn tls(&self) -> Option<Tls> {
        self.tls.clone()
    }

    /// Of a process of another protocol version. For tests of what others do where one is.
    pub fn speaking(self, protocol: u32) -> Admission {
        Admission { protocol: Spoken(protocol), ..self }
    }

    /// The protocol version that callers must speak.
    pub(super) fn protocol(&self) -> u32 {
        self.protocol.0
    }

    /// The highest term that was met.
    pub fn term(&self) -> u64 {
        self.term.load(Ordering::Acquire)
    }

    /// A leader of this term is known: calls of lower terms are refused from now on.
    pub fn raise_term(&self, term: u64) {
        self.term.fetch_max(term, Ordering::AcqRel);
    }

    /// The incarnation of this process; 0: it has none yet.
    pub fn incarnation(&self) -> u64 {
        self.incarnation.load(Ordering::Acquire)
    }

    /// The process has been given its incarnation.
    pub fn set_incarnation(&self, incarnation: u64) {
        self.incarnation.store(incarnation, Ordering::Release);
    }

    /// This process works on this store: calls of those that work on another one are refused from now on.
    pub fn set_store(&self, store: StoreId) {
        *self.store.write() = Some(store);
    }

    /// The store that this process works on; `None`: it does not know yet.
    pub fn store(&self) -> Option<StoreId> {
        *self.store.read()
    }

    /// This process leads from now on, until a higher term is met.
    pub fn lead(&self, term: u64) {
        self.raise_term(term);
        self.leading.store(term, Ordering::Release);
    }

    /// This process leads no longer: what only a leader answers is refused.
    pub fn resign(&self) {
        self.leading.store(0, Ordering::Release);
    }

    /// Whether this process leads, as far as it knows.
    pub fn leads(&self) -> bool {
        let leading = self.leading.load(Ordering::Acquire);
        leading != 0 && leading >= self.term()
    }

    /// For how long the object store has answered nothing to this process, which leads or is about to; zero: it answers, or
    /// was asked nothing. Others are told, so that they look for another leader.
    pub fn set_log_wait(&self, wait: Duration) {
        self.log_wait.store(wait.as_millis() as u64, Ordering::Release);
    }

    /// As it was set last.
    pub fn log_wait(&self) -> Duration {
        Duration::from_millis(self.log_wait.load(Ordering::Acquire))
    }

    /// The leader is there; empty: it is not known.
    pub fn follow(&self, address: &str) {
        let mut known = self.leader.write();
        if known.address != address {
            known.address = address.to_owned();
        }
    }

    /// Where the leader is that is known; empty: none is.
    pub fn leader(&self) -> String {
        self.leader.read().address.clone()
    }

    /// The leader has answered this process, or called it.
    pub fn hear_leader(&self) {
        self.leader.write().heard = Some(Instant::now());
    }

    /// How long nothing was heard of a leader; `None`: nothing ever was.
    pub fn leader_silence(&self) -> Option<Duration> {
        self.leader.read().heard.map(|heard| heard.elapsed())
    }

    /// What a caller is told that takes this process for the leader.
    pub(super) fn not_leader(&self) -> CallError {
        CallError::NotLeader { leader: self.leader(), term: self.term() }
    }

    /// Calls of this process are refused from now on.
    pub fn fence(&self, incarnation: u64) {
        self.fenced.write().insert(incarnation);
        self.one_fenced.notify_waiters();
    }

    /// Does the work of a call of that process, and no more of it once this one has been told to refuse the calls of that
    /// one: then `None`. When [`Admission::fence`] has returned, no step of it is under way.
    pub(super) async fn until_fenced<T>(
        &self,
        incarnation: u64,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        let mut work = std::pin::pin!(work);
        let steps = poll_fn(|context| {
            // Locked: who fences that process waits for the end of the step.
            let fenced = self.fenced.read();
            match fenced.contains(&incarnation) {
                true => Poll::Ready(None),
                false => work.as_mut().poll(context).map(Some),
            }
        });
        tokio::select! {
            biased;
            () = self.fenced(incarnation) => None,
            done = steps => done,
        }
    }

    /// Completes when this process has been told to refuse the calls of that one.
    async fn fenced(&self, incarnation: u64) {
        loop {
            let mut more = std::pin::pin!(self.one_fenced.notified());
            // From here on none is missed.
            more.as_mut().enable();
            if self.fenced.read().contains(&incarnation) {
                return;
            }
            more.await;
        }
    }

    /// So are those of the processes that the log has fenced, as this says by their incarnations; 0 is a caller that has
    /// none. It is asked with every call. Once; a second call changes nothing.
    pub fn follow_fences(&self, is_fenced: impl Fn(u64) -> bool + Send + Sync + 'static) {
        let _ = self.fenced_in_log.0.set(Box::new(is_fenced));
    }

    /// Ends answers that have no end of their own, so that the server can.
    pub fn stop(&self) {
        self.stopping.cancel();
    }

    pub(super) fn stopping(&self) -> CancellationToken {
        self.stopping.clone()
    }

    /// Learns from a handshake of the term that its caller follows. Terms of other stores mean nothing here, and builds
    /// without ids do not say of which one theirs is.
    pub(super) fn meet<T>(&self, request: &Request<T>) -> Result<(), CallError> {
        let metadata = request.metadata();
        self.check_store(request, true)?;
        let may_be_ours = match self.store() {
            Some(ours) => store_of(metadata)? == Some(ours),
            None => number(metadata, PROTOCOL)? == u64::from(self.protocol()),
        };
        if may_be_ours {
            self.raise_term(number(metadata, TERM)?);
        }
        Ok(())
    }

    /// Refuses a caller that works on another store. `may_not_know`: not one that has read of none.
    fn check_store<T>(&self, request: &Request<T>, may_not_know: bool) -> Result<(), CallError> {
        let Some(ours) = self.store() else { return Ok(()) };
        let theirs = store_of(request.metadata())?;
        if theirs == Some(ours) || (theirs.is_none() && may_not_know) {
            return Ok(());
        }
        let (peer, ours, leads) = (CALLER.to_owned(), Some(ours), self.leads());
        let refused = CallError::OtherStore { peer, ours, theirs, leads };
        if self.is_news(theirs) {
            tracing::warn!(from = address_of(request), error = %refused, "a call was refused");
        }
        Err(refused)
    }

    /// Whether the log has not been told for a while that calls of this store are refused. It is told now.
    fn is_news(&self, store: Option<StoreId>) -> bool {
        let mut refused = self.refused.lock();
        refused.retain(|_, told| told.elapsed() < TELL_AGAIN);
        if refused.len() >= MOST_STORES || refused.contains_key(&store) {
            return false;
        }
        refused.insert(store, Instant::now());
        true
    }

    /// Takes a call, or says what its caller is behind of.
    pub(super) fn admit<T>(&self, request: &Request<T>) -> Result<Caller, Status> {
        self.check(request, true).map_err(CallError::into_status)
    }

    /// The same for calls of processes that have no incarnation and follow no leader yet.
    pub(super) fn admit_newcomer<T>(&self, request: &Request<T>) -> Result<Caller, Status> {
        self.check(request, false).map_err(CallError::into_status)
    }

    fn check<T>(&self, request: &Request<T>, follows: bool) -> Result<Caller, CallError> {
        let metadata = request.metadata();
        let (ours, theirs) = (self.protocol(), number(metadata, PROTOCOL)?);
        if theirs != u64::from(ours) {
            let build = metadata.get(CALLER_BUILD).and_then(|b| b.to_str().ok());
            let build = build.unwrap_or(BUILD).to_owned();
            let theirs = u32::try_from(theirs).unwrap_or(u32::MAX);
            return Err(CallError::Protocol { ours, theirs, build });
        }
        // Who registers takes part from then on; an operator's program works on no store.
        self.check_store(request, follows)?;
        let (term, incarnation) = (number(metadata, TERM)?, number(metadata, INCARNATION)?);
        let (target, own) = (number(metadata, TARGET)?, self.incarnation());
        if self.fenced.read().contains(&incarnation) {
            return Err(CallError::Fenced { incarnation });
        }
        if follows {
            let highest = self.term.fetch_max(term, Ordering::AcqRel);
            if term < highest {
                return Err(CallError::StaleTerm { term: highest });
            }
        }
        // Later than the term: a leader that the next one has fenced is told of that one.
        if self.fenced_in_log.has(incarnation) {
            return Err(CallError::Fenced { incarnation });
        }
        if target != 0 && target != own {
            return Err(CallError::StaleIncarnation { incarnation: own });
        }
        Ok(Caller { term, incarnation })
    }
}

/// Where a call comes from, for the log.
fn address_of<T>(request: &Request<T>) -> String {
    type Caller = <TlsStream<TcpStream> as Connected>::ConnectInfo;
    let tls = || request.extensions().get::<Caller>()?.get_ref().remote_addr();
    let address = request.remote_addr().or_else(tls);
    address.map_or_else(|| "unknown".to_owned(), |address| address.to_string())
}

fn store_of(metadata: &MetadataMap) -> Result<Option<StoreId>, CallError> {
    let Some(value) = metadata.get(STORE) else { return Ok(None) };
    let id = value.to_str().ok().and_then(|text| text.parse().ok());
    id.map(Some).ok_or_else(|| CallError::Malformed(format!("{STORE} is not a store id")))
}

fn number(metadata: &MetadataMap, name: &'static str) -> Result<u64, CallError> {
    let Some(value) = metadata.get(name) else { return Ok(0) };
    let number = value.to_str().ok().and_then(|text| text.parse().ok());
    number.ok_or_else(|| CallError::Malformed(format!("{name} is not a number")))
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use futures::FutureExt;

    use super::*;

    /// What it puts into a queue is there before anything that follows from the fence.
    #[test]
    fn no_step_of_a_call_is_under_way_when_its_caller_has_been_fenced() {
        let (admission, has_ended, begun) =
            (Admission::default(), AtomicBool::new(false), Barrier::new(2));
        let step = poll_fn(|_| {
            begun.wait();
            (0..1_000).for_each(|_| thread::yield_now());
            has_ended.store(true, Ordering::SeqCst);
            Poll::<()>::Pending
        });
        let had_ended = thread::scope(|scope| {
            let fencing = scope.spawn(|| {
                begun.wait();
                admission.fence(20);
                has_ended.load(Ordering::SeqCst)
            });
            assert_eq!(admission.until_fenced(20, step).now_or_never(), None);
            fencing.join().unwrap()
        });
        assert!(had_ended);
        assert_eq!(admission.until_fenced(20, ready(())).now_or_never(), Some(None));
        assert_eq!(admission.until_fenced(21, ready(())).now_or_never(), Some(Some(())));
    }

    #[tokio::test(start_paused = true)]
    async fn refused_calls_of_a_store_are_told_of_once_a_minute() {
        let admission = Admission::default();
        let one = Some(StoreId::new(1, 2));
        assert!(admission.is_news(one));
        assert!(!admission.is_news(one));
        assert!(admission.is_news(None), "they are others");
        tokio::time::advance(TELL_AGAIN).await;
        assert!(admission.is_news(one));
    }
}
