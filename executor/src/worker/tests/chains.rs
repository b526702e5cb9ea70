//! Chained hints in running jobs: each key comes out of the row that the key before it finds.

use millrace_graph::{Join, JoinKind, JoinSide, SideState};

use super::*;
use crate::options::LookaheadMode;
use crate::stats::LookaheadStats;

/// Rows of each table that is looked up in.
const ROWS: i64 = 500;
const TABLES: usize = 3;

/// `SELECT f.id, c.v FROM f JOIN a ON f.v = a.id JOIN b ON a.v = b.id JOIN c ON b.v = c.id`
fn chain(facts: JobId, tables: &[JobId]) -> JobGraph {
    let mut fragments = vec![vec![subscribe(facts)]];
    let mut edges = vec![vec![rows(0, 1, vec![1])]];
    let mut state = Vec::new();
    for (i, &table) in tables.iter().enumerate() {
        let exchange = node(Op::Exchange(Exchange { fragment: i, output: 0 }), vec![]);
        let left = side(1, RowStorage::Multiset, state.len() + 1);
        let right = side(0, RowStorage::Keyed, state.len() + 2);
        state.extend([&left, &right].map(table_of));
        let join = Join {
            kind: JoinKind::Inner,
            left,
            right,
            residual: None,
            null_aware: false,
            null_equals_null: false,
            output: vec![0, 3],
        };
        fragments.push(vec![exchange, subscribe(table), node(Op::Join(join), vec![0, 1])]);
        let by = if i + 1 < tables.len() { 1 } else { 0 };
        edges.push(vec![rows(2, i + 2, vec![by])]);
    }
    let exchange = Op::Exchange(Exchange { fragment: tables.len(), output: 0 });
    fragments.push(vec![node(exchange, vec![]), node(Op::Materialize(Materialize), vec![0])]);
    edges.push(vec![]);
    let mut graph = graph(fragments, edges, layout(RowStorage::Keyed, vec![0]));
    graph.tables.extend(state);
    graph
}

/// A side by one column; the right one has a row of each key.
fn side(key: usize, storage: RowStorage, table: usize) -> JoinSide {
    let unique_per_key = storage == RowStorage::Keyed;
    let state = SideState { table, storage, unique_key: vec![], unique_per_key };
    JoinSide { keys: vec![key], vnode: vec![key], state }
}

fn table_of(side: &JoinSide) -> StateTable {
    let class = match side.state.unique_per_key {
        true => AccessClass::Lookup,
        false => AccessClass::RangeRead,
    };
    StateTable {
        name: "join".to_string(),
        class,
        value_schema: schema(),
        storage: side.state.storage,
        relation: false,
        retention: None,
    }
}

/// The value of a row of one of the tables.
fn value(table: usize, id: i64) -> i64 {
    (id * 7 + 11 * table as i64 + 3) % ROWS
}

/// What the view has, for facts.
fn found(facts: &[Row]) -> Vec<Row> {
    let last = |v: i64| (0..TABLES).fold(v, |key, table| value(table, key));
    let mut found: Vec<Row> =
        facts.iter().map(|(id, v, weight)| (*id, last(*v), *weight)).collect();
    found.sort_unstable();
    found
}

impl Cluster {
    /// A view over several relations.
    async fn view_of(
        &self,
        id: u32,
        inputs: &[JobId],
        graph: JobGraph,
        parallelism: usize,
    ) -> JobId {
        let relation = {
            let mut relation = relation(id, RelationKind::MaterializedView);
            relation.key = vec![0];
            relation.distribution = vec![0];
            relation
        };
        let (relations, epoch) = {
            let jobs = self.meta.jobs.lock();
            let starts = || inputs.iter().map(|input| &jobs[input].start);
            let relations = starts().map(|start| start.relation.clone()).collect();
            (relations, starts().map(|start| start.version.epoch).max().unwrap())
        };
        let backfill = Some(BackfillState { snapshot_epoch: epoch, ..BackfillState::default() });
        let version = JobVersion { backfill, ..JobVersion::default() };
        let start = logged(relation, version, relations, parallelism);
        let id = self.register(start, Some(Arc::new(graph)));
        self.start(id).await.unwrap();
        id
    }

