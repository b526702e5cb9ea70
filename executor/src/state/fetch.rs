//! Batched reads under way.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, Stream};
use millrace_common::EnvHandle;
use millrace_storage::cache::Priority;
use millrace_storage::{Found, Lookup, Part, Reading};

use super::arena::batch_bytes;
use super::prefetch::{AheadAnswer, Prefetches};
use crate::error::ExecError;

type Read<T> = BoxFuture<'static, Result<Arrived<T>, ExecError>>;

/// A part of an answer, what was asked for it, and the read of the next part.
struct Arrived<T> {
    request: T,
    found: Found,
    then: Option<Read<T>>,
}

/// Bytes of answers that are taken at once, roughly: what has come is worked on before more is read.
const ROUND_BYTES: usize = 4 << 20;

/// What was asked, as far as some of the strings go.
pub trait Divide {
    /// The request of the strings at these positions.
    fn divide(&self, asked: &[u32]) -> Self;
}

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
            Lookup::Pending(reading) => {
                self.reads.push(Box::pin(async move {
                    Ok(Arrived { request, found: reading.whole().await?, then: None })
                }));
                Ok(None)
            }
        }
    }

    /// The same, for a reader that can go on with a part of the answer: it gets each part with its part of
    /// the request.
    pub fn submit_divided(
        &mut self,
        request: T,
        lookup: Lookup,
    ) -> Result<Option<(T, Found)>, ExecError>
    where
        T: Divide,
    {
        match lookup {
            Lookup::Ready(found) => Ok(Some((request, found))),
            Lookup::Pending(reading) => {
                self.reads.push(next_part(request, reading));
                Ok(None)
            }
        }
    }

    /// Waits for one read, then takes those that have completed with it: their rows run as one batch.
    /// Cancel-safe; empty when nothing is under way.
    pub async fn completed(&mut self) -> Result<Vec<(T, Found)>, ExecError> {
        futures::future::poll_fn(|cx| self.poll_completed(cx)).await
    }

    fn poll_completed(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<(T, Found)>, ExecError>> {
        let mut done = Vec::new();
        let mut bytes = 0;
        while bytes < ROUND_BYTES {
            match Pin::new(&mut self.reads).poll_next(cx) {
                Poll::Ready(Some(Ok(Arrived { request, found, then }))) => {
                    bytes += batch_bytes(&found.values);
                    done.push((request, found));
                    self.reads.extend(then);
                }
                Poll::Ready(Some(Err(e))) => return Poll::Ready(Err(e)),
                Poll::Pending if done.is_empty() => return Poll::Pending,
                Poll::Pending | Poll::Ready(None) => break,
            }
        }
        Poll::Ready(Ok(done))
    }
}

/// Reads of keyed state: those that rows wait for, and those made ahead of rows.
pub struct Reads<T> {
    pub demand: Fetches<T>,
    pub ahead: Prefetches,
    /// How long keys are collected that are to be read ahead.
    window: Duration,
    clock: EnvHandle,
}

/// What has come of both.
pub struct Answers<T> {
    pub demand: Vec<(T, Found)>,
    pub ahead: Vec<AheadAnswer>,
    /// Keys that were collected are to be asked for.
    pub is_collected: bool,
}

impl<T: Send + 'static> Reads<T> {
    /// `window`: how long keys are collected that are to be read ahead.
    pub fn new(window: Duration, clock: &EnvHandle) -> Reads<T> {
        let (demand, ahead) = (Fetches::default(), Prefetches::default());
        Reads { demand, ahead, window, clock: clock.clone() }
    }

    /// Nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.demand.is_empty() && self.ahead.is_idle()
    }

    /// [`Fetches::completed`] of both.
    pub async fn completed(&mut self) -> Result<Answers<T>, ExecError> {
        futures::future::poll_fn(|cx| {
            let ahead = self.ahead.poll_answers(cx);
            let is_collected = self.ahead.poll_collected(self.window, &self.clock, cx);
            let has_come = is_collected || !ahead.is_empty();
            let idle = self.demand.is_empty() && !self.ahead.is_idle();
            match self.demand.poll_completed(cx) {
                Poll::Ready(Ok(demand)) if !idle || has_come => {
                    Poll::Ready(Ok(Answers { demand, ahead, is_collected }))
                }
                Poll::Ready(Err(e)) => Poll::Ready(Err(e)),
                _ if !has_come => Poll::Pending,
                _ => Poll::Ready(Ok(Answers { demand: Vec::new(), ahead, is_collected })),
            }
        })
        .await
    }
}

fn next_part<T: Divide + Send + 'static>(request: T, mut reading: Reading) -> Read<T> {
    Box::pin(async move {
        let Part { asked, found, is_last } = reading.next().await?;
        let of_part = request.divide(&asked);
        let then = (!is_last).then(|| next_part(request, reading));
        Ok(Arrived { request: of_part, found, then })
    })
}

/// A lookup, waited for. At barriers only.
pub async fn wait(lookup: Lookup) -> Result<Found, ExecError> {
    Ok(lookup.of_class(Priority::Barrier).wait().await?)
}
