//! Results that a compactor process has handed over. The answer may have been lost, or have come after the task's lease:
//! then the log never names what was written, and the process gives it up.

use std::collections::VecDeque;
use std::time::Duration;

use millrace_common::{EnvHandle, SqlError};
use millrace_storage::given_up::GivenUp;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

/// By then the log names a result, if it ever will. One that it names later is void if it is deleted by then.
const PATIENCE: Duration = Duration::from_secs(60);

/// Objects of results, oldest first. Bounded by what a process makes in `PATIENCE`, while the log can be read.
#[derive(Debug, Default)]
pub struct HandedOver {
    results: Mutex<VecDeque<(Instant, Vec<String>)>>,
    told: Notify,
}

impl HandedOver {
    /// A result was handed over that names these objects, which this process has written.
    pub fn add(&self, objects: Vec<String>, now: Instant) {
        if !objects.is_empty() {
            self.results.lock().push_back((now, objects));
            self.told.notify_one();
        }
    }

    /// For as long as the process lives: gives up what the log does not know. `unknown` reads the log and says which of
    /// these it does not name, nor has named; it is asked a while after a result, and not while there is none.
    pub async fn give_up_lost<F>(
        &self,
        env: &EnvHandle,
        given_up: &GivenUp,
        unknown: impl Fn(Vec<String>) -> F,
    ) where
        F: Future<Output = Result<Vec<String>, SqlError>>,
    {
        loop {
            let told = self.told.notified();
            let oldest = self.results.lock().front().map(|(since, _)| *since);
            let Some(oldest) = oldest else {
                told.await;
                continue;
            };
            tokio::time::sleep_until(oldest + PATIENCE).await;
            let due = self.take_due(env.now());
            match unknown(due.clone()).await {
                Ok(names) if names.is_empty() => {}
                Ok(names) => {
                    tracing::info!(objects = names.len(), "results were not taken: given up");
                    given_up.add(names);
                }
                Err(error) => {
                    tracing::debug!(%error, "the log does not tell what became of results");
                    self.add(due, env.now());
                }
            }
        }
    }

    fn take_due(&self, now: Instant) -> Vec<String> {
        let mut results = self.results.lock();
        let is_due = |(since, _): &(Instant, _)| now.saturating_duration_since(*since) >= PATIENCE;
        let due = results.iter().take_while(|result| is_due(result)).count();
        results.drain(..due).flat_map(|(_, objects)| objects).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_the_log_does_not_name_after_a_while_is_given_up() {
        let (results, given_up) = (Arc::<HandedOver>::default(), Arc::<GivenUp>::default());
        let asked = Arc::<Mutex<usize>>::default();
        let watching = tokio::spawn({
            let (results, given_up) = (Arc::clone(&results), Arc::clone(&given_up));
            let asked = Arc::clone(&asked);
            async move {
                let unknown = |mut names: Vec<String>| {
                    let mut asked = asked.lock();
                    *asked += 1;
                    let fails = *asked == 1;
                    names.retain(|name| name != "named");
                    async move { if fails { Err(SqlError::internal("planted")) } else { Ok(names) } }
                };
                results.give_up_lost(&EnvHandle::default(), &given_up, unknown).await;
            }
        });
        results.add(vec!["named".into(), "lost".into()], Instant::now());
        tokio::time::sleep(PATIENCE - Duration::from_secs(1)).await;
        assert!((given_up.is_empty(), *asked.lock()) == (true, 0), "the leader may still log it");
        tokio::time::sleep(PATIENCE + Duration::from_secs(2)).await;
        assert_eq!((given_up.take(9), *asked.lock()), (vec!["lost".to_owned()], 2));
        tokio::time::sleep(PATIENCE * 10).await;
        assert_eq!(*asked.lock(), 2, "nothing is read while there is nothing");
        watching.abort();
    }
}
