//! A topic of Kafka, exactly once.
//!
//! A publication is one transaction there: its messages, and after them a message in the *progress topic* with
//! the sink's id as key and the sequence as value. Whoever opens the sink first calls `init_transactions`, which
//! shuts out an earlier process and ends what it left open, then reads the sink's last committed progress; a
//! publication that is not beyond it is there already. Consumers see a publication whole, or not at all, if
//! they read committed messages only (`isolation.level = read_committed`, the clients' default).
//!
//! The client's calls block, so they run on threads for that, one publication at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::BytesMut;
use millrace_common::SqlError;
use millrace_rpc::catalog::Relation;
use parking_lot::Mutex;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, Message, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::format::{Encode, LineWriter};
use super::{Definition, Publication, Rows, SinkTarget, known_with, required};
use crate::error::ConnectorError;
use crate::kafka::properties;
use crate::options::invalid;

const OPTIONS: &[&str] = &["topic", "progress.topic", "delimiter"];
/// Settings of the client that are ours.
const RESERVED: &[&str] = &[
    "transactional.id",
    "enable.idempotence",
    "group.id",
    "isolation.level",
    "enable.auto.commit",
    "enable.partition.eof",
];
const PROGRESS_TOPIC: &str = "millrace-progress";
/// Progress of all sinks lies in one partition.
const PROGRESS_PARTITION: i32 = 0;
/// How long the brokers may take to answer.
const ANSWER: Duration = Duration::from_secs(15);
/// For what waits for several brokers, or for an earlier transaction to end.
const PATIENCE: Duration = Duration::from_secs(60);
/// For all messages of a publication to be taken.
const COMMIT: Duration = Duration::from_secs(180);
/// How long the brokers keep a transaction open whose process is gone.
const TRANSACTION_MS: &str = "300000";
/// After which a message that no broker takes fails its publication, which is tried again.
const MESSAGE_MS: &str = "30000";

pub struct KafkaTarget {
    inner: Arc<Inner>,
}

struct Inner {
    definition: Definition,
    lines: LineWriter,
    topic: String,
    progress: String,
    config: ClientConfig,
    /// Opened when first needed, and anew after a failure.
    session: Mutex<Option<Session>>,
}

struct Session {
    producer: BaseProducer,
    /// Sequence of the newest publication that the topic has.
    done: u64,
}

type Result<T, E = ConnectorError> = std::result::Result<T, E>;

impl KafkaTarget {
    /// Reads and checks the definition. Talks to nobody.
    pub fn new(relation: &Relation) -> Result<KafkaTarget, SqlError> {
        known_with(relation, OPTIONS, |name| name.starts_with("properties."))?;
        let topic = required(relation, "topic", "'orders'")?.to_owned();
        let progress = relation.option("progress.topic").unwrap_or(PROGRESS_TOPIC).to_owned();
        if progress == topic {
            return Err(invalid("option \"progress.topic\" must be another topic than the sink's"));
        }
        let definition = Definition::of(relation)?;
        let encode = match relation.option("encode").unwrap_or("JSON") {
            "JSON" => Encode::Json,
            "CSV" => Encode::Csv { delimiter: super::delimiter(relation)?, header: false },
            other => {
                return Err(SqlError::unsupported(format!("ENCODE {other} of a Kafka sink"))
                    .with_hint("Encodings of Kafka sinks: JSON, CSV."));
            }
        };
        let mut config = properties(relation, RESERVED)?;
        config
            .set("transactional.id", format!("millrace-sink-{}", definition.id))
            .set("transaction.timeout.ms", TRANSACTION_MS);
        if config.get("message.timeout.ms").is_none() {
            config.set("message.timeout.ms", MESSAGE_MS);
        }
        config
            .create_native_config()
            .map_err(|e| invalid(format!("the Kafka client refuses its settings: {e}")))?;
        let lines = LineWriter::new(definition.clone(), encode)?;
        let session = Mutex::new(None);
        let inner = Inner { definition, lines, topic, progress, config, session };
        Ok(KafkaTarget { inner: Arc::new(inner) })
    }
}

