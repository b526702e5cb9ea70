//! Views that emit rows on window close: the tasks foresee the watermark, and the state that it closes is read before.

use std::time::Duration;

use arrow::datatypes::TimeUnit;
use datafusion::physical_expr::expressions::{CastExpr, Column as ColumnExpr};
use millrace_common::access::RetentionBy;
use millrace_functions::expr::ExprRef;
use millrace_graph::{
    BufferMode, DerivedWatermark, EventTimeBuffer, Project, Retention, WatermarkTerm,
};

use super::*;
use crate::options::LookaheadMode;
use crate::stats::OperatorStats;

/// Rows that are there when the view is created, one a microsecond, and how many are closed at a time.
const ROWS: i64 = 6_000;
const CLOSED: i64 = 200;
/// Closes before the watermark is foreseen, and those that are counted.
const FIRST: i64 = 3;
const CLOSES: i64 = 20;

/// `SELECT id, v FROM input`, where `v` is an instant with a watermark, on window close.
fn closed(input: JobId) -> JobGraph {
    let at = DataType::Timestamp(TimeUnit::Microsecond, None);
    let timed = Arc::new(Schema::new(vec![
        Field::new("id", DataType::Int64, true),
        Field::new("at", at.clone(), true),
    ]));
    let terms = vec![WatermarkTerm { relation: input, column: 1, steps: vec![] }];
    let marks = vec![DerivedWatermark { column: 1, terms: terms.clone() }];
    let cast = |name: &str, to: DataType| -> Op {
        let (id, at) = (ColumnExpr::new("id", 0), Arc::new(ColumnExpr::new(name, 1)));
        let exprs: Vec<ExprRef> = vec![Arc::new(id), Arc::new(CastExpr::new(at, to, None))];
        Op::Project(Project { exprs })
    };
    let buffer =
        EventTimeBuffer { mode: BufferMode::WindowClose, column: 1, vnode: vec![], table: 1 };
    let of = |op, inputs, schema: &SchemaRef| Node {
        schema: Arc::clone(schema),
        marks: marks.clone(),
        ..node(op, inputs)
    };
    let nodes = vec![
        Node { marks: marks.clone(), ..subscribe(input) },
        of(cast("v", at), vec![0], &timed),
        of(Op::Buffer(buffer), vec![1], &timed),
        node(cast("at", DataType::Int64), vec![2]),
        node(Op::Materialize(Materialize), vec![3]),
    ];
    let mut graph = graph(vec![nodes], vec![vec![]], layout(RowStorage::Keyed, vec![0]));
    graph.tables.push(StateTable {
        name: "held back".to_string(),
        class: AccessClass::RangeRead,
        value_schema: timed,
        storage: RowStorage::Multiset,
        relation: false,
        retention: Some(Retention { by: RetentionBy::Key, terms }),
    });
    graph
}

impl Cluster {
    fn buffer(&self, view: JobId) -> OperatorStats {
        let stats = self.worker.stats(view).unwrap();
        stats.operators.into_iter().find(|o| o.name == "WindowClose").unwrap()
    }

    /// Another row enters the table, which moves its watermark.
    async fn advance(&self, table: JobId, view: JobId, close: i64) {
        let watermark = close * CLOSED;
        self.insert(table, [(ROWS + close, ROWS + watermark)]).await;
        self.meta.watermarks.lock().push((self.version(table).epoch, watermark));
        self.follow(view, table).await;
        let all = self.rows(table).await.into_iter();
        let expected: Vec<Row> = all.filter(|row| row.1 < watermark).collect();
        assert_eq!(self.rows(view).await, expected, "close {close}");
    }
}

/// Requests for the rows that are closed, and ahead of them, and what is told at the end.
async fn closes(lookahead: LookaheadMode) -> (u64, u64, OperatorStats) {
    let exec = ExecOptions { lookahead, ..ExecOptions::default() };
    let c = Cluster::over(Profile::INSTANT, exec, |s| s.block_bytes = Some(1_024)).await;
    let t = c.table(1).await;
    c.meta.jobs.lock().get_mut(&t).unwrap().start.relation.watermark_columns = vec![1];
    c.insert(t, (0..ROWS).map(|i| (i, i))).await;
    let v = c.view(2, t, closed(t), 1).await;
    c.catch_up(v).await;
    let edit = c.store.job(v).unwrap().flush().await.unwrap();
    Meta(Arc::clone(&c.meta)).commit_edit(v, Generation(1), edit).await.unwrap();
    // What is being cached of new runs.
    tokio::time::sleep(Duration::from_secs(1)).await;
    c.store.cache().clear_memory();
    let mut before = None;
    for close in 1..=FIRST + CLOSES {
        c.advance(t, v, close).await;
        // As long as the epochs of a busy view.
        tokio::time::sleep(Duration::from_millis(100)).await;
        if close == FIRST {
            before = Some(c.buffer(v).measures);
        }
    }
    let (before, told) = (before.unwrap(), c.buffer(v));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(c.buffer(v).lookahead, told.lookahead, "idle sends nothing");
    let after = &told.measures;
    let demand = after.demand_requests - before.demand_requests;
    (demand, after.ahead_requests - before.ahead_requests, told)
}

#[tokio::test(start_paused = true)]
async fn state_that_a_watermark_closes_is_read_before_it_comes() {
    let (demand, none, told) = closes(LookaheadMode::Off).await;
    assert!(demand >= CLOSES as u64 && none == 0, "the state is cold: {demand}, {none}");
    assert!(told.measures.places().is_empty());
    let (late, ahead, told) = closes(LookaheadMode::Auto).await;
    assert_eq!((late, told.measures.places()), (0, vec!["watermark"]));
    assert!(ahead > 0 && ahead <= demand + 2, "{ahead} ahead of closes, {demand} without");
    let (in_time, missed) = (told.lookahead.in_time, told.lookahead.missed);
    assert!(in_time >= CLOSES as u64 && missed <= FIRST as u64, "{told:?}");
}
