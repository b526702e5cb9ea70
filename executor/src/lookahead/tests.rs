//! From announced rows to the tasks that own their keys.

use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use datafusion::logical_expr::Operator as Compare;
use datafusion::physical_expr::expressions::{BinaryExpr, Column, Literal};
use datafusion::scalar::ScalarValue;
use millrace_common::collections::{HashMap, HashSet};
use millrace_common::{DeltaChunk, EnvHandle, Epoch, RelationId};
use millrace_functions::expr::ExprRef;
use millrace_graph::lookahead::{Chained, Inside, Lookahead, Place};
use millrace_graph::{Filter, Node, Operator as Op, Project};
use tokio::sync::Notify;

use super::choice::MIN_EPOCHS;
use super::edge::{HintReceiver, hint_edge};
use super::operator::{Activation, EpochReads, OperatorLookahead};
use super::presence::of_input;
use super::route::{Route, TaskEnd};
use super::sides::Sides;
use super::slack::{EpochNotes, OperatorEpochs, Side, Spot};
use super::uncommitted::Uncommitted;
use super::walker::Walker;
use super::{DELETED_PORT, Due, Hint};
use crate::error::ExecError;
use crate::exchange::{Barrier, Dispatcher, Message, local_channel};
use crate::memory::MemoryGovernor;
use crate::operator::OperatorContext;
use crate::options::ExecOptions;
use crate::stats::OperatorMetrics;

mod columns;
mod edge;
mod leaf;

const R: RelationId = RelationId(7);
/// Credits of an edge for more hints than any test sends.
const ROOM: usize = 64 << 20;
/// For some of the hints of [`all_rows`].
const SOME: usize = 8 << 10;

fn schema() -> SchemaRef {
    let field = |name: &str| Field::new(name, DataType::Int64, true);
    Arc::new(Schema::new(["key", "time", "other"].map(field).to_vec()))
}

/// (key, time, other)
fn rows(rows: &[(i64, i64, i64)]) -> RecordBatch {
    let column = |of: fn(&(i64, i64, i64)) -> i64| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values(rows.iter().map(of)))
    };
    let columns = vec![column(|r| r.0), column(|r| r.1), column(|r| r.2)];
    RecordBatch::try_new(schema(), columns).unwrap()
}

fn step(op: Op) -> Node {
    Node { op, inputs: vec![0], schema: schema(), append_only: false, marks: vec![] }
}

/// Rows whose last column is not negative, with the columns in the order (other, time, key).
fn steps() -> Vec<Node> {
    let column = |at: usize| -> ExprRef { Arc::new(Column::new(schema().field(at).name(), at)) };
    let zero = Arc::new(Literal::new(ScalarValue::Int64(Some(0))));
    let predicate = Arc::new(BinaryExpr::new(column(2), Compare::GtEq, zero));
    let exprs = vec![column(2), column(1), column(0)];
    vec![step(Op::Filter(Filter { predicate })), step(Op::Project(Project { exprs }))]
}

/// The key of the leaf's rows, without steps.
fn by_key() -> Lookahead {
    Lookahead {
        fragment: 1,
        node: 2,
        port: 1,
        deleted: false,
        input_port: 1,
        leaf: (0, 0),
        relation: Some(R),
        inside: None,
        chained: None,
        input: schema(),
        steps: vec![],
        schema: schema(),
        key: vec![0],
        vnode: vec![0],
        time: Some(1),
        carried: vec![],
        places: vec![Place::Entry, Place::Root],
        depth: 1,
    }
}

/// A route, and the tasks behind it.
struct Tasks {
    changed: Arc<Notify>,
    operators: Vec<Arc<OperatorLookahead>>,
    activations: Vec<Activation>,
    hints: Vec<HintReceiver>,
    governor: Arc<MemoryGovernor>,
    metrics: Arc<OperatorMetrics>,
}

