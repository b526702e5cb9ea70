//! `millrace ctl`: what an operator sees of a cluster, and how he steers it. Everything is asked of the leader, but for
//! `restore`, which reads and writes object stores.

mod asking;
mod backup;
mod collection;
mod connection;
mod listing;
mod names;
mod patience;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::{Args, Subcommand};
use millrace_common::encoding::datetime::write_timestamp;
use millrace_common::{EnvHandle, RelationId};
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::ProcessReport;
use millrace_rpc::operator::{
    ClusterOverview, JobOverview, LevelOverview, OperatorService, PlacedJobs, VersionOverview,
    WorkerOverview,
};
use millrace_rpc::remote::RemoteOperator;
use millrace_rpc::version::StatementId;
use serde_json::{Value, json};

use self::asking::Answered;
use self::backup::{BackupCommand, Restore};
use self::connection::Connection;
use self::listing::{Listing, plain};
use self::names::{full_name, job_of, worker_of};
use crate::standalone::described;

/// A process that has told nothing for so long may be about to be fenced.
const SILENT: Duration = Duration::from_secs(3);

/// Flags of `millrace ctl`.
#[derive(Args, Debug)]
pub struct CtlOptions {
    /// Where the meta processes listen, of which one leads
    #[arg(
        long,
        env = "MILLRACE_META",
        value_name = "HOST:PORT,...",
        value_delimiter = ',',
        global = true
    )]
    meta: Vec<String>,

    /// Certificate chain (PEM) with which this program proves to the meta processes that it may steer them
    #[arg(long, env = "MILLRACE_RPC_TLS_CERT", value_name = "FILE", global = true)]
    rpc_tls_cert: Option<PathBuf>,

    /// Private key (PEM) of --rpc-tls-cert
    #[arg(long, env = "MILLRACE_RPC_TLS_KEY", value_name = "FILE", global = true)]
    rpc_tls_key: Option<PathBuf>,

    /// Certificates (PEM) of the CA that the meta processes are checked by
    #[arg(long, env = "MILLRACE_RPC_TLS_CA", value_name = "FILE", global = true)]
    rpc_tls_ca: Option<PathBuf>,

    /// How long the command may take, as 30s or 10min; 0: as long as it takes [default: 1min; of restore: 0]
    #[arg(
        long,
        env = "MILLRACE_CTL_TIMEOUT",
        value_name = "DURATION",
        value_parser = patience::limit,
        global = true
    )]
    timeout: Option<Duration>,

    /// Prints JSON: an array of objects, or one object
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    command: CtlCommand,
}

#[derive(Subcommand, Debug)]
enum CtlCommand {
    #[command(flatten)]
    Leader(LeaderCommand),
    /// Copies a backup into an empty directory or prefix, for a server or a cluster to be started on
    ///
    /// It needs the object stores alone, not --meta; the cluster may go on meanwhile. If it is cut off, run it again.
    Restore(Restore),
}

/// What the leader is asked for.
#[derive(Subcommand, Debug)]
enum LeaderCommand {
    /// Shows the object store's id, and where its log is
    Store,
    /// Shows the processes of the cluster
    Workers,
    /// Shows the jobs: one for each table, materialized view, index and sink
    Jobs,
    /// Shows which job runs on which compute process
    Placement,
    /// Has a job run on another compute process
    ///
    /// It starts there from what is committed. All tables, and sinks into tables, move together. They stay there, whatever
    /// the loads are, until that process is lost or drained.
    Move {
        /// Its name, as public.orders, or its id
        job: String,
        /// The process: its incarnation or its address
        #[arg(required_unless_present = "undo")]
        worker: Option<String>,
        /// It need not stay where it was moved: it is placed by its load again
        #[arg(long, conflicts_with = "worker")]
        undo: bool,
    },
    /// Takes the jobs of a compute process away, and gives it no others
    Drain {
        /// The process: its incarnation or its address
        worker: String,
        /// It takes jobs again
        #[arg(long)]
        undo: bool,
    },
    /// Shows what the newest version of each job consists of in the object store
    Versions,
    /// Shows what garbage collection has before it, and for whom objects are kept
    Collection {
        /// Runs it first
        #[arg(long)]
        run: bool,
    },
    /// Makes, shows and releases backups, which stay in the object store
    #[command(subcommand)]
    Backup(BackupCommand),
}

