//! Which store a process of a cluster works on, as it tells the others: the id that its log has.

use millrace_meta::LogFollower;
use millrace_rpc::remote::{Admission, Identity};
use millrace_rpc::store_id::StoreId;
use tracing::field::{DisplayValue, display};

/// Calls name the store that the log is of, and those of processes that work on another one are refused, from when on its
/// log is known to have an id. Whether that is news.
pub fn tell_store(log: &LogFollower, identity: &Identity, admission: &Admission) -> bool {
    let Some(store) = log.store_id() else { return false };
    admission.set_store(store);
    identity.set_store(store)
}

/// For the log.
pub fn shown(store: Option<StoreId>) -> Option<DisplayValue<StoreId>> {
    store.map(display)
}
