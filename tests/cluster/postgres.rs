//! The address of the PostgreSQL server that is the target of sinks.

use millrace_sqllogictest::target::Target;
use tokio_postgres::Config;
use tokio_postgres::config::Host;

fn config(target: &Target) -> Config {
    target.url.parse().expect("the client has taken it")
}

/// Where it listens.
pub fn address(target: &Target) -> String {
    let config = config(target);
    let Some(Host::Tcp(host)) = config.get_hosts().first() else {
        panic!("{}: this is no host", target.url)
    };
    let port = config.get_ports().first().copied().unwrap_or(5432);
    format!("{host}:{port}")
}

/// What a sink has that reaches it at another address.
pub fn url_at(target: &Target, address: &str) -> String {
    let config = config(target);
    let (host, port) = address.rsplit_once(':').expect("host and port");
    let user = config.get_user().unwrap_or("postgres");
    let database = config.get_dbname().unwrap_or(user);
    let password = config.get_password().map(String::from_utf8_lossy);
    let password = password.map(|text| format!(" password={text}")).unwrap_or_default();
    format!("host={host} port={port} user={user} dbname={database}{password}")
}