/// What a command prints.
pub struct Told {
    pub text: String,
    /// What went wrong all the same, in sentences: the command has not done all that it should.
    pub trouble: Option<String>,
}

impl From<String> for Told {
    fn from(text: String) -> Told {
        Told { text, trouble: None }
    }
}

/// Runs one command; what it prints. An error is a sentence.
pub async fn run(options: CtlOptions) -> Result<Told, String> {
    let limit = patience::of(&options.command, options.timeout);
    let asked = AtomicBool::new(false);
    let late = |limit| patience::late(&options.command, limit, asked.load(Ordering::Relaxed));
    patience::within(limit, perform(&options, &asked), late).await
}

/// `asked`: set when the leader has been found, and is asked for what the command changes or shows.
async fn perform(options: &CtlOptions, asked: &AtomicBool) -> Result<Told, String> {
    let command = match &options.command {
        CtlCommand::Restore(restore) => {
            return backup::restore(restore, options.json).await.map(Told::from);
        }
        CtlCommand::Leader(command) => command,
    };
    let connection = Connection::open(options).await?;
    asked.store(true, Ordering::Relaxed);
    let leader = &connection;
    let listing = match command {
        LeaderCommand::Store => store(&overview(leader).await?),
        LeaderCommand::Workers => {
            let overview = overview(leader).await?;
            workers(&overview, &leader.others())
        }
        LeaderCommand::Jobs => jobs(&overview(leader).await?),
        LeaderCommand::Placement => placement(&overview(leader).await?),
        LeaderCommand::Versions => {
            let versions = show(leader, |leader| async move { leader.versions().await }).await?;
            versions_listing(&versions.versions)
        }
        LeaderCommand::Collection { run } => {
            let (overview, run) = (overview(leader).await?, *run);
            // One round more than was asked for does no harm.
            let report = show(leader, |leader| async move { leader.collection(run).await }).await?;
            let text = collection::shown(&overview, &report, options.json);
            let trouble = (run && !report.troubles.is_empty()).then(|| report.troubles.join("\n"));
            return Ok(Told { text, trouble });
        }
        LeaderCommand::Backup(backup) => {
            let told = backup::run(leader, command, backup, options.json).await;
            return told.map(Told::from);
        }
        LeaderCommand::Move { job, undo: true, .. } => {
            return undo_move(leader, command, job, options.json).await.map(Told::from);
        }
        LeaderCommand::Move { job, worker, .. } => {
            let before = overview(leader).await?;
            let worker = worker.as_deref().unwrap_or_default();
            let (job, worker) = (job_of(&before, job)?, worker_of(&before, worker)?);
            let (id, to) = (RelationId(job.id), incarnation(worker));
            let moving = |leader: RemoteOperator, by: Option<StatementId>| async move {
                leader.move_job(id, to, by).await
            };
            let placed = change(leader, command, moving).await?;
            let placed = known(leader, &before, to, placed).await;
            return Ok(moved(&before, job, worker, &placed, options.json).into());
        }
        LeaderCommand::Drain { worker, undo } => {
            let before = overview(leader).await?;
            let worker = worker_of(&before, worker)?;
            let (own, undo) = (incarnation(worker), *undo);
            let draining = |leader: RemoteOperator, by: Option<StatementId>| async move {
                leader.drain(own, undo, by).await
            };
            let placed = change(leader, command, draining).await?;
            let placed = known(leader, &before, own, placed).await;
            return Ok(drained(&before, worker, undo, &placed, options.json).into());
        }
    };
    Ok(if options.json { listing.json() } else { listing.table() }.into())
}

/// Asks the leader, whoever that is meanwhile, something that may be done several times.
async fn show<T, C>(leader: &Connection, call: impl Fn(RemoteOperator) -> C) -> Result<T, String>
where
    C: Future<Output = Result<T, CallError>>,
{
    let answered = leader.ask(call).await.map(|answered| answered.answer);
    answered.map_err(|failure| described(&CallError::from(failure).into()))
}

async fn overview(leader: &Connection) -> Result<ClusterOverview, String> {
    show(leader, |leader| async move { leader.overview().await }).await
}

