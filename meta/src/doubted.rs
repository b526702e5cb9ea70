//! Addresses at which calls have reached nobody, although a process there told of itself (docs/design.md §10). One that
//! registers there anew is made use of when it has answered a call: otherwise jobs would move to it and fail, again
//! and again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_rpc::services::ComputeService;
use parking_lot::{Mutex, RwLock};
use tracing::info;

use crate::computes::answers;
use crate::state::MetaState;

/// Between two questions.
const PAUSE: Duration = Duration::from_secs(1);

/// By address, the incarnation of the process that is asked; 0: none has come since.
#[derive(Clone, Default)]
pub struct Doubted(Arc<Mutex<BTreeMap<String, u64>>>);

impl Doubted {
    /// Calls have not reached the process there.
    pub fn add(&self, address: String) {
        self.0.lock().insert(address, 0);
    }

    pub fn holds(&self, address: &str) -> bool {
        self.0.lock().contains_key(address)
    }

    /// A process is there. Whether it is to be asked from now on.
    pub fn begin(&self, address: &str, incarnation: u64) -> bool {
        let mut doubted = self.0.lock();
        let Some(asked) = doubted.get_mut(address) else { return false };
        std::mem::replace(asked, incarnation) != incarnation
    }

    /// The processes that are asked and live no more.
    pub fn take_fenced(&self, is_live: impl Fn(u64) -> bool) -> Vec<u64> {
        let mut doubted = self.0.lock();
        let fenced = doubted.values_mut().filter(|id| **id != 0 && !is_live(**id));
        fenced.map(std::mem::take).collect()
    }

    fn is_asked(&self, address: &str, incarnation: u64) -> bool {
        self.0.lock().get(address) == Some(&incarnation)
    }

    /// Asks a process until it answers, and is doubted no more, or is fenced.
    pub async fn ask(
        self,
        address: String,
        incarnation: u64,
        service: Arc<dyn ComputeService>,
        state: Arc<RwLock<MetaState>>,
    ) {
        info!(incarnation, address, "a process is asked whether calls reach it");
        let is_live = || state.read().processes.is_live(incarnation);
        while is_live() && self.is_asked(&address, incarnation) {
            if answers(&*service).await {
                self.0.lock().remove(&address);
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}
