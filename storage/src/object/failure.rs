//! What a failed request says about another attempt.

use std::error::Error as StdError;
use std::io;

use object_store::Error;
use object_store::client::{HttpError, HttpErrorKind};

use crate::error::{TimedOut, find, is_disk_full};

/// Why a request failed, by what can be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The store asks for fewer requests (429, 503).
    SlowDown,
    /// No answer in time.
    Timeout,
    /// The store or the network has a problem that passes: other 5xx, a connection that was refused or reset.
    Unavailable,
    /// Not known: another attempt may help, endless ones will not.
    Unknown,
    /// An answer: another attempt ends in the same way.
    Final,
}

impl Failure {
    pub fn of(error: &Error) -> Failure {
        if !matches!(error, Error::Generic { .. } | Error::JoinError { .. }) || is_disk_full(error)
        {
            return Failure::Final;
        }
        if find::<TimedOut>(error).is_some() {
            return Failure::Timeout;
        }
        if let Some(status) = status(error) {
            return match status {
                429 | 503 => Failure::SlowDown,
                500..=599 | 408 => Failure::Unavailable,
                _ => Failure::Unknown,
            };
        }
        if let Some(http) = find::<HttpError>(error) {
            return match http.kind() {
                HttpErrorKind::Timeout => Failure::Timeout,
                // A body that was cut off counts as one that could not be decoded.
                _ => Failure::Unavailable,
            };
        }
        match find::<io::Error>(error) {
            Some(e) if is_connection(e.kind()) => Failure::Unavailable,
            _ => Failure::Unknown,
        }
    }

    /// Whether the same request succeeds as soon as the store is well again.
    pub fn passes(self) -> bool {
        matches!(self, Failure::SlowDown | Failure::Timeout | Failure::Unavailable)
    }
}

fn is_connection(kind: io::ErrorKind) -> bool {
    use io::ErrorKind as K;
    matches!(
        kind,
        K::ConnectionReset
            | K::ConnectionAborted
            | K::ConnectionRefused
            | K::NotConnected
            | K::BrokenPipe
            | K::TimedOut
    )
}

/// What errors that hold a status begin with: their type is private to `object_store`.
const STATUS: &str = "Server returned non-2xx status code: ";
/// Of an error that came with status 200.
const RESPONSE: &str = "Server returned error response: ";

/// The HTTP status of the server's answer, if there was one.
fn status(error: &(dyn StdError + 'static)) -> Option<u16> {
    let mut at = error.source();
    while let Some(e) = at {
        let text = e.to_string();
        if let Some(rest) = text.strip_prefix(STATUS) {
            return rest.get(..3)?.parse().ok();
        }
        if let Some(body) = text.strip_prefix(RESPONSE) {
            return Some(if body.contains("SlowDown") { 503 } else { 500 });
        }
        at = e.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::Duration;

    use object_store::aws::AmazonS3Builder;
    use object_store::path::Path;
    use object_store::{ObjectStoreExt, RetryConfig};

    use super::*;

    fn generic(source: impl StdError + Send + Sync + 'static) -> Error {
        Error::Generic { store: "test", source: Box::new(source) }
    }

    #[test]
    fn what_passes_is_told_from_what_does_not() {
        let of = |e| Failure::of(&generic(io::Error::from(e)));
        assert_eq!(of(io::ErrorKind::ConnectionReset), Failure::Unavailable);
        assert_eq!(of(io::ErrorKind::InvalidData), Failure::Unknown);
        assert_eq!(of(io::ErrorKind::StorageFull), Failure::Final);
        let late = TimedOut { after: Duration::from_secs(1) };
        assert_eq!(Failure::of(&generic(late)), Failure::Timeout);
        let missing = Error::NotFound { path: "a".into(), source: "none".into() };
        assert_eq!(Failure::of(&missing), Failure::Final);
    }

    /// How a read of S3 fails whose server sends these bytes and closes the connection.
    async fn failure_of(answer: &'static str) -> Failure {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", server.local_addr().unwrap());
        let served = std::thread::spawn(move || {
            let (mut client, _) = server.accept().unwrap();
            let mut request = [0; 4096];
            let _ = client.read(&mut request).unwrap();
            client.write_all(answer.as_bytes()).unwrap();
        });
        let store = AmazonS3Builder::new()
            .with_endpoint(endpoint)
            .with_allow_http(true)
            .with_bucket_name("b")
            .with_region("r")
            .with_access_key_id("k")
            .with_secret_access_key("s")
            .with_retry(RetryConfig { max_retries: 0, ..RetryConfig::default() })
            .build()
            .unwrap();
        let error = store.get_range(&Path::from("a"), 0..10).await.unwrap_err();
        served.join().unwrap();
        Failure::of(&error)
    }

    /// A failure here means that `object_store` words its errors differently: [`STATUS`] must follow.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_answers_of_a_server_are_understood() {
        for (answer, failure) in [
            (
                "HTTP/1.1 503 Slow Down\r\nContent-Length: 8\r\nConnection: close\r\n\r\nSlowDown",
                Failure::SlowDown,
            ),
            ("HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n", Failure::SlowDown),
            ("HTTP/1.1 500 Internal\r\nContent-Length: 0\r\n\r\n", Failure::Unavailable),
            ("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", Failure::Unknown),
            ("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", Failure::Final),
            ("HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", Failure::Final),
            ("", Failure::Unavailable),
            (
                "HTTP/1.1 206 Partial\r\nContent-Length: 10\r\nContent-Range: bytes 0-9/100\r\n\
                 ETag: \"e\"\r\nLast-Modified: Sun, 01 Feb 2026 00:00:00 GMT\r\n\r\nabc",
                Failure::Unavailable,
            ),
        ] {
            assert_eq!(failure_of(answer).await, failure, "{answer}");
        }
    }
}
