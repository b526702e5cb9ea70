//! Which settings of the Kafka client a statement may give.
//!
//! By name: among the rest are some that load libraries or run programs in the server, such as
//! `plugin.library.paths` and `sasl.kerberos.kinit.cmd`, and later versions of the client may bring more.

use std::path::Path;

use millrace_common::SqlError;
use millrace_rpc::catalog::Relation;
use rdkafka::ClientConfig;

use crate::{options, paths};

/// Of every client.
const GENERAL: &[&str] = &[
    "bootstrap.servers",
    "broker.address.family",
    "broker.address.ttl",
    "client.id",
    "client.rack",
    "connections.max.idle.ms",
    "max.in.flight",
    "max.in.flight.requests.per.connection",
    "message.max.bytes",
    "metadata.max.age.ms",
    "receive.message.max.bytes",
    "reconnect.backoff.max.ms",
    "reconnect.backoff.ms",
    "request.timeout.ms",
    "retry.backoff.max.ms",
    "retry.backoff.ms",
    "socket.connection.setup.timeout.ms",
    "socket.keepalive.enable",
    "socket.max.fails",
    "socket.nagle.disable",
    "socket.receive.buffer.bytes",
    "socket.send.buffer.bytes",
    "socket.timeout.ms",
    "topic.metadata.refresh.interval.ms",
    "topic.metadata.refresh.sparse",
];

/// Of encryption and authentication.
const SECURITY: &[&str] = &[
    "enable.ssl.certificate.verification",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.password",
    "sasl.username",
    "security.protocol",
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.certificate.pem",
    "ssl.cipher.suites",
    "ssl.crl.location",
    "ssl.curves.list",
    "ssl.endpoint.identification.algorithm",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl.keystore.location",
    "ssl.keystore.password",
    "ssl.sigalgs.list",
];

/// Of sources.
const READING: &[&str] = &[
    "check.crcs",
    "fetch.error.backoff.ms",
    "fetch.max.bytes",
    "fetch.message.max.bytes",
    "fetch.min.bytes",
    "fetch.queue.backoff.ms",
    "fetch.wait.max.ms",
    "isolation.level",
    "max.partition.fetch.bytes",
    "queued.max.messages.kbytes",
    "queued.min.messages",
];

/// Of sinks.
const WRITING: &[&str] = &[
    "acks",
    "batch.num.messages",
    "batch.size",
    "compression.codec",
    "compression.level",
    "compression.type",
    "delivery.timeout.ms",
    "linger.ms",
    "message.send.max.retries",
    "message.timeout.ms",
    "partitioner",
    "queue.buffering.max.kbytes",
    "queue.buffering.max.messages",
    "queue.buffering.max.ms",
    "request.required.acks",
    "retries",
    "sticky.partitioning.linger.ms",
];

/// Files that the client reads.
const FILES: &[&str] = &[
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.crl.location",
    "ssl.key.location",
    "ssl.keystore.location",
];

fn is_known(name: &str) -> bool {
    [GENERAL, SECURITY, READING, WRITING].iter().any(|names| names.contains(&name))
}

/// The client's settings of a source or sink; those in `reserved` are not the user's.
pub(crate) fn properties(relation: &Relation, reserved: &[&str]) -> Result<ClientConfig, SqlError> {
    let mut config = ClientConfig::new();
    for option in &relation.options {
        let Some(name) = option.name.strip_prefix("properties.") else { continue };
        // The singular is what users of streaming databases write.
        let name = if name == "bootstrap.server" { "bootstrap.servers" } else { name };
        if reserved.contains(&name) {
            return Err(options::invalid(format!("option \"properties.{name}\" cannot be set"))
                .with_hint("Millrace keeps by itself how far it is, with settings of its own."));
        }
        if !is_known(name) {
            return Err(options::invalid(format!(
                "option \"properties.{name}\" is not one that can be set"
            ))
            .with_detail(format!("Those of all connections: {}.", GENERAL.join(", ")))
            .with_hint(
                "Only settings of the Kafka client that are known to be safe in a server are handed to it; the \
                 documentation of the connector lists them.",
            ));
        }
        // The client takes `probe` and nothing for its own search.
        let is_path = FILES.contains(&name) && !matches!(option.value.as_str(), "" | "probe");
        if is_path {
            paths::check_text(Path::new(&option.value))?;
            paths::check_blocking(Path::new(&option.value))?;
        }
        config.set(name, &option.value);
    }
    if config.get("bootstrap.servers").is_none() {
        options::required(relation, "properties.bootstrap.servers", "'localhost:9092'")?;
    }
    Ok(config)
}
