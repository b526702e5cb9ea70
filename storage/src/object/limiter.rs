//! How many requests may be in flight, and how many may start in a second: found out by trying. There is one limiter for
//! reads (`cache/scheduler`) and one for all others (`object/pace.rs`); reads are named here, which use all of it.
//!
//! The number of reads grows by a constant for each round of answers (additive increase) while it is the limit that
//! holds reads back and answers do not get slower. A store that asks for fewer requests halves it, a time-out takes a
//! quarter (multiplicative decrease). A store that refuses requests above a rate is helped by a rate only: then
//! the reads of a second are limited too, from the rate that it answered down, until it has not complained for a
//! while. Time is an argument.

use std::time::Duration;

use tokio::time::Instant;

/// Complaints within this time are of one burst and count once.
const BURST: Duration = Duration::from_secs(1);
/// Growth for a round of answers.
const INCREASE: f64 = 4.0;
const SLOW_DOWN: f64 = 0.5;
const TIMEOUT: f64 = 0.75;
/// Reads up to this many bytes take as long as the store takes, not the transfer.
const SMALL_READ_BYTES: u64 = 256 << 10;

/// Bounds of the reads in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadLimits {
    pub least: usize,
    pub start: usize,
    pub most: usize,
}

impl ReadLimits {
    /// All the same: the number of reads does not adapt.
    pub fn fixed(reads: usize) -> ReadLimits {
        ReadLimits { least: reads, start: reads, most: reads }
    }
}

impl Default for ReadLimits {
    fn default() -> ReadLimits {
        ReadLimits { least: 64, start: 256, most: 1_024 }
    }
}

/// Whether another read may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    Now,
    /// Because of the rate.
    At(Instant),
    /// When one in flight has ended.
    Later,
}

#[derive(Debug)]
pub(crate) struct Limiter {
    bounds: ReadLimits,
    limit: f64,
    rate: Option<Rate>,
    last_cut: Option<Instant>,
    answered: Answered,
    /// Whether the limit held reads back when the last one was answered.
    saturated: bool,
    latency: Latency,
}

impl Limiter {
    pub fn new(bounds: ReadLimits, now: Instant) -> Limiter {
        let least = bounds.least.max(2);
        let most = bounds.most.max(least);
        let bounds = ReadLimits { least, most, start: bounds.start.clamp(least, most) };
        Limiter {
            bounds,
            limit: bounds.start as f64,
            rate: None,
            last_cut: None,
            answered: Answered::new(now),
            saturated: false,
            latency: Latency::default(),
        }
    }

    /// Reads in flight, at most.
    pub fn limit(&self) -> usize {
        self.limit as usize
    }

    /// Reads that may start in a second; `None`: any number.
    pub fn rate(&self) -> Option<f64> {
        self.rate.as_ref().map(|r| r.per_second)
    }

    pub fn may_start(&mut self, in_flight: usize, now: Instant) -> Start {
        if in_flight >= self.limit() {
            return Start::Later;
        }
        let Some(rate) = &mut self.rate else { return Start::Now };
        rate.pass(now);
        if rate.is_lifted() {
            self.rate = None;
            return Start::Now;
        }
        match rate.wait() {
            Duration::ZERO => Start::Now,
            wait => Start::At(now + wait),
        }
    }

    /// A read starts.
    pub fn started(&mut self) {
        if let Some(rate) = &mut self.rate {
            rate.tokens -= 1.0;
        }
    }

    /// A read that was to start does not ask the store for anything.
    pub fn not_needed(&mut self) {
        if let Some(rate) = &mut self.rate {
            rate.tokens += 1.0;
        }
    }

    /// A read was answered. `saturated`: the limit held others back.
    pub fn answered(&mut self, took: Duration, bytes: u64, saturated: bool, now: Instant) {
        self.answered.count(now);
        self.saturated = saturated;
        if bytes <= SMALL_READ_BYTES {
            self.latency.add(took);
        }
        if saturated && !self.latency.suffers() {
            self.limit = (self.limit + INCREASE / self.limit).min(self.bounds.most as f64);
        }
    }

    /// The store asked for fewer requests.
    pub fn slow_down(&mut self, now: Instant) {
        self.answered.complaint(now);
        let before = self.limit;
        if !self.cut(SLOW_DOWN, now) || !self.answered.complains_often() {
            return;
        }
        let answered = self.answered.per_second(now);
        // A rate at which few reads wanted to start says nothing about what the store can do.
        let known = match &self.rate {
            _ if self.answered.are_mostly_refused() => self.answered.last,
            Some(rate) if answered < rate.per_second / 2.0 => rate.per_second,
            Some(rate) => rate.per_second.min(answered),
            None if self.saturated => answered,
            None => answered.max(before / self.latency.last.unwrap_or(Latency::TYPICAL)),
        };
        self.rate = Some(Rate::new((known * RATE_CUT).max(LEAST_RATE), now));
    }

    /// A read was not answered in time.
    pub fn timed_out(&mut self, now: Instant) {
        self.cut(TIMEOUT, now);
    }

