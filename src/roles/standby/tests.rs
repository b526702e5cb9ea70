//! When a process that stands by claims the lead, and what keeps it from that.

use millrace_common::EnvHandle;
use millrace_meta::claim::{ALONE, LOST};
use millrace_meta::{Meta, MetaOptions};
use millrace_rpc::call_error::PROTOCOL_VERSION;
use millrace_rpc::control::MetaControl;
use millrace_rpc::log::RegisterProcess;
use millrace_rpc::remote::{Pem, Server, Tls};
use object_store::ObjectStore;
use object_store::memory::InMemory;
use tokio::net::TcpListener;

use super::super::leader::tests::{node, node_of_next_version, stranger};
use super::super::peers::Peers;
use super::*;

const LIMIT: Duration = Duration::from_secs(30);
/// Where nobody listens.
const NOBODY: &str = "127.0.0.1:1";

macro_rules! file {
    ($name:literal) => {
        include_bytes!(concat!("../../../tests/certificates/", $name))
    };
}

/// Of `127.0.0.1`.
const OURS: Pem<'static> =
    Pem { chain: file!("process.pem"), key: file!("process.key"), authority: file!("ca.pem") };
/// The same of another CA.
const STRANGER: Pem<'static> = Pem {
    chain: file!("stranger.pem"),
    key: file!("stranger.key"),
    authority: file!("other-ca.pem"),
};

fn tls(pem: Pem<'_>) -> Option<Tls> {
    Some(Tls::from_pem(pem, None).unwrap())
}

/// Of a log that has a leader and a compute process at these addresses. It has heard nothing for longer than it would
/// wait.
async fn standby(leader: &str, compute: &str, tls: Option<Tls>) -> Standby {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let options = MetaOptions {
        alone: false,
        roles: vec![ProcessRole::Meta],
        address: leader.to_owned(),
        ..MetaOptions::new(Arc::clone(&store))
    };
    let meta = Meta::open(options).await.unwrap();
    let (identity, admission) = (Arc::default(), Arc::default());
    let connect = Peers { identity, admission, fenced: Arc::default() };
    meta.start_cluster(Arc::new(connect)).await.unwrap();
    let (roles, address) = (vec![ProcessRole::Compute as i32], compute.to_owned());
    meta.register_process(RegisterProcess { nonce: 9, roles, address }).await.unwrap();
    meta.shutdown().await;

    let log = LogFollower::open(store, EnvHandle::default()).await.unwrap();
    let identity = Arc::new(Identity::follower().with_tls(tls));
    let (admission, hindrance, penalty) = (Arc::default(), Arc::default(), Duration::ZERO);
    let mut standby =
        Standby::new(log, identity, &admission, &[], "127.0.0.1:2", penalty, &hindrance);
    hear_nothing(&mut standby, ALONE * 2).await;
    standby
}

/// It has looked until now, and has heard nothing of the leader for so long.
async fn hear_nothing(standby: &mut Standby, silence: Duration) {
    standby.log.catch_up().await.unwrap();
    let record = standby.log.read(|state| state.number);
    let (now, mut ago) = (Instant::now(), silence);
    let mut watch = Watch::new(Duration::ZERO, now - silence);
    while !ago.is_zero() {
        watch.note(false, None, record, now - ago);
        ago = ago.saturating_sub(LOST);
    }
    if standby.watch.is_hindered(now) {
        watch.hinder(now);
    }
    if standby.watch.is_refused(now) {
        watch.refuse(now);
    }
    standby.watch = watch;
}

/// What is told when it has found why it must not claim the lead, which it does not do.
async fn hindered(standby: &mut Standby) -> String {
    let deadline = Instant::now() + LIMIT;
    loop {
        assert!(Instant::now() < deadline, "nothing keeps it from claiming the lead");
        // Long enough for the others to be asked.
        hear_nothing(standby, LOST).await;
        assert_eq!(standby.look().await.unwrap(), None);
        if let Some(why) = standby.hindrance.get() {
            hear_nothing(standby, ALONE * 2).await;
            assert_eq!(standby.look().await.unwrap(), None);
            return why;
        }
    }
}

#[tokio::test]
async fn the_lead_is_claimed_where_nobody_is_there() {
    let mut standby = standby(NOBODY, NOBODY, None).await;
    assert!(standby.may_lead().await.unwrap());
    assert!(standby.look().await.unwrap().is_some());
    assert_eq!(standby.hindrance.get(), None);
}

#[tokio::test]
async fn no_lead_is_claimed_where_a_process_of_another_version_takes_part() {
    let other = node_of_next_version().await;
    let versions = [PROTOCOL_VERSION, PROTOCOL_VERSION + 1].map(|v| format!("version {v} ("));
    for (leader, compute, role) in
        [(other.as_str(), NOBODY, "meta process"), (NOBODY, other.as_str(), "compute process")]
    {
        let mut standby = standby(leader, compute, None).await;
        let refused = standby.may_lead().await.unwrap_err();
        let why = hindered(&mut standby).await;
        for told in [why, refused.message.to_string()] {
            for part in [role, other.as_str(), versions[0].as_str(), versions[1].as_str()] {
                assert!(told.contains(part), "{part}: {told}");
            }
        }
    }
}

