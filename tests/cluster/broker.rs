//! A broker of Kafka, as far as sinks use one. Of two producers with one transactional id it refuses the earlier one, and
//! what a transaction has sent is in its topics when it is committed: the mock brokers of the client library do neither.
//! What goes on within a transaction can be held back.
//!
//! It speaks one version of each request. Every topic that is named is there, and has one partition.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::sessions::LIMIT;

const PRODUCE: i16 = 0;
const FETCH: i16 = 1;
const LIST_OFFSETS: i16 = 2;
const METADATA: i16 = 3;
const FIND_COORDINATOR: i16 = 10;
const API_VERSIONS: i16 = 18;
const INIT_PRODUCER_ID: i16 = 22;
const ADD_PARTITIONS_TO_TXN: i16 = 24;
const END_TXN: i16 = 26;
/// Of each kind of request the version that is spoken.
const VERSIONS: [(i16, i16); 9] = [
    (PRODUCE, 3),
    (FETCH, 4),
    (LIST_OFFSETS, 1),
    (METADATA, 4),
    (FIND_COORDINATOR, 1),
    (API_VERSIONS, 3),
    (INIT_PRODUCER_ID, 0),
    (ADD_PARTITIONS_TO_TXN, 0),
    (END_TXN, 0),
];
/// How a producer is told that there is a later one with its id.
const INVALID_PRODUCER_EPOCH: i16 = 47;
/// Asked for instead of the time of a message: the first offset.
const EARLIEST: i64 = -2;
/// The number of the only broker.
const NODE: i32 = 1;
/// Before messages are answered: who has them all asks at once for more.
const PAUSE: Duration = Duration::from_millis(10);

/// Where a batch of messages has the epoch of its producer, how many they are, and the first of them. Its first offset is
/// at its beginning.
const EPOCH: usize = 51;
const COUNT: usize = 57;
const RECORDS: usize = 61;

/// What is held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Messages of a transaction of which the broker has others, before it takes them.
    Rest,
    /// The answer to a commit that is made.
    Commit,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Gate {
    #[default]
    Open,
    /// The next of its kind is held back.
    Closes(Hold),
    /// One is held back.
    Holds,
}

/// Clones are one.
#[derive(Clone)]
pub struct Broker {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    gate: watch::Sender<Gate>,
    /// Batches of messages of producers that are not the last ones with their ids.
    refused: watch::Sender<usize>,
}

#[derive(Default)]
struct State {
    topics: BTreeSet<String>,
    /// By transactional id, the last one.
    producers: BTreeMap<String, Producer>,
    /// Transactions, in the order of their commits.
    committed: Vec<Vec<Batch>>,
}

struct Producer {
    id: i64,
    epoch: i16,
    /// In the transaction that it has begun.
    sent: Vec<Batch>,
}

/// Messages that came together.
struct Batch {
    topic: String,
    bytes: Vec<u8>,
}

