//! Values that DISTINCT counts: they are announced beside the groups, and change no view.

use std::collections::BTreeSet;

use millrace_graph::ValueTable;
use millrace_graph::state::accumulator_schema;

use super::lookahead::{cold, counted, counts};
use super::*;
use crate::options::LookaheadMode;

/// Rounds of [`statement`] after which each group has come.
const ALL_GROUPS: i64 = 15;

/// `SELECT v, count(DISTINCT id) FROM input GROUP BY v`
fn distinct(input: JobId) -> JobGraph {
    let mut graph = counted(input);
    let Op::Aggregate(aggregate) = &mut graph.fragments[1].nodes[1].op else {
        panic!("it counts rows")
    };
    for call in &mut aggregate.calls {
        (call.arg, call.distinct) = (Some(0), true);
        call.state = Some(ValueTable { table: 2, descending: false });
    }
    graph.tables[1].value_schema = accumulator_schema(&[1], &aggregate.calls, &schema());
    graph.tables.push(StateTable {
        name: "distinct values".to_string(),
        class: AccessClass::PointUpdate,
        value_schema: Arc::new(Schema::new(vec![schema().field(0).clone()])),
        storage: RowStorage::Multiset,
        relation: false,
        retention: None,
    });
    graph
}

/// New rows of 30 of 100 groups.
fn statement(round: i64) -> impl Iterator<Item = (i64, i64)> {
    (0..30).map(move |i| (round * 100 + i, (round * 7 + i) % 100))
}

#[tokio::test]
async fn values_are_read_ahead_where_all_groups_are_in_memory() {
    for parallelism in [1, 2, 7] {
        let options = ExecOptions { cache_bytes: 1 << 20, ..cold(LookaheadMode::Entry) };
        let (c, t) = Cluster::with_table(options).await;
        let v = c.view(2, t, distinct(t), parallelism).await;
        c.catch_up(v).await;
        let mut prefetched = 0;
        for round in 0..2 * ALL_GROUPS {
            if round == ALL_GROUPS {
                prefetched = c.lookahead(v).prefetched;
            }
            c.insert(t, statement(round)).await;
            c.follow(v, t).await;
            // No id comes twice.
            assert_eq!(c.rows(v).await, counts(&c.rows(t).await), "round {round}");
        }
        let told = c.lookahead(v);
        assert!(told.active > 0 && told.prefetched > prefetched, "{prefetched}: {told:?}");
        // The groups and the values are told apart, though rows of one input bring both.
        let sides = c.measures(v).sides;
        let ports = sides.iter().filter_map(|side| Some((side.port, side.subject?.port)));
        assert_eq!(ports.collect::<BTreeSet<_>>(), BTreeSet::from([(0, 0), (0, 1)]));
        assert_eq!(sides.len(), 2, "{sides:?}");
    }
}

#[tokio::test]
async fn hints_of_values_are_advice_only() {
    for parallelism in [1, 3] {
        let options = ExecOptions::default().with_random_hints();
        let (c, t) = Cluster::with_table(options).await;
        let v = c.view(2, t, distinct(t), parallelism).await;
        c.catch_up(v).await;
        for round in 0..20 {
            c.churn(t, round).await;
            c.follow(v, t).await;
            assert_eq!(c.rows(v).await, counts(&c.rows(t).await), "{parallelism} {round}");
        }
        assert!(c.lookahead(v).hinted > 0);
    }
}