    /// Of the joins, the first one first.
    fn joins(&self, view: JobId) -> Vec<LookaheadStats> {
        let stats = self.worker.stats(view).unwrap();
        stats.operators.iter().filter(|o| o.name == "Join").map(|o| o.lookahead).collect()
    }

    /// Lets reads ahead go on until none brings another: no row comes meanwhile.
    async fn until_read_ahead(&self, view: JobId) {
        let counts = || -> u64 { self.joins(view).iter().map(|j| j.hinted + j.prefetched).sum() };
        let (mut known, mut turns) = (counts(), 0);
        while turns < 200 {
            tokio::task::yield_now().await;
            turns = if counts() == known { turns + 1 } else { 0 };
            known = counts();
        }
    }
}

/// The view over the facts and tables.
struct Chain {
    c: Cluster,
    facts: JobId,
    view: JobId,
}

impl Chain {
    async fn new(exec: ExecOptions, parallelism: usize) -> Chain {
        let c = Cluster::new(exec).await;
        let facts = c.table(1).await;
        let mut tables = Vec::new();
        for table in 0..TABLES {
            let id = c.table(2 + table as u32).await;
            c.insert(id, (0..ROWS).map(|id| (id, value(table, id)))).await;
            tables.push(id);
        }
        let inputs = [&[facts], tables.as_slice()].concat();
        let view = c.view_of(9, &inputs, chain(facts, &tables), parallelism).await;
        c.catch_up(view).await;
        Chain { c, facts, view }
    }

    /// Rows come, and are looked at before the view has them; the view stays what its query says.
    async fn rounds(&self, rounds: std::ops::Range<i64>) {
        let Chain { c, facts, view } = self;
        for round in rounds {
            let row = |i: i64| (round * 10 + i, (round * 97 + i * 31) % ROWS);
            c.insert(*facts, (0..10).map(row)).await;
            let (id, v) = row(3);
            let change = [(id, v, -1), (id, (v + 5) % ROWS, 1)];
            c.dml(*facts, &change, DmlKind::Change).await.unwrap();
            c.until_read_ahead(*view).await;
            c.follow(*view, *facts).await;
            assert_eq!(c.rows(*view).await, found(&c.rows(*facts).await), "round {round}");
        }
    }

    fn joins(&self) -> Vec<LookaheadStats> {
        self.c.joins(self.view)
    }
}

fn cold() -> ExecOptions {
    ExecOptions { cache_bytes: 8 << 10, delay_reads: true, ..ExecOptions::default() }
}

#[tokio::test]
async fn keys_of_later_joins_are_read_before_the_row_comes() {
    for parallelism in [1, 2, 7] {
        let chain = Chain::new(cold(), parallelism).await;
        // Until hints are wanted everywhere.
        chain.rounds(0..10).await;
        let before = chain.joins();
        chain.rounds(10..40).await;
        let after = chain.joins();
        assert_eq!(after.len(), TABLES);
        for (i, (before, after)) in before.iter().zip(&after).enumerate() {
            let in_time = after.in_time - before.in_time;
            let waited = after.missed - before.missed + after.late - before.late;
            // A retraction reads the rows of its own side too, which is not announced: there is one in each round.
            assert!(
                in_time > 200 && waited <= 30,
                "join {i} at {parallelism}: {in_time} in time, {waited} not; {after:?}"
            );
        }
    }
}

#[tokio::test]
async fn without_lookahead_every_join_waits_and_the_rows_are_the_same() {
    let chain = Chain::new(ExecOptions { lookahead: LookaheadMode::Off, ..cold() }, 2).await;
    chain.rounds(0..10).await;
    for join in chain.joins() {
        assert!(join.missed > 0 && join.hinted == 0, "{join:?}");
    }
}

#[tokio::test]
async fn hints_that_are_mishandled_change_no_row() {
    for parallelism in [1, 2, 7] {
        let random = ExecOptions { random_hints: true, ..cold() };
        Chain::new(random, parallelism).await.rounds(0..15).await;
    }
}

#[tokio::test]
async fn nothing_is_chained_while_later_joins_find_all_in_memory() {
    let chain = Chain::new(ExecOptions::default(), 2).await;
    chain.rounds(0..10).await;
    for join in chain.joins() {
        assert_eq!((join.hinted, join.prefetched, join.active), (0, 0, 0), "{join:?}");
    }
}