/// Has the leader change something once, by an id, whoever leads meanwhile.
async fn change<T, C>(
    leader: &Connection,
    command: &LeaderCommand,
    call: impl Fn(RemoteOperator, Option<StatementId>) -> C,
) -> Result<Answered<T>, String>
where
    C: Future<Output = Result<T, CallError>>,
{
    let env = EnvHandle::default();
    let id = Some(StatementId { frontend: env.random(), number: env.random() });
    let answered = leader.ask(|leader| call(leader, id)).await;
    answered.map_err(|failure| patience::failed(command, failure))
}

/// The jobs that have been placed anew. Those that an attempt without an answer has placed are not in the answer of the next
/// one: they are those that have come to the process, or have left it.
async fn known(
    leader: &Connection,
    before: &ClusterOverview,
    worker: u64,
    placed: Answered<PlacedJobs>,
) -> PlacedJobs {
    let Answered { answer, is_repeat } = placed;
    if !is_repeat {
        return answer;
    }
    // It has been done, whether that can be shown or not.
    match overview(leader).await {
        Ok(after) => PlacedJobs { jobs: changed(before, &after, worker), ..answer },
        Err(_) => answer,
    }
}

/// The jobs that run on a process and did not, or did and do not.
fn changed(before: &ClusterOverview, after: &ClusterOverview, worker: u64) -> Vec<u32> {
    let has_changed = |job: &&JobOverview| {
        let then = before.jobs.iter().find(|other| other.id == job.id).map(|then| then.worker);
        then.is_some_and(|then| (then == worker) != (job.worker == worker))
    };
    after.jobs.iter().filter(has_changed).map(|job| job.id).collect()
}

fn report(worker: &WorkerOverview) -> ProcessReport {
    worker.report.unwrap_or_default()
}

fn incarnation(worker: &WorkerOverview) -> u64 {
    report(worker).incarnation
}

fn store(overview: &ClusterOverview) -> Listing {
    let mut listing = Listing::new(&["store_id", "term", "record", "leader"]);
    let ClusterOverview { store_id, term, record, leader, .. } = overview;
    listing.add([json!(store_id), json!(term), json!(record), json!(leader)]);
    listing
}

/// `others`: the processes that were asked for the leader and do not lead, by address and incarnation.
fn workers(overview: &ClusterOverview, others: &[(String, u64)]) -> Listing {
    let columns = [
        "worker",
        "role",
        "address",
        "state",
        "since",
        "heartbeat_ms",
        "records_behind",
        "jobs",
        "load",
    ];
    let mut listing = Listing::new(&columns);
    for worker in &overview.workers {
        let ProcessReport { incarnation, applied, heartbeat_ms, load } = report(worker);
        let state = match heartbeat_ms.map(Duration::from_millis) {
            _ if incarnation == overview.leader => "leads",
            Some(age) if age > SILENT => "silent",
            _ if worker.drained => "drained",
            _ => "live",
        };
        let jobs = overview.jobs.iter().filter(|job| job.worker == incarnation).count();
        listing.add([
            json!(incarnation),
            json!(worker.roles.join(", ")),
            json!(worker.address),
            json!(state),
            json!(instant(worker.since_ms)),
            json!(heartbeat_ms),
            json!(overview.record.saturating_sub(applied)),
            json!(jobs),
            json!(load.map(cores)),
        ]);
    }
    // Meta processes are not in the log until they lead.
    let is_listed = |(address, own): &&(String, u64)| {
        let has_own = |w: &WorkerOverview| *own != 0 && incarnation(w) == *own;
        overview.workers.iter().any(|w| w.address == *address || has_own(w))
    };
    for (address, _) in others.iter().filter(|other| !is_listed(other)) {
        let [own, since, heartbeat, behind, jobs, load] = std::array::from_fn(|_| Value::Null);
        let (role, state) = (json!("meta"), json!("stands by"));
        listing.add([own, role, json!(address), state, since, heartbeat, behind, jobs, load]);
    }
    listing
}

fn jobs(overview: &ClusterOverview) -> Listing {
    let columns = [
        "id",
        "name",
        "kind",
        "worker",
        "address",
        "state",
        "generation",
        "parallelism",
        "lag_ms",
        "load",
        "reason",
    ];
    let mut listing = Listing::new(&columns);
    for job in &overview.jobs {
        let worker = placed_on(overview, job);
        listing.add([
            json!(job.id),
            json!(full_name(&job.schema, &job.name)),
            json!(job.kind),
            json!(worker.map(incarnation)),
            json!(worker.map(|w| &w.address)),
            json!(job.state),
            json!(job.generation),
            // As many as the process says.
            json!(Some(job.parallelism).filter(|tasks| *tasks > 0)),
            json!(job.lag_ms),
            json!(job.load.map(cores)),
            json!(job.reason),
        ]);
    }
    listing
}

