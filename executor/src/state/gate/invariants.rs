//! What holds of a gate after every call.

use super::{END, KeyGate, Parked};

impl KeyGate {
    /// The first broken invariant, in words: every parked row is in the queue of one key, chunks count their parked rows
    /// and are let go with the last of them, and rows and bytes are the sums of the chunks'.
    pub fn check_invariants(&self) -> Result<(), String> {
        let mut seen = vec![false; self.nodes.len()];
        let mut waiting = vec![0; self.chunks.len()];
        for (slot, (head, tail)) in &self.queues {
            let mut last = END;
            self.walk(*head, &mut seen, |at, parked| {
                last = at;
                waiting[parked.chunk as usize] += 1;
            })?;
            if last != *tail {
                return Err(format!("the queue of slot {slot} does not end with its last row"));
            }
        }
        self.walk(self.free, &mut seen, |_, _| {})?;
        if let Some(lost) = seen.iter().position(|seen| !seen) {
            return Err(format!("parked row {lost} is in no queue"));
        }
        self.check_chunks(&waiting)
    }

    fn walk(
        &self,
        head: u32,
        seen: &mut [bool],
        mut each: impl FnMut(u32, &Parked),
    ) -> Result<(), String> {
        let mut at = head;
        while at != END {
            let place = seen.get_mut(at as usize);
            let place = place.ok_or_else(|| format!("parked row {at} does not exist"))?;
            if std::mem::replace(place, true) {
                return Err(format!("parked row {at} is in two queues"));
            }
            let parked = &self.nodes[at as usize];
            each(at, parked);
            at = parked.next;
        }
        Ok(())
    }

    fn check_chunks(&self, waiting: &[usize]) -> Result<(), String> {
        let (mut rows, mut bytes, mut gone) = (0, 0, 0);
        for (id, (chunk, found)) in self.chunks.iter().zip(waiting).enumerate() {
            let counted = chunk.as_ref().map_or(0, |c| c.waiting);
            if counted != *found || (chunk.is_some() && counted == 0) {
                return Err(format!("chunk {id} counts {counted} parked rows of {found}"));
            }
            match chunk {
                Some(chunk) => (rows, bytes) = (rows + chunk.waiting, bytes + chunk.bytes),
                None => gone += 1,
            }
        }
        if gone != self.free_chunks.len() {
            return Err(format!("{gone} chunks are gone, {} are free", self.free_chunks.len()));
        }
        if (rows, bytes) != (self.rows, self.bytes) {
            let counted = (self.rows, self.bytes);
            return Err(format!("rows and bytes are {counted:?}, not {:?}", (rows, bytes)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int64Array, RecordBatch};
    use millrace_common::DeltaChunk;

    use super::*;

    fn gate() -> KeyGate {
        let rows = Arc::new(Int64Array::from(vec![1, 2, 3, 4]));
        let batch = RecordBatch::try_from_iter([("n", rows as _)]).unwrap();
        let chunk = DeltaChunk::new(batch, None);
        let mut gate = KeyGate::new();
        gate.park(0, &chunk, &[0, 1, 3], &[7, 8, 7]);
        gate.park(1, &chunk, &[2], &[8]);
        gate
    }

    #[test]
    fn what_is_parked_and_taken_adds_up() {
        let mut gate = gate();
        gate.check_invariants().unwrap();
        gate.take([7]).unwrap();
        gate.check_invariants().unwrap();
        gate.take([8]).unwrap();
        gate.check_invariants().unwrap();
        assert!(gate.is_empty());
    }

    #[test]
    fn a_broken_gate_is_noticed() {
        let breaks: [(&str, fn(&mut KeyGate)); 5] = [
            ("in no queue", |g| g.queues.retain(|slot, _| *slot != 8)),
            ("in two queues", |g| g.free = 0),
            ("does not end", |g| g.queues.get_mut(&7).unwrap().1 = 1),
            ("counts", |g| g.chunks[0].as_mut().unwrap().waiting += 1),
            ("rows and bytes", |g| g.bytes += 1),
        ];
        for (says, damage) in breaks {
            let mut gate = gate();
            damage(&mut gate);
            let broken = gate.check_invariants().unwrap_err();
            assert!(broken.contains(says), "{broken}");
        }
    }
}
