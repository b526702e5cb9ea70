//! Promises of the operators with state, as properties: for random histories, chunkings, epochs,
//! cache sizes and orders of completion, the output accumulated at every barrier is the query over the
//! input accumulated so far; synchronous and asynchronous state access agree; nothing stays behind.

mod closing;
mod closing_sessions;
mod collected;
mod eviction;
pub(in crate::operators) mod fake;
mod hints;
mod history;
mod keyed;
mod lookup;
pub(crate) mod model;
mod on_arrival;
mod one_side;
pub(in crate::operators) mod prefixes;
mod stateful;
mod steps;
mod subject;
mod values;

use millrace_common::random_tests;
use rand::SeedableRng;
use rand::rngs::StdRng;

/// The seeds of a test of random cases, with their random numbers: `short` of them, in the long form `long`.
fn seeded(short: u32, long: u32) -> impl Iterator<Item = (u64, StdRng)> {
    let seeds = 0..u64::from(random_tests::cases(short, long));
    seeds.map(|seed| (seed, StdRng::seed_from_u64(seed)))
}
