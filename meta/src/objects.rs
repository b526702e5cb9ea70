//! Which data objects are alive (docs/design.md §9, garbage collection).
//!
//! Reference counts follow from the versions and are rebuilt from them; only two things are state of
//! their own: *garbage* (objects that lost their last reference or were given up, and when) and *deleted* names of
//! live processes, by incarnation, which can never be referenced again. Age alone deletes nothing: an object must
//! have lost its last reference in the log, have been given up by the process that wrote it, or belong to a fenced
//! incarnation without one.

use std::collections::BTreeMap;

use millrace_common::Epoch;
use millrace_common::collections::HashMap;
use millrace_rpc::log::CounterRange;
use millrace_rpc::version::JobVersion;

/// Prefix of all data objects.
pub const DATA_PREFIX: &str = "data";

/// What versions name of an object.
#[derive(Clone, Copy, Debug, Default)]
struct References {
    count: u32,
    bytes: u64,
    /// All bytes of the object that any version has named since the log was opened: nearly its size, if it was written
    /// since.
    named: u64,
}

/// Snapshots do not hold what was named earlier, so it is not compared.
impl PartialEq for References {
    fn eq(&self, other: &References) -> bool {
        (self.count, self.bytes) == (other.count, other.bytes)
    }
}

impl Eq for References {}

/// An object that versions name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alive<'a> {
    pub name: &'a str,
    /// Bytes of it that versions name.
    pub live: u64,
    /// Bytes of it that versions have named since the log was opened; it is no smaller.
    pub named: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Objects {
    refs: HashMap<String, References>,
    /// Of all references.
    bytes: u64,
    garbage: BTreeMap<String, Epoch>,
    deleted: BTreeMap<(u64, u64), u64>,
}

