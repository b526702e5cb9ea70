//! Sources that this worker is asked about: how much there is of them (docs/design.md §4, "Roots").
//!
//! A source is opened with its catalog entry and kept from poll to poll, because connectors keep connections and what
//! they have seen of files. It is closed when the log has another entry of it, or when nobody has asked for a while:
//! another process is asked then, or none.
//!
//! A poll is a task of its own. Its caller may give up, with the leader or the connection to it; the next one waits until
//! the outside has answered, so polls of a source never pile up.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::task::spawn;
use millrace_common::{EnvHandle, RelationId, SqlError, SqlState};
use millrace_connector::{ConnectorError, Source, create_source};
use millrace_rpc::catalog::Relation;
use millrace_rpc::request::carried;
use millrace_rpc::source_poll::{Known, PollSource, Polled};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::Shared;

/// A source about which nobody has asked for so long is closed.
const KEPT: Duration = Duration::from_secs(300);
/// A poll that takes longer has failed: a store or broker that does not answer. The leader waits as long.
const LIMIT: Duration = Duration::from_secs(120);

type Open = dyn Fn(&Relation) -> Result<Arc<dyn Source>, SqlError> + Send + Sync;

/// See the module.
pub struct PolledSources {
    open: Box<Open>,
    opened: Mutex<BTreeMap<RelationId, Arc<Opened>>>,
}

impl Default for PolledSources {
    fn default() -> PolledSources {
        PolledSources { open: Box::new(create_source), opened: Mutex::default() }
    }
}

/// A source as one catalog entry describes it.
struct Opened {
    relation: Arc<Relation>,
    source: Arc<dyn Source>,
    /// Held by the poll under way.
    turn: Arc<tokio::sync::Mutex<()>>,
    asked: Mutex<Instant>,
    closed: CancellationToken,
}

impl PolledSources {
    /// Asks the outside. `known`: what the log says, looked up when it is this poll's turn.
    async fn poll(
        &self,
        relation: Arc<Relation>,
        known: impl FnOnce() -> Known,
        env: &EnvHandle,
    ) -> Result<Polled, SqlError> {
        let id = RelationId(relation.id);
        let opened = self.opened(id, relation, env.now())?;
        let turn = Arc::clone(&opened.turn).lock_owned().await;
        let (source, known) = (Arc::clone(&opened.source), known());
        let ask = async move {
            let _turn = turn;
            timeout(LIMIT, source.poll(&known)).await
        };
        let ask = opened.closed.clone().run_until_cancelled_owned(ask);
        let answer = match spawn("poll a source", carried(ask)).await {
            Ok(Some(Ok(answer))) => answer,
            Ok(Some(Err(_))) => {
                Err(ConnectorError::io(format!("source {id}"), "it does not answer"))
            }
            Ok(None) => {
                let message = format!("source {id} is opened anew");
                return Err(SqlError::new(SqlState::CANNOT_CONNECT_NOW, message));
            }
            Err(e) => return Err(SqlError::internal(format!("a poll of source {id} failed: {e}"))),
        };
        let polled = answer.map_err(SqlError::from)?;
        Ok(Polled { offsets_per_row: opened.source.offsets_per_row(), ..polled })
    }

    /// The source, opened if it is not or is another one now.
    fn opened(
        &self,
        id: RelationId,
        relation: Arc<Relation>,
        now: Instant,
    ) -> Result<Arc<Opened>, SqlError> {
        let mut all = self.opened.lock();
        if let Some(known) = all.get(&id).filter(|known| known.relation == relation) {
            *known.asked.lock() = now;
            return Ok(Arc::clone(known));
        }
        if let Some(before) = all.remove(&id) {
            before.closed.cancel();
        }
        // Opening talks to nobody.
        let source = (self.open)(&relation)?;
        let opened = Arc::new(Opened {
            relation,
            source,
            turn: Arc::default(),
            asked: Mutex::new(now),
            closed: CancellationToken::new(),
        });
        all.insert(id, Arc::clone(&opened));
        Ok(opened)
    }

    /// Closes the sources about which nobody asks any more.
    pub fn close_unasked(&self, now: Instant) {
        self.opened.lock().retain(|_, opened| {
            let is_kept = now.saturating_duration_since(*opened.asked.lock()) < KEPT;
            if !is_kept {
                opened.closed.cancel();
            }
            is_kept
        });
    }
}

impl Shared {
    /// See [`ComputeService::poll_source`](millrace_rpc::services::ComputeService::poll_source).
    pub(super) async fn poll_source(&self, poll: PollSource) -> Result<Polled, SqlError> {
        let meta = self.meta()?;
        let id = poll.source;
        let relation = meta.relation(id).ok_or_else(|| {
            SqlError::new(SqlState::UNDEFINED_TABLE, format!("there is no source {id}"))
        })?;
        let PollSource { offsets, started_ms, now_ms, .. } = poll;
        let known = || Known { parts: meta.source_parts(id), offsets, started_ms, now_ms };
        self.sources.poll(relation, known, self.store.env()).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use arrow::datatypes::{Schema, SchemaRef};
    use async_trait::async_trait;
    use futures::FutureExt;
    use millrace_connector::{OpenResult, ReadFrom};
    use tokio::sync::Semaphore;

    use super::*;

    /// What answers as often as the test lets it.
    struct Outside {
        opened: AtomicUsize,
        begun: AtomicUsize,
        polling: AtomicUsize,
        answers: Semaphore,
    }

    fn count(of: &AtomicUsize) -> usize {
        of.load(Ordering::SeqCst)
    }

    /// Its offset is the time at which it was asked, and the length of its name.
    struct Gated {
        name: String,
        outside: Arc<Outside>,
    }

    struct Polling<'a>(&'a AtomicUsize);

