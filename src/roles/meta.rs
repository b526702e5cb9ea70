//! `millrace meta`: leads a cluster, or stands by until the leader is lost. The leader has the log; jobs run on compute
//! processes.

use std::fmt::Write;
use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use millrace_common::{RelationId, SqlError, SqlState};
use millrace_executor::error_sink::ErrorSink;
use millrace_frontend::cluster::{JobRow, job_row};
use millrace_meta::claim::LED_LONG;
use millrace_meta::processes::ProcessStatus;
use millrace_meta::{LogFollower, Meta, MetaError, MetaOptions, is_overtaken, is_skewed};
use millrace_rpc::control::MetaControl;
use millrace_rpc::log::ProcessRole;
use millrace_rpc::operator::OperatorService;
use millrace_rpc::remote::{Admission, Identity, LeaderSlot, OperatorSlot, Server};
use millrace_storage::object::Metered;
use object_store::ObjectStore;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use super::hindrance::Hindrance;
use super::leader::tell_deposed;
use super::metrics::{Metrics, MetricsPort};
use super::options::RoleConfig;
use super::peers::Peers;
use super::standby::{Followed, Standby};
use super::store::shown;
use super::table_classes::TableClasses;
use super::{Contact, Ending, Ground, Serving};
use crate::http;
use crate::http::metrics::Exposition;
use crate::leadership::{Leadership, PREDECESSOR};
use crate::standalone::{
    Overrides, StartError, begin_to_lead, meta_options, own_secret, set_root_password, take_lead,
    tell_start,
};
use crate::usage::UsageSource;

/// How often a leader looks whether others know of a later one, and for how long the object store has not answered it.
const LOOK: Duration = Duration::from_millis(200);
/// How long a leader that ends waits until the log has it that it leads no longer.
const RESIGN: Duration = Duration::from_secs(2);
/// Before a claim that has failed is tried again; because of the clock, which costs the store some requests.
const PAUSE: Duration = Duration::from_secs(1);
const CLOCK_PAUSE: Duration = Duration::from_secs(5);

/// A running meta process. It has started when it leads, or knows of a leader and stands by.
pub struct MetaProcess {
    pub address: SocketAddr,
    seat: Arc<Seat>,
    serving: Serving,
    /// Stands by, and leads.
    task: AbortOnDropHandle<()>,
    _port: MetricsPort,
    _lock: File,
}

impl MetaProcess {
    /// Leads, or stands by.
    pub async fn start(
        config: RoleConfig,
        overrides: Overrides,
    ) -> Result<MetaProcess, StartError> {
        MetaProcess::start_until(config, overrides, &CancellationToken::new()).await
    }

    /// The same; [`StartError::Stopped`], and it has ended in order, when `stop` is cancelled meanwhile.
    pub async fn start_until(
        config: RoleConfig,
        overrides: Overrides,
        stop: &CancellationToken,
    ) -> Result<MetaProcess, StartError> {
        let begun = stop.run_until_cancelled(MetaProcess::begin(config, overrides)).await;
        let (process, started) = begun.unwrap_or(Err(StartError::Stopped))?;
        let Some(started) = stop.run_until_cancelled(started).await else {
            process.shutdown().await;
            return Err(StartError::Stopped);
        };
        started.map_err(|_| SqlError::internal("a meta process has ended while it started"))??;
        Ok(process)
    }

