//! Batched reads under way.

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, Stream, StreamExt};
use millrace_storage::{Found, Lookup};

use crate::error::ExecError;

type Read<T> = BoxFuture<'static, Result<(T, Found), ExecError>>;

/// Reads of one operator, each with what it was asked for.
pub struct Fetches<T> {
    reads: FuturesUnordered<Read<T>>,
}

impl<T: Send + 'static> Default for Fetches<T> {
    fn default() -> Fetches<T> {
        Fetches { reads: FuturesUnordered::new() }
    }
}

impl<T: Send + 'static> Fetches<T> {
    pub fn is_empty(&self) -> bool {
        self.reads.is_empty()
    }

    pub fn len(&self) -> usize {
        self.reads.len()
    }

    /// Takes in a read; one that is answered from memory comes straight back.
    pub fn submit(&mut self, request: T, lookup: Lookup) -> Result<Option<(T, Found)>, ExecError> {
        match lookup {
            Lookup::Ready(found) => Ok(Some((request, found))),
            Lookup::Pending(read) => {
                self.reads.push(Box::pin(async move { Ok((request, read.await?)) }));
                Ok(None)
            }
        }
    }

    /// Waits for one read, then takes all that have completed with it: their rows run as one batch.
    /// Cancel-safe; empty when nothing is under way.
    pub async fn completed(&mut self) -> Result<Vec<(T, Found)>, ExecError> {
        let mut done = Vec::new();
        match self.reads.next().await {
            Some(first) => done.push(first?),
            None => return Ok(done),
        }
        futures::future::poll_fn(|cx| {
            while let Poll::Ready(Some(next)) = Pin::new(&mut self.reads).poll_next(cx) {
                match next {
                    Ok(found) => done.push(found),
                    Err(e) => return Poll::Ready(Err(e)),
                }
            }
            Poll::Ready(Ok(()))
        })
        .await?;
        Ok(done)
    }
}

/// A lookup, waited for. At barriers only.
pub fn wait(lookup: Lookup) -> impl Future<Output = Result<Found, ExecError>> + Send {
    async move {
        match lookup {
            Lookup::Ready(found) => Ok(found),
            Lookup::Pending(read) => Ok(read.await?),
        }
    }
}
