//! Lookup joins: what a left row has met is what there was at its epoch, whatever becomes of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::datatypes::{Field, Schema};
use datafusion::logical_expr::Operator as BinaryOp;
use datafusion::physical_expr::expressions::{BinaryExpr, Column};
use millrace_graph::state::matches_schema;
use millrace_graph::{JoinSide, Lookup, Matches, Node, Operator as Op, SideState};
use millrace_rpc::catalog::RowStorage;
use rand::Rng;
use rand::rngs::StdRng;

use super::fake::FakeTable;
use super::history::{History, Kind, Row, ZSet, add, schema, text};
use super::model::PLANTED;
use super::seeded;
use super::stateful::{Subject, delay, kind, random_options, run_epoch, show, storage};

/// What each copy of a left row has met, in the order they came.
type Met = BTreeMap<Row, Vec<ZSet<Vec<String>>>>;

struct Case {
    outer: bool,
    residual: bool,
}

fn line(r: &Row) -> Vec<String> {
    vec![show(r.0), show(r.1), text(r.2).unwrap_or("NULL".into()), r.3.to_string()]
}

impl Case {
    fn meet(&self, l: &Row, right: &ZSet<Row>) -> ZSet<Vec<String>> {
        let mut met = ZSet::new();
        for (r, weight) in right {
            let passes = !self.residual || matches!((l.1, r.1), (Some(a), Some(b)) if a < b);
            if l.0.is_some() && l.0 == r.0 && passes {
                add(&mut met, [line(l), line(r)].concat(), *weight);
            }
        }
        if met.is_empty() && self.outer {
            add(&mut met, [line(l), vec!["NULL".to_string(); 4]].concat(), 1);
        }
        met
    }

    /// Takes an epoch's left changes in; the right side is as it is at the end of the epoch.
    fn take(&self, met: &mut Met, left: &[(Row, i64)], right: &ZSet<Row>) {
        let mut net = ZSet::new();
        left.iter().for_each(|(row, weight)| add(&mut net, *row, *weight));
        for (row, weight) in net {
            let copies = met.entry(row).or_default();
            for _ in weight..0 {
                copies.pop();
            }
            copies.extend((0..weight).map(|_| self.meet(&row, right)));
        }
    }
}

fn subject(case: &Case, kinds: [Kind; 2], rng: &mut StdRng) -> Subject {
    let right = JoinSide {
        keys: vec![0],
        vnode: vec![0],
        state: SideState {
            table: 0,
            storage: storage(kinds[1]),
            unique_key: if kinds[1] == Kind::Keyed { vec![3] } else { vec![] },
            unique_per_key: false,
        },
    };
    let column = |name, c| Arc::new(Column::new(name, c));
    let expr = BinaryExpr::new(column("v", 1), BinaryOp::Lt, column("v", 5));
    let one = schema();
    let fields: Vec<Field> =
        one.fields().iter().chain(one.fields()).map(|f| f.as_ref().clone()).collect();
    let delay = delay(rng);
    Subject {
        node: Node {
            op: Op::Lookup(Lookup {
                outer: case.outer,
                left_keys: vec![0],
                left_vnode: vec![0],
                right,
                residual: case.residual.then(|| Arc::new(expr) as _),
                output: (0..fields.len()).collect(),
                matches: (kinds[0] != Kind::Append).then(|| Matches {
                    table: 1,
                    identity: storage(kinds[0]),
                    unique_key: if kinds[0] == Kind::Keyed { vec![3] } else { vec![] },
                }),
            }),
            inputs: vec![0, 1],
            schema: Arc::new(Schema::new(fields)),
            append_only: kinds[0] == Kind::Append,
            marks: vec![],
        },
        inputs: vec![schema(), schema()],
        tables: vec![
            FakeTable::new(schema(), storage(kinds[1]), delay),
            FakeTable::new(matches_schema(&schema()), RowStorage::Keyed, delay),
        ],
        options: random_options(rng),
        event_time: vec![],
    }
}

#[test]
fn left_rows_keep_what_they_met_at_their_epoch() {
    let _unplanted = PLANTED.read();
    for (seed, ref mut rng) in seeded(200, 2000) {
        let kinds = [kind(rng), kind(rng)];
        let case = Case { outer: rng.random_bool(0.5), residual: rng.random_bool(0.4) };
        let subject = subject(&case, kinds, rng);
        let mut histories = kinds.map(|k| History::new(k, 4));
        let (mut actual, mut met) = (ZSet::new(), Met::new());
        let mut op = subject.build();
        for epoch in 0..rng.random_range(1..8) {
            let right = histories[1].epoch(rng);
            let left = histories[0].epoch(rng);
            case.take(&mut met, &left, &histories[1].content);
            // The task brings the right side's rows first.
            let deltas = right.into_iter().map(|d| (1, d)).chain(left.into_iter().map(|d| (0, d)));
            let deltas = deltas.collect();
            futures::executor::block_on(run_epoch(op.as_mut(), deltas, rng, &mut actual, &subject));
            let mut expected = ZSet::new();
            for pairs in met.values().flatten() {
                pairs.iter().for_each(|(row, weight)| add(&mut expected, row.clone(), *weight));
            }
            assert_eq!(
                actual, expected,
                "seed {seed} epoch {epoch} {kinds:?} {:?}",
                subject.options
            );
            if rng.random_bool(0.3) {
                op = subject.restart(Some(op.as_ref()));
            }
        }
        // When all is taken back nothing stays behind.
        if kinds[0] != Kind::Append {
            let gone = histories[0].content.iter().map(|(row, weight)| (0, (*row, -weight)));
            let gone = gone.collect();
            futures::executor::block_on(run_epoch(op.as_mut(), gone, rng, &mut actual, &subject));
            assert_eq!(actual, ZSet::new(), "seed {seed}");
        }
        assert_eq!(subject.tables[1].len(), 0, "seed {seed}");
    }
}
