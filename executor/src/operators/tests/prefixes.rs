//! What is read ahead under prefixes: it is there part by part, and takes a bounded room, on its way too.

use std::sync::Arc;

use arrow::array::{ArrayRef, BinaryArray, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use futures::FutureExt;
use millrace_common::{EnvHandle, Epoch};
use millrace_rpc::catalog::RowStorage;

use super::fake::FakeTable;
use crate::error_sink::ErrorSink;
use crate::lookahead::Due;
use crate::memory::{MemoryClass, MemoryGovernor};
use crate::operators::Env;
use crate::options::ExecOptions;
use crate::state::prefixes_ahead::Kept;
use crate::state::{PrefixesAhead, StateTable};
use crate::stats::{LookaheadStats, OperatorMetrics};

/// Bytes that may be kept.
const ROOM: usize = 10_000;
/// What a prefix takes beside its own bytes, and what is expected under the first ones.
const ENTRY: usize = 128;

/// Reads come in two parts: of every other prefix, from the second one on, and then of the others.
struct Case {
    table: FakeTable,
    ahead: PrefixesAhead,
    env: Env,
}

pub fn prefix(n: u16) -> Vec<u8> {
    n.to_be_bytes().to_vec()
}

/// Under each of these prefixes there is a text of so many bytes. It is answered at once.
pub fn table(prefixes: &[u16], bytes: usize) -> FakeTable {
    let field = Field::new("text", DataType::Utf8, false);
    let schema: SchemaRef = Arc::new(Schema::new(vec![field]));
    let mut table = FakeTable::new(Arc::clone(&schema), RowStorage::Keyed, None);
    let keys = prefixes.iter().map(|&n| [prefix(n), vec![0]].concat());
    let keys = BinaryArray::from_iter_values(keys);
    let texts = prefixes.iter().map(|_| "x".repeat(bytes));
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
    table.write(keys, None, RecordBatch::try_new(schema, vec![texts]).unwrap()).unwrap();
    table
}

pub fn env() -> Env {
    Env {
        options: Arc::new(ExecOptions { cache_bytes: 4 * ROOM, ..ExecOptions::default() }),
        errors: Arc::new(ErrorSink::default()),
        metrics: OperatorMetrics::new(0, 0, "test"),
        clock: EnvHandle::default(),
        governor: MemoryGovernor::new(1 << 30),
        lookahead: Arc::default(),
        shed: Arc::default(),
        vnodes: 0..256,
        event_time: Vec::new(),
        restored: Epoch::ZERO,
        first_arrival: 0,
    }
}

impl Case {
    /// Of [`table`].
    fn new(prefixes: &[u16], bytes: usize) -> Case {
        let (table, env) = (table(prefixes, bytes).held_in_parts(), env());
        Case { table, ahead: PrefixesAhead::new(&env), env }
    }

    fn hint(&mut self, prefixes: impl IntoIterator<Item = Vec<u8>>) {
        let prefixes = BinaryArray::from_iter_values(prefixes);
        self.ahead.hint(&prefixes, &Due::default(), &self.table);
    }

    /// A part of a read is answered.
    fn answer(&mut self) {
        assert!(self.table.answer_one(true, false), "nothing is asked for");
        self.ahead.completed().now_or_never().expect("the part is taken in");
    }

    /// How many rows are there for a row that comes; `None`: it has to ask for them.
    fn take(&mut self, n: u16) -> Option<usize> {
        let Kept { answer, rows, .. } = self.ahead.take(&prefix(n))?;
        assert!(rows.clone().all(|row| answer.keys.value(row).starts_with(&prefix(n))));
        Some(rows.len())
    }

    fn told(&self) -> LookaheadStats {
        self.env.metrics.lookahead.read()
    }

    fn held(&self) -> usize {
        self.env.governor.used_by(MemoryClass::Cache)
    }
}

#[test]
fn each_part_is_there_before_the_next_one_is() {
    let mut case = Case::new(&[1, 2], 10);
    case.hint([1, 2, 3].map(prefix));
    case.answer();
    assert_eq!((case.take(2), case.take(1)), (Some(1), None));
    assert!(case.ahead.is_reading());
    case.answer();
    assert!(!case.ahead.is_reading());
    assert_eq!((case.take(3), case.told().stale), (Some(0), 1), "its row did not wait");
    assert_eq!(case.held(), 0, "nothing is kept any more");
}

/// How long reads take and how long rows wait is told apart: hints are judged by the latter.
#[test]
fn only_what_rows_have_waited_for_is_a_wait() {
    let mut case = Case::new(&[1, 2], 10);
    case.hint([1, 2].map(prefix));
    case.answer();
    let (notes, _) = case.ahead.pass(Epoch(2));
    assert!(notes.slowest.is_some() && notes.waited.is_none(), "{notes:?}");
    case.ahead.note_wait(case.env.clock.now());
    let (notes, _) = case.ahead.pass(Epoch(3));
    assert!(notes.waited.is_some() && notes.slowest == notes.waited, "{notes:?}");
}

#[test]
fn what_does_not_fit_any_more_is_not_read() {
    let mut case = Case::new(&[1, 2, 3, 4], 4_000);
    case.hint([1, 2, 3, 4].map(prefix));
    case.answer();
    assert_eq!((case.ahead.is_reading(), case.table.waiting()), (false, 0));
    assert_eq!(case.told().dropped, 2);
    assert!((8_000..=ROOM).contains(&case.held()), "{}", case.held());
    assert_eq!([1, 2, 3, 4].map(|n| case.take(n)), [None, Some(1), None, Some(1)]);
}

#[test]
fn what_is_on_its_way_takes_room() {
    let mut case = Case::new(&[], 0);
    case.hint((0..50).map(prefix));
    case.hint((50..100).map(prefix));
    let fit = (ROOM / (2 * ENTRY + 2 * prefix(0).len())) as u64;
    assert!(fit < 50);
    assert_eq!((case.told().prefetched, case.told().dropped), (fit, 100 - fit));
    // There was nothing under them, so less is expected of others.
    case.answer();
    case.answer();
    case.hint((50..100).map(prefix));
    assert!(case.told().prefetched > fit);
}

#[test]
fn long_prefixes_take_room_and_very_long_ones_are_not_read_ahead() {
    let mut case = Case::new(&[], 0);
    let long = |n: u8, bytes: usize| vec![n; bytes];
    case.hint([long(0, 4_097), long(1, 3_000), long(2, 3_000), long(3, 10)]);
    assert_eq!((case.told().prefetched, case.told().dropped), (2, 2));
    assert!((3_000..=ROOM).contains(&case.held()), "{}", case.held());
    drop(case.ahead);
    assert_eq!(case.env.governor.used_by(MemoryClass::Cache), 0);
}
