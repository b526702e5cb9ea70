//! Reads under way, shared: whoever asks for what another is already reading waits for that, and the read becomes as
//! urgent as the most urgent who waits for it.

use std::hash::Hash;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::Shared;
use millrace_common::collections::HashMap;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::Priority;
use super::scheduler::Urgency;
use crate::error::{Result, StorageError};

type Pending<V> = Shared<oneshot::Receiver<Result<V>>>;

/// One read under way.
struct Flight<V: Clone> {
    pending: Pending<V>,
    /// Of the most urgent who waits.
    priority: Priority,
    /// Of the request that reads it, once that is planned.
    urgency: Option<Arc<Urgency>>,
}

type UnderWay<K, V> = Arc<Mutex<HashMap<K, Flight<V>>>>;

pub(super) struct Flights<K: Hash + Eq + Clone, V: Clone> {
    under_way: UnderWay<K, V>,
}

/// An answer to wait for.
pub(crate) struct Wait<V: Clone>(Pending<V>);

/// The duty to answer. Dropping it unanswered fails the waiters, never hangs them.
pub(super) struct Promise<K: Hash + Eq + Clone, V: Clone> {
    key: K,
    /// `None`: answered, or given up because nobody waits.
    answer: Option<oneshot::Sender<Result<V>>>,
    under_way: UnderWay<K, V>,
}

/// What a caller of [`Flights::join`] got.
pub(super) enum Joined<K: Hash + Eq + Clone, V: Clone> {
    /// It is here by now.
    Here(V),
    /// Somebody reads it. The request is less urgent than the caller, who must raise it.
    Follow(Wait<V>, Option<Arc<Urgency>>),
    /// The caller must read it.
    Lead(Promise<K, V>, Wait<V>),
}

impl<K: Hash + Eq + Clone, V: Clone> Flights<K, V> {
    pub fn new() -> Flights<K, V> {
        Flights { under_way: Arc::new(Mutex::new(HashMap::default())) }
    }

    /// Joins a read under way or starts one. `look` looks once more whether the value has arrived in
    /// the meantime: an answer enters the cache before its flight ends.
    pub fn join(
        &self,
        key: &K,
        priority: Priority,
        look: impl FnOnce() -> Option<V>,
    ) -> Joined<K, V> {
        let mut flights = self.under_way.lock();
        if let Some(flight) = flights.get_mut(key) {
            let raises = priority < flight.priority;
            flight.priority = flight.priority.min(priority);
            let urgency = flight.urgency.clone().filter(|_| raises);
            return Joined::Follow(Wait(flight.pending.clone()), urgency);
        }
        if let Some(value) = look() {
            return Joined::Here(value);
        }
        let (answer, pending) = oneshot::channel();
        let pending = pending.shared();
        let flight = Flight { pending: pending.clone(), priority, urgency: None };
        flights.insert(key.clone(), flight);
        let promise = Promise {
            key: key.clone(),
            answer: Some(answer),
            under_way: Arc::clone(&self.under_way),
        };
        Joined::Lead(promise, Wait(pending))
    }
}

impl<V: Clone> Wait<V> {
    pub async fn get(self) -> Result<V> {
        match self.0.await {
            Ok(result) => result,
            Err(_) => Err(StorageError::internal("a shared read was abandoned")),
        }
    }
}

impl<K: Hash + Eq + Clone, V: Clone> Promise<K, V> {
    /// Whoever joins from now on may raise the request; how urgent it is already.
    pub fn attach(&self, urgency: &Arc<Urgency>) -> Option<Priority> {
        let mut flights = self.under_way.lock();
        let flight = flights.get_mut(&self.key)?;
        flight.urgency = Some(Arc::clone(urgency));
        Some(flight.priority)
    }

    pub fn answer(mut self, result: Result<V>) {
        if let Some(answer) = self.answer.take() {
            self.under_way.lock().remove(&self.key);
            // Nobody may be waiting any more.
            let _ = answer.send(result);
        }
    }

    /// Whether somebody waits for the answer. If nobody does, the duty ends: who asks from now on reads anew.
    pub fn is_wanted(&mut self) -> bool {
        let mut flights = self.under_way.lock();
        if self.answer.is_none() {
            return false;
        }
        // One is the map's own.
        if flights.get(&self.key).is_some_and(|f| f.pending.strong_count().unwrap_or(0) > 1) {
            return true;
        }
        flights.remove(&self.key);
        self.answer = None;
        false
    }
}

impl<K: Hash + Eq + Clone, V: Clone> Drop for Promise<K, V> {
    fn drop(&mut self) {
        if self.answer.is_some() {
            self.under_way.lock().remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_reads_and_all_get_it() {
        let flights: Flights<u32, u32> = Flights::new();
        let Joined::Lead(promise, first) = flights.join(&1, Priority::Demand, || None) else {
            panic!("nobody else reads")
        };
        let Joined::Follow(second, None) = flights.join(&1, Priority::Demand, || None) else {
            panic!("a read is under way")
        };
        promise.answer(Ok(7));
        assert_eq!(first.get().await.unwrap(), 7);
        assert_eq!(second.get().await.unwrap(), 7);
        assert!(matches!(flights.join(&1, Priority::Demand, || Some(8)), Joined::Here(8)));
    }

    #[tokio::test]
    async fn a_read_that_nobody_waits_for_is_given_up() {
        let flights: Flights<u32, u32> = Flights::new();
        let Joined::Lead(mut promise, first) = flights.join(&1, Priority::Demand, || None) else {
            panic!("nobody else reads")
        };
        let Joined::Follow(second, None) = flights.join(&1, Priority::Demand, || None) else {
            panic!("a read is under way")
        };
        drop(first);
        assert!(promise.is_wanted());
        drop(second);
        assert!(!promise.is_wanted());
        let Joined::Lead(again, third) = flights.join(&1, Priority::Demand, || None) else {
            panic!("the first read was given up")
        };
        promise.answer(Ok(6));
        again.answer(Ok(7));
        assert_eq!(third.get().await.unwrap(), 7, "by its own read");
    }

    #[tokio::test]
    async fn an_abandoned_read_fails_its_waiters() {
        let flights: Flights<u32, u32> = Flights::new();
        let Joined::Lead(promise, wait) = flights.join(&1, Priority::Demand, || None) else {
            panic!("nobody else reads")
        };
        drop(promise);
        assert!(wait.get().await.is_err());
        assert!(matches!(flights.join(&1, Priority::Demand, || None), Joined::Lead(..)));
    }
}
