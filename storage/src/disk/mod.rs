//! Disk runs as sources of reads.
//!
//! A lookup asks key ranges first (in memory, from the version), then indexes and filters, then blocks.
//! If all of these are in memory it is answered at once. Else it reads all indexes that are missing in one
//! round (of large runs the top indexes, and the partitions that may answer in another), and blocks in as few as the
//! storage of the table allows:
//!
//! - Where weights add up (`Multiset`), and for prefixes and ranges, every run counts: one round of blocks.
//! - Of whole keys of other tables the newest entry decides. Each key asks the newest block that may hold it
//!   (`plan`), and those whose epochs do not prove them older; a key whose block did not have it goes on to the
//!   next. After two such rounds it asks all that is left: at most three rounds of blocks. Where asking all at
//!   once reads few blocks more, it is one round here too.
//!
//! Answers come in parts: what memory answers at once, the rest as its blocks arrive (`answer`).

mod answer;
mod plan;
mod scan;

use std::sync::Arc;

use arrow::array::Array;
use millrace_common::Epoch;
use millrace_rpc::catalog::RowStorage;
use millrace_rpc::version::RunMeta;

use crate::block::Block;
use crate::error::Result;
use crate::lookup::{Lookups, Recency, Sorted};
use crate::merge::rank;
use crate::reading::Lookup;
use crate::run::RunIndex;
use crate::state_store::Shared;
use crate::version::TableVersion;
use crate::writer::{EarlyRun, LookupRequest};

pub(crate) use scan::scan_all;

use answer::Answering;
use plan::{SortedKeys, Target};

/// What decoded blocks take against encoded ones, roughly.
const DECODED: u64 = 4;

fn rank_of(run: &RunMeta) -> u64 {
    rank(run.level, run.sequence)
}

/// Answers a question from memory (`lookups`) and disk runs: at once where blocks and indexes that matter are in
/// memory, else with what it takes to read them. `early`: runs that no version names.
pub(crate) fn ask(
    shared: &Arc<Shared>,
    table: &TableVersion,
    early: &[EarlyRun],
    question: LookupRequest,
    mut lookups: Lookups,
) -> Result<Lookup> {
    if let LookupRequest::Prefixes(asked, _) = &question {
        shared.prefixes(table.desc.id).note(asked);
    }
    let as_of = lookups.as_of;
    let visible = table.disk.iter().filter(|r| Epoch(r.meta().min_epoch) <= as_of);
    let visible = visible.map(|run| (run, None));
    let mut visible = visible.chain(early.iter().map(|(run, rank)| (run, Some(*rank)))).peekable();
    if visible.peek().is_none() || question.strings().is_empty() {
        return Ok(Lookup::Ready(question.answer(&lookups)?));
    }
    let asked = SortedKeys::new(&question)?;
    let newest_decides =
        matches!(question, LookupRequest::Keys(_)) && lookups.storage != RowStorage::Multiset;
    let found: Vec<Option<Recency>> = match newest_decides && !lookups.sources.is_empty() {
        true => lookups.newest(&asked.sorted),
        false => vec![None; asked.len()],
    };
    let mut targets = Vec::new();
    for (run, early) in visible {
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