#[async_trait]
impl SinkTarget for KafkaTarget {
    async fn check(&self) -> Result<()> {
        let topics = |inner: &Arc<Inner>| {
            let inner = Arc::clone(inner);
            blocking(move || inner.check())
        };
        // Brokers that make topics by themselves need not be asked to.
        match topics(&self.inner).await {
            Ok(()) => Ok(()),
            Err(_) => {
                self.inner.make_progress_topic().await?;
                topics(&self.inner).await
            }
        }
    }

    async fn publish(&self, change: &Publication) -> Result<()> {
        let (inner, change) = (Arc::clone(&self.inner), change.clone());
        blocking(move || inner.publish(&change)).await
    }
}

impl Inner {
    fn failed(&self, what: &str, e: &KafkaError) -> ConnectorError {
        ConnectorError::target(&format!("{what} (topic {})", self.topic), e)
    }

    /// The settings of clients without transactions.
    fn plain_config(&self) -> ClientConfig {
        let mut config = self.config.clone();
        for ours in ["transactional.id", "transaction.timeout.ms"] {
            config.remove(ours);
        }
        config
    }

    /// A client for questions.
    fn asking(&self, isolation: &str) -> Result<BaseConsumer> {
        let mut config = self.plain_config();
        config
            .set("group.id", format!("millrace-sink-{}", self.definition.id))
            .set("isolation.level", isolation)
            .set("enable.auto.commit", "false")
            .set("enable.partition.eof", "true");
        config.create().map_err(|e| self.failed("opening a client", &e))
    }

