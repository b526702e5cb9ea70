//! Chained hints: what the keys of one lookahead find brings the keys of the next (docs/design.md §8).
//!
//! A hint of a lookahead that others are chained to carries columns of the hinted rows. The operator that takes it in
//! pairs them with the rows that it has in memory for the keys, or reads ahead, and gives the pairs away through a
//! [`Chain`]. The job's [`ChainWalker`] computes the next keys and sends them to the tasks that own them, as it would be
//! done for rows. Nothing is paired unless an operator further on wants hints, nothing waits for room, and pairs are
//! worth no more than the hints that they come from.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::{Array, ArrayRef, RecordBatch, UInt32Array};
use arrow::compute::{interleave, take};
use arrow::datatypes::SchemaRef;
use millrace_graph::lookahead::{Chained, Lookahead, Place};
use tokio::sync::mpsc;

use super::Due;
use super::operator::OperatorLookahead;
use super::route::Route;
use super::slack::Side;
use crate::error::ExecError;
use crate::memory::{MemoryClass, MemoryGovernor, Reservation};
use crate::operators::nullable;
use crate::state::arena::{column_bytes, new_batch};

/// Rows that are paired with a hinted one at most.
pub const MAX_MATCHES: usize = 16;
/// Lists of pairs that wait for the walker at most.
pub const QUEUE: usize = 64;
/// Pairs of one list at most.
pub const LIST_PAIRS: usize = 1024;
/// Bytes of one list at most, and of what the rows that are met together bring to the lists: pairs with larger rows are
/// dropped.
pub const LIST_BYTES: usize = 256 << 10;

/// What a hint brings along for the lookaheads that are chained to it.
pub struct Carried {
    pub chain: Arc<Chain>,
    /// A value for each key of the hint.
    pub columns: Vec<ArrayRef>,
    pub due: Due,
    /// The operator itself wants no hints: what is not in memory is not read for this one.
    pub is_alone: bool,
    /// Of the columns.
    pub account: Reservation,
}

impl Carried {
    /// Of the columns.
    pub fn bytes(&self) -> usize {
        self.account.bytes()
    }

    /// The same with other columns, whatever they are.
    pub fn with_columns(&self, columns: Vec<ArrayRef>) -> Carried {
        let mut account = self.account.another();
        account.set(columns.iter().map(column_bytes).sum());
        let (chain, due) = (Arc::clone(&self.chain), self.due.clone());
        Carried { chain, columns, due, is_alone: self.is_alone, account }
    }
}

/// Of one lookahead: those that are chained to it.
#[derive(Debug)]
pub struct Chain {
    /// The lookahead's number in the job.
    stage: usize,
    /// The input that is hinted.
    pub port: usize,
    /// How many columns a hint carries.
    carried: usize,
    /// The columns of the other input that are needed.
    pub met: Vec<usize>,
    next: Vec<Next>,
    pairs: mpsc::Sender<Pairs>,
    /// Rows and pairs for which there was no room.
    missed: AtomicU64,
}

/// The operator of a lookahead that is chained.
#[derive(Debug)]
struct Next {
    tasks: Vec<Arc<OperatorLookahead>>,
    /// Its input.
    side: Option<Arc<Side>>,
    /// Those that are chained to it.
    chain: Option<Arc<Chain>>,
}

/// What one question has found of chains: many ways may lead to the same one, which is asked once.
#[derive(Debug, Default)]
pub struct Walk(Vec<(*const Chain, bool)>);

impl Next {
    /// Hints are wanted here or further on. Most operators want none, so that is asked first.
    fn is_wanted_in(&self, walk: &mut Walk) -> bool {
        // What is chained to keys that come too late comes later still.
        if self.side.as_ref().is_some_and(|side| side.is_left_out()) {
            return false;
        }
        let is_active = self.tasks.iter().any(|task| task.is_active());
        if is_active && self.side.as_ref().is_none_or(|side| side.looks_ahead_in(walk)) {
            return true;
        }
        self.chain.as_ref().is_some_and(|chain| chain.is_wanted_in(walk))
    }
}

/// Hinted rows with rows that they meet.
struct Pairs {
    stage: usize,
    /// What the hint has carried, then [`Chain::met`].
    columns: Vec<ArrayRef>,
    rows: usize,
    due: Due,
    /// Of the columns, as long as the list waits.
    account: Reservation,
}

