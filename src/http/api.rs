//! The console's JSON.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{ConnectInfo, Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use millrace_common::{RelationId, SqlError};
use millrace_frontend::cluster::{CatalogSnapshot, JobRow};
use millrace_frontend::console::{self, Limits};
use millrace_frontend::ddl::{drop::noun, show::waits_for};
use millrace_planner::codec::decode_graph;
use millrace_planner::explain::explain_graph;
use millrace_planner::graph::{FragmentOutput, Operator};
use millrace_rpc::catalog::Relation;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Peer, Shown, may_run, metrics};

/// Everything that moves: relations with their jobs, memory, the store, sessions.
pub async fn state(State(sources): Shown) -> Json<Value> {
    let cluster = &sources.frontend.cluster;
    let catalog = cluster.catalog();
    let jobs = cluster.jobs();
    let by_id: HashMap<u32, &JobRow> = jobs.iter().map(|j| (j.relation, j)).collect();
    let relations: Vec<Value> = catalog
        .relations()
        .iter()
        .map(|r| {
            let job = by_id.get(&r.id).map(|j| {
                let errors = cluster.expression_errors(RelationId(r.id));
                let errors: Vec<Value> = errors
                    .into_iter()
                    .map(|e| {
                        json!({"place": e.place, "sqlstate": e.sqlstate, "count": e.count,
                               "samples": e.samples})
                    })
                    .collect();
                let mut job = job_json(j, &jobs, &catalog);
                job["errors"] = errors.into();
                job
            });
            relation_json(r, job)
        })
        .collect();
    let blocks = sources.store.cache().stats();
    let governor = sources.worker.governor();
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "database": sources.frontend.config.database,
        "uptime_s": sources.started.elapsed().as_secs_f64(),
        "memory": {
            "limit": sources.memory_limit,
            "used": governor.used(),
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
    }))
}

fn relation_json(r: &Relation, job: Option<Value>) -> Value {
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
        "depends_on": r.depends_on, "definition": r.definition, "columns": columns, "job": job,
    })
}

fn job_json(j: &JobRow, all: &[JobRow], catalog: &CatalogSnapshot) -> Value {
    let operators: Vec<Value> = j
        .operators
        .iter()
        .map(|o| {
            json!({"id": format!("{}.{}", o.fragment, o.node), "name": o.name,
                   "rows_in": o.rows_in, "rows_out": o.rows_out, "state_bytes": o.state_bytes,
                   "cache_hits": o.cache_hits, "cache_misses": o.cache_misses,
                   "parked_rows": o.parked_rows, "fetch_rounds": o.fetch_rounds})
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
        "operators": operators, "tables": tables,
    })
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
            return (StatusCode::INTERNAL_SERVER_ERROR, SqlError::from(e).message).into_response();
        }
    };
    let name = |id: RelationId| catalog.by_id(id.0).map(|r| r.name.clone());
    let mut nodes = Vec::new();
    for (f, fragment) in graph.fragments.iter().enumerate() {
        for (n, node) in fragment.nodes.iter().enumerate() {
            let mut inputs: Vec<String> = node.inputs.iter().map(|i| format!("{f}.{i}")).collect();
            let mut reads = None;
            match &node.op {
                Operator::Exchange { fragment: from } => {
                    let root = graph.fragments.get(*from).map_or(0, |g| g.nodes.len());
                    inputs.push(format!("{from}.{}", root.saturating_sub(1)));
                }
                Operator::Subscribe { relation, .. } | Operator::Source { relation, .. } => {
                    reads = name(*relation);
                }
                _ => {}
            }
            nodes.push(json!({"id": format!("{f}.{n}"), "inputs": inputs, "reads": reads,
                              "last": n + 1 == fragment.nodes.len()
                                      && fragment.output == FragmentOutput::Relation}));
        }
    }
    Json(json!({"id": id, "nodes": nodes, "plan": explain_graph(&graph, &name)})).into_response()
}

#[derive(Deserialize)]
pub struct SqlRequest {
    sql: String,
}

/// Runs a string of statements, for the console's own page only.
pub async fn sql(
    State(sources): Shown,
    ConnectInfo(peer): Peer,
    headers: HeaderMap,
    body: Result<Json<SqlRequest>, axum::extract::rejection::JsonRejection>,
) -> Response {
    if let Err((status, why)) = may_run(&headers, peer) {
        return (status, Json(json!({"error": {"message": why}}))).into_response();
    }
    let request = match body {
        Ok(Json(request)) => request,
        Err(e) => {
            let message = e.body_text();
            return (e.status(), Json(json!({"error": {"message": message}}))).into_response();
        }
    };
    let shared = Arc::clone(&sources.frontend);
    let (answers, error) =
        console::run(&shared, peer.to_string(), &request.sql, Limits::default()).await;
    let answers: Vec<Value> = answers
        .into_iter()
        .map(|a| {
            json!({"tag": a.tag, "columns": a.columns, "rows": a.rows, "truncated": a.truncated,
                   "notices": a.notices, "elapsed_ms": a.elapsed.as_secs_f64() * 1e3})
        })
        .collect();
    let error = error.map(|e| {
        json!({"state": e.state.0, "message": e.message, "detail": e.detail, "hint": e.hint,
               "position": e.position})
    });
    Json(json!({"answers": answers, "error": error})).into_response()
}
