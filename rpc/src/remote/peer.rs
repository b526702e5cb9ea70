//! The way to another process.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tonic::metadata::MetadataValue;
use tonic::service::Routes;
use tonic::transport::Endpoint;
use tonic::{Request, Response, Status};
use tower::Layer;
use tower::util::{BoxCloneSyncService, MapErr};

use super::admission::{CALLER_BUILD, INCARNATION, PROTOCOL, REQUEST, STORE, TARGET, TERM};
use super::metrics::Side;
use super::observe::Observe;
use super::server::MAX_HEADER_BYTES;
use super::tls::Tls;
use crate::call_error::{BUILD, CallError, PROTOCOL_VERSION};
use crate::proto::HandshakeRequest;
use crate::proto::node_client::NodeClient;
use crate::request::RequestId;
use crate::store_id::StoreId;

/// What takes requests to the other process.
pub(super) type Transport = BoxCloneSyncService<
    http::Request<tonic::body::Body>,
    http::Response<tonic::body::Body>,
    tonic::transport::Error,
>;

/// How long a call may take.
#[derive(Clone, Copy, Debug)]
pub struct CallLimits {
    /// Until there is a connection.
    pub connect: Duration,
    /// Until the answer, of calls that are answered at once.
    pub answer: Duration,
    /// A connection with a call under way from which nothing comes for so long is taken for broken.
    /// How long a leader takes to find out that a process is cut off is reckoned with that (`members` in millrace-meta).
    pub silence: Duration,
    /// For how long a call waits for a process that cannot be connected to, or for one that leads.
    pub patience: Duration,
}

/// Terms that one call goes through; a leader does not change more often meanwhile.
const MOST_TERMS: u32 = 3;
/// Between attempts to connect.
const PAUSE: Duration = Duration::from_millis(100);

impl Default for CallLimits {
    fn default() -> CallLimits {
        CallLimits {
            connect: Duration::from_secs(2),
            answer: Duration::from_secs(10),
            silence: Duration::from_secs(4),
            patience: Duration::ZERO,
        }
    }
}

/// Who this process is, as it tells others with every call. Shared by all its peers.
#[derive(Debug, Default)]
pub struct Identity {
    term: AtomicU64,
    incarnation: AtomicU64,
    /// The highest term that a refusal has named.
    told: AtomicU64,
    /// That of the log that it reads; `None`: it has read of none.
    store: RwLock<Option<StoreId>>,
    /// It leads nobody, so a higher term is nothing but the leader's.
    follows: bool,
    /// How it proves who it is, and checks others. `None`: connections are neither encrypted nor authenticated.
    tls: Option<Tls>,
}

impl Identity {
    /// Of a process that never leads: it goes over to a higher term when it is told of one.
    pub fn follower() -> Identity {
        Identity { follows: true, ..Identity::default() }
    }

    pub fn new(term: u64, incarnation: u64) -> Identity {
        let identity = Identity::default();
        identity.set_term(term);
        identity.set_incarnation(incarnation);
        identity
    }

    /// Connections are encrypted, and both sides prove who they are.
    pub fn with_tls(self, tls: Option<Tls>) -> Identity {
        Identity { tls, ..self }
    }

    /// The leader of this term is known; a lower one than before changes nothing.
    pub fn raise_term(&self, term: u64) {
        self.term.fetch_max(term, Ordering::AcqRel);
    }

    /// The process follows the leader of this term, or is it.
    pub fn set_term(&self, term: u64) {
        self.term.store(term, Ordering::Release);
    }

    /// The process has been given its incarnation.
    pub fn set_incarnation(&self, incarnation: u64) {
        self.incarnation.store(incarnation, Ordering::Release);
    }

    /// The process works on this store. Whether that is news.
    pub fn set_store(&self, store: StoreId) -> bool {
        self.store.write().replace(store) != Some(store)
    }

    /// The store that the process works on; `None`: it does not know yet, or works on none.
    pub fn store(&self) -> Option<StoreId> {
        *self.store.read()
    }

    /// Goes over to a term that a refusal has named. Whether it did, or another call has before.
    fn adopts(&self, error: &CallError) -> bool {
        let CallError::StaleTerm { term } = error else { return false };
        if self.follows {
            self.term.fetch_max(*term, Ordering::AcqRel);
        }
        self.follows
    }

    /// Whether connections are encrypted, and both sides prove who they are.
    pub fn is_secured(&self) -> bool {
        self.tls.is_some()
    }

    /// The highest term that others have named when they refused calls; above the own one, there is another leader.
    pub fn told_term(&self) -> u64 {
        self.told.load(Ordering::Acquire)
    }
}

/// What another process has said of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handshake {
    pub build: String,
    pub incarnation: u64,
    pub term: u64,
    /// Whether it is the leader of this term.
    pub leads: bool,
    /// Where the leader is that it knows of; empty: it knows of none, or is it.
    pub leader: String,
    /// How long it has not heard of a leader; `None`: it has never heard of one.
    pub leader_silence: Option<Duration>,
    /// Of a leader: as it has said with [`set_log_wait`](super::Admission::set_log_wait).
    pub log_wait: Duration,
    /// The store that it works on; `None`: it does not know yet.
    pub store: Option<StoreId>,
}

