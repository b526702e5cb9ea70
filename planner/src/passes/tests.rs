//! Small plans for the passes' tests: a table `(a BIGINT key, b BIGINT, c TEXT)`.

use std::sync::Arc;

use arrow::compute::SortOptions;
use arrow::datatypes::DataType;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::conjunction;
use datafusion::physical_expr::expressions::{BinaryExpr, lit};
use millrace_common::SqlType;
use millrace_functions::aggregate_kind::AggFunc;
use millrace_functions::expr;
use millrace_functions::expr::ExprRef;
use millrace_functions::window_call::RankFunction;
use millrace_graph::JoinKind;
use millrace_rpc::catalog::{Column, Relation, RelationKind, RowStorage};

use crate::stream::plan::{Call, Identity, Join, JoinSide, Named, Op, Scan, Stream, TopN};

pub fn table() -> Stream {
    let column = |name: &str, t: SqlType, nullable| Column {
        name: name.into(),
        sql_type: t.into(),
        nullable,
        ..Column::default()
    };
    let relation = Arc::new(Relation {
        id: 16384,
        name: "t".into(),
        kind: RelationKind::Table as i32,
        columns: vec![
            column("a", SqlType::BigInt, false),
            column("b", SqlType::BigInt, true),
            column("c", SqlType::Text, true),
        ],
        key: vec![0],
        distribution: vec![0],
        storage: RowStorage::Keyed as i32,
        ..Relation::default()
    });
    let schema = relation.arrow_schema().unwrap();
    Stream::scan(relation, schema, vec![0, 1, 2])
}

/// `row_number() OVER (PARTITION BY b ORDER BY a)`, unlimited.
pub fn ranked(input: Stream) -> Stream {
    input.top_n(TopN {
        group: vec![1],
        order: vec![(0, SortOptions::default())],
        offset: 0,
        limit: None,
        rank: RankFunction::RowNumber,
        emit_rank: true,
        vnode: vec![],
        state: Identity::default(),
    })
}

/// Comparisons of columns with numbers, all of them.
pub fn filter(input: Stream, comparisons: &[(&str, Operator, i64)]) -> Stream {
    let compare = |(name, op, n): &(&str, Operator, i64)| -> ExprRef {
        let column = expr::column(&input.schema, input.schema.index_of(name).unwrap());
        Arc::new(BinaryExpr::new(column, *op, lit(*n)))
    };
    let predicate = conjunction(comparisons.iter().map(compare).collect::<Vec<_>>());
    input.filter(predicate)
}

/// The table with itself.
pub fn join(kind: JoinKind, key: (usize, usize)) -> Stream {
    joined_on(table(), table(), kind, key)
}

pub fn joined_on(left: Stream, right: Stream, kind: JoinKind, key: (usize, usize)) -> Stream {
    let one_side = matches!(kind, JoinKind::LeftSemi | JoinKind::LeftAnti);
    let output = (0..left.width() + if one_side { 0 } else { right.width() }).collect();
    let side = |key| JoinSide { keys: vec![key], vnode: vec![], state: () };
    let join = Join {
        kind,
        left: side(key.0),
        right: side(key.1),
        residual: None,
        null_aware: false,
        null_equals_null: false,
        output,
    };
    left.join(right, join)
}

pub fn count() -> Call {
    Call {
        func: AggFunc::Count,
        arg: None,
        distinct: false,
        filter: None,
        output_type: DataType::Int64,
        state: Named { name: "count".into(), nullable: false },
    }
}

/// The columns that the plan's only scan reads.
pub fn scanned(stream: &Stream) -> Vec<usize> {
    match &stream.op {
        Op::Scan(Scan { columns, .. }) => columns.clone(),
        _ => scanned(&stream.inputs[0]),
    }
}
