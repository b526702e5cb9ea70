//! Meta processes as whole processes: who starts, who leads, and what the next leader waits for.

use millrace_rpc::call_error::{CallError, PROTOCOL_VERSION};
use millrace_rpc::control::{DefineAnswer, DefineRequest, Definition, Heartbeat};
use millrace_rpc::log::{CreateSchema, RegisterProcess};
use millrace_rpc::remote::{CallLimits, Handshake, Peer, RemoteMeta};
use millrace_rpc::version::StatementId;
use millrace_storage::sim::{Faults, Profile, SimStore};
use tokio::net::TcpListener;

use super::super::leader::tests::node_of_next_version;
use super::super::{Auth, Role};
use super::*;
use crate::config::Config;

const LIMIT: Duration = Duration::from_secs(30);

fn of_meta(process: Config, metas: Vec<String>) -> RoleConfig {
    RoleConfig {
        role: Role::Meta,
        process,
        metas,
        insecure_rpc: false,
        rpc_tls: None,
        auth: Auth::default(),
    }
}

/// Of one that leads at this address.
fn of_leader(address: &str, store: &Arc<dyn ObjectStore>) -> MetaOptions {
    MetaOptions {
        alone: false,
        roles: vec![ProcessRole::Meta],
        address: address.to_owned(),
        ..MetaOptions::new(Arc::clone(store))
    }
}

#[tokio::test]
async fn who_finds_another_protocol_version_does_not_start() {
    let other = node_of_next_version().await;
    for (leader, metas) in [(other.as_str(), vec![]), ("", vec![other.clone()])] {
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn ObjectStore> = Arc::new(SimStore::in_memory(Profile::INSTANT, 1));
        let before = of_leader(leader, &store);
        drop(Meta::open(before).await.unwrap());
        let config = of_meta(Config::embedded(dir.path()), metas);
        let overrides = Overrides { object_store: Some(store), ..Overrides::default() };
        let refused = MetaProcess::start(config, overrides).await.map(drop).unwrap_err();
        let refused = refused.to_string();
        let ours = format!("version {PROTOCOL_VERSION} (");
        let theirs = format!("version {} (", PROTOCOL_VERSION + 1);
        for part in [other.as_str(), &ours, &theirs, "the same build"] {
            assert!(refused.contains(part), "{part}: {refused}");
        }
    }
}

fn free_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