/// Of thousandths.
fn cores(load: u32) -> f64 {
    f64::from(load) / 1e3
}

fn placed_on<'a>(overview: &'a ClusterOverview, job: &JobOverview) -> Option<&'a WorkerOverview> {
    overview.workers.iter().find(|w| job.worker != 0 && incarnation(w) == job.worker)
}

/// By process; a compute process without jobs has a line, too, and jobs without a process come last.
fn placement(overview: &ClusterOverview) -> Listing {
    let columns = ["worker", "address", "id", "name", "kind", "group", "placed_by"];
    let mut listing = Listing::new(&columns);
    let job_cells = |job: &JobOverview| {
        let name = full_name(&job.schema, &job.name);
        let group = job.writes_tables.then_some("tables");
        let by = job.by_operator.then_some("operator");
        [json!(job.id), json!(name), json!(job.kind), json!(group), json!(by)]
    };
    let computes = overview.workers.iter().filter(|w| w.roles.iter().any(|r| r == "compute"));
    for worker in computes {
        let own = incarnation(worker);
        let mut jobs = overview.jobs.iter().filter(|job| job.worker == own).peekable();
        let is_idle = jobs.peek().is_none();
        let nothing = is_idle.then(|| std::array::from_fn(|_| Value::Null));
        for [id, name, kind, group, by] in jobs.map(job_cells).chain(nothing) {
            listing.add([json!(own), json!(worker.address), id, name, kind, group, by]);
        }
    }
    for job in overview.jobs.iter().filter(|job| placed_on(overview, job).is_none()) {
        let [id, name, kind, group, by] = job_cells(job);
        listing.add([Value::Null, Value::Null, id, name, kind, group, by]);
    }
    listing
}

/// A line for each level of a job; one that has no runs has a line without a level.
fn versions_listing(versions: &[VersionOverview]) -> Listing {
    let columns = [
        "id",
        "name",
        "epoch",
        "commits",
        "slices",
        "slice_bytes",
        "level",
        "runs",
        "bytes",
        "rows",
    ];
    let mut listing = Listing::new(&columns);
    for version in versions {
        let levels = version.levels.iter().map(Some);
        let nothing = version.levels.is_empty().then_some(None);
        for level in levels.chain(nothing) {
            let of = |value: fn(&LevelOverview) -> u64| level.map_or(0, value);
            listing.add([
                json!(version.job),
                json!(full_name(&version.schema, &version.name)),
                json!(version.epoch),
                json!(version.commits),
                json!(version.slices),
                json!(version.slice_bytes),
                json!(level.map(|l| l.level)),
                json!(of(|l| l.runs)),
                json!(of(|l| l.bytes)),
                json!(of(|l| l.rows)),
            ]);
        }
    }
    listing
}

/// Jobs by their ids, for a person and for a program.
fn names_of(overview: &ClusterOverview, ids: &[u32]) -> (Vec<String>, Vec<Value>) {
    let jobs = ids.iter().filter_map(|id| overview.jobs.iter().find(|job| job.id == *id));
    jobs.map(|job| {
        let name = full_name(&job.schema, &job.name);
        (plain(&name), json!({"id": job.id, "name": name}))
    })
    .unzip()
}

fn moved(
    overview: &ClusterOverview,
    job: &JobOverview,
    worker: &WorkerOverview,
    placed: &PlacedJobs,
    as_json: bool,
) -> String {
    let (names, values) = names_of(overview, &placed.jobs);
    let (own, address) = (incarnation(worker), &worker.address);
    if as_json {
        return json!({"worker": own, "record": placed.record, "moved": values}).to_string();
    }
    match names.is_empty() {
        true => {
            let name = plain(&full_name(&job.schema, &job.name));
            format!("{name} runs on process {own} ({address}) already.")
        }
        false => format!("Moved to process {own} ({address}): {}.", names.join(", ")),
    }
}

