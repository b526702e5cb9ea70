//! How long rows take whose state is in no cache: with hints, without, and as if nothing were cold.
//!
//! The state of a query, some times larger than the caches, is built once. Each mode runs on a copy of it, in a server
//! of its own with cold caches and the same memory, over a simulated store. Rows arrive at a fixed rate whatever
//! becomes of those before: see [`rate`] and [`groups`]. `visible` is the time from a row's arrival until it can be read in
//! the last view; `state_wait` from when a view could read the row until the view's epoch with it was sealed, which
//! contains the reads of cold state and no commit (over a chain of views, the sum). All modes must have the same result.
//!
//! A statement's rows are taken to be in the newest epoch of the table when it has its answer: where others were committed
//! before the answer arrived, their times are too long by these, in every mode.

pub mod adapt;
mod args;
mod arrivals;
mod bars;
mod compare;
mod groups;
mod invalid;
mod load;
mod modes;
mod operators;
mod queries;
mod rate;
mod report;
mod sparse;
mod times;
mod verdict;
mod world;

use std::time::Instant;

pub use self::args::{ABOUT, Args};
use self::compare::Comparison;
use self::world::World;

pub async fn run(args: &Args) -> Result<(), String> {
    let order = args.order()?;
    report::print_header();
    let (mut all, mut invalid) = (Vec::new(), 0);
    for query in &order.queries {
        let disk_tier = order.settings.iter().any(|s| s.disk_tier);
        let begun = Instant::now();
        let world = World::build(query, order.keys, order.parallelism, disk_tier).await?;
        eprintln!(
            "{}: {:.1} MB of state, built in {:.1} s",
            query.name,
            world.state as f64 / 1e6,
            begun.elapsed().as_secs_f64()
        );
        let modes = &order.plan.run;
        let left_out = modes.iter().filter(|mode| !world.offers(mode)).map(|mode| mode.name);
        let left_out: Vec<&str> = left_out.collect();
        if !left_out.is_empty() {
            eprintln!("{}: its plan has no place for {}", query.name, left_out.join(", "));
        }
        if left_out.len() == modes.len() {
            continue;
        }
        for setting in &order.settings {
            if order.settings.len() > 1 {
                println!("{} {}: {}", query.name, setting.label(), setting.title());
            }
            let begun = Instant::now();
            let comparison = Comparison { order: &order, world: &world, setting };
            let outcome = comparison.run().await?;
            invalid += outcome.invalid;
            all.extend(outcome.medians);
            eprintln!("{} {}: {:.1} s", query.name, setting.label(), begun.elapsed().as_secs_f64());
        }
    }
    bars::print(&bars::of_queries(&all))?;
    match invalid {
        0 => Ok(()),
        n => Err(format!("{n} runs do not measure what they should: see the lines with ERROR")),
    }
}
