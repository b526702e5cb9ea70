//! `millrace_catalog.lookahead`: what becomes of keys that are announced to operators, and what reads take and cost.

use arrow::array::RecordBatch;

use super::SystemTables;
use super::rows::{Rows, row};

/// One row for each operator whose keys are announced, or whose rows have waited for reads.
pub fn table(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new(
        "relation_id:o schema_name:n relation_name:n fragment:i node:i operator:t place:t places:t active:b not_announced:t hinted:i hint_bytes:i resident:i prefetched:i in_time:i late:i absent:i unused:i dropped:i stale:i demand:i slack_p1_ms:g slack_p50_ms:g slack_p99_ms:g read_p50_ms:g read_p90_ms:g read_p99_ms:g epochs:i epochs_without_demand:g requests_ahead:i requests_demand:i dollars_per_million_rows:g",
    );
    for j in t.shared.cluster.jobs() {
        let Some(r) = t.catalog().by_id(j.relation) else { continue };
        for o in &j.operators {
            let (l, m) = (&o.lookahead, &o.measures);
            let place = list(&m.places());
            if place.is_none() && l.missed == 0 {
                continue;
            }
            let [slack_p1, slack_p50, slack_p99] = m.slack().map(millis);
            let [read_p50, read_p90, read_p99] = m.reads.slowest.map(millis);
            row!(rows; relation_id: j.relation, schema_name: &r.schema, relation_name: &r.name,
                fragment: o.fragment as i64, node: o.node as i64, operator: o.name.as_str(),
                place: place, places: list(&m.candidates()), active: l.active > 0,
                not_announced: list(&m.not_announced()),
                hinted: l.hinted as i64, hint_bytes: l.hint_bytes as i64, resident: l.resident as i64,
                prefetched: l.prefetched as i64, in_time: l.in_time as i64, late: l.late as i64,
                absent: l.absent as i64, unused: l.unused as i64, dropped: l.dropped as i64,
                stale: l.stale as i64, demand: l.missed as i64,
                slack_p1_ms: slack_p1, slack_p50_ms: slack_p50, slack_p99_ms: slack_p99,
                read_p50_ms: read_p50, read_p90_ms: read_p90, read_p99_ms: read_p99,
                epochs: m.reads.epochs as i64, epochs_without_demand: m.reads.without_demand,
                requests_ahead: m.ahead_requests as i64, requests_demand: m.demand_requests as i64,
                dollars_per_million_rows: m.dollars_per_million_rows(o.rows_in));
        }
    }
    rows.finish()
}

fn list(names: &[&str]) -> Option<String> {
    (!names.is_empty()).then(|| names.join(", "))
}

fn millis(micros: Option<i64>) -> Option<f64> {
    micros.map(|us| us as f64 / 1e3)
}
