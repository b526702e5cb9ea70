//! All modes over one query and setting: at one rate, by turns, with one result.

use std::path::Path;
use std::time::Duration;

use millrace_storage::sim::Profile;

use super::args::{Order, Setting};
use super::arrivals::{self, Measured};
use super::bars;
use super::groups::{self, Group, Load};
use super::invalid::Invalid;
use super::load::{self, Reader, Sessions};
use super::modes::{BOUND, FIXED, Mode, RAM, RAM_HOT, RECORDED};
use super::queries::Keys;
use super::report::Cost;
use super::times::Latencies;
use super::world::{Running, World};
use crate::chart::{self, Line, Panel, XScale, YScale};
use crate::nexmark::digest_of_view;

/// Keys of rows whose state is in memory.
const HOT_KEYS: u64 = 1_000;

/// The runs of one mode.
struct Row {
    mode: String,
    costs: Vec<Cost>,
    latencies: Vec<Latencies>,
}

/// What one run gives.
pub struct Run {
    pub cost: Cost,
    latencies: Latencies,
    measured: Measured,
}

/// What a comparison gives.
pub struct Outcome {
    /// Of each mode.
    pub medians: Vec<Cost>,
    /// How many runs do not measure what they should.
    pub invalid: usize,
}

/// See the module.
pub struct Comparison<'a> {
    pub order: &'a Order,
    pub world: &'a World,
    pub setting: &'a Setting,
}

impl<'a> Comparison<'a> {
    /// The modes in which the query can be run, with their places in the plan.
    pub fn modes(&self) -> Vec<(usize, &'a Mode)> {
        let (order, world) = (self.order, self.world);
        let all = order.plan.run.iter().enumerate();
        all.filter(|(_, mode)| world.offers(mode)).collect()
    }
}

