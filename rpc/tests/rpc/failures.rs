//! What callers are told when a call fails, and what a server does with calls it must not take.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use millrace_common::{DeltaChunk, Epoch, Generation, RelationId, SqlState};
use millrace_rpc::call_error::{BUILD, CallError, PROTOCOL_VERSION, is_unreachable};
use millrace_rpc::control::{DefineRequest, Definition, Heartbeat, MetaControl};
use millrace_rpc::dml::{DmlKind, DmlService, EntryFlag};
use millrace_rpc::log::{CreateSchema, Rebuild};
use millrace_rpc::proto::node_client::NodeClient;
use millrace_rpc::proto::{self, Refusal, refusal};
use millrace_rpc::remote::{
    Admission, CallLimits, Handshake, Identity, LeaderSlot, Peer, RemoteCompute, RemoteDml,
    RemoteMeta, Server,
};
use millrace_rpc::services::{ComputeService, Cut};
use millrace_rpc::store_id::StoreId;
use millrace_rpc::version::StatementId;
use prost::Message;
use tokio::net::TcpListener;
use tonic::Code;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

use crate::fake::{FAILING, LIMIT, STUCK, encoded, error, networked, peer, serve};

const CUT: Cut = Cut { epoch: Epoch(1), number: 1, record: 1 };

#[tokio::test]
async fn an_error_keeps_its_parts() {
    for clients in [encoded(), networked().await] {
        let failed = clients.compute.cut(FAILING, Generation(1), CUT).await.unwrap_err();
        let (failed, sent) = (failed.into_parts(), error().into_parts());
        assert_eq!(failed.state, SqlState::UNIQUE_VIOLATION);
        assert_eq!((failed.message, failed.hint), (sent.message, sent.hint));
        assert_eq!((failed.position, failed.after), (sent.position, sent.after));
        assert_eq!((failed.context, failed.object), (sent.context, sent.object));
        assert_eq!(failed.routine, sent.routine);
        // Long texts are cut: they travel in headers.
        let detail = failed.detail.unwrap();
        assert!(detail.len() > 10_000 && sent.detail.unwrap().starts_with(&detail));
    }
}

#[tokio::test]
async fn callers_that_are_behind_are_told_of_what() {
    let admission = Arc::new(Admission::default());
    admission.raise_term(5);
    admission.set_incarnation(30);
    let (_fake, address) = serve(Arc::clone(&admission)).await;
    let identity = Arc::new(Identity::new(4, 20));
    let meta = RemoteMeta::new(peer(&address, Arc::clone(&identity)));
    let stale = meta.flush().await;
    assert!(matches!(stale, Err(CallError::StaleTerm { term: 5 })), "{stale:?}");
    assert_eq!(identity.told_term(), 5);
    // Who follows no leader yet can still register.
    meta.register_process(Default::default()).await.unwrap();

    identity.set_term(7);
    meta.flush().await.unwrap();
    assert_eq!(admission.term(), 7, "a server follows the highest term that it meets");
    identity.set_term(6);
    assert!(matches!(meta.flush().await, Err(CallError::StaleTerm { term: 7 })));
    identity.set_term(7);

    let of =
        |incarnation| RemoteMeta::new(peer(&address, identity.clone()).of_incarnation(incarnation));
    of(30).flush().await.unwrap();
    let succeeded = of(29).flush().await;
    assert!(matches!(succeeded, Err(CallError::StaleIncarnation { incarnation: 30 })));
    admission.fence(20);
    assert!(matches!(meta.flush().await, Err(CallError::Fenced { incarnation: 20 })));
}

#[tokio::test]
async fn who_is_fenced_in_the_log_that_a_process_follows_is_refused() {
    let admission = Arc::new(Admission::default());
    let fenced = Arc::new(AtomicU64::new(21));
    let last = Arc::clone(&fenced);
    admission.follow_fences(move |incarnation| incarnation == last.load(Ordering::Relaxed));
    let (_fake, address) = serve(Arc::clone(&admission)).await;
    let identity = Arc::new(Identity::new(4, 20));
    let meta = RemoteMeta::new(peer(&address, Arc::clone(&identity)));
    meta.flush().await.unwrap();
    fenced.store(20, Ordering::Relaxed);
    assert!(matches!(meta.flush().await, Err(CallError::Fenced { incarnation: 20 })));
    // A leader that has been succeeded looks for the next one.
    admission.raise_term(5);
    assert!(matches!(meta.flush().await, Err(CallError::StaleTerm { term: 5 })));
}

