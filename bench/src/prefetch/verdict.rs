//! Whether hints have followed a change, from the time-line.

use serde::Serialize;

/// All should be normal so long after the keys have changed.
const BACK_S: usize = 5;
/// Shares of the rows by which a number may be above what it was.
const NORMAL: f64 = 0.05;
const STEADY: f64 = 0.02;

/// What was counted in a second. Names are those of the JSON line.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Second {
    pub second: u64,
    /// 1: keys in memory; 2: cold ones; 3: from a faster store.
    pub phase: u32,
    /// That were due.
    pub rows: u64,
    /// Keys that a row waited for, `late` ones among them.
    pub demand: u64,
    /// Keys read ahead that were there when their row came, that were not, and that no row needed.
    pub in_time: u64,
    pub late: u64,
    pub unused: u64,
    pub store_gets: u64,
    /// Where rows are looked at; `off`: nowhere.
    pub place: String,
    pub visible_p50_ms: f64,
    pub visible_p99_ms: f64,
}

impl Second {
    fn share(&self, keys: u64) -> f64 {
        keys as f64 / self.rows.max(1) as f64
    }

    /// Reads that a row waited for and nobody had announced, by rows.
    fn unannounced(&self) -> f64 {
        self.share(self.demand.saturating_sub(self.late))
    }

    fn late(&self) -> f64 {
        self.share(self.late)
    }

    fn unused(&self) -> f64 {
        self.share(self.unused)
    }
}

/// Names are those of the JSON line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    pub check: String,
    /// By rows: the number before the change, and its limit after it.
    pub before: f64,
    pub limit: f64,
    /// By rows, in the steady state after the change.
    pub after: f64,
    /// Seconds until it was within the limit; null: it never was.
    pub seconds: Option<usize>,
    pub met: bool,
}

/// Of a time-line with phases of so many seconds.
pub fn of(seconds: &[Second], phase: usize) -> Vec<Verdict> {
    let part = |from: usize, to: usize| {
        seconds.get(from.min(seconds.len())..to.min(seconds.len())).unwrap_or_default()
    };
    // The second half of a phase is its steady state.
    let steady = |n: usize| part(n * phase - phase / 2, n * phase);
    let mut verdicts = vec![back_to_normal(steady(1), part(phase, 2 * phase), steady(2))];
    let numbers: [(&str, fn(&Second) -> f64); 3] = [
        ("unannounced reads", Second::unannounced),
        ("late keys", Second::late),
        ("unused keys", Second::unused),
    ];
    for (name, number) in numbers {
        verdicts.push(no_rise(name, number, steady(2), part(2 * phase, 3 * phase)));
    }
    verdicts
}

fn back_to_normal(before: &[Second], changed: &[Second], steady: &[Second]) -> Verdict {
    let was = median(before, Second::unannounced);
    let limit = was + NORMAL;
    // From there on mostly: one second does not count.
    let is_normal = |at: &usize| {
        changed[*at].unannounced() <= limit && median(&changed[*at..], Second::unannounced) <= limit
    };
    let seconds = (0..changed.len()).find(is_normal);
    Verdict {
        check: format!("unannounced reads are back within {BACK_S} s of other keys"),
        before: was,
        limit,
        after: median(steady, Second::unannounced),
        seconds,
        met: seconds.is_some_and(|s| s <= BACK_S),
    }
}

fn no_rise(name: &str, number: fn(&Second) -> f64, before: &[Second], after: &[Second]) -> Verdict {
    let mean = |of: &[Second]| of.iter().map(number).sum::<f64>() / of.len().max(1) as f64;
    let (was, is) = (median(before, number), median(after, number));
    // Neither in the end nor in the first seconds.
    let first = after.get(..BACK_S.min(after.len())).unwrap_or_default();
    let met = is <= was + STEADY && mean(first) <= mean(before) + NORMAL;
    Verdict {
        check: format!("{name} do not rise with a faster store"),
        before: was,
        limit: was + STEADY,
        after: is,
        seconds: met.then_some(0),
        met,
    }
}

