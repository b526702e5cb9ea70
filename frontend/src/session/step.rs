//! What a step of a statement and whoever awaits it tell each other.
//!
//! A connection awaits a statement in one or more steps (it is run, its rows are read, its COPY is finished), each of
//! which may be cut off. The work of a step notes here what that end has to respect: rows that may be committed,
//! definitions that may be made, work that undoes what has been done, and the memory of plans.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millrace_common::SqlError;
use millrace_executor::dml::EntryFlag;
use parking_lot::Mutex;
use tokio::task::JoinHandle;

use crate::query::QueryEngine;
use crate::query::planning::Held;

/// How long an answer waits for what is being undone: then the client is told first.
const UNDO_WAIT: Duration = Duration::from_secs(10);

/// See the module. Invariant: a session has one step at a time, and what an ended one held is free.
#[derive(Default)]
pub struct Step {
    entered: EntryFlag,
    /// Whether a definition has been asked for and is not answered yet.
    defining: AtomicBool,
    /// Whether a part of what the statement does is done, and stays whatever becomes of the rest.
    has_part: AtomicBool,
    /// Work that outlives the step it belongs to.
    undoing: Mutex<Vec<JoinHandle<()>>>,
    /// The memory of its plans, once it has made one.
    held: Mutex<Option<Arc<Held>>>,
}

impl Step {
    /// Set when rows of the step have entered a table's open epoch.
    pub fn entered(&self) -> &EntryFlag {
        &self.entered
    }

    /// Makes a definition. Until that is answered nobody can say that it has not been made.
    pub async fn define<T>(&self, definition: impl Future<Output = T>) -> T {
        self.defining.store(true, Ordering::Release);
        let answer = definition.await;
        self.defining.store(false, Ordering::Release);
        answer
    }

    /// Whether the statement may have taken place although it is cut off.
    pub fn may_be_done(&self) -> bool {
        self.entered.is_set() || self.may_have_part()
    }

    /// Notes that a part of what the statement does is done, and stays whatever becomes of the rest.
    pub fn note_part(&self) {
        self.has_part.store(true, Ordering::Release);
    }

    /// Whether a part of what the statement does may be done although it has failed.
    pub fn may_have_part(&self) -> bool {
        self.has_part.load(Ordering::Acquire) || self.defining.load(Ordering::Acquire)
    }

    /// Undoes what the step has done; `work` tells whether it has succeeded.
    pub async fn carry_out_undo(&self, work: impl Future<Output = bool>) {
        let work = async {
            if !work.await {
                self.note_part();
            }
        };
        // As long as it cannot be told that it is undone, it may be there.
        self.define(work).await;
    }

    /// Notes work that undoes what the step has done.
    pub fn undo(&self, task: JoinHandle<()>) {
        self.undoing.lock().push(task);
    }

    /// The memory that the step's plans take: the same for all of them.
    pub fn held(&self, engine: &QueryEngine) -> Arc<Held> {
        Arc::clone(self.held.lock().get_or_insert_with(|| Held::new(engine)))
    }

    /// The error of the step if there is no memory for what is being planned.
    pub fn memory_error(&self) -> Option<SqlError> {
        let held = self.held.lock().clone();
        held?.error()
    }

    /// Ends the step: who reads rows of its queries holds their plans' memory from now on. Who tells the client that the
    /// statement has ended waits for this first: then nothing of it that is undone is seen any more, unless undoing
    /// takes long.
    pub async fn end(&self) {
        self.free();
        let tasks = std::mem::take(&mut *self.undoing.lock());
        if !tasks.is_empty() {
            let all = futures::future::join_all(tasks);
            let _ = tokio::time::timeout(UNDO_WAIT, all).await;
        }
    }

    /// Gives up the memory of the step's plans, unless others hold it too.
    pub fn free(&self) {
        drop(self.held.lock().take());
    }
}
