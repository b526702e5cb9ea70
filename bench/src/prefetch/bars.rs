//! What the comparison is for: ratios of medians, and what they should be.

use serde::Serialize;

use super::groups::{LEAST_ROWS, Load};
use super::modes::{BOUND, FIXED, LOOKAHEAD, Mode, RAM, RAM_HINTS, RAM_HOT, RECORDED};
use super::queries::{QUERIES, Query};
use super::report::Cost;

/// Profiles at which waits for state are judged. Over slower stores a read lasts longer than a commit, which hides only
/// a part of it: there they are told.
const JUDGED: [&str; 2] = ["nvme", "dfs"];
/// How many times shorter they should be, for every query and for one of all.
const GAIN: f64 = 1.34;
const LARGEST_GAIN: f64 = 5.0;

/// One ratio. Names are those of the JSON line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bar {
    pub bar: String,
    pub query: String,
    pub profile: String,
    pub load: Load,
    pub disk_tier: bool,
    pub skew: f64,
    pub state_to_cache: f64,
    pub threshold: u8,
    /// Rows that were measured in a run.
    pub rows: u64,
    pub value: f64,
    /// `value` should be at least, or at most, that; where both are null it is only told.
    pub at_least: Option<f64>,
    pub at_most: Option<f64>,
    pub met: bool,
}

#[derive(Clone, Copy)]
enum Limit {
    Least(f64),
    Most(f64),
    /// Only to be known.
    None,
}

fn bar(of: &Cost, name: String, value: f64, limit: Limit) -> Bar {
    let (at_least, at_most, met) = match limit {
        Limit::Least(least) => (Some(least), None, value >= least),
        Limit::Most(most) => (None, Some(most), value <= most),
        Limit::None => (None, None, true),
    };
    Bar {
        bar: name,
        query: of.query.clone(),
        profile: of.profile.clone(),
        load: of.load,
        disk_tier: of.disk_tier,
        skew: of.skew,
        state_to_cache: of.state_to_cache,
        threshold: of.threshold,
        rows: of.rows,
        value,
        at_least,
        at_most,
        met,
    }
}

/// Of one query and setting: the mode `lookahead` against the best mode without hints (of each number), `fixed`, `ram`
/// and `bound`; of hot state what hints cost. What was not run is left out. At the rate of sync modes: against these, told
/// and not judged.
pub fn of_modes(medians: &[Cost]) -> Vec<Bar> {
    let find = |name: &str| medians.iter().find(|c| c.mode == name);
    if let Some((own, without)) = find(RAM_HINTS).zip(find(RAM_HOT)) {
        return of_hot(own, without);
    }
    let Some(own) = find(LOOKAHEAD) else { return Vec::new() };
    let mut bars = against_baselines(own, &baselines(medians.iter()));
    if own.load != Load::Common {
        return bars;
    }
    if let Some(bound) = find(BOUND) {
        let value = ratio(own.visible_p50_ms, bound.visible_p50_ms);
        bars.push(bar(own, "visible p50 to bound".to_owned(), value, Limit::Most(1.1)));
        let value = ratio(own.state_wait_p999_ms, bound.state_wait_p999_ms);
        bars.push(bar(own, "state_wait p999 to bound".to_owned(), value, Limit::None));
    }
    if let Some(fixed) = find(FIXED) {
        let name = |what: &str| {
            format!("{what} to fixed ({})", fixed.candidate.as_deref().unwrap_or_default())
        };
        let value = ratio(own.state_wait_p999_ms, fixed.state_wait_p999_ms);
        bars.push(bar(own, name("state_wait p999"), value, of_p999(own, Limit::Most(1.1))));
        let value = ratio(own.visible_p50_ms, fixed.visible_p50_ms);
        bars.push(bar(own, name("visible p50"), value, Limit::Most(1.1)));
    }
    let goal = match (own.query.as_str(), own.profile.as_str()) {
        ("join1", "s3" | "s3-express") => Some(1.2),
        ("join5", "s3" | "s3-express") => Some(1.5),
        _ => None,
    };
    if let Some((ram, goal)) = find(RAM).zip(goal) {
        let value = ratio(own.visible_p50_ms, ram.visible_p50_ms);
        bars.push(bar(own, "visible p50 to ram (goal)".to_owned(), value, Limit::Most(goal)));
    }
    let hints = own.hint_bytes_ratio.map(|v| ("hint bytes to bytes of rows", v, 0.09));
    let unused = own.unused_hint_ratio.map(|v| ("unused hints", v, 0.1));
    for (name, value, most) in hints.into_iter().chain(unused) {
        bars.push(bar(own, name.to_owned(), value, Limit::Most(most)));
    }
    bars
}