    /// Makes the topic of progress, if the brokers let us; whether it is there is seen later.
    async fn make_progress_topic(&self) -> Result<()> {
        let admin: AdminClient<DefaultClientContext> =
            self.plain_config().create().map_err(|e| self.failed("opening a client", &e))?;
        let topic = NewTopic::new(&self.progress, 1, TopicReplication::Fixed(-1))
            .set("cleanup.policy", "compact")
            // It is read whole after a restart.
            .set("segment.bytes", "10485760");
        let options = AdminOptions::new().request_timeout(Some(ANSWER));
        match admin.create_topics([&topic], &options).await {
            Ok(made) => tracing::debug!(topic = self.progress, ?made, "the topic of progress"),
            Err(error) => tracing::debug!(topic = self.progress, %error, "not created"),
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        // Brokers that create topics do so for producers.
        let client: BaseProducer =
            self.plain_config().create().map_err(|e| self.failed("opening a client", &e))?;
        for topic in [&self.topic, &self.progress] {
            let place = format!("looking for topic {topic}");
            let found = client
                .client()
                .fetch_metadata(Some(topic), ANSWER)
                .map_err(|e| self.failed(&place, &e))?;
            let there = found.topics().iter().find(|t| t.name() == topic);
            let error = there.and_then(|t| t.error()).map(RDKafkaErrorCode::from);
            if there.is_none_or(|t| t.partitions().is_empty()) {
                let why = error.map_or("it does not exist".to_owned(), |e| e.to_string());
                return Err(ConnectorError::Target(format!("{place}: {why}")));
            }
        }
        Ok(())
    }

    fn publish(&self, change: &Publication) -> Result<()> {
        let mut slot = self.session.lock();
        let session = match slot.take() {
            Some(session) => session,
            None => self.open()?,
        };
        if change.sequence <= session.done {
            *slot = Some(session);
            return Ok(());
        }
        match self.transact(&session.producer, change) {
            Ok(()) => {
                *slot = Some(Session { done: change.sequence, ..session });
                Ok(())
            }
            Err(e) => {
                // Whether it was committed is found out by the next session.
                let aborted = session.producer.abort_transaction(ANSWER);
                tracing::debug!(topic = self.topic, ?aborted, "a publication failed");
                Err(e)
            }
        }
    }

    fn open(&self) -> Result<Session> {
        let producer: BaseProducer =
            self.config.create().map_err(|e| self.failed("opening a client", &e))?;
        producer
            .init_transactions(PATIENCE)
            .map_err(|e| self.failed("beginning with transactions", &e))?;
        Ok(Session { producer, done: self.read_progress()? })
    }

    fn transact(&self, producer: &BaseProducer, change: &Publication) -> Result<()> {
        producer.begin_transaction().map_err(|e| self.failed("beginning a transaction", &e))?;
        let sequence = change.sequence.to_string();
        let mut text = BytesMut::new();
        let mut index = 0u64;
        for chunk in &change.chunks {
            let rows = Rows::new(chunk)?;
            for one in rows.changes(self.lines.key())? {
                let message = self.lines.message(&rows, one, change.epoch, &mut text)?;
                let Some((key, value)) = message else { continue };
                let number = index.to_string();
                index += 1;
                let mut record: BaseRecord<'_, [u8], [u8]> =
                    BaseRecord::to(&self.topic).timestamp(change.epoch.millis() as i64).headers(
                        headers(&[("millrace-sequence", &sequence), ("millrace-index", &number)]),
                    );
                record.key = key.as_deref();
                record.payload = value.as_deref();
                self.send(producer, record)?;
            }
        }
        // The progress comes after all it speaks of.
        producer.flush(COMMIT).map_err(|e| self.failed("sending messages", &e))?;
        let progress = BaseRecord::to(&self.progress)
            .partition(PROGRESS_PARTITION)
            .key(self.definition.id.as_bytes())
            .payload(sequence.as_bytes());
        self.send(producer, progress)?;
        producer.commit_transaction(COMMIT).map_err(|e| self.failed("committing", &e))
    }

    /// Queues a message, and waits where the queue is full.
    fn send(&self, producer: &BaseProducer, mut record: BaseRecord<'_, [u8], [u8]>) -> Result<()> {
        let begun = Instant::now();
        loop {
            match producer.send(record) {
                Ok(()) => {
                    producer.poll(Duration::ZERO);
                    return Ok(());
                }
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), back))
                    if begun.elapsed() < COMMIT =>
                {
                    record = back;
                    producer.poll(Duration::from_millis(100));
                }
                Err((e, _)) => return Err(self.failed("sending a message", &e)),
            }
        }
    }

    /// The last sequence that the topic of progress has of this sink; 0: none.
    fn read_progress(&self) -> Result<u64> {
        let failed = |e: KafkaError| self.failed("reading the progress", &e);
        let (low, high) = self
            .asking("read_uncommitted")?
            .fetch_watermarks(&self.progress, PROGRESS_PARTITION, ANSWER)
            .map_err(failed)?;
        if low >= high {
            return Ok(0);
        }
        let consumer = self.asking("read_committed")?;
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(&self.progress, PROGRESS_PARTITION, Offset::Offset(low))
            .map_err(failed)?;
        consumer.assign(&list).map_err(failed)?;
        let begun = Instant::now();
        let (mut done, mut next) = (0, low);
        // What lies beyond an open transaction of another sink is not shown before that has ended.
        while next < high {
            match consumer.poll(Duration::from_millis(100)) {
                Some(Ok(message)) => {
                    next = message.offset() + 1;
                    if message.key() == Some(self.definition.id.as_bytes()) {
                        done = done.max(sequence(message.payload()).unwrap_or(0));
                    }
                }
                // Behind the last message may stand marks that end transactions: no message says so.
                Some(Err(KafkaError::PartitionEOF(_))) => {
                    let stable =
                        consumer.fetch_watermarks(&self.progress, PROGRESS_PARTITION, ANSWER);
                    if stable.map_err(failed)?.1 >= high {
                        return Ok(done);
                    }
                }
                Some(Err(e)) if crate::kafka::is_transient(&e) && begun.elapsed() < PATIENCE => {}
                Some(Err(e)) => return Err(failed(e)),
                None => {}
            }
            if begun.elapsed() > PATIENCE * 5 {
                return Err(ConnectorError::Target(format!(
                    "the progress in topic {} cannot be read to its end",
                    self.progress
                )));
            }
        }
        Ok(done)
    }
}

fn sequence(payload: Option<&[u8]>) -> Option<u64> {
    std::str::from_utf8(payload?).ok()?.parse().ok()
}

fn headers(all: &[(&str, &str)]) -> OwnedHeaders {
    all.iter().fold(OwnedHeaders::new_with_capacity(all.len()), |headers, &(key, value)| {
        headers.insert(Header { key, value: Some(value) })
    })
}

async fn blocking(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(_) => Err(ConnectorError::Target("talking to Kafka was cut off".to_owned())),
    }
}
