//! What the parts of one statement share, while they run one after the other ([`crate::dml::with`]): the epoch
//! that all of them read, the block's writes as they were before the statement, and the rows that parts have
//! left for others.
//!
//! Invariant: no part sees in a table what another one has written; what is staged by them is looked at only
//! where a row is put in.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use arrow::array::{Array, BinaryArray};
use datafusion::catalog::TableProvider;
use datafusion::execution::memory_pool::MemoryReservation;
use millrace_common::{Epoch, SqlError, SqlState};
use millrace_rpc::catalog::Relation;
use parking_lot::Mutex;

use super::Session;
use super::writes::{Marks, StagedWrites};
use crate::cluster::CatalogSnapshot;
use crate::query::SessionCatalog;

/// Rows of a part as a relation.
pub struct Kept {
    pub relation: Relation,
    pub provider: Arc<dyn TableProvider>,
    /// The memory that they take.
    pub memory: MemoryReservation,
}

/// See the module.
pub struct Scope {
    /// The block's writes before the statement.
    writes: Arc<Mutex<StagedWrites>>,
    /// Where the statement begins in them.
    marks: Marks,
    /// `None`: not chosen, the parts are only bound.
    epoch: Option<Epoch>,
    /// Relations that the parts name, plain views included.
    relations: BTreeSet<u32>,
    kept: Vec<Kept>,
    /// Storage keys of rows that parts have changed to what they were, by table: nothing is staged of them.
    unchanged: HashMap<u32, HashSet<Vec<u8>>>,
}

impl Scope {
    /// A catalog that shows what a part sees.
    pub fn narrow(&self, view: SessionCatalog) -> SessionCatalog {
        let mut view = view.with_writes(Arc::clone(&self.writes));
        for kept in &self.kept {
            view.add_temporary(kept.relation.clone(), Arc::clone(&kept.provider));
        }
        view
    }
}

/// Ends the scope when it is dropped, also where the statement is cut off.
pub struct InScope(Arc<Mutex<Option<Scope>>>);

impl Drop for InScope {
    fn drop(&mut self) {
        // What it held is dropped after the lock.
        let scope = self.0.lock().take();
        drop(scope);
    }
}

impl Session {
    /// Begins a statement of parts.
    pub fn enter_scope(&self) -> InScope {
        let writes = self.writes.lock().clone();
        let marks = writes.marks();
        let writes = Arc::new(Mutex::new(writes));
        let scope = Scope {
            writes,
            marks,
            epoch: None,
            relations: BTreeSet::new(),
            kept: Vec::new(),
            unchanged: HashMap::new(),
        };
        *self.scope.lock() = Some(scope);
        InScope(Arc::clone(&self.scope))
    }

    /// Whether the statement under way has parts.
    pub fn in_parts(&self) -> bool {
        self.scope.lock().is_some()
    }

    /// The epoch that the parts of the statement under way read.
    pub fn scope_epoch(&self) -> Option<Epoch> {
        self.scope.lock().as_ref().and_then(|scope| scope.epoch)
    }

    /// Relations that a part of the statement under way names.
    pub fn note_relations(&self, relations: &[Arc<Relation>]) {
        if let Some(scope) = self.scope.lock().as_mut() {
            scope.relations.extend(relations.iter().map(|r| r.id));
        }
    }

    /// Fixes the epoch for all parts: one at which everything that they name is exact. `catalog`: from before they were
    /// bound. `false`, if `replans`: they are to be bound again.
    pub async fn fix_scope(
        &self,
        catalog: &CatalogSnapshot,
        replans: bool,
    ) -> Result<bool, SqlError> {
        let now = self.cluster().catalog();
        let ids: Vec<u32> = match self.scope.lock().as_ref() {
            None => return Ok(true),
            Some(scope) => scope.relations.iter().copied().collect(),
        };
        let is_gone = |id: &u32| catalog.by_id(*id).is_some() && now.by_id(*id).is_none();
        if replans && ids.iter().any(is_gone) {
            return Ok(false);
        }
        let named: Vec<Arc<Relation>> =
            ids.iter().filter_map(|id| now.by_id(*id).cloned()).collect();
        let (epoch, is_right) = self.epoch_of(catalog, &named, replans).await?;
        if let Some(scope) = self.scope.lock().as_mut() {
            scope.epoch = epoch;
        }
        Ok(is_right)
    }

    /// Keeps rows for the other parts, in place of what had the relation's name.
    pub fn keep(&self, kept: Kept) {
        let replaced = match self.scope.lock().as_mut() {
            None => None,
            Some(scope) => {
                let named = |k: &Kept| k.relation.name == kept.relation.name;
                match scope.kept.iter().position(named) {
                    Some(at) => Some(std::mem::replace(&mut scope.kept[at], kept)),
                    None => {
                        scope.kept.push(kept);
                        None
                    }
                }
            }
        };
        drop(replaced);
    }

    /// Of storage keys of rows that are there, those that other parts of the statement have written. `None`: they
    /// have written none.
    pub fn written_by_parts(&self, table: u32, keys: &BinaryArray) -> Option<Vec<bool>> {
        let (mark, mut written) = {
            let scope = self.scope.lock();
            let scope = scope.as_ref()?;
            let unchanged = scope.unchanged.get(&table);
            let noted = |key: Option<&[u8]>| {
                key.zip(unchanged).is_some_and(|(key, unchanged)| unchanged.contains(key))
            };
            let noted: Vec<bool> = keys.iter().map(noted).collect();
            (scope.marks.of(table), noted)
        };
        let staged = self.writes.lock().table(table);
        if let Some(staged) = staged.filter(|staged| staged.mark() > mark) {
            for (written, key) in written.iter_mut().zip(keys) {
                *written |= key.is_some_and(|key| staged.wrote_since(mark, key));
            }
        }
        written.contains(&true).then_some(written)
    }

    /// A part has changed the rows that were at these storage keys: those that the staged writes do not show it of
    /// are remembered.
    pub fn note_changed(&self, table: u32, keys: &BinaryArray) {
        let shown = self.written_by_parts(table, keys).unwrap_or_else(|| vec![false; keys.len()]);
        let unchanged = keys.iter().zip(shown).filter(|(_, shown)| !shown);
        let mut unchanged = unchanged.filter_map(|(key, _)| Some(key?.to_vec())).peekable();
        if unchanged.peek().is_some()
            && let Some(scope) = self.scope.lock().as_mut()
        {
            scope.unchanged.entry(table).or_default().extend(unchanged);
        }
    }
}

/// 40001 for a relation that has no version at the statement's epoch.
pub fn no_version() -> SqlError {
    SqlError::new(
        SqlState::SERIALIZATION_FAILURE,
        "a relation has no version at the statement's snapshot",
    )
    .with_hint("Retry the statement.")
}
