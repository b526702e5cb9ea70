//! The console's JSON.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use millrace_common::{RelationId, SqlError};
use millrace_executor::stats::OperatorStats;
use millrace_frontend::catalog::activity::compaction_state;
use millrace_frontend::cluster::{
    CatalogSnapshot, ExpressionError, JobRow, PlacedVersion, ProcessRow, SourceRow,
};
use millrace_frontend::ddl::drop::noun;
use millrace_frontend::ddl::show::{told_jobs, waits_for};
use millrace_frontend::secrets::shown_definition;
use millrace_graph::codec::decode_graph;
use millrace_graph::{Exchange, Operator, Role, Source, Subscribe};
use millrace_planner::explain::{Relations, explain_graph};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::control::CompactionReport;
use serde_json::{Value, json};

use super::login::User;
use super::{Shown, metrics, runs};

/// Everything that moves: processes, relations with their jobs, compactions, memory, the store, sessions. The last three
/// are those of the process that is asked.
pub async fn state(State(sources): Shown, Extension(User(user)): Extension<User>) -> Json<Value> {
    sources.refresh().await;
    let cluster = &sources.frontend.cluster;
    let catalog = cluster.catalog();
    let jobs = told_jobs(cluster.as_ref(), &catalog);
    let by_id: HashMap<u32, &JobRow> = jobs.iter().map(|j| (j.relation, j)).collect();
    let placed: HashMap<u32, PlacedVersion> =
        cluster.versions().into_iter().map(|placed| (placed.relation, placed)).collect();
    let relations: Vec<Value> = catalog
        .relations()
        .iter()
        .map(|r| {
            let errors = cluster.expression_errors(RelationId(r.id));
            let job = by_id.get(&r.id).copied();
            let source =
                if r.has_connector() { cluster.source_report(RelationId(r.id)) } else { None };
            let mut relation = relation_json(r);
            relation["health"] = json!(health_of(job, source.as_ref(), !errors.is_empty()));
            relation["job"] = job.map(|j| job_json(j, errors, &jobs, &catalog)).into();
            if let (Some(placed), Some(job)) = (placed.get(&r.id), relation.get_mut("job")) {
                place(job, placed);
            }
            relation["source"] = source.as_ref().map(source_json).into();
            relation
        })
        .collect();
    let blocks = sources.store.cache().stats();
    let memory_used = match &sources.worker {
        Some(worker) => worker.governor().used(),
        None => sources.frontend.engine.memory_used(),
    };
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "database": sources.frontend.config.database,
        "uptime_s": sources.started.elapsed().as_secs_f64(),
        "memory": {
            "limit": sources.memory_limit,
            "used": memory_used,
            "resident": metrics::resident(),
        },
        "blocks": {
            "hits": blocks.hits, "misses": blocks.misses, "disk_hits": blocks.disk_hits,
            "memory_bytes": blocks.memory_bytes, "index_bytes": blocks.index_bytes,
        },
        "store": sources.requests.as_ref().map(|r| {
            let s = r.stats();
            json!({"puts": s.puts, "gets": s.gets, "lists": s.lists, "deletes": s.deletes,
                   "bytes_written": s.bytes_written, "bytes_read": s.bytes_read,
                   "retries": s.retries, "errors": s.errors})
        }),
        "sessions": sources.frontend.activity().into_iter().map(|a| {
            json!({"pid": a.pid, "user": a.user, "application": a.application, "query": a.query,
                   "active": a.active, "address": a.address})
        }).collect::<Vec<_>>(),
        "relations": relations,
        "processes": cluster.processes().iter().map(process_json).collect::<Vec<_>>(),
        "compactions": cluster.compactions().iter().map(compaction_json).collect::<Vec<_>>(),
        // Only whoever has logged in can log out.
        "user": sources.logins.as_ref().map(|_| &user),
        "runs": runs::list(&sources, &user),
    }))
}

/// Adds to a job which process it runs on, where it runs.
fn place(job: &mut Value, placed: &PlacedVersion) {
    if job.is_object() {
        job["process"] = (placed.process > 0).then_some(placed.process).into();
        job["generation"] = placed.version.generation.into();
    }
}

