//! From rows that nobody can read yet to hints: the steps of a lookahead, and the tasks that own its keys.
//!
//! Only hashes of keys are computed here: of state that is in memory nothing is sent, of other keys the columns that the
//! rows have ([`super::sent_keys`]). Two keys of one hash in a chunk are one hint; the other is then read when its rows
//! come. Where only rows that are deleted need the state, those that are added are left out before anything is computed of
//! them. What has been sent for an epoch is not sent for it again, as far as that is remembered. Where lookaheads are
//! chained to it and wanted, keys are sent though they are in memory, each with what the hint is to carry.

use std::borrow::Cow;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, BooleanArray, Int64Array, RecordBatch, UInt32Array};
use arrow::compute::filter_record_batch;
use arrow::datatypes::SchemaRef;
use millrace_common::collections::{HashMap, HashSet};
use millrace_common::delta::take_rows;
use millrace_common::hash::{hash_columns, vnodes};
use millrace_common::keys::columns_at;
use millrace_common::{DeltaChunk, EnvHandle, VNODE_COUNT, Vnode};
use millrace_graph::lookahead::{Lookahead, Place};

use super::chain::{Carried, Chain};
use super::edge::{HintSender, SentHint};
use super::operator::OperatorLookahead;
use super::presence::{Presence, of_input};
use super::sent_keys::{Referred, SentKeys};
use super::sketch::Sketch;
use super::slack::{Side, Spot};
use super::{Due, HINT_KEYS, HintTimes, hint_port};
use crate::error::ExecError;
use crate::exchange::owner;
use crate::memory::{MemoryClass, MemoryGovernor};
use crate::operator::{Operator, OperatorContext, Output};
use crate::operators::{self, times_of};
use crate::state::arena::batch_bytes;
use crate::stats::OperatorMetrics;

/// Bytes that a hint carries for each key at most.
const CARRIED_BYTES: usize = 64;
/// Keys that are remembered as sent for an epoch.
const SENT: usize = 1_024;
/// One hint takes this part of an edge's credits at most, if it has more than one key.
const CREDITS_PART: usize = 4;

/// The instance of an operator in one task, where hints for it go.
#[derive(Clone)]
pub struct TaskEnd {
    pub hints: HintSender,
    pub operator: Arc<OperatorLookahead>,
}

/// One lookahead of a job that runs.
pub struct Route {
    node: usize,
    port: usize,
    /// Only of rows that are deleted.
    deleted: bool,
    steps: Vec<Box<dyn Operator>>,
    /// Of the last step's rows: the key's columns, then those of the vnode and those carried that are not among them.
    needed: Vec<usize>,
    /// Positions among `needed`.
    key: Vec<usize>,
    vnode: Vec<usize>,
    carried: Vec<usize>,
    /// Those that are chained to it.
    chain: Option<Arc<Chain>>,
    time: Option<usize>,
    /// The position in the key of the column that is the time: it is not sent a second time.
    time_in_key: Option<usize>,
    /// By number of the task in its fragment.
    tasks: Vec<TaskEnd>,
    metrics: Arc<OperatorMetrics>,
    /// Where rows are looked at, and whether they are those that the leaf reads. `None`: wherever there are any.
    side: Option<(Arc<Side>, bool)>,
    /// Hashes of what has been sent last, for one epoch: it is not sent again.
    sent: (Due, HashSet<u64>),
    clock: EnvHandle,
    governor: Arc<MemoryGovernor>,
}

/// Rows whose keys are sent to one task: by row the latest time of the key, and the hash of what is told once.
#[derive(Default)]
struct Picked {
    rows: Vec<u32>,
    times: Vec<i64>,
    distinct: Vec<u64>,
}

/// Rows whose keys are sent.
struct Source<'a> {
    rows: &'a RecordBatch,
    /// Their key's columns, if hints refer to them; else each has a copy.
    referred: Option<Referred>,
    /// Bytes that a hint keeps for each of them, about.
    by_row: usize,
}

