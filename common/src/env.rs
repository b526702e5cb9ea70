//! Time and randomness come in through a handle, so that a seed replays everything.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// The clocks and a source of random numbers. Whatever takes time or random numbers is given an [`EnvHandle`] when it is
/// made. Sleeping is tokio's, which tests can pause.
pub trait Env: Send + Sync + 'static {
    /// Milliseconds since 1970.
    fn now_ms(&self) -> u64;
    /// Time that nobody sets and that passes while the machine is suspended too. Only differences mean anything.
    fn since_boot(&self) -> Duration;
    /// 64 random bits.
    fn random(&self) -> u64;

    /// Microseconds since 1970.
    fn now_micros(&self) -> u64 {
        self.now_ms() * 1_000
    }

    /// The moment on the clock by which sleeps and time-outs are measured.
    fn now(&self) -> Instant {
        Instant::now()
    }

    /// How long ago a moment of [`Env::now`] was.
    fn elapsed(&self, since: Instant) -> Duration {
        self.now().saturating_duration_since(since)
    }

    /// A number from 0 up to 1, without 1, uniformly distributed.
    fn random_fraction(&self) -> f64 {
        // As many bits as a float's significand holds.
        (self.random() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// An environment that is passed on to all parts of a process.
#[derive(Clone)]
pub struct EnvHandle(Arc<dyn Env>);

impl EnvHandle {
    pub fn new(env: impl Env) -> EnvHandle {
        EnvHandle(Arc::new(env))
    }
}

impl Default for EnvHandle {
    fn default() -> EnvHandle {
        EnvHandle::new(SystemEnv)
    }
}

impl From<Arc<dyn Env>> for EnvHandle {
    fn from(env: Arc<dyn Env>) -> EnvHandle {
        EnvHandle(env)
    }
}

impl std::ops::Deref for EnvHandle {
    type Target = dyn Env;

    fn deref(&self) -> &(dyn Env + 'static) {
        &*self.0
    }
}

impl fmt::Debug for EnvHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EnvHandle")
    }
}

/// The clock behind `since_boot`. Linux's monotonic clock stands still during suspension, that of others does not.
#[cfg(target_os = "linux")]
const BOOT_CLOCK: libc::clockid_t = libc::CLOCK_BOOTTIME;
#[cfg(not(target_os = "linux"))]
const BOOT_CLOCK: libc::clockid_t = libc::CLOCK_MONOTONIC;

/// The machine's clock and the thread's generator.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemEnv;

impl Env for SystemEnv {
    fn now_ms(&self) -> u64 {
        since_1970().as_millis() as u64
    }

    fn now_micros(&self) -> u64 {
        since_1970().as_micros() as u64
    }

    fn since_boot(&self) -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is a valid place for the answer. With a clock that exists the call cannot fail.
        unsafe { libc::clock_gettime(BOOT_CLOCK, &mut time) };
        Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.max(0) as u32)
    }

    fn random(&self) -> u64 {
        rand::random()
    }
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Constant(u64);

    impl Env for Constant {
        fn now_ms(&self) -> u64 {
            7
        }

        fn since_boot(&self) -> Duration {
            Duration::ZERO
        }

        fn random(&self) -> u64 {
            self.0
        }
    }

    #[test]
    fn a_fraction_is_less_than_one() {
        assert_eq!(Constant(0).random_fraction(), 0.0);
        assert_eq!(Constant(1 << 63).random_fraction(), 0.5);
        assert!(Constant(u64::MAX).random_fraction() < 1.0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_clock_of_sleeps_stands_still_with_them() {
        let env = EnvHandle::new(Constant(0));
        let began = env.now();
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert_eq!(env.elapsed(began), Duration::from_secs(3600));
        assert_eq!(env.now_micros(), 7_000);
    }
}