fn baselines<'a>(medians: impl Iterator<Item = &'a Cost>) -> Vec<&'a Cost> {
    let is_baseline = |c: &&Cost| Mode::by_name(&c.mode).is_ok_and(|mode| mode.is_baseline());
    medians.filter(is_baseline).collect()
}

/// The mode whose number is the least.
fn least(of: &[&Cost], number: fn(&Cost) -> f64) -> Option<(String, f64)> {
    let least = of.iter().min_by(|a, b| number(a).total_cmp(&number(b)))?;
    Some((least.mode.clone(), number(least)))
}

fn against_baselines(own: &Cost, baselines: &[&Cost]) -> Vec<Bar> {
    let least = |number: fn(&Cost) -> f64| least(baselines, number);
    let mut bars = Vec::new();
    if let Some((mode, best)) = least(|c| c.state_wait_p999_ms) {
        let value = ratio(best, own.state_wait_p999_ms);
        let limit = if is_judged(own) { Limit::Least(GAIN) } else { Limit::None };
        let limit = of_p999(own, limit);
        bars.push(bar(own, format!("state_wait p999, {mode} to lookahead"), value, limit));
    }
    if let Some((mode, best)) = least(|c| c.visible_p50_ms) {
        let value = ratio(own.visible_p50_ms, best);
        let limit = of_common(own, Limit::Most(1.03));
        bars.push(bar(own, format!("visible p50, lookahead to {mode}"), value, limit));
        if own.query == "chain5" {
            let value = ratio(best, own.visible_p50_ms);
            let name = format!("visible p50, {mode} to lookahead (goal)");
            bars.push(bar(own, name, value, of_common(own, Limit::Least(2.0))));
        }
    }
    if let Some((mode, best)) = least(|c| c.visible_p999_ms) {
        let value = ratio(own.visible_p999_ms, best);
        let limit = of_p999(own, Limit::Most(1.03));
        bars.push(bar(own, format!("visible p999, lookahead to {mode}"), value, limit));
    }
    if let (Some((mode, best)), Some(most)) =
        (least(|c| -c.max_events_per_s.unwrap_or_default()), own.max_events_per_s)
        && best < 0.0
    {
        let value = ratio(most, -best);
        bars.push(bar(own, format!("maximum rate, lookahead to {mode}"), value, Limit::Least(1.0)));
    }
    if let Some(value) = own.cpu_ratio {
        let name = format!("CPU, lookahead to {RECORDED} in the same round");
        bars.push(bar(own, name, value, Limit::None));
    }
    bars
}

/// Of state that is in memory: what hints cost, and that none is sent. Judged if no row waits without them: new groups
/// of a window do.
fn of_hot(own: &Cost, without: &Cost) -> Vec<Bar> {
    let most = |most: f64| match without.cold_keys_per_epoch {
        Some(keys) if keys > 0.0 => Limit::None,
        _ => Limit::Most(most),
    };
    let cpu = own.cpu_ratio.map(|ratio| {
        let name = format!("CPU, {RAM_HINTS} to {RAM_HOT} in the same round");
        bar(own, name, ratio, most(1.03))
    });
    let hinted = own
        .hinted
        .map(|keys| bar(own, "keys announced of hot state".to_owned(), keys as f64, most(0.0)));
    cpu.into_iter().chain(hinted).collect()
}