    fn cut(&mut self, factor: f64, now: Instant) -> bool {
        if self.last_cut.is_some_and(|last| now.saturating_duration_since(last) < BURST) {
            return false;
        }
        self.last_cut = Some(now);
        self.limit = (self.limit * factor).max(self.bounds.least as f64);
        true
    }
}

/// Of the rate that the store last answered, but no less than that many reads a second however often it complains.
const RATE_CUT: f64 = 0.7;
const LEAST_RATE: f64 = 10.0;

/// A token bucket whose rate grows by itself.
#[derive(Debug)]
struct Rate {
    /// At the last cut.
    base: f64,
    per_second: f64,
    tokens: f64,
    at: Instant,
}

impl Rate {
    fn new(per_second: f64, now: Instant) -> Rate {
        Rate { base: per_second, per_second, tokens: 0.0, at: now }
    }

    fn pass(&mut self, now: Instant) {
        /// Growth in a second, in rates of the last cut.
        const INCREASE: f64 = 0.1;
        /// Seconds whose reads may start at once.
        const AT_ONCE: f64 = 0.1;
        let seconds = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = now;
        self.per_second += self.base * INCREASE * seconds;
        let most = (self.per_second * AT_ONCE).max(1.0);
        self.tokens = (self.tokens + self.per_second * seconds).min(most);
    }

    fn is_lifted(&self) -> bool {
        /// In rates of the last cut.
        const LIFTED: f64 = 4.0;
        self.per_second >= self.base * LIFTED
    }

    /// Until there is a token.
    fn wait(&self) -> Duration {
        if self.tokens >= 1.0 {
            return Duration::ZERO;
        }
        // Rounded up, so that there is one then.
        Duration::from_secs_f64((1.0 - self.tokens) / self.per_second) + Duration::from_micros(1)
    }
}

/// Answers and complaints a second.
#[derive(Debug)]
struct Answered {
    since: Instant,
    count: u64,
    complaints: u64,
    /// Of the last whole second.
    last: f64,
    last_complaints: f64,
}

impl Answered {
    fn new(now: Instant) -> Answered {
        Answered { since: now, count: 0, complaints: 0, last: 0.0, last_complaints: 0.0 }
    }

    fn complaint(&mut self, now: Instant) {
        self.roll(now);
        self.complaints += 1;
    }

    /// Whether enough of the answers of this second, or of the last one, were complaints.
    fn complains_often(&self) -> bool {
        /// One of this many answers; fewer complaints say nothing about the rate.
        const COMPLAINTS: f64 = 20.0;
        let often =
            |complaints: f64, answers: f64| complaints > 0.0 && complaints * COMPLAINTS >= answers;
        let this = self.count as f64;
        often(self.complaints as f64, this.max(self.last)) || often(self.last_complaints, self.last)
    }

    /// Whether the last second tells what the store can do.
    fn are_mostly_refused(&self) -> bool {
        /// One of this many was refused, of no fewer than these.
        const REFUSED: f64 = 4.0;
        const TELLING: f64 = 50.0;
        let all = self.last + self.last_complaints;
        all >= TELLING && self.last_complaints * REFUSED >= all
    }

    fn count(&mut self, now: Instant) {
        self.roll(now);
        self.count += 1;
    }

    fn roll(&mut self, now: Instant) {
        let seconds = now.saturating_duration_since(self.since).as_secs_f64();
        if seconds >= 1.0 {
            self.last = self.count as f64 / seconds;
            self.last_complaints = self.complaints as f64 / seconds;
            (self.count, self.complaints) = (0, 0);
            self.since = now;
        }
    }

    fn per_second(&mut self, now: Instant) -> f64 {
        self.roll(now);
        self.last.max(self.count as f64)
    }
}

/// Averages of the latencies of small reads, in seconds.
#[derive(Debug, Default)]
struct Latency {
    sum: f64,
    count: u32,
    last: Option<f64>,
    best: Option<f64>,
}

impl Latency {
    /// Answers whose latencies are averaged: a window.
    const WINDOW: u32 = 64;
    /// What a read is taken to last before any was answered, in seconds.
    const TYPICAL: f64 = 0.03;

    fn add(&mut self, took: Duration) {
        /// How much of the best window is forgotten, a window.
        const FORGET: f64 = 1.02;
        self.sum += took.as_secs_f64();
        self.count += 1;
        if self.count == Self::WINDOW {
            let mean = self.sum / f64::from(Self::WINDOW);
            self.best = Some(self.best.map_or(mean, |best| (best * FORGET).min(mean)));
            self.last = Some(mean);
            (self.sum, self.count) = (0.0, 0);
        }
    }

