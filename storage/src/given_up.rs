//! Objects that this process has written for nothing: epochs that the log has refused, cancelled statements, flushes and
//! compactions that came too late (docs/design.md §9, garbage collection).
//!
//! Who writes an object claims it, and hands the claim on with what is to be committed; several slices share one. The
//! last claim that is dropped gives the object up, unless the log has come to name it: then the log knows when it is
//! garbage. A claim that is dropped although the log will name the object costs nothing: the fold leaves out what is
//! named.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Names of objects that this process will never bring into the log, until somebody tells the log so.
#[derive(Debug, Default)]
pub struct GivenUp {
    names: Mutex<BTreeSet<String>>,
    told: Notify,
}

impl GivenUp {
    /// These objects are of no use.
    pub fn add(&self, names: impl IntoIterator<Item = String>) {
        let mut known = self.names.lock();
        let before = known.len();
        known.extend(names);
        let more = known.len() > before;
        drop(known);
        if more {
            self.told.notify_one();
        }
    }

    /// Some of them, at most `limit`; they are not given again.
    pub fn take(&self, limit: usize) -> Vec<String> {
        let mut names = self.names.lock();
        let mut taken = Vec::new();
        while taken.len() < limit
            && let Some(name) = names.pop_first()
        {
            taken.push(name);
        }
        taken
    }

    pub fn is_empty(&self) -> bool {
        self.names.lock().is_empty()
    }

    /// Completes when there are some.
    pub async fn wait(&self) {
        while self.is_empty() {
            self.told.notified().await;
        }
    }
}

/// A part in an object that is not in the log, perhaps not in the store either.
#[derive(Clone, Debug)]
pub(crate) struct Claim(Arc<Object>);

#[derive(Debug)]
struct Object {
    name: String,
    /// The log names it, or it is deleted.
    settled: AtomicBool,
    given_up: Arc<GivenUp>,
}

impl Claim {
    /// Of an object that is about to be written.
    pub fn new(name: &str, given_up: &Arc<GivenUp>) -> Claim {
        Claim(Arc::new(Object {
            name: name.to_owned(),
            settled: AtomicBool::new(false),
            given_up: Arc::clone(given_up),
        }))
    }

    /// Name of the object.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The log names the object, or somebody else answers for it, or it is deleted.
    pub fn settle(self) {
        self.0.settled.store(true, Ordering::Release);
    }
}

/// All of these objects are settled.
pub(crate) fn settle(claims: impl IntoIterator<Item = Claim>) {
    claims.into_iter().for_each(Claim::settle);
}

impl Drop for Object {
    fn drop(&mut self) {
        if !*self.settled.get_mut() {
            self.given_up.add([std::mem::take(&mut self.name)]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_claim_gives_an_object_up_that_none_has_settled() {
        let given_up = Arc::<GivenUp>::default();
        let claims = ["a", "b"].map(|name| Claim::new(name, &given_up));
        let shared = claims.clone();
        drop(claims);
        assert!(given_up.is_empty(), "other parts of them may still come into the log");
        let [a, b] = shared;
        a.settle();
        drop(b);
        assert_eq!(given_up.take(9), ["b"]);
        assert!(given_up.is_empty());
    }

    #[tokio::test]
    async fn who_waits_is_told_of_what_is_given_up() {
        let given_up = Arc::<GivenUp>::default();
        let waiting = tokio::spawn({
            let given_up = Arc::clone(&given_up);
            async move {
                given_up.wait().await;
                given_up.take(1)
            }
        });
        given_up.add(["b".to_owned(), "a".to_owned()]);
        assert_eq!(waiting.await.unwrap(), ["a"]);
        assert_eq!(given_up.take(1), ["b"]);
    }
}
