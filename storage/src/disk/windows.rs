//! Lookups of more strings than a plan should hold: they are asked in order, some at a time.
//!
//! What a plan knows of each string takes more memory than the string itself. All windows see the same version and the
//! same sources in memory, those of the time when the whole was asked.

use futures::StreamExt;

use super::plan::SortedKeys;
use super::{Asking, ask_sorted};
use crate::error::Result;
use crate::lookup::Lookups;
use crate::reading::{Lookup, Part, ReadClass, Reading};
use crate::state_store::Shared;
use crate::writer::LookupRequest;

/// Strings that are asked at once, at least.
const MIN_STRINGS: usize = 8_192;
/// Memory of a lookup for each string that is asked at once.
const BYTES_PER_STRING: usize = 256;

/// How many strings a lookup asks at once.
pub(super) fn most_strings(shared: &Shared) -> usize {
    (shared.options.lookup_bytes / BYTES_PER_STRING).max(MIN_STRINGS)
}

/// A lookup in windows, on its way.
pub(super) struct Windows {
    asking: Asking,
    question: LookupRequest,
    asked: SortedKeys,
    lookups: Lookups,
    class: ReadClass,
    /// The first sorted string that has not been asked.
    next: usize,
    /// The window that is being read, and its first string.
    current: Option<(usize, Reading)>,
}

impl Windows {
    pub fn begin(
        asking: Asking,
        question: LookupRequest,
        asked: SortedKeys,
        lookups: Lookups,
    ) -> Lookup {
        let class = ReadClass::default();
        let windows = Windows {
            asking,
            question,
            asked,
            lookups,
            class: class.clone(),
            next: 0,
            current: None,
        };
        let parts = futures::stream::try_unfold(Some(windows), |windows| async move {
            let Some(mut windows) = windows else { return Ok(None) };
            let part = windows.next().await?;
            let rest = (!part.is_last).then_some(windows);
            Ok(Some((part, rest)))
        });
        Lookup::Pending(Reading::of_class(parts.boxed(), class))
    }

    async fn next(&mut self) -> Result<Part> {
        let (from, mut part) = match self.current.take() {
            Some((from, mut reading)) => {
                let part = reading.next().await?;
                if !part.is_last {
                    self.current = Some((from, reading));
                }
                (from, part)
            }
            None => self.begin_window().await?,
        };
        let sorted: Vec<u32> = part.asked.iter().map(|&at| from as u32 + at).collect();
        part.asked = self.asked.positions(&sorted);
        part.is_last &= self.next == self.asked.len();
        Ok(part)
    }

    async fn begin_window(&mut self) -> Result<(usize, Part)> {
        let from = self.next;
        self.next = (from + most_strings(&self.asking.shared)).min(self.asked.len());
        let strings: Vec<u32> = (from as u32..self.next as u32).collect();
        let question = self.asked.part(&self.question, &strings)?;
        let lookups = self.lookups.clone();
        let asked = SortedKeys::new(&question)?;
        match ask_sorted(&self.asking, question, asked, lookups, self.class.clone())? {
            Lookup::Ready(found) => Ok((from, Part::whole(found, strings.len()))),
            Lookup::Pending(mut reading) => {
                let part = reading.next().await?;
                if !part.is_last {
                    self.current = Some((from, reading));
                }
                Ok((from, part))
            }
        }
    }
}