impl Chain {
    /// Some operator further on wants hints.
    pub fn is_wanted(&self) -> bool {
        self.is_wanted_in(&mut Walk::default())
    }

    /// The same, as a part of a walk.
    pub fn is_wanted_in(&self, walk: &mut Walk) -> bool {
        let own = std::ptr::from_ref(self);
        if let Some((_, is_wanted)) = walk.0.iter().find(|(chain, _)| std::ptr::eq(*chain, own)) {
            return *is_wanted;
        }
        let at = walk.0.len();
        walk.0.push((own, false));
        let is_wanted = self.next.iter().any(|next| next.is_wanted_in(walk));
        walk.0[at].1 = is_wanted;
        is_wanted
    }

    /// So many rows, of hints or that are met, are given to nobody.
    pub fn note_missed(&self, rows: usize) {
        self.missed.fetch_add(rows as u64, Ordering::Relaxed);
    }

    /// Gives away pairs: rows of hints, each told by the place of its hint and its number there, and column by column the
    /// rows that they meet. The hints are of this chain and of one epoch. Never waits.
    pub fn give(
        &self,
        hints: &[&Carried],
        rows: &[(usize, usize)],
        met: &[ArrayRef],
        governor: &Arc<MemoryGovernor>,
    ) -> Result<(), ExecError> {
        let Some(due) = hints.first().map(|hint| &hint.due) else { return Ok(()) };
        for from in (0..rows.len()).step_by(LIST_PAIRS) {
            let part = &rows[from..rows.len().min(from + LIST_PAIRS)];
            let Ok(place) = self.pairs.try_reserve() else {
                self.note_missed(rows.len() - from);
                break;
            };
            let mut columns = picked(hints, part)?;
            columns.extend(met.iter().map(|c| c.slice(from, part.len())));
            let bytes = columns.iter().map(column_bytes).sum();
            if bytes > LIST_BYTES {
                self.note_missed(part.len());
                continue;
            }
            let mut account = governor.account(MemoryClass::Channel);
            account.set(bytes);
            let (stage, due) = (self.stage, due.clone());
            place.send(Pairs { stage, columns, rows: part.len(), due, account });
        }
        Ok(())
    }
}

/// What hints carry for these rows of theirs. Hints of different columns have nothing in common.
fn picked(hints: &[&Carried], rows: &[(usize, usize)]) -> Result<Vec<ArrayRef>, ExecError> {
    if let [only] = hints {
        let rows = UInt32Array::from_iter_values(rows.iter().map(|(_, row)| *row as u32));
        let taken = only.columns.iter().map(|column| take(column, &rows, None));
        return Ok(taken.collect::<Result<Vec<ArrayRef>, _>>()?);
    }
    let width = hints.first().map_or(0, |hint| hint.columns.len());
    if hints.iter().any(|hint| hint.columns.len() != width) {
        return Err(ExecError::internal("hints of one chain carry different columns"));
    }
    let column = |at: usize| {
        let values: Vec<&dyn Array> = hints.iter().map(|hint| hint.columns[at].as_ref()).collect();
        interleave(&values, rows)
    };
    Ok((0..width).map(column).collect::<Result<Vec<ArrayRef>, _>>()?)
}

/// The chains of a job.
pub struct Chains {
    /// By the number of a lookahead.
    of: Vec<Option<Arc<Chain>>>,
    pairs: mpsc::Receiver<Pairs>,
}

impl Chains {
    /// Of these lookaheads. `tasks`: the instances of a lookahead's operator; `side`: the operator's input.
    pub fn new(
        lookaheads: &[(Lookahead, Vec<Place>)],
        tasks: impl Fn(&Lookahead) -> Vec<Arc<OperatorLookahead>>,
        side: impl Fn(&Lookahead) -> Option<Arc<Side>>,
    ) -> Chains {
        let (sender, pairs) = mpsc::channel(QUEUE);
        let mut of: Vec<Option<Arc<Chain>>> = vec![None; lookaheads.len()];
        // Those that come last first.
        let mut stages: Vec<usize> = (0..lookaheads.len()).collect();
        stages.sort_by_key(|&stage| std::cmp::Reverse(lookaheads[stage].0.depth));
        for stage in stages {
            let chained = lookaheads.iter().enumerate().filter_map(|(i, (l, _))| {
                let chained = l.chained.as_ref().filter(|c| c.after == stage)?;
                Some((chained, Next { tasks: tasks(l), side: side(l), chain: of[i].clone() }))
            });
            let (chained, next): (Vec<&Chained>, Vec<Next>) = chained.unzip();
            let met: BTreeSet<usize> = chained.iter().flat_map(|c| c.met.iter().copied()).collect();
            let before = &lookaheads[stage].0;
            of[stage] = (!next.is_empty()).then(|| {
                Arc::new(Chain {
                    stage,
                    port: before.port,
                    carried: before.carried.len(),
                    met: met.into_iter().collect(),
                    next,
                    pairs: sender.clone(),
                    missed: AtomicU64::new(0),
                })
            });
        }
        Chains { of, pairs }
    }

