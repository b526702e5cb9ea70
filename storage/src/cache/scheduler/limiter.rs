//! How many reads may be in flight, and how many may start in a second: found out by trying.
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
/// Of the rate that the store last answered.
const RATE_CUT: f64 = 0.7;
/// Reads a second that are tried however often the store complains.
const LEAST_RATE: f64 = 10.0;
/// Of the rate at the last cut, each second.
const RATE_INCREASE: f64 = 0.1;
/// At this many times the rate of the last cut there is no limit on the rate any more.
const RATE_LIFTED: f64 = 4.0;
/// Time whose reads may start at once.
const RATE_BURST: f64 = 0.1;
/// Reads up to this many bytes take as long as the store takes, not the transfer.
const SMALL_READ_BYTES: u64 = 256 << 10;
/// Answers whose latencies are averaged.
const WINDOW: u32 = 64;
/// Answers that take this many times longer than the best windows' are too slow to ask for more.
const SLOWER: f64 = 2.0;
/// How the best window is forgotten, a window.
const FORGET: f64 = 1.02;

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
pub(super) enum Start {
    Now,
    /// Because of the rate.
    At(Instant),
    /// When one in flight has ended.
    Later,
}

#[derive(Debug)]
pub(super) struct Limiter {
    bounds: ReadLimits,
    limit: f64,
    rate: Option<Rate>,
    last_cut: Option<Instant>,
    answered: Answered,
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
            answered: Answered { since: now, count: 0, last: 0.0 },
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

    /// A read was answered. `saturated`: the limit held others back.
    pub fn answered(&mut self, took: Duration, bytes: u64, saturated: bool, now: Instant) {
        self.answered.count(now);
        if bytes <= SMALL_READ_BYTES {
            self.latency.add(took);
        }
        if saturated && !self.latency.suffers() {
            self.limit = (self.limit + INCREASE / self.limit).min(self.bounds.most as f64);
        }
    }

    /// The store asked for fewer requests.
    pub fn slow_down(&mut self, now: Instant) {
        if !self.cut(SLOW_DOWN, now) {
            return;
        }
        let answered = self.answered.per_second(now);
        let known = self.rate.as_ref().map_or(answered, |r| r.per_second.min(answered));
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
        let seconds = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = now;
        self.per_second += self.base * RATE_INCREASE * seconds;
        let most = (self.per_second * RATE_BURST).max(1.0);
        self.tokens = (self.tokens + self.per_second * seconds).min(most);
    }

    fn is_lifted(&self) -> bool {
        self.per_second >= self.base * RATE_LIFTED
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

/// Answers a second.
#[derive(Debug)]
struct Answered {
    since: Instant,
    count: u64,
    /// Of the last whole second.
    last: f64,
}

impl Answered {
    fn count(&mut self, now: Instant) {
        self.roll(now);
        self.count += 1;
    }

    fn roll(&mut self, now: Instant) {
        let seconds = now.saturating_duration_since(self.since).as_secs_f64();
        if seconds >= 1.0 {
            self.last = self.count as f64 / seconds;
            self.count = 0;
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
    fn add(&mut self, took: Duration) {
        self.sum += took.as_secs_f64();
        self.count += 1;
        if self.count == WINDOW {
            let mean = self.sum / f64::from(WINDOW);
            self.best = Some(self.best.map_or(mean, |best| (best * FORGET).min(mean)));
            self.last = Some(mean);
            (self.sum, self.count) = (0.0, 0);
        }
    }

    fn suffers(&self) -> bool {
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
        answer(&mut limiter, 2 * WINDOW as usize, 30 * MS, now);
        answer(&mut limiter, WINDOW as usize, 90 * MS, now);
        let then = limiter.limit();
        answer(&mut limiter, 10 * WINDOW as usize, 90 * MS, now);
        assert_eq!(limiter.limit(), then);
        answer(&mut limiter, 10 * WINDOW as usize, 30 * MS, now);
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
        assert_eq!(limiter.rate(), Some(LEAST_RATE));
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
        limiter.slow_down(at(1));
        assert!(matches!(limiter.may_start(0, at(1)), Start::At(_)), "a pause comes first");
        let first = started(&mut limiter, at(1));
        assert!((690..=800).contains(&first), "{first}");
        let tenth = started(&mut limiter, at(10));
        assert!((1_200..=1_500).contains(&tenth), "{tenth}");
        assert_eq!(started(&mut limiter, at(40)), usize::MAX, "lifted");
        assert_eq!(limiter.may_start(limiter.limit(), at(41)), Start::Later);
    }
}
