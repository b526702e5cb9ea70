//! The PostgreSQL server that tests are given (`MILLRACE_TEST_POSTGRES`: its address) as the target of sinks.

use tokio_postgres::{Client, NoTls};

use crate::suite;

/// A schema of the server, for one test.
pub struct Target {
    pub client: Client,
    /// As a sink has it.
    pub url: String,
    pub schema: String,
}

impl Target {
    /// With tables of its own. `None`, outside of CI only: no server was given.
    ///
    /// # Panics
    /// In CI without one, and if the server does not make the tables.
    pub async fn create(name: &str, tables: &str) -> Option<Target> {
        let Ok(url) = std::env::var("MILLRACE_TEST_POSTGRES") else {
            assert!(std::env::var("CI").is_err(), "MILLRACE_TEST_POSTGRES is not set");
            eprintln!("skipped: MILLRACE_TEST_POSTGRES is not set");
            return None;
        };
        let (client, connection) =
            tokio_postgres::connect(&url, NoTls).await.expect("the PostgreSQL server answers");
        tokio::spawn(connection);
        let schema = format!("{name}_{}", std::process::id());
        let sql = format!("CREATE SCHEMA {schema}; SET search_path = {schema}; {tables}");
        client.batch_execute(&sql).await.expect("the target's tables are created");
        Some(Target { client, url, schema })
    }

    /// # Panics
    /// If the server refuses it.
    pub async fn execute(&self, sql: &str) {
        self.client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    }

    /// Sorted.
    ///
    /// # Panics
    /// If the server refuses it.
    pub async fn rows(&self, sql: &str) -> Vec<Vec<String>> {
        let mut rows = suite::rows(&self.client, sql).await.unwrap_or_else(|e| panic!("{e}"));
        rows.sort();
        rows
    }

    /// # Panics
    /// If the server refuses it.
    pub async fn drop(self) {
        self.execute(&format!("DROP SCHEMA {} CASCADE", self.schema)).await;
    }
}
