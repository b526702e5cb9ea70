//! Connections of the HTTP port: how many there may be, and how long a request may take to arrive.
//!
//! Whoever reaches the port can open connections and say little or nothing on them. There are so many places; a
//! connection that is not being answered gives its place to one that arrives when all are taken.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use millrace_frontend::connection_limit::{ConnectionLimit, PendingConnection};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_util::sync::CancellationToken;

use super::{LOGIN, MAX_BODY};

/// Bytes of the bodies that are arriving: anybody can begin one.
const ARRIVING_BYTES: usize = 8 * MAX_BODY;
/// The first bytes of each body are not counted among these: who has little to say need not wait for those who have
/// much. The number of connections bounds them.
const FREE_BYTES: usize = 64 << 10;
/// Bytes of the body of a login, which anybody may send.
const MAX_LOGIN: usize = 8 << 10;

/// What clients may take of the port.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time.
    pub connections: usize,
    /// For the head of a request to arrive, and for its body; also how long a connection may stay without one.
    pub patience: Duration,
}

/// Serves connections until `shutdown`. Open ones (a console that polls) do not hold the server back.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    shutdown: CancellationToken,
) {
    let connection_limit = ConnectionLimit::new(limits.connections);
    let arriving = Arc::new(Semaphore::new(ARRIVING_BYTES));
    let mut tasks = tokio::task::JoinSet::new();
    let failure = "the HTTP port cannot accept connections";
    while let Some((socket, peer, pending_connection)) =
        connection_limit.accept(&listener, &mut tasks, &shutdown, failure).await
    {
        let (pending_connection, arriving) = (Arc::new(pending_connection), Arc::clone(&arriving));
        let arrival = Arrival { pending_connection, arriving, patience: limits.patience };
        tasks.spawn(connection(socket, peer, router.clone(), arrival));
    }
}

/// What a request finds of its connection.
#[derive(Clone)]
struct Arrival {
    pending_connection: Arc<PendingConnection>,
    arriving: Arc<Semaphore>,
    patience: Duration,
}

async fn connection(socket: TcpStream, peer: SocketAddr, router: Router, arrival: Arrival) {
    let _ = socket.set_nodelay(true);
    let (pending_connection, patience) =
        (Arc::clone(&arrival.pending_connection), arrival.patience);
    let router = router
        .layer(middleware::from_fn_with_state(arrival, receive))
        .layer(Extension(ConnectInfo(peer)));
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(patience);
    let serving = server.serve_connection(TokioIo::new(socket), TowerToHyperService::new(router));
    tokio::select! {
        biased;
        () = pending_connection.lost() => {}
        result = serving => if let Err(error) = result {
            tracing::debug!(%peer, %error, "an HTTP connection ended");
        },
    }
}

/// Waits for the whole of a request; while it is answered, its connection keeps its place.
async fn receive(State(arrival): State<Arrival>, request: Request<Body>, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let most = if head.uri.path() == LOGIN { MAX_LOGIN } else { MAX_BODY };
    let whole = whole(&arrival.arriving, body, most);
    let body = match tokio::time::timeout(arrival.patience, whole).await {
        Ok(Some(body)) => body,
        Ok(None) => return ended(StatusCode::PAYLOAD_TOO_LARGE, "the request is too large\n"),
        Err(_) => return ended(StatusCode::REQUEST_TIMEOUT, "the request did not arrive\n"),
    };
    let _kept = Kept::new(&arrival.pending_connection);
    next.run(Request::from_parts(head, Body::from(body))).await
}

/// A whole body; `None`: it has more than `most` bytes, or was cut off. Room is taken for what has arrived, not for
/// what was announced.
async fn whole(arriving: &Semaphore, mut body: Body, most: usize) -> Option<Vec<u8>> {
    if usize::try_from(body.size_hint().lower()).ok()? > most {
        return None;
    }
    let mut whole = Vec::new();
    let mut held: Option<SemaphorePermit<'_>> = None;
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        // Anything else is a trailer.
        let Ok(data) = frame.ok()?.into_data() else { continue };
        let length = whole.len() + data.len();
        if length > most {
            return None;
        }
        let counted = length.saturating_sub(whole.len().max(FREE_BYTES));
        let more = arriving.acquire_many(u32::try_from(counted).ok()?).await.ok()?;
        match &mut held {
            Some(held) => held.merge(more),
            None => held = Some(more),
        }
        whole.extend_from_slice(&data);
    }
    Some(whole)
}

/// The last answer of a connection.
fn ended(status: StatusCode, why: &'static str) -> Response {
    (status, [("connection", "close")], why).into_response()
}

/// A connection that keeps its place.
struct Kept<'a>(&'a PendingConnection);

impl Kept<'_> {
    fn new(pending_connection: &PendingConnection) -> Kept<'_> {
        pending_connection.keep(true);
        Kept(pending_connection)
    }
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        self.0.keep(false);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn body(bytes: usize) -> Body {
        Body::from(vec![b' '; bytes])
    }

    #[test]
    fn a_small_body_needs_no_room() {
        let full = Semaphore::new(0);
        let came = whole(&full, body(FREE_BYTES), MAX_BODY).now_or_never();
        assert_eq!(came.flatten().map(|b| b.len()), Some(FREE_BYTES));
        assert!(whole(&full, body(FREE_BYTES + 1), MAX_BODY).now_or_never().is_none(), "waits");
        assert_eq!(whole(&full, body(MAX_LOGIN + 1), MAX_LOGIN).now_or_never(), Some(None));
    }

    #[test]
    fn room_is_taken_as_bytes_arrive_and_given_back() {
        let arriving = Semaphore::new(MAX_BODY);
        let part = |bytes: usize| Ok::<_, std::io::Error>(vec![b' '; bytes]);
        let parts = futures::stream::iter([part(FREE_BYTES), part(1), part(2)]);
        let silent =
            Body::from_stream(futures::StreamExt::chain(parts, futures::stream::pending()));
        let mut waiting = Box::pin(whole(&arriving, silent, MAX_BODY));
        assert!(waiting.as_mut().now_or_never().is_none());
        assert_eq!(arriving.available_permits(), MAX_BODY - 3);
        drop(waiting);
        assert_eq!(arriving.available_permits(), MAX_BODY);
        let endless = Body::from_stream(futures::stream::repeat_with(move || part(1 << 10)));
        assert_eq!(whole(&arriving, endless, MAX_BODY).now_or_never(), Some(None));
    }
}
