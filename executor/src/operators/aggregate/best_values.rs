//! The best values of a group, remembered so that MIN and MAX survive retractions without a read.

use super::values::Change;
use crate::error::ExecError;
use crate::state::KeyBytes;

/// Values read in one refill; twice as many are remembered at most.
pub const REFILL: usize = 64;

/// The best values of a group with their counts, best first.
#[derive(Default)]
pub struct Best {
    pub entries: Vec<(KeyBytes, i64)>,
    /// There are no others.
    pub complete: bool,
}

impl Best {
    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        const ENTRY: usize = size_of::<(KeyBytes, i64)>();
        let keys: usize = self.entries.iter().map(|e| e.0.heap_size()).sum();
        size_of::<Best>() + self.entries.capacity() * ENTRY + keys
    }

    pub fn first(&self) -> Option<KeyBytes> {
        self.entries.first().map(|e| e.0.clone())
    }

    /// Applies changes (in value order). The result, or `None` when it must be read.
    pub fn apply(&mut self, changes: &[Change]) -> Result<Option<Option<KeyBytes>>, ExecError> {
        for c in changes {
            match self.entries.binary_search_by(|e| e.0.cmp(&c.value)) {
                Ok(at) => {
                    self.entries[at].1 += c.delta;
                    match self.entries[at].1 {
                        n if n < 0 => return Err(negative()),
                        0 => drop(self.entries.remove(at)),
                        _ => {}
                    }
                }
                Err(at) if at < self.entries.len() || self.complete => {
                    if c.delta < 0 {
                        return Err(negative());
                    }
                    self.entries.insert(at, (c.value.clone(), c.delta));
                }
                // Beyond what is remembered: only the table knows.
                Err(_) => {}
            }
        }
        if self.entries.len() > 2 * REFILL {
            self.entries.truncate(REFILL);
            self.complete = false;
        }
        Ok(match self.first() {
            Some(first) => Some(Some(first)),
            None if self.complete => Some(None),
            None => None,
        })
    }
}

fn negative() -> ExecError {
    ExecError::internal("a value is retracted more often than it came")
}

/// The result from the current one alone, if no retraction can have made it worse.
pub fn improve(current: Option<KeyBytes>, changes: &[Change]) -> Option<Option<KeyBytes>> {
    let first_added = changes.iter().find(|c| c.delta > 0).map(|c| &c.value);
    let Some(current) = current else { return Some(first_added.cloned()) };
    if changes.iter().any(|c| c.delta < 0 && c.value <= current) {
        return None;
    }
    Some(Some(first_added.filter(|v| **v < current).cloned().unwrap_or(current)))
}