/// What the process at an address says when this is so.
async fn said_by(address: &str, is_so: fn(&Handshake) -> bool) -> Handshake {
    let identity = Arc::new(Identity::follower());
    let peer = Peer::new(address, identity, CallLimits::default()).unwrap();
    let says = async {
        loop {
            match peer.handshake().await {
                Ok(said) if is_so(&said) => break said,
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    tokio::time::timeout(LIMIT, says).await.unwrap()
}

#[tokio::test]
async fn who_is_about_to_lead_tells_that_the_store_does_not_answer() {
    let dir = tempfile::tempdir().unwrap();
    let address = free_address();
    let sim = SimStore::in_memory(Profile::INSTANT, 1);
    let store: Arc<dyn ObjectStore> = Arc::new(sim.clone());
    // One has led at its address and has not resigned: its lease is waited for.
    let before = of_leader(&address, &store);
    drop(Meta::open(before).await.unwrap());
    // It answers nothing after the claim: the secret of the cluster is still to be logged then.
    sim.set_faults_after("meta/log/", Faults { hang: 1.0, ..Faults::default() });
    let config =
        of_meta(Config { listen: address.clone(), ..Config::embedded(dir.path()) }, Vec::new());
    let overrides = Overrides { object_store: Some(store), ..Overrides::default() };
    let start = async move { MetaProcess::start(config, overrides).await.map(drop) };
    let _starting = AbortOnDropHandle::new(tokio::spawn(start));

    let said = said_by(&address, |said| said.log_wait > Duration::from_secs(1)).await;
    assert!(said.incarnation != 0 && !said.leads, "{said:?}");
}

/// It has claimed the lead and waits for the lease of the one before, which nobody has to outwait once more.
#[tokio::test]
async fn who_ends_before_it_leads_resigns_when_the_one_before_answers_no_read_any_more() {
    let dir = tempfile::tempdir().unwrap();
    let address = free_address();
    let store: Arc<dyn ObjectStore> = Arc::new(SimStore::in_memory(Profile::INSTANT, 1));
    // Its lease is waited for.
    let term = Meta::open(of_leader(&address, &store)).await.unwrap().term();
    let config =
        of_meta(Config { listen: address.clone(), ..Config::embedded(dir.path()) }, Vec::new());
    let object_store = Some(Arc::clone(&store));
    let overrides = Overrides { object_store, ..Overrides::default() };
    let (began, stop) = (Instant::now(), CancellationToken::new());
    let stopped = stop.clone();
    let start =
        async move { MetaProcess::start_until(config, overrides, &stopped).await.map(drop) };
    let starting = tokio::spawn(start);
    let said = said_by(&address, |said| said.incarnation != 0).await;
    assert!(!said.leads, "{said:?}");
    stop.cancel();
    let ended = tokio::time::timeout(LIMIT, starting).await.unwrap().unwrap();
    assert!(matches!(ended, Err(StartError::Stopped)), "{ended:?}");
    assert!(began.elapsed() >= PREDECESSOR, "the one before may answer reads");
    let next = Meta::open(of_leader("", &store)).await.unwrap();
    assert_eq!(next.term(), term + 2);
    assert!(next.predecessors().is_empty(), "it has resigned");
}

/// Has a schema made by whoever leads at this address, as the process of this incarnation.
async fn define_as(incarnation: u64, leader: SocketAddr) -> Result<DefineAnswer, CallError> {
    let identity = Identity::follower();
    identity.set_incarnation(incarnation);
    let limits = CallLimits { patience: LIMIT, ..CallLimits::default() };
    let peer = Peer::new(&leader.to_string(), Arc::new(identity), limits)?;
    let id = Some(StatementId { frontend: 1, number: incarnation });
    let name = format!("s{incarnation}");
    let change = Some(Definition::CreateSchema(CreateSchema { name }));
    RemoteMeta::new(peer).define(DefineRequest { id, since: 0, change }).await
}

/// A frontend that has stood still goes over to the next leader with its first call.
#[tokio::test]
async fn who_was_fenced_by_a_leader_before_makes_no_definitions() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn ObjectStore> = Arc::new(SimStore::in_memory(Profile::INSTANT, 1));
    let options = of_leader("", &store);
    let before = Meta::open(options).await.unwrap();
    let connect =
        Peers { identity: Arc::default(), admission: Arc::default(), fenced: Arc::default() };
    before.start_cluster(Arc::new(connect)).await.unwrap();
    let register = async |nonce: u64| {
        let (roles, address) = (vec![ProcessRole::Frontend as i32], format!("127.0.0.1:{nonce}"));
        before.register_process(RegisterProcess { nonce, roles, address }).await.unwrap()
    };
    let (fenced, live) = (register(1).await, register(2).await);
    let leaves = Heartbeat { incarnation: fenced, leaving: true, ..Heartbeat::default() };
    before.beat(leaves).await.unwrap();
    before.resign().await.unwrap();
    drop(before);

    let config = of_meta(Config::embedded(dir.path()), Vec::new());
    let overrides = Overrides { object_store: Some(store), ..Overrides::default() };
    let started = tokio::time::timeout(LIMIT, MetaProcess::start(config, overrides)).await;
    let next = started.unwrap().unwrap();
    let made = define_as(live, next.address).await;
    assert!(made.is_ok(), "{made:?}");
    let refused = define_as(fenced, next.address).await;
    assert!(matches!(refused, Err(CallError::Fenced { .. })), "{refused:?}");
    next.shutdown().await;
}

/// Whether a leader need not wait for the lease of the one before, which has answered it. `has_led`: that one had said
/// that it leads. `another`: the log has one more that may lead.
async fn has_stopped_before(has_led: bool, another: bool, limit: Duration) -> bool {
    let store: Arc<dyn ObjectStore> = Arc::new(SimStore::in_memory(Profile::INSTANT, 1));
    let open = async || {
        let options = of_leader("", &store);
        Meta::open(options).await.unwrap()
    };
    let before = open().await;
    if another {
        let connect =
            Peers { identity: Arc::default(), admission: Arc::default(), fenced: Arc::default() };
        before.start_cluster(Arc::new(connect)).await.unwrap();
        let roles = vec![ProcessRole::Meta as i32];
        let other = RegisterProcess { nonce: 9, roles, address: "m:2".to_owned() };
        before.register_process(other).await.unwrap();
    }
    let admission = Arc::<Admission>::default();
    admission.lead(before.term());
    admission.set_incarnation(before.incarnation());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = Server::new(Arc::clone(&admission)).leader(Arc::default());
    let _serving = Serving::start(&admission, server, listener);
    let meta = open().await;
    assert_eq!(meta.predecessors().len(), 1 + usize::from(another));
    let followed = Followed { incarnation: before.incarnation(), address, has_led };
    let identity = Arc::new(Identity::new(meta.term(), meta.incarnation()));
    let stopped = has_stopped(Some(followed), &meta, &identity);
    let is_told = async {
        while admission.leads() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LIMIT, is_told).await.unwrap();
    tokio::time::timeout(limit, stopped).await.is_ok()
}

#[tokio::test]
async fn a_lease_is_waited_for_unless_the_only_one_that_led_has_stopped() {
    let soon = Duration::from_secs(1);
    assert!(has_stopped_before(true, false, LIMIT).await);
    assert!(!has_stopped_before(false, false, soon).await, "its own one may answer reads");
    assert!(!has_stopped_before(true, true, soon).await, "the other one may answer reads");
}
