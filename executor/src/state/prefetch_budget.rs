//! How much may be read ahead of rows in a second (docs/design.md §8): requests to the store and bytes of answers.
//!
//! What is read is charged afterwards, when it is known: whoever has used more than was earned reads nothing ahead until
//! as much has been earned. At most what a second earns is saved.

use millrace_common::EnvHandle;
use tokio::time::Instant;

/// See the module. Of one operator in one task; the requests are those of all its tasks.
pub struct PrefetchBudget {
    requests: Account,
    bytes: Account,
    /// When it last earned. Earned nothing: everything is there.
    at: Option<Instant>,
    /// Requests that are charged; `None`: those that were made before are not known yet.
    charged: Option<u64>,
}

struct Account {
    /// Earned in a second.
    rate: f64,
    left: f64,
}

impl Account {
    fn new(rate: u64) -> Account {
        Account { rate: rate as f64, left: rate as f64 }
    }

    fn earn(&mut self, seconds: f64) {
        self.left = (self.left + self.rate * seconds).min(self.rate);
    }
}

impl PrefetchBudget {
    /// What may be used in a second.
    pub fn new(requests: u64, bytes: u64) -> PrefetchBudget {
        let (requests, bytes) = (Account::new(requests), Account::new(bytes));
        PrefetchBudget { requests, bytes, at: None, charged: None }
    }

    /// Whether something may be read ahead now. `requests`: all that have been made so far; those before the first
    /// call are not charged.
    pub fn has_some(&mut self, clock: &EnvHandle, requests: u64) -> bool {
        let now = clock.now();
        let earning = self.at.replace(now).map_or(0.0, |at| (now - at).as_secs_f64());
        let charged = self.charged.replace(requests).unwrap_or(requests);
        self.requests.left -= requests.saturating_sub(charged) as f64;
        self.requests.earn(earning);
        self.bytes.earn(earning);
        self.requests.left > 0.0 && self.bytes.left > 0.0
    }

    /// An answer of so many bytes has come.
    pub fn charge_bytes(&mut self, bytes: usize) {
        self.bytes.left -= bytes as f64;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_was_used_beyond_the_budget_is_earned_before_more_is_read() {
        let clock = EnvHandle::default();
        let later = |ms| tokio::time::advance(Duration::from_millis(ms));
        let mut budget = PrefetchBudget::new(100, 1_000);
        assert!(budget.has_some(&clock, 0));
        assert!(budget.has_some(&clock, 99));
        assert!(!budget.has_some(&clock, 250), "150 too many");
        later(1_400).await;
        assert!(!budget.has_some(&clock, 250));
        later(200).await;
        assert!(budget.has_some(&clock, 250));
        // Bytes count as well, and a long pause earns no more than a second does.
        later(60_000).await;
        assert!(budget.has_some(&clock, 250));
        budget.charge_bytes(1_500);
        assert!(!budget.has_some(&clock, 250));
        later(600).await;
        assert!(budget.has_some(&clock, 250));
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_begins_late_is_not_charged_with_what_others_have_read() {
        let clock = EnvHandle::default();
        let mut budget = PrefetchBudget::new(100, 1_000);
        assert!(budget.has_some(&clock, 1_000_000));
        assert!(budget.has_some(&clock, 1_000_099));
        assert!(!budget.has_some(&clock, 1_000_100), "from then on with all");
    }
}