    /// What is chained to the lookahead of this number.
    pub fn of(&self, stage: usize) -> Option<Arc<Chain>> {
        self.of.get(stage)?.clone()
    }

    /// For the routes of lookaheads that are chained. `None`: there are none.
    pub fn walker(self, routes: Vec<(&Lookahead, Route)>) -> Option<ChainWalker> {
        let route = |(lookahead, route): (&Lookahead, Route)| {
            let chained = lookahead.chained.as_ref()?;
            let chain = self.of(chained.after)?;
            let met = chained.met.iter().map(|c| chain.met.binary_search(c).ok());
            let met = met.map(|at| Some(chain.carried + at?));
            let columns = (0..chain.carried).map(Some).chain(met).collect::<Option<Vec<_>>>()?;
            let schema = nullable(&lookahead.input);
            Some(ChainRoute { chain, columns, schema, route })
        };
        let routes: Vec<ChainRoute> = routes.into_iter().filter_map(route).collect();
        (!routes.is_empty()).then_some(ChainWalker { pairs: self.pairs, routes })
    }
}

/// Lookaheads without those that are left out and those that are chained to one of these; their numbers change.
pub fn without_gaps(all: Vec<Option<(Lookahead, Vec<Place>)>>) -> Vec<(Lookahead, Vec<Place>)> {
    let mut number: Vec<Option<usize>> = vec![None; all.len()];
    let mut order: Vec<usize> = (0..all.len()).filter(|&i| all[i].is_some()).collect();
    order.sort_by_key(|&i| all[i].as_ref().map(|(l, _)| l.depth));
    let mut all = all;
    let mut kept = Vec::with_capacity(order.len());
    for i in order {
        let Some((mut lookahead, places)) = all[i].take() else { continue };
        if let Some(chained) = &mut lookahead.chained {
            let Some(after) = number.get(chained.after).copied().flatten() else { continue };
            chained.after = after;
        }
        number[i] = Some(kept.len());
        kept.push((lookahead, places));
    }
    kept
}

/// A lookahead that is chained.
struct ChainRoute {
    /// To this.
    chain: Arc<Chain>,
    /// Of the steps' input, by position among what is given away.
    columns: Vec<usize>,
    schema: SchemaRef,
    route: Route,
}

impl ChainRoute {
    fn look(&mut self, pairs: &Pairs) -> Result<(), ExecError> {
        let rows = rows_of(pairs, &self.columns, &self.schema)?;
        self.route.look(rows, &pairs.due)
    }
}

/// What the steps take of pairs: these columns. A hint may have carried anything, so they need not be of the schema.
fn rows_of(pairs: &Pairs, columns: &[usize], schema: &SchemaRef) -> Result<RecordBatch, ExecError> {
    let column = |&c: &usize| pairs.columns.get(c).cloned();
    let columns = columns.iter().map(column).collect::<Option<Vec<ArrayRef>>>();
    let missing = || ExecError::internal("a pair of a chained hint without a column");
    new_batch(schema, columns.ok_or_else(missing)?, pairs.rows)
}

/// See the module. One for each job that has lookaheads which are chained.
pub struct ChainWalker {
    pairs: mpsc::Receiver<Pairs>,
    routes: Vec<ChainRoute>,
}

impl ChainWalker {
    /// Until the job ends.
    pub async fn run(mut self) {
        while let Some(pairs) = self.pairs.recv().await {
            let behind = |r: &&mut ChainRoute| r.chain.stage == pairs.stage;
            // The pairs are made for hints alone; they count once, however many lookaheads follow.
            let mut made = pairs.account.bytes();
            for route in self.routes.iter_mut().filter(behind) {
                let missed = route.chain.missed.swap(0, Ordering::Relaxed);
                route.route.note_dropped(missed);
                if !route.route.is_active() || !route.route.looks_at_chained() {
                    continue;
                }
                route.route.note_bytes(std::mem::take(&mut made));
                if let Err(error) = route.look(&pairs) {
                    // The job's own rows will tell, if it is of any importance.
                    tracing::debug!(%error, "keys of chained hints could not be computed");
                }
                route.route.note_chained(&pairs.due);
            }
            tokio::task::yield_now().await;
        }
    }
}