/// Where calls go.
#[derive(Clone)]
struct Way {
    address: Arc<str>,
    transport: Transport,
}

impl Way {
    fn new(address: &str, identity: &Identity, limits: CallLimits) -> Result<Way, CallError> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|e| CallError::Malformed(format!("the address \"{address}\": {e}")))?
            .connect_timeout(limits.connect)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(limits.silence / 2)
            .keep_alive_timeout(limits.silence / 2)
            .keep_alive_while_idle(false)
            .http2_adaptive_window(true)
            .http2_max_header_list_size(MAX_HEADER_BYTES);
        let channel = match &identity.tls {
            Some(tls) => endpoint.connect_with_connector_lazy(tls.connect()),
            None => endpoint.connect_lazy(),
        };
        let transport = BoxCloneSyncService::new(Observe(Side::Client).layer(channel));
        Ok(Way { address: address.into(), transport })
    }

    fn shared(self) -> Arc<watch::Sender<Way>> {
        Arc::new(watch::Sender::new(self))
    }
}

/// Another process, by its address. Connects when it is first called, and again after a failure. Clones share the way to
/// it.
#[derive(Clone)]
pub struct Peer {
    way: Arc<watch::Sender<Way>>,
    /// Told when a call finds nobody there, nobody who leads, or a leader that the object store does not answer.
    trouble: Arc<Notify>,
    identity: Arc<Identity>,
    /// The incarnation that is meant; 0: whoever is there.
    target: u64,
    limits: CallLimits,
}

impl Peer {
    /// The process at `host:port`. Must be called on a runtime.
    pub fn new(
        address: &str,
        identity: Arc<Identity>,
        limits: CallLimits,
    ) -> Result<Peer, CallError> {
        let way = Way::new(address, &identity, limits)?;
        Ok(Peer { way: way.shared(), trouble: Arc::default(), identity, target: 0, limits })
    }

    /// This process, through bytes.
    pub(crate) fn loopback(routes: Routes) -> Peer {
        let routes = MapErr::new(routes, |never: Infallible| match never {});
        let way = Way { address: "loopback".into(), transport: BoxCloneSyncService::new(routes) }
            .shared();
        let (identity, limits) = (Arc::default(), CallLimits::default());
        Peer { way, trouble: Arc::default(), identity, target: 0, limits }
    }

    /// Calls of this peer and its clones go to this address from now on. Those under way elsewhere end with
    /// [`CallError::Unreachable`]: who takes them may have stopped leading and wait for ever. Streams go on where they are.
    pub fn redirect(&self, address: &str) -> Result<(), CallError> {
        if *self.address() != *address {
            self.way.send_replace(Way::new(address, &self.identity, self.limits)?);
        }
        Ok(())
    }

    /// Completes when calls go elsewhere than to this address.
    pub async fn redirected_from(&self, address: &str) {
        // The sender is in `self`: there is no error.
        let _ = self.way.subscribe().wait_for(|way| *way.address != *address).await;
    }

    /// Completes when a call has found nobody there, nobody who leads, or a leader that may be cut off from the object
    /// store, since it last completed.
    pub async fn troubled(&self) {
        self.trouble.notified().await;
    }

    /// Whoever is called here may not be the one to call any more.
    pub(super) fn doubt(&self) {
        self.trouble.notify_one();
    }

    /// The same, for calls that only the process of this incarnation may take.
    pub fn of_incarnation(mut self, incarnation: u64) -> Peer {
        self.target = incarnation;
        self
    }

    pub fn address(&self) -> Arc<str> {
        Arc::clone(&self.way.borrow().address)
    }

    fn transport(&self) -> Transport {
        self.way.borrow().transport.clone()
    }

    /// Asks for protocol version, build and store; an error if the stores differ, where both are known, or the versions.
    pub async fn handshake(&self) -> Result<Handshake, CallError> {
        let request = HandshakeRequest { protocol: PROTOCOL_VERSION, build: BUILD.into() };
        let answer =
            self.ask(request, |t, r| async move { NodeClient::new(t).handshake(r).await }).await?;
        if answer.protocol != PROTOCOL_VERSION {
            let (ours, theirs) = (PROTOCOL_VERSION, answer.protocol);
            return Err(CallError::Protocol { ours, theirs, build: answer.build });
        }
        let (ours, store) = (self.identity.store(), StoreId::from_bytes(&answer.store_id));
        if ours.is_some() && store.is_some() && ours != store {
            let peer = self.address().to_string();
            let leads = answer.leads;
            return Err(CallError::OtherStore { peer, ours, theirs: store, leads });
        }
        Ok(Handshake {
            build: answer.build,
            incarnation: answer.incarnation,
            term: answer.term,
            leads: answer.leads,
            leader: answer.leader,
            leader_silence: answer.leader_silence_ms.map(Duration::from_millis),
            log_wait: Duration::from_millis(answer.log_wait_ms),
            store,
        })
    }

