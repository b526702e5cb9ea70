//! Reads a partition from one offset to another.

use std::time::{Duration, Instant};

use arrow::array::Int64Array;
use async_trait::async_trait;
use millrace_common::{SqlError, SqlState};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Message, OwnedMessage};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::message::Messages;
use crate::batch::Facts;
use crate::{BadRow, ConnectorError, OnError, ReadFrom, ReadResult, SplitReader};

/// How long one wait for a message may block its thread.
const WAIT: Duration = Duration::from_millis(100);
/// A partition that brings nothing for so long may have nothing but a hole.
const HOLE: Duration = Duration::from_secs(1);
/// A broker that is silent for so long, while there must be messages, is unreachable.
const SILENCE: Duration = Duration::from_secs(30);
/// Bytes of messages in one batch.
const MAX_BATCH_BYTES: usize = 4 << 20;
/// Row ids are a partition and an offset.
const OFFSET_BITS: u32 = 48;

pub struct PartitionReader {
    topic: String,
    partition: u32,
    name: String,
    /// Moves to a blocking thread and back with every wait.
    consumer: Option<BaseConsumer>,
    /// The first message not handed out has this offset or a later one.
    offset: u64,
    /// A message that lies beyond the last `until`.
    peeked: Option<OwnedMessage>,
    messages: Messages,
    weights: Option<Int64Array>,
    on_error: OnError,
    bad: Vec<BadRow>,
}

/// What a wait brought.
struct Received {
    messages: Vec<OwnedMessage>,
    /// The partition has nothing beyond what has been received.
    ended: bool,
    error: Option<KafkaError>,
}

impl PartitionReader {
    pub fn new(
        config: &ClientConfig,
        topic: &str,
        at: ReadFrom,
        messages: Messages,
        on_error: OnError,
    ) -> Result<PartitionReader, ConnectorError> {
        let failed = |e: KafkaError| ConnectorError::io(format!("topic {topic}"), e);
        let consumer: BaseConsumer = config.create().map_err(failed)?;
        let mut reader = PartitionReader {
            topic: topic.to_owned(),
            partition: at.split,
            name: at.split.to_string(),
            consumer: Some(consumer),
            offset: at.offset,
            peeked: None,
            messages,
            weights: None,
            on_error,
            bad: Vec::new(),
        };
        reader.assign()?;
        Ok(reader)
    }

    /// Begins to fetch at the reader's offset; what was fetched before is forgotten.
    fn assign(&mut self) -> Result<(), ConnectorError> {
        let failed = |e: KafkaError| ConnectorError::io(format!("topic {}", self.topic), e);
        let Some(consumer) = &self.consumer else { return Ok(()) };
        let mut list = TopicPartitionList::new();
        let start = Offset::Offset(self.offset as i64);
        list.add_partition_offset(&self.topic, self.partition as i32, start).map_err(failed)?;
        consumer.assign(&list).map_err(failed)
    }

    fn place(&self) -> String {
        format!("topic {}, partition {}", self.topic, self.partition)
    }

    async fn receive(&mut self, until: u64, most: usize) -> Result<Received, ConnectorError> {
        let place = self.place();
        let Some(consumer) = self.consumer.take() else {
            return Err(ConnectorError::io(place, "its client is gone"));
        };
        let wait = tokio::task::spawn_blocking(move || {
            let received = receive(&consumer, until, most);
            (received, consumer)
        });
        let (received, consumer) = wait.await.map_err(|e| ConnectorError::io(place, e))?;
        self.consumer = Some(consumer);
        Ok(received)
    }

    /// Takes a message in; `false`: it lies beyond `until`.
    fn take(&mut self, message: OwnedMessage, until: u64) -> Result<bool, ConnectorError> {
        let offset = message.offset().max(0) as u64;
        if offset >= until {
            self.peeked = Some(message);
            self.offset = until;
            return Ok(false);
        }
        if offset < self.offset {
            return Ok(true);
        }
        self.offset = offset + 1;
        let facts = Facts {
            key: message.key(),
            partition: &self.name,
            offset,
            timestamp: message.timestamp().to_millis().map(|ms| ms * 1_000),
            file: "",
            row_id: (i64::from(self.partition) << OFFSET_BITS) | offset as i64,
        };
        if let Err(mut error) = self.messages.push(message.payload(), &facts) {
            error.message = format!("offset {offset}: {}", error.message);
            let place = self.place();
            if self.on_error == OnError::Fail {
                return Err(ConnectorError::BadRow { place, error: Box::new(error) });
            }
            self.bad.push(BadRow { place, error });
        }
        Ok(true)
    }

