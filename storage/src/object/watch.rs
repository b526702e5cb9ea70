//! How a put goes on, for those that wait for it.

use std::sync::Arc;

use object_store::{Error, PutMode, PutOptions};
use parking_lot::Mutex;

/// Travels with a put as an extension: the store notes in it what becomes of the put's attempts. Clones are one.
#[derive(Clone, Debug, Default)]
pub struct PutWatch(Arc<Mutex<PutProgress>>);

/// What has become of a put so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PutProgress {
    /// Attempts that have failed; it is tried again.
    pub failures: u32,
    /// Of the last one that failed.
    pub error: Option<String>,
    /// It waits because the store has asked for fewer requests.
    pub held: bool,
}

impl PutWatch {
    /// The watch that came with a put, if one did.
    pub(super) fn of(options: &PutOptions) -> Option<PutWatch> {
        options.extensions.get::<PutWatch>().cloned()
    }

    /// Of a put that is watched.
    pub fn options(&self, mode: PutMode) -> PutOptions {
        let mut options = PutOptions::from(mode);
        options.extensions.insert(self.clone());
        options
    }

    pub fn progress(&self) -> PutProgress {
        self.0.lock().clone()
    }

    /// An attempt failed, and the put is tried again.
    pub fn note_failure(&self, error: String) {
        let mut progress = self.0.lock();
        progress.failures += 1;
        progress.error = Some(error);
    }

    pub(super) fn note_failed(watch: Option<&PutWatch>, error: &Error) {
        if let Some(watch) = watch {
            watch.note_failure(error.to_string());
        }
    }

    /// Until the answer is dropped, the put waits because the store has asked for fewer requests.
    pub(super) fn hold(&self) -> impl Drop + Send + use<> {
        self.0.lock().held = true;
        Held(self.clone())
    }
}

struct Held(PutWatch);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.0.lock().held = false;
    }
}