/// Has a job placed by its load again that an operator has moved.
async fn undo_move(
    leader: &Connection,
    command: &LeaderCommand,
    job: &str,
    as_json: bool,
) -> Result<String, String> {
    let overview = overview(leader).await?;
    let job = job_of(&overview, job)?;
    let (id, name) = (RelationId(job.id), full_name(&job.schema, &job.name));
    let undoing = |leader: RemoteOperator, by: Option<StatementId>| async move {
        leader.move_job(id, 0, by).await
    };
    let PlacedJobs { record, .. } = change(leader, command, undoing).await?.answer;
    Ok(match as_json {
        true => json!({"id": job.id, "name": name, "record": record}).to_string(),
        false => format!("{} is placed by its load again. It has not moved.", plain(&name)),
    })
}

fn drained(
    overview: &ClusterOverview,
    worker: &WorkerOverview,
    undo: bool,
    placed: &PlacedJobs,
    as_json: bool,
) -> String {
    let (names, values) = names_of(overview, &placed.jobs);
    let (own, address) = (incarnation(worker), &worker.address);
    if as_json {
        let drained = !undo;
        let told =
            json!({"worker": own, "drained": drained, "record": placed.record, "moved": values});
        return told.to_string();
    }
    let what = if undo { "takes jobs again" } else { "is drained: it is given no jobs" };
    let jobs = match names.is_empty() {
        true => "No job has moved.".to_owned(),
        false => format!("Moved: {}.", names.join(", ")),
    };
    format!("Process {own} ({address}) {what}. {jobs}")
}

/// Milliseconds since 1970 as a time of UTC.
fn instant(ms: u64) -> Option<String> {
    let us = i64::try_from(ms).ok()?.checked_mul(1_000)?;
    let mut text = String::new();
    write_timestamp(&mut text, us, false).ok()?;
    Some(text.replace(' ', "T") + "Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_attempt_without_an_answer_has_moved_is_told_by_where_jobs_run() {
        let job = |(id, worker): &(u32, u64)| JobOverview {
            id: *id,
            worker: *worker,
            ..JobOverview::default()
        };
        let overview = |placed: &[(u32, u64)]| ClusterOverview {
            jobs: placed.iter().map(job).collect(),
            ..ClusterOverview::default()
        };
        let before = overview(&[(1, 7), (2, 8), (3, 7), (4, 9), (5, 7)]);
        // The fourth was moved by somebody else, the fifth was dropped, and the sixth is new.
        let after = overview(&[(1, 8), (2, 7), (3, 7), (4, 8), (6, 7)]);
        assert_eq!(changed(&before, &after, 7), [1, 2]);
    }

    #[test]
    fn names_that_users_chose_say_nothing_to_the_terminal() {
        let job = JobOverview {
            id: 1,
            schema: "public".to_owned(),
            name: "a\u{1b}[2J".to_owned(),
            ..JobOverview::default()
        };
        let overview = ClusterOverview { jobs: vec![job], ..ClusterOverview::default() };
        let (job, worker) = (&overview.jobs[0], WorkerOverview::default());
        for jobs in [vec![], vec![1]] {
            let placed = PlacedJobs { record: 9, jobs };
            let told = moved(&overview, job, &worker, &placed, false);
            assert!(told.contains("public.a [2J"), "{told:?}");
            let told: Value =
                serde_json::from_str(&moved(&overview, job, &worker, &placed, true)).unwrap();
            let moved = told["moved"].as_array().unwrap();
            assert!(moved.iter().all(|job| job["name"] == "public.a\u{1b}[2J"), "{told}");
        }
    }

    /// Any process knows where the leader is.
    #[test]
    fn only_who_is_not_registered_stands_by() {
        let worker = |incarnation, address: &str| WorkerOverview {
            report: Some(ProcessReport { incarnation, ..ProcessReport::default() }),
            address: address.to_owned(),
            ..WorkerOverview::default()
        };
        let overview = ClusterOverview {
            leader: 7,
            workers: vec![worker(7, "m:1"), worker(8, "c:1")],
            ..ClusterOverview::default()
        };
        let others = [("c:1", 8), ("localhost:1", 8), ("m:2", 0)];
        let others = others.map(|(address, own)| (address.to_owned(), own));
        let Value::Array(rows) = workers(&overview, &others).objects() else { panic!("rows") };
        let told = |row: &Value| format!("{} {}", row["address"], row["state"]);
        let told: Vec<String> = rows.iter().map(told).collect();
        let expected = ["\"m:1\" \"leads\"", "\"c:1\" \"live\"", "\"m:2\" \"stands by\""];
        assert_eq!(told, expected);
    }
}
