//! PostgreSQL 15 as the judge of batch answers.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio_postgres::{Client, NoTls};

static SCHEMAS: AtomicU64 = AtomicU64::new(0);

/// A session in a schema of its own.
pub struct Judge {
    pub client: Client,
}

impl Judge {
    /// `None` where no server was given (`MILLRACE_TEST_POSTGRES`); in CI that is an error.
    pub async fn connect() -> Result<Option<Judge>, String> {
        let Ok(address) = std::env::var("MILLRACE_TEST_POSTGRES") else {
            if std::env::var("CI").is_ok_and(|v| v == "true") {
                return Err("MILLRACE_TEST_POSTGRES is not set".to_string());
            }
            return Ok(None);
        };
        let (client, connection) =
            tokio_postgres::connect(&address, NoTls).await.map_err(|e| e.to_string())?;
        tokio::spawn(connection);
        let schema =
            format!("case_{}_{}", std::process::id(), SCHEMAS.fetch_add(1, Ordering::Relaxed));
        let judge = Judge { client };
        judge
            .execute(&format!(
                "CREATE SCHEMA {schema}; SET search_path = {schema}; SET timezone = 'UTC'"
            ))
            .await?;
        Ok(Some(judge))
    }

    pub async fn execute(&self, sql: &str) -> Result<(), String> {
        crate::case::execute(&self.client, sql).await.map_err(|e| format!("PostgreSQL: {e}"))
    }

    pub async fn rows(&self, sql: &str) -> Result<Vec<Vec<Option<String>>>, String> {
        crate::case::rows(&self.client, sql).await.map_err(|e| format!("PostgreSQL: {e}"))
    }
}

/// Numerics that differ only in trailing zeros are equal; PostgreSQL's averages carry sixteen or
/// more digits, so both are cut at twelve.
pub fn normalise(cell: &mut Option<String>) {
    let Some(text) = cell else { return };
    // Which of two equal zeros a group shows is not defined.
    if text == "-0" {
        *cell = Some("0".into());
        return;
    }
    let Some((whole, fraction)) = text.split_once('.') else { return };
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole.trim_start_matches('-')) || !digits(fraction) {
        return;
    }
    let fraction = &fraction[..fraction.len().min(12)];
    let fraction = fraction.trim_end_matches('0');
    *cell =
        Some(if fraction.is_empty() { whole.to_string() } else { format!("{whole}.{fraction}") });
}