impl Tasks {
    /// `credits`: of the edge to each task.
    fn new(lookahead: &Lookahead, tasks: usize, credits: usize) -> (Tasks, Route) {
        let governor = MemoryGovernor::new(1 << 30);
        let changed = Arc::default();
        let operators: Vec<_> = (0..tasks).map(|_| OperatorLookahead::new(&changed)).collect();
        let activations = operators.iter().map(|o| Activation::new(o, &governor, 1.0)).collect();
        let (senders, hints): (Vec<_>, Vec<_>) =
            (0..tasks).map(|_| hint_edge(credits, &governor)).unzip();
        let ends = senders.into_iter().zip(&operators);
        let ends = ends.map(|(hints, o)| TaskEnd { hints, operator: Arc::clone(o) }).collect();
        let metrics = OperatorMetrics::new(1, 2, "Join");
        let ctx = OperatorContext {
            job: R,
            task: 0,
            vnodes: 0..256,
            event_time: vec![],
            writers: &|_| Err(ExecError::internal("no state")),
            options: Arc::new(ExecOptions::default()),
            errors: Arc::default(),
            metrics: Arc::default(),
            lookahead: Arc::default(),
            governor: Arc::clone(&governor),
            shed: Arc::default(),
            clock: EnvHandle::default(),
            restored: Epoch::ZERO,
            first_arrival: 0,
        };
        let route =
            Route::new(lookahead, &lookahead.input, ends, Arc::clone(&metrics), &ctx).unwrap();
        (Tasks { changed, operators, activations, hints, governor, metrics }, route)
    }

    /// Rows of every task have waited for reads.
    fn miss(&mut self) {
        for activation in &mut self.activations {
            activation.epoch(EpochReads { missed: 1, ..EpochReads::default() });
        }
    }

    /// Nothing is read for so long that hints are no longer wanted.
    fn rest(&mut self) {
        for activation in &mut self.activations {
            while activation.is_active() {
                activation.epoch(EpochReads::default());
            }
        }
    }

    /// Keys that the tasks were told, with their times.
    fn told(&mut self) -> Vec<HashMap<i64, Option<i64>>> {
        let of_task = |hints: &mut HintReceiver| {
            let mut told = HashMap::default();
            while let Some(hint) = next(hints) {
                assert_eq!((hint.node, hint.port), (2, 1));
                assert!(hint.is_whole());
                let keys = hint.columns[0].as_primitive::<Int64Type>();
                let times = hint.times.read(&hint.columns).unwrap();
                for (at, key) in keys.values().iter().enumerate() {
                    let known = told.insert(*key, times.get(at).copied());
                    assert!(known.is_none(), "key {key} twice");
                }
            }
            told
        };
        self.hints.iter_mut().map(of_task).collect()
    }
}

/// The next hint, as a task takes it.
fn next(hints: &mut HintReceiver) -> Option<Hint> {
    let sent = hints.try_recv()?;
    let count = sent.count();
    let hint = sent.open().unwrap();
    assert_eq!(hint.count(), count);
    Some(hint)
}

/// Which keys reach which task, by an exchange over a column.
async fn dispatched(rows: RecordBatch, column: usize, tasks: usize) -> Vec<HashSet<i64>> {
    let governor = MemoryGovernor::new(1 << 30);
    let (senders, mut receivers): (Vec<_>, Vec<_>) =
        (0..tasks).map(|_| local_channel(1 << 24, &governor)).unzip();
    let mut dispatcher = Dispatcher::new(vec![column], senders, &ExecOptions::default());
    dispatcher.push(DeltaChunk::inserts(rows)).unwrap();
    let end = Barrier { prev: Epoch(0), epoch: Epoch(1), backfill: false, stage: 0, swap: false };
    dispatcher.barrier(&Arc::new(end), &Arc::default()).await.unwrap();
    let mut all = Vec::new();
    for receiver in &mut receivers {
        let mut keys = HashSet::default();
        while let Some(Message::Chunk(chunk)) =
            std::future::poll_fn(|cx| receiver.poll_recv(cx)).await
        {
            let column = chunk.batch.column(column).as_primitive::<Int64Type>();
            keys.extend(column.values().iter().copied());
        }
        all.push(keys);
    }
    all
}