    /// Is there for others, and goes on by itself. What is returned with it completes when it leads or stands by, or says
    /// why it cannot.
    async fn begin(
        config: RoleConfig,
        overrides: Overrides,
    ) -> Result<(MetaProcess, oneshot::Receiver<Result<(), StartError>>), StartError> {
        let began = Instant::now();
        let Ground { object_store, listener, address, advertised, requests, lock } =
            Ground::prepare(&config, &overrides).await?;
        let admission = Arc::new(Admission::default().with_tls(advertised.tls.clone()));
        let (slot, operator) = (Arc::<LeaderSlot>::default(), Arc::<OperatorSlot>::default());
        let server = Server::new(Arc::clone(&admission));
        let server = server.leader(Arc::clone(&slot)).operator(Arc::clone(&operator));
        let seat = Arc::new(Seat {
            config,
            overrides,
            object_store,
            requests: requests.clone(),
            advertised,
            admission,
            slot,
            operator,
            leading: OnceLock::new(),
            outwaited: CancellationToken::new(),
            identity: OnceLock::new(),
            fenced: Arc::default(),
            hindrance: Arc::default(),
            ending: Ending::default(),
            began,
        });
        let port = MetricsPort::open(&seat.config.process).await?;
        port.show(seat.metrics(requests));
        let own = seat.own_leadership().await;
        let standby = seat.standby(&own).await?;
        // Those of another protocol version find nobody here before it is clear that this process goes on.
        let may_lead = standby.may_lead().await?;
        let serving = Serving::start(&seat.admission, server, listener);
        standby.refuse_other_store().await?;
        standby.refuse_standalone(&own).await?;
        let at_once = standby.claims_at_once(&own).filter(|_| may_lead);
        let (tell, started) = oneshot::channel();
        let task = tokio::spawn(Arc::clone(&seat).run(standby, at_once, tell));
        let task = AbortOnDropHandle::new(task);
        Ok((MetaProcess { address, seat, serving, task, _port: port, _lock: lock }, started))
    }

    /// Completes when this process may no longer lead.
    pub async fn ended(&self) -> String {
        self.seat.ending.ended().await
    }

    /// Of a leader, and of one that is about to lead: its successor need not wait.
    pub async fn shutdown(self) {
        let MetaProcess { seat, serving, task, .. } = self;
        let leading = match seat.leading.get() {
            // A resignation says that nobody answers reads any more. One that has claimed the lead and does not lead yet may
            // say so when that holds for its predecessor, too.
            Some(meta) => seat.has_outwaited(task).await.then_some(meta),
            None => {
                drop(task);
                None
            }
        };
        seat.admission.resign();
        if let Some(meta) = leading {
            // Ends what waits, so that its callers turn to the next leader.
            meta.shutdown().await;
        }
        serving.end().await;
        if let Some(meta) = leading {
            match tokio::time::timeout(RESIGN, meta.resign()).await {
                Ok(Ok(())) => info!("leads no longer"),
                Ok(Err(error)) => warn!(%error, "the next leader waits for the lease of this one"),
                Err(_) => warn!("the next leader waits for the lease of this one: no answer"),
            }
        }
    }
}

/// What a meta process leads with.
struct Seat {
    config: RoleConfig,
    overrides: Overrides,
    object_store: Arc<dyn ObjectStore>,
    /// Counts the requests to it.
    requests: Option<Arc<Metered>>,
    advertised: Contact,
    admission: Arc<Admission>,
    slot: Arc<LeaderSlot>,
    operator: Arc<OperatorSlot>,
    /// Once it has claimed the lead.
    leading: OnceLock<Arc<Meta>>,
    /// Cancelled when no leader before it can answer a read any more.
    outwaited: CancellationToken,
    /// As which it leads.
    identity: OnceLock<Arc<Identity>>,
    /// Processes that it has fenced.
    fenced: Arc<AtomicU64>,
    /// Why it must not lead, or why its clock kept it from that when it was about to.
    hindrance: Arc<Hindrance>,
    ending: Ending,
    began: Instant,
}

impl Seat {
    fn data_dir(&self) -> PathBuf {
        self.config.process.data_dir.clone()
    }

    async fn own_leadership(&self) -> Leadership {
        let data_dir = self.data_dir();
        let read = tokio::task::spawn_blocking(move || Leadership::read(&data_dir));
        read.await.unwrap_or_default()
    }

    async fn standby(&self, own: &Leadership) -> Result<Standby, StartError> {
        let log = LogFollower::open(Arc::clone(&self.object_store), self.overrides.env.clone());
        let log = log.await.map_err(SqlError::from)?;
        let identity = Identity::follower().with_tls(self.advertised.tls.clone());
        Ok(Standby::new(
            log,
            Arc::new(identity),
            &self.admission,
            &self.config.metas,
            &self.advertised.address,
            own.penalty(),
            &self.hindrance,
        ))
    }

