//! What holds of every version, and between a version and the next. Reads rely on it: of entries with equal key and
//! epoch the larger sequence wins, and each entry is in one run.

use millrace_common::TableId;
use millrace_common::collections::HashSet;
use millrace_rpc::sequence::Sequence;
use millrace_rpc::version::{RunMeta, VersionEdit};

use super::{TableVersion, Version};
use crate::memrun::MemRun;

impl Version {
    /// The first broken invariant, in words: memory runs follow each other in the order of commits, none of them is in
    /// disk runs already, groups and epochs never fall; and every disk run belongs to its table and is named once, as is
    /// the part of an object that it lies in.
    pub fn check_invariants(&self) -> Result<(), String> {
        let (mut ids, mut places) = (HashSet::default(), HashSet::default());
        for (id, table) in &self.tables {
            self.check_memory(table).map_err(|e| format!("state table {id}: {e}"))?;
            for run in &table.disk {
                let meta = run.meta();
                self.check_run(*id, meta).map_err(|e| format!("state table {id}: {e}"))?;
                if !ids.insert(meta.run_id) {
                    return Err(format!("run {} is there twice", meta.run_id));
                }
                if !places.insert((&meta.object, meta.offset)) {
                    let RunMeta { object, offset, .. } = meta;
                    return Err(format!("two runs lie at {offset} of object {object}"));
                }
            }
        }
        Ok(())
    }

    fn check_memory(&self, table: &TableVersion) -> Result<(), String> {
        for run in &table.mem {
            let stored = Sequence::stored;
            let (first, last) = (stored(run.min_sequence), stored(run.max_sequence));
            if first > last || last > stored(self.sequence) {
                return Err(format!("a memory run of commits {first} to {last}"));
            }
            let flushed = stored(self.flushed_sequence);
            if first <= flushed {
                return Err(format!(
                    "commit {first} is in memory, and flushed as part of {flushed}"
                ));
            }
            if run.min_epoch > run.max_epoch || run.max_epoch > self.epoch {
                let (first, last) = (run.min_epoch, run.max_epoch);
                return Err(format!("a memory run of epochs {first} to {last}"));
            }
            if run.group > table.group {
                return Err(format!("a memory run of group {}, which has not begun", run.group));
            }
        }
        for (older, newer) in table.mem.iter().zip(table.mem.iter().skip(1)) {
            let (a, b) = (older.max_sequence, newer.min_sequence);
            let (a, b) = (Sequence::stored(a), Sequence::stored(b));
            // A commit has one epoch, and a part of it may have several runs.
            let apart = a < b || a == b && older.max_epoch == newer.min_epoch;
            if !apart || older.group > newer.group || older.max_epoch > newer.max_epoch {
                let place = |r: &MemRun| format!("group {}, epoch {}", r.group, r.max_epoch);
                return Err(format!(
                    "memory runs of commits {a} ({}) and {b} ({}) are in the wrong order",
                    place(older),
                    place(newer)
                ));
            }
        }
        Ok(())
    }

    fn check_run(&self, table: TableId, run: &RunMeta) -> Result<(), String> {
        let id = run.run_id;
        if run.table_id != table.0 {
            return Err(format!("run {id} is of state table {}", run.table_id));
        }
        if run.min_key > run.max_key || run.min_epoch > run.max_epoch {
            return Err(format!("run {id} ends before it begins"));
        }
        if run.sequence > self.sequence {
            let to_come = Sequence::stored(run.sequence);
            return Err(format!("run {id} holds commit {to_come}, which is to come"));
        }
        Ok(())
    }

    /// The first broken invariant between this version and the next, in words: nothing that counts up goes back.
    pub fn check_next(&self, next: &Version) -> Result<(), String> {
        let counters = |v: &Version| (v.epoch, v.sequence, v.flushed_sequence, v.horizon);
        let (before, after) = (counters(self), counters(next));
        let falls =
            after.0 < before.0 || after.1 < before.1 || after.2 < before.2 || after.3 < before.3;
        if falls {
            return Err(format!("(epoch, sequence, flushed, horizon) {before:?} became {after:?}"));
        }
        for (id, table) in &self.tables {
            let Some(then) = next.tables.get(id) else {
                return Err(format!("state table {id} is gone"));
            };
            let bounds = (table.retain.map(|r| r.bound), then.retain.map(|r| r.bound));
            if bounds.1 < bounds.0 || then.group < table.group {
                return Err(format!("the bound or group of state table {id} has gone back"));
            }
        }
        Ok(())
    }
}

