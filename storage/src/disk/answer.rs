//! Answers of lookups that need I/O: parts, each for the strings whose blocks have come.
//!
//! Invariants: a string is in the queue, waits for reads, or is done until a part has it; a block is held while a
//! string that asked it is in no part. Blocks that are held or being read stay within the memory of a lookup
//! (`lookup_bytes`), unless one string alone needs more.

use std::collections::{BTreeMap, VecDeque};
use std::pin::pin;
use std::sync::Arc;

use futures::FutureExt;
use futures::StreamExt;
use futures::future::{BoxFuture, Either, select};
use futures::stream::FuturesUnordered;
use millrace_common::Epoch;
use millrace_common::collections::{HashMap, HashSet};

use super::DECODED;
use super::plan::{Place, Plan, SortedKeys, Target, to_ask};
use crate::block::Block;
use crate::cache::{Answer, BlockCache, BlockRequest, PartitionRequest, Piece, ReadOptions, plan};
use crate::error::{Result, StorageError};
use crate::lookup::{Lookups, Recency};
use crate::reading::{Lookup, Part, ReadClass, Reading};
use crate::run::{RunIndex, RunReader};
use crate::state_store::Shared;
use crate::writer::LookupRequest;

/// Rounds of blocks in which a string asks only what is newest; after them it asks all that is left.
const NARROW_ROUNDS: u8 = 2;

/// The number of a read that has not begun.
const UNREAD: u32 = u32::MAX;

type Indexes = Vec<(usize, Arc<RunIndex>)>;

/// What is known of a string.
#[derive(Clone, Default)]
struct Progress {
    /// The newest entry that was found.
    found: Option<Recency>,
    /// Of its candidates, newest first: those below `asked` have been asked, those from `from` on in the last round.
    from: u32,
    asked: u32,
    /// Rounds in which it had to wait.
    rounds: u8,
    /// Reads that it waits for.
    waits: u32,
}

/// A block that strings have asked.
struct Held {
    /// `None`: it is being read, by the read of this number.
    block: std::result::Result<Arc<Block>, u32>,
    /// Strings that asked it and are in no part yet.
    users: u32,
    bytes: u64,
}

/// Blocks that one request to the store brings.
struct Arrived {
    read: u32,
    blocks: Vec<(Place, Arc<Block>)>,
}

/// Indexes that are being read, all that the lookup needs in one round.
struct Loading {
    /// By target.
    loaded: BoxFuture<'static, Result<Indexes>>,
    opening: Vec<Arc<RunReader>>,
    partitions: Vec<PartitionRequest>,
}

/// A lookup on its way.
pub(super) struct Answering {
    shared: Arc<Shared>,
    question: LookupRequest,
    asked: SortedKeys,
    /// Over what is in memory beside blocks.
    lookups: Lookups,
    targets: Vec<Target>,
    indexes: Vec<Option<Arc<RunIndex>>>,
    /// Indexes that were missing.
    loading: Option<Loading>,
    /// How many indexes were read for this lookup.
    loaded: usize,
    plan: Plan,
    strings: Vec<Progress>,
    /// The newest entry of a string decides: see [`super::plan`].
    newest_first: bool,
    /// Of the reads that begin from now on.
    class: ReadClass,
    /// Strings that ask next, in order.
    queue: VecDeque<u32>,
    blocks: HashMap<Place, Held>,
    held_bytes: u64,
    reads: FuturesUnordered<BoxFuture<'static, Result<Arrived>>>,
    /// Strings that wait for each read.
    waiting: BTreeMap<u32, Vec<u32>>,
    next_read: u32,
    /// Strings that have all they asked for, to be looked at.
    answered: Vec<u32>,
    /// Strings for the next part.
    done: Vec<u32>,
    /// Strings that are in no part yet.
    open: usize,
}