/// It may wait for a compute process, for one, and what its caller's sessions have locked is given to others.
#[tokio::test]
async fn a_definition_ends_when_its_caller_is_fenced() {
    let admission = Arc::new(Admission::default());
    let (fake, address) = serve(Arc::clone(&admission)).await;
    let meta = RemoteMeta::new(peer(&address, Arc::new(Identity::new(4, 20))));
    let change = Some(Definition::Rebuild(Rebuild { job: STUCK.0 }));
    let defining = meta.define(DefineRequest { id: None, since: 0, change });
    let fence = async {
        fake.arrived().await;
        admission.fence(21);
        admission.fence(20);
        fake.was_dropped().await;
    };
    let both = async { tokio::join!(defining, fence) };
    let (ended, ()) = tokio::time::timeout(LIMIT, both).await.unwrap();
    // What it was about to change may be on its way into the log.
    let unknown = SqlState::TRANSACTION_RESOLUTION_UNKNOWN;
    assert!(matches!(&ended, Err(CallError::Sql(e)) if e.state == unknown), "{ended:?}");
}

#[tokio::test]
async fn a_handshake_names_versions_and_refuses_mixed_ones() {
    let admission = Arc::new(Admission::default());
    admission.set_incarnation(30);
    admission.raise_term(2);
    admission.set_log_wait(Duration::from_millis(300));
    let (_fake, address) = serve(admission).await;
    let answer = peer(&address, Arc::default()).handshake().await.unwrap();
    let (leads, leader, leader_silence) = (false, String::new(), None);
    let expected = Handshake {
        build: BUILD.into(),
        incarnation: 30,
        term: 2,
        leads,
        leader,
        leader_silence,
        log_wait: Duration::from_millis(300),
        store: None,
    };
    assert_eq!(answer, expected);

    let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await;
    let request = proto::HandshakeRequest { protocol: PROTOCOL_VERSION + 1, build: "next".into() };
    let refused = NodeClient::new(channel.unwrap()).handshake(request).await.unwrap_err();
    let text = format!("version {} (build next)", PROTOCOL_VERSION + 1);
    assert!(refused.message().contains(&text), "{}", refused.message());
    assert!(refused.message().contains(&format!("version {PROTOCOL_VERSION} (build {BUILD})")));
    let reason = Refusal::decode(refused.details()).unwrap().reason.unwrap();
    let ours = proto::ProtocolMismatch { protocol: PROTOCOL_VERSION, build: BUILD.into() };
    assert_eq!(reason, refusal::Reason::Protocol(ours));
}

#[tokio::test]
async fn who_speaks_another_version_is_told_of_both() {
    let next = Admission::default().speaking(PROTOCOL_VERSION + 1);
    let (_fake, address) = serve(Arc::new(next)).await;
    let peer = peer(&address, Arc::default());
    for refused in [peer.handshake().await.map(drop), RemoteMeta::new(peer.clone()).flush().await] {
        let versions = match refused {
            Err(CallError::Protocol { ours, theirs, .. }) => (ours, theirs),
            other => panic!("{other:?}"),
        };
        assert_eq!(versions, (PROTOCOL_VERSION, PROTOCOL_VERSION + 1));
    }
}

#[tokio::test]
async fn who_works_on_another_store_is_told_so_whatever_it_speaks() {
    let (right, wrong) = (StoreId::new(1, 2), StoreId::new(3, 4));
    let next = Admission::default().speaking(PROTOCOL_VERSION + 1);
    next.set_store(right);
    let (_fake, address) = serve(Arc::new(next)).await;
    let identity = Arc::new(Identity::new(0, 20));
    let peer = peer(&address, Arc::clone(&identity));
    identity.set_store(wrong);
    match peer.handshake().await {
        Err(CallError::OtherStore { theirs, .. }) => assert_eq!(theirs, Some(right)),
        other => panic!("{other:?}"),
    }
    identity.set_store(right);
    let refused = peer.handshake().await;
    assert!(matches!(refused, Err(CallError::Protocol { .. })), "{refused:?}");
}

