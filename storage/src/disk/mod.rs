//! Disk runs as sources of reads.
//!
//! A lookup asks key ranges first (in memory, from the version), then indexes and filters, then blocks.
//! If all of these are in memory it is answered at once. Else it reads all indexes that are missing in one
//! round (of large runs the partitions that may answer; where their descriptions lack the top indexes, these in a round
//! before), and blocks in as few as the storage of the table allows:
//!
//! - Where weights add up (`Multiset`), and for prefixes and ranges, every run counts: one round of blocks.
//! - Of whole keys of other tables the newest entry decides. Each key asks the newest block that may hold it
//!   (`plan`), and those whose epochs do not prove them older; a key whose block did not have it goes on to the
//!   next. After two such rounds it asks all that is left: at most three rounds of blocks. Where asking all at
//!   once reads few blocks more, at most one for each index that was missing, it is one round here too.
//!
//! Answers come in parts: what memory answers at once, the rest as its blocks arrive (`answer`).

mod answer;
mod plan;
mod scan;
mod windows;

use std::sync::Arc;

use arrow::array::Array;
use millrace_common::Epoch;
use millrace_rpc::catalog::RowStorage;
use millrace_rpc::version::RunMeta;

use crate::block::Block;
use crate::error::Result;
use crate::lookup::{Lookups, Recency, Sorted};
use crate::merge::rank;
use crate::reading::{Lookup, ReadClass};
use crate::run::{RunIndex, RunReader};
use crate::state_store::Shared;
use crate::version::TableVersion;
use crate::writer::{EarlyRun, LookupRequest};

pub(crate) use scan::scan_all;

use answer::Answering;
use plan::{SortedKeys, Target};
use windows::Windows;

/// What decoded blocks take against encoded ones, roughly.
const DECODED: u64 = 4;

fn rank_of(run: &RunMeta) -> u64 {
    rank(run.level, run.sequence)
}

/// Where a question is asked.
#[derive(Clone)]
struct Asking {
    shared: Arc<Shared>,
    table: Arc<TableVersion>,
    /// Runs that no version names.
    early: Vec<EarlyRun>,
}

/// Answers a question from memory (`lookups`) and disk runs: at once where blocks and indexes that matter are in
/// memory, else with what it takes to read them. `early`: runs that no version names.
pub(crate) fn ask(
    shared: &Arc<Shared>,
    table: &Arc<TableVersion>,
    early: &[EarlyRun],
    question: LookupRequest,
    lookups: Lookups,
) -> Result<Lookup> {
    if let LookupRequest::Prefixes(asked, _) = &question {
        shared.prefixes(table.desc.id).note(asked);
    }
    let asking =
        Asking { shared: Arc::clone(shared), table: Arc::clone(table), early: early.to_vec() };
    if asking.visible(lookups.as_of).next().is_none() || question.strings().is_empty() {
        return Ok(Lookup::Ready(question.answer(&lookups)?));
    }
    let asked = SortedKeys::new(&question)?;
    if asked.len() > windows::most_strings(shared) {
        return Ok(Windows::begin(asking, question, asked, lookups));
    }
    ask_sorted(&asking, question, asked, lookups, ReadClass::default())
}

impl Asking {
    /// The runs that may hold something, and of early ones their rank.
    fn visible(&self, as_of: Epoch) -> impl Iterator<Item = (&Arc<RunReader>, Option<u64>)> {
        let disk = self.table.disk.iter().filter(move |r| Epoch(r.meta().min_epoch) <= as_of);
        let early = self.early.iter().map(|(run, rank)| (run, Some(*rank)));
        disk.map(|run| (run, None)).chain(early)
    }
}

/// `asked`: the strings of the question. What is read is read in `class`.
fn ask_sorted(
    asking: &Asking,
    question: LookupRequest,
    asked: SortedKeys,
    mut lookups: Lookups,
    class: ReadClass,
) -> Result<Lookup> {
    let shared = &asking.shared;
    let as_of = lookups.as_of;
    let newest_decides =
        matches!(question, LookupRequest::Keys(_)) && lookups.storage != RowStorage::Multiset;
    let found: Vec<Option<Recency>> = match newest_decides && !lookups.sources.is_empty() {
        true => lookups.newest(&asked.sorted),
        false => vec![None; asked.len()],
    };
    let mut targets = Vec::new();
    for (run, early) in asking.visible(as_of) {
        let target = Target::of(run, early, &asked.sorted, &question);
        let Some(target) = target.map(|t| t.not_older_than(&found, as_of)).transpose()?.flatten()
        else {
            continue;
        };
        let opened = shared.cache.try_index(run);
        targets.extend(target.resolve(opened, &shared.cache, as_of)?);
    }
    if let Some(blocks) = in_memory(shared, &targets, as_of) {
        lookups.sources.extend(blocks);
        return Ok(Lookup::Ready(question.answer(&lookups)?));
    }
    let answering = Answering::new(
        Arc::clone(shared),
        question,
        asked,
        lookups,
        targets,
        found,
        newest_decides,
        class,
    );
    answering.start()
}

/// All blocks that matter, if all are decoded in memory and not so many that the answer should come in parts.
fn in_memory(
    shared: &Shared,
    targets: &[(Target, Option<Arc<RunIndex>>)],
    as_of: Epoch,
) -> Option<Vec<Sorted>> {
    let cache = &shared.cache;
    if targets.iter().any(|(_, index)| index.is_none()) {
        return None;
    }
    let mut bytes = 0;
    let mut sources = Vec::new();
    for of_run in targets.chunk_by(|a, b| a.0.shares_run(&b.0)) {
        let mut blocks: Vec<Arc<Block>> = Vec::new();
        for (target, index) in of_run {
            let index = index.as_ref()?;
            for block in target.blocks(index, as_of) {
                let block = cache.try_get(&target.run, index, block)?;
                bytes += block.memory;
                if bytes > shared.options.lookup_bytes {
                    return None;
                }
                blocks.push(block);
            }
        }
        sources.push(of_run[0].0.sorted(blocks.iter()));
    }
    Some(sources)
}
