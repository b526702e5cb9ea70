//! The symmetric hash join (docs/design.md §3, §7): a pairing core and a policy.
//!
//! - [`pairing`]: keeps the rows of both sides by join key and finds the pairs that match. It is the same for all
//!   joins.
//! - [`policy`]: what the kind of a join decides: inner, outer, semi and anti, mark, null-aware, lookup.
//! - [`emitter`]: the columns in which rows leave, as the policy says.
//! - [`lookup`]: lookup joins; where left rows may be retracted, what they met is stored ([`retractions`]).
//!
//! Pairs are the bilinear part. What outer, semi, anti and mark joins add is a function of one row of a *preserved*
//! side and whether it has matches: its contribution. Invariant: `MatchState::emitted` (and `emitted_as`) is exactly
//! what was emitted for the row so far; at the barrier every row whose weight, or whose matches, have changed is
//! settled: old out, new in, only if different. Whether a row has matches is its key's total weight on the other side,
//! or with a residual the row's own *degree*, the weight of matching rows. Totals and degrees are sums, so order and
//! weights do not matter. Neither is stored: they follow from both sides' rows when a key is loaded.
//!
//! NULL keys match nothing (unless they are equal by declaration) and are never stored. A null-aware join (NOT IN)
//! has all rows in one slot and compares keys in three-valued logic: exact, for the modest sizes it is
//! used with; its fragment is a singleton.

mod emitter;
pub mod lookup;
mod pairing;
mod policy;
mod retractions;

use std::collections::BTreeMap;

use arrow::array::BooleanArray;
use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::access::RetentionBy;
use millrace_common::fault_injection::is_planted;
use millrace_common::{DeltaChunk, Epoch};
use millrace_storage::MemRun;

use self::emitter::{Emitter, OutputColumns};
use self::pairing::{JoinSpec, PairingCore};
#[cfg(test)]
pub(super) use self::pairing::{MAX_NOTES, STEP_CHUNKS};
use self::policy::{MatchStatus, NullKeys, Policy};
use super::{BuildContext, Built, Env, Tables};
use crate::error::ExecError;
use crate::lookahead::Hint;
use crate::operator::{Operator, Output};

/// See the module.
pub struct HashJoin {
    core: PairingCore,
    emitter: Emitter,
}

/// Builds the operator of a node. Fails where the graph does not fit it.
pub fn build(p: &millrace_graph::Join, ctx: BuildContext<'_>) -> Built {
    let inputs = [ctx.input(0)?, ctx.input(1)?];
    let spec = JoinSpec {
        sides: [&p.left, &p.right],
        inputs: [&inputs[0], &inputs[1]],
        residual: p.residual.as_ref(),
        null_equals_null: p.null_equals_null,
        output: p.output.clone(),
        schema: &ctx.node.schema,
    };
    let made = HashJoin::new(policy::of(p, ctx.node.append_only), spec, ctx.env, ctx.tables)?;
    Ok(Box::new(made))
}

impl HashJoin {
    fn new(
        policy: Box<dyn Policy>,
        spec: JoinSpec<'_>,
        env: Env,
        tables: Tables<'_>,
    ) -> Result<HashJoin, ExecError> {
        let core = PairingCore::new(policy.as_ref(), &spec, env, tables)?;
        let output = OutputColumns {
            left_width: spec.left_width(),
            schema: super::nullable(spec.schema),
            positions: spec.output,
        };
        Ok(HashJoin { core, emitter: Emitter::new(policy, output) })
    }

    /// Takes out rows with a NULL in their key where they match nothing.
    fn split_nulls(
        &self,
        port: usize,
        chunk: DeltaChunk,
        out: &mut Output,
    ) -> Result<DeltaChunk, ExecError> {
        let rules = self.core.rules();
        if rules.null_keys[port] == NullKeys::Paired || is_planted("null-keys-match") {
            return Ok(chunk);
        }
        let Some(valid) = self.core.non_null(port, &chunk) else { return Ok(chunk) };
        if rules.null_keys[port] == NullKeys::Emitted {
            let nulls = chunk.filter(&BooleanArray::new(!&valid, None))?;
            let contribution = rules.contribution(MatchStatus::Unmatched);
            self.emitter.emit_alike(port, &nulls, contribution, out)?;
        }
        Ok(chunk.filter(&BooleanArray::new(valid, None))?)
    }
}

impl Operator for HashJoin {
    fn push(&mut self, port: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        let mut chunk = self.split_nulls(port, chunk, out)?;
        if port == 0 && is_planted("drop-retraction") {
            let kept = (0..chunk.num_rows()).map(|row| Some(chunk.weight(row) > 0));
            chunk = chunk.filter(&kept.collect())?;
        }
        if chunk.is_empty() {
            return Ok(());
        }
        self.core.take_in(port, chunk, &self.emitter, out)
    }

    fn shed(&mut self, _: &mut Output) -> Result<(), ExecError> {
        self.core.shed()
    }

    fn is_full(&self) -> bool {
        self.core.is_full()
    }

    fn is_pending(&self) -> bool {
        self.core.is_pending()
    }

    fn hint(&mut self, port: usize, hint: &Hint) -> Result<(), ExecError> {
        self.core.hint(port, hint)
    }

    fn is_prefetching(&self) -> bool {
        self.core.is_prefetching()
    }

    fn progress<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        self.core.advance(&self.emitter, out).boxed()
    }

    fn retain(&mut self, table: usize, by: RetentionBy, bound: i64) {
        self.core.retain(table, by, bound);
    }

    fn watermark(&mut self, port: usize, columns: &[(usize, i64)]) {
        self.core.watermark(port, columns);
    }

    fn time(&mut self, epoch: Epoch) {
        self.core.pass(epoch);
    }

    fn barrier<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move { self.core.end_epoch(&self.emitter, out) }.boxed()
    }

    fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        self.core.seal(sealed)
    }

    fn counters(&self, out: &mut BTreeMap<String, u64>) {
        self.core.counters(out);
    }

    fn memory_size(&self) -> usize {
        self.core.memory_size()
    }
}