fn process_json(p: &ProcessRow) -> Value {
    json!({
        "incarnation": p.incarnation, "roles": p.roles, "address": p.address,
        "applied": p.applied, "heartbeat_ms": p.heartbeat.map(|age| age.as_millis() as u64),
        "jobs": p.jobs, "drained": p.drained,
    })
}

fn compaction_json(c: &CompactionReport) -> Value {
    json!({
        "relation": c.relation, "table": c.table, "state": compaction_state(c),
        "process": (c.process > 0).then_some(c.process), "runs": c.runs, "bytes": c.bytes,
        "target_level": c.target_level, "for_ms": c.for_ms,
    })
}

/// A job that is behind by more may need somebody.
const LATE_MS: u64 = 5000;

/// How a relation is: `good`, `warn` (look at it when there is time), `bad` (it does not go on by itself, or not with
/// everything); `None`: nothing moves here.
fn health_of(
    job: Option<&JobRow>,
    source: Option<&SourceRow>,
    errors: bool,
) -> Option<&'static str> {
    let state = job.map_or("", |j| j.state.as_str());
    let feed = source.map_or("", |s| s.state.as_str());
    if matches!(state, "failed" | "detached") || feed == "failing" {
        return Some("bad");
    }
    // The reason of a running job is that of an input.
    let late = job.is_some_and(|j| j.reason.is_some() || j.lag_ms > Some(LATE_MS));
    if late || errors || matches!(state, "stalled" | "paused") || feed == "paused" {
        return Some("warn");
    }
    let moves = job.is_some() || matches!(feed, "running" | "finished");
    moves.then_some("good")
}

fn relation_json(r: &Relation) -> Value {
    let columns: Vec<Value> = r
        .columns
        .iter()
        .filter(|c| !c.hidden)
        .map(|c| {
            let t = c.sql_type().map_or_else(|_| "?".to_owned(), |t| t.to_string());
            json!({"name": c.name, "type": t, "nullable": c.nullable})
        })
        .collect();
    json!({
        "id": r.id, "schema": r.schema, "name": r.name, "kind": noun(r),
        "depends_on": r.depends_on, "definition": shown_definition(r), "columns": columns,
    })
}

/// Splits of a source that are shown one by one: those that are furthest behind.
const SHOWN_SPLITS: usize = 50;

fn source_json(source: &SourceRow) -> Value {
    let mut splits: Vec<_> = source.splits.iter().collect();
    splits.sort_by_key(|s| (std::cmp::Reverse(s.lag()), s.split));
    let shown: Vec<Value> = splits
        .iter()
        .take(SHOWN_SPLITS)
        .map(|s| {
            json!({"name": s.name, "start": s.start, "offset": s.offset, "available": s.available,
                   "lag": s.lag()})
        })
        .collect();
    let lags: Vec<u64> = source.splits.iter().filter_map(|s| s.lag()).collect();
    let taken: u64 = source.splits.iter().map(|s| s.offset.saturating_sub(s.start)).sum();
    json!({
        "state": source.state, "reason": source.reason, "files": source.files,
        "taken": taken, "lag": (!lags.is_empty()).then(|| lags.iter().sum::<u64>()),
        "split_count": source.splits.len(), "splits": shown,
    })
}