/// The first broken invariant of an edit that rewrites runs, in words: the runs it adds to a level that is sorted do not
/// overlap, and are in order.
pub(crate) fn check_rewrite(edit: &VersionEdit) -> Result<(), String> {
    let sorted = |r: &&RunMeta| r.level > 0;
    let added = edit.add_runs.iter().filter(sorted);
    for (a, b) in added.clone().zip(added.skip(1)) {
        if (a.table_id, a.level) == (b.table_id, b.level) && a.max_key >= b.min_key {
            return Err(format!("runs {} and {} of a rewriting overlap", a.run_id, b.run_id));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::Schema;
    use millrace_common::Epoch;
    use millrace_common::access::AccessClass;

    use super::*;
    use crate::memrun::SealId;
    use crate::table::{RowStorage, TableDesc};

    const TABLE: TableId = TableId(3);

    fn run(run_id: u64, sequence: u64) -> RunMeta {
        RunMeta {
            run_id,
            sequence,
            table_id: TABLE.0,
            object: "segment".to_owned(),
            offset: run_id * 100,
            min_key: "a".into(),
            max_key: "f".into(),
            ..RunMeta::default()
        }
    }

    /// Two commits in memory, of epochs 5 and 6, above two disk runs.
    fn version() -> Version {
        let desc = TableDesc {
            id: TABLE,
            name: "rows".into(),
            value_schema: Arc::new(Schema::empty()),
            storage: RowStorage::Keyed,
            class: AccessClass::PointUpdate,
            relation: true,
            retention: None,
        };
        let mut version = Version::new([desc], Arc::default());
        version.epoch = Epoch(6);
        version.load(&[run(1, 1), run(2, 2)], &[], vec![]);
        version.sequence = 4;
        let sealed = MemRun::sealed(TABLE, Arc::from([]), SealId { writer: 1, seal: 1 });
        version.add_runs(Epoch(5), 3, std::slice::from_ref(&sealed));
        version.add_runs(Epoch(6), 4, &[sealed]);
        version
    }

    #[test]
    fn a_broken_version_is_noticed() {
        version().check_invariants().unwrap();
        let breaks: [(&str, fn(&mut Version)); 10] = [
            ("wrong order", |v| v.table_mut(TABLE).unwrap().mem.reverse()),
            ("wrong order", |v| {
                let table = v.table_mut(TABLE).unwrap();
                (table.mem[1].min_sequence, table.mem[1].max_sequence) = (3, 3);
            }),
            ("to come", |v| {
                v.apply(&VersionEdit { add_runs: vec![run(3, 9)], ..VersionEdit::default() })
            }),
            ("of commits", |v| v.sequence = 3),
            ("flushed", |v| v.flushed_sequence = 3),
            ("of epochs", |v| v.epoch = Epoch(5)),
            ("not begun", |v| v.table_mut(TABLE).unwrap().group = 0),
            ("there twice", |v| {
                let table = v.table_mut(TABLE).unwrap();
                table.disk.push(Arc::clone(&table.disk[0]));
            }),
            ("two runs lie", |v| {
                let other = RunMeta { offset: 100, ..run(3, 2) };
                v.apply(&VersionEdit { add_runs: vec![other], ..VersionEdit::default() });
            }),
            ("ends before", |v| {
                let other = RunMeta { min_key: "z".into(), ..run(3, 2) };
                v.apply(&VersionEdit { add_runs: vec![other], ..VersionEdit::default() });
            }),
        ];
        for (says, damage) in breaks {
            let mut version = version();
            damage(&mut version);
            let broken = version.check_invariants().unwrap_err();
            assert!(broken.contains(says), "{broken}");
        }
    }

    #[test]
    fn a_version_that_goes_back_is_noticed() {
        let before = version();
        let mut next = before.clone();
        next.add_runs(Epoch(6), 4, &[]);
        before.check_next(&next).unwrap();
        next.epoch = Epoch(4);
        assert!(before.check_next(&next).is_err());
        let mut next = before.clone();
        next.table_mut(TABLE).unwrap().group -= 1;
        assert!(before.check_next(&next).is_err());
    }

    #[test]
    fn outputs_that_overlap_are_noticed() {
        let at = |run_id, keys: [&'static str; 2]| RunMeta {
            level: 1,
            min_key: keys[0].into(),
            max_key: keys[1].into(),
            ..run(run_id, 2)
        };
        let edit =
            |add_runs| VersionEdit { add_runs, remove_runs: vec![1], ..VersionEdit::default() };
        check_rewrite(&edit(vec![at(5, ["a", "c"]), at(6, ["d", "f"])])).unwrap();
        assert!(check_rewrite(&edit(vec![at(5, ["a", "d"]), at(6, ["d", "f"])])).is_err());
    }
}