    impl Drop for Polling<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[async_trait]
    impl Source for Gated {
        fn schema(&self) -> SchemaRef {
            Arc::new(Schema::empty())
        }

        async fn poll(&self, known: &Known) -> Result<Polled, ConnectorError> {
            let outside = &self.outside;
            outside.begun.fetch_add(1, Ordering::SeqCst);
            assert_eq!(outside.polling.fetch_add(1, Ordering::SeqCst), 0, "one poll at a time");
            let _polling = Polling(&outside.polling);
            let answer = outside.answers.acquire().await;
            answer.map_err(|e| ConnectorError::io("test", e))?.forget();
            let offset = known.now_ms + self.name.len() as u64;
            Ok(Polled { available: vec![(0, offset)], ..Polled::default() })
        }

        fn offsets_per_row(&self) -> u64 {
            7
        }

        fn open(&self, at: ReadFrom, _: &[usize]) -> OpenResult {
            Err(ConnectorError::NoSuchSplit(at.split))
        }
    }

    fn gated() -> (Arc<PolledSources>, Arc<Outside>) {
        let outside = Arc::new(Outside {
            opened: AtomicUsize::new(0),
            begun: AtomicUsize::new(0),
            polling: AtomicUsize::new(0),
            answers: Semaphore::new(0),
        });
        let of_sources = Arc::clone(&outside);
        let open = move |relation: &Relation| {
            of_sources.opened.fetch_add(1, Ordering::SeqCst);
            let (name, outside) = (relation.name.clone(), Arc::clone(&of_sources));
            Ok(Arc::new(Gated { name, outside }) as Arc<dyn Source>)
        };
        let sources = PolledSources { open: Box::new(open), opened: Mutex::default() };
        (Arc::new(sources), outside)
    }

    async fn poll(
        sources: Arc<PolledSources>,
        name: &str,
        now_ms: u64,
    ) -> Result<Polled, SqlError> {
        let relation = Relation { id: 1, name: name.to_owned(), ..Relation::default() };
        let known = || Known { now_ms, ..Known::default() };
        sources.poll(Arc::new(relation), known, &EnvHandle::default()).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_is_opened_once_and_polled_by_one_at_a_time() {
        let (sources, outside) = gated();
        outside.answers.add_permits(1);
        let polled = poll(Arc::clone(&sources), "s", 10).await.unwrap();
        assert_eq!((polled.available, polled.offsets_per_row), (vec![(0, 11)], 7));

        // A caller gives up: its poll goes on, and the next one waits for its end.
        let mut given_up = Box::pin(poll(Arc::clone(&sources), "s", 20));
        while count(&outside.begun) < 2 {
            assert!(given_up.as_mut().now_or_never().is_none());
            tokio::task::yield_now().await;
        }
        drop(given_up);
        let mut next = Box::pin(poll(Arc::clone(&sources), "s", 30));
        for _ in 0..100 {
            assert!(next.as_mut().now_or_never().is_none());
            tokio::task::yield_now().await;
        }
        assert_eq!((count(&outside.begun), count(&outside.polling)), (2, 1));
        outside.answers.add_permits(2);
        assert_eq!(next.await.unwrap().available, [(0, 31)]);
        assert_eq!((count(&outside.begun), count(&outside.opened)), (3, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_that_is_altered_is_opened_anew_and_does_not_wait_for_the_one_before() {
        let (sources, outside) = gated();
        let before = tokio::spawn(poll(Arc::clone(&sources), "s", 10));
        while count(&outside.begun) < 1 {
            tokio::task::yield_now().await;
        }
        let mut altered = Box::pin(poll(Arc::clone(&sources), "altered", 20));
        assert!(altered.as_mut().now_or_never().is_none());
        let ended = before.await.unwrap().unwrap_err();
        assert_eq!(ended.state, SqlState::CANNOT_CONNECT_NOW);
        outside.answers.add_permits(1);
        assert_eq!(altered.await.unwrap().available, [(0, 27)]);
        assert_eq!(count(&outside.opened), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_source_that_does_not_answer_fails_and_one_that_nobody_asks_about_is_closed() {
        let (sources, outside) = gated();
        let late = poll(Arc::clone(&sources), "s", 10).await.unwrap_err();
        assert_eq!(late.state, SqlState::IO_ERROR);
        assert_eq!(count(&outside.polling), 0);
        let env = EnvHandle::default();
        sources.close_unasked(env.now());
        assert_eq!(sources.opened.lock().len(), 1);
        tokio::time::advance(KEPT).await;
        sources.close_unasked(env.now());
        assert!(sources.opened.lock().is_empty());
    }
}
