//! What a run costs: processor time and memory of this process, as the kernel counts them.

use std::time::{Duration, Instant};

/// A moment in a run.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    at: Instant,
    user: Duration,
    system: Duration,
}

/// What passed between two marks.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    pub wall: Duration,
    pub user: Duration,
    pub system: Duration,
}

impl Usage {
    /// User and system seconds of all threads.
    pub fn cpu_s(&self) -> f64 {
        (self.user + self.system).as_secs_f64()
    }

    /// The share of the machine's cores that was busy with this process.
    pub fn cpu_share(&self) -> f64 {
        self.cpu_s() / (self.wall.as_secs_f64() * cores() as f64).max(1e-9)
    }
}

impl Mark {
    pub fn now() -> Mark {
        let (user, system) = processor_times("self").unwrap_or_default();
        Mark { at: Instant::now(), user, system }
    }

    pub fn elapsed(&self) -> Usage {
        let now = Mark::now();
        Usage {
            wall: now.at - self.at,
            user: now.user.saturating_sub(self.user),
            system: now.system.saturating_sub(self.system),
        }
    }
}

/// Of the machine, as far as this process may use them.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// The kernel counts in hundredths of a second (USER_HZ is 100 on every Linux we run on).
const TICK: Duration = Duration::from_millis(10);

/// Seconds of processor time that a process has had, with all its threads; 0 if it is gone.
pub fn cpu_s_of(process: u32) -> f64 {
    let (user, system) = processor_times(&process.to_string()).unwrap_or_default();
    (user + system).as_secs_f64()
}

fn processor_times(process: &str) -> Option<(Duration, Duration)> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The second field is the name in parentheses and may hold spaces.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u32 = fields.next()?.parse().ok()?;
    let system: u32 = fields.next()?.parse().ok()?;
    Some((TICK * user, TICK * system))
}

/// The largest resident set so far, in megabytes.
pub fn peak_rss_mb() -> f64 {
    status_mb("VmHWM:")
}

/// The resident set now, in megabytes.
pub fn rss_mb() -> f64 {
    status_mb("VmRSS:")
}

fn status_mb(field: &str) -> f64 {
    std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|l| l.starts_with(field))?;
            line.split_whitespace().nth(1)?.parse::<f64>().ok()
        })
        .map_or(0.0, |kib| kib / 1024.0)
}
