//! Which of the places where rows can be looked at is used for an input of an operator (docs/design.md §8).
//!
//! The unit is the epoch: it waits for its slowest read, so one late key makes it late. A later place costs less and is
//! surer of what it says; an earlier one has more lead. So the latest is taken that nearly always has more lead than
//! nearly all epochs need, and where none has, the one that hides the most for what it costs.

/// Epochs of a place that must have been seen before it is judged.
pub const MIN_EPOCHS: usize = 64;
/// By how much another place must be better than the one in use.
const MARGIN: f64 = 1.1;

/// What is known of a place, of the last epochs that were seen there.
#[derive(Clone, Debug, Default)]
pub struct Candidate {
    /// Of each epoch: from the last hint to the first row, and the slowest read (0: none); microseconds. A negative
    /// slack: hints came after rows.
    pub epochs: Vec<(i64, i64)>,
    /// Reads for one key that is used: 1 if none is in vain.
    pub cost: f64,
    /// Not to be chosen: too much was read ahead in vain.
    pub is_barred: bool,
    /// Nothing is seen there though rows come: not to be chosen where another place sees them.
    pub is_silent: bool,
}

impl Candidate {
    fn is_known(&self) -> bool {
        self.epochs.len() >= MIN_EPOCHS
    }

    /// What nearly every epoch has.
    fn least_slack(&self) -> i64 {
        quantile(&sorted(self.epochs.iter().map(|e| e.0)), 0.01).unwrap_or(0)
    }

    /// Microseconds of an epoch's slowest read that are hidden, on average, for what a used key costs.
    fn worth(&self) -> f64 {
        let reading = || self.epochs.iter().filter(|(_, read)| *read > 0);
        let hidden: i64 = reading().map(|(slack, read)| (*slack).clamp(0, *read)).sum();
        hidden as f64 / reading().count().max(1) as f64 / self.cost.max(1.0)
    }
}

/// The place to use, out of `candidates`, the earliest first; `active` is the one in use. `None`: all are barred.
pub fn choose(candidates: &[Candidate], active: usize) -> Option<usize> {
    let all = || 0..candidates.len();
    let free = |at: &usize| candidates.get(*at).is_some_and(|c| !c.is_barred);
    let open = |at: &usize| free(at) && !candidates[*at].is_silent;
    let in_use = Some(active).filter(open).map(|at| &candidates[at]);
    let known = || all().filter(open).filter(|at| candidates[*at].is_known());
    if in_use.is_some_and(|c| !c.is_known()) {
        return Some(active);
    }
    let reads = candidates.iter().flat_map(|c| c.epochs.iter().map(|e| e.1)).filter(|r| *r > 0);
    let Some(needed) = quantile(&sorted(reads), 0.9).or(in_use.is_none().then_some(0)) else {
        return Some(active);
    };
    let needed = needed as f64;
    let margin = |at: usize| if at == active { 1.0 } else { MARGIN };
    let suffices = |at: &usize| candidates[*at].least_slack() as f64 > needed * margin(*at);
    if let Some(latest) = known().rfind(suffices) {
        return Some(latest);
    }
    let mut best = in_use.map(|c| (active, c.worth() * MARGIN));
    // Of equal ones the later.
    for at in known().rev().filter(|at| *at != active) {
        let worth = candidates[at].worth();
        if best.is_none_or(|(_, known)| worth > known) {
            best = Some((at, worth));
        }
    }
    let next = || (active + 1..candidates.len()).find(open);
    let other = || all().rfind(open).or_else(|| Some(active).filter(free));
    best.map(|(at, _)| at).or_else(next).or_else(other).or_else(|| all().rfind(free))
}

/// Whether a place is to be left: what was read ahead in vain exceeds what it was worth. `value`: how many reads in
/// vain are worth one that was hidden from its row.
pub fn is_in_vain(unused: f64, hidden: f64, value: f64) -> bool {
    unused > hidden * value
}

/// Numbers in ascending order.
pub fn sorted(of: impl Iterator<Item = i64>) -> Vec<i64> {
    let mut sorted: Vec<i64> = of.collect();
    sorted.sort_unstable();
    sorted
}