#[tokio::test]
async fn processes_of_different_stores_refuse_each_other() {
    let (right, wrong) = (StoreId::new(1, 2), StoreId::new(3, 4));
    let admission = Arc::new(Admission::default());
    admission.set_store(right);
    let (_fake, address) = serve(Arc::clone(&admission)).await;
    let identity = Arc::new(Identity::new(0, 20));
    let peer = peer(&address, Arc::clone(&identity));
    let meta = RemoteMeta::new(peer.clone());
    let stores = |error: CallError| match error {
        CallError::OtherStore { ours, theirs, .. } => (ours, theirs),
        other => panic!("{other:?}"),
    };
    // Who has read no log yet is told which one this is, and takes no part before it has.
    assert_eq!(peer.handshake().await.unwrap().store, Some(right));
    let refused = meta.register_process(Default::default()).await.unwrap_err();
    assert_eq!(stores(refused), (None, Some(right)));
    meta.flush().await.unwrap();

    assert!(identity.set_store(wrong) && !identity.set_store(wrong));
    identity.set_term(9);
    assert_eq!(stores(peer.handshake().await.unwrap_err()), (Some(wrong), Some(right)));
    assert_eq!(stores(meta.flush().await.unwrap_err()), (Some(wrong), Some(right)));
    assert_eq!(admission.term(), 0, "the terms of another store mean nothing");
    let refused = meta.register_process(Default::default()).await.unwrap_err().to_string();
    let parts = [address, right.to_string(), wrong.to_string(), "--object-store".to_owned()];
    assert!(parts.iter().all(|part| refused.contains(part)), "{refused}");

    assert!(identity.set_store(right));
    peer.handshake().await.unwrap();
    meta.register_process(Default::default()).await.unwrap();
    assert_eq!(admission.term(), 9);
}

#[tokio::test]
async fn a_handshake_that_does_not_say_of_which_store_it_is_deposes_nobody() {
    let admission = Arc::new(Admission::default());
    let (_fake, address) = serve(Arc::clone(&admission)).await;
    let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await;
    let mut client = NodeClient::new(channel.unwrap());
    let before = PROTOCOL_VERSION - 1;
    let mut of_before = async || {
        let request = proto::HandshakeRequest { protocol: before, build: "before".into() };
        let mut request = tonic::Request::new(request);
        request.metadata_mut().insert("millrace-protocol", before.into());
        request.metadata_mut().insert("millrace-term", 9u64.into());
        client.handshake(request).await.unwrap_err();
        admission.term()
    };
    assert_eq!(of_before().await, 0);
    let ours = StoreId::new(1, 2);
    admission.set_store(ours);
    assert_eq!(of_before().await, 0);

    let identity = Arc::new(Identity::new(9, 20));
    let peer = peer(&address, Arc::clone(&identity));
    peer.handshake().await.unwrap();
    assert_eq!(admission.term(), 0, "nor of this build");
    identity.set_store(ours);
    peer.handshake().await.unwrap();
    assert_eq!(admission.term(), 9);
}

/// A process that may lead, and where it listens.
async fn may_lead(admission: &Arc<Admission>) -> (Arc<LeaderSlot>, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let slot = Arc::<LeaderSlot>::default();
    tokio::spawn(Server::new(Arc::clone(admission)).leader(Arc::clone(&slot)).serve(listener));
    (slot, address)
}

#[tokio::test]
async fn who_does_not_lead_says_who_does() {
    let admission = Arc::<Admission>::default();
    admission.raise_term(4);
    admission.follow("m:1");
    let (slot, address) = may_lead(&admission).await;
    let identity = Arc::new(Identity::new(4, 20));
    let peer = peer(&address, Arc::clone(&identity));
    let meta = RemoteMeta::new(peer.clone());
    let refused = |answer: Result<(), CallError>| match answer {
        Err(CallError::NotLeader { leader, term }) => (leader, term),
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(meta.flush().await), ("m:1".to_owned(), 4));
    tokio::time::timeout(LIMIT, peer.troubled()).await.unwrap();
    let told = peer.handshake().await.unwrap();
    assert_eq!((told.leads, told.leader.as_str(), told.term), (false, "m:1", 4));

    let fake: Arc<dyn MetaControl> = Arc::new(crate::fake::Fake::default());
    assert!(slot.set(fake).is_ok());
    admission.lead(5);
    identity.set_term(5);
    meta.flush().await.unwrap();
    assert!(peer.handshake().await.unwrap().leads);
    // Its caller knows of a later leader.
    identity.set_term(6);
    assert_eq!(refused(meta.flush().await).1, 6);
    assert!(!peer.handshake().await.unwrap().leads);
    admission.lead(7);
    identity.set_term(7);
    meta.flush().await.unwrap();
    admission.resign();
    assert_eq!(refused(meta.flush().await).1, 7);
}

