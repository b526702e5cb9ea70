//! Against the client library's own mock brokers: offsets, holes, starts, and what messages mean.

use arrow::util::display::array_value_to_string;
use millrace_common::SqlType;
use millrace_rpc::catalog::{Column, Format, OptionEntry};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{BaseProducer, BaseRecord, DefaultProducerContext, Producer};

use super::*;

struct Broker {
    cluster: MockCluster<'static, DefaultProducerContext>,
    producer: BaseProducer,
}

impl Broker {
    fn new(topic: &str, partitions: i32) -> Broker {
        let cluster = MockCluster::new(1).unwrap();
        cluster.create_topic(topic, partitions, 1).unwrap();
        let servers = cluster.bootstrap_servers();
        let producer = ClientConfig::new().set("bootstrap.servers", servers).create().unwrap();
        Broker { cluster, producer }
    }

    fn send(&self, topic: &str, partition: i32, key: Option<&str>, value: Option<&str>) {
        let mut record: BaseRecord<'_, str, str> =
            BaseRecord::to(topic).partition(partition).timestamp(1_700_000_000_000);
        record.key = key;
        record.payload = value;
        self.producer.send(record).map_err(|(e, _)| e).unwrap();
        self.producer.flush(Duration::from_secs(120)).unwrap();
    }
}

fn relation(servers: &str, format: (&str, &str), more: &[(&str, &str)]) -> Relation {
    let column = |name: &str, t: SqlType| Column {
        name: name.to_owned(),
        sql_type: t.into(),
        nullable: true,
        ..Column::default()
    };
    let included = |i: Include| Column {
        include: Some(i.name().to_owned()),
        ..column(i.name(), i.sql_type())
    };
    let fixed = [("connector", "kafka"), ("topic", "t"), ("properties.bootstrap.servers", servers)];
    Relation {
        columns: vec![
            column("id", SqlType::Int),
            column("name", SqlType::Text),
            included(Include::Offset),
            included(Include::Timestamp),
        ],
        key: vec![0],
        primary_key: true,
        options: fixed
            .iter()
            .chain(more)
            .map(|(n, v)| OptionEntry { name: (*n).to_owned(), value: (*v).to_owned() })
            .collect(),
        format: Some(Format { format: format.0.to_owned(), encode: format.1.to_owned() }),
        ..Relation::default()
    }
}

/// Rows `weight:id|name|offset` of a partition between two offsets, and what was bad.
async fn read(
    source: &KafkaSource,
    split: u32,
    from: u64,
    until: u64,
) -> (Vec<String>, Vec<String>) {
    let at = ReadFrom { split, offset: from, position: None, parts: Default::default() };
    let mut reader = source.open(at, &[0, 1, 2]).unwrap();
    let (mut rows, mut bad, mut offset) = (Vec::new(), Vec::new(), from);
    while let Some((batch, after)) = reader.read(until, 2).await.unwrap() {
        assert!(after > offset && after <= until);
        offset = after;
        let weights = reader.weights();
        for row in 0..batch.num_rows() {
            let cell = |c: usize| array_value_to_string(batch.column(c), row).unwrap();
            let weight = weights.as_ref().map_or(1, |w| w.value(row));
            rows.push(format!("{weight}:{}|{}|{}", cell(0), cell(1), cell(2)));
        }
        bad.extend(reader.take_bad_rows().into_iter().map(|b| b.error.into_parts().message));
    }
    (rows, bad)
}

