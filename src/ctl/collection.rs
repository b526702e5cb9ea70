//! What garbage collection has before it, for people and for programs.

use std::time::Duration;

use millrace_frontend::display;
use millrace_rpc::operator::{ClusterOverview, CollectionReport};
use serde_json::json;

use super::incarnation;
use super::listing::Listing;

pub fn shown(overview: &ClusterOverview, report: &CollectionReport, as_json: bool) -> String {
    let columns =
        ["worker", "role", "address", "objects", "records_behind", "reads_from_ms", "heartbeat_ms"];
    let mut holders = Listing::new(&columns);
    for holder in &report.holders {
        let worker = overview.workers.iter().find(|w| incarnation(w) == holder.worker);
        holders.add([
            json!(holder.worker),
            json!(worker.map(|w| w.roles.join(", "))),
            json!(worker.map(|w| &w.address)),
            json!(holder.objects),
            json!(holder.records_behind),
            json!(holder.reads_from_ms),
            json!(holder.heartbeat_ms),
        ]);
    }
    if as_json {
        return json!({
            "garbage_objects": report.garbage,
            "retained_objects": report.retained,
            "object_retention_ms": report.retention_ms,
            "oldest_garbage_ms": report.oldest_ms,
            "live_bytes": report.live_bytes,
            "holders": holders.objects(),
            "troubles": report.troubles,
        })
        .to_string();
    }
    let millis = |ms: u64| display::duration(Duration::from_millis(ms));
    let oldest = report.oldest_ms.map(|ms| format!(", the oldest for {}", millis(ms)));
    format!(
        "Live: {}. Garbage: {} objects{}; {} of them for less than object_retention ({}).\n\n{}",
        display::bytes(report.live_bytes),
        report.garbage,
        oldest.unwrap_or_default(),
        report.retained,
        millis(report.retention_ms),
        holders.table()
    )
}
