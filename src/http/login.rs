//! Logging in to the console and out of it.
//!
//! The cookie is for this server's requests only: no script reads it (HttpOnly), and no other site's page sends it
//! (SameSite). What it stands for is kept in [`Logins`](millrace_frontend::console::logins).

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::JsonRejection;
use axum::extract::{ConnectInfo, Extension, Request, State};
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use millrace_frontend::console::{
    logins::{AGE_LIMIT, Refused},
    own_user,
};
use serde::Deserialize;
use serde_json::json;

use super::{Peer, Shown, Sources, from_own_page, refusal};

/// As whom a request is served.
#[derive(Clone)]
pub struct User(pub String);

/// Lets those through who have logged in, or all where nobody has to.
pub async fn demand(State(sources): Shown, mut request: Request<Body>, next: Next) -> Response {
    let user = match &sources.logins {
        None => Some(own_user(&sources.frontend)),
        Some(logins) => token_of(&sources, request.headers())
            .and_then(|token| logins.user_of(&sources.frontend, token)),
    };
    let Some(user) = user else {
        return refusal(StatusCode::UNAUTHORIZED, "log in first");
    };
    request.extensions_mut().insert(User(user));
    next.run(request).await
}

#[derive(Deserialize)]
pub struct LoginRequest {
    user: String,
    password: String,
}

pub async fn enter(
    State(sources): Shown,
    ConnectInfo(peer): Peer,
    headers: HeaderMap,
    body: Result<Json<LoginRequest>, JsonRejection>,
) -> Response {
    if let Err(why) = from_own_page(&headers) {
        return refusal(StatusCode::FORBIDDEN, why);
    }
    let Some(logins) = &sources.logins else {
        return refusal(StatusCode::NOT_FOUND, "nobody has to log in here");
    };
    let LoginRequest { user, password } = match body {
        Ok(Json(request)) => request,
        Err(e) => return refusal(e.status(), &e.body_text()),
    };
    match logins.enter(&sources.frontend, peer.ip(), &user, password).await {
        Ok(token) => {
            tracing::info!(user, address = %peer, "logged in to the console");
            let age = AGE_LIMIT.as_secs();
            let cookie = cookie(&sources, &headers, &token, age);
            (cookie, Json(json!({"user": user}))).into_response()
        }
        Err(Refused::Wrong) => {
            tracing::warn!(address = %peer, "a login to the console failed");
            refusal(StatusCode::UNAUTHORIZED, "the user name or the password is wrong")
        }
        Err(Refused::Wait(wait)) => {
            let seconds = wait.as_secs() + 1;
            let why = format!("too many logins have failed; try again in {seconds} s");
            let again = [(header::RETRY_AFTER, seconds.to_string())];
            (again, refusal(StatusCode::TOO_MANY_REQUESTS, &why)).into_response()
        }
    }
}

pub async fn leave(
    State(sources): Shown,
    Extension(User(user)): Extension<User>,
    headers: HeaderMap,
) -> Response {
    if let Err(why) = from_own_page(&headers) {
        return refusal(StatusCode::FORBIDDEN, why);
    }
    let (Some(logins), Some(token)) = (&sources.logins, token_of(&sources, &headers)) else {
        return refusal(StatusCode::NOT_FOUND, "nobody has to log in here");
    };
    logins.leave(token);
    tracing::info!(user, "logged out of the console");
    (cookie(&sources, &headers, "", 0), Json(json!({}))).into_response()
}

fn name_of(sources: &Sources) -> String {
    format!("millrace_{}", sources.port)
}

fn token_of<'a>(sources: &Arc<Sources>, headers: &'a HeaderMap) -> Option<&'a str> {
    let name = name_of(sources);
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|v| v.to_str().ok());
    let mut pairs = cookies.flat_map(|v| v.split(';')).filter_map(|pair| pair.split_once('='));
    pairs.find(|(found, _)| found.trim() == name).map(|(_, token)| token.trim())
}

fn cookie(
    sources: &Sources,
    headers: &HeaderMap,
    token: &str,
    age: u64,
) -> [(HeaderName, String); 1] {
    let name = name_of(sources);
    // Through a proxy that encrypts: the browser is told to send it in no other way.
    let origin = headers.get(header::ORIGIN).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let secure = if origin.starts_with("https://") { "; Secure" } else { "" };
    let text = format!("{name}={token}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{secure}");
    [(header::SET_COOKIE, text)]
}
