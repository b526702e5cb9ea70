//! Looks once a second for processes that are to be fenced: that tell nothing, that no call reaches, that the object store
//! does not answer, or that apply no records. Where all are well, jobs may be moved to even loads.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::SqlError;
use millrace_common::task::spawn;
use millrace_rpc::log::{Entry, FenceProcess};
use tracing::warn;

use super::Cluster;
use crate::apply_lease::{ApplyLeases, Still};
use crate::store_waits::StoreWaits;

/// Between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// A look that comes later than this after the last one: this process itself has stood still.
const LATE: Duration = Duration::from_secs(3);

/// What looks have seen until now.
#[derive(Default)]
struct Looks {
    waits: StoreWaits,
    applies: ApplyLeases,
}

/// Whether one look has found some that another is to find again when it has its turn, which may be long in coming.
#[derive(Clone, Copy)]
struct Found {
    without_store: bool,
    still: bool,
}

impl Cluster {
    /// Until it is dropped.
    pub(super) async fn look_for_lost(self: Arc<Cluster>) {
        let (mut looked, mut looks) = (self.shared.env.now(), Looks::default());
        loop {
            tokio::time::sleep(LOOK).await;
            let now = self.shared.env.now();
            if now.saturating_duration_since(looked) > LATE {
                // What the others have told meanwhile may not have been read yet.
                self.shared.members.begin_again(now);
            }
            self.ask_if_unreached();
            self.rebalance();
            let (lost, number) = (self.lost(), self.shared.state.read().number);
            let is_settled = *self.settled.lock() == number && !self.has_come();
            let found = Found {
                without_store: !looks.waits.look(&self.shared).await.is_empty(),
                still: !looks.applies.look(&self.shared).await.is_empty(),
            };
            // A store that is slow to answer does not make what the others have told old. But it has its limit.
            looked = self.shared.env.now();
            if looked.saturating_duration_since(now) > LATE {
                self.shared.members.begin_again(looked);
                continue;
            }
            if lost.is_empty() && !found.without_store && !found.still && is_settled {
                continue;
            }
            if let Err(error) = self.fence_lost(&mut looks, found).await {
                warn!(%error, "not all that processes need was done, trying again");
            }
        }
    }

    /// Fences the processes that are lost, or that this look has found, and does what else is left to do.
    async fn fence_lost(&self, looks: &mut Looks, found: Found) -> Result<(), SqlError> {
        let _one = self.turn.lock().await;
        self.fence_found(looks, found).await?;
        let lost = self.lost();
        if !lost.is_empty() {
            let cut_off = self.doubt_cut_off();
            match lost.iter().all(|id| cut_off.contains(id)) {
                true => warn!(incarnations = ?lost, "processes have answered no call for too long"),
                false => warn!(incarnations = ?lost, "processes have told nothing for too long"),
            }
            self.append(Entry::FenceProcess(FenceProcess { incarnations: lost })).await?;
        }
        let number = self.shared.state.read().number;
        if *self.settled.lock() == number && !self.has_come() {
            return Ok(());
        }
        self.settle().await
    }

    /// Fences whom the looks find once more.
    async fn fence_found(&self, looks: &mut Looks, found: Found) -> Result<(), SqlError> {
        if found.without_store {
            let incarnations = looks.waits.look(&self.shared).await;
            if !incarnations.is_empty() {
                warn!(?incarnations, "the object store has not answered processes for too long");
                self.append(Entry::FenceProcess(FenceProcess { incarnations })).await?;
            }
        }
        if found.still {
            let still = looks.applies.look(&self.shared).await;
            for Still { incarnation, record } in &still {
                warn!(incarnation, record, "a process has not applied a record for too long");
            }
            let incarnations: Vec<u64> = still.iter().map(|s| s.incarnation).collect();
            if !incarnations.is_empty() {
                self.append(Entry::FenceProcess(FenceProcess { incarnations })).await?;
            }
        }
        Ok(())
    }

    /// The processes that calls do not reach: nor may they reach who begins anew there.
    fn doubt_cut_off(&self) -> Vec<u64> {
        let state = self.shared.state.read();
        let cut_off = self.shared.members.cut_off(&state.processes, self.shared.env.now());
        let live = state.processes.live().iter().filter(|(id, _)| cut_off.contains(id));
        live.for_each(|(_, process)| self.doubted.add(process.registration.address.clone()));
        cut_off
    }

    /// Whether a process is doubted no more that is not made use of yet.
    pub(super) fn has_come(&self) -> bool {
        let (state, known) = (self.shared.state.read(), self.known.lock());
        let own = self.shared.incarnation.get();
        let mut new = state.processes.live().iter().filter(|(id, _)| !known.contains(id));
        new.any(|(id, p)| own != Some(id) && !self.doubted.holds(&p.registration.address))
    }

    pub(super) fn lost(&self) -> Vec<u64> {
        let state = self.shared.state.read();
        let now = self.shared.env.now();
        let mut lost = self.shared.members.lost(&state.processes, now);
        lost.extend(self.shared.members.cut_off(&state.processes, now));
        lost.sort_unstable();
        lost.dedup();
        lost.retain(|id| self.shared.incarnation.get() != Some(id));
        lost
    }

    /// Where a call has not reached a process, all are asked whether calls do. So neither that one nor the others, which
    /// tell whether it is this process that is cut off, wait for a call that somebody needs.
    fn ask_if_unreached(&self) {
        if !self.shared.members.is_any_unreached(&self.shared.state.read().processes) {
            return;
        }
        for incarnation in self.computes.incarnations() {
            let (shared, computes) = (Arc::clone(&self.shared), Arc::clone(&self.computes));
            let asking = async move {
                let began = shared.env.now();
                let is_answered = computes.is_reached(incarnation).await;
                let now = shared.env.now();
                shared.members.note_question(incarnation, is_answered, began, now);
            };
            let shutdown = self.shared.shutdown.clone();
            spawn("ask whether calls arrive", shutdown.run_until_cancelled_owned(asking));
        }
    }
}
