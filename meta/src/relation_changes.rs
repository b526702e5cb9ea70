//! Wakes those who wait for a relation, when something about that relation has changed: what can be read of it, the
//! state of its job, its catalog entry.
//!
//! Who waits names the relations that matter to it, so an event costs those whom it concerns, however many others
//! wait. A notice carries nothing: the waiter looks at the state again.

use futures::FutureExt;
use millrace_common::RelationId;
use millrace_common::collections::HashMap;
use parking_lot::Mutex;
use tokio::sync::watch;

/// Waits for any of some relations. What changes after it was made, or last told, is never missed.
pub struct Watched(Vec<watch::Receiver<u64>>);

impl Watched {
    /// The waiter looks now: what has changed so far is no news.
    pub fn mark_seen(&mut self) {
        for receiver in &mut self.0 {
            receiver.mark_unchanged();
        }
    }

    /// Something has changed. Without relations: never.
    pub async fn changed(&mut self) {
        if self.0.is_empty() {
            return std::future::pending().await;
        }
        let any = self.0.iter_mut().map(|receiver| receiver.changed().boxed());
        // An error says that the server is going: the waiter finds out when it looks.
        let _ = futures::future::select_all(any).await;
    }
}

/// One channel per relation that is waited for; at most one per relation that ever was.
#[derive(Debug, Default)]
pub struct RelationChanges(Mutex<HashMap<RelationId, watch::Sender<u64>>>);

impl RelationChanges {
    /// A channel that rises whenever the relation changes.
    pub fn subscribe(&self, id: RelationId) -> watch::Receiver<u64> {
        self.0.lock().entry(id).or_default().subscribe()
    }

    pub fn watch(&self, ids: impl IntoIterator<Item = RelationId>) -> Watched {
        Watched(ids.into_iter().map(|id| self.subscribe(id)).collect())
    }

    /// Something about the relation has changed.
    pub fn touch(&self, id: RelationId) {
        let mut channels = self.0.lock();
        let Some(channel) = channels.get(&id) else { return };
        match channel.receiver_count() {
            0 => drop(channels.remove(&id)),
            _ => channel.send_modify(|n| *n += 1),
        }
    }

    /// Every relation of which `which` holds has changed.
    pub fn touch_where(&self, which: impl Fn(RelationId) -> bool) {
        self.0.lock().retain(|id, channel| {
            if which(*id) {
                channel.send_modify(|n| *n += 1);
            }
            channel.receiver_count() > 0
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: RelationId = RelationId(1);
    const B: RelationId = RelationId(2);

    #[tokio::test]
    async fn a_change_wakes_those_who_wait_for_that_relation_alone() {
        let changes = RelationChanges::default();
        let (mut of_a, mut of_both) = (changes.watch([A]), changes.watch([A, B]));
        changes.touch(B);
        of_both.changed().await;
        assert!(of_a.changed().now_or_never().is_none());
        of_both.mark_seen();
        assert!(of_both.changed().now_or_never().is_none());
        // A change between a look and the wait is not missed.
        changes.touch(A);
        of_a.changed().await;
        of_both.changed().await;
    }

    #[tokio::test]
    async fn channels_without_a_waiter_are_forgotten() {
        let changes = RelationChanges::default();
        drop(changes.watch([A, B]));
        changes.touch(A);
        assert_eq!(changes.0.lock().len(), 1);
        changes.touch_where(|_| false);
        assert!(changes.0.lock().is_empty());
    }
}
