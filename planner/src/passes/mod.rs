//! Passes over the stream plan: each takes a tree and gives a tree, in a file of its own with its tests beside it.
//! What only reads properties off a tree (`properties`, `classes`, `watermark`) stands here too.

pub mod classes;
pub mod exchange;
pub mod identity;
pub mod properties;
pub mod prune;
pub mod rank;
pub mod share;
pub mod simplify;
pub mod ttl;
pub mod watermark;
mod window_close;

use millrace_common::SqlError;

use crate::stream::JobOptions;
use crate::stream::plan::Stream;

/// A rewrite of a job's stream plan.
pub trait Pass {
    /// As `EXPLAIN (PASSES)` shows it.
    fn name(&self) -> &'static str;

    fn run(&self, stream: Stream) -> Result<Stream, SqlError>;
}

/// A pass without settings.
pub struct Plain {
    pub name: &'static str,
    pub run: fn(Stream) -> Result<Stream, SqlError>,
}

impl Pass for Plain {
    fn name(&self) -> &'static str {
        self.name
    }

    fn run(&self, stream: Stream) -> Result<Stream, SqlError> {
        (self.run)(stream)
    }
}

/// The passes of a job whose result has so many visible columns, in the order they run. Exchanges are placed
/// after them.
pub fn passes(options: &JobOptions, visible: usize) -> Vec<Box<dyn Pass>> {
    let mut all: Vec<Box<dyn Pass>> = vec![
        Box::new(simplify::SIMPLIFY),
        Box::new(rank::LIMIT_RANKS),
        Box::new(rank::NUMBER_ROWS),
        Box::new(identity::AddIdentities),
        Box::new(prune::Prune),
        Box::new(simplify::SIMPLIFY),
    ];
    if let Some(ttl_us) = options.ttl_us {
        all.push(Box::new(ttl::ExpireInputs { ttl_us }));
    }
    if options.on_window_close {
        all.push(Box::new(window_close::CloseWindows { visible }));
    }
    all
}

#[cfg(test)]
mod tests;