    /// A call that is answered at once.
    pub(super) async fn ask<M: Clone, R, F>(
        &self,
        message: M,
        send: impl Fn(Transport, Request<M>) -> F,
    ) -> Result<R, CallError>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        self.ask_within(self.limits.answer, message, send).await
    }

    /// A call that is answered by then.
    pub(super) async fn ask_within<M: Clone, R, F>(
        &self,
        limit: Duration,
        message: M,
        send: impl Fn(Transport, Request<M>) -> F,
    ) -> Result<R, CallError>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        match tokio::time::timeout(limit, self.call(Some(limit), message, send)).await {
            Ok(answer) => answer,
            Err(_) => {
                self.doubt();
                Err(CallError::Unreachable {
                    peer: self.address().to_string(),
                    cause: format!("no answer within {} ms", limit.as_millis()),
                })
            }
        }
    }

    /// A call that may last: it ends when the connection does, or when calls go elsewhere.
    pub(super) async fn wait<M: Clone, R, F>(
        &self,
        message: M,
        send: impl Fn(Transport, Request<M>) -> F,
    ) -> Result<R, CallError>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        self.call(None, message, send).await
    }

    /// The same for a message that cannot be sent again.
    pub(super) async fn wait_once<M, R, F>(
        &self,
        message: M,
        send: impl FnOnce(Transport, Request<M>) -> F,
    ) -> Result<R, CallError>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let answer = send(self.transport(), self.request(message)).await;
        answer.map(Response::into_inner).map_err(|status| self.failed(&status))
    }

    /// Sent again under a higher term, which has refused it, if this process only follows, and while there is no
    /// connection, or nobody who leads, for as long as the limits say. Not sent again where it may have had its effect.
    async fn call<M: Clone, R, F>(
        &self,
        limit: Option<Duration>,
        message: M,
        send: impl Fn(Transport, Request<M>) -> F,
    ) -> Result<R, CallError>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let begun = Instant::now();
        let once = async |message: M| {
            let mut request = self.request(message);
            if let Some(limit) = limit {
                request.set_timeout(limit);
            }
            let Way { address, transport } = self.way.borrow().clone();
            tokio::select! {
                biased;
                answer = send(transport, request) => {
                    answer.map(Response::into_inner).map_err(|status| self.failed(&status))
                }
                () = self.redirected_from(&address) => Err(abandoned(&address)),
            }
        };
        if !self.identity.follows && self.limits.patience.is_zero() {
            return once(message).await;
        }
        let mut adopted = 0;
        loop {
            match once(message.clone()).await {
                Err(error) if adopted < MOST_TERMS && self.identity.adopts(&error) => adopted += 1,
                Err(CallError::NotConnected { .. } | CallError::NotLeader { .. })
                    if begun.elapsed() < self.limits.patience =>
                {
                    tokio::time::sleep(PAUSE).await;
                }
                answer => return answer,
            }
        }
    }

    /// What a status means; notes the term that it names.
    pub(super) fn failed(&self, status: &Status) -> CallError {
        let error = CallError::from_status(&self.address(), status);
        if error.is_retryable() || matches!(error, CallError::OtherStore { .. }) {
            self.doubt();
        }
        if let CallError::StaleTerm { term } = error {
            self.identity.told.fetch_max(term, Ordering::AcqRel);
        }
        error
    }

    fn request<M>(&self, message: M) -> Request<M> {
        let mut request = Request::new(message);
        let metadata = request.metadata_mut();
        metadata.insert(PROTOCOL, MetadataValue::from(PROTOCOL_VERSION));
        metadata.insert(CALLER_BUILD, MetadataValue::from_static(BUILD));
        metadata.insert(TERM, MetadataValue::from(self.identity.term.load(Ordering::Acquire)));
        let incarnation = self.identity.incarnation.load(Ordering::Acquire);
        metadata.insert(INCARNATION, MetadataValue::from(incarnation));
        metadata.insert(TARGET, MetadataValue::from(self.target));
        // An id is made of digits, here and below.
        if let Some(store) = self.identity.store()
            && let Ok(store) = MetadataValue::try_from(store.to_string().as_str())
        {
            metadata.insert(STORE, store);
        }
        let id = RequestId::current().unwrap_or_else(|| RequestId::next(incarnation));
        if let Ok(id) = MetadataValue::try_from(id.as_str()) {
            metadata.insert(REQUEST, id);
        }
        request
    }
}

/// A call whose answer is not waited for any more, because calls go elsewhere. It may have had its effect.
fn abandoned(address: &str) -> CallError {
    let cause = "another process leads, and it has not answered".to_owned();
    CallError::Unreachable { peer: address.to_owned(), cause }
}