/// A chain to an operator with these instances, which gives to nobody.
#[cfg(test)]
pub fn chain_to(tasks: Vec<Arc<OperatorLookahead>>) -> Arc<Chain> {
    chain_of(vec![Next { tasks, side: None, chain: None }])
}

#[cfg(test)]
fn chain_of(next: Vec<Next>) -> Arc<Chain> {
    let (met, missed, pairs) = (vec![], AtomicU64::new(0), mpsc::channel(1).0);
    Arc::new(Chain { stage: 0, port: 0, carried: 0, met, next, pairs, missed })
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int64Array, StringArray, new_null_array};
    use arrow::datatypes::{DataType, Field, Schema};

    use tokio::time::Instant;

    use super::super::choice::MIN_EPOCHS;
    use super::super::operator::{Activation, EpochReads};
    use super::super::slack::{EpochNotes, OperatorEpochs, Spot};
    use super::*;

    const INSIDE: Spot = Spot { is_own: true, place: Place::Input };

    /// Each chain is reached by several ways from the one before: to ask it each time would take forever.
    #[test]
    fn a_question_visits_each_chain_once() {
        let last = OperatorLookahead::new(&Arc::default());
        let governor = MemoryGovernor::new(1 << 30);
        let mut wish = Activation::new(&last, &governor, 1.0);
        let active = OperatorLookahead::new(&Arc::default());
        let mut busy = Activation::new(&active, &governor, 1.0);
        busy.epoch(EpochReads { missed: 1, ..EpochReads::default() });
        let mut chain = chain_to(vec![last]);
        for _ in 0..64 {
            let input = Arc::new(Side::new(0, vec![INSIDE]));
            input.set_chains(vec![Arc::clone(&chain)]);
            let next = || Next {
                tasks: vec![Arc::clone(&active)],
                side: Some(Arc::clone(&input)),
                chain: Some(Arc::clone(&chain)),
            };
            chain = chain_of(vec![next(), next()]);
        }
        assert!(!chain.is_wanted(), "rows inside the job bring the keys of all but the last");
        wish.epoch(EpochReads { missed: 1, ..EpochReads::default() });
        assert!(chain.is_wanted());
    }

    /// Keys that are chained to those of a step that come too late would come later still.
    #[test]
    fn nothing_is_chained_to_a_step_that_is_left_out() {
        let governor = MemoryGovernor::new(1 << 30);
        let tasks = [0, 1].map(|_| OperatorLookahead::new(&Arc::default()));
        let mut wishes = tasks.each_ref().map(|task| Activation::new(task, &governor, 1.0));
        for wish in &mut wishes {
            wish.epoch(EpochReads { missed: 1, ..EpochReads::default() });
        }
        let [step, last] = tasks;
        let entry = Spot { is_own: true, place: Place::Entry };
        let side = Arc::new(Side::new(0, vec![entry]).chained());
        let (tasks, further) = (vec![step], Some(chain_to(vec![last])));
        let chain = chain_of(vec![Next { tasks, side: Some(Arc::clone(&side)), chain: further }]);
        assert!(chain.is_wanted());
        let epochs = OperatorEpochs::default();
        epochs.join();
        let began = [Some(Instant::now()), None, None];
        let late = EpochNotes { began, used: 9, late: 9, missed: 9, ..EpochNotes::default() };
        for epoch in 2..2 + MIN_EPOCHS as u64 {
            epochs.pass(epoch, &late, &[Arc::clone(&side)]);
        }
        assert!(side.is_left_out() && !chain.is_wanted());
    }

    fn texts(rows: usize, bytes: usize) -> ArrayRef {
        Arc::new(StringArray::from_iter_values((0..rows).map(|_| "x".repeat(bytes))))
    }

    fn numbers() -> ArrayRef {
        Arc::new(Int64Array::from_iter_values(0..10))
    }

    /// A hint of ten rows that carries numbers, and the end of its chain.
    fn carried(governor: &Arc<MemoryGovernor>) -> (Carried, mpsc::Receiver<Pairs>) {
        let (sender, lists) = mpsc::channel(QUEUE);
        let missed = AtomicU64::new(0);
        let chain = Chain {
            stage: 0,
            port: 0,
            carried: 1,
            met: vec![0],
            next: Vec::new(),
            pairs: sender,
            missed,
        };
        let carried = Carried {
            chain: Arc::new(chain),
            columns: vec![numbers()],
            due: Due::default(),
            is_alone: false,
            account: governor.account(MemoryClass::Channel),
        };
        (carried, lists)
    }

    /// Hints may carry anything: other columns, of other types, too few and too many.
    #[tokio::test]
    async fn pairs_of_wrong_columns_are_refused() {
        let governor = MemoryGovernor::new(1 << 30);
        let (right, mut lists) = carried(&governor);
        let fields = [("n", DataType::Int64), ("text", DataType::Utf8)];
        let fields = fields.map(|(name, of)| Field::new(name, of, true));
        let schema: SchemaRef = Arc::new(Schema::new(fields.to_vec()));
        let all = [
            (vec![numbers()], true),
            (vec![new_null_array(&DataType::Int64, 10)], true),
            (vec![new_null_array(&DataType::Null, 10)], false),
            (vec![texts(10, 1)], false),
            (vec![], false),
            (vec![numbers(), numbers()], false),
        ];
        let rows: Vec<(usize, usize)> = (0..10).rev().map(|row| (0, row)).collect();
        for (columns, is_right) in all {
            let carried = right.with_columns(columns);
            carried.chain.give(&[&carried], &rows, &[texts(10, 1)], &governor).unwrap();
            let pairs = lists.try_recv().unwrap();
            assert_eq!(pairs.rows, 10);
            let columns = &pairs.columns;
            let taken = rows_of(&pairs, &[0, 1], &schema);
            assert_eq!(taken.is_ok(), is_right, "{columns:?}: {taken:?}");
        }
        assert_eq!(governor.used(), 0);
    }

    /// Hints of single rows have a key each: what they find is computed further, and sent, once for all of them.
    #[tokio::test]
    async fn rows_of_many_hints_are_one_list() {
        let governor = MemoryGovernor::new(1 << 30);
        let (one, mut lists) = carried(&governor);
        let chain = &one.chain;
        let number = |n: i64| -> Vec<ArrayRef> { vec![Arc::new(Int64Array::from(vec![n, -n]))] };
        let hints = [7, 8, 9].map(|n| one.with_columns(number(n)));
        let hints: Vec<&Carried> = hints.iter().collect();
        let rows = [(2, 0), (0, 1), (1, 0), (0, 1)];
        chain.give(&hints, &rows, &[numbers().slice(0, 4)], &governor).unwrap();
        let pairs = lists.try_recv().unwrap();
        let expected: [ArrayRef; 2] =
            [Arc::new(Int64Array::from(vec![9, -7, 8, -7])), numbers().slice(0, 4)];
        assert_eq!((pairs.rows, pairs.columns.as_slice()), (4, &expected[..]));
        assert!(lists.try_recv().is_err(), "a second list");
        // What has nothing in common is not put together.
        for wrong in [vec![], vec![texts(2, 1)]] {
            let wrong = one.with_columns(wrong);
            let rows = [(0, 0), (1, 0)];
            assert!(chain.give(&[hints[0], &wrong], &rows, &[texts(2, 1)], &governor).is_err());
            assert!(lists.try_recv().is_err());
        }
    }

    #[tokio::test]
    async fn lists_have_a_bound_in_bytes_and_are_accounted() {
        let governor = MemoryGovernor::new(1 << 30);
        let (carried, mut lists) = carried(&governor);
        let chain = &carried.chain;
        let rows: Vec<(usize, usize)> = (0..10).map(|row| (0, row)).collect();
        let bytes = LIST_BYTES / 10;
        chain.give(&[&carried], &rows, &[texts(10, bytes)], &governor).unwrap();
        assert!(lists.try_recv().is_err(), "with the other column it is too much");
        assert_eq!((governor.used(), chain.missed.load(Ordering::Relaxed)), (0, 10));
        chain.give(&[&carried], &rows, &[texts(10, bytes - 100)], &governor).unwrap();
        assert!(governor.used() > 9 * bytes && governor.used() <= LIST_BYTES);
        assert_eq!(lists.try_recv().map(|list| list.rows), Ok(10));
        assert_eq!((governor.used(), chain.missed.load(Ordering::Relaxed)), (0, 10));
    }
}
