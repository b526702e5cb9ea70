//! Parts of segments that lie in another object from now on.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_common::collections::HashMap;
use millrace_common::{Epoch, RelationId};
use millrace_rpc::log::{MoveParts, MovedPart};
use millrace_rpc::version::JobVersion;

use super::process::check_named;
use super::{Verdict, applied};
use crate::error::VoidReason;
use crate::objects::Objects;
use crate::state::MetaState;

/// Where parts of a job lay (object, offset, length), and the offset of each in the new object.
type Moves<'a> = HashMap<(&'a str, u64, u64), u64>;

/// Objects never change and their names are never used again, so a reference can be exchanged for one to a copy of the
/// same bytes whatever has happened to the job meanwhile: what it does not name any more is left out. A new object that
/// nothing names after that is garbage.
pub fn move_parts(state: &mut MetaState, entry: &MoveParts) -> Verdict {
    if entry.object.is_empty() || entry.parts.iter().any(|p| p.from_object.is_empty()) {
        return Err(VoidReason::Malformed);
    }
    check_named(state, &entry.object)?;
    let mut jobs: BTreeMap<u32, Moves> = BTreeMap::new();
    for part in &entry.parts {
        let MovedPart { job, from_object, from_offset, length, offset } = part;
        let moves = jobs.entry(*job).or_default();
        moves.insert((from_object.as_str(), *from_offset, *length), *offset);
    }
    let head = state.epoch;
    for (id, moves) in jobs {
        if let Some(job) = state.jobs.get_mut(&RelationId(id)) {
            let version = Arc::make_mut(&mut job.version);
            move_in(version, &moves, &entry.object, &mut state.objects, head);
        }
    }
    state.objects.discard(&entry.object, head);
    Ok(applied(state))
}

fn move_in(
    version: &mut JobVersion,
    moves: &Moves,
    target: &str,
    objects: &mut Objects,
    head: Epoch,
) {
    let mut move_one = |object: &mut String, offset: &mut u64, length: u64| {
        let Some(&moved) = moves.get(&(object.as_str(), *offset, length)) else { return };
        objects.add(target, length);
        objects.remove(object, length, head);
        target.clone_into(object);
        *offset = moved;
    };
    for run in &mut version.runs {
        move_one(&mut run.object, &mut run.offset, run.length);
    }
    let staged = version.publish.iter_mut().flat_map(|handle| &mut handle.parts);
    for slice in version.tail.iter_mut().chain(staged) {
        move_one(&mut slice.object, &mut slice.offset, slice.length);
    }
}
