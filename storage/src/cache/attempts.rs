//! One read of the store, however often it has to be asked for.
//!
//! A request that hangs is given up after a time-out; what fails because of the store or the network is sent again,
//! after growing pauses, for as long as somebody waits for the read. A slot of the scheduler is held only while a
//! request is under way. What another attempt cannot change is an error at once.

use std::ops::Range;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::{Either, select};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, GetResult};
use tokio::time::{sleep, timeout};

use super::scheduler::queues::{Owner, Slot};
use super::scheduler::{Permit, RetryMark, Urgency};
use super::{BlockCache, Counters};
use crate::error::{Result, StorageError, TimedOut};
use crate::object::{Failure, OneAttempt};

/// How requests are bounded and repeated.
#[derive(Clone, Copy, Debug)]
pub struct AttemptOptions {
    /// Of a request for few bytes.
    pub timeout: Duration,
    /// Bytes that earn a request one more second.
    pub bytes_per_second: u64,
    /// Pause before the second attempt; doubles from there.
    pub pause: Duration,
    pub max_pause: Duration,
    /// Attempts where it is not known whether the failure passes.
    pub unknown: u32,
}

impl Default for AttemptOptions {
    fn default() -> AttemptOptions {
        AttemptOptions {
            timeout: Duration::from_secs(10),
            bytes_per_second: 2 << 20,
            pause: Duration::from_millis(50),
            max_pause: Duration::from_secs(5),
            unknown: 4,
        }
    }
}

/// A byte range of an object, and who wants it.
#[derive(Clone, Debug)]
pub(super) struct RangeRead<'a> {
    pub path: &'a Path,
    pub range: Range<u64>,
    pub urgency: Arc<Urgency>,
    pub owner: Owner,
}

impl RangeRead<'_> {
    fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }
}

type Answer = object_store::Result<Bytes>;

impl BlockCache {
    /// The bytes of the range. `is_wanted` is asked before every request; `None`: nobody waits any longer.
    pub(super) async fn read_range(
        &self,
        read: &RangeRead<'_>,
        mut is_wanted: impl FnMut() -> bool,
    ) -> Result<Option<Bytes>> {
        let mut mark: Option<RetryMark> = None;
        let (mut attempt, mut unknown) = (1, 0);
        loop {
            let permit = self.scheduler.acquire(&read.urgency, read.owner, read.bytes()).await?;
            if !is_wanted() {
                permit.unused();
                return Ok(None);
            }
            let error = match self.attempt(read, permit, attempt > 1).await {
                Ok(bytes) => return self.checked(read, bytes).map(Some),
                Err(e) => e,
            };
            let failure = Failure::of(&error);
            unknown += u32::from(failure == Failure::Unknown);
            let again = failure.passes()
                || failure == Failure::Unknown && unknown < self.options.attempts.unknown;
            if !again {
                return Err(StorageError::from_store("read", read.path.as_ref(), error));
            }
            tracing::debug!(%error, attempt, object = %read.path, "a read failed, trying again");
            let text = format!("object {}: {error}", read.path);
            // The new mark first: the read counts without interruption.
            mark = Some(self.scheduler.retry(read.owner, text)).or(mark);
            sleep(self.pause(attempt)).await;
            attempt += 1;
        }
    }

    /// Doubles a pause, halved by chance so that reads do not come back together.
    fn pause(&self, attempt: u32) -> Duration {
        let options = &self.options.attempts;
        let full = options.pause.saturating_mul(1 << attempt.min(16).saturating_sub(1));
        full.min(options.max_pause).mul_f64(0.5 + self.options.env.random_fraction() / 2.0)
    }

    fn checked(&self, read: &RangeRead<'_>, bytes: Bytes) -> Result<Bytes> {
        Counters::add(&self.counters.gets, 1);
        Counters::add(&self.counters.bytes, bytes.len());
        let wanted = read.bytes();
        if bytes.len() as u64 != wanted {
            let reason = format!("{} of {wanted} bytes were there", bytes.len());
            return Err(StorageError::corrupt(read.path.as_ref(), read.range.start, reason));
        }
        Ok(bytes)
    }

    /// One request within its time-out, or two if the first is slow.
    async fn attempt(&self, read: &RangeRead<'_>, permit: Permit, again: bool) -> Answer {
        let options = &self.options.attempts;
        let slot = permit.slot();
        let extra = Duration::from_secs(slot.bytes / options.bytes_per_second.max(1));
        let limit = options.timeout + extra;
        let began = self.options.env.now();
        let answer = match timeout(limit, self.hedged(read, slot, again)).await {
            Ok(answer) => answer,
            Err(_) => {
                let source = Box::new(TimedOut { after: limit });
                Err(object_store::Error::Generic { store: "object store", source })
            }
        };
        // Before the permit starts the next read.
        match &answer {
            Ok(_) => {
                let took = self.options.env.elapsed(began);
                self.scheduler.answered(slot, read.urgency.priority(), took);
            }
            Err(error) => self.scheduler.failed(Failure::of(error)),
        }
        drop(permit);
        answer
    }

    /// The first answer of a request and, where it is slow, a second one. The other is cancelled.
    async fn hedged(&self, read: &RangeRead<'_>, slot: Slot, again: bool) -> Answer {
        let mut first = pin!(self.request(read, again));
        if let Some(answer) = self.until_slow(read, slot, first.as_mut()).await {
            return answer;
        }
        let slot = Slot { priority: read.urgency.priority(), ..slot };
        let Some(_permit) = self.scheduler.try_hedge(slot) else { return first.await };
        let second = pin!(self.request(read, false));
        match select(first, second).await {
            Either::Left((Ok(bytes), _)) => Ok(bytes),
            Either::Left((Err(error), second)) => {
                let bytes = second.await.map_err(|_| error)?;
                self.scheduler.hedge_won();
                Ok(bytes)
            }
            Either::Right((Ok(bytes), _)) => {
                self.scheduler.hedge_won();
                Ok(bytes)
            }
            Either::Right((Err(_), first)) => first.await,
        }
    }

    /// The answer of a request; `None`: it is slow, and somebody waits for it. A read of a class that nobody waits for is
    /// not slow before its class is raised, and may be so at once then.
    async fn until_slow(
        &self,
        read: &RangeRead<'_>,
        slot: Slot,
        mut first: Pin<&mut impl Future<Output = Answer>>,
    ) -> Option<Answer> {
        let began = self.options.env.now();
        loop {
            let delay = self.scheduler.hedge_delay(slot, &read.urgency, began);
            let slow = async {
                match delay {
                    Some(delay) => {
                        sleep(delay.saturating_sub(self.options.env.elapsed(began))).await
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                answer = first.as_mut() => return Some(answer),
                () = read.urgency.raised() => {}
                () = slow => return None,
            }
        }
    }

    async fn request(&self, read: &RangeRead<'_>, again: bool) -> Answer {
        let mut options = GetOptions {
            range: Some(GetRange::Bounded(read.range.clone())),
            ..GetOptions::default()
        };
        options.extensions.insert(OneAttempt { again });
        let result: GetResult = self.store.get_opts(read.path, options).await?;
        result.bytes().await
    }
}