#[tokio::test]
async fn a_handshake_tells_of_the_caller_s_term() {
    let admission = Arc::<Admission>::default();
    let (_slot, address) = may_lead(&admission).await;
    peer(&address, Arc::new(Identity::new(9, 1))).handshake().await.unwrap();
    assert_eq!(admission.term(), 9);
}

#[tokio::test]
async fn a_call_waits_until_it_is_sent_to_who_leads() {
    let (standing_by, leading) = (Arc::<Admission>::default(), Arc::<Admission>::default());
    let (_slot, first) = may_lead(&standing_by).await;
    let (slot, second) = may_lead(&leading).await;
    let fake: Arc<dyn MetaControl> = Arc::new(crate::fake::Fake::default());
    assert!(slot.set(fake).is_ok());
    leading.lead(3);
    let limits = CallLimits { patience: LIMIT, ..CallLimits::default() };
    let peer = Peer::new(&first, Arc::new(Identity::follower()), limits).unwrap();
    let meta = RemoteMeta::new(peer.clone());
    let redirect = async {
        peer.troubled().await;
        peer.redirect(&second).unwrap();
    };
    let (flushed, ()) = tokio::join!(meta.flush(), redirect);
    flushed.unwrap();
    assert_eq!(&*peer.address(), second);
}

#[tokio::test]
async fn a_call_under_way_ends_when_calls_go_elsewhere() {
    let (admission, limits) = (Arc::<Admission>::default(), CallLimits::default());
    let (fake, first) = serve(Arc::clone(&admission)).await;
    let (_fake, second) = serve(admission).await;
    let peer = Peer::new(&first, Arc::new(Identity::follower()), limits).unwrap();
    let meta = RemoteMeta::new(peer.clone());
    let redirect = async {
        fake.arrived().await;
        peer.redirect(&second).unwrap();
        fake.was_dropped().await;
    };
    let both = async { tokio::join!(meta.wait_created(STUCK), redirect) };
    let (ended, ()) = tokio::time::timeout(LIMIT, both).await.unwrap();
    assert!(
        matches!(&ended, Err(CallError::Unreachable { peer, .. }) if *peer == first),
        "{ended:?}"
    );
    meta.wait_created(RelationId(7)).await.unwrap();
}

#[tokio::test]
async fn a_leader_that_waits_for_the_store_is_doubted() {
    let admission = Arc::<Admission>::default();
    let (_fake, address) = serve(Arc::clone(&admission)).await;
    let peer = peer(&address, Arc::default());
    let meta = RemoteMeta::new(peer.clone());
    let is_doubted = async |wait| {
        admission.set_log_wait(wait);
        meta.beat(Heartbeat::default()).await.unwrap();
        // What is told is told by the time that the answer is here.
        tokio::time::timeout(Duration::ZERO, peer.troubled()).await.is_ok()
    };
    assert!(!is_doubted(Duration::from_millis(1_900)).await);
    assert!(is_doubted(Duration::from_secs(2)).await);
    assert!(!is_doubted(Duration::ZERO).await);
}

#[tokio::test]
async fn a_call_without_the_protocol_version_is_refused() {
    let (_fake, address) = serve(Arc::default()).await;
    let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await;
    let mut client = proto::meta_client::MetaClient::new(channel.unwrap());
    let refused = client.flush(proto::Empty {}).await.unwrap_err();
    let reason = Refusal::decode(refused.details()).unwrap().reason.unwrap();
    assert!(matches!(reason, refusal::Reason::Protocol(p) if p.protocol == PROTOCOL_VERSION));
}

