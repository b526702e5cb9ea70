//! Counts of DISTINCT values ahead of rows (docs/design.md §8).
//!
//! A count that was read ahead is the stored one when its row comes: a value's entry is written only at the barrier, or
//! before it where the epoch is settled in parts, and its count is asked for, as demand, before that is done
//! ([`ValueTable::begin`]), so that what was read ahead of it is not taken in any more.

use std::sync::Arc;

use arrow::array::{Array, UInt32Array};
use arrow::compute;
use millrace_common::Epoch;

use super::ValueTable;
use crate::error::ExecError;
use crate::lookahead::presence::Presence;
use crate::lookahead::{Hint, HintTimes};
use crate::state::keyed::SeenInside;

impl ValueTable {
    /// Rows with these values of groups will come: reads ahead how often they have come.
    pub fn hint(&mut self, hint: &Hint) -> Result<(), ExecError> {
        match without_nulls(hint)? {
            Some(others) if others.count() == 0 => Ok(()),
            Some(others) => self.state.hint(0, &others),
            None => self.state.hint(0, hint),
        }
    }

    /// Counts are being read that no row waits for.
    pub fn is_prefetching(&self) -> bool {
        self.state.is_prefetching()
    }

    /// An epoch ends, all rows of which have run.
    pub fn pass(&mut self, epoch: Epoch) -> SeenInside {
        self.state.pass_inside(epoch)
    }

    pub fn share_presence(&mut self, presence: Option<&Arc<Presence>>) {
        self.state.share_presence(presence);
    }

    /// Values of groups whose column `at` is below the bound are never asked for again.
    pub fn close(&mut self, at: usize, bound: i64) {
        self.state.close(at, bound);
    }

    /// The watermarks of the input have moved.
    pub fn watermark(&mut self, port: usize, columns: &[(usize, i64)]) {
        self.state.watermark(port, columns);
    }
}

/// A hint without the keys whose value is NULL: it counts for no call. `None`: there are none, or it is no hint of values.
fn without_nulls(hint: &Hint) -> Result<Option<Hint>, ExecError> {
    let nulls = hint.columns.last().and_then(|values| values.logical_nulls());
    let Some(nulls) = nulls.filter(|nulls| nulls.null_count() > 0 && hint.is_whole()) else {
        return Ok(None);
    };
    let rows: Vec<usize> = nulls.inner().set_indices().collect();
    let times = match &hint.times {
        HintTimes::Before { .. } => {
            let all = hint.times.read(&hint.columns).unwrap_or_default();
            let kept: Vec<i64> = rows.iter().filter_map(|&row| all.get(row).copied()).collect();
            HintTimes::of(&kept)
        }
        of_key => of_key.clone(),
    };
    let rows = UInt32Array::from_iter_values(rows.into_iter().map(|row| row as u32));
    let columns = hint.columns.iter().map(|column| compute::take(column, &rows, None));
    let columns = columns.collect::<Result<Vec<_>, _>>()?;
    let Hint { node, port, .. } = *hint;
    Ok(Some(Hint { node, port, columns, times, due: hint.due.clone(), carried: None }))
}