impl Route {
    /// `leaf`: what the leaf's rows look like.
    pub fn new(
        lookahead: &Lookahead,
        leaf: &SchemaRef,
        tasks: Vec<TaskEnd>,
        metrics: Arc<OperatorMetrics>,
        ctx: &OperatorContext<'_>,
    ) -> Result<Route, ExecError> {
        let mut input = Arc::clone(leaf);
        let mut steps = Vec::with_capacity(lookahead.steps.len());
        for step in &lookahead.steps {
            steps.push(operators::build(step, &[input], ctx)?);
            input = Arc::clone(&step.schema);
        }
        let mut needed = lookahead.key.clone();
        for &c in lookahead.vnode.iter().chain(&lookahead.carried) {
            if !needed.contains(&c) {
                needed.push(c);
            }
        }
        let at = |c: &usize| needed.iter().position(|n| n == c).unwrap_or_default();
        let key: Vec<usize> = (0..lookahead.key.len()).collect();
        // Equal lists stay equal: the hash of the key is then that of the vnode.
        let vnode: Vec<usize> = lookahead.vnode.iter().map(at).collect();
        let carried = lookahead.carried.iter().map(at).collect();
        let (node, port, time) = (lookahead.node, hint_port(lookahead), lookahead.time);
        let time_in_key = lookahead.key.iter().position(|c| Some(*c) == time);
        Ok(Route {
            node,
            port,
            deleted: lookahead.deleted,
            steps,
            needed,
            key,
            vnode,
            carried,
            chain: None,
            time,
            time_in_key,
            tasks,
            metrics,
            side: None,
            sent: Default::default(),
            clock: ctx.clock.clone(),
            governor: Arc::clone(&ctx.governor),
        })
    }

    /// For rows at the place in use of an input; `is_own`: they are those that the leaf reads.
    pub fn at(self, side: Arc<Side>, is_own: bool) -> Route {
        Route { side: Some((side, is_own)), ..self }
    }

    /// For rows that are looked at wherever there are any, and tell nothing of a place.
    pub fn at_any_place(self) -> Route {
        Route { side: None, ..self }
    }

    /// Whether rows at a place are looked at, and not only noted.
    pub fn looks_at(&self, place: Place) -> bool {
        let is_in_use = |(side, is_own): &(Arc<Side>, bool)| {
            side.active() == Some(Spot { is_own: *is_own, place })
        };
        self.side.as_ref().is_none_or(is_in_use)
    }

    /// Rows were at a place, and have been looked at if it is in use.
    pub fn note(&self, place: Place, due: &Due) {
        if let Some((side, is_own)) = &self.side {
            side.note(Spot { is_own: *is_own, place }, due, self.clock.now());
        }
    }

    /// Whether keys that are chained are announced: not if rows are looked at inside the job, nor if they come too late.
    pub fn looks_at_chained(&self) -> bool {
        let is_announced =
            |(side, _): &(Arc<Side>, bool)| !side.is_left_out() && side.looks_ahead_of_job();
        self.side.as_ref().is_none_or(is_announced)
    }

    /// Keys that are chained have been announced, wherever the rows were that they come from.
    pub fn note_chained(&self, due: &Due) {
        if let Some((side, _)) = &self.side
            && let Some(spot) = side.active().filter(|_| side.looks_ahead_of_job())
        {
            side.note(spot, due, self.clock.now());
        }
    }

    /// The same, with those that are chained to it.
    pub fn with_chain(self, chain: Option<Arc<Chain>>) -> Route {
        Route { chain, ..self }
    }

    /// Hints are wanted, by some task, or for those that are chained to it.
    pub fn is_active(&self) -> bool {
        self.tasks.iter().any(|t| t.operator.is_active()) || self.wanted_chain().is_some()
    }

    /// Those that are chained to it, if they want hints.
    fn wanted_chain(&self) -> Option<&Arc<Chain>> {
        self.chain.as_ref().filter(|chain| chain.is_wanted())
    }

    /// Keys that the walker has not looked at.
    pub fn note_dropped(&self, keys: u64) {
        self.metrics.lookahead.dropped.add(keys);
    }

    /// So many bytes of rows that the first step takes were made for it.
    pub fn note_bytes(&self, bytes: usize) {
        self.metrics.lookahead.hint_bytes.add(bytes as u64);
    }

    /// Hints for rows that the first step takes, which are added.
    pub fn look(&mut self, rows: RecordBatch, due: &Due) -> Result<(), ExecError> {
        self.look_beside(DeltaChunk::inserts(rows), due, None)
    }

    /// Hints for rows that the first step takes, but for keys that are frequent, by a sketch that counts them.
    pub fn look_beside(
        &mut self,
        rows: DeltaChunk,
        due: &Due,
        mut sketch: Option<&mut Sketch>,
    ) -> Result<(), ExecError> {
        let rows = if self.deleted { deleted_rows(rows)? } else { rows.batch };
        if rows.num_rows() == 0 {
            return Ok(());
        }
        let known = rows.columns().to_vec();
        let mut chunks = vec![DeltaChunk::inserts(rows)];
        for step in &mut self.steps {
            let mut out = Output::default();
            for chunk in chunks {
                step.push(0, chunk, &mut out)?;
                if step.is_pending() {
                    return Err(ExecError::internal("a step of a lookahead waits"));
                }
            }
            chunks = out.take();
        }
        for chunk in chunks {
            self.hint(&chunk.batch, &known, due, sketch.as_deref_mut())?;
        }
        Ok(())
    }