impl Broker {
    pub async fn start() -> Broker {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (gate, refused) = (watch::Sender::default(), watch::Sender::default());
        let broker = Broker { address, state: Arc::default(), gate, refused };
        tokio::spawn(broker.clone().serve(listener));
        broker
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Of each transaction that is committed, in their order, the values of its messages in a topic, one on a line.
    pub fn changes(&self, topic: &str) -> Vec<String> {
        let state = self.state();
        let values = |batches: &Vec<Batch>| {
            let of_topic = batches.iter().filter(|batch| batch.topic == topic);
            of_topic.flat_map(Batch::values).collect::<Vec<_>>().join("\n")
        };
        state.committed.iter().map(values).collect()
    }

    /// Holds back the next of its kind.
    pub fn hold(&self, what: Hold) {
        self.gate.send_replace(Gate::Closes(what));
    }

    /// Lets through what is held back.
    pub fn release(&self) {
        self.gate.send_replace(Gate::Open);
    }

    /// Returns when something is held back.
    pub async fn await_held(&self) {
        let mut gate = self.gate.subscribe();
        let held = tokio::time::timeout(LIMIT, gate.wait_for(|gate| *gate == Gate::Holds)).await;
        assert!(held.is_ok(), "the broker is sent nothing that it holds back");
    }

    /// Returns when messages of a producer were refused that is not the last one with its id.
    pub async fn await_refused(&self) {
        let mut refused = self.refused.subscribe();
        let told = tokio::time::timeout(LIMIT, refused.wait_for(|count| *count > 0)).await;
        assert!(told.is_ok(), "the broker has refused nothing");
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with it")
    }

    async fn serve(self, listener: TcpListener) {
        while let Ok((client, _)) = listener.accept().await {
            let broker = self.clone();
            tokio::spawn(async move {
                // It goes on until the client ends the connection.
                let _ = broker.talk(client).await;
            });
        }
    }

    async fn talk(&self, mut client: TcpStream) -> std::io::Result<()> {
        client.set_nodelay(true)?;
        loop {
            let length = client.read_i32().await?;
            let mut bytes = vec![0; length as usize];
            client.read_exact(&mut bytes).await?;
            let mut request = Input(&bytes);
            let (kind, _version, number) = (request.i16(), request.i16(), request.i32());
            let _client = request.text();
            if kind == PRODUCE && self.state().has_messages() {
                self.pass(Hold::Rest).await;
            }
            let mut answer = Output::default();
            answer.i32(number);
            self.answer(kind, &mut request, &mut answer);
            match kind {
                FETCH => tokio::time::sleep(PAUSE).await,
                END_TXN => self.pass(Hold::Commit).await,
                _ => {}
            }
            client.write_i32(answer.0.len() as i32).await?;
            client.write_all(&answer.0).await?;
        }
    }

    /// Returns when this is not held back any more.
    async fn pass(&self, what: Hold) {
        let closes = |gate: &mut Gate| {
            let closes = *gate == Gate::Closes(what);
            if closes {
                *gate = Gate::Holds;
            }
            closes
        };
        if self.gate.send_if_modified(closes) {
            let mut gate = self.gate.subscribe();
            // The broker lives as long as its connections.
            let _ = gate.wait_for(|gate| *gate == Gate::Open).await;
        }
    }

    fn answer(&self, kind: i16, request: &mut Input<'_>, answer: &mut Output) {
        match kind {
            API_VERSIONS => versions(answer),
            METADATA => self.metadata(request, answer),
            FIND_COORDINATOR => {
                answer.throttle();
                // No error, and nothing to be told of it.
                answer.i16(0);
                answer.i16(-1);
                self.node(answer);
            }
            INIT_PRODUCER_ID => self.state().init_producer(request, answer),
            ADD_PARTITIONS_TO_TXN => self.state().add_partitions(request, answer),
            PRODUCE => {
                let refused = self.state().produce(request, answer);
                self.refused.send_modify(|count| *count += refused);
            }
            END_TXN => self.state().end(request, answer),
            LIST_OFFSETS => self.state().list_offsets(request, answer),
            FETCH => self.state().fetch(request, answer),
            other => panic!("a sink asks for nothing of this kind: {other}"),
        }
    }

    fn node(&self, answer: &mut Output) {
        answer.i32(NODE);
        answer.text(&self.address.ip().to_string());
        answer.i32(i32::from(self.address.port()));
    }

    fn metadata(&self, request: &mut Input<'_>, answer: &mut Output) {
        let mut state = self.state();
        // None at all: those that are known.
        let topics: BTreeSet<String> = match request.i32() {
            count @ 0.. => (0..count).map(|_| request.text()).collect(),
            _ => state.topics.clone(),
        };
        state.topics.extend(topics.iter().cloned());
        answer.throttle();
        answer.i32(1);
        self.node(answer);
        // Neither the broker's rack nor the cluster has a name; the broker is the one that controls it.
        answer.i16(-1);
        answer.i16(-1);
        answer.i32(NODE);
        answer.i32(topics.len() as i32);
        for topic in topics {
            answer.i16(0);
            answer.text(&topic);
            answer.flag(false);
            // One partition without an error: its leader, and those that have it.
            answer.i32(1);
            answer.i16(0);
            answer.i32(0);
            answer.i32(NODE);
            for _ in ["replicas", "in sync"] {
                answer.i32(1);
                answer.i32(NODE);
            }
        }
    }
}

impl State {
    /// The producer of this epoch, if it is the last one with its id.
    fn producer(&mut self, id: &str, epoch: i16) -> Option<&mut Producer> {
        self.producers.get_mut(id).filter(|producer| producer.epoch == epoch)
    }

