//! What a process that leads keeps in its data directory about its lead.
//!
//! The directory is locked while the process lives. So a process that finds there that the leader of the log was one
//! with this directory knows that it is dead, and need not wait for its lease (docs/design.md §10).

use std::path::{Path, PathBuf};
use std::time::Duration;

use millrace_meta::log::LEASE_OUTWAITED;
use millrace_meta::{Meta, claim};
use tracing::{info, warn};

const FILE: &str = "leader";
/// For how long a new leader counts with what the one before has given: its lease, and a quarter of that because clocks do
/// not run alike.
pub const PREDECESSOR: Duration = LEASE_OUTWAITED;

/// The file of a locked data directory.
#[derive(Clone, Debug, Default)]
pub struct Leadership {
    path: PathBuf,
    /// The registration of the last process with this directory that led; 0: none has.
    led: u64,
    /// How often one of them was deposed since one led for long.
    deposed: u32,
}

impl Leadership {
    /// Of the data directory that this process has locked. A file that cannot be read says nothing.
    pub fn read(data_dir: &Path) -> Leadership {
        let path = data_dir.join(FILE);
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let value = |name: &str| {
            let mut lines = text.lines().filter_map(|line| line.split_once(' '));
            lines.find(|(key, _)| *key == name).and_then(|(_, value)| value.parse().ok())
        };
        let (led, deposed) = (value("nonce").unwrap_or(0), value("deposed").unwrap_or(0));
        Leadership { path, led, deposed: u32::try_from(deposed).unwrap_or(u32::MAX) }
    }

    /// Whether the process that registered with this nonce had this directory, and so is dead.
    pub fn proves_dead(&self, nonce: u64) -> bool {
        nonce != 0 && nonce == self.led
    }

    /// What this process waits before it claims the lead, because it was deposed.
    pub fn penalty(&self) -> Duration {
        claim::penalty(self.deposed)
    }

    /// The process leads, by this registration, and has waited for its predecessors.
    pub fn lead(&mut self, nonce: u64) {
        self.led = nonce;
        self.write();
    }

    /// The process has led for long.
    pub fn has_led_long(&mut self) {
        if self.deposed != 0 {
            self.deposed = 0;
            self.write();
        }
    }

    /// The process was deposed.
    pub fn was_deposed(&mut self) {
        self.deposed = self.deposed.saturating_add(1);
        self.write();
    }

    /// Without the file the next process waits where it would not have had to.
    fn write(&self) {
        let text = format!("nonce {}\ndeposed {}\n", self.led, self.deposed);
        let temporary = self.path.with_extension("new");
        let written =
            std::fs::write(&temporary, text).and_then(|()| std::fs::rename(&temporary, &self.path));
        if let Err(error) = written {
            warn!(%error, path = %self.path.display(), "who leads could not be written down");
        }
    }
}

/// A process has just taken the lead: returns when none of its predecessors can answer a read any more. Where one is not
/// known to be dead, that is a quarter longer than its lease, because clocks do not run alike, or when `stopped` completes.
pub async fn outwait_predecessors(
    meta: &Meta,
    known: &Leadership,
    stopped: impl Future<Output = ()>,
) {
    if meta.predecessors().iter().all(|nonce| known.proves_dead(*nonce)) {
        return;
    }
    info!(
        ms = PREDECESSOR.as_millis() as u64,
        "the lease of the leader before may not be over yet: waits"
    );
    if tokio::time::timeout(PREDECESSOR, stopped).await.is_ok() {
        info!("the leader before has stopped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_led_with_the_directory_is_known_to_be_dead() {
        let dir = tempfile::tempdir().unwrap();
        let mut own = Leadership::read(dir.path());
        assert!(!own.proves_dead(0) && !own.proves_dead(7), "nobody has led");
        own.lead(u64::MAX);
        assert!(Leadership::read(dir.path()).proves_dead(u64::MAX));
        own.lead(8);
        assert!(!Leadership::read(dir.path()).proves_dead(u64::MAX), "only the last one");
    }

    #[test]
    fn who_is_deposed_again_and_again_waits_for_longer() {
        let dir = tempfile::tempdir().unwrap();
        let penalty = || Leadership::read(dir.path()).penalty().as_secs();
        let mut seen = vec![penalty()];
        for _ in 0..9 {
            Leadership::read(dir.path()).was_deposed();
            seen.push(penalty());
        }
        assert_eq!(seen, [0, 1, 2, 4, 8, 16, 16, 16, 16, 16]);
        Leadership::read(dir.path()).has_led_long();
        assert_eq!(penalty(), 0);
    }

    #[test]
    fn a_file_that_says_nothing_proves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["", "nonce", "nonce x\ndeposed -1\n", "\0\0\0"] {
            std::fs::write(dir.path().join(FILE), text).unwrap();
            let read = Leadership::read(dir.path());
            assert!(!read.proves_dead(0) && read.penalty().is_zero(), "{text:?}");
        }
    }
}
