//! Lookup joins: what a left row has met is what there was at its epoch, whatever becomes of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::datatypes::{Field, Schema};
use datafusion::logical_expr::Operator as BinaryOp;
use datafusion::physical_expr::expressions::{BinaryExpr, Column};
use futures::FutureExt;
use millrace_common::Epoch;
use millrace_common::keys::columns_at;
use millrace_graph::state::matches_schema;
use millrace_graph::{JoinSide, Lookup, Matches, Node, Operator as Op, SideState};
use millrace_rpc::catalog::RowStorage;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::fake::FakeTable;
use super::history::{History, Kind, Row, ZSet, accumulate, add, chunk, schema, text};
use super::model::PLANTED;
use super::seeded;
use super::stateful::{Subject, delay, kind, random_options, run_epoch, show, storage};
use crate::lookahead::{DELETED_PORT, Due, Hint, HintTimes};
use crate::operator::{Operator, Output};
use crate::options::ExecOptions;

/// What each copy of a left row has met, in the order they came.
type Met = BTreeMap<Row, Vec<ZSet<Vec<String>>>>;

struct Case {
    outer: bool,
    residual: bool,
}

fn line(r: &Row) -> Vec<String> {
    vec![show(r.0), show(r.1), text(r.2).unwrap_or("NULL".into()), r.3.to_string()]
}

impl Case {
    fn meet(&self, l: &Row, right: &ZSet<Row>) -> ZSet<Vec<String>> {
        let mut met = ZSet::new();
        for (r, weight) in right {
            let passes = !self.residual || matches!((l.1, r.1), (Some(a), Some(b)) if a < b);
            if l.0.is_some() && l.0 == r.0 && passes {
                add(&mut met, [line(l), line(r)].concat(), *weight);
            }
        }
        if met.is_empty() && self.outer {
            add(&mut met, [line(l), vec!["NULL".to_string(); 4]].concat(), 1);
        }
        met
    }

    /// Takes an epoch's left changes in; the right side is as it is at the end of the epoch.
    fn take(&self, met: &mut Met, left: &[(Row, i64)], right: &ZSet<Row>) {
        let mut net = ZSet::new();
        left.iter().for_each(|(row, weight)| add(&mut net, *row, *weight));
        for (row, weight) in net {
            let copies = met.entry(row).or_default();
            for _ in weight..0 {
                copies.pop();
            }
            copies.extend((0..weight).map(|_| self.meet(&row, right)));
        }
    }
}

fn subject(case: &Case, kinds: [Kind; 2], rng: &mut StdRng) -> Subject {
    let right = JoinSide {
        keys: vec![0],
        vnode: vec![0],
        state: SideState {
            table: 0,
            storage: storage(kinds[1]),
            unique_key: if kinds[1] == Kind::Keyed { vec![3] } else { vec![] },
            unique_per_key: false,
        },
    };
    let column = |name, c| Arc::new(Column::new(name, c));
    let expr = BinaryExpr::new(column("v", 1), BinaryOp::Lt, column("v", 5));
    let one = schema();
    let fields: Vec<Field> =
        one.fields().iter().chain(one.fields()).map(|f| f.as_ref().clone()).collect();
    let delay = delay(rng);
    Subject {
        node: Node {
            op: Op::Lookup(Lookup {
                outer: case.outer,
                left_keys: vec![0],
                left_vnode: vec![0],
                right,
                residual: case.residual.then(|| Arc::new(expr) as _),
                output: (0..fields.len()).collect(),
                matches: (kinds[0] != Kind::Append).then(|| Matches {
                    table: 1,
                    identity: storage(kinds[0]),
                    unique_key: if kinds[0] == Kind::Keyed { vec![3] } else { vec![] },
                }),
            }),
            inputs: vec![0, 1],
            schema: Arc::new(Schema::new(fields)),
            append_only: kinds[0] == Kind::Append,
            marks: vec![],
        },
        inputs: vec![schema(), schema()],
        tables: vec![
            FakeTable::new(schema(), storage(kinds[1]), delay),
            FakeTable::new(matches_schema(&schema()), RowStorage::Keyed, delay),
        ],
        options: random_options(rng),
        event_time: vec![],
    }
}

