//! Rows from files: each counts once, whatever dies meanwhile.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::client::{describe, numbers};
use crate::rng::Rng;

const PATIENCE: Duration = Duration::from_secs(120);
const ROWS: i64 = 40;

pub struct Files {
    folder: PathBuf,
    written: AtomicI64,
}

impl Files {
    pub fn new(folder: &Path) -> Files {
        Files { folder: folder.to_path_buf(), written: AtomicI64::new(0) }
    }

    pub fn schema(&self) -> Vec<String> {
        let from = format!(
            "(n bigint, k int) WITH (connector = 'fs', path = '{}/*.csv', discovery_interval = '100ms') \
             FORMAT PLAIN ENCODE CSV",
            self.folder.display()
        );
        vec![
            format!("CREATE SOURCE file {from}"),
            format!("CREATE TABLE file_kept {from}"),
            "CREATE MATERIALIZED VIEW file_keys AS SELECT k, count(*) AS c, sum(n) AS s FROM file GROUP BY k".into(),
            "CREATE MATERIALIZED VIEW file_rows AS SELECT n, k FROM file WHERE k > 2".into(),
        ]
    }

    /// Writes files until the moment; it does not notice what becomes of the server.
    pub async fn write(&self, mut rng: Rng, until: Instant) -> std::io::Result<()> {
        while Instant::now() < until {
            let first = self.written.load(Ordering::Relaxed) * ROWS;
            let text: String =
                (first..first + ROWS).map(|n| format!("{n},{}\n", n * 31 % 11)).collect();
            // Under another name first, as a writer should.
            let hidden = self.folder.join(".next");
            std::fs::write(&hidden, text)?;
            std::fs::rename(&hidden, self.folder.join(format!("{:08}.csv", first / ROWS)))?;
            self.written.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(rng.between(300, 1_500) as u64)).await;
        }
        Ok(())
    }

    /// Every row of every file is there once, before long.
    pub async fn check(&self, client: &Client) -> Result<(), String> {
        let n = self.written.load(Ordering::Relaxed) * ROWS;
        let wanted = vec![vec![n, n, n * (n - 1) / 2]];
        for sql in [
            "SELECT count(*), count(DISTINCT n), coalesce(sum(n), 0)::bigint FROM file_kept",
            "SELECT coalesce(sum(c), 0)::bigint, coalesce(sum(c), 0)::bigint, coalesce(sum(s), 0)::bigint FROM file_keys",
        ] {
            let begun = Instant::now();
            loop {
                let found = numbers(client, sql).await.map_err(|e| describe(&e))?;
                if found == wanted {
                    break;
                }
                if begun.elapsed() > PATIENCE {
                    return Err(format!("{sql} = {found:?}, not {wanted:?}"));
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        Ok(())
    }
}
