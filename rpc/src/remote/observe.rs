//! What is seen of calls, by caller and by called: a span of the log that names method and request, and metrics.

use std::task::{Context, Poll};

use futures::future::BoxFuture;
use tower::{Layer, Service};
use tracing::Instrument;

use super::admission::{INCARNATION, REQUEST};
use super::metrics::{Measured, Side};
use crate::request::RequestId;

/// A gRPC status code in an answer's headers; an answer that succeeds has none.
const STATUS: &str = "grpc-status";

/// Observes the calls that a server takes, or that go to a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Observe(pub Side);

impl<S> Layer<S> for Observe {
    type Service = Observed<S>;

    fn layer(&self, inner: S) -> Observed<S> {
        Observed { inner, side: self.0 }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Observed<S> {
    inner: S,
    side: Side,
}

impl<S, B, R> Service<http::Request<B>> for Observed<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let method = method(request.uri().path());
        let header = |name: &str| request.headers().get(name).and_then(|v| v.to_str().ok());
        let id = header(REQUEST).and_then(RequestId::parse);
        let span = match self.side {
            Side::Server => {
                let caller = header(INCARNATION).unwrap_or("0");
                let request = id.as_ref().map(RequestId::as_str);
                tracing::info_span!("call", method, request, caller)
            }
            Side::Client => tracing::Span::none(),
        };
        let mut measured = Measured::begin(self.side, method).of_request(id.clone());
        let answer = self.inner.call(request);
        let observed = async move {
            let answer = answer.await;
            match &answer {
                Ok(response) => {
                    let status = response.headers().get(STATUS);
                    measured.end(outcome(status.map_or(b"0", |s| s.as_bytes())));
                }
                Err(_) => measured.end("unreachable"),
            }
            answer
        };
        let observed = observed.instrument(span);
        match (self.side, id) {
            (Side::Server, Some(id)) => Box::pin(id.scope(observed)),
            _ => Box::pin(observed),
        }
    }
}

/// `Compute/Cut` of `/millrace.rpc.Compute/Cut`.
fn method(path: &str) -> String {
    path.rsplit_once('.').map_or("unknown", |(_, method)| method).to_owned()
}

/// The name of a gRPC status code.
fn outcome(code: &[u8]) -> &'static str {
    match tonic::Code::from_bytes(code) {
        tonic::Code::Ok => "ok",
        tonic::Code::Cancelled => "cancelled",
        tonic::Code::InvalidArgument => "malformed",
        tonic::Code::DeadlineExceeded => "deadline_exceeded",
        tonic::Code::ResourceExhausted => "too_large",
        tonic::Code::FailedPrecondition | tonic::Code::OutOfRange => "refused",
        tonic::Code::Unimplemented => "unimplemented",
        tonic::Code::Unavailable => "unreachable",
        _ => "failed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_and_outcomes_have_short_names() {
        assert_eq!(method("/millrace.rpc.Compute/Cut"), "Compute/Cut");
        assert_eq!(method("/favicon"), "unknown");
        assert_eq!(outcome(b"0"), "ok");
        assert_eq!(outcome(b"9"), "refused");
        assert_eq!(outcome(b"14"), "unreachable");
    }
}