    /// Leads at once, if `at_once` is the log's last record, or stands by until it leads; then it leads until it ends.
    /// `started` is told when it does either, or why it cannot.
    async fn run(
        self: Arc<Seat>,
        mut standby: Standby,
        at_once: Option<u64>,
        started: oneshot::Sender<Result<(), StartError>>,
    ) {
        let leads = match at_once {
            Some(record) => self.lead(record, None).await,
            None => Ok(false),
        };
        let leads = match leads {
            Ok(leads) => leads,
            // As below.
            Err(error) => return drop(started.send(Err(error))),
        };
        if !leads {
            info!(store_id = shown(standby.store_id()), "stands by");
        }
        // Nobody may wait for it any more.
        let _ = started.send(Ok(()));
        if !leads {
            loop {
                let record = standby.wait().await;
                let mut pause = PAUSE;
                match self.lead(record, standby.followed()).await {
                    Ok(true) => break,
                    Ok(false) if self.hindrance.is_of_clock() => pause = CLOCK_PAUSE,
                    Ok(false) => info!("another process was first: stands by"),
                    Err(error) if self.leading.get().is_none() => {
                        warn!(%error, "the lead could not be taken, trying again");
                    }
                    Err(error) => return self.ending.end(error.to_string()),
                }
                tokio::time::sleep(pause).await;
            }
        }
        if let Some(meta) = self.leading.get() {
            self.watch(meta).await;
        }
    }

    /// Claims the lead, if `record` is the log's last one, and serves as the leader once it may. Whether it leads. `before`:
    /// the leader that may still be there.
    async fn lead(&self, record: u64, before: Option<Followed>) -> Result<bool, StartError> {
        let meta =
            match take_lead(&self.config.process, &self.overrides, || self.options(record)).await {
                Err(StartError::Meta(error)) if is_overtaken(&error) => {
                    // The clock is looked at before the log.
                    self.hindrance.set_clock(None);
                    return Ok(false);
                }
                Err(StartError::Meta(error)) if is_skewed(&error) => {
                    if self.hindrance.set_clock(Some(error.to_string())) {
                        warn!(%error, "stands by until the clock is right");
                    }
                    return Ok(false);
                }
                meta => meta?,
            };
        self.hindrance.set_clock(None);
        // Set once: a process leads once.
        let _ = self.leading.set(Arc::clone(&meta));
        let usage = UsageSource { requests: self.requests.clone(), ..UsageSource::default() };
        meta.set_usage(Box::new(move || usage.read()));
        self.admission.follow("");
        self.admission.raise_term(meta.term());
        self.admission.set_incarnation(meta.incarnation());
        // Those that leaders before it have fenced need not know yet, and locks of theirs may be others' by now.
        let log = Arc::downgrade(&meta);
        self.admission.follow_fences(move |incarnation| {
            let has = |meta: Arc<Meta>| meta.read_state(|s| s.processes.is_fenced(incarnation));
            incarnation != 0 && log.upgrade().is_some_and(has)
        });
        let identity = Identity::new(meta.term(), meta.incarnation());
        let identity = Arc::new(identity.with_tls(self.advertised.tls.clone()));
        if let Some(store) = meta.store_id() {
            self.admission.set_store(store);
            identity.set_store(store);
        }
        let _ = self.identity.set(Arc::clone(&identity));
        // One that has resigned may have given some, too, whose holders look for the leader only now.
        meta.give_locks_from(tokio::time::Instant::now() + PREDECESSOR);
        let stopped = has_stopped(before, &meta, &identity);
        // The log names it already: others are to know if the object store does not answer it.
        tokio::select! {
            biased;
            reason = self.lost(&meta) => {
                self.give_up().await;
                return Err(SqlError::new(SqlState::CANNOT_CONNECT_NOW, reason).into());
            }
            begun = self.begin(&meta, identity, stopped) => begun?,
        }
        Ok(true)
    }

