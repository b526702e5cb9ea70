//! A task: one parallel instance of a fragment, one async function (docs/design.md §6).
//!
//! It pulls from its leaves and drives its nodes, producers before consumers in `nodes`. State
//! that has arrived is worked off before new input is pulled; while a node is full, nothing below it
//! moves. A leaf that has delivered the barrier rests until all have. Then every node, in order, is
//! drained, gets the barrier, and its last output is passed on, so that when the root's turn comes
//! the epoch's rows have all reached it. The barrier goes downstream, and what the epoch wrote is
//! sealed and reported. Hints are taken in between, also while there is no input; what they cause is never waited for.
//!
//! Every wait may be cut off by the end of the job; none holds a lock.

mod ahead;
pub mod build;
mod order;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt, select_all, try_join_all};
use millrace_common::{DeltaChunk, EnvHandle, Epoch};
use millrace_graph::lookahead::Place;
use millrace_graph::{DerivedWatermark, Retention};
use millrace_rpc::version::BackfillPosition;
use millrace_storage::{JobStore, MemRun};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::error::ExecError;
use crate::exchange::{Barrier, Dispatcher, Message};
use crate::input::Leaf;
use crate::lookahead::edge::{HintReceiver, SentHint};
use crate::lookahead::leaf::LeafHints;
use crate::lookahead::outlook::Outlook;
use crate::materialize::{Root, RootReport};
use crate::memory::{self, MemoryGovernor, Turn};
use crate::operator::{Operator, Output};
use crate::stats::{OperatorMetrics, Progress};
use crate::watermark::WatermarkSet;

/// Longest stretch of work without giving other tasks a turn.
const TIME_SLICE: Duration = Duration::from_millis(2);
/// Rows of input after which an epoch is large: while memory is tight it waits until it is its job's turn.
const LARGE_EPOCH: usize = 2_048;
/// How long such an epoch waits at a time, and in all: what is in use may be given back only at its barrier.
const MEMORY_PAUSE: Duration = Duration::from_millis(500);
const MOST_WAITED: Duration = Duration::from_secs(5);

/// What a task made of an epoch.
#[derive(Debug, Default)]
pub struct TaskReport {
    /// The number of the task in its job, and the epoch that it has ended.
    pub task: usize,
    pub epoch: Epoch,
    pub runs: Vec<MemRun>,
    pub positions: Vec<BackfillPosition>,
    /// Rows its first scans read.
    pub scanned: u64,
    /// What its own inputs know of watermarks.
    pub marks: WatermarkSet,
    /// When its rows change by themselves next.
    pub due: Option<Epoch>,
    /// What its leaves commit with the epoch.
    pub counters: BTreeMap<String, u64>,
    /// Of the job's root, where this task has it.
    pub root: Option<RootReport>,
}

enum Kind {
    Leaf(Box<dyn Leaf>),
    Operator(Box<dyn Operator>),
    Root(Root),
}

struct PlanNode {
    kind: Kind,
    /// Who takes its output.
    consumers: Vec<Consumer>,
    /// All nodes that its output may reach, in order.
    ancestors: Vec<usize>,
    /// Leaves whose epoch must have come in before anything of this leaf's.
    after: Vec<usize>,
    /// Output not passed on yet.
    out: Output,
    /// Of a leaf: parts of a large chunk, all of which was looked at.
    queue: VecDeque<DeltaChunk>,
    /// Of a leaf: it has delivered this one, with these watermarks.
    barrier: Option<(Arc<Barrier>, Arc<WatermarkSet>)>,
    /// Inputs in port order, and which of their columns have watermarks; of operators.
    inputs: Vec<Vec<DerivedWatermark>>,
    /// Its state tables that are cleaned.
    retained: Vec<(usize, Retention)>,
    metrics: Arc<OperatorMetrics>,
    state_bytes: u64,
}

/// Where a node's output goes.
#[derive(Clone, Copy)]
enum Consumer {
    /// To a node of the task, at a port.
    Node(usize, usize),
    /// Out of the task, by one of its exits.
    Exit(usize),
}

impl PlanNode {
    /// Full, and able to do something about it.
    fn is_full(&self) -> bool {
        matches!(&self.kind, Kind::Operator(op) if op.is_full() && op.is_pending())
    }

    /// Holds too much until the barrier.
    fn is_over(&self) -> bool {
        matches!(&self.kind, Kind::Operator(op) if op.is_over())
    }