    /// Whether there are some of a transaction that is not committed.
    fn has_messages(&self) -> bool {
        self.producers.values().any(|producer| !producer.sent.is_empty())
    }

    fn batches(&self, topic: &str) -> impl Iterator<Item = &Batch> {
        self.committed.iter().flatten().filter(move |batch| batch.topic == topic)
    }

    /// The offset that follows all messages of a topic.
    fn end_of(&self, topic: &str) -> i64 {
        self.batches(topic).map(|batch| i64::from(batch.count())).sum()
    }

    /// The earlier producer with the id is shut out, and its transaction aborted.
    fn init_producer(&mut self, request: &mut Input<'_>, answer: &mut Output) {
        let (name, id) = (request.text(), self.producers.len() as i64 + 1);
        let new = || Producer { id, epoch: -1, sent: Vec::new() };
        let producer = self.producers.entry(name).or_insert_with(new);
        producer.epoch += 1;
        producer.sent.clear();
        answer.throttle();
        answer.i16(0);
        answer.i64(producer.id);
        answer.i16(producer.epoch);
    }

    fn add_partitions(&mut self, request: &mut Input<'_>, answer: &mut Output) {
        let (name, _id, epoch) = (request.text(), request.i64(), request.i16());
        let code = code_of(self.producer(&name, epoch).is_some());
        answer.throttle();
        each_partition(request, answer, |_, _, answer| answer.i16(code));
    }

    /// Returns how many batches were refused.
    fn produce(&mut self, request: &mut Input<'_>, answer: &mut Output) -> usize {
        let (name, _acks, _limit) = (request.text(), request.i16(), request.i32());
        let mut refused = 0;
        each_partition(request, answer, |topic, request, answer| {
            let batch = Batch { topic: topic.to_owned(), bytes: request.bytes().to_vec() };
            let producer = self.producer(&name, batch.epoch());
            let code = code_of(producer.is_some());
            match producer {
                Some(producer) => producer.sent.push(batch),
                None => refused += 1,
            }
            answer.i16(code);
            // The offset is known when they are committed; the time is theirs.
            answer.i64(0);
            answer.i64(-1);
        });
        answer.throttle();
        refused
    }

    fn end(&mut self, request: &mut Input<'_>, answer: &mut Output) {
        let (name, _id, epoch) = (request.text(), request.i64(), request.i16());
        let [is_commit]: [u8; 1] = request.array();
        let sent = self.producer(&name, epoch).map(|producer| std::mem::take(&mut producer.sent));
        answer.throttle();
        answer.i16(code_of(sent.is_some()));
        self.committed.extend(sent.filter(|sent| is_commit != 0 && !sent.is_empty()));
    }

    fn list_offsets(&self, request: &mut Input<'_>, answer: &mut Output) {
        let _replica = request.i32();
        each_partition(request, answer, |topic, request, answer| {
            let offset = if request.i64() == EARLIEST { 0 } else { self.end_of(topic) };
            answer.i16(0);
            answer.i64(-1);
            answer.i64(offset);
        });
    }

    fn fetch(&self, request: &mut Input<'_>, answer: &mut Output) {
        let _replica_and_limits: [u8; 17] = request.array();
        answer.throttle();
        each_partition(request, answer, |topic, request, answer| {
            let (from, _limit) = (request.i64(), request.i32());
            answer.i16(0);
            // All messages are committed, and none was aborted.
            answer.i64(self.end_of(topic));
            answer.i64(self.end_of(topic));
            answer.i32(0);
            answer.bytes(&self.messages(topic, from));
        });
    }