#[test]
fn left_rows_keep_what_they_met_at_their_epoch() {
    let _unplanted = PLANTED.read();
    for (seed, ref mut rng) in seeded(200, 2000) {
        let kinds = [kind(rng), kind(rng)];
        let case = Case { outer: rng.random_bool(0.5), residual: rng.random_bool(0.4) };
        let subject = subject(&case, kinds, rng);
        let mut histories = kinds.map(|k| History::new(k, 4));
        let (mut actual, mut met) = (ZSet::new(), Met::new());
        let mut op = subject.build();
        for epoch in 0..rng.random_range(1..8) {
            let right = histories[1].epoch(rng);
            let left = histories[0].epoch(rng);
            case.take(&mut met, &left, &histories[1].content);
            // The task brings the right side's rows first.
            let deltas = right.into_iter().map(|d| (1, d)).chain(left.into_iter().map(|d| (0, d)));
            let deltas = deltas.collect();
            futures::executor::block_on(run_epoch(op.as_mut(), deltas, rng, &mut actual, &subject));
            let mut expected = ZSet::new();
            for pairs in met.values().flatten() {
                pairs.iter().for_each(|(row, weight)| add(&mut expected, row.clone(), *weight));
            }
            assert_eq!(
                actual, expected,
                "seed {seed} epoch {epoch} {kinds:?} {:?}",
                subject.options
            );
            if rng.random_bool(0.3) {
                op = subject.restart(Some(op.as_ref()));
            }
        }
        // When all is taken back nothing stays behind.
        if kinds[0] != Kind::Append {
            let gone = histories[0].content.iter().map(|(row, weight)| (0, (*row, -weight)));
            let gone = gone.collect();
            futures::executor::block_on(run_epoch(op.as_mut(), gone, rng, &mut actual, &subject));
            assert_eq!(actual, ZSet::new(), "seed {seed}");
        }
        assert_eq!(subject.tables[1].len(), 0, "seed {seed}");
    }
}

/// A lookup under way, whose left rows are all alike but for their id; the table of what they have met is read when the test
/// says so. There is one right row that they meet.
struct Announced {
    subject: Subject,
    op: Box<dyn Operator>,
    told_by: Vec<usize>,
    shown: ZSet<Vec<String>>,
}

fn left(id: i64) -> Row {
    (Some(1), Some(2), None, id)
}

impl Announced {
    fn new(kind: Kind) -> Announced {
        let case = Case { outer: false, residual: false };
        let mut subject = subject(&case, [kind, Kind::Keyed], &mut StdRng::seed_from_u64(1));
        let matches = FakeTable::held(matches_schema(&schema()), RowStorage::Keyed);
        let right = FakeTable::new(schema(), RowStorage::Keyed, None);
        (subject.tables, subject.options) = (vec![right, matches], ExecOptions::default());
        let Op::Lookup(lookup) = &subject.node.op else { unreachable!("it is one") };
        let told_by = lookup.told_by(schema().fields().len()).unwrap();
        let op = subject.build();
        let mut new = Announced { subject, op, told_by, shown: ZSet::new() };
        new.push(1, (Some(1), Some(7), None, 100), 1);
        new
    }

    fn push(&mut self, port: usize, row: Row, weight: i64) {
        let mut out = Output::default();
        self.op.push(port, chunk(&[(row, weight)]), &mut out).unwrap();
        assert_eq!(out.rows(), 0, "rows meet others at the barrier");
    }

    fn barrier(&mut self) {
        let mut out = Output::default();
        self.op.barrier(&mut out).now_or_never().unwrap().unwrap();
        self.op.seal(&mut Vec::new()).unwrap();
        out.take().iter().for_each(|chunk| accumulate(&mut self.shown, chunk));
    }

    /// A left row will be deleted.
    fn announce(&mut self, id: i64, due: Due) {
        let batch = chunk(&[(left(id), -1)]).batch;
        let (columns, times) = (columns_at(&batch, &self.told_by), HintTimes::None);
        let hint = Hint { node: 0, port: DELETED_PORT, columns, times, due, carried: None };
        self.op.hint(DELETED_PORT, &hint).unwrap();
    }

