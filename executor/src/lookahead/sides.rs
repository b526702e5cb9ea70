//! The inputs of operators that are looked ahead of, when a job starts.

use std::sync::Arc;

use millrace_graph::lookahead::{Lookahead, Place, Subject};

use super::DELETED_PORT;
use super::chain::Chain;
use super::slack::{Side, Spot};

/// A node: its fragment and its number there.
type NodeId = (usize, usize);
/// An operator, and what of it.
type SideId = (NodeId, Subject);

/// See the module.
#[derive(Debug, Default)]
pub struct Sides(Vec<(SideId, Arc<Side>)>);

impl Sides {
    /// For lookaheads and the places of each. `is_own`: a lookahead is of the rows that its leaf reads; `is_free`: its
    /// place is not told, so that one that hides nothing may be left out.
    pub fn new(
        lookaheads: &[(Lookahead, Vec<Place>)],
        is_own: impl Fn(&Lookahead) -> bool,
        is_free: impl Fn(&Lookahead) -> bool,
    ) -> Sides {
        // With the rows that each is of.
        let mut all: Vec<(SideId, usize, Vec<Spot>)> = Vec::new();
        for (l, places) in lookaheads {
            let is_own = is_own(l);
            let found = places.iter().map(|place| Spot { is_own, place: *place });
            match all.iter_mut().find(|(known, ..)| *known == id_of(l)) {
                Some((.., known)) => {
                    let new: Vec<Spot> = found.filter(|spot| !known.contains(spot)).collect();
                    known.extend(new);
                }
                None => all.push((id_of(l), noted_port(l), found.collect())),
            }
        }
        let is_step = |id: SideId| {
            let ahead = |(l, _): &&(Lookahead, Vec<Place>)| id_of(l) == id && l.inside.is_none();
            let mut own = lookaheads.iter().filter(ahead).peekable();
            own.peek().is_some() && own.all(|(l, _)| l.chained.is_some() && is_free(l))
        };
        let side = |(id, input, mut spots): (SideId, usize, Vec<Spot>)| {
            // What a relation is made of is seen before it, and rows inside the job last.
            spots.sort_by_key(|spot| (spot.is_own, spot.place == Place::Input));
            let side = Side::new(input, spots).about(id.1);
            (id, Arc::new(if is_step(id) { side.chained() } else { side }))
        };
        Sides(all.into_iter().map(side).collect())
    }

    /// Tells each what is chained to the lookaheads by its rows: `chain` is of a number among these.
    pub fn set_chains(
        &self,
        lookaheads: &[(Lookahead, Vec<Place>)],
        chain: impl Fn(usize) -> Option<Arc<Chain>>,
    ) {
        for (id, side) in &self.0 {
            let own = lookaheads.iter().enumerate().filter(|(_, (l, _))| id_of(l) == *id);
            side.set_chains(own.filter_map(|(number, _)| chain(number)).collect());
        }
    }

    /// Of one operator.
    pub fn of_node(&self, node: NodeId) -> Vec<Arc<Side>> {
        let of_node = self.0.iter().filter(|((id, _), _)| *id == node);
        of_node.map(|(_, side)| Arc::clone(side)).collect()
    }

    /// That of a lookahead.
    pub fn of(&self, lookahead: &Lookahead) -> Option<Arc<Side>> {
        let found = self.0.iter().find(|(id, _)| *id == id_of(lookahead))?;
        Some(Arc::clone(&found.1))
    }
}

/// What rows of it are noted as: see [`super::slack::EpochNotes`].
fn noted_port(lookahead: &Lookahead) -> usize {
    if lookahead.deleted { DELETED_PORT } else { lookahead.input_port }
}

fn id_of(lookahead: &Lookahead) -> SideId {
    ((lookahead.fragment, lookahead.node), lookahead.subject())
}
