//! One case: a schema, views over it, a history, and a mode to run them in.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::SinkExt;
use millrace::Loopback;
use millrace_sqllogictest::suite;
use tokio_postgres::{Client, SimpleQueryMessage};

use crate::coverage::Reads;
use crate::generate::{self, Query, Table};
use crate::history::{self, Action, History};
use crate::node::{Node, NodeOptions, loopback_of};
use crate::outside::Outside;
use crate::postgres;
use crate::rng::Rng;

/// What the system is put through while the history runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Plain,
    /// State caches and memtables of a few kilobytes: everything is evicted and fetched again.
    TinyCaches,
    /// A store with random latency: fetches complete in random order.
    SlowStore,
    /// Tiny caches over a slow store, synchronous state access.
    Synchronous,
    /// The process dies and recovers, several times; of every second seed over a store with random latency, with reads and
    /// hints under way.
    Crash,
    /// Several sessions write at once.
    Concurrent,
    /// The node restarts after every third statement and no state stays in caches: all of it is read back from the
    /// store. The shapes of views take turns, so that some cases in a row have every one.
    Restart,
}

impl Mode {
    pub const ALL: [Mode; 7] = [
        Mode::Plain,
        Mode::TinyCaches,
        Mode::SlowStore,
        Mode::Synchronous,
        Mode::Crash,
        Mode::Concurrent,
        Mode::Restart,
    ];

    /// Modes that take turns by seed: restarts have cases of their own.
    pub const OF_SEEDS: u64 = Mode::ALL.len() as u64 - 1;

    pub fn of_seed(seed: u64) -> Mode {
        Mode::ALL[(seed % Mode::OF_SEEDS) as usize]
    }

    /// `crashes`: after how many steps of a hundred a node that crashes does.
    pub fn restarts_after(self, step: usize, rng: &mut Rng, crashes: usize) -> bool {
        match self {
            Mode::Crash => rng.chance(crashes),
            Mode::Restart => step % 3 == 1,
            _ => false,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Mode::Plain => "plain",
            Mode::TinyCaches => "tiny caches",
            Mode::SlowStore => "slow store",
            Mode::Synchronous => "synchronous",
            Mode::Crash => "crash",
            Mode::Concurrent => "concurrent",
            Mode::Restart => "restart",
        }
    }
}

const STATEMENTS: usize = 14;
/// Views of further shapes in a case.
const FURTHER: usize = 2;
/// How long a case may take; and one with a bug, which may well hang.
const LIMIT: Duration = Duration::from_secs(900);
const PLANTED_LIMIT: Duration = Duration::from_secs(240);

pub struct Case {
    seed: u64,
    mode: Mode,
    tables: Vec<Table>,
    queries: Vec<Query>,
    history: Vec<Action>,
    /// The first table is a source.
    source: bool,
    /// Views that have sinks, from the first.
    sinks: usize,
}

/// Sinks that are paused and resumed while the history runs: they take in what they have missed.
struct Pauses {
    /// Drawn apart: what a seed writes stays the same.
    rng: Rng,
    paused: Vec<bool>,
}

impl Pauses {
    fn new(seed: u64, sinks: usize) -> Pauses {
        Pauses { rng: Rng::new(seed ^ 0x9a05e), paused: vec![false; sinks] }
    }

    async fn some(&mut self, client: &Client) -> Result<(), String> {
        for (i, paused) in self.paused.iter_mut().enumerate() {
            if self.rng.chance(30) {
                *paused = !*paused;
                alter(client, i, *paused).await?;
            }
        }
        Ok(())
    }

    async fn end(self, client: &Client) -> Result<(), String> {
        for (i, _) in self.paused.iter().enumerate().filter(|(_, paused)| **paused) {
            alter(client, i, false).await?;
        }
        Ok(())
    }
}

/// Rebuilds a view now and then; a node that dies soon afterwards may be in the middle of it.
async fn rebuild(client: &Client, rng: &mut Rng, views: usize) -> Result<(), String> {
    if !rng.chance(25) {
        return Ok(());
    }
    let background = if rng.chance(50) { "on" } else { "off" };
    let view = rng.below(views);
    execute(client, &format!("SET background_ddl = {background}")).await?;
    execute(client, &format!("ALTER MATERIALIZED VIEW v{view} REBUILD")).await
}

/// Changes now and then how many tasks a job has, while it is at work.
async fn rescale(
    client: &Client,
    rng: &mut Rng,
    tables: &[Table],
    views: usize,
) -> Result<(), String> {
    if !rng.chance(20) {
        return Ok(());
    }
    let n = rng.below(tables.len() + views);
    let job = match tables.get(n) {
        Some(table) => format!("TABLE {}", table.name),
        None => format!("MATERIALIZED VIEW v{}", n - tables.len()),
    };
    execute(client, &format!("ALTER {job} SET PARALLELISM {}", 1 + rng.below(4))).await
}

