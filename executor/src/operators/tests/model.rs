//! Joins and aggregates against plain maps, over all short sequences of what can happen to a key: a hint, a row, a
//! retraction, an answer (the first or the last one that is due), a barrier, an eviction, rows of another key. Rows of an
//! inner join that only add are written blind, and noted beside what is read ahead.
//!
//! Every sequence ends with a barrier; at each barrier the output so far is the query over the rows so far. Reads ahead
//! of rows complete when the sequence says so, never because a barrier waits for them. The planted bugs of prefetches
//! must each be noticed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use arrow::datatypes::{DataType, Field, Schema};
use futures::FutureExt;
use millrace_common::fault_injection::{PREFETCH_BUGS, plant};
use millrace_common::keys::columns_at;
use millrace_common::{Epoch, random_tests};
use millrace_functions::aggregate_kind::AggFunc;
use millrace_graph::state::accumulator_schema;
use millrace_graph::{
    AggCall, Aggregate, Join, JoinKind, JoinSide, Node, Operator as Op, SideState, ValueTable,
};
use millrace_rpc::catalog::RowStorage;
use parking_lot::RwLock;

use super::fake::FakeTable;
use super::hints::{bounds_hold_for_what_was_read_before, due_entries_leave_last};
use super::history::{Row, ZSet, accumulate, add, chunk, schema};
use super::stateful::Subject;
use crate::lookahead::{Due, Hint, HintTimes};
use crate::operator::{Operator, Output};
use crate::options::ExecOptions;
use crate::state::NOTHING_CACHED;

/// Planted bugs are there for all threads: other tests with hints must not run meanwhile.
pub(crate) static PLANTED: RwLock<()> = RwLock::new(());

#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    Hint(usize),
    /// A row of the key at a port.
    Row(usize),
    /// The last row of the key at a port is taken back.
    Retract(usize),
    /// The oldest read ahead is answered, and what comes of it is taken in.
    Ahead,
    /// The newest one.
    LastAhead,
    /// A read that rows wait for is answered.
    Demand,
    Barrier,
    /// All that can leaves memory.
    Evict,
    /// A row of another key.
    Other,
}

/// What is tried, and how it begins.
pub(super) struct Model {
    pub subject: Subject,
    events: Vec<Event>,
    /// Each with how many events fewer follow than after others.
    prefixes: Vec<(Vec<Event>, u32)>,
    /// The query.
    expected: fn(&[ZSet<Row>; 2]) -> ZSet<Vec<String>>,
}

const KEY: i64 = 1;
const OTHER: i64 = 2;

/// One operator under way.
struct Run<'a> {
    model: &'a Model,
    op: Box<dyn Operator>,
    rows: [ZSet<Row>; 2],
    /// Ids of the rows of the key.
    there: [Vec<i64>; 2],
    next_id: i64,
    actual: ZSet<Vec<String>>,
    epoch: u64,
}

