//! The way from the leader to the processes that have registered.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millrace_common::SqlError;
use millrace_meta::Connect;
use millrace_rpc::call_error::CallError;
use millrace_rpc::remote::{Admission, CallLimits, Identity, Peer, RemoteCompactor, RemoteCompute};
use millrace_rpc::services::{CompactorService, ComputeService};

/// See the module.
pub struct Peers {
    pub identity: Arc<Identity>,
    pub admission: Arc<Admission>,
    /// How many processes this leader has fenced.
    pub fenced: Arc<AtomicU64>,
}

impl Peers {
    fn peer(&self, address: &str, incarnation: u64) -> Result<Peer, SqlError> {
        let peer = Peer::new(address, Arc::clone(&self.identity), CallLimits::default());
        Ok(peer.map_err(|e: CallError| SqlError::from(e))?.of_incarnation(incarnation))
    }
}

impl Connect for Peers {
    fn compute(
        &self,
        address: &str,
        incarnation: u64,
    ) -> Result<Arc<dyn ComputeService>, SqlError> {
        Ok(Arc::new(RemoteCompute::new(self.peer(address, incarnation)?)))
    }

    fn compactor(
        &self,
        address: &str,
        incarnation: u64,
    ) -> Result<Arc<dyn CompactorService>, SqlError> {
        Ok(Arc::new(RemoteCompactor::new(self.peer(address, incarnation)?)))
    }

    fn fenced(&self, incarnation: u64) {
        self.admission.fence(incarnation);
        self.fenced.fetch_add(1, Ordering::Relaxed);
    }
}
