//! What EXPLAIN ANALYZE tells of an operator's lookahead.

use std::time::Duration;

use millrace_executor::lookahead::DELETED_PORT;
use millrace_executor::lookahead::slack::{ReadTimes, SideSlack};
use millrace_executor::stats::{LookaheadStats, OperatorStats};
use millrace_graph::lookahead::Subject;
use millrace_storage::object::GET_DOLLARS_PER_MILLION;

use crate::display;

/// Lines below an operator's own; none if it reads no state from the store. `about` names what is looked ahead of.
pub fn lines(o: &OperatorStats, about: &dyn Fn(Subject) -> Option<String>) -> Vec<String> {
    let m = &o.measures;
    // Where no keys can be announced, ranges are.
    let what = if m.by_watermark && m.sides.is_empty() { "ranges" } else { "keys" };
    let mut lines: Vec<String> = counts(what, &o.lookahead).into_iter().collect();
    lines.extend(m.sides.iter().filter_map(|of| side(of, about)));
    lines.extend(reads(&m.reads));
    let requests = m.demand_requests + m.ahead_requests;
    if let Some(dollars) = m.dollars_per_million_rows(o.rows_in).filter(|_| requests > 0) {
        lines.push(format!(
            "store requests: {} ahead of rows, {} for rows; ${dollars:.4} for a million rows at ${GET_DOLLARS_PER_MILLION:.2} for a million requests (S3 Standard)",
            display::count(m.ahead_requests),
            display::count(m.demand_requests)
        ));
    }
    lines
}

/// What became of keys or ranges that were announced, and how many had to be waited for.
fn counts(what: &str, of: &LookaheadStats) -> Option<String> {
    if of.hinted + of.resident + of.dropped + of.missed == 0 {
        return None;
    }
    let count = display::count;
    Some(format!(
        "lookahead: {} {what} hinted; {} resident, {} read ahead ({} in time, {} late, {} absent, {} unused), {} dropped; {} waited for",
        count(of.hinted),
        count(of.resident),
        count(of.prefetched),
        count(of.in_time),
        count(of.late),
        count(of.absent),
        count(of.unused),
        count(of.dropped),
        count(of.missed)
    ))
}

/// The lead of hints that are about the same, at the place in use first; and why they are not announced, if they are not.
fn side(of: &SideSlack, about: &dyn Fn(Subject) -> Option<String>) -> Option<String> {
    let in_use = of.in_use()?;
    let others = of.spots.iter().filter(|spot| *spot != in_use);
    let mut places = Vec::new();
    for spot in std::iter::once(in_use).chain(others) {
        let [Some(p1), Some(p50), Some(p99)] = spot.quantiles else { continue };
        let of_spot = [p1, p50, p99].map(micros).join(", ");
        let word = if spot == in_use { "in use" } else { "not in use" };
        places.push(format!("{} ({word}) {of_spot}", spot.spot.name()));
    }
    let head = of.subject.and_then(about).unwrap_or_else(|| match of.port {
        DELETED_PORT => "deleted rows".to_string(),
        port => format!("input {port}"),
    });
    let head = format!("{head} at {}", in_use.spot.name());
    let mut told: Vec<String> = Vec::new();
    told.extend(of.standing.reason().map(|reason| format!("not announced ({reason})")));
    if !places.is_empty() {
        told.push(format!("slack (p1, p50, p99) of {}", places.join("; of ")));
    }
    (!told.is_empty()).then(|| format!("{head}: {}", told.join("; ")))
}

fn reads(of: &ReadTimes) -> Option<String> {
    let met = of.without_demand?;
    let mut line = format!(
        "{:.1} % of the last {} epochs without rows that wait",
        met * 100.0,
        display::count(of.epochs as u64)
    );
    if let [Some(p50), Some(p90), Some(p99)] = of.slowest {
        let times = [p50, p90, p99].map(micros).join(", ");
        line += &format!("; their slowest read (p50, p90, p99) {times}");
    }
    Some(line)
}

fn micros(us: i64) -> String {
    let sign = if us < 0 { "-" } else { "" };
    format!("{sign}{}", display::duration(Duration::from_micros(us.unsigned_abs())))
}

#[cfg(test)]
mod tests {
    use millrace_executor::lookahead::slack::{Spot, SpotSlack};
    use millrace_executor::lookahead::trial::Standing;
    use millrace_executor::stats::LookaheadMeasures;
    use millrace_graph::lookahead::Place;

    use super::*;