impl Run<'_> {
    fn new(model: &Model) -> Run<'_> {
        Run {
            model,
            op: model.subject.build(),
            rows: Default::default(),
            there: Default::default(),
            next_id: 0,
            actual: ZSet::new(),
            epoch: 10,
        }
    }

    /// `Err`: what is wrong.
    fn step(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Hint(port) => {
                let row: Row = (Some(KEY), None, None, 0);
                let columns = columns_at(&chunk(&[(row, 1)]).batch, &[0]);
                let due = Due::at(self.epoch + 1);
                let times = HintTimes::None;
                let hint = Hint { node: 0, port, columns, times, due, carried: None };
                self.op.hint(port, &hint).map_err(|e| e.to_string())
            }
            Event::Row(port) => {
                self.next_id += 1;
                self.there[port].push(self.next_id);
                self.push(port, KEY, self.next_id, 1)
            }
            Event::Other => {
                self.next_id += 1;
                self.push(0, OTHER, self.next_id, 1)
            }
            Event::Retract(port) => match self.there[port].pop() {
                Some(id) => self.push(port, KEY, id, -1),
                None => Ok(()),
            },
            Event::Ahead => self.answer(true, false).map(drop),
            Event::LastAhead => self.answer(true, true).map(drop),
            Event::Demand => self.answer(false, false).map(drop),
            Event::Evict => {
                let mut out = Output::default();
                NOTHING_CACHED.set(true);
                let done = self.op.shed(&mut out);
                NOTHING_CACHED.set(false);
                done.map_err(|e| e.to_string())?;
                self.take(&mut out);
                Ok(())
            }
            Event::Barrier => self.barrier(),
        }
    }

    fn push(&mut self, port: usize, key: i64, id: i64, weight: i64) -> Result<(), String> {
        let row: Row = (Some(key), Some(id), None, id);
        add(&mut self.rows[port], row, weight);
        let mut out = Output::default();
        while self.op.is_full() && self.answer(false, false)? {}
        self.op.push(port, chunk(&[(row, weight)]), &mut out).map_err(|e| e.to_string())?;
        self.take(&mut out);
        Ok(())
    }

    fn take(&mut self, out: &mut Output) {
        out.take().iter().for_each(|chunk| accumulate(&mut self.actual, chunk));
    }

    /// Lets a read complete, if there is one, and the operator go on as far as it can.
    fn answer(&mut self, ahead: bool, is_last: bool) -> Result<bool, String> {
        let mut tables = self.model.subject.tables.iter();
        if !tables.any(|table| table.answer_one(ahead, is_last)) {
            return self.go_on();
        }
        self.go_on().map(|_| true)
    }

    /// Polls the operator until it waits; whether it did anything.
    fn go_on(&mut self) -> Result<bool, String> {
        let mut any = false;
        while self.op.is_pending() || self.op.is_prefetching() {
            let mut out = Output::default();
            let Some(done) = self.op.progress(&mut out).now_or_never() else { break };
            done.map_err(|e| e.to_string())?;
            self.take(&mut out);
            any = true;
        }
        Ok(any)
    }

    fn barrier(&mut self) -> Result<(), String> {
        while self.op.is_pending() {
            if !self.answer(false, false)? {
                return Err("it waits, and no read is under way".into());
            }
        }
        self.epoch += 1;
        self.op.time(Epoch(self.epoch));
        let mut out = Output::default();
        let done = self.op.barrier(&mut out).now_or_never();
        done.ok_or("a barrier waits for what is read ahead")?.map_err(|e| e.to_string())?;
        self.op.seal(&mut Vec::new()).map_err(|e| e.to_string())?;
        self.take(&mut out);
        let expected = (self.model.expected)(&self.rows);
        if self.actual != expected {
            return Err(format!("{:?} instead of {expected:?}", self.actual));
        }
        Ok(())
    }
}

impl Model {
    /// Runs a sequence over empty tables.
    fn run(&self, events: impl Iterator<Item = Event>) -> Result<(), String> {
        self.subject.tables.iter().for_each(FakeTable::clear);
        let mut run = Run::new(self);
        for event in events {
            run.step(event)?;
        }
        run.step(Event::Barrier)?;
        run.step(Event::Ahead)?;
        run.step(Event::Row(0))?;
        run.step(Event::Barrier)
    }

    /// All sequences of so many events; the first that goes wrong.
    fn check(&self, length: u32) -> Result<(), String> {
        let kinds = self.events.len();
        for (prefix, shorter) in &self.prefixes {
            let length = length - shorter;
            for number in 0..kinds.pow(length) {
                let nth = |i: u32| self.events[number / kinds.pow(i) % kinds];
                let events: Vec<Event> =
                    prefix.iter().copied().chain((0..length).map(nth)).collect();
                self.run(events.iter().copied()).map_err(|e| format!("{events:?}: {e}"))?;
            }
        }
        Ok(())
    }
}