    fn refused(&self, error: KafkaError) -> ConnectorError {
        let gone = matches!(
            error.rdkafka_error_code(),
            Some(RDKafkaErrorCode::OffsetOutOfRange | RDKafkaErrorCode::AutoOffsetReset)
        );
        if !gone {
            return ConnectorError::io(self.place(), error);
        }
        let message = format!(
            "{} no longer holds offset {}, from which its rows are still needed",
            self.place(),
            self.offset
        );
        ConnectorError::Other(Box::new(SqlError::new(SqlState::DATA_CORRUPTED, message).with_hint(
            "Keep messages longer, or feed a table (CREATE TABLE … WITH), which keeps its rows.",
        )))
    }
}

/// Waits for messages below `until`, and takes what is there. Blocks.
fn receive(consumer: &BaseConsumer, until: u64, most: usize) -> Received {
    let mut received = Received { messages: Vec::new(), ended: false, error: None };
    let mut bytes = 0;
    loop {
        let wait = if received.messages.is_empty() { WAIT } else { Duration::ZERO };
        match consumer.poll(wait) {
            None => return received,
            Some(Ok(message)) => {
                bytes += message.payload_len();
                let beyond = message.offset() as u64 >= until;
                received.messages.push(message.detach());
                if beyond || received.messages.len() >= most || bytes >= MAX_BATCH_BYTES {
                    return received;
                }
            }
            Some(Err(KafkaError::PartitionEOF(_))) => {
                received.ended = true;
                return received;
            }
            Some(Err(error)) => {
                received.error = Some(error);
                return received;
            }
        }
    }
}

#[async_trait]
impl SplitReader for PartitionReader {
    async fn read(&mut self, until: u64, max_rows: usize) -> ReadResult {
        if self.offset >= until {
            return Ok(None);
        }
        let silent = Instant::now();
        let (mut waiting, mut anew) = (silent, false);
        if let Some(message) = self.peeked.take() {
            self.take(message, until)?;
        }
        while self.messages.rows() == 0 && self.offset < until && self.bad.is_empty() {
            let before = self.offset;
            let received = self.receive(until, max_rows).await?;
            for message in received.messages {
                if !self.take(message, until)? {
                    break;
                }
            }
            if self.offset > before {
                waiting = Instant::now();
            } else if received.ended && anew {
                // What is missing up to the end will never be: it was compacted away, or held no rows.
                self.offset = until;
            } else if waiting.elapsed() > HOLE && !anew {
                // An end that is reported may be that of a while ago; asked anew it is not.
                self.assign()?;
                anew = true;
            }
            match received.error {
                // The client reconnects by itself; only a long silence is worth an error.
                Some(e) if !is_transient(&e) => return Err(self.refused(e)),
                Some(e) if silent.elapsed() > SILENCE => return Err(self.refused(e)),
                None if self.offset == before && silent.elapsed() > SILENCE => {
                    return Err(ConnectorError::io(self.place(), "the brokers do not answer"));
                }
                _ => {}
            }
        }
        let (batch, weights) = self.messages.finish()?;
        self.weights = weights;
        Ok(Some((batch, self.offset)))
    }

    fn weights(&mut self) -> Option<Int64Array> {
        self.weights.take()
    }

    fn set_on_error(&mut self, on_error: OnError) {
        self.on_error = on_error;
    }

    fn take_bad_rows(&mut self) -> Vec<BadRow> {
        std::mem::take(&mut self.bad)
    }
}

/// The client goes on by itself.
pub(crate) fn is_transient(e: &KafkaError) -> bool {
    matches!(
        e.rdkafka_error_code(),
        Some(
            RDKafkaErrorCode::AllBrokersDown
                | RDKafkaErrorCode::BrokerTransportFailure
                | RDKafkaErrorCode::OperationTimedOut
                | RDKafkaErrorCode::Resolve
        )
    )
}
