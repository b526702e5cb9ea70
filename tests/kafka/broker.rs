//! The client library's mock brokers: they keep what is produced, and open transactions hide nothing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{Headers, Message};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{BaseProducer, BaseRecord, DefaultProducerContext, Producer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

const ANSWER: Duration = Duration::from_secs(120);

pub struct Broker {
    cluster: MockCluster<'static, DefaultProducerContext>,
    producer: BaseProducer,
}

/// What a topic holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Received {
    pub partition: i32,
    pub key: Option<String>,
    pub value: Option<String>,
    /// Of a sink's message: its publication, and its place in that.
    pub place: Option<(u64, u64)>,
}

impl Broker {
    pub fn new(topics: &[(&str, i32)]) -> Broker {
        let cluster = MockCluster::new(1).expect("mock brokers");
        for (topic, partitions) in topics {
            cluster.create_topic(topic, *partitions, 1).expect("a topic");
        }
        let producer = producer(&cluster);
        Broker { cluster, producer }
    }

    /// All brokers are gone, until [`Broker::up`].
    pub fn down(&self) {
        self.cluster.broker_down(1).expect("the broker goes down");
    }

    /// They are back; messages go out by a new client.
    pub fn up(&mut self) {
        self.cluster.broker_up(1).expect("the broker comes up");
        self.producer = producer(&self.cluster);
    }

    pub fn servers(&self) -> String {
        self.cluster.bootstrap_servers()
    }

    /// Queues a message; [`Broker::flush`] has them arrive.
    pub fn send(&self, topic: &str, partition: i32, key: Option<&str>, value: Option<&str>) {
        let mut record: BaseRecord<'_, str, str> =
            BaseRecord::to(topic).partition(partition).timestamp(1_700_000_000_123);
        record.key = key;
        record.payload = value;
        self.producer.send(record).map_err(|(e, _)| e).expect("the message is queued");
    }

    pub fn flush(&self) {
        self.producer.flush(ANSWER).expect("the messages arrive");
    }

    /// All that the topic holds now, by partition in order.
    pub fn content(&self, topic: &str, partitions: i32) -> Vec<Received> {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", self.servers())
            .set("group.id", "reader")
            .set("enable.partition.eof", "true")
            .create()
            .expect("a consumer");
        let mut list = TopicPartitionList::new();
        for partition in 0..partitions {
            list.add_partition_offset(topic, partition, Offset::Beginning).expect("a partition");
        }
        consumer.assign(&list).expect("an assignment");
        let mut ended = BTreeMap::new();
        let mut all = Vec::new();
        let deadline = Instant::now() + ANSWER;
        while ended.len() < partitions as usize {
            assert!(Instant::now() < deadline, "topic {topic} has no end");
            match consumer.poll(Duration::from_millis(100)) {
                Some(Ok(message)) => all.push(received(&message)),
                Some(Err(KafkaError::PartitionEOF(partition))) => {
                    ended.insert(partition, ());
                }
                Some(Err(e)) => panic!("reading topic {topic}: {e}"),
                None => {}
            }
        }
        all.sort_by_key(|m: &Received| m.partition);
        all
    }
}

fn producer(cluster: &MockCluster<'static, DefaultProducerContext>) -> BaseProducer {
    let servers = cluster.bootstrap_servers();
    ClientConfig::new().set("bootstrap.servers", servers).create().expect("a producer")
}

fn received(message: &impl Message) -> Received {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let header = |name: &str| -> Option<u64> {
        let headers = message.headers()?;
        let found = headers.iter().find(|h| h.key == name)?;
        text(found.value?).parse().ok()
    };
    Received {
        partition: message.partition(),
        key: message.key().map(text),
        value: message.payload().map(text),
        place: header("millrace-sequence").zip(header("millrace-index")),
    }
}
