//! Requests of a [`SimStore`](super::SimStore) one by one, to see which of them wait for each other.

use std::ops::Range;

use object_store::GetRange;
use object_store::path::Path;
use tokio::time::Instant;

use super::RequestKind;

/// One request.
#[derive(Clone, Debug)]
pub struct RequestRecord {
    pub kind: RequestKind,
    /// Empty, of a list.
    pub location: String,
    /// Of a read of a part: which bytes, as far as they were named by both ends.
    pub range: Option<Range<u64>>,
    /// Its place in the longest chain of dependent requests before it.
    pub round: u64,
    pub began: Instant,
    pub ended: Instant,
}

/// What a request is of.
#[derive(Clone, Copy, Default)]
pub(super) struct Asked<'a> {
    pub location: Option<&'a Path>,
    pub range: Option<&'a GetRange>,
}

impl<'a> Asked<'a> {
    pub fn of(location: &'a Path) -> Asked<'a> {
        Asked { location: Some(location), range: None }
    }

    /// The request as it begins.
    pub fn record(self, kind: RequestKind, round: u64) -> RequestRecord {
        let began = Instant::now();
        let range = match self.range {
            Some(GetRange::Bounded(range)) => Some(range.clone()),
            _ => None,
        };
        let location = self.location.map(Path::to_string).unwrap_or_default();
        RequestRecord { kind, location, range, round, began, ended: began }
    }
}
