//! How jobs are, as processes report it to each other.

mod lookahead;

use std::time::Duration;

use millrace_executor::stats::OperatorStats;
use millrace_rpc::control::{JobReport, OperatorReport, TableReport, TableRetention};
use millrace_rpc::version::ColumnWatermark;

use super::{JobRow, TableRow};

/// As it is sent.
pub fn job_report(row: JobRow) -> JobReport {
    let watermark = |(column, value)| ColumnWatermark { column, value };
    let retention = |(table, kept_since)| TableRetention { table, kept_since };
    JobReport {
        relation: row.relation,
        state: row.state,
        progress: row.progress,
        scanned: row.scanned,
        to_scan: row.to_scan,
        reason: row.reason,
        rebuilding: row.rebuilding,
        epoch: row.epoch,
        lag_ms: row.lag_ms,
        late_rows: row.late_rows,
        watermarks: row.watermarks.into_iter().map(watermark).collect(),
        cleaned: row.cleaned.into_iter().map(retention).collect(),
        rows: row.rows,
        commits: row.commits,
        restarts: row.restarts,
        barrier_p50_us: micros(row.barrier_p50),
        barrier_p99_us: micros(row.barrier_p99),
        operators: row.operators.into_iter().map(operator_report).collect(),
        tables: row.tables.into_iter().map(table_report).collect(),
        published: row.published,
        staged: row.staged as u64,
        idle_ms: None,
        feed_error: None,
        fragment_tasks: row.fragment_tasks.iter().map(|tasks| *tasks as u32).collect(),
        worked_us: None,
        load: row.load,
    }
}

/// As it is shown.
pub fn job_row(report: JobReport) -> JobRow {
    JobRow {
        relation: report.relation,
        state: report.state,
        progress: report.progress,
        scanned: report.scanned,
        to_scan: report.to_scan,
        reason: report.reason,
        rebuilding: report.rebuilding,
        epoch: report.epoch,
        lag_ms: report.lag_ms,
        late_rows: report.late_rows,
        watermarks: report.watermarks.iter().map(|w| (w.column, w.value)).collect(),
        cleaned: report.cleaned.iter().map(|r| (r.table, r.kept_since)).collect(),
        rows: report.rows,
        commits: report.commits,
        restarts: report.restarts,
        barrier_p50: Duration::from_micros(report.barrier_p50_us),
        barrier_p99: Duration::from_micros(report.barrier_p99_us),
        operators: report.operators.into_iter().map(operator_stats).collect(),
        tables: report.tables.into_iter().map(table_row).collect(),
        published: report.published,
        staged: report.staged as usize,
        fragment_tasks: report.fragment_tasks.iter().map(|tasks| *tasks as usize).collect(),
        load: report.load,
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn operator_report(o: OperatorStats) -> OperatorReport {
    OperatorReport {
        fragment: o.fragment as u32,
        node: o.node as u32,
        name: o.name,
        rows_in: o.rows_in,
        rows_out: o.rows_out,
        state_bytes: o.state_bytes,
        cache_hits: o.cache_hits,
        cache_misses: o.cache_misses,
        parked_rows: o.parked_rows,
        fetch_rounds: o.fetch_rounds,
        settled_early: o.settled_early,
        lookahead: Some(lookahead::report(&o.lookahead, &o.measures)),
    }
}

fn operator_stats(o: OperatorReport) -> OperatorStats {
    let (keys, measures) = lookahead::stats(o.lookahead.unwrap_or_default());
    OperatorStats {
        fragment: o.fragment as usize,
        node: o.node as usize,
        name: o.name,
        rows_in: o.rows_in,
        rows_out: o.rows_out,
        state_bytes: o.state_bytes,
        cache_hits: o.cache_hits,
        cache_misses: o.cache_misses,
        parked_rows: o.parked_rows,
        fetch_rounds: o.fetch_rounds,
        settled_early: o.settled_early,
        lookahead: keys,
        measures,
    }
}

fn table_report(t: TableRow) -> TableReport {
    let TableRow { id, name, memory_bytes, stored_bytes, entries } = t;
    TableReport { id, name, memory_bytes, stored_bytes, entries }
}

fn table_row(t: TableReport) -> TableRow {
    let TableReport { id, name, memory_bytes, stored_bytes, entries } = t;
    TableRow { id, name, memory_bytes, stored_bytes, entries }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_all_that_a_row_has() {
        let operator = OperatorStats {
            fragment: 1,
            node: 2,
            name: "Join".to_owned(),
            rows_in: 3,
            rows_out: 4,
            state_bytes: 5,
            cache_hits: 6,
            cache_misses: 7,
            parked_rows: 8,
            fetch_rounds: 9,
            settled_early: 10,
            lookahead: lookahead::tests::keys(),
            measures: lookahead::tests::measures(),
        };
        let table = TableRow {
            id: 11,
            name: "left".to_owned(),
            memory_bytes: 12,
            stored_bytes: 13,
            entries: 14,
        };
        let row = JobRow {
            relation: 15,
            state: "running".to_owned(),
            progress: Some("16%".to_owned()),
            scanned: 17,
            to_scan: 18,
            reason: Some("for a reason".to_owned()),
            rebuilding: true,
            epoch: 19,
            lag_ms: Some(20),
            late_rows: 21,
            watermarks: vec![(22, -23)],
            cleaned: vec![(24, -25)],
            rows: -26,
            commits: 27,
            restarts: 28,
            barrier_p50: Duration::from_micros(29),
            barrier_p99: Duration::from_micros(30),
            operators: vec![operator],
            tables: vec![table],
            published: 31,
            staged: 32,
            fragment_tasks: vec![33, 34],
            load: Some(35),
        };
        // Every field differs from its default, so one that is not carried shows.
        let told = format!("{row:?}");
        assert_eq!(format!("{:?}", job_row(job_report(row))), told);
        assert_eq!(
            format!("{:?}", job_row(job_report(JobRow::default()))),
            format!("{:?}", JobRow::default())
        );
    }
}
