//! The way to the leader, for a program that takes no part in the cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use millrace_rpc::call_error::CallError;
use millrace_rpc::remote::{CallLimits, Handshake, Identity, Peer, RemoteOperator};
use millrace_rpc::store_id::StoreId;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::CtlOptions;
use super::asking::{Answered, Failure, LEADER_WAIT, PAUSE, outlasting};
use crate::config::ConfigError;
use crate::roles::leader::Asker;
use crate::roles::{ClusterFlags, meta_addresses, tls};
use crate::standalone::described;

/// How often it is looked whether another process leads while an answer is waited for.
const CHECK: Duration = Duration::from_secs(1);

/// The leader, and the processes that have answered.
pub struct Connection {
    /// The meta processes that were named.
    named: BTreeSet<String>,
    asker: Asker,
    identity: Arc<Identity>,
    peer: Peer,
    /// That of the leader that was found first; `None`: it has told none. Who works on another one is of another cluster.
    store: Option<StoreId>,
    /// The term of the leader, and what the processes of its store said when it was found.
    found: Mutex<(u64, BTreeMap<String, Handshake>)>,
}

impl Connection {
    /// Finds the leader among the meta processes that were named, and those that they name. An error says why not. So does
    /// one where two lead that work on different stores: it cannot be told which is meant.
    pub async fn open(options: &CtlOptions) -> Result<Connection, String> {
        let named = meta_addresses(&options.meta).map_err(|e| e.to_string())?;
        let named: BTreeSet<String> = named.into_iter().collect();
        if named.is_empty() {
            let name = "--meta";
            let why = "the addresses of the meta processes, of which one leads";
            return Err(ConfigError::Missing { name, why }.to_string());
        }
        let identity = Arc::new(identity(options)?);
        let asker = Asker::new(Arc::clone(&identity));
        let deadline = Instant::now() + LEADER_WAIT;
        loop {
            let mut metas = ask_all(&asker, &named).await.map_err(|e| nobody(&named, e))?;
            check_one_store(&metas)?;
            if let Some((address, said)) = leading(&metas) {
                let (address, term, store) = (address.to_owned(), said.term, said.store);
                identity.raise_term(term);
                let peer = Peer::new(&address, Arc::clone(&identity), CallLimits::default());
                let peer = peer.map_err(|e| described(&e.into()))?;
                retain_of(store, &mut metas);
                let found = Mutex::new((term, metas));
                return Ok(Connection { named, asker, identity, peer, store, found });
            }
            if Instant::now() >= deadline {
                let there: Vec<&str> = metas.keys().map(String::as_str).collect();
                return Err(format!(
                    "no meta process leads: {} answered, and none of them has taken the lead within {} s",
                    there.join(", "),
                    LEADER_WAIT.as_secs()
                ));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Asks the leader what may be asked again: whoever leads then, where it is lost or another one is found meanwhile.
    pub async fn ask<T, C>(
        &self,
        call: impl Fn(RemoteOperator) -> C,
    ) -> Result<Answered<T>, Failure>
    where
        C: Future<Output = Result<T, CallError>>,
    {
        let attempt = || async {
            let leader = self.peer.address();
            tokio::select! {
                biased;
                answer = call(RemoteOperator::new(self.peer.clone())) => answer,
                () = self.succeeded(&leader) => {
                    let cause = "another process leads, and it has not answered".to_owned();
                    Err(CallError::Unreachable { peer: leader.to_string(), cause })
                }
            }
        };
        outlasting(attempt, || self.look()).await
    }

    /// Processes that have answered and do not lead, by address, and the incarnation of each; 0: it has none. Those that are
    /// not registered are meta processes.
    pub fn others(&self) -> Vec<(String, u64)> {
        let found = self.found.lock();
        let others = found.1.iter().filter(|(_, said)| !said.leads);
        others.map(|(address, said)| (address.clone(), said.incarnation)).collect()
    }

    /// Returns when another process leads than the one at this address, which may not know it, and not answer.
    async fn succeeded(&self, address: &str) {
        while *self.peer.address() == *address {
            tokio::time::sleep(CHECK).await;
            self.look().await;
        }
    }

    /// Looks once who leads. Calls go there from then on; where nobody is found they go on as before.
    async fn look(&self) {
        let Ok(mut metas) = ask_all(&self.asker, &self.named).await else { return };
        retain_of(self.store, &mut metas);
        let Some((address, said)) = leading(&metas) else { return };
        let term = said.term;
        // One that was succeeded says that it leads until it has heard of that.
        if term < self.found.lock().0 {
            return;
        }
        self.identity.raise_term(term);
        if self.peer.redirect(address).is_ok() {
            *self.found.lock() = (term, metas);
        }
    }
}

/// Of a program that leads nobody, and of no store.
fn identity(options: &CtlOptions) -> Result<Identity, String> {
    let flags = ClusterFlags {
        rpc_tls_cert: options.rpc_tls_cert.clone(),
        rpc_tls_key: options.rpc_tls_key.clone(),
        rpc_tls_ca: options.rpc_tls_ca.clone(),
        ..ClusterFlags::default()
    };
    let files = flags.rpc_tls().map_err(|e| e.to_string())?;
    let files = files.map(|files| tls::load_files(&files, None)).transpose();
    let tls = files.map_err(|e| e.to_string())?;
    Ok(Identity::follower().with_tls(tls))
}

/// The one that leads, and what it said.
fn leading(metas: &BTreeMap<String, Handshake>) -> Option<(&str, &Handshake)> {
    let leading = metas.iter().filter(|(_, said)| said.leads);
    let (address, said) = leading.max_by_key(|(_, said)| said.term)?;
    Some((address.as_str(), said))
}

/// Leaves out those that work on another store than this one, as far as it is known of both.
fn retain_of(store: Option<StoreId>, metas: &mut BTreeMap<String, Handshake>) {
    if store.is_some() {
        metas.retain(|_, said| said.store.is_none() || said.store == store);
    }
}

fn check_one_store(metas: &BTreeMap<String, Handshake>) -> Result<(), String> {
    let mut leading = metas.iter().filter_map(|(address, said)| {
        let store = said.store.filter(|_| said.leads)?;
        Some((address, store))
    });
    let Some((one, first)) = leading.next() else { return Ok(()) };
    match leading.find(|(_, store)| *store != first) {
        Some((other, second)) => Err(format!(
            "{one} leads on the object store with id {first}, and {other} on the one with id {second}: --meta is to name \
             the meta processes of one cluster"
        )),
        None => Ok(()),
    }
}

/// Those that answer, and the leaders that they name.
async fn ask_all(
    asker: &Asker,
    named: &BTreeSet<String>,
) -> Result<BTreeMap<String, Handshake>, CallError> {
    let mut there = asker.ask_all(named).await?;
    let others = there.values().map(|said| said.leader.clone());
    let others: BTreeSet<String> =
        others.filter(|leader| !leader.is_empty() && !named.contains(leader)).collect();
    there.extend(asker.ask_all(&others).await.unwrap_or_default());
    Ok(there)
}

fn nobody(named: &BTreeSet<String>, error: CallError) -> String {
    let addresses: Vec<&str> = named.iter().map(String::as_str).collect();
    format!("no meta process answers at {}: {}", addresses.join(", "), described(&error.into()))
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use clap::Parser;
    use millrace_common::{JobId, SqlError};
    use millrace_rpc::operator::{
        BackupList, BackupOverview, ClusterOverview, CollectionReport, JobVersions,
        OperatorService, PlacedJobs,
    };
    use millrace_rpc::remote::{Admission, OperatorSlot, Server};
    use millrace_rpc::version::StatementId;
    use tokio::net::TcpListener;
    use tokio::sync::watch;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);
    const ID: StatementId = StatementId { frontend: 1 << 50, number: 7 };

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: CtlOptions,
    }

    /// Notes by which ids it is asked for backups.
    struct Leader {
        answers: bool,
        asked: watch::Sender<Vec<StatementId>>,
    }

    fn not_asked<T>() -> Result<T, CallError> {
        Err(SqlError::unsupported("anything but a backup").into())
    }

    #[async_trait]
    impl OperatorService for Leader {
        async fn overview(&self) -> Result<ClusterOverview, CallError> {
            not_asked()
        }

        async fn move_job(
            &self,
            _: JobId,
            _: u64,
            _: Option<StatementId>,
        ) -> Result<PlacedJobs, CallError> {
            not_asked()
        }

        async fn drain(
            &self,
            _: u64,
            _: bool,
            _: Option<StatementId>,
        ) -> Result<PlacedJobs, CallError> {
            not_asked()
        }

        async fn versions(&self) -> Result<JobVersions, CallError> {
            not_asked()
        }

        async fn collection(&self, _: bool) -> Result<CollectionReport, CallError> {
            not_asked()
        }

        async fn create_backup(
            &self,
            name: String,
            id: Option<StatementId>,
        ) -> Result<BackupOverview, CallError> {
            self.asked.send_modify(|asked| asked.extend(id));
            if !self.answers {
                std::future::pending::<()>().await;
            }
            Ok(BackupOverview { name, ..BackupOverview::default() })
        }

        async fn backups(&self) -> Result<BackupList, CallError> {
            not_asked()
        }

        async fn release_backup(
            &self,
            _: String,
            _: Option<StatementId>,
        ) -> Result<BackupOverview, CallError> {
            not_asked()
        }
    }

    /// A meta process that stands by until it is told that it leads.
    struct Meta {
        address: String,
        admission: Arc<Admission>,
        leader: Arc<Leader>,
    }

    impl Meta {
        async fn start(answers: bool) -> Meta {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let leader = Arc::new(Leader { answers, asked: watch::Sender::default() });
            let (admission, slot) = (Arc::<Admission>::default(), Arc::<OperatorSlot>::default());
            assert!(slot.set(Arc::clone(&leader) as Arc<dyn OperatorService>).is_ok());
            tokio::spawn(Server::new(Arc::clone(&admission)).operator(slot).serve(listener));
            Meta { address, admission, leader }
        }

        fn asked(&self) -> Vec<StatementId> {
            self.leader.asked.borrow().clone()
        }
    }

    async fn try_open(metas: [&Meta; 2]) -> Result<Connection, String> {
        let addresses = metas.map(|meta| meta.address.as_str()).join(",");
        let arguments = ["millrace", "workers", "--meta", addresses.as_str()];
        let cli = Cli::try_parse_from(arguments).unwrap_or_else(|e| panic!("{e}"));
        Connection::open(&cli.options).await
    }

    async fn open(metas: [&Meta; 2]) -> Connection {
        try_open(metas).await.unwrap()
    }

    async fn back_up(connection: &Connection) -> Answered<BackupOverview> {
        let name = "b".to_owned();
        let call = |leader: RemoteOperator| {
            let name = name.clone();
            async move { leader.create_backup(name, Some(ID)).await }
        };
        tokio::time::timeout(LIMIT, connection.ask(call)).await.unwrap().unwrap()
    }

    #[tokio::test]
    async fn a_leader_that_leads_no_longer_sends_a_change_to_the_next() {
        let (old, new) = (Meta::start(true).await, Meta::start(true).await);
        old.admission.lead(1);
        new.admission.set_incarnation(9);
        let connection = open([&old, &new]).await;
        assert_eq!(connection.others(), [(new.address.clone(), 9)]);
        old.admission.resign();
        new.admission.lead(2);
        let Answered { answer, is_repeat } = back_up(&connection).await;
        assert_eq!((answer.name.as_str(), is_repeat), ("b", false));
        assert_eq!((old.asked(), new.asked()), (vec![], vec![ID]));
    }

    #[tokio::test]
    async fn a_change_that_waits_at_a_leader_goes_to_its_successor_by_the_same_id() {
        let (old, new) = (Meta::start(false).await, Meta::start(true).await);
        old.admission.lead(1);
        let connection = open([&old, &new]).await;
        let succeeded = async {
            let mut asked = old.leader.asked.subscribe();
            asked.wait_for(|asked| !asked.is_empty()).await.unwrap();
            new.admission.lead(2);
        };
        let (answered, ()) = tokio::join!(back_up(&connection), succeeded);
        assert_eq!((answered.answer.name.as_str(), answered.is_repeat), ("b", true));
        assert_eq!((old.asked(), new.asked()), (vec![ID], vec![ID]));
    }

    /// A restored copy of a store has higher terms than the original.
    #[tokio::test]
    async fn a_leader_of_another_store_is_not_taken_for_the_one_that_is_meant() {
        let (ours, other) = (Meta::start(true).await, Meta::start(true).await);
        ours.admission.set_store(StoreId::new(1, 1));
        other.admission.set_store(StoreId::new(2, 2));
        ours.admission.lead(1);
        let connection = open([&ours, &other]).await;
        assert!(connection.others().is_empty(), "{:?}", connection.others());
        other.admission.lead(2);
        connection.look().await;
        assert_eq!(*connection.peer.address(), *ours.address);

        let refused = try_open([&ours, &other]).await.err().unwrap_or_default();
        for part in [ours.address.as_str(), other.address.as_str(), "of one cluster"] {
            assert!(refused.contains(part), "{refused}");
        }
    }
}
