//! What the store's errors are in the words of S3.

use std::error::Error as StdError;
use std::io;

use http::{HeaderMap, HeaderValue, StatusCode};
use millrace_storage::object::Failure;
use object_store::Error;
use s3s::{S3Error, S3ErrorCode, s3_error};

use crate::directory::Unsatisfiable;

/// Marks an answer that is not to be sent: the connection is reset instead. It never reaches a client.
pub const RESET: &str = "x-millrace-reset";

/// The first cause of a type.
fn find<'a, E: StdError + 'static>(error: &'a (dyn StdError + 'static)) -> Option<&'a E> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<E>() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

pub fn error(error: Error) -> S3Error {
    match error {
        Error::NotFound { .. } => s3_error!(NoSuchKey, "The specified key does not exist."),
        Error::AlreadyExists { .. } | Error::Precondition { .. } => {
            s3_error!(
                PreconditionFailed,
                "At least one of the preconditions you specified did not hold."
            )
        }
        Error::NotModified { .. } => s3_error!(NotModified),
        Error::NotImplemented { .. } | Error::NotSupported { .. } => {
            s3_error!(NotImplemented, "{error}")
        }
        other => by_cause(&other),
    }
}

fn by_cause(error: &Error) -> S3Error {
    if let Some(beyond) = find::<Unsatisfiable>(error) {
        return s3_error!(InvalidRange, "{beyond}");
    }
    if Failure::of(error) == Failure::SlowDown {
        return s3_error!(SlowDown, "Please reduce your request rate.");
    }
    match find::<io::Error>(error).map(io::Error::kind) {
        Some(io::ErrorKind::ConnectionReset) => {
            let mut reset = s3_error!(InternalError, "{error}");
            reset.set_headers(HeaderMap::from_iter([(
                http::HeaderName::from_static(RESET),
                HeaderValue::from_static("1"),
            )]));
            reset
        }
        Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
            let code = S3ErrorCode::Custom("InsufficientStorage".into());
            let mut full = S3Error::with_message(code, error.to_string());
            full.set_status_code(StatusCode::INSUFFICIENT_STORAGE);
            full
        }
        Some(io::ErrorKind::InvalidFilename) => {
            s3_error!(KeyTooLongError, "A part of the key is longer than a file's name may be.")
        }
        _ => s3_error!(InternalError, "{error}"),
    }
}