impl Comparison<'_> {
    /// The medians of each mode, printed.
    pub async fn run(&self) -> Result<Outcome, String> {
        let most = match self.order.rate {
            Some(_) => vec![None; self.order.plan.run.len()],
            None => self.most_rows().await?,
        };
        let groups = groups::of(self, &most).await?;
        let mut outcome = Outcome { medians: Vec::new(), invalid: 0 };
        for group in &groups {
            self.run_group(group, &most, &mut outcome).await?;
        }
        Ok(outcome)
    }

    async fn run_group(
        &self,
        group: &Group<'_>,
        most: &[Option<f64>],
        outcome: &mut Outcome,
    ) -> Result<(), String> {
        let (mut rows, invalid) = self.measure_all(group, most).await?;
        let medians = rows.iter().map(|row| Cost::median(&row.costs));
        let mut medians = medians.collect::<Result<Vec<Cost>, String>>()?;
        if self.order.plan.fixed && group.load == Load::Common {
            self.add_fixed(&mut medians, &mut rows)?;
        }
        group.print(&format!("{} {}", self.world.query.name, self.setting.label()));
        medians.iter().try_for_each(Cost::print)?;
        invalid.iter().try_for_each(Invalid::print)?;
        bars::print(&bars::of_modes(&medians))?;
        if let Some(directory) = &self.order.svg {
            self.draw(directory, group.load, &rows)?;
        }
        outcome.medians.extend(medians);
        outcome.invalid += invalid.len();
        Ok(())
    }

    fn keys(&self, mode: &Mode) -> Keys {
        match mode.hot {
            true => Keys::in_turn(self.world.keys.min(HOT_KEYS)),
            false => Keys { count: self.world.keys, skew: self.setting.skew },
        }
    }

    /// Of each mode the most rows a second that it can take: the median of the runs; not of those whose state is hot. A
    /// quick comparison leaves out the modes that only `fixed` is taken from.
    async fn most_rows(&self) -> Result<Vec<Option<f64>>, String> {
        let modes = self.modes();
        let mut most = vec![Vec::new(); self.order.plan.run.len()];
        for round in 0..self.order.runs {
            let all = !self.order.quick || modes.iter().all(|(_, mode)| mode.is_candidate());
            let asked = |mode: &Mode| !mode.hot && (all || !mode.is_candidate());
            for (place, mode) in modes.iter().filter(|(_, mode)| asked(mode)) {
                let rate = self.most_rows_of(mode, round).await?;
                most[*place].push(rate);
            }
        }
        let median = |mut all: Vec<f64>| {
            all.sort_by(f64::total_cmp);
            all.get(all.len() / 2).copied()
        };
        Ok(most.into_iter().map(median).collect())
    }

    async fn most_rows_of(&self, mode: &Mode, round: u32) -> Result<f64, String> {
        let running = self.world.copy(mode, self.setting, round).await?;
        let reader = Reader::open(self.world, &running).await?;
        let keys = self.keys(mode);
        let sessions = Sessions::open(&keys, &running, self.order.sessions).await?;
        let budget = Duration::from_secs_f64(self.order.closed_seconds);
        let most = load::closed(self.world, &running, &sessions, budget).await;
        end(running, reader, sessions).await?;
        most
    }

    /// Every mode of a group, as often as is asked for; lines are printed as they come.
    async fn measure_all(
        &self,
        group: &Group<'_>,
        most: &[Option<f64>],
    ) -> Result<(Vec<Row>, Vec<Invalid>), String> {
        let row =
            |mode: &str| Row { mode: mode.to_owned(), costs: Vec::new(), latencies: Vec::new() };
        let mut rows: Vec<Row> = group.modes.iter().map(|(_, m)| row(m.name)).collect();
        let mut bound = row(BOUND);
        let (mut hash, mut invalid) = (None, Vec::new());
        for number in 0..self.order.runs {
            let mut runs = Vec::new();
            for (place, mode) in in_turn(&group.modes, number) {
                let mut run = self.measure(mode, (group.rate, group.seconds), number).await?;
                run.cost.run = Some(number);
                run.cost.load = group.load;
                run.cost.max_events_per_s = most.get(place).copied().flatten();
                self.require_same(&mut hash, &run.cost)?;
                invalid.extend(Invalid::of(mode, self.setting, &run.cost));
                runs.push((mode.name, run));
            }
            add_cpu_ratios(group.load, &mut runs);
            for (name, run) in &runs {
                for row in rows.iter_mut().filter(|r| r.mode == *name) {
                    row.costs.push(run.cost.clone());
                    row.latencies.push(run.latencies.clone());
                }
            }
            if self.order.plan.bound && group.load == Load::Common {
                let (cost, latencies) = self.bound_of(&runs)?;
                bound.costs.push(cost);
                bound.latencies.push(latencies);
            }
            if self.order.runs > 1 {
                let costs = rows.iter().chain([&bound]).filter_map(|r| r.costs.last());
                costs.filter(|c| c.run == Some(number)).try_for_each(Cost::print_json)?;
            }
        }
        rows.extend((!bound.costs.is_empty()).then_some(bound));
        Ok((rows, invalid))
    }

    /// All modes have the same result of the same rows.
    fn require_same(&self, known: &mut Option<String>, cost: &Cost) -> Result<(), String> {
        let expected = known.get_or_insert_with(|| cost.output_hash.clone());
        if *expected == cost.output_hash {
            return Ok(());
        }
        Err(format!(
            "{} has another result in the mode {}: output_hash {} instead of {expected} ({})",
            cost.query,
            cost.mode,
            cost.output_hash,
            self.setting.label()
        ))
    }

    /// One run, at a rate and of so many seconds.
    pub async fn measure(
        &self,
        mode: &Mode,
        (rate, seconds): (f64, f64),
        round: u32,
    ) -> Result<Run, String> {
        let running = self.world.copy(mode, self.setting, round).await?;
        let reader = Reader::open(self.world, &running).await?;
        let keys = self.keys(mode);
        let sessions = Sessions::open(&keys, &running, self.order.sessions).await?;
        let first = match mode.hot {
            true => self.warm(mode, &running, &sessions, &keys).await?,
            false => self.world.first_row(),
        };
        let count = ((rate * seconds) as u64).max(1);
        let measured = arrivals::open(&running, &sessions, first, (rate, count)).await?;
        let stats = running.sim.stats();
        let digest = digest_of_view(&running.server, running.view()).await?;
        let (cache_mb, hints_mb) = (running.cache as f64 / 1e6, running.hints as f64 / 1e6);
        end(running, reader, sessions).await?;
        let latencies = Latencies::of(&measured.recording.rows()?);
        let cost =
            Cost { cache_mb, hints_mb, ..Cost::of(self.world, self.setting, mode.name, rate) };
        let cost = cost.with_latencies(&latencies).with_measured(
            &measured,
            &stats,
            self.world.query.caches,
        );
        Ok(Run { cost: cost.with_output(digest), latencies, measured })
    }

    /// Over a store that answers at once until the state is in memory; the number of the next row.
    async fn warm(
        &self,
        mode: &Mode,
        running: &Running,
        sessions: &Sessions,
        keys: &Keys,
    ) -> Result<u64, String> {
        running.sim.set_profile(Profile::INSTANT);
        let next = load::warm(self.world, running, sessions, keys).await?;
        running.sim.set_profile(mode.profile(self.setting.profile));
        Ok(next)
    }

    /// Adds the mode `fixed`: of those with a fixed place the best, by the product of what a row waits for state at the
    /// 99.9th percentile and of the median time until it is visible.
    fn add_fixed(&self, medians: &mut Vec<Cost>, rows: &mut Vec<Row>) -> Result<(), String> {
        let is_candidate =
            |name: &str| self.order.plan.run.iter().any(|m| m.is_candidate() && m.name == name);
        let score = |c: &Cost| c.state_wait_p999_ms * c.visible_p50_ms;
        let candidates = medians.iter().filter(|c| is_candidate(&c.mode));
        let best = candidates.min_by(|a, b| score(a).total_cmp(&score(b)));
        let best = best.ok_or("no mode with a fixed place was run")?;
        let row = rows.iter().find(|r| r.mode == best.mode);
        let latencies = row.map_or_else(Vec::new, |r| r.latencies.clone());
        let fixed =
            Cost { mode: FIXED.to_owned(), candidate: Some(best.mode.clone()), ..best.clone() };
        rows.push(Row { mode: FIXED.to_owned(), costs: Vec::new(), latencies });
        medians.push(fixed);
        Ok(())
    }

    /// What a perfect prefetcher would have had in these runs of a round.
    fn bound_of(&self, runs: &[(&'static str, Run)]) -> Result<(Cost, Latencies), String> {
        let find = |name: &str| runs.iter().find(|(n, _)| *n == name).map(|(_, run)| run);
        let missing = || format!("{BOUND} needs the modes {RECORDED} and {RAM}");
        let recorded = find(RECORDED).ok_or_else(missing)?;
        let warm = find(RAM).ok_or_else(missing)?.measured.recording.median_waits();
        let rows = recorded.measured.recording.bound(&warm, self.world.query.parallel_reads)?;
        let latencies = Latencies::of(&rows);
        Ok((recorded.cost.bound(&latencies), latencies))
    }

    fn draw(&self, directory: &Path, load: Load, rows: &[Row]) -> Result<(), String> {
        let panel = |title: &str, of: fn(Latencies) -> Vec<f64>| {
            let line = |row: &Row| {
                let all = Latencies::all(row.latencies.iter().cloned());
                Line { name: row.mode.clone(), points: chart::distribution(&of(all)) }
            };
            Panel {
                title: title.to_owned(),
                x_label: "milliseconds".to_owned(),
                x: XScale::Logarithmic,
                y: YScale::Nines,
                lines: rows.iter().filter(|r| r.mode != FIXED).map(line).collect(),
                marks: Vec::new(),
            }
        };
        let panels = [
            panel("visible: share of rows that can be read in the view by then", |l| l.visible),
            panel("state_wait: share of rows whose epoch is sealed by then", |l| l.state_wait),
        ];
        let (query, setting) = (self.world.query.name, self.setting);
        let Setting { skew, state_to_cache, threshold, .. } = setting;
        let title = format!("{query}, {}, {}", setting.label(), setting.title());
        let name = format!(
            "prefetch-{query}-{}-skew{skew}-cache{state_to_cache}-threshold{threshold}{}.svg",
            setting.label(),
            load.suffix()
        );
        chart::write(directory, &name, &chart::svg(&title, &panels))
    }
}

/// The modes with their places in the list, every second time from the last to the first: none is always after another.
fn in_turn<'a>(modes: &[(usize, &'a Mode)], number: u32) -> Vec<(usize, &'a Mode)> {
    let mut order = modes.to_vec();
    if number % 2 == 1 {
        order.reverse();
    }
    order
}

/// Of the runs of one round: to the mode that differs from the one with hints by nothing else.
fn add_cpu_ratios(load: Load, runs: &mut [(&'static str, Run)]) {
    let without = if load == Load::Hot { RAM_HOT } else { RECORDED };
    let found = runs.iter().find(|(name, _)| *name == without);
    let Some(base) = found.and_then(|(_, run)| run.cost.cpu_s).filter(|s| *s > 0.0) else {
        return;
    };
    for (_, Run { cost, .. }) in runs {
        cost.cpu_ratio = cost.cpu_s.map(|own| own / base);
    }
}

async fn end(running: Running, reader: Reader, sessions: Sessions) -> Result<(), String> {
    reader.close().await?;
    drop(sessions);
    running.discard().await
}