    /// A read is answered.
    fn answer(&mut self, ahead: bool) {
        assert!(self.subject.tables[1].answer_one(ahead, false), "nothing is asked for");
        self.op.progress(&mut Output::default()).now_or_never().unwrap().unwrap();
    }

    fn reads(&self) -> usize {
        *self.subject.tables[1].rounds.lock()
    }
}

#[test]
fn what_a_deleted_row_had_met_is_there_if_that_was_announced() {
    let _unplanted = PLANTED.read();
    let mut shown = Vec::new();
    for is_announced in [true, false] {
        let mut of = Announced::new(Kind::Keyed);
        of.push(0, left(1), 1);
        of.push(0, left(2), 1);
        of.barrier();
        assert_eq!((of.reads(), of.shown.len()), (0, 2), "rows that are added read nothing");
        if is_announced {
            of.announce(1, Due::default());
            assert!(of.op.is_prefetching() && !of.op.is_pending());
            of.answer(true);
            assert!(!of.op.is_prefetching());
        }
        of.push(0, left(1), -1);
        assert_eq!((of.op.is_pending(), of.reads()), (!is_announced, 1));
        if !is_announced {
            of.answer(false);
        }
        of.barrier();
        assert_eq!(of.shown.len(), 1);
        shown.push(of.shown);
    }
    assert_eq!(shown[0], shown[1]);
}

#[test]
fn a_deleted_row_that_overtakes_what_is_read_ahead_asks_for_itself() {
    let _unplanted = PLANTED.read();
    for is_first in [true, false] {
        let mut of = Announced::new(Kind::Keyed);
        of.push(0, left(1), 1);
        of.barrier();
        of.announce(1, Due::default());
        of.push(0, left(1), -1);
        assert!(of.op.is_pending());
        of.answer(is_first);
        assert_eq!(of.op.is_pending(), is_first, "only its own answer counts");
        of.answer(!is_first);
        of.barrier();
        assert_eq!((of.shown, of.subject.tables[1].len()), (ZSet::new(), 0));
    }
}

/// Another copy of the row comes after the question: what was found of the first alone is no answer any more.
#[test]
fn what_is_written_since_makes_what_was_read_ahead_stale() {
    let _unplanted = PLANTED.read();
    for is_answered in [true, false] {
        let mut of = Announced::new(Kind::Multiset);
        of.push(0, left(1), 1);
        of.barrier();
        of.announce(1, Due::default());
        if is_answered {
            of.answer(true);
        }
        of.push(0, left(1), 1);
        of.barrier();
        if !is_answered {
            of.answer(true);
        }
        of.push(0, left(1), -2);
        assert!(of.op.is_pending(), "it reads both copies");
        of.answer(false);
        of.barrier();
        assert_eq!((of.shown, of.subject.tables[1].len()), (ZSet::new(), 0));
    }
}

#[test]
fn what_was_read_ahead_is_kept_until_its_epoch_has_passed() {
    let _unplanted = PLANTED.read();
    for (passed, is_kept) in [(4, true), (5, false)] {
        let mut of = Announced::new(Kind::Keyed);
        of.push(0, left(1), 1);
        of.barrier();
        of.announce(1, Due::at(5));
        of.answer(true);
        of.op.time(Epoch(passed));
        of.barrier();
        of.push(0, left(1), -1);
        assert_eq!(of.op.is_pending(), !is_kept, "after epoch {passed}");
    }
}

#[test]
fn hints_that_are_none_of_deleted_rows_are_dropped() {
    let _unplanted = PLANTED.read();
    let mut of = Announced::new(Kind::Keyed);
    of.push(0, left(1), 1);
    of.barrier();
    of.told_by.pop();
    of.announce(1, Due::default());
    of.told_by = vec![0, 2];
    of.announce(1, Due::default());
    assert_eq!((of.reads(), of.op.is_prefetching()), (0, false));
}