fn job_json(
    j: &JobRow,
    errors: Vec<ExpressionError>,
    all: &[JobRow],
    catalog: &CatalogSnapshot,
) -> Value {
    let errors: Vec<Value> = errors
        .into_iter()
        .map(|e| {
            json!({"place": e.place, "sqlstate": e.sqlstate, "count": e.count,
                   "samples": e.samples})
        })
        .collect();
    let operators: Vec<Value> = j
        .operators
        .iter()
        .map(|o| {
            json!({"id": format!("{}.{}", o.fragment, o.node), "name": o.name,
                   "rows_in": o.rows_in, "rows_out": o.rows_out, "state_bytes": o.state_bytes,
                   "cache_hits": o.cache_hits, "cache_misses": o.cache_misses,
                   "parked_rows": o.parked_rows, "fetch_rounds": o.fetch_rounds,
                   "lookahead": lookahead(o)})
        })
        .collect();
    let tables: Vec<Value> = j
        .tables
        .iter()
        .map(|t| {
            json!({"name": t.name, "memory_bytes": t.memory_bytes,
                   "stored_bytes": t.stored_bytes, "entries": t.entries})
        })
        .collect();
    json!({
        "state": j.state, "progress": j.progress, "reason": j.reason, "epoch": j.epoch,
        "lag_ms": j.lag_ms, "rows": j.rows, "commits": j.commits, "restarts": j.restarts,
        "barrier_p50_us": j.barrier_p50.as_micros() as u64,
        "barrier_p99_us": j.barrier_p99.as_micros() as u64,
        "state_bytes": j.state_bytes(), "waits_for": waits_for(j, all, catalog),
        "operators": operators, "tables": tables, "errors": errors,
    })
}

/// What became of keys that were announced to an operator; nothing if none could be and no row has waited.
fn lookahead(o: &OperatorStats) -> Option<Value> {
    let (l, m) = (&o.lookahead, &o.measures);
    let places = m.places();
    if places.is_empty() && l.missed == 0 {
        return None;
    }
    Some(json!({
        "place": places.join(", "), "places": m.candidates().join(", "), "active": l.active > 0,
        "not_announced": m.not_announced().join(", "),
        "hinted": l.hinted, "resident": l.resident, "in_time": l.in_time, "late": l.late,
        "absent": l.absent, "unused": l.unused, "dropped": l.dropped, "demand": l.missed,
        "slack_us": m.slack(), "read_us": m.reads.slowest,
        "epochs": m.reads.epochs, "without_demand": m.reads.without_demand,
        "requests_ahead": m.ahead_requests, "requests_demand": m.demand_requests,
        "dollars": m.dollars_per_million_rows(o.rows_in),
    }))
}

/// The operators of a relation's job and what feeds what.
pub async fn graph(State(sources): Shown, Path(id): Path<u32>) -> Response {
    let catalog = sources.frontend.cluster.catalog();
    let Some(relation) = catalog.by_id(id).filter(|r| !r.graph.is_empty()) else {
        return (StatusCode::NOT_FOUND, "no such job\n").into_response();
    };
    let graph = match decode_graph(&relation.graph) {
        Ok(graph) => graph,
        Err(e) => {
            return (StatusCode::INTERNAL_SERVER_ERROR, SqlError::from(e).into_parts().message)
                .into_response();
        }
    };
    let name = |id: RelationId| catalog.by_id(id.0).map(|r| r.name.clone());
    let mut nodes = Vec::new();
    for (f, fragment) in graph.fragments.iter().enumerate() {
        for (n, node) in fragment.nodes.iter().enumerate() {
            let mut inputs: Vec<String> = node.inputs.iter().map(|i| format!("{f}.{i}")).collect();
            let mut reads = None;
            match &node.op {
                Operator::Exchange(Exchange { fragment: from, output }) => {
                    let edge = graph.fragments.get(*from).and_then(|g| g.outputs.get(*output));
                    inputs.extend(edge.map(|e| format!("{from}.{}", e.from)));
                }
                Operator::Subscribe(Subscribe { relation, .. })
                | Operator::Source(Source { relation, .. }) => reads = name(*relation),
                _ => {}
            }
            nodes.push(json!({"id": format!("{f}.{n}"), "inputs": inputs, "reads": reads,
                              "last": node.op.role() == Role::Root}));
        }
    }
    let table = RelationKind::Table as i32;
    let is_table = |id: RelationId| catalog.by_id(id.0).is_some_and(|r| r.kind == table);
    let graph_of = |id: RelationId| {
        let stored = catalog.by_id(id.0).filter(|r| !r.graph.is_empty())?;
        decode_graph(&stored.graph).ok().map(Arc::new)
    };
    let relations = Relations { name: &name, is_table: &is_table, graph: &graph_of };
    let plan = explain_graph(&graph, &relations);
    Json(json!({"id": id, "nodes": nodes, "plan": plan})).into_response()
}