    /// What a leaf, which is the node `node`, has next.
    async fn next(&mut self, node: usize) -> Result<Event, ExecError> {
        if let Some(part) = self.queue.pop_front() {
            return Ok(Event::Part(node, part));
        }
        match &mut self.kind {
            Kind::Leaf(leaf) => Ok(Event::Input(node, leaf.next().await?)),
            _ => Err(ExecError::internal("only leaves have a next chunk")),
        }
    }
}

/// A barrier that all leaves have delivered, and the watermarks that came with it.
type Aligned = (Arc<Barrier>, Arc<WatermarkSet>);

/// What is left to pass on, the next last.
enum Step {
    /// A node has put this out.
    Out(usize, DeltaChunk),
    In(Consumer, DeltaChunk),
}

enum Event {
    Input(usize, Message),
    /// A part of a chunk that came before.
    Part(usize, DeltaChunk),
    /// A node has output.
    Progress(usize),
    /// Caches are to let go, though no rows come.
    Shed,
    Hint(SentHint),
}

pub struct Task {
    /// Among the tasks of the job.
    number: usize,
    nodes: Vec<PlanNode>,
    /// The fragment's outputs; none: the last node is the job's root.
    exits: Vec<Dispatcher>,
    reports: mpsc::UnboundedSender<TaskReport>,
    /// Of the job.
    store: Arc<JobStore>,
    governor: Arc<MemoryGovernor>,
    /// The caches of its operators are to let go of what they may not keep.
    shed: Arc<Notify>,
    /// Keys whose state its operators will need.
    hints: Option<HintReceiver>,
    /// Whom it tells of keys of rows that its leaves read and its operators put out.
    leaf_hints: LeafHints,
    /// How its inputs' watermarks move.
    outlook: Outlook,
    chunk_rows: usize,
    progress: Arc<Progress>,
    /// Rows of input since the last barrier.
    epoch_rows: usize,
    /// How long it has waited for memory since then.
    epoch_waited: Duration,
    /// Among those whose epochs became large while memory was tight.
    place: Option<memory::Place>,
    /// Some node has a turn.
    has_turn: bool,
    /// Leaf to be asked first, so that none starves another.
    turn: usize,
    yielded: Instant,
    clock: EnvHandle,
}

impl Task {
    /// Runs until the job ends or something fails.
    pub async fn run(mut self) -> Result<(), ExecError> {
        loop {
            let (barrier, marks) = self.process_epoch().await?;
            self.finish_epoch(&barrier, &marks).await?;
            self.expect(&marks)?;
        }
    }

    /// Works until all leaves have delivered the barrier.
    async fn process_epoch(&mut self) -> Result<Aligned, ExecError> {
        loop {
            if let Some(aligned) = self.aligned()? {
                return Ok(aligned);
            }
            self.take_hints()?;
            match self.next_event().await? {
                Event::Progress(node) => self.pass_on(node)?,
                Event::Hint(hint) => self.hint(hint)?,
                Event::Shed => self.shed()?,
                Event::Input(node, Message::Barrier(barrier, marks)) => {
                    self.nodes[node].barrier = Some((barrier, marks));
                }
                Event::Input(node, Message::Chunk(chunk)) => {
                    self.leaf_hints.look(Place::Leaf, node, &chunk);
                    self.input(node, chunk)?;
                }
                Event::Part(node, part) => self.emit(node, part)?,
            }
            self.flush().await?;
            self.settle_all().await?;
            self.yield_if_due().await;
        }
    }

    /// Has the nodes that hold too much until the barrier settle it.
    async fn settle_all(&mut self) -> Result<(), ExecError> {
        for node in 0..self.nodes.len() {
            self.settle(node).await?;
        }
        Ok(())
    }