/// Changes now and then whether small reads go to the process that has the rows: of a node whose roles call each other
/// through bytes.
async fn switch_reads(client: &Client, rng: &mut Rng, loopback: Loopback) -> Result<(), String> {
    if loopback != Loopback::Encode || !rng.chance(10) {
        return Ok(());
    }
    let setting = if rng.chance(50) { "on" } else { "off" };
    execute(client, &format!("ALTER SYSTEM SET read_from_owner = '{setting}'")).await
}

async fn alter(client: &Client, sink: usize, pause: bool) -> Result<(), String> {
    let change = if pause { "PAUSE" } else { "RESUME" };
    execute(client, &format!("ALTER SINK k{sink} {change}")).await
}

pub struct Report {
    pub views: usize,
    pub tags: Vec<&'static str>,
    /// Keys whose state was read from below the caches, by operator.
    pub reads: Reads,
    /// How often operators settled changes before a barrier.
    pub settled: Reads,
}

impl Case {
    pub fn generate(seed: u64, mode: Mode, views: usize) -> Case {
        let mut rng = Rng::new(seed);
        let source = seed % 5 == 2;
        let sinks = if seed % 5 == 4 { 3 } else { 0 };
        let mut tables = match source {
            true => generate::tables_with_source(&mut rng),
            false => generate::tables(&mut rng),
        };
        if mode == Mode::Restart {
            generate::give_keys(&mut tables);
        }
        let query = |view: usize| match mode {
            Mode::Restart => generate::nth(&mut rng, &tables, seed as usize * views + view),
            _ => generate::query(&mut rng, &tables),
        };
        let mut queries: Vec<Query> = (0..views).map(query).collect();
        let mut further = Rng::new(seed ^ 0xf027);
        if mode != Mode::Restart {
            queries.extend((0..FURTHER).map(|_| generate::further_query(&mut further, &tables)));
        }
        let mut history = History::new(&tables, further);
        let history = (0..STATEMENTS).map(|_| history.statement(&mut rng)).collect();
        // How they are sent is drawn apart: what a seed writes stays the same.
        let outside = source.then(|| tables[0].name.as_str());
        let history = history::actions(&mut Rng::new(seed ^ 0xb10c), history, outside);
        Case { seed, mode, tables, queries, history, source, sinks }
    }

    /// Runs it; the error says what differed. `bug`: a planted bug to run with.
    pub fn run(&self, bug: Option<&'static str>) -> Result<Report, String> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(|e| e.to_string())?;
        millrace_common::fault_injection::plant(bug);
        let outcome = runtime.block_on(async {
            // A hang is a failure with a name, not a CI that never ends.
            let limit = if bug.is_some() { PLANTED_LIMIT } else { LIMIT };
            tokio::time::timeout(limit, self.run_async())
                .await
                .unwrap_or_else(|_| Err(format!("the case did not finish in {limit:?}")))
        });
        millrace_common::fault_injection::plant(None);
        runtime.shutdown_background();
        outcome
    }

    async fn run_async(&self) -> Result<Report, String> {
        let mut rng = Rng::new(self.seed ^ 0xfeed);
        let mut node = Node::start(NodeOptions::for_mode(self.mode, self.seed)).await?;
        let mut client = node.connect().await?;
        let mut outside = Outside::new()?;
        let (mut reads, mut settled) = (Reads::default(), Reads::default());
        for (i, table) in self.tables.iter().enumerate() {
            match i == 0 && self.source {
                true => outside.create_source(&client, table).await?,
                false => execute(&client, &table.ddl()).await?,
            }
        }
        // Half of the views see the history from the start, the others backfill over part of it.
        let early = self.queries.len() / 2;
        for i in 0..early {
            self.create(&client, i).await?;
        }
        for i in 0..self.sinks {
            outside.create_sink(&client, i).await?;
        }
        let mut pauses = Pauses::new(self.seed, self.sinks);
        // Drawn apart: what a seed writes stays the same.
        let mut rebuilds = Rng::new(self.seed ^ 0x4eb1d);
        let mut rescales = Rng::new(self.seed ^ 0x5ca1e);
        let mut switches = Rng::new(self.seed ^ 0x0e4e5);
        let tables = if self.source { &self.tables[1..] } else { &self.tables[..] };
        for (step, action) in self.history.iter().enumerate() {
            pauses.some(&client).await?;
            if step == self.history.len() / 2 {
                execute(&client, "SET background_ddl = off").await?;
                for i in early..self.queries.len() {
                    self.create(&client, i).await?;
                }
            }
            match action {
                Action::Statement(written) if self.enters_source(&written.sql) => {
                    outside.write(&written.sql)?;
                }
                action => self.write(&node, &client, action).await?,
            }
            let known = if step >= self.history.len() / 2 { self.queries.len() } else { early };
            rebuild(&client, &mut rebuilds, known).await?;
            rescale(&client, &mut rescales, tables, known).await?;
            switch_reads(&client, &mut switches, loopback_of(self.seed)).await?;
            if self.mode.restarts_after(step, &mut rng, 25) {
                node.add_reads(&mut reads, &mut settled);
                node = node.crash_and_restart().await?;
                client = node.connect().await?;
            }
            execute(&client, "WAIT").await?;
            let all = step + 1 == self.history.len();
            for i in 0..known {
                if all || rng.chance(40) {
                    self.check(&client, i)
                        .await
                        .map_err(|e| format!("after step {step} ({action:?}): {e}"))?;
                }
            }
        }
        if self.source {
            outside.arrived(&client).await?;
            for i in 0..self.queries.len() {
                self.check(&client, i).await?;
            }
        }
        pauses.end(&client).await?;
        if self.sinks > 0 {
            suite::flush(&client).await?;
        }
        for i in 0..self.sinks {
            outside.check_sink(&client, i).await?;
        }
        if self.mode != Mode::Concurrent {
            self.judge(&client).await?;
        }
        node.add_reads(&mut reads, &mut settled);
        node.stop().await;
        let tags = self.queries.iter().flat_map(|q| q.tags.clone()).collect();
        Ok(Report { views: self.queries.len(), tags, reads, settled })
    }

