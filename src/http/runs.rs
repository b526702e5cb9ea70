//! Statements from the console's page: started by one request, followed by others until they have ended.

use std::time::Duration;

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{ConnectInfo, Extension, Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use millrace_common::SqlError;
use millrace_frontend::console::Answer;
use millrace_frontend::console::runs::{Look, Run};
use serde::Deserialize;
use serde_json::{Value, json};

use super::login::User;
use super::{Peer, Shown, Sources, may_run, refusal};

/// How long a request waits for the end of a run before it tells how far it is.
const WAIT: Duration = Duration::from_secs(1);

#[derive(Deserialize)]
pub struct SqlRequest {
    sql: String,
}

/// Starts a string of statements. The answer has all that came of it, if it did not take long.
pub async fn start(
    State(sources): Shown,
    ConnectInfo(peer): Peer,
    Extension(User(user)): Extension<User>,
    headers: HeaderMap,
    body: Result<Json<SqlRequest>, JsonRejection>,
) -> Response {
    if let Err(refused) = may_run(&sources, &headers, peer) {
        return *refused;
    }
    let request = match body {
        Ok(Json(request)) => request,
        Err(e) => return refusal(e.status(), &e.body_text()),
    };
    match sources.runs.start(user, peer.to_string(), request.sql) {
        Ok(run) => told(&sources, &run, 0).await,
        Err(e) => {
            let none: [Value; 0] = [];
            let error = error_json(&e);
            Json(json!({"done": true, "answers": none, "error": error})).into_response()
        }
    }
}

#[derive(Deserialize)]
pub struct Seen {
    /// Answers that the page has.
    #[serde(default)]
    seen: usize,
}

/// How far a run is, and its answers after those that were seen.
pub async fn look(
    State(sources): Shown,
    Extension(User(user)): Extension<User>,
    Path(id): Path<String>,
    Query(Seen { seen }): Query<Seen>,
) -> Response {
    match sources.runs.find(&user, &id) {
        Some(run) => told(&sources, &run, seen).await,
        None => refusal(StatusCode::NOT_FOUND, "no such run"),
    }
}

pub async fn cancel(
    State(sources): Shown,
    ConnectInfo(peer): Peer,
    Extension(User(user)): Extension<User>,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Response {
    if let Err(refused) = may_run(&sources, &headers, peer) {
        return *refused;
    }
    match sources.runs.find(&user, &id) {
        Some(run) => {
            run.cancel();
            Json(json!({})).into_response()
        }
        None => refusal(StatusCode::NOT_FOUND, "no such run"),
    }
}

async fn told(sources: &Sources, run: &Run, seen: usize) -> Response {
    run.wait(WAIT).await;
    let Look { done, statements, answers, error, elapsed, current } = sources.runs.look(run, seen);
    let seen = seen.min(statements);
    let current = current.map(|c| {
        json!({"number": seen + answers.len() + 1, "text": c.text, "progress": c.progress,
               "elapsed_ms": millis(c.elapsed)})
    });
    Json(json!({
        "run": run.id, "done": done, "statements": statements, "elapsed_ms": millis(elapsed),
        "answers": answers.iter().map(answer_json).collect::<Vec<_>>(),
        "current": current, "error": error.as_ref().map(error_json),
    }))
    .into_response()
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn answer_json(a: &Answer) -> Value {
    json!({"tag": a.tag, "columns": a.columns, "rows": a.rows, "cut": a.cut,
           "notices": a.notices, "elapsed_ms": millis(a.elapsed)})
}

fn error_json(e: &SqlError) -> Value {
    json!({"state": e.state.0, "message": e.message, "detail": e.detail, "hint": e.hint,
           "context": e.context, "position": e.position})
}

/// A user's runs, for a page that was closed meanwhile.
pub fn list(sources: &Sources, user: &str) -> Vec<Value> {
    let runs = sources.runs.of_user(user);
    runs.iter()
        .map(|r| json!({"run": r.id, "sql": r.shown, "elapsed_ms": millis(r.elapsed())}))
        .collect()
}
