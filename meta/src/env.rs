//! Time and randomness come in through a handle, so that a seed replays everything.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The clocks and a source of random numbers. Sleeping is tokio's, which tests can pause.
pub trait Env: Send + Sync + 'static {
    /// Milliseconds since 1970.
    fn now_ms(&self) -> u64;
    /// Time that nobody sets and that passes while the machine is suspended too. Only differences mean anything.
    fn since_boot(&self) -> Duration;
    /// 64 random bits.
    fn random(&self) -> u64;
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
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
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