pub(super) fn join(kind: JoinKind, storage: RowStorage) -> Model {
    let side = |table: usize| JoinSide {
        keys: vec![0],
        vnode: vec![0],
        state: SideState {
            table,
            storage,
            unique_key: if storage == RowStorage::Keyed { vec![3] } else { vec![] },
            unique_per_key: false,
        },
    };
    let one = schema();
    let fields: Vec<Field> =
        one.fields().iter().chain(one.fields()).map(|f| f.as_ref().clone()).collect();
    let node = Node {
        op: Op::Join(Join {
            kind,
            left: side(0),
            right: side(1),
            residual: None,
            null_aware: false,
            null_equals_null: false,
            output: (0..fields.len()).collect(),
        }),
        inputs: vec![0, 1],
        schema: Arc::new(Schema::new(fields)),
        append_only: storage == RowStorage::Append && kind == JoinKind::Inner,
        marks: vec![],
    };
    let mut events = vec![
        Event::Hint(0),
        Event::Hint(1),
        Event::Row(0),
        Event::Row(1),
        Event::Ahead,
        Event::Demand,
        Event::Barrier,
        Event::Evict,
    ];
    if kind == JoinKind::Inner {
        events.push(Event::LastAhead);
    }
    if storage != RowStorage::Append {
        events.push(Event::Retract(1));
    }
    // Nothing is known of the key; it has rows that are not in memory; those of the left side are; and those of the right
    // side are being read ahead while a row comes there, which an inner join writes blind.
    let stored = vec![Event::Row(0), Event::Row(1), Event::Barrier, Event::Evict];
    let left = [&stored[..], &[Event::Row(1), Event::Demand, Event::Demand]].concat();
    let noted = [&left[..], &[Event::Hint(0), Event::Row(1)]].concat();
    Model {
        subject: Subject {
            node,
            inputs: vec![schema(), schema()],
            tables: (0..2).map(|_| FakeTable::held(schema(), storage)).collect(),
            options: ExecOptions::default(),
            event_time: vec![],
        },
        events,
        prefixes: vec![(vec![], 0), (stored, 0), (left, 0), (noted, 1)],
        expected: match kind {
            JoinKind::LeftOuter => |rows| pairs(rows, true),
            _ => |rows| pairs(rows, false),
        },
    }
}

/// Their inner or left outer join by the key.
pub(super) fn pairs([left, right]: &[ZSet<Row>; 2], outer: bool) -> ZSet<Vec<String>> {
    let print = |row: Row| {
        let mut printed = ZSet::new();
        accumulate(&mut printed, &chunk(&[(row, 1)]));
        printed.into_keys().next().unwrap()
    };
    let mut pairs = ZSet::new();
    for (&l, &weight) in left {
        let partners = right.iter().filter(|(r, _)| r.0 == l.0);
        let mut any = false;
        for (&r, &times) in partners {
            add(&mut pairs, [print(l), print(r)].concat(), weight * times);
            any = true;
        }
        if outer && !any {
            let nothing = vec!["NULL".to_string(); 4];
            add(&mut pairs, [print(l), nothing].concat(), weight);
        }
    }
    pairs
}

fn aggregate() -> Model {
    let call = |func, arg| AggCall {
        func,
        arg,
        distinct: false,
        filter: None,
        output_type: DataType::Int64,
        state: None,
    };
    let calls = vec![call(AggFunc::Count, None), call(AggFunc::Sum, Some(1))];
    let outputs = calls.iter().map(|c| Field::new("c", c.output_type.clone(), true));
    let fields: Vec<Field> = [schema().field(0).clone()].into_iter().chain(outputs).collect();
    let state = accumulator_schema(&[0], &calls, &schema());
    Model {
        subject: Subject {
            node: Node {
                op: Op::Aggregate(Aggregate { vnode: vec![0], group: vec![0], calls, table: 0 }),
                inputs: vec![0],
                schema: Arc::new(Schema::new(fields)),
                append_only: false,
                marks: vec![],
            },
            inputs: vec![schema()],
            tables: vec![FakeTable::held(state, RowStorage::Keyed)],
            options: ExecOptions::default(),
            event_time: vec![],
        },
        events: vec![
            Event::Hint(0),
            Event::Row(0),
            Event::Retract(0),
            Event::Ahead,
            Event::LastAhead,
            Event::Demand,
            Event::Barrier,
            Event::Evict,
            Event::Other,
        ],
        prefixes: vec![
            (vec![], 0),
            (vec![Event::Row(0), Event::Row(0), Event::Barrier, Event::Evict], 0),
            (vec![Event::Row(0), Event::Barrier, Event::Evict, Event::Hint(0)], 0),
        ],
        expected: |[rows, _]| {
            let mut groups: BTreeMap<i64, (i64, i64)> = BTreeMap::new();
            for (row, weight) in rows {
                let group = groups.entry(row.0.unwrap()).or_default();
                *group = (group.0 + weight, group.1 + weight * row.1.unwrap());
            }
            let lines = groups.into_iter();
            lines
                .map(|(k, (n, sum))| ([k, n, sum].iter().map(i64::to_string).collect(), 1))
                .collect()
        },
    }
}