impl Answering {
    /// `found`: what is found already of each string, beyond which `targets` are to be asked.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        shared: Arc<Shared>,
        question: LookupRequest,
        asked: SortedKeys,
        lookups: Lookups,
        targets: Vec<(Target, Option<Arc<RunIndex>>)>,
        found: Vec<Option<Recency>>,
        newest_first: bool,
        class: ReadClass,
    ) -> Answering {
        let (targets, indexes): (Vec<Target>, Vec<_>) = targets.into_iter().unzip();
        let count = asked.len();
        let plan = Plan::new(&targets, &indexes, count, lookups.as_of);
        let progress = |found| Progress { found, ..Progress::default() };
        Answering {
            shared,
            question,
            asked,
            lookups,
            targets,
            indexes,
            loading: None,
            loaded: 0,
            plan,
            strings: found.into_iter().map(progress).collect(),
            newest_first,
            class,
            queue: (0..count as u32).collect(),
            blocks: HashMap::default(),
            held_bytes: 0,
            reads: FuturesUnordered::new(),
            waiting: BTreeMap::new(),
            next_read: 0,
            answered: Vec::new(),
            done: Vec::new(),
            open: count,
        }
    }

    /// The answer, if memory has it after all, else its parts, the first of what memory has.
    pub fn start(mut self) -> Result<Lookup> {
        loop {
            self.look();
            if !self.settle() {
                break;
            }
        }
        if self.done.len() == self.open {
            let places = self.places_of(&self.done);
            self.add_sources(places);
            return Ok(Lookup::Ready(self.question.answer(&self.lookups)?));
        }
        self.prepare();
        let class = self.class.clone();
        let parts = futures::stream::try_unfold(Some(self), |answering| async move {
            let Some(mut answering) = answering else { return Ok(None) };
            let part = answering.next().await?;
            let rest = (!part.is_last).then_some(answering);
            Ok(Some((part, rest)))
        });
        Ok(Lookup::Pending(Reading::of_class(parts.boxed(), class)))
    }

    async fn next(&mut self) -> Result<Part> {
        loop {
            if let Some(Loading { loaded, .. }) = &mut self.loading {
                let loaded = match self.done.is_empty() {
                    true => {
                        let class = self.class.clone();
                        let loaded = match select(loaded, pin!(class.raised())).await {
                            Either::Left((loaded, _)) => Some(loaded),
                            Either::Right(_) => None,
                        };
                        if loaded.is_none() {
                            self.raise_indexes();
                            continue;
                        }
                        loaded
                    }
                    // Begins the reads, for which the strings of this part do not wait.
                    false => loaded.now_or_never(),
                };
                let part = if self.done.is_empty() { None } else { Some(self.part()?) };
                if let Some(loaded) = loaded {
                    self.loading = None;
                    self.take_indexes(loaded?)?;
                }
                if let Some(part) = part {
                    return Ok(part);
                }
                // Of large runs the top indexes come first, and partitions are missing then.
                continue;
            }
            self.ask()?;
            // Also has new reads begin.
            while let Some(Some(arrived)) = self.reads.next().now_or_never() {
                self.arrived(arrived?);
            }
            if self.settle() {
                continue;
            }
            if !self.done.is_empty() {
                return self.part();
            }
            let class = self.class.clone();
            match select(self.reads.next(), pin!(class.raised())).await {
                Either::Left((Some(arrived), _)) => self.arrived(arrived?),
                Either::Left((None, _)) => {
                    return Err(StorageError::internal("a lookup waits for nothing"));
                }
                Either::Right(_) => self.raise_reads(),
            }
        }
    }

    /// Begins to read what comes before blocks.
    fn prepare(&mut self) {
        self.load_indexes();
        if self.loading.is_none() {
            self.choose();
        }
    }

    /// Has indexes read that a string may need.
    fn load_indexes(&mut self) {
        let mut missing: Vec<u32> = self
            .queue
            .iter()
            .flat_map(|&s| {
                let progress = &self.strings[s as usize];
                let rest = &self.plan.candidates(s)[progress.asked as usize..];
                rest[..to_ask(rest, progress.found, true)].iter()
            })
            .filter(|c| c.block.is_none())
            .map(|c| c.target)
            .collect();
        missing.sort_unstable();
        missing.dedup();
        if missing.is_empty() {
            return;
        }
        let mut opening = Vec::new();
        let mut partitions = Vec::new();
        for &t in &missing {
            let target = &self.targets[t as usize];
            let run = Arc::clone(&target.run);
            match &target.partition {
                None => opening.push((t as usize, run)),
                Some((top, partition)) => {
                    let (top, partition) = (Arc::clone(top), *partition);
                    partitions.push((t as usize, PartitionRequest { run, top, partition }));
                }
            }
        }
        let (opened, opening): (Vec<usize>, Vec<_>) = opening.into_iter().unzip();
        let (parts, partitions): (Vec<usize>, Vec<_>) = partitions.into_iter().unzip();
        let (cache, class) = (Arc::clone(&self.shared.cache), self.class.clone());
        let asked = (opening.clone(), partitions.clone());
        let load = async move {
            let answers = begin_indexes(&cache, asked.0, asked.1, class.get());
            let indexes = Answer::all(answers).await?;
            Ok(opened.into_iter().chain(parts).zip(indexes).collect())
        };
        self.loading = Some(Loading { loaded: load.boxed(), opening, partitions });
    }

    /// Indexes that are being read become as urgent as the lookup is by now.
    fn raise_indexes(&self) {
        let Some(Loading { opening, partitions, .. }) = &self.loading else { return };
        let (cache, options) = (&self.shared.cache, self.class.get());
        // Whoever asks for what is being read joins that read.
        drop(begin_indexes(cache, opening.clone(), partitions.clone(), options));
    }

    /// Plans anew with indexes that have come. All strings that are in no part are in the queue.
    fn take_indexes(&mut self, indexes: Indexes) -> Result<()> {
        self.loaded += indexes.len();
        for (target, index) in indexes {
            self.indexes[target] = Some(index);
        }
        let targets = std::mem::take(&mut self.targets).into_iter();
        for (target, index) in targets.zip(std::mem::take(&mut self.indexes)) {
            let parts = match target.partition {
                None => target.resolve(index, &self.shared.cache, self.lookups.as_of)?,
                Some(_) => vec![(target, index)],
            };
            for (target, index) in parts {
                self.targets.push(target);
                self.indexes.push(index);
            }
        }
        self.plan = Plan::new(&self.targets, &self.indexes, self.strings.len(), self.lookups.as_of);
        for &string in &self.queue {
            // What was looked at without an end is looked at again: it was in memory a moment ago.
            let progress = &mut self.strings[string as usize];
            (progress.from, progress.asked) = (0, 0);
        }
        self.release_all();
        self.prepare();
        Ok(())
    }

    /// Whether to ask the newest first at all. Who has waited for indexes shall not wait for several rounds of blocks too:
    /// a block more costs less than each index that was read.
    fn choose(&mut self) {
        let found = |s: u32| self.strings[s as usize].found;
        let asking = self.queue.iter().copied();
        if self.newest_first && self.plan.is_nearly_all_newest(asking, found, self.loaded) {
            self.strings.iter_mut().for_each(|s| s.rounds = NARROW_ROUNDS);
        }
    }

    /// How many candidates a string asks next.
    fn next_candidates(&self, string: u32) -> usize {
        let progress = &self.strings[string as usize];
        let rest = &self.plan.candidates(string)[progress.asked as usize..];
        let all = !self.newest_first || progress.rounds >= NARROW_ROUNDS;
        to_ask(rest, progress.found, all)
    }

    /// The blocks that a string asks next; `None`: their run's index is missing.
    fn next_places(&self, string: u32) -> Option<Vec<Place>> {
        let from = self.strings[string as usize].asked as usize;
        let next = &self.plan.candidates(string)[from..from + self.next_candidates(string)];
        next.iter().map(|c| c.place()).collect()
    }

    fn request(&self, (target, block): Place) -> Option<BlockRequest> {
        let index = Arc::clone(self.indexes[target as usize].as_ref()?);
        Some(BlockRequest { run: Arc::clone(&self.targets[target as usize].run), index, block })
    }

    /// Decoded bytes of a block, roughly.
    fn bytes_of(&self, (target, block): Place) -> u64 {
        let range = self.indexes[target as usize].as_ref().map(|i| i.block_range(block));
        range.map_or(0, |r| (r.end - r.start) * DECODED)
    }

    fn try_block(&self, place: Place) -> Option<Arc<Block>> {
        let request = self.request(place)?;
        self.shared.cache.try_get(&request.run, &request.index, request.block)
    }

    fn most_bytes(&self) -> u64 {
        self.shared.options.lookup_bytes as u64
    }

    /// Decoded bytes that a string's blocks add to what is held.
    fn more_bytes(&self, places: &[Place]) -> u64 {
        let new = places.iter().filter(|p| !self.blocks.contains_key(p));
        new.map(|&p| self.bytes_of(p)).sum()
    }

    /// Lets the strings go on whose blocks are in memory.
    fn look(&mut self) {
        let mut absent: HashSet<Place> = HashSet::default();
        for string in std::mem::take(&mut self.queue) {
            let places = self.next_places(string);
            let fits =
                |places: &[Place]| self.held_bytes + self.more_bytes(places) <= self.most_bytes();
            let found: Option<Vec<_>> = places.filter(|p| fits(p)).and_then(|places| {
                let block = |place: Place| {
                    if let Some(held) = self.blocks.get(&place) {
                        return held.block.clone().ok().map(|b| (place, b));
                    }
                    if absent.contains(&place) {
                        return None;
                    }
                    let block = self.try_block(place);
                    if block.is_none() {
                        absent.insert(place);
                    }
                    block.map(|b| (place, b))
                };
                places.into_iter().map(block).collect()
            });
            match found {
                None => self.queue.push_back(string),
                Some(found) => {
                    let asked = found.len();
                    for (place, block) in found {
                        self.hold(place, || Ok(block));
                    }
                    self.note_asked(string, asked);
                    self.answered.push(string);
                }
            }
        }
    }

    /// Has strings ask, as many as memory allows.
    fn ask(&mut self) -> Result<()> {
        let most = self.most_bytes();
        // In large steps: blocks that lie together are read with one request.
        if !self.reads.is_empty() && self.held_bytes * 2 > most {
            return Ok(());
        }
        let (mut new, mut waits) = (Vec::new(), Vec::new());
        let mut is_first = self.reads.is_empty() && self.done.is_empty();
        while let Some(&string) = self.queue.front() {
            let Some(places) = self.next_places(string) else {
                return Err(StorageError::internal("a lookup asks a run without its index"));
            };
            let more = self.more_bytes(&places);
            if more > 0 && self.held_bytes + more > most && !is_first {
                break;
            }
            is_first = false;
            self.queue.pop_front();
            for &place in &places {
                let is_new = !self.blocks.contains_key(&place);
                let block = if is_new { self.try_block(place) } else { None };
                if is_new && block.is_none() {
                    new.push(place);
                }
                if !self.hold(place, || block.ok_or(UNREAD)) {
                    waits.push((string, place));
                }
            }
            self.note_asked(string, places.len());
            match waits.last() {
                Some(&(waits, _)) if waits == string => {
                    let rounds = &mut self.strings[string as usize].rounds;
                    *rounds = rounds.saturating_add(1);
                }
                _ => self.answered.push(string),
            }
        }
        self.read(new);
        for (string, place) in waits {
            self.wait_for(string, place);
        }
        Ok(())
    }

    /// Counts a string as a user of a block; `block`: where it is not held yet. Whether it is here.
    fn hold(
        &mut self,
        place: Place,
        block: impl FnOnce() -> std::result::Result<Arc<Block>, u32>,
    ) -> bool {
        let bytes = self.bytes_of(place);
        let held = self.blocks.entry(place).or_insert_with(|| {
            self.held_bytes += bytes;
            Held { block: block(), users: 0, bytes }
        });
        held.users += 1;
        held.block.is_ok()
    }

    fn note_asked(&mut self, string: u32, count: usize) {
        let progress = &mut self.strings[string as usize];
        progress.from = progress.asked;
        progress.asked += count as u32;
    }

    fn wait_for(&mut self, string: u32, place: Place) {
        let Some(&Held { block: Err(read), .. }) = self.blocks.get(&place) else { return };
        let waiting = self.waiting.entry(read).or_default();
        // The places of a string come one after the other.
        if waiting.last() != Some(&string) {
            waiting.push(string);
            self.strings[string as usize].waits += 1;
        }
    }

    /// Begins to read blocks. Each request to the store is an arrival of its own.
    fn read(&mut self, mut places: Vec<Place>) {
        if places.is_empty() {
            return;
        }
        places.sort_unstable();
        let requests: Vec<BlockRequest> = places.iter().filter_map(|&p| self.request(p)).collect();
        let groups = self.together(&requests);
        // All at once, so that the cache plans them as one round.
        let options = self.class.get();
        let begun = self.shared.cache.begin_fetch(requests, options);
        let mut answers: Vec<Option<Answer<Arc<Block>>>> = begun.into_iter().map(Some).collect();
        for group in groups {
            let read = self.next_read;
            self.next_read += 1;
            for &i in &group {
                if let Some(held) = self.blocks.get_mut(&places[i]) {
                    held.block = Err(read);
                }
            }
            let of_group: Vec<_> = group.iter().filter_map(|&i| answers[i].take()).collect();
            let of_places: Vec<Place> = group.iter().map(|&i| places[i]).collect();
            self.reads.push(Box::pin(async move {
                let blocks = Answer::all(of_group).await?;
                Ok(Arrived { read, blocks: of_places.into_iter().zip(blocks).collect() })
            }));
        }
    }

    /// Blocks that are being read become as urgent as the lookup is by now.
    fn raise_reads(&self) {
        let reading = self.blocks.iter().filter(|(_, held)| held.block.is_err());
        let requests = reading.filter_map(|(&place, _)| self.request(place)).collect();
        // Whoever asks for what is being read joins that read.
        drop(self.shared.cache.begin_fetch(requests, self.class.get()));
    }

    /// The requests that one read of the store answers, as the cache plans them.
    fn together(&self, requests: &[BlockRequest]) -> Vec<Vec<usize>> {
        let options = &self.shared.options.cache;
        let mut objects: BTreeMap<&str, Vec<Piece>> = BTreeMap::new();
        for (tag, request) in requests.iter().enumerate() {
            let range = request.run.block_range(&request.index, request.block);
            objects.entry(request.run.path().as_ref()).or_default().push(Piece { range, tag });
        }
        let reads = objects
            .into_values()
            .flat_map(|pieces| plan(pieces, options.join_gap, options.max_read_bytes));
        reads.map(|read| read.pieces.into_iter().map(|p| p.tag).collect()).collect()
    }

    fn arrived(&mut self, arrived: Arrived) {
        for (place, block) in arrived.blocks {
            if let Some(held) = self.blocks.get_mut(&place) {
                held.block = Ok(block);
            }
        }
        for string in self.waiting.remove(&arrived.read).unwrap_or_default() {
            let progress = &mut self.strings[string as usize];
            progress.waits -= 1;
            if progress.waits == 0 {
                self.answered.push(string);
            }
        }
    }

    /// Looks at strings that have what they asked for. Whether some must ask on.
    fn settle(&mut self) -> bool {
        let mut again: Vec<u32> = Vec::new();
        for string in std::mem::take(&mut self.answered) {
            let candidates = self.plan.candidates(string).len();
            if self.newest_first && (self.strings[string as usize].asked as usize) < candidates {
                self.search(string);
            }
            match self.next_candidates(string) {
                0 => self.done.push(string),
                _ => again.push(string),
            }
        }
        again.sort_unstable();
        again.iter().rev().for_each(|&string| self.queue.push_front(string));
        !again.is_empty()
    }

    /// Finds the newest entry of a string in the blocks of its last round.
    fn search(&mut self, string: u32) {
        let progress = &self.strings[string as usize];
        let round = progress.from as usize..progress.asked as usize;
        let (key, as_of) = (self.asked.sorted.value(string as usize), self.lookups.as_of);
        let found = self.plan.candidates(string)[round].iter().filter_map(|c| {
            let block = self.blocks.get(&c.place()?)?.block.as_ref().ok()?;
            let target = &self.targets[c.target as usize];
            // What no version names yet has no epoch, and is newer than all that has.
            let as_of = if target.is_early() { Epoch::MAX } else { as_of };
            Some(target.recency(block.entries.newest(key, as_of)?))
        });
        let found = found.max().max(progress.found);
        self.strings[string as usize].found = found;
    }

    /// The blocks that these strings asked, in order.
    fn places_of(&self, strings: &[u32]) -> Vec<Place> {
        let asked = |&s: &u32| {
            let asked = self.strings[s as usize].asked as usize;
            self.plan.candidates(s)[..asked].iter().filter_map(|c| c.place())
        };
        let mut places: Vec<Place> = strings.iter().flat_map(asked).collect();
        places.sort_unstable();
        places.dedup();
        places
    }

    /// Adds blocks, in order, to the sources of answers.
    fn add_sources(&mut self, places: Vec<Place>) {
        let target = |place: &Place| &self.targets[place.0 as usize];
        for of_run in places.chunk_by(|a, b| target(a).shares_run(target(b))) {
            let blocks = of_run.iter().filter_map(|p| self.blocks.get(p)?.block.as_ref().ok());
            let source = target(&of_run[0]).sorted(blocks);
            self.lookups.sources.push(source);
        }
    }

    /// The answer to all strings that are done.
    fn part(&mut self) -> Result<Part> {
        let mut strings = std::mem::take(&mut self.done);
        strings.sort_unstable();
        let question = self.asked.part(&self.question, &strings)?;
        let memory = self.lookups.sources.len();
        self.add_sources(self.places_of(&strings));
        let found = question.answer(&self.lookups);
        self.lookups.sources.truncate(memory);
        strings.iter().for_each(|&s| self.release(s));
        self.open -= strings.len();
        Ok(Part { asked: self.asked.positions(&strings), found: found?, is_last: self.open == 0 })
    }

    /// Lets go of the blocks that only this string asked.
    fn release(&mut self, string: u32) {
        let asked = self.strings[string as usize].asked as usize;
        for place in self.plan.candidates(string)[..asked].iter().filter_map(|c| c.place()) {
            let Some(held) = self.blocks.get_mut(&place) else { continue };
            held.users -= 1;
            if held.users == 0 {
                self.held_bytes -= held.bytes;
                self.blocks.remove(&place);
            }
        }
    }

    /// Lets go of all blocks. No string waits for one.
    fn release_all(&mut self) {
        self.blocks.clear();
        self.held_bytes = 0;
    }
}

/// Begins to read indexes.
fn begin_indexes(
    cache: &Arc<BlockCache>,
    opening: Vec<Arc<RunReader>>,
    partitions: Vec<PartitionRequest>,
    options: ReadOptions,
) -> Vec<Answer<Arc<RunIndex>>> {
    let mut answers = cache.begin_open(opening, options.clone());
    answers.extend(cache.begin_partitions(partitions, options));
    answers
}