impl Objects {
    pub fn from_snapshot<'a>(
        versions: impl Iterator<Item = &'a JobVersion>,
        garbage: &BTreeMap<String, u64>,
        deleted: &[CounterRange],
    ) -> Objects {
        let mut objects = Objects {
            refs: HashMap::default(),
            bytes: 0,
            garbage: garbage.iter().map(|(n, e)| (n.clone(), Epoch(*e))).collect(),
            deleted: deleted.iter().map(|r| ((r.incarnation, r.from), r.to)).collect(),
        };
        for (name, bytes) in versions.flat_map(references_of) {
            objects.add(name, bytes);
        }
        objects
    }

    /// What a snapshot holds of it: counts follow from the versions.
    pub fn without_references(&self) -> Objects {
        Objects {
            refs: HashMap::default(),
            bytes: 0,
            garbage: self.garbage.clone(),
            deleted: self.deleted.clone(),
        }
    }

    /// One reference more, to so many bytes of the object.
    pub fn add(&mut self, name: &str, bytes: u64) {
        if name.is_empty() {
            return;
        }
        self.garbage.remove(name);
        self.bytes += bytes;
        match self.refs.get_mut(name) {
            Some(known) => {
                known.count += 1;
                known.bytes += bytes;
                known.named += bytes;
            }
            None => {
                let first = References { count: 1, bytes, named: bytes };
                self.refs.insert(name.to_owned(), first);
            }
        }
    }

    /// One reference less, to so many bytes; with the last one the object is garbage since `epoch`.
    pub fn remove(&mut self, name: &str, bytes: u64, epoch: Epoch) {
        let Some(known) = self.refs.get_mut(name) else { return };
        known.count -= 1;
        known.bytes = known.bytes.saturating_sub(bytes);
        self.bytes = self.bytes.saturating_sub(bytes);
        if known.count == 0 {
            self.refs.remove(name);
            self.garbage.insert(name.to_owned(), epoch);
        }
    }

    /// An object that was written for nothing is garbage since `epoch`; one that something names, or that is deleted,
    /// stays as it is.
    pub fn discard(&mut self, name: &str, epoch: Epoch) {
        if !self.is_referenced(name) && !self.is_deleted(name) {
            self.garbage.entry(name.to_owned()).or_insert(epoch);
        }
    }

    /// Bytes of the object that versions name; 0: none do.
    pub fn live_bytes(&self, name: &str) -> u64 {
        self.refs.get(name).map_or(0, |known| known.bytes)
    }

    /// Bytes that versions name, of all objects.
    pub fn all_live_bytes(&self) -> u64 {
        self.bytes
    }

    /// All that versions name, in no order.
    pub fn alive(&self) -> impl Iterator<Item = Alive<'_>> {
        self.refs.iter().map(|(name, known)| Alive { name, live: known.bytes, named: known.named })
    }

    pub fn is_referenced(&self, name: &str) -> bool {
        self.refs.contains_key(name)
    }

    pub fn is_garbage(&self, name: &str) -> bool {
        self.garbage.contains_key(name)
    }

    /// Of a copy that has none of it.
    pub(crate) fn forget_garbage(&mut self) {
        self.garbage.clear();
    }

    pub fn has_garbage(&self) -> bool {
        !self.garbage.is_empty()
    }

    /// All that is garbage, and since when.
    pub fn garbage(&self) -> impl Iterator<Item = (&str, Epoch)> {
        self.garbage.iter().map(|(name, since)| (name.as_str(), *since))
    }

    /// Objects that have been garbage since before `epoch`.
    pub fn garbage_before(&self, epoch: Epoch) -> Vec<String> {
        self.garbage.iter().filter(|(_, since)| **since < epoch).map(|(n, _)| n.clone()).collect()
    }

    /// Its deletion is logged.
    pub fn mark_deleted(&mut self, name: &str) {
        self.garbage.remove(name);
        let Some((incarnation, counter)) = parse(name) else { return };
        if self.covers(incarnation, counter) {
            return;
        }
        let mut from = counter;
        let mut to = counter;
        if let Some(next) = self.deleted.remove(&(incarnation, counter.saturating_add(1))) {
            to = next;
        }
        let before =
            self.deleted.range(..(incarnation, counter)).next_back().map(|(k, v)| (*k, *v));
        if let Some((key, end)) = before
            && key.0 == incarnation
            && end.checked_add(1) == Some(counter)
        {
            self.deleted.remove(&key);
            from = key.1;
        }
        self.deleted.insert((incarnation, from), to);
    }

    /// Whether the name was deleted and must not come back.
    pub fn is_deleted(&self, name: &str) -> bool {
        parse(name).is_some_and(|(incarnation, counter)| self.covers(incarnation, counter))
    }

    fn covers(&self, incarnation: u64, counter: u64) -> bool {
        self.deleted
            .range(..=(incarnation, counter))
            .next_back()
            .is_some_and(|(k, end)| k.0 == incarnation && counter <= *end)
    }

    /// Nothing of a fenced incarnation can be committed any more, so its deleted names need no memory.
    pub fn forget_deleted(&mut self, is_fenced: impl Fn(u64) -> bool) {
        self.deleted.retain(|k, _| !is_fenced(k.0));
    }

    pub fn garbage_snapshot(&self) -> BTreeMap<String, u64> {
        self.garbage.iter().map(|(n, e)| (n.clone(), e.0)).collect()
    }

    /// Incarnations of which deleted names are remembered.
    pub fn deleted_incarnations(&self) -> impl Iterator<Item = u64> {
        self.deleted.keys().map(|k| k.0)
    }

    pub fn deleted_snapshot(&self) -> Vec<CounterRange> {
        let range =
            |(k, to): (&(u64, u64), &u64)| CounterRange { incarnation: k.0, from: k.1, to: *to };
        self.deleted.iter().map(range).collect()
    }

    /// The counts are those of `versions`, and nothing is both alive and garbage or deleted.
    pub fn check<'a>(&self, versions: impl Iterator<Item = &'a JobVersion>) -> Result<(), String> {
        let mut counts: HashMap<&str, References> = HashMap::default();
        for (name, bytes) in versions.flat_map(references_of).filter(|(n, _)| !n.is_empty()) {
            let known = counts.entry(name).or_default();
            known.count += 1;
            known.bytes += bytes;
        }
        if counts.len() != self.refs.len()
            || counts.iter().any(|(name, known)| self.refs.get(*name) != Some(known))
        {
            return Err("reference counts differ from the versions".to_owned());
        }
        if counts.values().map(|known| known.bytes).sum::<u64>() != self.bytes {
            return Err("the bytes of all references differ from the versions".to_owned());
        }
        match self.refs.keys().find(|n| self.garbage.contains_key(*n) || self.is_deleted(n)) {
            Some(name) => Err(format!("\"{name}\" is in use and yet garbage or deleted")),
            None => Ok(()),
        }
    }
}

