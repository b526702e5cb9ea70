//! Feeds of a table without a connector, step by step.

use arrow::datatypes::SchemaRef;
use async_trait::async_trait;
use millrace_common::SqlState;
use millrace_connector::{BadRow, ConnectorError, Known, OpenResult, Polled, ReadResult};

use super::*;
use crate::options::ExecOptions;
use crate::worker::tests::{Cluster, Meta, delta, schema};

/// Two splits, the first of which cannot be opened.
struct Splits;

/// One row, and one that is bad.
#[derive(Default)]
struct Reader(Vec<BadRow>);

#[async_trait]
impl Source for Splits {
    fn schema(&self) -> SchemaRef {
        schema()
    }

    async fn poll(&self, _: &Known) -> Result<Polled, ConnectorError> {
        Ok(Polled::default())
    }

    fn open(&self, at: ReadFrom, _: &[usize]) -> OpenResult {
        match at.split {
            0 => Err(ConnectorError::NoSuchSplit(0)),
            _ => Ok(Box::new(Reader::default())),
        }
    }
}

#[async_trait]
impl SplitReader for Reader {
    async fn read(&mut self, until: u64, _: usize) -> ReadResult {
        let error = SqlError::new(SqlState::INVALID_TEXT_REPRESENTATION, "a bad row");
        self.0.push(BadRow { place: "split 1".to_owned(), error });
        Ok(Some((delta(&[(1, 7, 1)]).batch, until)))
    }

    fn take_bad_rows(&mut self) -> Vec<BadRow> {
        std::mem::take(&mut self.0)
    }
}

/// What was bad in them would be counted once more, if other rows entered first and then the process died.
#[tokio::test]
async fn rows_that_could_not_enter_are_the_next_to_do_so() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.meta.offsets.lock().push((1, vec![(0, 10), (1, 10)]));
    let meta: Arc<dyn MetaService> = Arc::new(Meta(Arc::clone(&c.meta)));
    let relation = meta.relation(t).unwrap();
    let sequencer = c.worker.shared.table(t).await.unwrap();
    let (errors, state) = (Arc::default(), FeedState::default());
    let made = Feed::new(&relation, &c.version(t), sequencer, meta, errors, state, None);
    let mut feed = made.unwrap();
    feed.source = Some(Arc::new(Splits));
    let at = feed.split(1);
    assert!(feed.complete(at, 10).await.is_ok());
    assert_eq!(feed.errors.total(), 1);
    // They come behind another split's rows, as meta lists them.
    assert!(matches!(feed.round().await, Err(FeedError::Failed(_))), "of the other split");
    let concluded = feed.in_flight.pop_front().expect("they have entered");
    let _ = concluded.await;
    assert_eq!(c.rows(t).await, [(1, 7, 1)]);
    let counters = c.version(t).counters;
    assert_eq!(counters.get("errors.total"), Some(&1));
    assert_eq!(counters.get(&feed_counter(1)), Some(&10));
}
