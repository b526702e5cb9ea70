//! What was measured, as table rows and JSON lines, and the ratios that it is for.

use std::time::Duration;

use serde::Serialize;

use super::MB;
use super::run::{Download, Recovery};

/// What a measurement is of.
#[derive(Clone, Debug, Serialize)]
pub struct Setting {
    pub size_gb: f64,
    /// Of all runs of the view.
    pub state_mb: f64,
    pub profile: String,
    pub bandwidth_mb_s: u64,
    /// Without it, requests of one round end at different times, and more rounds may be counted.
    pub steady: bool,
}

/// One size in one mode: medians, but for what says otherwise. Names are those of the JSON line.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    #[serde(flatten)]
    pub setting: Setting,
    pub mode: &'static str,
    pub runs: usize,
    pub rounds: u64,
    pub rounds_min: u64,
    pub rounds_max: u64,
    pub gets: u64,
    pub mb_read: f64,
    /// The metadata, and the blocks that were asked for, at most; of a download nothing is said.
    pub allowed_mb: Option<f64>,
    /// The largest ratio of bytes read to those of a run.
    pub read_to_allowed_max: Option<f64>,
    /// From the decision until the row was computed; of a download until all is there.
    pub row_ms: f64,
    pub row_max_ms: f64,
    /// From the decision until the row could be read.
    pub visible_ms: Option<f64>,
    /// From the end of the owner until the decision.
    pub lost_ms: Option<f64>,
}

pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.len().saturating_sub(1) / 2, sorted.len() / 2);
    let at = |i: usize| sorted.get(i).copied().unwrap_or_default();
    (at(low) + at(high)) / 2.0
}

impl Line {
    pub fn of_recoveries(setting: &Setting, all: &[Recovery]) -> Line {
        let of = |what: fn(&Recovery) -> f64| median(all.iter().map(what));
        let rounds = || all.iter().map(|r| r.rounds);
        let most = |what: fn(&Recovery) -> f64| all.iter().map(what).fold(0.0, f64::max);
        Line {
            setting: setting.clone(),
            mode: "recovery",
            runs: all.len(),
            rounds: of(|r| r.rounds as f64).ceil() as u64,
            rounds_min: rounds().min().unwrap_or_default(),
            rounds_max: rounds().max().unwrap_or_default(),
            gets: of(|r| r.gets as f64) as u64,
            mb_read: of(|r| r.bytes as f64) / MB,
            allowed_mb: Some(of(|r| r.allowed as f64) / MB),
            read_to_allowed_max: Some(most(|r| r.bytes as f64 / r.allowed.max(1) as f64)),
            row_ms: of(|r| ms(r.row)),
            row_max_ms: most(|r| ms(r.row)),
            visible_ms: Some(of(|r| ms(r.visible))),
            lost_ms: Some(of(|r| ms(r.lost))),
        }
    }

    pub fn of_download(setting: &Setting, download: &Download) -> Line {
        Line {
            setting: setting.clone(),
            mode: "download",
            runs: 1,
            rounds: download.rounds,
            rounds_min: download.rounds,
            rounds_max: download.rounds,
            gets: download.gets,
            mb_read: download.bytes as f64 / MB,
            allowed_mb: None,
            read_to_allowed_max: None,
            row_ms: ms(download.took),
            row_max_ms: ms(download.took),
            visible_ms: None,
            lost_ms: None,
        }
    }

    pub fn print(&self) -> Result<(), String> {
        let or_nothing = |value: Option<f64>| value.map_or(String::new(), |v| format!("{v:.1}"));
        println!(
            "{:>8} {:8} {:>9.1} {:10} {:>6} {:>5} {:>6} {:>6} {:>9.2} {:>10} {:>9.1} {:>9.1} {:>10} {:>8}",
            self.setting.size_gb,
            self.mode,
            self.setting.state_mb,
            self.setting.profile,
            self.setting.bandwidth_mb_s,
            self.runs,
            self.rounds,
            self.gets,
            self.mb_read,
            or_nothing(self.allowed_mb),
            self.row_ms,
            self.row_max_ms,
            or_nothing(self.visible_ms),
            or_nothing(self.lost_ms),
        );
        println!("{}", serde_json::to_string(self).map_err(|e| e.to_string())?);
        Ok(())
    }
}

pub fn print_header() {
    println!(
        "{:>8} {:8} {:>9} {:10} {:>6} {:>5} {:>6} {:>6} {:>9} {:>10} {:>9} {:>9} {:>10} {:>8}",
        "size_gb",
        "mode",
        "state_mb",
        "profile",
        "mb/s",
        "runs",
        "rounds",
        "gets",
        "mb_read",
        "allowed_mb",
        "row_ms",
        "max_ms",
        "visible_ms",
        "lost_ms"
    );
}

