//! How a process that may lead opens the log.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use millrace_common::access::AccessClass;
use millrace_common::{EnvHandle, SqlError};
use millrace_rpc::log::ProcessRole;
use millrace_rpc::version::SliceRef;
use millrace_storage::given_up::GivenUp;
use millrace_storage::read_counts::TableReads;
use object_store::ObjectStore;

use crate::compact::{ReadsOfTable, TableClass};
use crate::gc::GcOptions;
use crate::log::SnapshotPolicy;
use crate::meta::Meta;
use crate::segments::RewriteOptions;
use crate::state::MetaState;

/// Whether a process may claim the lead, given the state that the log has.
pub type MayClaim = Box<dyn FnOnce(&MetaState) -> BoxFuture<'static, Result<(), SqlError>> + Send>;

/// How to open the log.
pub struct MetaOptions {
    pub store: Arc<dyn ObjectStore>,
    pub env: EnvHandle,
    /// Parallel tasks of a job's fragments.
    pub parallelism: usize,
    /// Events a source's epoch may hold: a reader keeps what it writes of one in memory.
    pub source_epoch_events: u64,
    /// Bytes of its inputs' changes that a job takes in at once: what it writes and emits of them is in memory until
    /// its commit.
    pub step_bytes: u64,
    /// Settings of the command line, below those set by SQL.
    pub settings: BTreeMap<String, String>,
    pub snapshots: SnapshotPolicy,
    /// How a state table is used. Standalone asks the state store; the default treats all alike.
    pub table_class: TableClass,
    /// How often the runs of a state table have been read since they were merged. Standalone asks the state store; by
    /// default all are read often. `None`: as the other processes tell.
    pub table_reads: Option<ReadsOfTable>,
    /// Whether a local reader still holds an object that the log has given up.
    pub pinned: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    /// What this process has written for nothing.
    pub given_up: Arc<GivenUp>,
    /// Whether this process runs all jobs itself; otherwise other processes register with it.
    pub alone: bool,
    /// It leads only if this is the log's last record; otherwise the error is [`is_overtaken`]. `None`: whatever it is.
    pub only_after: Option<u64>,
    /// Asked with the state that the log has, before the lead is claimed: an error keeps this process from it. The claim is
    /// made only while those may lead that could then; otherwise the error is [`is_overtaken`]. `None`: it may.
    pub may_claim: Option<MayClaim>,
    /// By which it registers; `None`: a random number. Not 0.
    pub nonce: Option<u64>,
    /// What this process does, and where others reach it; empty: nobody does.
    pub roles: Vec<ProcessRole>,
    pub address: String,
    /// How far its clock may be from the object store's and its peers' while it leads. `None`: any.
    pub max_clock_skew: Option<Duration>,
    pub gc: GcOptions,
    /// When segments with little live data are rewritten.
    pub rewrite: RewriteOptions,
    /// Told which tail slices all jobs will replay, as soon as the log is read: they can be fetched while
    /// the lead is taken.
    pub recovering: Option<Box<dyn FnOnce(Vec<SliceRef>) + Send>>,
    /// Told when the process leads, before anything runs.
    pub opened: Option<Box<dyn FnOnce(&Arc<Meta>) + Send>>,
}

impl MetaOptions {
    pub fn new(store: Arc<dyn ObjectStore>) -> MetaOptions {
        MetaOptions {
            store,
            env: EnvHandle::default(),
            parallelism: 2,
            source_epoch_events: crate::source::MAX_EVENTS,
            step_bytes: u64::MAX,
            settings: BTreeMap::new(),
            snapshots: SnapshotPolicy::default(),
            table_class: Arc::new(|_, _| AccessClass::PointUpdate),
            table_reads: Some(Arc::new(|_, _| TableReads::MANY)),
            pinned: Arc::new(|_| false),
            given_up: Arc::default(),
            alone: true,
            only_after: None,
            may_claim: None,
            nonce: None,
            roles: vec![
                ProcessRole::Meta,
                ProcessRole::Frontend,
                ProcessRole::Compute,
                ProcessRole::Compactor,
            ],
            address: String::new(),
            max_clock_skew: None,
            gc: GcOptions::default(),
            rewrite: RewriteOptions::default(),
            recovering: None,
            opened: None,
        }
    }
}