/// The least of sorted numbers that at least a share `q` of them do not exceed.
pub fn quantile(sorted: &[i64], q: f64) -> Option<i64> {
    let rank = (sorted.len() as f64 * q).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A place where every epoch has this slack, and reads of these times.
    fn place(slack: i64, reads: &[i64]) -> Candidate {
        let epochs = reads.iter().cycle().take(MIN_EPOCHS).map(|read| (slack, *read)).collect();
        Candidate { epochs, cost: 1.0, ..Candidate::default() }
    }

    #[test]
    fn quantiles_are_of_the_nearest_rank() {
        let numbers = sorted((1..=100).rev());
        assert_eq!(
            [0.01, 0.5, 0.9, 0.99].map(|q| quantile(&numbers, q)),
            [1, 50, 90, 99].map(Some)
        );
        assert_eq!(
            (quantile(&[7], 0.5), quantile(&[7], 0.0), quantile(&[], 0.5)),
            (Some(7), Some(7), None)
        );
    }

    #[test]
    fn the_latest_place_is_used_that_has_enough_lead() {
        let reads = [1_000, 2_000, 3_000];
        let of = |entry, root| vec![place(entry, &reads), place(root, &reads)];
        assert_eq!(choose(&of(9_000, 4_000), 0), Some(1), "the later one suffices");
        assert_eq!(choose(&of(9_000, 2_000), 0), Some(0), "only the earlier one does");
        assert_eq!(choose(&of(9_000, 2_000), 1), Some(0), "and is gone back to");
        assert_eq!(choose(&of(9_000, 3_100), 0), Some(0), "not for a hair");
        assert_eq!(choose(&of(9_000, 3_100), 1), Some(1), "nor back");
    }

    #[test]
    fn epochs_without_reads_are_no_reason_to_change() {
        let of = |active| choose(&[place(9_000, &[0]), place(10, &[0])], active);
        assert_eq!((of(0), of(1)), (Some(0), Some(1)));
    }

    #[test]
    fn one_epoch_in_fifty_with_less_slack_makes_a_place_unsure() {
        let mut root = place(9_000, &[1_000]);
        (root.epochs[5].0, root.epochs[40].0) = (-200, 100);
        assert_eq!(choose(&[place(9_000, &[1_000]), root], 0), Some(0));
    }

    #[test]
    fn where_none_suffices_the_one_that_hides_most_for_its_cost_is_used() {
        let reads = [30_000, 150_000];
        let (entry, root) = (place(20_000, &reads), place(12_000, &reads));
        assert_eq!(choose(&[entry.clone(), root.clone()], 1), Some(0));
        let dear = Candidate { cost: 2.0, ..entry.clone() };
        assert_eq!(choose(&[dear, root.clone()], 0), Some(1), "for half of it is in vain");
        assert_eq!(choose(&[entry, place(19_000, &reads)], 1), Some(1), "not for a twentieth more");
    }

    #[test]
    fn a_place_is_judged_when_enough_was_seen_of_it() {
        let mut seen = place(9_000, &[1_000]);
        seen.epochs.pop();
        assert_eq!(choose(&[place(9_000, &[1_000]), seen.clone()], 0), Some(0));
        assert_eq!(
            choose(&[seen, place(9_000, &[1_000])], 0),
            Some(0),
            "nor is the one in use left"
        );
        assert_eq!(choose(&[Candidate::default()], 0), Some(0));
    }

    #[test]
    fn a_place_that_sees_nothing_is_not_used_where_another_one_sees_rows() {
        let silent = || Candidate { is_silent: true, ..Candidate::default() };
        let was_seen = Candidate { is_silent: true, ..place(9_000, &[1_000]) };
        let (leaf, new) = (place(500, &[1_000]), Candidate::default());
        assert_eq!(choose(&[silent(), silent(), leaf.clone()], 0), Some(2));
        assert_eq!(choose(&[was_seen, leaf], 0), Some(1), "whatever was seen there before");
        assert_eq!(choose(&[silent(), new], 0), Some(1), "though little is known of the other");
        assert_eq!(choose(&[silent(), silent()], 1), Some(1), "nothing is known of any");
        let barred = Candidate { is_barred: true, ..place(500, &[1_000]) };
        assert_eq!(choose(&[silent(), barred], 1), Some(0), "it may see rows some day");
    }

    #[test]
    fn a_place_in_vain_is_left() {
        assert!(is_in_vain(12.0, 100.0, 0.11) && !is_in_vain(10.0, 100.0, 0.11));
        assert!(is_in_vain(1.0, 0.0, 0.11) && !is_in_vain(0.0, 0.0, 0.11));
        let barred = |slack| Candidate { is_barred: true, ..place(slack, &[1_000]) };
        let root = place(500, &[1_000]);
        assert_eq!(choose(&[barred(9_000), root.clone()], 0), Some(1), "whatever lead it had");
        assert_eq!(
            choose(&[barred(9_000), Candidate::default()], 0),
            Some(1),
            "if nothing is known"
        );
        let unknown = Candidate::default();
        assert_eq!(
            choose(&[barred(9_000), unknown.clone(), unknown], 0),
            Some(1),
            "the next one, not the last"
        );
        assert_eq!(choose(&[barred(9_000), barred(9_000)], 0), None);
    }
}