#[tokio::test]
async fn a_call_that_is_dropped_is_dropped_by_its_server() {
    for clients in [encoded(), networked().await] {
        {
            let cut = clients.compute.cut(STUCK, Generation(1), CUT);
            tokio::pin!(cut);
            tokio::select! {
                _ = &mut cut => panic!("it never answers"),
                () = clients.fake.arrived() => {}
            }
        }
        clients.fake.was_dropped().await;
    }
}

/// A server on a runtime of its own, which can be taken away at once, as a process can.
fn on_its_own_runtime() -> (tokio::runtime::Runtime, Arc<crate::fake::Fake>, String) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (fake, address) = runtime.block_on(serve(Arc::default()));
    (runtime, fake, address)
}

#[test]
fn a_server_that_goes_away_ends_calls_with_an_error_to_retry() {
    let (server, fake, address) = on_its_own_runtime();
    let client = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    client.block_on(async {
        let peer = peer(&address, Arc::default());
        let (compute, meta) = (RemoteCompute::new(peer.clone()), RemoteMeta::new(peer.clone()));
        let dml = RemoteDml::new(peer);
        let rows: ArrayRef = Arc::new(Int64Array::from(vec![1]));
        let delta = DeltaChunk::inserts(RecordBatch::try_from_iter([("id", rows)]).unwrap());
        let entered = EntryFlag::default();
        let id = StatementId { frontend: 1, number: 1 };
        let cut = compute.cut(STUCK, Generation(1), CUT);
        let statement = dml.apply_dml(RelationId(7), id, delta, DmlKind::Change, &entered);
        let leave = async {
            fake.arrived().await;
            entered.wait().await;
            server.shutdown_background();
        };
        let ended = async { tokio::join!(cut, statement, leave) };
        let (cut, statement, ()) = tokio::time::timeout(LIMIT, ended).await.unwrap();
        let cut = cut.unwrap_err();
        assert!(is_unreachable(&cut), "{cut:?}");
        assert_eq!(cut.state, SqlState::CONNECTION_FAILURE);
        assert!(statement.unwrap_err().is_retryable(), "its outcome is unknown");
        let refused = tokio::time::timeout(LIMIT, meta.flush()).await.unwrap().unwrap_err();
        assert!(refused.is_retryable(), "{refused:?}");
    });
}

#[tokio::test]
async fn a_silent_server_ends_calls_within_their_deadline() {
    // It takes connections and never says anything, as a stopped process does.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let limits = CallLimits {
        answer: Duration::from_millis(100),
        silence: Duration::from_millis(200),
        ..CallLimits::default()
    };
    let peer = Peer::new(&address, Arc::default(), limits).unwrap();
    let meta = RemoteMeta::new(peer.clone());
    let asked = tokio::time::timeout(LIMIT, meta.request_cut(STUCK)).await.unwrap().unwrap_err();
    assert!(asked.is_retryable(), "{asked:?}");
    // A call that may last ends because nothing comes.
    let compute = RemoteCompute::new(peer);
    let cut = compute.cut(STUCK, Generation(1), CUT);
    let cut = tokio::time::timeout(LIMIT, cut).await.unwrap().unwrap_err();
    assert!(is_unreachable(&cut), "{cut:?}");
}

#[tokio::test]
async fn bytes_that_are_no_message_are_an_error() {
    let (_fake, address) = serve(Arc::default()).await;
    let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await;
    let channel = channel.unwrap();
    // A text where a number has to be.
    let mut raw = tonic::client::Grpc::new(channel.clone());
    raw.ready().await.unwrap();
    let codec = ProstCodec::<CreateSchema, proto::Empty>::default();
    let path = http::uri::PathAndQuery::from_static("/millrace.rpc.Compute/Cut");
    let message = tonic::Request::new(CreateSchema { name: "text".into() });
    let refused = raw.unary(message, path, codec).await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal, "{refused:?}");

    // A message that says nothing.
    let mut client = proto::compute_client::ComputeClient::new(channel);
    let mut empty = tonic::Request::new(proto::PrepareEditRequest::default());
    empty.metadata_mut().insert("millrace-protocol", PROTOCOL_VERSION.into());
    let refused = client.prepare_edit(empty).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
    assert!(refused.message().contains("the field edit"), "{}", refused.message());
}