    fn enters_source(&self, statement: &str) -> bool {
        self.source && statement.starts_with(&format!("INSERT INTO {} ", self.tables[0].name))
    }

    async fn create(&self, client: &Client, i: usize) -> Result<(), String> {
        let sql = &self.queries[i].sql;
        execute(client, &format!("CREATE MATERIALIZED VIEW v{i} AS {sql}")).await
    }

    /// One step; in concurrent mode together with two statements from other sessions, so that they
    /// conflict and share epochs.
    async fn write(&self, node: &Node, client: &Client, action: &Action) -> Result<(), String> {
        if self.mode != Mode::Concurrent {
            return perform(client, action).await;
        }
        let (second, third) = (node.connect().await?, node.connect().await?);
        let statement = match action {
            Action::Statement(written) => written.sql.as_str(),
            _ => "SELECT 1",
        };
        let bump = match self.tables.iter().find(|t| !t.append_only) {
            Some(table) => format!("UPDATE {} SET b = b + 1 WHERE b < 5", table.name),
            None => statement.to_string(),
        };
        // Two copies of a row that an update can tell apart would have the same place in an order.
        let copies = self.tables.iter().any(|t| {
            let insert = format!("INSERT INTO {} ", t.name);
            !t.keyed && !t.append_only && statement.starts_with(&insert)
        });
        let again = if copies { bump.as_str() } else { statement };
        let (a, b, c) =
            tokio::join!(perform(client, action), execute(&second, &bump), execute(&third, again));
        a.and(b).and(c)
    }

    /// View and query in one statement, hence at one epoch.
    async fn check(&self, client: &Client, i: usize) -> Result<(), String> {
        let query = &self.queries[i].sql;
        let sql = format!(
            "SELECT 0 AS side__, x.* FROM v{i} AS x UNION ALL SELECT 1 AS side__, y.* FROM ({query}) AS y"
        );
        let mut sides: [Content; 2] = Default::default();
        let read = match rows(client, &sql).await {
            Ok(read) => read,
            Err(e) => {
                let jobs = rows(client, "SHOW JOBS").await.unwrap_or_default();
                return Err(format!("{e}\n  jobs {jobs:?}"));
            }
        };
        for row in read {
            let side = usize::from(row[0].as_deref() == Some("1"));
            *sides[side].entry(row[1..].to_vec()).or_default() += 1;
        }
        let [view, batch] = sides;
        match differences(&view, &batch) {
            None => Ok(()),
            Some([extra, missing]) => {
                Err(format!("v{i} = {query}\n  view has {extra:?}\n  batch has {missing:?}"))
            }
        }
    }