/// How many rows there are, and how many keys: keys are values of the only group, whose state is always answered.
fn distinct() -> Model {
    let call = |arg: Option<usize>, state| AggCall {
        func: AggFunc::Count,
        arg,
        distinct: arg.is_some(),
        filter: None,
        output_type: DataType::Int64,
        state,
    };
    let values = ValueTable { table: 1, descending: false };
    let calls = vec![call(None, None), call(Some(0), Some(values))];
    let fields: Vec<Field> =
        calls.iter().map(|c| Field::new("c", c.output_type.clone(), true)).collect();
    let state = accumulator_schema(&[], &calls, &schema());
    let value = Arc::new(Schema::new(vec![schema().field(0).clone()]));
    Model {
        subject: Subject {
            node: Node {
                op: Op::Aggregate(Aggregate { vnode: vec![], group: vec![], calls, table: 0 }),
                inputs: vec![0],
                schema: Arc::new(Schema::new(fields)),
                append_only: false,
                marks: vec![],
            },
            inputs: vec![schema()],
            tables: vec![
                FakeTable::new(state, RowStorage::Keyed, None),
                FakeTable::held(value, RowStorage::Multiset),
            ],
            options: ExecOptions::default(),
            event_time: vec![],
        },
        events: vec![
            Event::Hint(1),
            Event::Row(0),
            Event::Retract(0),
            Event::Ahead,
            Event::LastAhead,
            Event::Demand,
            Event::Barrier,
            Event::Evict,
            Event::Other,
        ],
        prefixes: vec![
            (vec![], 0),
            (vec![Event::Row(0), Event::Row(0), Event::Barrier, Event::Evict], 0),
            (vec![Event::Row(0), Event::Barrier, Event::Evict, Event::Hint(1)], 0),
        ],
        expected: |[rows, _]| {
            let count: i64 = rows.values().sum();
            let keys: BTreeSet<Option<i64>> = rows.keys().map(|row| row.0).collect();
            BTreeMap::from([(vec![count.to_string(), keys.len().to_string()], 1)])
        },
    }
}

fn models() -> Vec<Model> {
    vec![
        join(JoinKind::Inner, RowStorage::Append),
        join(JoinKind::Inner, RowStorage::Multiset),
        join(JoinKind::LeftOuter, RowStorage::Multiset),
        join(JoinKind::LeftOuter, RowStorage::Keyed),
        aggregate(),
        distinct(),
    ]
}

#[test]
fn no_sequence_of_hints_rows_and_answers_changes_a_result() {
    let _unplanted = PLANTED.read();
    let length = if random_tests::is_long() { 5 } else { 3 };
    for model in models() {
        model.check(length).unwrap();
    }
}

/// What is announced is asked for when the operator is next polled: rows come before and after.
#[test]
fn no_sequence_changes_a_result_where_keys_are_collected() {
    let _unplanted = PLANTED.read();
    let length = if random_tests::is_long() { 5 } else { 3 };
    for mut model in models() {
        model.subject.options.prefetch_window = Duration::from_nanos(1);
        // Whatever comes after a key has been announced.
        model
            .prefixes
            .extend([(vec![Event::Row(0), Event::Barrier, Event::Evict, Event::Hint(0)], 0)]);
        model.check(length).unwrap();
    }
}

#[test]
fn every_planted_bug_of_prefetches_is_noticed() {
    let _alone = PLANTED.write();
    for (bug, _) in PREFETCH_BUGS {
        plant(Some(bug));
        // A bug may break an invariant that debug builds check.
        let missed = std::panic::catch_unwind(|| {
            // What changes no result of a model is seen here.
            due_entries_leave_last();
            bounds_hold_for_what_was_read_before();
            models().iter().all(|m| m.check(3).is_ok())
        });
        plant(None);
        assert!(!missed.unwrap_or(false), "{bug} was not noticed");
    }
}