    /// Whether answers take too long to ask for more.
    fn suffers(&self) -> bool {
        /// Of the best window's.
        const SLOWER: f64 = 2.0;
        match (self.last, self.best) {
            (Some(last), Some(best)) => last > best * SLOWER,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn limiter(now: Instant) -> Limiter {
        Limiter::new(ReadLimits::default(), now)
    }

    fn answer(limiter: &mut Limiter, count: usize, took: Duration, now: Instant) {
        for _ in 0..count {
            limiter.answered(took, 16 << 10, true, now);
        }
    }

    #[test]
    fn it_grows_while_it_is_what_holds_reads_back() {
        let now = Instant::now();
        let mut limiter = limiter(now);
        assert_eq!(limiter.limit(), 256);
        for _ in 0..1_000 {
            limiter.answered(30 * MS, 16 << 10, false, now);
        }
        assert_eq!(limiter.limit(), 256, "nobody waited");
        answer(&mut limiter, 256, 30 * MS, now);
        assert!((259..=260).contains(&limiter.limit()), "{}", limiter.limit());
        answer(&mut limiter, 1_000_000, 30 * MS, now);
        assert_eq!(limiter.limit(), 1_024, "never beyond the bound");
    }

    #[test]
    fn it_does_not_grow_while_answers_get_slower() {
        let now = Instant::now();
        let mut limiter = limiter(now);
        answer(&mut limiter, 2 * Latency::WINDOW as usize, 30 * MS, now);
        answer(&mut limiter, Latency::WINDOW as usize, 90 * MS, now);
        let then = limiter.limit();
        answer(&mut limiter, 10 * Latency::WINDOW as usize, 90 * MS, now);
        assert_eq!(limiter.limit(), then);
        answer(&mut limiter, 10 * Latency::WINDOW as usize, 30 * MS, now);
        assert!(limiter.limit() > then);
    }

    #[test]
    fn a_burst_of_complaints_halves_it_once_and_never_below_the_bound() {
        let start = Instant::now();
        let mut limiter = limiter(start);
        for _ in 0..200 {
            limiter.slow_down(start);
        }
        assert_eq!(limiter.limit(), 128);
        for second in 1..10 {
            limiter.slow_down(start + second * BURST);
        }
        assert_eq!(limiter.limit(), 64);
        for second in 10..100 {
            limiter.slow_down(start + second * BURST);
        }
        assert_eq!(limiter.rate(), Some(LEAST_RATE));
    }

    /// A restart reads much at once, and the first complaint comes before any answer.
    #[test]
    fn the_first_complaint_leaves_most_of_the_rate() {
        let start = Instant::now();
        let mut limiter = limiter(start);
        limiter.slow_down(start);
        let rate = limiter.rate().unwrap();
        assert!((5_000.0..7_000.0).contains(&rate), "256 reads of 30 ms: {rate}");
        // A quiet second does not make it less than another cut would.
        limiter.slow_down(start + 2 * BURST);
        assert!(limiter.rate().unwrap() >= rate * RATE_CUT);
    }

    #[test]
    fn a_store_that_refuses_most_tells_what_it_can_do() {
        let start = Instant::now();
        let mut limiter = limiter(start);
        answer(&mut limiter, 100, 30 * MS, start);
        (0..200).for_each(|_| limiter.slow_down(start));
        limiter.slow_down(start + BURST);
        assert_eq!(limiter.rate(), Some(100.0 * RATE_CUT));
    }

    #[test]
    fn seldom_complaints_limit_no_rate() {
        let start = Instant::now();
        let mut limiter = limiter(start);
        for second in 0..20 {
            let now = start + second * BURST;
            answer(&mut limiter, 1_000, 30 * MS, now);
            limiter.slow_down(now);
        }
        assert_eq!(limiter.rate(), None);
    }

    #[test]
    fn a_time_out_takes_a_quarter_and_limits_no_rate() {
        let now = Instant::now();
        let mut limiter = limiter(now);
        limiter.timed_out(now);
        assert_eq!((limiter.limit(), limiter.rate()), (192, None));
    }

    /// Reads that start in a second, if as many want to as can.
    fn started(limiter: &mut Limiter, from: Instant) -> usize {
        let (mut now, mut count) = (from, 0);
        while now < from + Duration::from_secs(1) {
            match limiter.may_start(0, now) {
                Start::Now => {
                    limiter.started();
                    count += 1;
                    if limiter.rate().is_none() {
                        return usize::MAX;
                    }
                }
                Start::At(then) => now = then,
                Start::Later => return count,
            }
        }
        count
    }

    #[test]
    fn a_complaint_limits_the_rate_which_recovers_by_itself() {
        let start = Instant::now();
        let mut limiter = limiter(start);
        let at = |second| start + Duration::from_secs(second);
        answer(&mut limiter, 1_000, 30 * MS, at(1));
        (0..100).for_each(|_| limiter.slow_down(at(1)));
        limiter.slow_down(at(2));
        assert!(matches!(limiter.may_start(0, at(2)), Start::At(_)), "a pause comes first");
        let first = started(&mut limiter, at(2));
        assert!((690..=800).contains(&first), "{first}");
        let tenth = started(&mut limiter, at(11));
        assert!((1_200..=1_500).contains(&tenth), "{tenth}");
        assert_eq!(started(&mut limiter, at(41)), usize::MAX, "lifted");
        assert_eq!(limiter.may_start(limiter.limit(), at(42)), Start::Later);
    }
}