    /// Batches with the messages from an offset on.
    fn messages(&self, topic: &str, from: i64) -> Vec<u8> {
        let (mut bytes, mut first) = (Vec::new(), 0i64);
        for batch in self.batches(topic) {
            let next = first + i64::from(batch.count());
            if next > from {
                bytes.extend(first.to_be_bytes());
                bytes.extend(&batch.bytes[size_of::<i64>()..]);
            }
            first = next;
        }
        bytes
    }
}

impl Batch {
    fn epoch(&self) -> i16 {
        Input(&self.bytes[EPOCH..]).i16()
    }

    fn count(&self) -> i32 {
        Input(&self.bytes[COUNT..]).i32()
    }

    fn values(&self) -> Vec<String> {
        let mut records = Input(&self.bytes[RECORDS..]);
        let mut values = Vec::new();
        for _ in 0..self.count() {
            let length = records.number();
            let mut record = Input(records.take(length as usize));
            let _attributes: [u8; 1] = record.array();
            let (_time, _offset) = (record.number(), record.number());
            let [_key, value] = [(); 2].map(|()| {
                let length = record.number().max(0);
                String::from_utf8_lossy(record.take(length as usize)).into_owned()
            });
            values.push(value);
        }
        values
    }
}

fn code_of(is_last: bool) -> i16 {
    if is_last { 0 } else { INVALID_PRODUCER_EPOCH }
}

/// The only answer in a format whose lengths vary.
fn versions(answer: &mut Output) {
    answer.i16(0);
    answer.0.push(VERSIONS.len() as u8 + 1);
    for (kind, version) in VERSIONS {
        for number in [kind, version, version] {
            answer.i16(number);
        }
        // No more fields.
        answer.0.push(0);
    }
    answer.throttle();
    answer.0.push(0);
}

/// Answers for one partition after the other: each is named, by topic, as in the request.
fn each_partition<'a>(
    request: &mut Input<'a>,
    answer: &mut Output,
    mut one: impl FnMut(&str, &mut Input<'a>, &mut Output),
) {
    let topics = request.i32();
    answer.i32(topics);
    for _ in 0..topics {
        let (topic, partitions) = (request.text(), request.i32());
        answer.text(&topic);
        answer.i32(partitions);
        for _ in 0..partitions {
            answer.i32(request.i32());
            one(&topic, request, answer);
        }
    }
}

/// What is left of a request.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(length);
        self.0 = rest;
        taken
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        self.take(N).try_into().expect("its length")
    }

    fn i16(&mut self) -> i16 {
        i16::from_be_bytes(self.array())
    }

    fn i32(&mut self) -> i32 {
        i32::from_be_bytes(self.array())
    }

    fn i64(&mut self) -> i64 {
        i64::from_be_bytes(self.array())
    }

    /// NULL is empty.
    fn text(&mut self) -> String {
        let length = self.i16().max(0);
        String::from_utf8_lossy(self.take(length as usize)).into_owned()
    }

    fn bytes(&mut self) -> &'a [u8] {
        let length = self.i32().max(0);
        self.take(length as usize)
    }

    /// Of as many bytes as it needs.
    fn number(&mut self) -> i64 {
        let mut number = 0u64;
        for shift in (0..u64::BITS).step_by(7) {
            let [byte]: [u8; 1] = self.array();
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        (number >> 1) as i64 ^ -((number & 1) as i64)
    }
}

#[derive(Default)]
struct Output(Vec<u8>);

impl Output {
    fn i16(&mut self, number: i16) {
        self.0.extend(number.to_be_bytes());
    }

    fn i32(&mut self, number: i32) {
        self.0.extend(number.to_be_bytes());
    }

    fn i64(&mut self, number: i64) {
        self.0.extend(number.to_be_bytes());
    }

    fn flag(&mut self, flag: bool) {
        self.0.push(u8::from(flag));
    }

    fn text(&mut self, text: &str) {
        self.i16(text.len() as i16);
        self.0.extend(text.as_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.i32(bytes.len() as i32);
        self.0.extend(bytes);
    }

    /// The client need not wait before it asks for more.
    fn throttle(&mut self) {
        self.i32(0);
    }
}