/// The objects a version names, and how many bytes of them each time; empty names (inline slices) included.
pub fn references_of(version: &JobVersion) -> impl Iterator<Item = (&str, u64)> {
    let runs = version.runs.iter().map(|r| (r.object.as_str(), r.length));
    let staged = version.publish.iter().flat_map(|p| &p.parts);
    runs.chain(version.tail.iter().chain(staged).map(|s| (s.object.as_str(), s.length)))
}

/// Incarnation and counter of `data/<incarnation>/<counter>.<extension>`. No other name is one of this store: another
/// store may lie below the prefix, with objects of its own.
pub fn parse(name: &str) -> Option<(u64, u64)> {
    let mut parts = name.strip_prefix(DATA_PREFIX)?.strip_prefix('/')?.split('/');
    let (incarnation, object) = (parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    let counter = object.split('.').next()?;
    Some((incarnation.parse().ok()?, counter.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(counter: u64) -> String {
        format!("data/3/{counter}.seg")
    }

    #[test]
    fn only_names_of_this_store_have_an_incarnation() {
        assert_eq!(parse("data/3/5.seg"), Some((3, 5)));
        for name in [
            "data/copy/data/3/5.seg",
            "data/7/data/3/5.seg",
            "copy/data/3/5.seg",
            "data/3",
            "data/3/x.seg",
            "database/3/5.seg",
        ] {
            assert_eq!(parse(name), None, "{name}");
        }
    }

    #[test]
    fn deleted_names_join_into_ranges_and_stay_deleted() {
        let mut objects = Objects::default();
        for counter in [5, 7, 6, 1, 9, 6] {
            objects.mark_deleted(&name(counter));
        }
        let ranges: Vec<_> = objects.deleted_snapshot().iter().map(|r| (r.from, r.to)).collect();
        assert_eq!(ranges, [(1, 1), (5, 7), (9, 9)]);
        assert!([1, 5, 6, 7, 9].into_iter().all(|c| objects.is_deleted(&name(c))));
        assert!([0, 2, 4, 8, 10].into_iter().all(|c| !objects.is_deleted(&name(c))));
        objects.forget_deleted(|incarnation| incarnation < 4);
        assert!(!objects.is_deleted(&name(5)));
    }

    #[test]
    fn the_last_reference_makes_garbage_and_a_new_one_takes_it_back() {
        let mut objects = Objects::default();
        objects.add(&name(1), 10);
        objects.add(&name(1), 5);
        objects.remove(&name(1), 10, Epoch(5));
        assert!(objects.garbage_before(Epoch::MAX).is_empty());
        assert_eq!((objects.live_bytes(&name(1)), objects.all_live_bytes()), (5, 5));
        objects.remove(&name(1), 5, Epoch(6));
        assert_eq!((objects.live_bytes(&name(1)), objects.all_live_bytes()), (0, 0));
        assert_eq!(objects.garbage_before(Epoch(6)), Vec::<String>::new());
        assert_eq!(objects.garbage_before(Epoch(7)), [name(1)]);
        objects.add(&name(1), 1);
        assert!(objects.garbage_before(Epoch::MAX).is_empty());
    }
}