    /// Serves as the leader once it may. `stopped` completes when the leader before answers no read any more.
    async fn begin(
        &self,
        meta: &Arc<Meta>,
        identity: Arc<Identity>,
        stopped: impl Future<Output = ()>,
    ) -> Result<(), StartError> {
        begin_to_lead(&self.config.process, meta, stopped).await;
        self.outwaited.cancel();
        let connect = Peers {
            identity,
            admission: Arc::clone(&self.admission),
            fenced: Arc::clone(&self.fenced),
        };
        meta.start_cluster(Arc::new(connect)).await?;
        set_root_password(&self.config.process.access, meta).await?;
        // Frontends find it in the log.
        let _ = own_secret(meta, false).await;
        let _ = self.slot.set(Arc::clone(meta) as Arc<dyn MetaControl>);
        let _ = self.operator.set(Arc::clone(meta) as Arc<dyn OperatorService>);
        self.admission.lead(meta.term());
        tell_start(&self.config.process, meta, self.began);
        Ok(())
    }

    /// Waits until no leader before this one, which has claimed the lead, can answer a read any more; `work` goes on with
    /// the claim until then. Whether that is so.
    async fn has_outwaited(&self, work: AbortOnDropHandle<()>) -> bool {
        let outwaited = tokio::time::timeout(PREDECESSOR, self.outwaited.cancelled());
        tokio::select! {
            biased;
            // The claim is in the log: after so long, too, it is so.
            _ = outwaited => true,
            _ = work => self.outwaited.is_cancelled(),
        }
    }

    /// Ends the process when another one leads, as the log says or whoever has called.
    async fn watch(&self, meta: &Meta) {
        let reason = self.lost(meta).await;
        self.give_up().await;
        self.ending.end(reason);
    }

    /// Returns when this process may lead no longer, and why. Until then others are told for how long the object store has
    /// not answered it.
    async fn lost(&self, meta: &Meta) -> String {
        let (began, term) = (Instant::now(), meta.term());
        let mut has_led_long = false;
        loop {
            if let Ok(reason) = tokio::time::timeout(LOOK, meta.deposed()).await {
                return reason.to_string();
            }
            let told = self.identity.get().map_or(0, |identity| identity.told_term());
            let met = self.admission.term().max(told);
            if met > term {
                return MetaError::Deposed { term: met }.to_string();
            }
            if let Some(skew) = meta.clock_skew() {
                return skew.to_string();
            }
            self.admission.set_log_wait(meta.store_wait());
            if !has_led_long && self.admission.leads() && began.elapsed() > LED_LONG {
                has_led_long = true;
                self.note(Leadership::has_led_long).await;
            }
        }
    }

    /// It answers as a leader no longer.
    async fn give_up(&self) {
        self.admission.resign();
        self.note(Leadership::was_deposed).await;
    }

    /// Writes something down in the data directory.
    async fn note(&self, what: fn(&mut Leadership)) {
        let data_dir = self.data_dir();
        let noted = tokio::task::spawn_blocking(move || what(&mut Leadership::read(&data_dir)));
        if let Err(error) = noted.await {
            warn!(%error, "nothing was written down about the lead");
        }
    }

    fn options(&self, record: u64) -> MetaOptions {
        let object_store = Arc::clone(&self.object_store);
        let (no_store, no_tail) = (Arc::default(), Arc::default());
        let (config, overrides) = (&self.config.process, &self.overrides);
        let options = meta_options(config, overrides, object_store, &no_store, &no_tail);
        let classes = Arc::<TableClasses>::default();
        let late = Arc::clone(&classes);
        MetaOptions {
            alone: false,
            only_after: Some(record),
            roles: vec![ProcessRole::Meta],
            address: self.advertised.address.clone(),
            table_class: Arc::new(move |job, table| classes.of(job, table)),
            table_reads: None,
            pinned: Arc::new(|_| false),
            // Who opens the jobs reads their slices.
            recovering: None,
            opened: Some(Box::new(move |meta| drop(late.meta.set(Arc::downgrade(meta))))),
            ..options
        }
    }