/// One ratio, or number, and what it should be. Names are those of the JSON line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bar {
    pub bar: String,
    pub value: f64,
    /// `value` should be at least, or at most, that; where both are null it is only told.
    pub at_least: Option<f64>,
    pub at_most: Option<f64>,
    pub met: bool,
}

impl Bar {
    fn at_most(bar: String, value: f64, most: f64) -> Bar {
        Bar { bar, value, at_least: None, at_most: Some(most), met: value <= most }
    }

    fn at_least(bar: String, value: f64, least: Option<f64>) -> Bar {
        let met = least.is_none_or(|least| value >= least);
        Bar { bar, value, at_least: least, at_most: None, met }
    }

    pub fn print(&self) -> Result<(), String> {
        let goal = match (self.at_least, self.at_most) {
            (Some(least), _) => format!("at least {least}: {}", met(self.met)),
            (_, Some(most)) => format!("at most {most}: {}", met(self.met)),
            _ => "told only".to_owned(),
        };
        println!("{}: {:.2} ({goal})", self.bar, self.value);
        println!("{}", serde_json::to_string(self).map_err(|e| e.to_string())?);
        Ok(())
    }
}

fn met(is_met: bool) -> &'static str {
    if is_met { "met" } else { "NOT MET" }
}

/// From which size on a download should be so many times slower.
const LARGE_GB: f64 = 4.0;
const FASTER: f64 = 16.0;

/// Of one size.
pub fn bars_of(recovery: &Line, download: &Line) -> Vec<Bar> {
    let of = |what: &str| format!("{} GB: {what}", recovery.setting.size_gb);
    let faster = download.row_ms / recovery.row_ms.max(1e-3);
    let goal = (recovery.setting.size_gb >= LARGE_GB).then_some(FASTER);
    vec![
        Bar::at_most(of("dependent rounds until the first row"), recovery.rounds as f64, 3.0),
        Bar::at_most(
            of("bytes read to metadata and touched blocks"),
            recovery.read_to_allowed_max.unwrap_or_default(),
            1.0,
        ),
        Bar::at_least(of("time of a download to that of the first row"), faster, goal),
    ]
}

/// Of the largest size and the smallest; `None`: there is only one.
pub fn bars_of_sizes(recoveries: &[Line]) -> Option<Bar> {
    let [smallest, .., largest] = recoveries else { return None };
    let (small, large) = (smallest.setting.size_gb, largest.setting.size_gb);
    let name = format!("time of the first row, {large} GB to {small} GB");
    Some(Bar::at_most(name, largest.row_ms / smallest.row_ms.max(1e-3), 1.2))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recovery(size_gb: f64, row_ms: u64, rounds: u64) -> Line {
        let setting = Setting {
            size_gb,
            state_mb: size_gb * 1e3,
            profile: "s3".to_owned(),
            bandwidth_mb_s: 125,
            steady: true,
        };
        let one = Recovery {
            lost: Duration::from_secs(6),
            row: Duration::from_millis(row_ms),
            visible: Duration::from_millis(row_ms + 30),
            rounds,
            gets: rounds,
            bytes: 50,
            allowed: 100,
        };
        Line::of_recoveries(&setting, &[one, Recovery { bytes: 120, ..one }])
    }

    fn download(size_gb: f64, seconds: u64) -> Line {
        let took = Duration::from_secs(seconds);
        let all = Download { took, rounds: 9, gets: 9, bytes: 1 };
        Line::of_download(&recovery(size_gb, 1, 1).setting, &all)
    }

    #[test]
    fn a_bar_is_missed_by_what_exceeds_it() {
        let bars = bars_of(&recovery(4.0, 100, 4), &download(4.0, 1));
        let met: Vec<bool> = bars.iter().map(|b| b.met).collect();
        assert_eq!(met, [false, false, false], "4 rounds, one run of 120 bytes of 100, 10 times");
        let bars = bars_of(&recovery(4.0, 50, 3), &download(4.0, 1));
        assert!(bars[0].met && bars[2].met && !bars[1].met, "{bars:?}");
    }

    #[test]
    fn the_goal_of_a_download_is_that_of_large_state() {
        let bars = bars_of(&recovery(0.25, 900, 3), &download(0.25, 1));
        assert!(bars[2].met && bars[2].at_least.is_none(), "{bars:?}");
    }

    #[test]
    fn sizes_are_compared_by_the_first_and_the_last() {
        assert_eq!(bars_of_sizes(&[recovery(1.0, 1, 1)]), None);
        let lines = [recovery(0.25, 100, 3), recovery(1.0, 500, 3), recovery(4.0, 110, 3)];
        assert!(bars_of_sizes(&lines).is_some_and(|bar| bar.met && (bar.value - 1.1).abs() < 1e-9));
        let missed = bars_of_sizes(&lines[..2]).map(|bar| bar.met);
        assert_eq!(missed, Some(false));
    }
}
