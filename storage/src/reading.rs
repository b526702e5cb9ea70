//! Answers of lookups that come from the store or the local disk, in parts.
//!
//! What a lookup finds may be much larger than what it asks: a thousand join keys may have a million
//! rows. A large answer comes in parts, each for some of the strings that were asked, one after the
//! other as its reader asks for it; so a reader that works part by part never holds all of it.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use futures::StreamExt;
use futures::stream::BoxStream;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::cache::{Priority, ReadOptions};
use crate::entry::Found;
use crate::error::{Result, StorageError};

/// What was found of some of the strings that were asked.
#[derive(Debug)]
pub struct Part {
    /// Positions in the question. `found.input` is an index into this list. Every string of a question is
    /// in one part.
    pub asked: Vec<u32>,
    pub found: Found,
    pub is_last: bool,
}

impl Part {
    /// The only part of an answer to `asked` strings.
    pub fn whole(found: Found, asked: usize) -> Part {
        Part { asked: (0..asked as u32).collect(), found, is_last: true }
    }
}

/// How the reads are made that a lookup has still to begin.
#[derive(Clone, Debug)]
pub struct ReadClass {
    options: Arc<Mutex<ReadOptions>>,
    /// Told when the class rises.
    raised: Arc<Notify>,
}

impl Default for ReadClass {
    fn default() -> ReadClass {
        let options = ReadOptions::keeping(Priority::default());
        ReadClass { options: Arc::new(Mutex::new(options)), raised: Arc::default() }
    }
}

impl ReadClass {
    pub fn get(&self) -> ReadOptions {
        self.options.lock().clone()
    }

    /// The lookup has become more urgent: also of what it is reading already. It must be polled again, which this causes.
    /// `deadline`: when its answer is needed, if somebody knows.
    pub fn raise(&self, to: Priority, deadline: Option<Instant>) {
        {
            let mut options = self.options.lock();
            if options.priority <= to {
                return;
            }
            options.priority = to;
            options.deadline = deadline;
        }
        self.raised.notify_one();
    }

    /// Waits until it is raised, unless it was since the last call.
    pub(crate) async fn raised(&self) {
        self.raised.notified().await;
    }
}

/// An answer on its way. Holds everything it needs.
pub struct Reading {
    parts: BoxStream<'static, Result<Part>>,
    class: ReadClass,
}

impl std::fmt::Debug for Reading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reading").finish_non_exhaustive()
    }
}

impl Reading {
    /// At least one part, the last one marked.
    pub fn new(parts: BoxStream<'static, Result<Part>>) -> Reading {
        Reading::of_class(parts, ReadClass::default())
    }

    /// Parts that are read in a class.
    pub(crate) fn of_class(parts: BoxStream<'static, Result<Part>>, class: ReadClass) -> Reading {
        Reading { parts, class }
    }

    /// The class of what has still to be read.
    pub fn class(&self) -> ReadClass {
        self.class.clone()
    }

    /// The next part; none after the last.
    pub async fn next(&mut self) -> Result<Part> {
        let ended = || Err(StorageError::internal("a lookup was read beyond its last part"));
        self.parts.next().await.unwrap_or_else(ended)
    }

    /// The whole answer: sorted by position in the question, then by key.
    pub async fn whole(mut self) -> Result<Found> {
        let mut parts = vec![self.next().await?];
        while parts.last().is_some_and(|p| !p.is_last) {
            parts.push(self.next().await?);
        }
        let position = |part: &Part, i: u32| part.asked[i as usize];
        let inputs: Vec<u32> = parts
            .iter()
            .flat_map(|part| part.found.input.values().iter().map(move |&i| position(part, i)))
            .collect();
        let in_order = inputs.is_sorted();
        let found = Found::concat(inputs, parts.into_iter().map(|p| p.found).collect())?;
        Ok(if in_order { found } else { found.by_input()? })
    }
}

/// The answer to a batched read. Not boxed: the usual case, all in memory, allocates nothing more.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub enum Lookup {
    /// Answered from memory.
    Ready(Found),
    /// Needs the store or the local disk. Holds everything it needs; the writer may go on.
    Pending(Reading),
}

impl Lookup {
    /// Reads of the store that begin from now on are of this class. Without it they are demand.
    pub fn of_class(self, class: Priority) -> Lookup {
        if let Lookup::Pending(reading) = &self {
            reading.class.options.lock().priority = class;
        }
        self
    }

    /// Adds the requests to the store that it makes from now on to a count.
    pub fn counted(self, requests: &Arc<AtomicU64>) -> Lookup {
        if let Lookup::Pending(reading) = &self {
            reading.class.options.lock().requests = Some(Arc::clone(requests));
        }
        self
    }

    /// Adds the bytes that it finds missing in memory from now on, and reads, to a count.
    pub fn counted_in_bytes(self, bytes: &Arc<AtomicU64>) -> Lookup {
        if let Lookup::Pending(reading) = &self {
            reading.class.options.lock().bytes = Some(Arc::clone(bytes));
        }
        self
    }

    /// It needs the store or the local disk.
    pub fn is_pending(&self) -> bool {
        matches!(self, Lookup::Pending(_))
    }

    /// The whole answer, however long it takes.
    pub async fn wait(self) -> Result<Found> {
        match self {
            Lookup::Ready(found) => Ok(found),
            Lookup::Pending(reading) => reading.whole().await,
        }
    }

    pub(crate) fn failed(error: StorageError) -> Lookup {
        let failed = futures::future::ready(Err(error));
        Lookup::Pending(Reading::new(futures::stream::once(failed).boxed()))
    }
}
