//! The incarnation of a frontend's process. One that begins while nobody leads takes sessions before it has one: they
//! read what is committed, and what needs the incarnation waits for it.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{SqlError, SqlState};
use tokio::sync::watch;

/// How long a statement waits for the registration: as long as it waits for a leader that is lost.
pub(crate) const REGISTRATION_WAIT: Duration = Duration::from_secs(15);

/// See the module. Clones share it. Invariant: it is given once, and never changes then.
#[derive(Clone, Debug)]
pub struct Incarnation(Arc<watch::Sender<Option<u64>>>);

impl Incarnation {
    /// Of a process that has not registered yet.
    pub fn awaited() -> Incarnation {
        Incarnation(Arc::new(watch::Sender::new(None)))
    }

    /// The process has registered. What waits for that goes on.
    pub fn give(&self, incarnation: u64) {
        self.0.send_replace(Some(incarnation));
    }

    pub fn is_given(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// 0: there is none yet.
    pub fn get(&self) -> u64 {
        self.0.borrow().unwrap_or_default()
    }

    /// Returns when there is one.
    pub async fn known(&self) -> u64 {
        // The sender is in `self`: there is no error.
        let _ = self.0.subscribe().wait_for(|given| given.is_some()).await;
        self.get()
    }

    /// The same for a statement, which waits for [`REGISTRATION_WAIT`] at most. An error (57P03) has had no effect.
    pub async fn given(&self) -> Result<u64, SqlError> {
        match tokio::time::timeout(REGISTRATION_WAIT, self.known()).await {
            Ok(incarnation) => Ok(incarnation),
            Err(_) => Err(unregistered()),
        }
    }
}

impl From<u64> for Incarnation {
    fn from(incarnation: u64) -> Incarnation {
        Incarnation(Arc::new(watch::Sender::new(Some(incarnation))))
    }
}

impl Default for Incarnation {
    /// Of a frontend that registers nowhere.
    fn default() -> Incarnation {
        Incarnation::from(0)
    }
}

fn unregistered() -> SqlError {
    let waited = REGISTRATION_WAIT.as_millis();
    let message = format!(
        "no meta process leads, or this frontend has not registered with it yet (waited {waited} ms)"
    );
    SqlError::new(SqlState::CANNOT_CONNECT_NOW, message).with_hint(
        "Start a meta process, or wait until one leads. SET read_freshness = 'any' reads what is committed meanwhile.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_statement_waits_for_the_registration() {
        let incarnation = Incarnation::awaited();
        assert!(!incarnation.is_given());
        assert_eq!(incarnation.get(), 0);
        let waiting = incarnation.clone();
        let waiting = tokio::spawn(async move { waiting.given().await });
        tokio::time::advance(REGISTRATION_WAIT / 2).await;
        incarnation.give(7);
        assert_eq!(waiting.await.unwrap().unwrap(), 7);
        assert_eq!((incarnation.get(), incarnation.given().await.unwrap()), (7, 7));
    }

    #[tokio::test(start_paused = true)]
    async fn a_statement_waits_no_longer_than_for_a_lost_leader() {
        let began = tokio::time::Instant::now();
        let error = Incarnation::awaited().given().await.unwrap_err();
        assert_eq!(error.state, SqlState::CANNOT_CONNECT_NOW);
        assert_eq!(began.elapsed(), REGISTRATION_WAIT);
    }

    #[tokio::test]
    async fn who_registers_nowhere_waits_for_nothing() {
        assert_eq!(Incarnation::default().given().await.unwrap(), 0);
    }
}