    /// Hints for rows of the last step. `known`: columns that there are anyway.
    fn hint(
        &mut self,
        rows: &RecordBatch,
        known: &[ArrayRef],
        due: &Due,
        sketch: Option<&mut Sketch>,
    ) -> Result<(), ExecError> {
        let time = self.time.filter(|_| self.time_in_key.is_none());
        let times = time.map(|at| times_of(rows.column(at))).transpose()?;
        let rows = rows.project(&self.needed)?;
        if !self.sent.0.is_same(due) {
            self.sent.1.clear();
            self.sent.0 = due.clone();
        }
        let all = self.pick(&rows, times.as_ref(), sketch)?;
        let picked = all.iter().map(|picked| picked.rows.len()).sum();
        if picked == 0 {
            return Ok(());
        }
        let source = self.source(&rows, picked);
        let mut sent_any = false;
        for (task, picked) in all.iter().enumerate().filter(|(_, picked)| !picked.rows.is_empty()) {
            let sent = self.send(&self.tasks[task], &source, picked, due)?;
            sent_any |= sent > 0;
            let room = SENT.saturating_sub(self.sent.1.len());
            self.sent.1.extend(picked.distinct.iter().take(sent.min(room)));
        }
        if let Some(referred) = source.referred.filter(|_| sent_any) {
            self.note_bytes(referred.bytes_made(known));
        }
        Ok(())
    }

