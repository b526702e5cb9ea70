//! Notices that a client is to have while its statement still runs.

use millrace_common::SqlError;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Notices kept for a client that does not take them: the oldest ones are the ones that count least.
const KEPT: usize = 16;

/// Of one session: its statement tells, its connection passes on.
#[derive(Default)]
pub struct LiveNotices {
    waiting: Mutex<Vec<SqlError>>,
    told: Notify,
}

impl LiveNotices {
    pub fn tell(&self, notice: SqlError) {
        let mut waiting = self.waiting.lock();
        if waiting.len() == KEPT {
            waiting.remove(0);
        }
        waiting.push(notice);
        self.told.notify_one();
    }

    /// Completes when there are some. Cancel-safe.
    pub async fn next(&self) -> Vec<SqlError> {
        loop {
            let waiting = self.take();
            if !waiting.is_empty() {
                return waiting;
            }
            self.told.notified().await;
        }
    }

    /// All that nobody has taken.
    pub fn take(&self) -> Vec<SqlError> {
        std::mem::take(&mut *self.waiting.lock())
    }
}