/// A limit for rows that all modes get: at the rate of sync modes nothing is judged.
fn of_common(own: &Cost, limit: Limit) -> Limit {
    if own.load == Load::Common { limit } else { Limit::None }
}

/// A limit of a percentile that few rows do not have.
fn of_p999(own: &Cost, limit: Limit) -> Limit {
    if own.rows >= LEAST_ROWS { of_common(own, limit) } else { Limit::None }
}

fn is_judged(cost: &Cost) -> bool {
    JUDGED.contains(&cost.profile.as_str())
}

/// All but the query and the profile.
fn is_same_setting(a: &Cost, b: &Cost) -> bool {
    (a.disk_tier == b.disk_tier && a.skew == b.skew)
        && (a.state_to_cache == b.state_to_cache && a.threshold == b.threshold)
}

/// Over all queries: how much slower `join5` drains than `join1`, at each setting; and the largest gain, of the judged
/// profiles together and of each other one.
pub fn of_queries(medians: &[Cost]) -> Vec<Bar> {
    let mut bars = drains(medians);
    bars.extend(largest_gains(medians));
    bars
}

fn drains(medians: &[Cost]) -> Vec<Bar> {
    let own = |c: &&Cost| c.mode == LOOKAHEAD && c.load == Load::Common;
    let of_query = |name: &'static str| medians.iter().filter(own).filter(move |c| c.query == name);
    let mut bars = Vec::new();
    for five in of_query("join5") {
        let same = |one: &&Cost| one.profile == five.profile && is_same_setting(one, five);
        let one = of_query("join1").find(same).and_then(|one| one.max_events_per_s);
        if let Some((one, five_most)) = one.zip(five.max_events_per_s) {
            let value = ratio(one, five_most);
            bars.push(bar(five, "drain, join5 to join1".to_owned(), value, Limit::Most(1.7)));
        }
    }
    bars
}

/// How many times shorter a query's rows wait for state than in the best mode without hints.
struct Gain<'a> {
    own: &'a Cost,
    mode: String,
    value: f64,
}

impl Gain<'_> {
    /// The largest of both is looked for.
    fn is_beside(&self, other: &Gain<'_>) -> bool {
        let (a, b) = (self.own, other.own);
        let is_near = a.profile == b.profile || is_judged(a) && is_judged(b);
        is_near && is_same_setting(a, b)
    }
}

/// Of queries with enough rows.
fn gains<'a>(medians: &'a [Cost]) -> Vec<Gain<'a>> {
    let gain = |own: &'a Cost| {
        let is_same = |c: &&Cost| {
            (c.query == own.query && c.profile == own.profile && c.load == own.load)
                && is_same_setting(c, own)
        };
        let (mode, best) =
            least(&baselines(medians.iter().filter(is_same)), |c| c.state_wait_p999_ms)?;
        Some(Gain { own, mode, value: ratio(best, own.state_wait_p999_ms) })
    };
    let is_own = |c: &&Cost| c.mode == LOOKAHEAD && c.load == Load::Common && c.rows >= LEAST_ROWS;
    medians.iter().filter(is_own).filter_map(gain).collect()
}

/// Judged only if every query was run: it may be any of them.
fn largest_gains(medians: &[Cost]) -> Vec<Bar> {
    let gains = gains(medians);
    let mut bars = Vec::new();
    for (i, first) in gains.iter().enumerate() {
        if gains[..i].iter().any(|before| before.is_beside(first)) {
            continue;
        }
        let beside: Vec<&Gain<'_>> = gains.iter().filter(|g| g.is_beside(first)).collect();
        let has = |query: &Query| beside.iter().any(|g| g.own.query == query.name);
        let count = QUERIES.iter().filter(|query| has(query)).count();
        let best = beside.iter().max_by(|a, b| a.value.total_cmp(&b.value));
        let Some(best) = best.filter(|_| count > 1) else { continue };
        let limit = match is_judged(best.own) && count == QUERIES.len() {
            true => Limit::Least(LARGEST_GAIN),
            false => Limit::None,
        };
        let name =
            format!("state_wait p999, {} to lookahead, the most of {count} queries", best.mode);
        bars.push(bar(best.own, name, best.value, limit));
    }
    bars
}

