//! What becomes of announced keys, as processes report it to each other.

use millrace_executor::lookahead::slack::{ReadTimes, SideSlack, Spot, SpotSlack};
use millrace_executor::lookahead::trial::Standing;
use millrace_executor::stats::{LookaheadMeasures, LookaheadStats};
use millrace_graph::lookahead::{Place, Subject};
use millrace_rpc::control::{
    LookaheadPlace, LookaheadReport, LookaheadStanding, LookaheadSubject, Quantiles, SideReport,
    SpotReport,
};

/// As it is sent.
pub(super) fn report(keys: &LookaheadStats, measures: &LookaheadMeasures) -> LookaheadReport {
    LookaheadReport {
        active: keys.active as u64,
        hinted: keys.hinted,
        hint_bytes: keys.hint_bytes,
        resident: keys.resident,
        prefetched: keys.prefetched,
        in_time: keys.in_time,
        late: keys.late,
        absent: keys.absent,
        unused: keys.unused,
        dropped: keys.dropped,
        stale: keys.stale,
        missed: keys.missed,
        demand_requests: measures.demand_requests,
        ahead_requests: measures.ahead_requests,
        sides: measures.sides.iter().map(side_report).collect(),
        epochs: measures.reads.epochs as u64,
        without_demand: measures.reads.without_demand,
        slowest: Some(quantiles_report(measures.reads.slowest)),
        by_watermark: measures.by_watermark,
    }
}

/// As it is shown.
pub(super) fn stats(report: LookaheadReport) -> (LookaheadStats, LookaheadMeasures) {
    let keys = LookaheadStats {
        active: report.active as usize,
        hinted: report.hinted,
        hint_bytes: report.hint_bytes,
        resident: report.resident,
        prefetched: report.prefetched,
        in_time: report.in_time,
        late: report.late,
        absent: report.absent,
        unused: report.unused,
        dropped: report.dropped,
        stale: report.stale,
        missed: report.missed,
    };
    let measures = LookaheadMeasures {
        sides: report.sides.into_iter().map(side).collect(),
        reads: ReadTimes {
            epochs: report.epochs as usize,
            without_demand: report.without_demand,
            slowest: quantiles(report.slowest),
        },
        demand_requests: report.demand_requests,
        ahead_requests: report.ahead_requests,
        by_watermark: report.by_watermark,
    };
    (keys, measures)
}

fn side_report(of: &SideSlack) -> SideReport {
    let spot = |of: &SpotSlack| SpotReport {
        is_own: of.spot.is_own,
        place: place_report(of.spot.place) as i32,
        epochs: of.epochs as u64,
        slack: Some(quantiles_report(of.quantiles)),
    };
    let spots = of.spots.iter().map(spot).collect();
    let subject = of.subject.map(subject_report);
    let standing = standing_report(of.standing) as i32;
    SideReport { port: of.port as u32, active: of.active as u32, spots, subject, standing }
}

fn side(of: SideReport) -> SideSlack {
    let spot = |of: SpotReport| SpotSlack {
        spot: Spot { is_own: of.is_own, place: place(of.place()) },
        epochs: of.epochs as usize,
        quantiles: quantiles(of.slack),
    };
    let standing = standing(of.standing());
    let spots = of.spots.into_iter().map(spot).collect();
    let subject = of.subject.map(subject);
    SideSlack { port: of.port as usize, subject, active: of.active as usize, spots, standing }
}

fn standing_report(standing: Standing) -> LookaheadStanding {
    match standing {
        Standing::Announced => LookaheadStanding::Announced,
        Standing::Compared => LookaheadStanding::Compared,
        Standing::TooLate => LookaheadStanding::TooLate,
    }
}

fn standing(standing: LookaheadStanding) -> Standing {
    match standing {
        LookaheadStanding::Announced => Standing::Announced,
        LookaheadStanding::Compared => Standing::Compared,
        LookaheadStanding::TooLate => Standing::TooLate,
    }
}

fn subject_report(of: Subject) -> LookaheadSubject {
    let (fragment, node) = of.leaf;
    LookaheadSubject {
        port: of.port as u32,
        deleted: of.deleted,
        leaf_fragment: fragment as u32,
        leaf_node: node as u32,
    }
}

fn subject(of: LookaheadSubject) -> Subject {
    let leaf = (of.leaf_fragment as usize, of.leaf_node as usize);
    Subject { port: of.port as usize, deleted: of.deleted, leaf }
}

fn place_report(place: Place) -> LookaheadPlace {
    match place {
        Place::Entry => LookaheadPlace::Entry,
        Place::Root => LookaheadPlace::Root,
        Place::Leaf => LookaheadPlace::Leaf,
        Place::Input => LookaheadPlace::Input,
    }
}

fn place(place: LookaheadPlace) -> Place {
    match place {
        LookaheadPlace::Entry => Place::Entry,
        LookaheadPlace::Root => Place::Root,
        LookaheadPlace::Leaf => Place::Leaf,
        LookaheadPlace::Input => Place::Input,
    }
}

fn quantiles_report([low, middle, high]: [Option<i64>; 3]) -> Quantiles {
    Quantiles { low, middle, high }
}

fn quantiles(of: Option<Quantiles>) -> [Option<i64>; 3] {
    let Quantiles { low, middle, high } = of.unwrap_or_default();
    [low, middle, high]
}

/// Values that differ from each other and from what is not told.
#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn keys() -> LookaheadStats {
        LookaheadStats {
            active: 40,
            hinted: 41,
            hint_bytes: 42,
            resident: 43,
            prefetched: 44,
            in_time: 45,
            late: 46,
            absent: 47,
            unused: 48,
            dropped: 49,
            stale: 50,
            missed: 51,
        }
    }

    pub fn measures() -> LookaheadMeasures {
        let spot = |is_own, place, low| SpotSlack {
            spot: Spot { is_own, place },
            epochs: 52,
            quantiles: [Some(low), Some(54), None],
        };
        let spots = vec![
            spot(true, Place::Entry, -53),
            spot(false, Place::Root, 0),
            spot(true, Place::Leaf, 55),
            spot(true, Place::Input, 56),
        ];
        let subject = Some(Subject { port: 62, deleted: true, leaf: (63, 64) });
        let side = |standing| {
            let spots = spots.clone();
            SideSlack { port: 1, subject, active: 2, spots, standing }
        };
        LookaheadMeasures {
            sides: vec![side(Standing::TooLate), side(Standing::Compared)],
            reads: ReadTimes {
                epochs: 56,
                without_demand: Some(0.57),
                slowest: [None, Some(58), Some(59)],
            },
            demand_requests: 60,
            ahead_requests: 61,
            by_watermark: true,
        }
    }
}