#[tokio::test]
async fn a_partition_is_read_exactly_between_two_offsets() {
    let broker = Broker::new("t", 2);
    for i in 0..6 {
        broker.send("t", i % 2, None, Some(&format!("{{\"id\":{i},\"name\":\"n{i}\"}}")));
    }
    broker.send("t", 0, None, Some("not json"));
    broker.send("t", 0, None, None);
    broker.send("t", 0, None, Some("{\"id\":9}"));
    let servers = broker.cluster.bootstrap_servers();
    let source = KafkaSource::new(&relation(&servers, ("PLAIN", "JSON"), &[])).unwrap();
    let polled = source.poll(&Known::default()).await.unwrap();
    assert_eq!(polled.available, [(0, 6), (1, 3)]);
    assert!(polled.splits.iter().all(|s| s.start == 0) && polled.splits.len() == 2);
    let (rows, bad) = read(&source, 0, 0, 6).await;
    assert_eq!(rows, ["1:0|n0|0", "1:2|n2|1", "1:4|n4|2", "1:9||5"]);
    assert_eq!(bad.len(), 1);
    assert!(bad[0].starts_with("offset 3: invalid JSON"), "{bad:?}");
    let (rows, _) = read(&source, 0, 1, 2).await;
    assert_eq!(rows, ["1:2|n2|1"]);
    // Two epochs by one reader: what was fetched too far is not lost.
    let at = ReadFrom { split: 1, offset: 0, position: None, parts: Default::default() };
    let mut reader = source.open(at, &[0]).unwrap();
    let mut seen = 0;
    for until in [1, 3] {
        while let Some((batch, _)) = reader.read(until, 100).await.unwrap() {
            seen += batch.num_rows();
        }
        assert_eq!(seen as u64, until);
    }
}

#[tokio::test]
async fn new_messages_after_the_end_of_a_partition_are_waited_for() {
    let broker = Broker::new("t", 1);
    broker.send("t", 0, None, Some("1,one"));
    let servers = broker.cluster.bootstrap_servers();
    let source = KafkaSource::new(&relation(&servers, ("PLAIN", "CSV"), &[])).unwrap();
    let at = ReadFrom { split: 0, offset: 0, position: None, parts: Default::default() };
    let mut reader = source.open(at, &[0, 1]).unwrap();
    assert_eq!(reader.read(1, 10).await.unwrap().unwrap().0.num_rows(), 1);
    for i in 2..5u64 {
        broker.send("t", 0, None, Some(&format!("{i},x")));
        let polled = source.poll(&Known::default()).await.unwrap();
        assert_eq!(polled.available, [(0, i)]);
        assert_eq!(reader.read(i, 10).await.unwrap().unwrap().0.num_rows(), 1);
    }
}

#[tokio::test]
async fn upserts_and_deletions() {
    let broker = Broker::new("t", 1);
    broker.send("t", 0, Some("1"), Some("{\"id\":1,\"name\":\"a\"}"));
    broker.send("t", 0, Some("{\"id\":2}"), Some("{\"id\":2,\"name\":\"b\"}"));
    broker.send("t", 0, Some("1"), None);
    broker.send("t", 0, Some("{\"id\":2}"), None);
    broker.send("t", 0, None, None);
    let servers = broker.cluster.bootstrap_servers();
    let source = KafkaSource::new(&relation(&servers, ("UPSERT", "JSON"), &[])).unwrap();
    let (rows, bad) = read(&source, 0, 0, 5).await;
    assert_eq!(rows, ["1:1|a|0", "1:2|b|1", "-1:1||2", "-1:2||3"]);
    assert_eq!(bad, ["offset 4: a message that deletes has no key"]);
}

#[tokio::test]
async fn changes_of_a_database() {
    let broker = Broker::new("t", 1);
    let row = |id: i32, name: &str| format!("{{\"id\":{id},\"name\":\"{name}\"}}");
    let change = |before: &str, after: &str| {
        format!("{{\"payload\":{{\"before\":{before},\"after\":{after},\"op\":\"u\"}}}}")
    };
    broker.send("t", 0, None, Some(&change("null", &row(1, "a"))));
    broker.send("t", 0, None, Some(&change(&row(1, "a"), &row(3, "c"))));
    broker.send(
        "t",
        0,
        None,
        Some(&change(&row(3, "c"), "null").replace("{\"payload\":", "").replace("}}", "}")),
    );
    broker.send("t", 0, None, None);
    let servers = broker.cluster.bootstrap_servers();
    let source = KafkaSource::new(&relation(&servers, ("DEBEZIUM", "JSON"), &[])).unwrap();
    let (rows, bad) = read(&source, 0, 0, 4).await;
    assert_eq!(bad, [""; 0]);
    assert_eq!(rows, ["1:1|a|0", "-1:1|a|1", "1:3|c|1", "-1:3|c|2"]);
}

