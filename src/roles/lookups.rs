//! How often the runs of state tables are looked up in a process, as it tells the leader with its heartbeats.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_rpc::control::TableLookups;
use millrace_storage::{StateStore, VersionFollower};
use parking_lot::Mutex;

/// Tables in one heartbeat, those that were looked up most often; the others are told of with the next ones.
const TABLES: usize = 1_000;

/// See the module. Where there is nothing to look up, the default.
#[derive(Default)]
pub struct Lookups {
    /// The jobs that run here.
    pub store: Option<Arc<StateStore>>,
    /// The jobs that are read here.
    pub versions: Option<Arc<VersionFollower>>,
    /// By job and table: what the leader has not been told yet. Bounded by the tables that are open here.
    pub waiting: Mutex<BTreeMap<(u32, u32), TableLookups>>,
}

impl Lookups {
    /// What is to be told now. It is told once.
    pub fn take(&self) -> Vec<TableLookups> {
        let own = self.store.iter().flat_map(|store| store.take_reads());
        let followed = self.versions.iter().flat_map(|versions| versions.take_reads());
        let read = own.chain(followed).map(|(job, table, reads)| TableLookups {
            job: job.0,
            table: table.0,
            keys: reads.keys,
            cold: reads.cold,
        });
        let mut waiting = self.waiting.lock();
        add(&mut waiting, read);
        if waiting.len() <= TABLES {
            return std::mem::take(&mut *waiting).into_values().collect();
        }
        let mut all: Vec<TableLookups> = std::mem::take(&mut *waiting).into_values().collect();
        all.sort_by_key(|lookups| std::cmp::Reverse(lookups.keys));
        let later = all.split_off(TABLES);
        add(&mut waiting, later);
        all
    }

    /// The leader has not been told.
    pub fn put_back(&self, lookups: Vec<TableLookups>) {
        add(&mut self.waiting.lock(), lookups);
    }
}

fn add(
    waiting: &mut BTreeMap<(u32, u32), TableLookups>,
    lookups: impl IntoIterator<Item = TableLookups>,
) {
    for of in lookups {
        let known = waiting.entry((of.job, of.table)).or_insert_with(|| TableLookups {
            job: of.job,
            table: of.table,
            ..TableLookups::default()
        });
        known.keys = known.keys.saturating_add(of.keys);
        known.cold = known.cold.saturating_add(of.cold);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_lookup_is_told_once_and_many_tables_in_turn() {
        let lookups = Lookups::default();
        let of = |table, keys| TableLookups { job: 1, table, keys, cold: 1 };
        lookups.put_back(vec![of(1, 5), of(2, 6), of(1, 7)]);
        let told = lookups.take();
        assert_eq!(told, [TableLookups { cold: 2, ..of(1, 12) }, of(2, 6)]);
        assert!(lookups.take().is_empty());
        // A heartbeat that was lost, and more tables than fit into one.
        lookups.put_back(told);
        lookups.put_back((3..3 + TABLES as u32).map(|table| of(table, 1)).collect());
        let (first, second) = (lookups.take(), lookups.take());
        assert_eq!((first.len(), second.len()), (TABLES, 2));
        assert_eq!(first[0].keys, 12, "those that were looked up most often come first");
        assert!(lookups.take().is_empty());
    }
}
