//! Kafka as a source: a split is a partition, an offset a message's offset.
//!
//! Offsets come from the log, never from a consumer group: a reader is assigned its partition at an
//! offset and reads up to another. What the broker has deleted meanwhile (retention) is an error that
//! names the partition; compaction and control records leave holes, which hold no rows.

mod message;
mod properties;
mod reader;
pub(crate) use properties::properties;
pub(crate) use reader::is_transient;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use arrow::datatypes::SchemaRef;
use async_trait::async_trait;
use millrace_common::SqlError;
use millrace_rpc::catalog::Relation;
use millrace_rpc::log::SourceSplit;
use parking_lot::Mutex;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::columns::{Columns, Include};
use crate::decode::{ENCODE_OPTIONS, Encoding};
use crate::{ConnectorError, Known, More, OnError, OpenResult, Polled, ReadFrom, Source, options};
use message::Envelope;

const OPTIONS: &[&str] = &[
    "connector",
    "topic",
    "scan.startup.mode",
    "scan.startup.timestamp.millis",
    "on_error",
    "discovery_interval",
    "rate_limit",
];
const INCLUDES: &[Include] =
    &[Include::Key, Include::Partition, Include::Offset, Include::Timestamp];
/// Settings of the client that are ours.
const RESERVED: &[&str] = &[
    "group.id",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "enable.partition.eof",
    "auto.offset.reset",
];
const INTERVAL: Duration = Duration::from_millis(500);
/// How long a broker may take to answer.
const ANSWER: Duration = Duration::from_secs(15);

/// Where partitions begin that are there when the source is first read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Startup {
    Earliest,
    Latest,
    /// The first message of this time or later, in milliseconds.
    Timestamp(i64),
}

pub struct KafkaSource {
    columns: Arc<Columns>,
    encoding: Encoding,
    envelope: Envelope,
    /// Columns that a message's key fills, for deletions.
    key: Arc<Vec<usize>>,
    topic: String,
    config: ClientConfig,
    startup: Startup,
    on_error: OnError,
    interval: Duration,
    /// For questions only; made when first needed.
    client: Mutex<Option<Arc<BaseConsumer>>>,
}

impl KafkaSource {
    /// Reads and checks the WITH clause and the declared columns. Talks to nobody.
    pub fn new(relation: &Relation) -> Result<KafkaSource, SqlError> {
        let known = [OPTIONS, ENCODE_OPTIONS].concat();
        let passed = |name: &str| name.starts_with("properties.");
        if let Some(o) =
            relation.options.iter().find(|o| !known.contains(&o.name.as_str()) && !passed(&o.name))
        {
            return Err(options::invalid(format!("unknown option \"{}\"", o.name)).with_hint(
                format!("Options of this connector: {}, properties.*.", known.join(", ")),
            ));
        }
        let topic = options::required(relation, "topic", "'orders'")?.to_owned();
        let (format, encode) = options::format(relation, ("PLAIN", "JSON"));
        let envelope = Envelope::parse(format)?;
        if envelope == Envelope::Debezium && encode != "JSON" {
            return Err(SqlError::unsupported(format!("FORMAT DEBEZIUM ENCODE {encode}"))
                .with_hint("Use FORMAT DEBEZIUM ENCODE JSON."));
        }
        let columns = Columns::new(relation, INCLUDES)?;
        if encode == "BYTES" && columns.values().count() != 1 {
            return Err(options::invalid("ENCODE BYTES needs exactly one column"));
        }
        let key = match relation.primary_key {
            true => relation.key.iter().map(|k| *k as usize).collect(),
            false => Vec::new(),
        };
        Ok(KafkaSource {
            columns: Arc::new(columns),
            encoding: Encoding::of(relation, encode)?,
            envelope,
            key: Arc::new(key),
            topic,
            config: client_config(relation)?,
            startup: startup(relation)?,
            on_error: OnError::of(relation)?,
            interval: options::duration(relation, "discovery_interval", INTERVAL)?,
            client: Mutex::new(None),
        })
    }

    fn client(&self) -> Result<Arc<BaseConsumer>, ConnectorError> {
        let mut client = self.client.lock();
        if let Some(client) = client.as_ref() {
            return Ok(Arc::clone(client));
        }
        let made: BaseConsumer =
            self.config.create().map_err(|e| ConnectorError::io(self.place(), e))?;
        Ok(Arc::clone(client.insert(Arc::new(made))))
    }

    fn place(&self) -> String {
        format!("topic {}", self.topic)
    }
}

fn client_config(relation: &Relation) -> Result<ClientConfig, SqlError> {
    let mut config = properties(relation, RESERVED)?;
    config
        .set("group.id", format!("millrace-{}", relation.id))
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false")
        .set("enable.partition.eof", "true")
        .set("auto.offset.reset", "error");
    // Whether the client knows the settings and their values is found out here, not in a job.
    config
        .create_native_config()
        .map_err(|e| options::invalid(format!("the Kafka client refuses its settings: {e}")))?;
    Ok(config)
}