    /// Has a node settle what it holds until the barrier, if that is too much; then those that got much of it.
    fn settle(&mut self, node: usize) -> BoxFuture<'_, Result<(), ExecError>> {
        if !self.nodes[node].is_over() {
            return Box::pin(std::future::ready(Ok(())));
        }
        async move {
            self.drain(node).await?;
            let governor = Arc::clone(&self.governor);
            let mut turn = None;
            loop {
                if turn.is_none() {
                    turn = self.turn(&governor, node).await;
                }
                let slot = &mut self.nodes[node];
                let Kind::Operator(op) = &mut slot.kind else { break };
                op.settle(&mut slot.out).await?;
                let goes_on = op.is_settling();
                if !goes_on {
                    slot.metrics.settled_early.add(1);
                }
                turn = self.kept_turn(turn);
                self.deliver(node).await?;
                if !goes_on {
                    break;
                }
            }
            self.end_turn(turn);
            Ok(())
        }
        .boxed()
    }

    /// A turn to tell what a node holds until the barrier ([`MemoryGovernor::turn`]); none while the task has one, for a
    /// node below.
    async fn turn<'a>(&mut self, governor: &'a MemoryGovernor, node: usize) -> Option<Turn<'a>> {
        let Kind::Operator(op) = &self.nodes[node].kind else { return None };
        if self.has_turn {
            return None;
        }
        let turn = governor.turn(op.held()).await;
        self.has_turn = turn.is_some();
        turn
    }

    /// The turn for passing on what was told: it ends where that waits for other tasks.
    fn kept_turn<'a>(&mut self, turn: Option<Turn<'a>>) -> Option<Turn<'a>> {
        if self.exits.is_empty() {
            return turn;
        }
        self.end_turn(turn);
        None
    }

    fn end_turn(&mut self, turn: Option<Turn<'_>>) {
        if turn.is_some() {
            self.has_turn = false;
        }
    }

    /// Lets a node go on until nothing in it waits for state.
    async fn drain(&mut self, node: usize) -> Result<(), ExecError> {
        while self.is_pending(node) {
            self.relieve(node).await?;
            self.progress(node).await?;
        }
        Ok(())
    }

    /// Passes on what a node has put out at once, as fast as the nodes above take it in.
    async fn deliver(&mut self, node: usize) -> Result<(), ExecError> {
        for chunk in self.nodes[node].out.take() {
            self.relieve(node).await?;
            self.emit(node, chunk)?;
            self.flush().await?;
            for i in 0..self.nodes[node].ancestors.len() {
                let ancestor = self.nodes[node].ancestors[i];
                self.settle(ancestor).await?;
            }
            self.yield_if_due().await;
        }
        Ok(())
    }

    /// The barrier, once all leaves have it, and the watermarks of all.
    fn aligned(&mut self) -> Result<Option<Aligned>, ExecError> {
        let leaves = || self.nodes.iter().filter(|s| matches!(s.kind, Kind::Leaf(_)));
        if !leaves().all(|s| s.barrier.is_some()) {
            return Ok(None);
        }
        let mut barriers = self.nodes.iter_mut().filter_map(|s| s.barrier.take());
        let Some((first, mut marks)) = barriers.next() else {
            return Err(ExecError::internal("a fragment has no leaf"));
        };
        for (other, more) in barriers {
            if *other != *first {
                let message = format!("barriers {first:?} and {other:?} met in a task");
                return Err(ExecError::internal(message));
            }
            Arc::make_mut(&mut marks).merge(&more);
        }
        Ok(Some((first, marks)))
    }

    /// Waits for state that arrives, first, and for input that may be taken.
    async fn next_event(&mut self) -> Result<Event, ExecError> {
        let full: Vec<bool> = self.nodes.iter().map(PlanNode::is_full).collect();
        let open: Vec<bool> = self.nodes.iter().map(|s| s.barrier.is_none()).collect();
        let mut pending: Vec<BoxFuture<'_, Result<Event, ExecError>>> = Vec::new();
        let mut ahead: Vec<BoxFuture<'_, Result<Event, ExecError>>> = Vec::new();
        let mut inputs: Vec<BoxFuture<'_, Result<Event, ExecError>>> = Vec::new();
        let tight = self.governor.is_tight();
        if tight {
            self.give_up_expected();
        }
        for (i, slot) in self.nodes.iter_mut().enumerate() {
            if slot.ancestors.iter().any(|&a| full[a]) {
                continue;
            }
            if matches!(slot.kind, Kind::Leaf(_)) {
                if slot.barrier.is_none() && !slot.after.iter().any(|&leaf| open[leaf]) {
                    inputs.push(slot.next(i).boxed());
                }
            } else if let Kind::Operator(op) = &mut slot.kind
                && (op.is_pending() || op.is_prefetching())
            {
                let of_kind = if op.is_pending() { &mut pending } else { &mut ahead };
                let progress = op.progress(&mut slot.out);
                of_kind.push(async move { progress.await.map(|()| Event::Progress(i)) }.boxed());
            }
        }
        if !inputs.is_empty() {
            self.turn = (self.turn + 1) % inputs.len();
            inputs.rotate_left(self.turn);
            if tight && pending.is_empty() {
                if self.epoch_rows <= LARGE_EPOCH {
                    self.governor.wait_for_room().await;
                } else {
                    let take = || self.governor.place(self.store.job());
                    let place = self.place.get_or_insert_with(take);
                    tokio::select! {
                        biased;
                        () = self.shed.notified() => return Ok(Event::Shed),
                        () = place.turn(self.epoch_rows, &self.clock) => {}
                    }
                    let patience = MEMORY_PAUSE.min(MOST_WAITED.saturating_sub(self.epoch_waited));
                    let began = self.clock.now();
                    self.governor.wait_within_limit(patience).await;
                    self.epoch_waited += self.clock.elapsed(began);
                }
            }
        }
        pending.append(&mut ahead);
        pending.append(&mut inputs);
        if pending.is_empty() {
            return Err(ExecError::internal("a task has nothing to wait for"));
        }
        tokio::select! {
            biased;
            event = select_all(pending) => event.0,
            // Without walkers there is nothing to wait for.
            Some(hint) = ahead::next_hint(&mut self.hints) => Ok(Event::Hint(hint)),
            () = self.shed.notified() => Ok(Event::Shed),
        }
    }

    /// Has the operators let go of what their caches may not keep.
    fn shed(&mut self) -> Result<(), ExecError> {
        for node in 0..self.nodes.len() {
            let slot = &mut self.nodes[node];
            if let Kind::Operator(op) = &mut slot.kind {
                op.shed(&mut slot.out)?;
                self.pass_on(node)?;
            }
        }
        Ok(())
    }

    /// A chunk of a leaf; a large one goes in parts.
    fn input(&mut self, node: usize, chunk: DeltaChunk) -> Result<(), ExecError> {
        let rows = chunk.num_rows();
        self.epoch_rows = self.epoch_rows.saturating_add(rows);
        if rows <= self.chunk_rows + self.chunk_rows / 2 {
            return self.emit(node, chunk);
        }
        let part = rows.div_ceil(rows.div_ceil(self.chunk_rows));
        for at in (0..rows).step_by(part) {
            self.nodes[node].queue.push_back(chunk.slice(at, part.min(rows - at)));
        }
        Ok(())
    }

    /// Passes a node's output on.
    fn pass_on(&mut self, node: usize) -> Result<(), ExecError> {
        for chunk in self.nodes[node].out.take() {
            self.emit(node, chunk)?;
        }
        Ok(())
    }

    /// Pushes a chunk into every consumer, and what comes of it further up. Depth first: all that comes of a chunk
    /// by one consumer has been passed on before the next gets it, so that what a node puts out stays in order
    /// where ways meet again.
    fn emit(&mut self, node: usize, chunk: DeltaChunk) -> Result<(), ExecError> {
        let mut work = vec![Step::Out(node, chunk)];
        while let Some(step) = work.pop() {
            let (to, chunk) = match step {
                Step::In(to, chunk) => (to, chunk),
                Step::Out(from, chunk) => {
                    let slot = &self.nodes[from];
                    self.leaf_hints.look(Place::Input, from, &chunk);
                    slot.metrics.rows_out.add(chunk.num_rows() as u64);
                    let Some((first, more)) = slot.consumers.split_first() else {
                        return Err(ExecError::internal("the root has output"));
                    };
                    work.extend(more.iter().rev().map(|&to| Step::In(to, chunk.clone())));
                    (*first, chunk)
                }
            };
            match to {
                Consumer::Exit(exit) => self.exits[exit].push(chunk)?,
                Consumer::Node(node, port) => {
                    let slot = &mut self.nodes[node];
                    slot.metrics.rows_in.add(chunk.num_rows() as u64);
                    match &mut slot.kind {
                        Kind::Operator(op) => {
                            op.push(port, chunk, &mut slot.out)?;
                            let out = slot.out.take().into_iter().rev();
                            work.extend(out.map(|c| Step::Out(node, c)));
                        }
                        Kind::Root(root) => root.push(chunk)?,
                        Kind::Leaf(_) => return Err(ExecError::internal("a leaf has an input")),
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits until others have taken what was emitted, and until an epoch that has grown large is in part on
    /// its way to the store.
    async fn flush(&mut self) -> Result<(), ExecError> {
        match self.exits.as_mut_slice() {
            [] => {}
            [only] => only.flush().await?,
            several => {
                try_join_all(several.iter_mut().map(Dispatcher::flush)).await?;
            }
        }
        if let Some(PlanNode { kind: Kind::Root(root), .. }) = self.nodes.last_mut() {
            root.relieve().await?;
        }
        self.store.wait_for_spills().await;
        Ok(())
    }

    async fn yield_if_due(&mut self) {
        self.progress.note_step();
        if let Some(place) = &self.place {
            place.step();
        }
        if self.clock.elapsed(self.yielded) > TIME_SLICE {
            tokio::task::yield_now().await;
            self.yielded = self.clock.now();
        }
    }

    /// Lets one pending node go on and passes its output on.
    async fn progress(&mut self, node: usize) -> Result<(), ExecError> {
        let slot = &mut self.nodes[node];
        if let Kind::Operator(op) = &mut slot.kind {
            op.progress(&mut slot.out).await?;
        }
        self.pass_on(node)?;
        self.flush().await?;
        self.yield_if_due().await;
        Ok(())
    }

    /// Makes room above a node: while an ancestor is full, the topmost such goes on.
    async fn relieve(&mut self, node: usize) -> Result<(), ExecError> {
        loop {
            let full = self.nodes[node].ancestors.iter().rfind(|&&a| self.nodes[a].is_full());
            match full.copied() {
                Some(ancestor) => self.progress(ancestor).await?,
                None => return Ok(()),
            }
        }
    }

    fn is_pending(&self, node: usize) -> bool {
        matches!(&self.nodes[node].kind, Kind::Operator(op) if op.is_pending())
    }

    /// Ends one node's epoch: drained, told, and its last output passed on.
    async fn finish_node(
        &mut self,
        node: usize,
        barrier: &Barrier,
        marks: &WatermarkSet,
    ) -> Result<(), ExecError> {
        self.drain_at_barrier(node).await?;
        let slot = &mut self.nodes[node];
        let Kind::Operator(op) = &mut slot.kind else { return Ok(()) };
        for (port, columns) in slot.inputs.iter().enumerate() {
            if !columns.is_empty() {
                op.watermark(port, &marks.columns(columns));
            }
        }
        for (table, retention) in &slot.retained {
            if let Some(bound) = marks.least(&retention.terms) {
                op.retain(*table, retention.by, bound);
            }
        }
        op.time(barrier.epoch);
        let governor = Arc::clone(&self.governor);
        let turn = self.turn(&governor, node).await;
        let slot = &mut self.nodes[node];
        if let Kind::Operator(op) = &mut slot.kind {
            op.barrier(&mut slot.out).await?;
        }
        let turn = self.kept_turn(turn);
        self.deliver(node).await?;
        self.end_turn(turn);
        Ok(())
    }

    async fn finish_epoch(
        &mut self,
        barrier: &Arc<Barrier>,
        marks: &Arc<WatermarkSet>,
    ) -> Result<(), ExecError> {
        self.leaf_hints.begin_barrier(barrier.epoch);
        for node in 0..self.nodes.len() {
            self.finish_node(node, barrier, marks).await?;
        }
        (self.epoch_rows, self.epoch_waited, self.place) = (0, Duration::ZERO, None);
        self.leaf_hints.barrier(barrier.epoch);
        for exit in &mut self.exits {
            exit.barrier(barrier, marks).await?;
        }
        let mut report =
            TaskReport { task: self.number, epoch: barrier.epoch, ..TaskReport::default() };
        for slot in &mut self.nodes {
            let bytes = match &mut slot.kind {
                Kind::Leaf(leaf) => {
                    leaf.positions(&mut report.positions);
                    report.scanned += leaf.take_scanned();
                    report.marks.merge(&leaf.marks());
                    leaf.counters(&mut report.counters);
                    0
                }
                Kind::Operator(op) => {
                    op.seal(&mut report.runs)?;
                    op.counters(&mut report.counters);
                    report.due = [report.due, op.due()].into_iter().flatten().min();
                    op.memory_size()
                }
                Kind::Root(root) => {
                    report.root = Some(root.barrier(barrier, &mut report.runs).await?);
                    root.memory_size()
                }
            };
            slot.metrics.state_bytes.replace(&mut slot.state_bytes, bytes as u64);
        }
        self.reports.send(report).map_err(|_| ExecError::Stopped)
    }
}
