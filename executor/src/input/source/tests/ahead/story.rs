//! What happens to a source, and to a job that reads it.

use millrace_rpc::log::{SplitMark, SplitMarkAt};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::{FILE, LAST, SPLITS};

/// What happens to a source and to the job that reads it.
#[derive(Clone, Debug)]
pub struct Story {
    /// Where the splits end at each epoch; the first is empty.
    pub epochs: Vec<[u64; SPLITS as usize]>,
    /// The epoch at which the last split is found.
    pub found: usize,
    /// The epoch of the first scan; `None`: the job is as old as the source.
    pub scan: Option<usize>,
    pub marks: Vec<SplitMarkAt>,
    /// At which epochs a bad row is to fail, at first.
    pub fails: Vec<bool>,
    /// After how many chunks the job is killed in an epoch, the first time.
    pub kills: Vec<Option<usize>>,
    /// How far what is planned for an epoch lies beyond what then is fixed.
    pub beyond: Vec<u64>,
    /// What happens beside the job before it is told of an epoch, and after it has been started again.
    pub pauses: Vec<usize>,
    /// At which epochs the source is paused: what would come then comes later, together.
    pub paused: Vec<bool>,
    /// How many epochs the log has beyond the one that the job is told of.
    pub lags: Vec<usize>,
}

impl Story {
    pub fn random(seed: u64) -> Story {
        let mut random = StdRng::seed_from_u64(seed);
        let found = if random.random_bool(0.5) { 0 } else { random.random_range(2..8) };
        let scan = if random.random_bool(0.4) { Some(random.random_range(1..5)) } else { None };
        let mut epochs = vec![[0; SPLITS as usize]];
        let (mut marks, mut is_idle) = (Vec::new(), [false; SPLITS as usize]);
        for epoch in 1..10 {
            let mut ends = epochs[epoch - 1];
            for split in (0..SPLITS).filter(|split| *split != LAST || epoch >= found) {
                let (end, is_idle) = (&mut ends[split as usize], &mut is_idle[split as usize]);
                let floor = Some(*end as i64 * 10 + 20);
                let mark = match (*is_idle, random.random_range(0..10)) {
                    (true, 5..) | (false, 0..2) => Some(SplitMark { split, idle: false, floor }),
                    (false, 2) => Some(SplitMark { split, idle: true, floor: None }),
                    _ => None,
                };
                if let Some(mark) = mark {
                    *is_idle = mark.idle;
                    marks.push(SplitMarkAt { epoch: epoch as u64, mark, offset: *end });
                }
                // Nothing comes of an idle split.
                *end += if *is_idle { 0 } else { random.random_range(0..25) };
            }
            epochs.push(ends);
        }
        let count = epochs.len();
        let mut each =
            |chance: f64| (0..count).map(|_| random.random_bool(chance)).collect::<Vec<_>>();
        let (fails, killed, wrong) = (each(0.2), each(0.3), each(0.3));
        let mut number = |of: &[bool], most: usize| {
            of.iter().map(|is| is.then(|| random.random_range(0..most))).collect::<Vec<_>>()
        };
        let kills = number(&killed, 6);
        let beyond = number(&wrong, 4).into_iter().map(|n| n.map_or(0, |n| n as u64 + 1)).collect();
        let pauses = (0..count).map(|_| random.random_range(0..12)).collect();
        let paused: Vec<bool> = (0..count).map(|_| random.random_bool(0.15)).collect();
        for epoch in (1..count).filter(|epoch| paused[*epoch]) {
            epochs[epoch] = epochs[epoch - 1];
        }
        let lag = |_| if random.random_bool(0.3) { random.random_range(1..4_usize) } else { 0 };
        let lags = (0..count).map(lag).collect();
        Story { epochs, found, scan, marks, fails, kills, beyond, pauses, paused, lags }
    }

    /// The splits that are known at an epoch.
    pub fn splits(&self, epoch: usize) -> impl Iterator<Item = u32> {
        let is_found = epoch >= self.found;
        (0..SPLITS).filter(move |split| *split != LAST || is_found)
    }

    /// Where a split's content ends that is known of at an epoch.
    pub fn files_end(&self, epoch: usize, split: u32) -> u64 {
        self.epochs[epoch][split as usize].div_ceil(FILE) * FILE
    }
}

/// Epochs of five rows a split, all as planned.
pub fn plain() -> Story {
    let epochs: Vec<_> = (0..10).map(|e| [e * 5; SPLITS as usize]).collect();
    let count = epochs.len();
    Story {
        epochs,
        found: 0,
        scan: None,
        marks: Vec::new(),
        fails: vec![false; count],
        kills: vec![None; count],
        beyond: vec![0; count],
        pauses: vec![0; count],
        paused: vec![false; count],
        lags: vec![0; count],
    }
}