fn ratio(above: f64, below: f64) -> f64 {
    above / below.max(1e-9)
}

/// A line for people and one for programs of each.
pub fn print(bars: &[Bar]) -> Result<(), String> {
    for bar in bars {
        let disk = if bar.disk_tier { "+disk" } else { "" };
        let should = match (bar.at_least, bar.at_most) {
            (Some(least), _) => format!("at least {least}: {}", word(bar.met)),
            (_, Some(most)) => format!("at most {most}: {}", word(bar.met)),
            _ if bar.rows < LEAST_ROWS => format!("no bar: of {} rows", bar.rows),
            _ => "no bar".to_owned(),
        };
        let (load, value) = (bar.load.suffix(), bar.value);
        println!(
            "{:7} {}{disk}{load}: {} = {value:.3} ({should})",
            bar.query, bar.profile, bar.bar
        );
    }
    for bar in bars {
        println!("{}", serde_json::to_string(bar).map_err(|e| e.to_string())?);
    }
    Ok(())
}

fn word(met: bool) -> &'static str {
    if met { "met" } else { "missed" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(mode: &str, visible: f64, waited: f64, most: f64) -> Cost {
        Cost {
            query: "join1".to_owned(),
            profile: "s3".to_owned(),
            mode: mode.to_owned(),
            visible_p50_ms: visible,
            visible_p999_ms: visible,
            state_wait_p999_ms: waited,
            rows: LEAST_ROWS,
            max_events_per_s: Some(most),
            ..Cost::default()
        }
    }

    fn find<'a>(bars: &'a [Bar], name: &str) -> &'a Bar {
        bars.iter().find(|b| b.bar.starts_with(name)).unwrap()
    }

    #[test]
    fn each_number_is_compared_with_the_best_of_the_modes_without_hints() {
        let medians = [
            cost("async-lru", 10.0, 9.0, 100.0),
            cost("async-clock", 11.0, 6.0, 120.0),
            cost("lookahead", 10.2, 3.0, 90.0),
            cost("ram", 9.0, 0.1, 900.0),
            cost("bound", 9.5, 2.0, 0.0),
        ];
        let bars = of_modes(&medians);
        let gain = find(&bars, "state_wait p999, async-clock");
        assert_eq!((gain.value, gain.met), (2.0, true));
        assert!(find(&bars, "visible p50, lookahead to async-lru").met);
        let rate = find(&bars, "maximum rate, lookahead to async-clock");
        assert_eq!((rate.value, rate.met), (0.75, false));
        assert!(find(&bars, "visible p50 to bound").met);
        assert!(find(&bars, "visible p50 to ram").met);
        assert!(of_modes(&medians[..2]).is_empty(), "nothing to compare");
    }

    #[test]
    fn hints_cost_next_to_nothing_where_state_is_hot() {
        let hot = |ratio: f64, hinted: u64, waited: f64| {
            let of = |mode| Cost {
                load: Load::Hot,
                cold_keys_per_epoch: Some(waited),
                ..cost(mode, 1.0, 1.0, 1.0)
            };
            let own = Cost { cpu_ratio: Some(ratio), hinted: Some(hinted), ..of("ram-hints") };
            of_modes(&[of("ram-hot"), own]).iter().map(|b| b.met).collect::<Vec<_>>()
        };
        assert_eq!(hot(1.03, 0, 0.0), [true, true]);
        assert_eq!(hot(1.04, 1, 0.0), [false, false]);
        assert_eq!(hot(1.04, 1, 0.1), [true, true], "told: some state was not in memory");
    }

    #[test]
    fn five_joins_are_compared_with_one_of_the_same_setting() {
        let five = Cost { query: "join5".to_owned(), ..cost("lookahead", 1.0, 1.0, 50.0) };
        let other = Cost { profile: "dfs".to_owned(), ..cost("lookahead", 1.0, 1.0, 1.0) };
        let bars = of_queries(&[other, cost("lookahead", 1.0, 1.0, 75.0), five]);
        assert_eq!((bars.len(), bars[0].value, bars[0].met), (1, 1.5, true));
    }

    /// A query's waits without hints, at a profile, and with them: 10 ms.
    fn waits(query: &str, profile: &str, without: f64) -> [Cost; 2] {
        let of = |mode: &str, waited: f64| Cost {
            query: query.to_owned(),
            profile: profile.to_owned(),
            ..cost(mode, 1.0, waited, 1.0)
        };
        [of("async-lru", without), of("lookahead", 10.0)]
    }

    #[test]
    fn waits_are_judged_where_a_commit_lasts_as_long_as_a_read() {
        for (profile, at_least, met) in
            [("nvme", Some(GAIN), false), ("dfs", Some(GAIN), false), ("s3", None, true)]
        {
            let bars = of_modes(&waits("join1", profile, 12.0));
            let gain = find(&bars, "state_wait p999, async-lru to lookahead");
            assert_eq!((gain.value, gain.at_least, gain.met), (1.2, at_least, met), "{profile}");
        }
    }

    #[test]
    fn one_query_of_all_gains_much_at_the_judged_profiles() {
        let all = |much: f64| -> Vec<Bar> {
            let at = |profile: &'static str| {
                let without = move |q: &Query| if q.name == "q20" { much } else { 20.0 };
                QUERIES.iter().flat_map(move |q| waits(q.name, profile, without(q)))
            };
            let slower = waits("join3", "s3", 90.0).into_iter().chain(waits("q13", "s3", 1.0));
            let medians: Vec<Cost> = at("nvme").chain(at("dfs")).chain(slower).collect();
            let all = of_queries(&medians).into_iter();
            all.filter(|bar| bar.bar.starts_with("state_wait")).collect()
        };
        let told = |bar: &Bar| (bar.query.clone(), bar.value, bar.at_least, bar.met);
        let bars = all(60.0);
        assert_eq!(bars.len(), 2, "one of both judged profiles, one of the other");
        assert_eq!(told(&bars[0]), ("q20".to_owned(), 6.0, Some(LARGEST_GAIN), true));
        assert_eq!(told(&bars[1]), ("join3".to_owned(), 9.0, None, true));
        assert_eq!(told(&all(40.0)[0]), ("q20".to_owned(), 4.0, Some(LARGEST_GAIN), false));
        let few = [waits("join1", "dfs", 20.0), waits("q13", "dfs", 30.0)].concat();
        assert_eq!(told(&of_queries(&few)[0]), ("q13".to_owned(), 3.0, None, true));
        assert!(of_queries(&few[..2]).is_empty(), "it is told with the query already");
    }

    #[test]
    fn percentiles_of_few_rows_and_at_the_rate_of_sync_modes_are_told_and_not_judged() {
        let judged = |change: fn(Cost) -> Cost| -> Vec<String> {
            let medians = waits("join1", "nvme", 12.0).map(change);
            let bars = of_modes(&medians).into_iter().chain(of_queries(&medians));
            let is_judged = |b: &Bar| b.at_least.or(b.at_most).is_some();
            bars.filter(is_judged).map(|b| b.bar).collect()
        };
        let maximum = "maximum rate, lookahead to async-lru";
        assert_eq!(judged(|cost| Cost { load: Load::Sync, ..cost }), [maximum]);
        let few = judged(|cost| Cost { rows: LEAST_ROWS - 1, ..cost });
        assert_eq!(few, ["visible p50, lookahead to async-lru", maximum]);
        assert_eq!(judged(|cost| cost).len(), 4);
    }
}