#[tokio::test]
async fn who_does_not_talk_with_this_process_is_there_all_the_same() {
    let secured = node(Admission::default().with_tls(tls(OURS))).await;
    let plain = node(Admission::default()).await;
    for (leader, compute, own) in [
        (secured.as_str(), NOBODY, None),
        (secured.as_str(), NOBODY, tls(STRANGER)),
        (plain.as_str(), NOBODY, tls(OURS)),
        (NOBODY, secured.as_str(), None),
    ] {
        let mut standby = standby(leader, compute, own).await;
        if compute != NOBODY {
            let refused = async { while standby.may_lead().await.unwrap() {} };
            tokio::time::timeout(LIMIT, refused).await.unwrap();
        }
        let why = hindered(&mut standby).await;
        let address = if leader == NOBODY { compute } else { leader };
        assert!(why.contains(address) && why.contains("--rpc-tls-ca"), "{why}");
    }
}

/// At an address that a process of this one has had.
#[tokio::test]
async fn a_process_of_another_cluster_is_nobody_whatever_it_speaks() {
    let admission = Admission::default().speaking(PROTOCOL_VERSION + 1);
    admission.set_store(StoreId::new(7, 7));
    let other = node(admission).await;
    for (leader, compute) in [(other.as_str(), NOBODY), (NOBODY, other.as_str())] {
        let mut standby = standby(leader, compute, None).await;
        assert!(standby.may_lead().await.unwrap());
        assert!(standby.look().await.unwrap().is_some());
        assert_eq!(standby.hindrance.get(), None);
    }
}

/// It was started again with files that are wrong, for instance: nobody follows it, and this process must lead.
#[tokio::test]
async fn a_leader_that_does_not_talk_with_anybody_is_lost() {
    let leader = node(Admission::default().with_tls(tls(OURS))).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let compute = listener.local_addr().unwrap().to_string();
    let admission = Arc::<Admission>::default();
    tokio::spawn(Server::new(Arc::clone(&admission)).serve(listener));
    let mut standby = standby(&leader, &compute, None).await;
    // Another process is at the address of the one that has registered.
    let why = hindered(&mut standby).await;
    assert!(why.contains(&leader), "{why}");

    let registered = standby.log.read(voters).pop().unwrap();
    admission.set_incarnation(registered.incarnation);
    let deadline = Instant::now() + LIMIT;
    while standby.look().await.unwrap().is_none() {
        assert!(Instant::now() < deadline, "the other one has heard of no leader");
        hear_nothing(&mut standby, ALONE * 2).await;
    }
    assert_eq!(standby.hindrance.get(), None);
}

#[tokio::test]
async fn one_of_another_version_that_does_not_answer_for_a_moment_is_still_there() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let other = listener.local_addr().unwrap().to_string();
    let admission = Arc::new(Admission::default().speaking(PROTOCOL_VERSION + 1));
    let serving = tokio::spawn(Server::new(admission).serve(listener));
    let mut standby = standby(&other, NOBODY, None).await;
    let why = Some(hindered(&mut standby).await);

    serving.abort();
    assert!(serving.await.is_err());
    // Connects anew.
    standby.asker = Asker::new(Arc::clone(&standby.identity));
    hear_nothing(&mut standby, ALONE * 2).await;
    assert_eq!(standby.look().await.unwrap(), None);
    assert_eq!(standby.hindrance.get(), why);
    standby.watch.hinder(Instant::now() - ALONE);
    assert!(standby.look().await.unwrap().is_some());
    assert_eq!(standby.hindrance.get(), None);
}

#[tokio::test]
async fn a_stranger_keeps_a_meta_process_from_starting_only_where_it_leads() {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    drop(Meta::open(MetaOptions::new(Arc::clone(&store))).await.unwrap());
    for leads in [false, true] {
        let address = stranger(leads).await;
        let log = LogFollower::open(Arc::clone(&store), EnvHandle::default()).await.unwrap();
        let identity = Arc::new(Identity::follower());
        let (admission, metas) = (Arc::default(), [address]);
        let (penalty, hindrance) = (Duration::ZERO, Arc::default());
        let standby = Standby::new(log, identity, &admission, &metas, "m:1", penalty, &hindrance);
        assert_eq!(standby.refuse_other_store().await.is_err(), leads);
    }
}

#[test]
fn who_was_deposed_does_not_take_its_own_address_for_a_proof() {
    let dir = tempfile::tempdir().unwrap();
    let mut own = Leadership::read(dir.path());
    let leader = |nonce, address: &str| Leader {
        incarnation: 3,
        nonce,
        address: address.to_owned(),
        is_standalone: false,
    };
    assert!(is_dead(&leader(7, "meta:4570"), "meta:4570", &own), "nobody else can be there");
    assert!(!is_dead(&leader(7, "other:4570"), "meta:4570", &own));
    assert!(!is_dead(&leader(7, ""), "", &own), "no address is nobody's");

    own.lead(5);
    own.was_deposed();
    assert!(!is_dead(&leader(7, "meta:4570"), "meta:4570", &own), "it may have deposed it");
    assert!(is_dead(&leader(5, "other:4570"), "meta:4570", &own), "the directory was locked");

    own.has_led_long();
    assert!(is_dead(&leader(7, "meta:4570"), "meta:4570", &own));
}
