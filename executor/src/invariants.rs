//! What holds of the tasks and epochs of a derived job, as functions: called when its tasks are built, and at every
//! cut, in debug builds.

use std::ops::Range;

use millrace_common::{Epoch, VNODE_COUNT, Vnode};

/// The first broken invariant of a barrier's reports, in words: every task of the job has reported this epoch, once.
/// `reports`: the number of the task, and the epoch that it ended.
pub fn check_reports(reports: &[(usize, Epoch)], tasks: usize, epoch: Epoch) -> Result<(), String> {
    let mut reported = vec![false; tasks];
    for (task, of) in reports {
        if *of != epoch {
            return Err(format!("task {task} has ended {of} at the barrier of {epoch}"));
        }
        match reported.get_mut(*task) {
            None => return Err(format!("there is no task {task} among {tasks}")),
            Some(true) => return Err(format!("task {task} has reported {epoch} twice")),
            Some(reported) => *reported = true,
        }
    }
    match reported.iter().position(|reported| !reported) {
        Some(task) => Err(format!("task {task} has not reported {epoch}")),
        None => Ok(()),
    }
}

/// The first broken invariant of sealed epochs that are not concluded, oldest first, in words: they are numbered without
/// a gap up to the last one sealed, and epochs do not fall (the commits of a backfill share one).
pub fn check_in_flight(
    in_flight: impl IntoIterator<Item = (u64, Epoch)>,
    last: (u64, Epoch),
) -> Result<(), String> {
    let mut before: Option<(u64, Epoch)> = None;
    for (number, epoch) in in_flight {
        if let Some((previous, of)) = before
            && (previous + 1 != number || of > epoch)
        {
            return Err(format!("cut {number} of {epoch} follows cut {previous} of {of}"));
        }
        before = Some((number, epoch));
    }
    match before {
        Some(newest) if newest != last => {
            Err(format!("the newest cut in flight is {newest:?}, the last one sealed {last:?}"))
        }
        _ => Ok(()),
    }
}

/// The first broken invariant of the vnodes of a fragment's tasks, in words: every vnode has one owner.
pub fn check_owners(owned: &[Range<Vnode>]) -> Result<(), String> {
    let mut next = 0;
    for (task, vnodes) in owned.iter().enumerate() {
        if vnodes.start != next || vnodes.end < vnodes.start {
            return Err(format!("task {task} owns vnodes {vnodes:?}, not from {next} on"));
        }
        next = vnodes.end;
    }
    if usize::from(next) != VNODE_COUNT {
        return Err(format!("vnodes from {next} on have no owner"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::owned_vnodes;

    const E: Epoch = Epoch(7);

    #[test]
    fn every_task_reports_once() {
        check_reports(&[(1, E), (0, E)], 2, E).unwrap();
        assert!(check_reports(&[(1, E), (1, E)], 2, E).is_err(), "twice");
        assert!(check_reports(&[(1, E)], 2, E).is_err(), "not all");
        assert!(check_reports(&[(0, E), (2, E)], 2, E).is_err(), "an unknown one");
        assert!(check_reports(&[(0, E), (1, Epoch(6))], 2, E).is_err(), "another epoch");
    }

    #[test]
    fn cuts_are_in_order() {
        check_in_flight([], (4, E)).unwrap();
        check_in_flight([(3, Epoch(6)), (4, E)], (4, E)).unwrap();
        check_in_flight([(3, E), (4, E)], (4, E)).unwrap();
        assert!(check_in_flight([(2, Epoch(6)), (4, E)], (4, E)).is_err(), "a gap");
        assert!(check_in_flight([(3, Epoch(8)), (4, E)], (4, E)).is_err(), "a fall");
        assert!(check_in_flight([(3, Epoch(6))], (4, E)).is_err(), "the last one is missing");
    }

    #[test]
    fn every_vnode_has_one_owner() {
        for parallelism in 1..=VNODE_COUNT {
            let owned: Vec<_> = (0..parallelism).map(|t| owned_vnodes(t, parallelism)).collect();
            check_owners(&owned).unwrap();
        }
        assert!(check_owners(&[0..100, 101..256]).is_err(), "a gap");
        assert!(check_owners(&[0..100, 90..256]).is_err(), "two owners");
        assert!(check_owners(&[0..100, 100..255]).is_err(), "the last one is missing");
    }
}