    /// PostgreSQL's answers to the same queries over the same history.
    async fn judge(&self, client: &Client) -> Result<(), String> {
        let Some(judge) = postgres::Judge::connect().await? else { return Ok(()) };
        for table in &self.tables {
            judge.execute(&table.ddl().replace(" APPEND ONLY", "")).await?;
        }
        for action in &self.history {
            perform(&judge.client, action).await.map_err(|e| format!("PostgreSQL: {e}"))?;
        }
        for query in &self.queries {
            // PostgreSQL's sums of floats depend on the order of rows; ours are exact, and the views are
            // compared with batch all the same.
            let not_judged = ["sum(f)", "avg(f)", "sum(y.f)", "avg(y.f)"];
            // It does not have these as aggregates.
            let not_known =
                ["first_value(s O", "first_value(y.s O", "last_value(n O", "last_value(y.n O"];
            if not_judged.iter().chain(&not_known).any(|word| query.sql.contains(word)) {
                continue;
            }
            let mut ours = rows(client, &query.sql).await?;
            let judged = query.judged.as_ref().unwrap_or(&query.sql);
            let mut theirs = judge.rows(judged).await?;
            for table in [&mut ours, &mut theirs] {
                table.iter_mut().flatten().for_each(postgres::normalise);
                table.sort();
            }
            if ours != theirs {
                return Err(format!(
                    "batch differs from PostgreSQL: {}\n  asked {judged}\n  ours {ours:?}\n  PostgreSQL {theirs:?}",
                    query.sql
                ));
            }
        }
        Ok(())
    }
}

/// Times that a transaction is tried again because others changed its rows.
const ATTEMPTS: usize = 50;

async fn perform(client: &Client, action: &Action) -> Result<(), String> {
    match action {
        Action::Statement(written) => execute(client, &written.sql).await,
        Action::Copy(copied) => {
            let sql = format!("COPY {} FROM STDIN", copied.table);
            let failed = |e: tokio_postgres::Error| format!("{} in: {sql}", describe(&e));
            let sink = client.copy_in(&sql).await.map_err(failed)?;
            futures::pin_mut!(sink);
            sink.send(bytes::Bytes::from(copied.lines.clone())).await.map_err(failed)?;
            sink.finish().await.map(|_| ()).map_err(failed)
        }
        Action::Block { actions, savepoint, commit } => {
            let mut last = Ok(());
            for _ in 0..ATTEMPTS {
                last = block(client, actions, *savepoint, *commit).await;
                match &last {
                    Err(e) if e.contains("(40001)") || e.contains("(23505)") => {
                        execute(client, "ROLLBACK").await?;
                    }
                    _ => break,
                }
            }
            last
        }
    }
}

async fn block(
    client: &Client,
    actions: &[Action],
    savepoint: Option<usize>,
    commit: bool,
) -> Result<(), String> {
    execute(client, "BEGIN").await?;
    for (i, action) in actions.iter().enumerate() {
        if let Some(at) = savepoint {
            if i == at {
                execute(client, "SAVEPOINT s").await?;
            }
            if i == at + (actions.len() - at) / 2 {
                execute(client, "ROLLBACK TO SAVEPOINT s").await?;
            }
        }
        Box::pin(perform(client, action)).await?;
    }
    execute(client, if commit { "COMMIT" } else { "ROLLBACK" }).await
}

/// The values of a row as text, NULL as `None`.
pub type Row = Vec<Option<String>>;

/// How often each row is there.
pub type Content = BTreeMap<Row, i64>;

/// Some rows, with how often they are there, that only the one has, and only the other. `None`: they are the same.
pub fn differences<'a>(left: &'a Content, right: &'a Content) -> Option<[Vec<(&'a Row, i64)>; 2]> {
    let only = |a: &'a Content, b: &'a Content| -> Vec<(&'a Row, i64)> {
        let others = a.iter().filter(|(row, count)| b.get(*row) != Some(count));
        others.map(|(row, count)| (row, *count)).take(5).collect()
    };
    (left != right).then(|| [only(left, right), only(right, left)])
}

/// Some rows that only the one list has, and only the other. `None`: they have the same rows.
pub fn differing<'a>(left: &'a mut [Row], right: &'a mut [Row]) -> Option<[Vec<&'a Row>; 2]> {
    left.sort();
    right.sort();
    let (left, right) = (&*left, &*right);
    let only = |a: &'a [Row], b: &[Row]| a.iter().filter(|r| !b.contains(r)).take(5).collect();
    (left != right).then(|| [only(left, right), only(right, left)])
}

pub async fn execute(client: &Client, sql: &str) -> Result<(), String> {
    client.batch_execute(sql).await.map_err(|e| format!("{} in: {sql}", describe(&e)))
}

pub async fn rows(client: &Client, sql: &str) -> Result<Vec<Vec<Option<String>>>, String> {
    let messages =
        client.simple_query(sql).await.map_err(|e| format!("{} in: {sql}", describe(&e)))?;
    Ok(messages
        .iter()
        .filter_map(|m| match m {
            SimpleQueryMessage::Row(r) => {
                Some((0..r.len()).map(|i| r.get(i).map(str::to_owned)).collect())
            }
            _ => None,
        })
        .collect())
}

fn describe(e: &tokio_postgres::Error) -> String {
    e.as_db_error().map_or_else(
        || e.to_string(),
        |db| {
            let detail = db.detail().unwrap_or_default();
            format!("{} ({}) {detail}", db.message(), db.code().code())
        },
    )
}