    fn metrics(self: &Arc<Seat>, requests: Option<Arc<Metered>>) -> Metrics {
        let (admission, leader) = (Arc::clone(&self.admission), Arc::clone(&self.admission));
        let (of_log, of_processes) = (Arc::clone(self), Arc::clone(self));
        let (fenced, health) = (Arc::clone(&self.fenced), Arc::clone(self));
        let leads = Arc::clone(&self.admission);
        Metrics::of("meta", move || admission.incarnation())
            .with(
                "millrace_leads",
                "gauge",
                "1 if this process leads, 0 if it stands by.",
                move || u64::from(leader.leads()),
            )
            .with("millrace_log_records_total", "counter", "Records of the log.", move || {
                of_log.leading.get().map_or(0, |meta| meta.record())
            })
            .with(
                "millrace_processes_fenced_total",
                "counter",
                "Processes that this one has fenced.",
                move || fenced.load(Ordering::Relaxed),
            )
            .with_store(requests, None)
            .with_health(move || health.hindrance.get())
            .with_text(move |text| {
                // One that is about to lead, or leads no longer, says nothing of jobs: sums would count them twice.
                if leads.leads()
                    && let Some(meta) = of_processes.leading.get()
                {
                    write_behind(meta, text);
                    write_jobs(meta, text);
                }
            })
    }
}

/// Tells the leader that was followed that this process leads now. What is returned completes when that one has answered
/// that it leads no longer, for which it is told whether or not anybody waits. It never does where another one may answer
/// reads as well, because the leader before had not led yet itself.
fn has_stopped(
    before: Option<Followed>,
    meta: &Meta,
    identity: &Arc<Identity>,
) -> impl Future<Output = ()> + Send + use<> {
    let is_only_one = meta.predecessors().len() == 1;
    let told = before.map(|before| {
        let identity = Arc::clone(identity);
        tokio::spawn(async move {
            let stopped = tell_deposed(&before.address, &identity).await;
            is_only_one && before.has_led && stopped == Some(before.incarnation)
        })
    });
    async move {
        let stopped = match told {
            Some(told) => told.await.unwrap_or(false),
            None => false,
        };
        if !stopped {
            std::future::pending().await
        }
    }
}

/// The log and the jobs, for Prometheus.
fn write_jobs(meta: &Meta, text: &mut String) {
    let mut out = Exposition::new(text);
    http::metrics::log(&mut out, meta);
    http::metrics::placement(&mut out, meta);
    let catalog = meta.catalog();
    let name = |job: &JobRow| {
        let relation = catalog.relation(RelationId(job.relation));
        relation.map_or_else(|| job.relation.to_string(), |r| format!("{}.{}", r.schema, r.name))
    };
    let jobs: Vec<JobRow> = meta.told_jobs().into_iter().map(job_row).collect();
    let names: Vec<String> = jobs.iter().map(name).collect();
    http::metrics::jobs(&mut out, &names, &jobs);
    let failed = |job: &JobRow| {
        let version = meta.version(RelationId(job.relation));
        let kinds = version.map(|version| ErrorSink::load(&version.counters).kinds());
        kinds.iter().flatten().map(|kind| kind.count).sum::<u64>()
    };
    http::metrics::expression_errors(&mut out, names.iter().zip(jobs.iter().map(failed)));
}

/// How far each process is behind the log, for Prometheus.
fn write_behind(meta: &Meta, text: &mut String) {
    let name = "millrace_process_records_behind";
    // Writing to a String does not fail.
    let _ = writeln!(
        text,
        "# HELP {name} Records of the log that the process has not applied yet.\n# TYPE {name} gauge"
    );
    let last = meta.record();
    for ProcessStatus { incarnation, process, applied, .. } in meta.processes() {
        let role = process.registration.roles().next().unwrap_or_default();
        let role = format!("{role:?}").to_lowercase();
        let behind = last.saturating_sub(applied);
        let _ = writeln!(text, "{name}{{incarnation=\"{incarnation}\",role=\"{role}\"}} {behind}");
    }
}

#[cfg(test)]
mod tests;
