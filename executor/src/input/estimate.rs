//! How many rows the first scan of a source will have read at its end, as far as offsets tell.
//!
//! Offsets may count bytes. The rows read so far tell how many of them a row takes; before there are any, the source
//! gives an estimate.

use crate::stats::Progress;

/// Of one reader and its splits.
#[derive(Debug, Default)]
pub struct ScanEstimate {
    /// From the splits' start to their end.
    total: u64,
    /// Read since the reader was made.
    offsets: u64,
    rows: u64,
    /// What has been told of it.
    told: u64,
}

impl ScanEstimate {
    /// A scan of so many offsets in all.
    pub fn begin(&mut self, total: u64, offsets_per_row: u64, progress: &Progress) {
        self.total = total;
        self.tell(offsets_per_row, progress);
    }

    /// These offsets gave these rows.
    pub fn read(&mut self, offsets: u64, rows: u64, offsets_per_row: u64, progress: &Progress) {
        self.offsets += offsets;
        self.rows += rows;
        progress.scanned.add(rows);
        self.tell(offsets_per_row, progress);
    }

    fn tell(&mut self, offsets_per_row: u64, progress: &Progress) {
        let left = self.total.saturating_sub(self.offsets);
        let left = match self.rows {
            0 => left / offsets_per_row.max(1),
            rows => {
                let rows = u128::from(left) * u128::from(rows) / u128::from(self.offsets.max(1));
                u64::try_from(rows).unwrap_or(u64::MAX)
            }
        };
        progress.to_scan.replace(&mut self.told, self.rows + left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_read_tell_how_many_are_left() {
        let progress = Progress::new(millrace_common::EnvHandle::default());
        progress.to_scan.add(7);
        let mut estimate = ScanEstimate::default();
        estimate.begin(10_000, 100, &progress);
        assert_eq!(progress.to_scan.get(), 7 + 100);
        // A row takes 20 bytes instead.
        estimate.read(2_000, 100, 100, &progress);
        assert_eq!((progress.scanned.get(), progress.to_scan.get()), (100, 7 + 500));
        estimate.read(8_000, 380, 100, &progress);
        assert_eq!((progress.scanned.get(), progress.to_scan.get()), (480, 7 + 480));
    }
}
