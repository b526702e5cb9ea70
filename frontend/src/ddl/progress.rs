//! Waiting for a relation that is being created, and telling the client how far it is.

use std::pin::pin;
use std::time::{Duration, Instant};

use millrace_common::{RelationId, SqlError, SqlState};
use tokio_util::sync::CancellationToken;

use super::drop::noun;
use crate::cluster::{Cluster, JobRow};
use crate::display;
use crate::session::Session;

/// How often a statement that waits says how far it is. One that is done before says nothing.
const EVERY: Duration = Duration::from_secs(3);

/// Waits until the relation can be read.
pub async fn wait_created(
    session: &Session,
    id: RelationId,
    cancel: CancellationToken,
) -> Result<(), SqlError> {
    let cluster = session.cluster();
    let mut created = pin!(cluster.wait_created(id, cancel));
    if !session.settings.bool("progress_notices") || !session.is_told("NOTICE") {
        return created.await;
    }
    let begun = Instant::now();
    loop {
        match tokio::time::timeout(EVERY, &mut created).await {
            Ok(result) => return result,
            Err(_) => {
                // What is not known is not told.
                let _ = cluster.refresh_reports().await;
                if let Some(message) = told(cluster.as_ref(), id, begun.elapsed()) {
                    session.live.tell(SqlError::new(SqlState::SUCCESS, message));
                }
            }
        }
    }
}

fn told(cluster: &dyn Cluster, id: RelationId, since: Duration) -> Option<String> {
    let catalog = cluster.catalog();
    let relation = catalog.by_id(id.0)?;
    let job = cluster.jobs().into_iter().find(|j| j.relation == id.0)?;
    let (noun, name) = (noun(relation), &relation.name);
    Some(format!("{noun} \"{name}\" is {} ({})", state(&job), display::duration(since)))
}

/// `being created: 37%, 148,000 of about 400,000 rows read, 760,000 rows made`.
fn state(job: &JobRow) -> String {
    let word = match job.state.as_str() {
        "creating" | "running" => "being created",
        other => other,
    };
    let mut parts = Vec::new();
    if let Some(progress) = job.progress.as_ref().filter(|_| job.to_scan > 0) {
        let (read, all) = (display::count(job.scanned), display::count(job.to_scan));
        parts.push(format!("{progress}, {read} of about {all} rows read"));
    } else if job.scanned > 0 {
        parts.push(format!("{} rows read", display::count(job.scanned)));
    }
    let root = job.operators.iter().max_by_key(|o| (o.fragment, o.node));
    if let Some(made) = root.map(|o| o.rows_in).filter(|rows| *rows > 0) {
        parts.push(format!("{} rows made", display::count(made)));
    }
    parts.extend(job.reason.clone());
    match parts.is_empty() {
        true => word.to_owned(),
        false => format!("{word}: {}", parts.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use millrace_executor::stats::OperatorStats;

    use super::*;

    #[test]
    fn what_is_known_is_told() {
        let root = OperatorStats { node: 3, rows_in: 760_000, ..OperatorStats::default() };
        let job = JobRow {
            state: "creating".to_owned(),
            progress: Some("37%".to_owned()),
            scanned: 148_000,
            to_scan: 400_000,
            operators: vec![OperatorStats::default(), root],
            ..JobRow::default()
        };
        assert_eq!(
            state(&job),
            "being created: 37%, 148,000 of about 400,000 rows read, 760,000 rows made"
        );
        let waiting = JobRow {
            state: "waiting".to_owned(),
            progress: Some("0%".to_owned()),
            reason: Some("input v is being created".to_owned()),
            ..JobRow::default()
        };
        assert_eq!(state(&waiting), "waiting: input v is being created");
    }
}
