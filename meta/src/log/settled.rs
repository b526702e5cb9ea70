//! When what was learnt from the log alone may be acknowledged.
//!
//! A record is durable before the leader that has written it knows: the store's answer may be late, or lost. Who reads the
//! log finds the record then, and a fresh read at that leader may miss it, for as long as the leader has a proof that began
//! before. So a statement whose commit was found in the log is not acknowledged before a leader has the record, or no leader
//! can be left that lacks it: a proof counts for [`super::LEADER_LEASE`], and one that begins when the record is there
//! finds it.

use std::time::Duration;

use millrace_common::EnvHandle;
use millrace_common::fault_injection::is_planted;
use tokio::time::timeout_at;

use super::lead::LEASE_OUTWAITED;

/// Between two questions to the leader.
const PAUSE: Duration = Duration::from_millis(50);

/// Returns when no fresh read that begins then misses this record, which was found in the log: after a bounded time,
/// whoever leads. `ask`: the last record that the leader has when it has proven that it leads; `None`: it does not say.
pub async fn settled<F>(env: &EnvHandle, record: u64, ask: impl Fn() -> F)
where
    F: Future<Output = Option<u64>>,
{
    if is_planted("acknowledged-unsettled") {
        return;
    }
    let until = env.now() + LEASE_OUTWAITED;
    let asked = async {
        while ask().await.is_none_or(|known| known < record) {
            tokio::time::sleep(PAUSE).await;
        }
    };
    // Late: every proof that began before the record was there is over.
    let _ = timeout_at(until, asked).await;
}