#[tokio::test]
async fn a_string_for_jsonb_is_what_the_format_says() {
    let broker = Broker::new("t", 1);
    for (id, text) in [(1, "5"), (2, "hello")] {
        let row = format!("\"id\":{id},\"name\":\"{text}\"");
        broker.send("t", 0, None, Some(&format!("{{{row},\"after\":{{{row}}}}}")));
    }
    let servers = broker.cluster.bootstrap_servers();
    for (format, expected, wrong) in [
        ("PLAIN", vec!["1:1|\"5\"|0", "1:2|\"hello\"|1"], 0),
        ("UPSERT", vec!["1:1|\"5\"|0", "1:2|\"hello\"|1"], 0),
        ("DEBEZIUM", vec!["1:1|5|0"], 1),
    ] {
        let mut described = relation(&servers, (format, "JSON"), &[]);
        described.columns[1].sql_type = SqlType::Jsonb.into();
        let source = KafkaSource::new(&described).unwrap();
        let (rows, bad) = read(&source, 0, 0, 2).await;
        assert_eq!(rows, expected, "{format}");
        assert_eq!(bad.len(), wrong, "{format}");
        assert!(bad.iter().all(|b| b.contains("invalid input syntax for type json")), "{bad:?}");
    }
}

#[tokio::test]
async fn partitions_begin_where_they_are_told_to() {
    let broker = Broker::new("t", 1);
    broker.send("t", 0, None, Some("{}"));
    let servers = broker.cluster.bootstrap_servers();
    let latest = [("scan.startup.mode", "latest")];
    let source = KafkaSource::new(&relation(&servers, ("PLAIN", "JSON"), &latest)).unwrap();
    let polled = source.poll(&Known::default()).await.unwrap();
    assert_eq!(polled.splits[0].start, 1);
    assert_eq!(polled.more, More::After(INTERVAL));
}

#[test]
fn options_are_checked() {
    let bad = |format, more: &[(&str, &str)]| {
        KafkaSource::new(&relation("x:1", format, more)).err().unwrap().into_parts().message
    };
    let plain = ("PLAIN", "JSON");
    assert!(bad(plain, &[("properties.group.id", "x")]).contains("cannot be set"));
    assert!(bad(plain, &[("properties.socket.timeout.ms", "x")]).contains("refuses its settings"));
    let others = [
        "no.such.thing",
        "plugin.library.paths",
        "PLUGIN.library.paths",
        "ssl.engine.location",
        "ssl.providers",
        "sasl.kerberos.kinit.cmd",
        "sasl.oauthbearer.token.endpoint.url",
        "socket_cb",
        "debug",
    ];
    for name in others {
        let error = bad(plain, &[(&format!("properties.{name}"), "x")]);
        assert!(error.contains("not one that can be set"), "{name}: {error}");
    }
    assert!(bad(plain, &[("colour", "red")]).contains("unknown option"));
    assert!(bad(plain, &[("scan.startup.mode", "timestamp")]).contains("timestamp.millis"));
    assert!(bad(("PLAIN", "AVRO"), &[]).contains("ENCODE AVRO"));
    assert!(bad(("PLAIN", "BYTES"), &[]).contains("one column"));
    assert!(bad(("DEBEZIUM", "CSV"), &[]).contains("DEBEZIUM"));
}

/// `cargo test -p millrace-connector --features kafka-ssl`
#[cfg(feature = "kafka-ssl")]
#[tokio::test]
async fn tls_and_sasl_are_spoken() {
    use tokio::io::AsyncReadExt;
    for protocol in ["ssl", "sasl_ssl"] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let servers = listener.local_addr().unwrap().to_string();
        let secured = [
            ("properties.security.protocol", protocol),
            ("properties.sasl.mechanism", "SCRAM-SHA-256"),
            ("properties.sasl.username", "reader"),
            ("properties.sasl.password", "secret"),
        ];
        let source = KafkaSource::new(&relation(&servers, ("PLAIN", "JSON"), &secured)).unwrap();
        let asking = tokio::spawn(async move { source.poll(&Known::default()).await.map(drop) });
        let (mut broker, _) = listener.accept().await.unwrap();
        let mut hello = [0; 3];
        broker.read_exact(&mut hello).await.unwrap();
        // A handshake record of TLS.
        assert_eq!(hello[..2], [0x16, 0x03], "{protocol}");
        drop((broker, listener));
        asking.await.unwrap().unwrap_err();
    }
}
