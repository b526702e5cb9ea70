//! Operators over tables in memory, with random settings and, maybe, random hints.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arrow::datatypes::SchemaRef;
use millrace_common::{EnvHandle, Epoch};
use millrace_graph::Node;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::fake::FakeTable;
use crate::error_sink::ErrorSink;
use crate::lookahead::operator::OperatorLookahead;
use crate::lookahead::random_hints::RandomHints;
use crate::memory::MemoryGovernor;
use crate::operator::Operator;
use crate::operators::{Env, build_with};
use crate::options::{Eviction, ExecOptions, StateAccess};
use crate::sequence::first_arrival;
use crate::state::StateTable;
use crate::stats::OperatorMetrics;

/// How long keys are collected unless a test says otherwise.
const COLLECTED: Duration = Duration::from_millis(1);

/// A node with its inputs and tables; it can be built again over the same tables.
pub(super) struct Subject {
    pub node: Node,
    pub inputs: Vec<SchemaRef>,
    pub tables: Vec<FakeTable>,
    pub options: ExecOptions,
    /// By input port.
    pub event_time: Vec<Option<usize>>,
}

impl Subject {
    pub fn build(&self) -> Box<dyn Operator> {
        self.restart(None)
    }

    /// An instance that goes on after what another has committed.
    pub fn restart(&self, before: Option<&dyn Operator>) -> Box<dyn Operator> {
        self.restart_before(before, &Arc::default())
    }

    /// [`Self::restart`], of an instance that shares this with walkers.
    pub fn restart_before(
        &self,
        before: Option<&dyn Operator>,
        walkers: &Arc<OperatorLookahead>,
    ) -> Box<dyn Operator> {
        let mut counters = BTreeMap::new();
        if let Some(before) = before {
            before.counters(&mut counters);
        }
        let mut options = self.options.clone();
        if !options.random_hints && options.prefetch_window == COLLECTED {
            // Tests that step through it let reads complete that have been asked for.
            options.prefetch_window = Duration::ZERO;
        }
        let env = Env {
            options: Arc::new(options),
            errors: Arc::new(ErrorSink::default()),
            metrics: OperatorMetrics::new(0, 0, "test"),
            clock: EnvHandle::default(),
            governor: MemoryGovernor::new(1 << 30),
            lookahead: Arc::clone(walkers),
            shed: Arc::default(),
            vnodes: 0..256,
            event_time: self.event_time.clone(),
            restored: Epoch::ZERO,
            first_arrival: first_arrival(&counters),
        };
        let mut tables = |t: usize| Ok(Box::new(self.tables[t].clone()) as Box<dyn StateTable>);
        let operator = build_with(&self.node, &self.inputs, env, &mut tables).unwrap();
        if !self.options.random_hints {
            return operator;
        }
        let random = Random(Mutex::new(StdRng::seed_from_u64(self.options.chunk_rows as u64)));
        let random = EnvHandle::new(random);
        RandomHints::around(operator, &self.node, &random)
    }
}

/// Random numbers of a seed.
struct Random(Mutex<StdRng>);

impl millrace_common::env::Env for Random {
    fn now_ms(&self) -> u64 {
        0
    }

    fn since_boot(&self) -> Duration {
        Duration::ZERO
    }

    fn random(&self) -> u64 {
        self.0.lock().random()
    }
}

/// They have random numbers of their own: another option does not change a seed's rows.
pub(super) fn random_options(rng: &mut StdRng) -> ExecOptions {
    let rng = &mut StdRng::seed_from_u64(rng.random());
    ExecOptions {
        parked_rows: rng.random_range(1..20),
        cache_bytes: if rng.random_bool(0.5) { rng.random_range(1..3_000) } else { 1 << 20 },
        group_change_bytes: if rng.random_bool(0.3) { 1 } else { 1 << 20 },
        chunk_rows: rng.random_range(1..10),
        random_hints: rng.random_bool(0.5),
        state_access: if rng.random_bool(0.3) {
            StateAccess::Synchronous
        } else {
            StateAccess::Asynchronous
        },
        eviction: [Eviction::Timestamp, Eviction::Lru, Eviction::Clock][rng.random_range(0..3)],
        ..ExecOptions::default()
    }
}
