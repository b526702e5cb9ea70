//! Which puts a job waits for, so that one that takes long or is tried again is told at the job (SHOW JOBS).

use std::sync::Arc;
use std::time::Duration;

use millrace_common::EnvHandle;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::job_store::JobStore;
use crate::object::{PutProgress, PutWatch};

/// What a put writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutKind {
    /// A segment of the tail.
    Tail,
    /// A segment of runs.
    Runs,
}

impl PutKind {
    pub fn name(self) -> &'static str {
        match self {
            PutKind::Tail => "tail",
            PutKind::Runs => "runs",
        }
    }
}

/// A put that a job waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutWait {
    pub kind: PutKind,
    /// What is written. `None`: the put has not begun, because those before it are under way.
    pub object: Option<String>,
    /// For how long the job has waited.
    pub waited: Duration,
    pub progress: PutProgress,
}

/// A wait for one put, shared by who waits and who writes.
#[derive(Debug)]
pub(crate) struct Wait {
    kind: PutKind,
    since: Instant,
    /// Once the put has begun: its object and how it goes on.
    put: Mutex<Option<(String, PutWatch)>>,
}

impl Wait {
    pub fn begun(&self, object: &str, watch: &PutWatch) {
        *self.put.lock() = Some((object.to_owned(), watch.clone()));
    }

    fn read(&self, env: &EnvHandle) -> PutWait {
        let put = self.put.lock().clone();
        let waited = env.elapsed(self.since);
        let progress = put.as_ref().map(|(_, watch)| watch.progress()).unwrap_or_default();
        PutWait { kind: self.kind, object: put.map(|(object, _)| object), waited, progress }
    }
}

/// The puts that one job waits for.
#[derive(Debug, Default)]
pub(crate) struct PutWaits(Arc<Mutex<Vec<Arc<Wait>>>>);

impl PutWaits {
    /// The job waits from now on until the answer is dropped.
    pub fn begin(&self, kind: PutKind, env: &EnvHandle) -> Waiting {
        let wait = Arc::new(Wait { kind, since: env.now(), put: Mutex::default() });
        self.0.lock().push(Arc::clone(&wait));
        Waiting { wait, all: Arc::clone(&self.0) }
    }

    /// All of them, the one first that was begun first.
    pub fn read(&self, env: &EnvHandle) -> Vec<PutWait> {
        self.0.lock().iter().map(|wait| wait.read(env)).collect()
    }
}

/// A job waits for a put while this lives.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub wait: Arc<Wait>,
    all: Arc<Mutex<Vec<Arc<Wait>>>>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.all.lock().retain(|other| !Arc::ptr_eq(other, &self.wait));
    }
}

impl JobStore {
    /// The job waits for a put until the answer is dropped.
    pub(crate) fn wait_for_put(&self, kind: PutKind) -> Waiting {
        self.puts.begin(kind, self.env())
    }

    /// The puts that epochs of the job wait for: of commits, of what is spilled, of what a sink stages.
    pub fn put_waits(&self) -> Vec<PutWait> {
        self.puts.read(self.env())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_a_job_waits_for_is_known_until_it_no_longer_waits() {
        let (env, waits) = (EnvHandle::default(), PutWaits::default());
        let tail = waits.begin(PutKind::Tail, &env);
        tokio::time::advance(Duration::from_secs(2)).await;
        let runs = waits.begin(PutKind::Runs, &env);
        let watch = PutWatch::default();
        runs.wait.begun("data/1/2.seg", &watch);
        watch.note_failure("reset".to_owned());
        let progress = PutProgress { failures: 1, error: Some("reset".to_owned()), held: false };
        let expected = [
            PutWait {
                kind: PutKind::Tail,
                object: None,
                waited: Duration::from_secs(2),
                progress: PutProgress::default(),
            },
            PutWait {
                kind: PutKind::Runs,
                object: Some("data/1/2.seg".to_owned()),
                waited: Duration::ZERO,
                progress,
            },
        ];
        assert_eq!(waits.read(&env), expected);
        drop(tail);
        assert_eq!(waits.read(&env), expected[1..]);
        drop(runs);
        assert!(waits.read(&env).is_empty());
    }
}