fn startup(relation: &Relation) -> Result<Startup, SqlError> {
    let time = relation.option("scan.startup.timestamp.millis");
    let modes = ["earliest", "latest", "timestamp"];
    match (options::word(relation, "scan.startup.mode", &modes)?, time) {
        ("latest", None) => Ok(Startup::Latest),
        ("earliest", None) => Ok(Startup::Earliest),
        (_, Some(text))
            if relation.option("scan.startup.mode").is_none_or(|m| m == "timestamp") =>
        {
            text.trim().parse().map(Startup::Timestamp).map_err(|_| {
                options::invalid(format!(
                    "invalid value for option \"scan.startup.timestamp.millis\": \"{text}\""
                ))
            })
        }
        ("timestamp", None) => {
            Err(options::invalid("missing option \"scan.startup.timestamp.millis\""))
        }
        _ => Err(options::invalid(
            "option \"scan.startup.timestamp.millis\" goes with scan.startup.mode = 'timestamp'",
        )),
    }
}

/// What the broker says of the topic's partitions. Blocks.
struct Survey {
    client: Arc<BaseConsumer>,
    topic: String,
    startup: Startup,
    /// Partitions known already.
    known: Vec<u32>,
}

impl Survey {
    fn failed(&self, e: impl std::fmt::Display) -> ConnectorError {
        ConnectorError::io(format!("topic {}", self.topic), e)
    }

    fn run(&self) -> Result<(Vec<SourceSplit>, Vec<(u32, u64)>), ConnectorError> {
        let metadata =
            self.client.fetch_metadata(Some(&self.topic), ANSWER).map_err(|e| self.failed(e))?;
        let topic = metadata.topics().iter().find(|t| t.name() == self.topic);
        let topic = topic.ok_or_else(|| self.failed("the brokers do not know it"))?;
        if let Some(e) = topic.error() {
            return Err(self.failed(format!("{}", rdkafka::error::RDKafkaErrorCode::from(e))));
        }
        let mut partitions: Vec<u32> = topic.partitions().iter().map(|p| p.id() as u32).collect();
        partitions.sort_unstable();
        if partitions.is_empty() {
            return Err(self.failed("the topic does not exist, or has no partitions"));
        }
        let first = self.known.is_empty();
        let (mut splits, mut available) = (Vec::new(), Vec::new());
        for partition in partitions {
            let (low, high) = self
                .client
                .fetch_watermarks(&self.topic, partition as i32, ANSWER)
                .map_err(|e| self.failed(e))?;
            let (low, high) = (low.max(0) as u64, high.max(0) as u64);
            if !self.known.contains(&partition) {
                // A partition that is added later is read from its start.
                let start = match (first, self.startup) {
                    (false, _) | (true, Startup::Earliest) => low,
                    (true, Startup::Latest) => high,
                    (true, Startup::Timestamp(ms)) => self.at_time(partition, ms)?.unwrap_or(high),
                };
                splits.push(SourceSplit { split: partition, name: partition.to_string(), start });
            }
            available.push((partition, high));
        }
        Ok((splits, available))
    }

    /// The first offset of a time or later; `None`: there is none.
    fn at_time(&self, partition: u32, ms: i64) -> Result<Option<u64>, ConnectorError> {
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(&self.topic, partition as i32, Offset::Offset(ms))
            .map_err(|e| self.failed(e))?;
        let found = self.client.offsets_for_times(list, ANSWER).map_err(|e| self.failed(e))?;
        let offset = found.elements().first().map(|e| e.offset());
        Ok(match offset {
            Some(Offset::Offset(at)) => Some(at.max(0) as u64),
            _ => None,
        })
    }
}

#[async_trait]
impl Source for KafkaSource {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.columns.schema)
    }

    async fn poll(&self, known: &Known) -> Result<Polled, ConnectorError> {
        let survey = Survey {
            client: self.client()?,
            topic: self.topic.clone(),
            startup: self.startup,
            known: known.parts.splits.iter().map(|s| s.split).collect(),
        };
        let asked = tokio::task::spawn_blocking(move || survey.run());
        let (splits, available) =
            asked.await.map_err(|e| ConnectorError::io(self.place(), e))??;
        Ok(Polled { splits, available, more: More::After(self.interval), ..Polled::default() })
    }

    fn open(&self, at: ReadFrom, columns: &[usize]) -> OpenResult {
        let reader = reader::PartitionReader::new(
            &self.config,
            &self.topic,
            at,
            message::Messages::new(
                Arc::clone(&self.columns),
                self.encoding.clone(),
                self.envelope,
                Arc::clone(&self.key),
                columns,
            )?,
            self.on_error,
        )?;
        Ok(Box::new(reader))
    }
}
