//! A PostgreSQL server as the target of sinks.

use tokio_postgres::config::Host;
use tokio_postgres::{Client, Config, NoTls};

use crate::execute;

/// A schema of the server, for one test.
pub struct Postgres {
    pub client: Client,
    /// As a sink has it.
    pub url: String,
    pub schema: String,
}

impl Postgres {
    /// With tables of its own. `None` where no server was given; in CI that is an error.
    pub async fn create(name: &str, tables: &str) -> Option<Postgres> {
        let Ok(url) = std::env::var("MILLRACE_TEST_POSTGRES") else {
            assert!(std::env::var("CI").is_err(), "MILLRACE_TEST_POSTGRES is not set");
            println!("no sink into PostgreSQL: MILLRACE_TEST_POSTGRES is not set");
            return None;
        };
        let (client, connection) =
            tokio_postgres::connect(&url, NoTls).await.expect("the PostgreSQL server answers");
        tokio::spawn(connection);
        let schema = format!("{name}_{}", std::process::id());
        let sql = format!("CREATE SCHEMA {schema}; SET search_path = {schema}; {tables}");
        execute(&client, &sql).await;
        Some(Postgres { client, url, schema })
    }

    fn config(&self) -> Config {
        self.url.parse().expect("the client has taken it")
    }

    /// Where it listens.
    pub fn address(&self) -> String {
        let config = self.config();
        let Some(Host::Tcp(host)) = config.get_hosts().first() else {
            panic!("{}: this is no host", self.url)
        };
        let port = config.get_ports().first().copied().unwrap_or(5432);
        format!("{host}:{port}")
    }

    /// The same for whoever reaches it at another address.
    pub fn url_at(&self, address: &str) -> String {
        let config = self.config();
        let (host, port) = address.rsplit_once(':').expect("host and port");
        let user = config.get_user().unwrap_or("postgres");
        let database = config.get_dbname().unwrap_or(user);
        let password = config.get_password().map(String::from_utf8_lossy);
        let password = password.map(|text| format!(" password={text}")).unwrap_or_default();
        format!("host={host} port={port} user={user} dbname={database}{password}")
    }

    pub async fn drop(self) {
        execute(&self.client, &format!("DROP SCHEMA {} CASCADE", self.schema)).await;
    }
}
