//! A lane of the tail: slices that wait for a put, and when the next put begins.
//!
//! - If no put of the lane is in flight, one begins at once, with what waits: a lone commit pays one put and no delay.
//! - Otherwise what arrives waits, and shares the next put. It begins when what waits fills a segment, when the puts in
//!   flight have ended, or when half the usual duration of a put has passed since the last one began: a put that takes
//!   longer than usual, or hangs, delays only what it holds.
//!
//! So, whatever the number of jobs and commits, a lane begins at most two puts in the time that a put takes, and one
//! more for each segment that is filled; and there are never more than a fixed number in flight.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use millrace_common::EnvHandle;
use millrace_common::crash;
use millrace_common::task::spawn;
use millrace_rpc::version::SliceRef;
use object_store::ObjectStore;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use crate::error::{Result, StorageError};
use crate::given_up::{Claim, GivenUp};
use crate::object::PutWatch;
use crate::put_waits::Wait;
use crate::segment::{ObjectNamer, SegmentWriter};

/// Puts whose durations are remembered: enough for a median that a few hung ones do not move.
const REMEMBERED: usize = 16;
/// Before any put has ended: what an object store usually takes.
const UNKNOWN_DURATION: Duration = Duration::from_millis(50);

/// How large a lane's segments are, and how many are written at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Bytes of a segment; a larger slice has one of its own.
    pub segment_bytes: usize,
    pub in_flight: usize,
}

/// A slice that is not durable yet.
pub(super) struct Slice {
    pub bytes: Bytes,
    /// Of the job that it is of.
    pub wait: Arc<Wait>,
    pub done: oneshot::Sender<Result<(SliceRef, Claim)>>,
}

/// Names of segments, and where those are told that come to nothing.
#[derive(Clone)]
pub(super) struct Names {
    pub namer: Arc<ObjectNamer>,
    pub given_up: Arc<GivenUp>,
}

pub(super) struct Lane {
    store: Arc<dyn ObjectStore>,
    names: Names,
    env: EnvHandle,
    limits: Limits,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Slice>,
    waiting_bytes: usize,
    in_flight: usize,
    in_flight_bytes: usize,
    /// When the last put began.
    begun: Option<Instant>,
    durations: VecDeque<Duration>,
    /// A task sleeps until the next put is due.
    timed: bool,
}

/// What to do next.
enum Next {
    Begin(Vec<Slice>),
    /// Look again at this time.
    At(Instant),
    /// Nothing before a slice arrives or a put ends.
    Nothing,
}

impl Queue {
    fn add(&mut self, slice: Slice) {
        self.waiting_bytes += slice.bytes.len();
        self.waiting.push_back(slice);
    }

    fn next(&mut self, limits: &Limits, now: Instant) -> Next {
        if self.waiting.is_empty() || self.in_flight >= limits.in_flight {
            return Next::Nothing;
        }
        let is_full = self.waiting_bytes >= limits.segment_bytes;
        let due = self.begun.map_or(now, |begun| begun + self.usual_duration() / 2);
        if self.in_flight > 0 && !is_full && now < due {
            return Next::At(due);
        }
        self.drop_abandoned();
        if self.waiting.is_empty() {
            return Next::Nothing;
        }
        self.begun = Some(now);
        self.in_flight += 1;
        Next::Begin(self.take(limits.segment_bytes))
    }

    /// Forgets slices for which nobody waits any longer: their jobs have ended.
    fn drop_abandoned(&mut self) {
        let Queue { waiting, waiting_bytes, .. } = self;
        waiting.retain(|slice| {
            let is_wanted = !slice.done.is_closed();
            *waiting_bytes -= if is_wanted { 0 } else { slice.bytes.len() };
            is_wanted
        });
    }

    /// The oldest slices that fit into a segment, one at least.
    fn take(&mut self, segment_bytes: usize) -> Vec<Slice> {
        let mut bytes = 0;
        let fits = self.waiting.iter().take_while(|slice| {
            bytes += slice.bytes.len();
            bytes <= segment_bytes
        });
        let n = fits.count().max(1).min(self.waiting.len());
        let taken: Vec<Slice> = self.waiting.drain(..n).collect();
        let bytes = bytes_of(&taken);
        self.waiting_bytes -= bytes;
        self.in_flight_bytes += bytes;
        taken
    }

    fn ended(&mut self, bytes: usize, took: Option<Duration>) {
        self.in_flight -= 1;
        self.in_flight_bytes -= bytes;
        let Some(took) = took else { return };
        if self.durations.len() == REMEMBERED {
            self.durations.pop_front();
        }
        self.durations.push_back(took);
    }

    /// The median of the last puts.
    fn usual_duration(&self) -> Duration {
        let mut sorted: Vec<Duration> = self.durations.iter().copied().collect();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied().unwrap_or(UNKNOWN_DURATION)
    }
}

fn bytes_of(slices: &[Slice]) -> usize {
    slices.iter().map(|slice| slice.bytes.len()).sum()
}

impl Lane {
    pub fn new(
        store: Arc<dyn ObjectStore>,
        names: Names,
        env: EnvHandle,
        limits: Limits,
    ) -> Arc<Lane> {
        Arc::new(Lane { store, names, env, limits, queue: Mutex::default() })
    }

    /// Puts of one lane do not end in the order in which they began.
    pub fn add(self: &Arc<Lane>, slice: Slice) {
        self.queue.lock().add(slice);
        self.advance();
    }

    /// Bytes that wait or are being written.
    pub fn held_bytes(&self) -> usize {
        let queue = self.queue.lock();
        queue.waiting_bytes + queue.in_flight_bytes
    }

    /// Begins the puts that are due. Each is a task of its own: a caller that goes away must not take the others' put
    /// with it.
    fn advance(self: &Arc<Lane>) {
        loop {
            let mut queue = self.queue.lock();
            match queue.next(&self.limits, self.env.now()) {
                Next::Begin(slices) => {
                    drop(queue);
                    spawn("write a tail segment", put(Arc::clone(self), slices));
                }
                Next::At(due) => {
                    if !std::mem::replace(&mut queue.timed, true) {
                        drop(queue);
                        spawn("time tail segments", wake(Arc::clone(self), due));
                    }
                    return;
                }
                Next::Nothing => return,
            }
        }
    }
}

async fn wake(lane: Arc<Lane>, due: Instant) {
    sleep_until(due).await;
    lane.queue.lock().timed = false;
    lane.advance();
}

async fn put(lane: Arc<Lane>, slices: Vec<Slice>) {
    let mut segment = SegmentWriter::new(lane.names.namer.next_segment());
    let claim = Claim::new(segment.name(), &lane.names.given_up);
    let watch = PutWatch::default();
    let bytes = bytes_of(&slices);
    let place = |slice: Slice| {
        slice.wait.begun(segment.name(), &watch);
        let reference = SliceRef {
            object: segment.name().to_string(),
            offset: segment.add(slice.bytes.clone()),
            length: slice.bytes.len() as u64,
            ..SliceRef::default()
        };
        (reference, slice.done)
    };
    let placed: Vec<_> = slices.into_iter().map(place).collect();
    crash::point("storage-before-tail-put");
    let began = lane.env.now();
    let written = segment.finish_watched(&lane.store, &watch).await;
    crash::point("storage-after-tail-put");
    let took = written.is_ok().then(|| lane.env.elapsed(began));
    lane.queue.lock().ended(bytes, took);
    for (reference, done) in placed {
        // A receiver that is gone no longer wants to know.
        let written = written.as_ref().map(|_| (reference, claim.clone()));
        let _ = done.send(written.map_err(StorageError::clone));
    }
    lane.advance();
}