    fn slack(place: Place, p1: i64) -> SpotSlack {
        SpotSlack {
            spot: Spot { is_own: true, place },
            epochs: 3,
            quantiles: [p1, 9_000, 12_345].map(Some),
        }
    }

    #[test]
    fn an_operator_tells_its_keys_its_lead_its_reads_and_their_cost() {
        let spots = vec![slack(Place::Entry, -40), slack(Place::Root, 4_000)];
        let reads = ReadTimes {
            epochs: 200,
            without_demand: Some(0.985),
            slowest: [500, 3_000, 7_000].map(Some),
        };
        let measures = LookaheadMeasures {
            sides: vec![SideSlack { port: 1, active: 1, spots, ..SideSlack::default() }],
            reads,
            demand_requests: 20,
            ahead_requests: 80,
            by_watermark: false,
        };
        let keys = LookaheadStats { hinted: 1_000, in_time: 90, missed: 7, ..Default::default() };
        let o = OperatorStats { rows_in: 10_000, lookahead: keys, measures, ..Default::default() };
        assert_eq!(
            lines(&o, &|_| None),
            [
                "lookahead: 1,000 keys hinted; 0 resident, 0 read ahead (90 in time, 0 late, 0 absent, 0 unused), 0 dropped; 7 waited for",
                "input 1 at root: slack (p1, p50, p99) of root (in use) 4.0 ms, 9.0 ms, 12.3 ms; of entry (not in use) -40 µs, 9.0 ms, 12.3 ms",
                "98.5 % of the last 200 epochs without rows that wait; their slowest read (p50, p90, p99) 500 µs, 3.0 ms, 7.0 ms",
                "store requests: 80 ahead of rows, 20 for rows; $0.0040 for a million rows at $0.40 for a million requests (S3 Standard)",
            ]
        );
        assert!(lines(&OperatorStats::default(), &|_| None).is_empty());
    }

    #[test]
    fn what_is_about_the_same_input_is_told_apart() {
        let side = |port| {
            let subject = Some(Subject { port, deleted: false, leaf: (0, 0) });
            let spots = vec![slack(Place::Entry, 4_000)];
            SideSlack { subject, spots, ..SideSlack::default() }
        };
        let measures =
            LookaheadMeasures { sides: vec![side(0), side(1), side(2)], ..Default::default() };
        let o = OperatorStats { measures, ..Default::default() };
        let about = |subject: Subject| match subject.port {
            0 => Some("Aggregate [state 3] from t".to_owned()),
            1 => Some("Aggregate values [state 1] from t".to_owned()),
            _ => None,
        };
        let slack = "at entry: slack (p1, p50, p99) of entry (in use) 4.0 ms, 9.0 ms, 12.3 ms";
        assert_eq!(
            lines(&o, &about),
            [
                format!("Aggregate [state 3] from t {slack}"),
                format!("Aggregate values [state 1] from t {slack}"),
                format!("input 0 {slack}"),
            ]
        );
    }

    #[test]
    fn a_step_of_a_chain_that_is_not_announced_tells_why() {
        let side = |standing, spots| SideSlack { spots, standing, ..SideSlack::default() };
        let unseen = SpotSlack { quantiles: [None; 3], ..slack(Place::Entry, 0) };
        let sides = vec![
            side(Standing::TooLate, vec![slack(Place::Entry, -40)]),
            side(Standing::Compared, vec![unseen]),
        ];
        let measures = LookaheadMeasures { sides, ..Default::default() };
        assert_eq!(measures.not_announced(), ["keys come too late", "trial without hints"]);
        let o = OperatorStats { measures, ..Default::default() };
        assert_eq!(
            lines(&o, &|_| None),
            [
                "input 0 at entry: not announced (keys come too late); slack (p1, p50, p99) of entry (in use) -40 µs, 9.0 ms, 12.3 ms",
                "input 0 at entry: not announced (trial without hints)",
            ]
        );
    }

    #[test]
    fn an_operator_whose_state_is_closed_by_a_watermark_tells_of_ranges() {
        let measures = LookaheadMeasures { by_watermark: true, ..Default::default() };
        let ranges = LookaheadStats {
            hinted: 9,
            prefetched: 8,
            in_time: 7,
            missed: 1,
            ..Default::default()
        };
        let o = OperatorStats { lookahead: ranges, measures, ..Default::default() };
        assert_eq!(
            lines(&o, &|_| None),
            [
                "lookahead: 9 ranges hinted; 0 resident, 8 read ahead (7 in time, 0 late, 0 absent, 0 unused), 0 dropped; 1 waited for"
            ]
        );
    }
}