#[tokio::test]
async fn a_hint_and_the_rows_of_its_key_meet_in_the_same_task() {
    let all: Vec<_> = (0..3_000).map(|i| (i * 7 % 4_001, i, i - 100)).collect();
    for tasks in [1, 2, 7] {
        let (mut ends, mut route) = Tasks::new(&by_key(), tasks, ROOM);
        ends.miss();
        route.look(rows(&all), &Due::default()).unwrap();
        let told = ends.told();
        let expected = dispatched(rows(&all), 0, tasks).await;
        for (task, (told, expected)) in told.iter().zip(&expected).enumerate() {
            let told: HashSet<i64> = told.keys().copied().collect();
            assert!(told == *expected, "task {task} of {tasks}");
        }
    }
}

#[tokio::test]
async fn steps_choose_rows_and_compute_keys() {
    let lookahead = Lookahead { steps: steps(), key: vec![2], vnode: vec![2], ..by_key() };
    let all: Vec<_> = (0..100).map(|i| (1_000 + i, i, i - 50)).collect();
    for tasks in [1, 2, 7] {
        let (mut ends, mut route) = Tasks::new(&lookahead, tasks, ROOM);
        ends.miss();
        route.look(rows(&all), &Due::default()).unwrap();
        let mut keys: Vec<i64> = ends.told().into_iter().flat_map(|t| t.into_keys()).collect();
        keys.sort_unstable();
        assert_eq!(keys, (1_050..1_100).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn a_key_goes_where_the_hash_of_its_vnode_columns_sends_it() {
    // Key (key, other), of which only `other` decides the task.
    let lookahead = Lookahead { key: vec![0, 2], vnode: vec![2], ..by_key() };
    let all: Vec<_> = (0..2_000).map(|i| (i, 0, i % 97)).collect();
    let (mut ends, mut route) = Tasks::new(&lookahead, 7, ROOM);
    ends.miss();
    route.look(rows(&all), &Due::default()).unwrap();
    let expected = dispatched(rows(&all), 2, 7).await;
    let mut keys = 0;
    for (told, others) in ends.told().iter().zip(&expected) {
        keys += told.len();
        assert!(told.keys().all(|key| others.contains(&(key % 97))));
    }
    assert_eq!(keys, all.len());
}

#[tokio::test]
async fn a_key_is_told_once_with_its_latest_time_and_not_if_it_is_in_memory() {
    let (mut ends, mut route) = Tasks::new(&by_key(), 1, ROOM);
    ends.miss();
    let presence = ends.operators[0].presence().unwrap();
    let hash = {
        let key: ArrayRef = Arc::new(Int64Array::from(vec![5]));
        millrace_common::hash::hash_columns(&[key], 1).unwrap()[0]
    };
    presence.set(of_input(hash, 1));
    let all = [(1, 10, 0), (5, 50, 0), (2, 20, 0), (1, 30, 0), (5, 60, 0), (1, 20, 0)];
    route.look(rows(&all), &Due::default()).unwrap();
    let told = ends.told().remove(0);
    assert_eq!(told, HashMap::from_iter([(1, Some(30)), (2, Some(20))]));
    assert!(presence.is_due(of_input(hash, 1)), "it is renewed");
    assert_eq!(ends.metrics.lookahead.resident.get(), 1);
}

#[tokio::test]
async fn a_key_is_told_once_for_each_epoch_but_what_was_dropped_is_told_again() {
    let (mut ends, mut route) = Tasks::new(&by_key(), 1, SOME);
    ends.miss();
    let due = Due::default();
    let mut told = async |due: &Due, range: std::ops::Range<i64>| {
        let all: Vec<_> = range.map(|i| (i, i, 0)).collect();
        route.look(rows(&all), due).unwrap();
        ends.told()[0].len()
    };
    let first = told(&due, 0..900).await;
    assert!((1..900).contains(&first), "there is room for some: {first}");
    let mut all = first;
    while all < 900 {
        let more = told(&due, 0..900).await;
        assert!(more > 0 && all + more <= 900, "{more} more than {all}");
        all += more;
    }
    assert_eq!(told(&due, 800..910).await, 10);
    assert_eq!(told(&Due::default(), 0..900).await, first);
}

/// Lets everything that is spawned go as far as it can: the tests' runtime has one thread.
async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn what_only_deleted_rows_need_is_told_of_no_others() {
    let lookahead = Lookahead { port: 0, deleted: true, time: None, ..by_key() };
    let (mut ends, mut route) = Tasks::new(&lookahead, 1, ROOM);
    ends.miss();
    let all = rows(&[(1, 0, 0), (2, 0, 0), (3, 0, 0), (4, 0, 0)]);
    let weights = Int64Array::from(vec![1, -1, 2, -2]);
    let change = DeltaChunk::new(all.clone(), Some(weights));
    route.look_beside(DeltaChunk::inserts(all), &Due::default(), None).unwrap();
    assert!(next(&mut ends.hints[0]).is_none(), "all are added");
    route.look_beside(change, &Due::default(), None).unwrap();
    let hint = next(&mut ends.hints[0]).unwrap();
    assert_eq!(hint.port, DELETED_PORT);
    assert_eq!(hint.columns[0].as_primitive::<Int64Type>().values(), &[2, 4]);
    assert!(next(&mut ends.hints[0]).is_none());
}

#[tokio::test]
async fn a_walker_follows_only_while_hints_are_wanted() {
    let (mut ends, route) = Tasks::new(&by_key(), 2, ROOM);
    let uncommitted = Arc::new(Uncommitted::default());
    let places = vec![Place::Root];
    let walker = Walker::new(R, places, vec![0, 1, 2], vec![route], &uncommitted, &ends.changed);
    let walker = tokio::spawn(walker.run());
    let announce = |key: i64| {
        let both = || [key, key + 1].map(|key| DeltaChunk::inserts(rows(&[(key, 0, 0)]))).to_vec();
        uncommitted.announce(R, Place::Root, None, both)
    };
    settle().await;
    assert_eq!(uncommitted.following(), 0, "nobody has missed anything");
    assert!(announce(1).is_none());
    ends.miss();
    settle().await;
    assert_eq!(uncommitted.following(), 1);
    let announced = announce(10);
    settle().await;
    let told: HashSet<i64> = ends.told().into_iter().flat_map(HashMap::into_keys).collect();
    assert_eq!(told, HashSet::from_iter([10, 11]));
    drop(announced);
    ends.rest();
    settle().await;
    assert_eq!(uncommitted.following(), 0, "nothing is missed any more");
    ends.miss();
    settle().await;
    assert!(announce(20).is_some());
    walker.abort();
    assert!(walker.await.unwrap_err().is_cancelled());
    assert_eq!(uncommitted.following(), 0, "it has ended with its job");
}

/// A route that looks at rows where they enter, until the side's place changes.
fn at_entry(route: Route) -> (Route, Arc<Side>) {
    let spot = |place| Spot { is_own: true, place };
    let side = Arc::new(Side::new(1, vec![spot(Place::Entry), spot(Place::Root)]));
    (route.at(Arc::clone(&side), true), side)
}

#[tokio::test]
async fn keys_are_announced_at_the_place_in_use_and_only_noted_at_others() {
    let (mut ends, route) = Tasks::new(&by_key(), 1, ROOM);
    let (route, side) = at_entry(route);
    let uncommitted = Arc::new(Uncommitted::default());
    let places = vec![Place::Entry, Place::Root];
    let walker = Walker::new(R, places, vec![0, 1, 2], vec![route], &uncommitted, &ends.changed);
    let walker = tokio::spawn(walker.run());
    ends.miss();
    settle().await;
    let both = |key: i64| {
        for place in [Place::Entry, Place::Root] {
            let key = key + i64::from(place == Place::Root);
            let rows = || vec![DeltaChunk::inserts(rows(&[(key, 0, 0)]))];
            uncommitted.announce(R, place, Some(Epoch(20)), rows).unwrap().committed(Epoch(20));
        }
    };
    both(10);
    settle().await;
    assert_eq!(ends.told()[0].keys().copied().collect::<Vec<_>>(), [10]);
    assert!(side.leave(), "there is the root");
    both(20);
    settle().await;
    assert_eq!(ends.told()[0].keys().copied().collect::<Vec<_>>(), [21]);
    assert_eq!(uncommitted.following(), 1, "it still follows both");
    // What both have seen is measured against the epoch's first row.
    let epochs = OperatorEpochs::default();
    epochs.join();
    let began = [None, Some(EnvHandle::default().now()), None];
    epochs.pass(20, &EpochNotes { began, ..EpochNotes::default() }, &[Arc::clone(&side)]);
    let seen = side.read().spots.iter().map(|s| s.epochs).collect::<Vec<_>>();
    assert_eq!(seen, [1, 1]);
    walker.abort();
}

#[tokio::test]
async fn keys_in_memory_and_idle_relations_send_nothing() {
    let (mut ends, mut route) = Tasks::new(&by_key(), 1, ROOM);
    ends.miss();
    let presence = ends.operators[0].presence().unwrap();
    let keys: ArrayRef = Arc::new(Int64Array::from_iter_values(0..5_000));
    let hashes = millrace_common::hash::hash_columns(&[keys], 5_000).unwrap();
    hashes.iter().for_each(|hash| presence.set(of_input(*hash, 1)));
    let known: Vec<i64> = (0..5_000)
        .filter(|key| presence.may_be_resident(of_input(hashes[*key as usize], 1)))
        .collect();
    assert!(known.len() > 4_000, "few have the place of another");
    for _ in 0..3 {
        let rows: Vec<_> = known.iter().map(|key| (*key, 0, 0)).collect();
        route.look(self::rows(&rows), &Due::default()).unwrap();
    }
    assert!(ends.told()[0].is_empty(), "no hint is sent");
    assert_eq!(ends.metrics.lookahead.resident.get(), 3 * known.len() as u64);
    let uncommitted = Arc::new(Uncommitted::default());
    let places = vec![Place::Entry];
    let walker = Walker::new(R, places, vec![0, 1, 2], vec![route], &uncommitted, &ends.changed);
    let walker = tokio::spawn(walker.run());
    settle().await;
    assert_eq!(uncommitted.following(), 1);
    assert!(ends.told()[0].is_empty(), "nothing happens while no rows come");
    walker.abort();
}

/// An input is a step of a chain if its keys are known in no other way than from it, but for rows inside the job.
#[test]
fn steps_of_chains_are_left_out_unless_their_place_is_told() {
    let plain = by_key();
    let chained = Lookahead { chained: Some(Chained { after: 0, met: vec![] }), ..by_key() };
    let inside = Some(Inside { from: (0, 0), input_of: (1, 2) });
    let inside = Lookahead { inside, places: vec![Place::Input], ..by_key() };
    let cases = [
        (vec![&plain], true, false),
        (vec![&chained], true, true),
        (vec![&chained], false, false),
        (vec![&chained, &plain], true, false),
        (vec![&chained, &inside], true, true),
        (vec![&inside], true, false),
    ];
    for (number, (lookaheads, is_free, is_left_out)) in cases.into_iter().enumerate() {
        let with_places: Vec<(Lookahead, Vec<Place>)> =
            lookaheads.iter().map(|l| (Lookahead::clone(l), vec![l.places[0]])).collect();
        let side = Sides::new(&with_places, |_| true, |_| is_free).of(lookaheads[0]).unwrap();
        let epochs = OperatorEpochs::default();
        epochs.join();
        let began = [None, Some(EnvHandle::default().now()), None];
        let late = EpochNotes { began, used: 1, late: 1, missed: 1, ..EpochNotes::default() };
        for epoch in 2..2 + MIN_EPOCHS as u64 {
            epochs.pass(epoch, &late, &[Arc::clone(&side)]);
        }
        assert_eq!(side.is_left_out(), is_left_out, "case {number}");
    }
}