fn median(seconds: &[Second], number: fn(&Second) -> f64) -> f64 {
    let mut all: Vec<f64> = seconds.iter().map(number).collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or_default()
}

/// What a run comes to. Names are those of the JSON line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    pub mode: String,
    /// The store at first, and in the third phase.
    pub profile: String,
    pub faster: String,
    pub rate: f64,
    pub checks: usize,
    pub met: usize,
    /// Names of the checks that are not met.
    pub missed: Vec<String>,
}

impl Outcome {
    /// With these verdicts. `of`: who and what.
    pub fn with(verdicts: &[Verdict], of: Outcome) -> Outcome {
        let missed: Vec<String> =
            verdicts.iter().filter(|v| !v.met).map(|v| v.check.clone()).collect();
        Outcome { checks: verdicts.len(), met: verdicts.len() - missed.len(), missed, ..of }
    }

    /// A line for people and one for programs.
    pub fn print(&self) -> Result<(), String> {
        println!(
            "adapt {} {}: {} of {} checks are met",
            self.mode, self.profile, self.met, self.checks
        );
        println!("{}", serde_json::to_string(self).map_err(|e| e.to_string())?);
        Ok(())
    }
}

/// A line for people and one for programs of each.
pub fn print(verdicts: &[Verdict]) -> Result<(), String> {
    for v in verdicts {
        let seconds = v.seconds.map_or_else(|| "never".to_owned(), |s| format!("after {s} s"));
        let word = if v.met { "yes" } else { "NO" };
        println!(
            "{}: {word} ({:.3} by row before, at most {:.3}, {:.3} in the end, {seconds})",
            v.check, v.before, v.limit, v.after
        );
    }
    for verdict in verdicts {
        println!("{}", serde_json::to_string(verdict).map_err(|e| e.to_string())?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PHASE: usize = 10;

    /// By second of the second phase, and by second of the third.
    fn line(changed: impl Fn(usize) -> u64, unused: impl Fn(usize) -> u64) -> Vec<Second> {
        let second = |i: usize| Second {
            second: i as u64,
            rows: 100,
            demand: if (PHASE..2 * PHASE).contains(&i) { changed(i - PHASE) } else { 0 },
            unused: if i >= 2 * PHASE { unused(i - 2 * PHASE) } else { 1 },
            ..Second::default()
        };
        (0..3 * PHASE).map(second).collect()
    }

    #[test]
    fn misses_must_be_back_in_time() {
        let after = |seconds: usize| {
            of(&line(move |s| if s < seconds { 90 } else { 2 }, |_| 1), PHASE).remove(0)
        };
        assert_eq!((after(1).seconds, after(1).met), (Some(1), true));
        assert_eq!((after(7).seconds, after(7).met), (Some(7), false));
        assert_eq!((after(10).seconds, after(10).met), (None, false));
        // One good second between bad ones is no end.
        let verdict = of(&line(|s| if s == 2 { 0 } else { 90 }, |_| 1), PHASE).remove(0);
        assert!(!verdict.met);
    }

    #[test]
    fn what_is_missed_is_named() {
        let verdicts = of(&line(|_| 90, |_| 1), PHASE);
        let nothing = Outcome {
            mode: "lookahead".to_owned(),
            profile: "s3".to_owned(),
            faster: "dfs".to_owned(),
            rate: 1.0,
            checks: 0,
            met: 0,
            missed: Vec::new(),
        };
        let outcome = Outcome::with(&verdicts, nothing);
        assert_eq!((outcome.checks, outcome.met), (4, 3));
        assert_eq!(outcome.missed, ["unannounced reads are back within 5 s of other keys"]);
    }

    #[test]
    fn nothing_may_rise_with_a_faster_store() {
        let unused = |of_second: fn(usize) -> u64| of(&line(|_| 0, of_second), PHASE).remove(3);
        assert!(unused(|_| 2).met);
        assert!(!unused(|_| 20).met, "a rise that stays");
        assert!(!unused(|s| if s == 1 { 50 } else { 1 }).met, "a rise for a while");
    }
}
