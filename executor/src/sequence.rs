//! Numbers of the rows of append-only state tables, in the order of their arrival.
//!
//! A task numbers the rows that it writes, and the next number is committed with them as a counter of the job. An
//! instance of a job begins at the highest counter of any of its tasks: rows that an earlier instance did not commit
//! leave no trace, and those that it did have lower numbers, whatever the clock of the machine says.

use std::collections::BTreeMap;
use std::ops::Range;

use millrace_common::Vnode;
use millrace_rpc::version::ARRIVALS;

/// The next arrival number in a table, of the rows that one task writes.
#[derive(Debug)]
pub struct ArrivalSequence {
    counter: String,
    next: u64,
}

impl ArrivalSequence {
    /// `table`: its number in the job. `first_vnode`: the first of the task's. `start`: see [`first_arrival`].
    pub fn new(table: usize, first_vnode: Vnode, start: u64) -> ArrivalSequence {
        ArrivalSequence { counter: format!("{ARRIVALS}{table}.{first_vnode}"), next: start }
    }

    /// The numbers of the next `rows` rows.
    pub fn take(&mut self, rows: u64) -> Range<u64> {
        let first = self.next;
        self.next += rows;
        first..self.next
    }

    /// The counter that is committed with the rows.
    pub fn counter(&self) -> (String, u64) {
        (self.counter.clone(), self.next)
    }
}

/// Where an instance of a job begins to number rows: beyond all that was committed, by any task under any
/// parallelism.
pub fn first_arrival(counters: &BTreeMap<String, u64>) -> u64 {
    let committed = counters.iter().filter(|(name, _)| name.starts_with(ARRIVALS));
    committed.map(|(_, next)| *next).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_numbers_beyond_all_that_any_task_committed() {
        let start = first_arrival(&BTreeMap::new());
        let mut tasks = [0, 128].map(|vnode| ArrivalSequence::new(3, vnode, start));
        assert_eq!(tasks[0].take(2), 0..2);
        assert_eq!(tasks[1].take(7), 0..7);
        let mut counters: BTreeMap<_, _> = tasks.iter().map(ArrivalSequence::counter).collect();
        assert_eq!(counters.len(), 2, "tasks have counters of their own");
        counters.insert("rows.3.0".to_string(), 100);
        // One task takes over the vnodes of both.
        let mut one = ArrivalSequence::new(3, 0, first_arrival(&counters));
        assert_eq!(one.take(1), 7..8);
    }
}