    /// How the keys of so many of these rows are sent. What is carried is copied, so then the keys are, too.
    fn source<'a>(&self, rows: &'a RecordBatch, picked: usize) -> Source<'a> {
        let carries = !self.carried.is_empty() && self.wanted_chain().is_some();
        let columns = || columns_at(rows, &self.key);
        let referred = if carries { None } else { Referred::to(columns(), picked) };
        let by_row = match &referred {
            Some(referred) => referred.bytes_by_row(),
            None => batch_bytes(rows).div_ceil(rows.num_rows().max(1)),
        };
        Source { rows, referred, by_row }
    }

    /// One row of each key that may need a hint, by task; of all keys, with what they carry, if they are for a chain.
    fn pick(
        &self,
        rows: &RecordBatch,
        times: Option<&Int64Array>,
        mut sketch: Option<&mut Sketch>,
    ) -> Result<Vec<Picked>, ExecError> {
        let hashes = hash_columns(&columns_at(rows, &self.key), rows.num_rows())?;
        let vnodes = self.vnodes(rows, &hashes)?;
        let presence: Vec<Option<Arc<Presence>>> =
            self.tasks.iter().map(|t| t.operator.presence()).collect();
        let mut all: Vec<Picked> = self.tasks.iter().map(|_| Picked::default()).collect();
        // What has become of each key: its place among the rows of its task, or nothing.
        let mut seen: HashMap<u64, Option<(usize, usize)>> = HashMap::default();
        let mut resident = 0;
        let is_chained = self.wanted_chain().is_some();
        let distinct = self.distinct(rows, &hashes, is_chained)?;
        for (row, (&hash, &distinct)) in hashes.iter().zip(distinct.iter()).enumerate() {
            if !is_chained && sketch.as_mut().is_some_and(|sketch| sketch.note(hash)) {
                resident += 1;
                continue;
            }
            let time = times.filter(|t| t.is_valid(row)).map_or(i64::MIN, |t| t.value(row));
            if let Some(place) = seen.get(&distinct) {
                if let Some(known) = place.and_then(|(task, at)| all[task].times.get_mut(at)) {
                    *known = time.max(*known);
                }
                continue;
            }
            if self.sent.1.contains(&distinct) {
                continue;
            }
            let vnode = vnodes.get(row).copied();
            let task = self.task_of(vnode.unwrap_or(0));
            let mut place = None;
            match &presence[task] {
                None if !is_chained => {}
                Some(presence)
                    if !is_chained && presence.may_be_resident(of_input(hash, self.port)) =>
                {
                    resident += 1
                }
                _ => {
                    let picked = &mut all[task];
                    place = Some((task, picked.rows.len()));
                    picked.rows.push(row as u32);
                    picked.times.extend(times.map(|_| time));
                    picked.distinct.push(distinct);
                }
            }
            seen.insert(distinct, place);
        }
        self.metrics.lookahead.resident.add(resident);
        Ok(all)
    }

    /// Hashes of what is told once: of keys, or of keys with what they carry.
    fn distinct<'a>(
        &self,
        rows: &RecordBatch,
        hashes: &'a [u64],
        is_chained: bool,
    ) -> Result<Cow<'a, [u64]>, ExecError> {
        if !is_chained || self.carried.iter().all(|c| self.key.contains(c)) {
            return Ok(Cow::Borrowed(hashes));
        }
        let columns = [self.key.as_slice(), &self.carried].concat();
        Ok(Cow::Owned(hash_columns(&columns_at(rows, &columns), rows.num_rows())?))
    }

    fn vnodes(&self, rows: &RecordBatch, hashes: &[u64]) -> Result<Vec<Vnode>, ExecError> {
        if self.vnode.is_empty() {
            return Ok(Vec::new());
        }
        if self.vnode == self.key {
            return Ok(vnodes(hashes));
        }
        Ok(vnodes(&hash_columns(&columns_at(rows, &self.vnode), rows.num_rows())?))
    }

    fn task_of(&self, vnode: Vnode) -> usize {
        debug_assert!(usize::from(vnode) < VNODE_COUNT);
        owner(vnode, self.tasks.len())
    }

    /// Sends a task as many of its keys as it has room for; how many.
    fn send(
        &self,
        task: &TaskEnd,
        source: &Source<'_>,
        picked: &Picked,
        due: &Due,
    ) -> Result<usize, ExecError> {
        let most = task.hints.credits() / CREDITS_PART / source.by_row.max(1);
        let mut sent = 0;
        for part in picked.rows.chunks(most.clamp(1, HINT_KEYS)) {
            let times = picked.times.get(sent..sent + part.len()).unwrap_or_default();
            // What would be lost is not made.
            let is_sent = task.hints.has_some() && {
                let hint = self.sent_hint(task, source, part, times, due)?;
                let bytes = hint.bytes();
                let is_sent = task.hints.try_send(hint);
                self.note_bytes(if is_sent { bytes } else { 0 });
                is_sent
            };
            if !is_sent {
                self.note_dropped((picked.rows.len() - sent) as u64);
                break;
            }
            sent += part.len();
        }
        Ok(sent)
    }

    /// A hint of these rows.
    fn sent_hint(
        &self,
        task: &TaskEnd,
        source: &Source<'_>,
        rows: &[u32],
        times: &[i64],
        due: &Due,
    ) -> Result<SentHint, ExecError> {
        let (keys, carried) = match &source.referred {
            Some(referred) => {
                // A lookahead that carries columns has copies.
                let nothing = source.rows.project(&[])?;
                (referred.keys(rows), self.carried(&nothing, task, due))
            }
            None => {
                let own = take_rows(source.rows, &UInt32Array::from(rows.to_vec()))?;
                let keys = SentKeys::copied(columns_at(&own, &self.key));
                (keys, self.carried(&own, task, due))
            }
        };
        Ok(SentHint {
            node: self.node,
            port: self.port,
            keys,
            times: self.time_in_key.map_or_else(|| HintTimes::of(times), HintTimes::OfKey),
            due: due.clone(),
            carried: carried.map(Arc::new),
        })
    }

    /// What a hint of these rows carries; nothing if nobody wants it, or if it is too large.
    fn carried(&self, rows: &RecordBatch, task: &TaskEnd, due: &Due) -> Option<Carried> {
        let chain = self.wanted_chain()?;
        let carried = rows.project(&self.carried).ok()?;
        let bytes = batch_bytes(&carried);
        if bytes > CARRIED_BYTES * rows.num_rows() {
            return None;
        }
        let mut account = self.governor.account(MemoryClass::Channel);
        account.set(bytes);
        Some(Carried {
            chain: Arc::clone(chain),
            columns: carried.columns().to_vec(),
            due: due.clone(),
            is_alone: !task.operator.is_active(),
            account,
        })
    }
}

/// The rows of a change that are deleted.
fn deleted_rows(rows: DeltaChunk) -> Result<RecordBatch, ExecError> {
    let Some(weights) = &rows.weights else { return Ok(rows.batch.slice(0, 0)) };
    let deleted: BooleanArray = weights.values().iter().map(|weight| Some(*weight < 0)).collect();
    Ok(filter_record_batch(&rows.batch, &deleted)?)
}
