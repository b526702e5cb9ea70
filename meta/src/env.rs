//! Time and randomness come in through a handle, so that a seed replays everything.

use std::time::{SystemTime, UNIX_EPOCH};

/// The wall clock and a source of random numbers. Sleeping is tokio's, which tests can pause.
pub trait Env: Send + Sync + 'static {
    /// Milliseconds since 1970.
    fn now_ms(&self) -> u64;
    /// 64 random bits.
    fn random(&self) -> u64;
}

/// The machine's clock and the thread's generator.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemEnv;

impl Env for SystemEnv {
    fn now_ms(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
    }

    fn random(&self) -> u64 {
        rand::random()
    }
}
