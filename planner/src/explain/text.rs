//! Parts of the lines of EXPLAIN, the same for stream plans and job graphs.

use std::fmt::Write;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::compute::SortOptions;
use arrow::datatypes::Schema;
use datafusion::physical_expr::expressions::Column;
use millrace_functions::aggregate_kind::AggFunc;
use millrace_functions::expr::{ExprRef, replace_columns};
use millrace_functions::framed::Framed;
use millrace_functions::window_call::{RankFunction, WindowCall, follows_frame};
use millrace_graph::{
    AggCall, Aggregate, Expand, GroupingSet, Join, JoinKind, TopN, Window, pair_schema,
};

use super::expr::expr_text;

/// More constant rows than this are only counted.
const SHOWN_ROWS: usize = 4;

/// The equalities of a join.
fn on(inputs: [&Schema; 2], keys: [&[usize]; 2], equals: &str) -> String {
    let pair = |(&l, &r): (&usize, &usize)| column(inputs[0], l) + equals + &column(inputs[1], r);
    let pairs: Vec<String> = keys[0].iter().zip(keys[1]).map(pair).collect();
    if pairs.is_empty() { String::new() } else { format!(" on ({})", pairs.join(", ")) }
}

/// Names that tell columns apart.
pub(super) fn column(schema: &Schema, c: usize) -> String {
    let Some(field) = schema.fields().get(c) else { return format!("#{c}") };
    let twice = schema.fields().iter().filter(|f| f.name() == field.name()).count() > 1;
    if twice { format!("{}#{c}", field.name()) } else { field.name().clone() }
}

pub(super) fn list(schema: &Schema, columns: &[usize]) -> String {
    columns.iter().map(|&c| column(schema, c)).collect::<Vec<_>>().join(", ")
}

pub(super) fn order_list(schema: &Schema, order: &[(usize, SortOptions)]) -> String {
    let one = |(c, o): &(usize, SortOptions)| {
        let direction = if o.descending { " desc" } else { "" };
        // PostgreSQL's default is NULLS LAST ascending, FIRST descending.
        let nulls = match (o.descending, o.nulls_first) {
            (false, true) => " nulls first",
            (true, false) => " nulls last",
            _ => "",
        };
        format!("{}{direction}{nulls}", column(schema, *c))
    };
    order.iter().map(one).collect::<Vec<_>>().join(", ")
}

pub(super) fn text(e: &ExprRef, input: &Schema) -> String {
    let named =
        replace_columns(e, |c| Some(Arc::new(Column::new(&column(input, c), c)) as ExprRef));
    expr_text(named.as_ref().unwrap_or(e))
}

pub(super) fn project(exprs: &[ExprRef], input: &Schema, output: &Schema) -> String {
    let one = |(i, e): (usize, &ExprRef)| {
        let text = text(e, input);
        let name = output.fields().get(i).map_or("", |f| f.name());
        // A computed column may be called by its own text.
        if text == name || expr_text(e) == name { text } else { format!("{text} as {name}") }
    };
    let columns: Vec<String> = exprs.iter().enumerate().map(one).collect();
    format!("Project {}", columns.join(", "))
}

/// A call of an aggregate over an input column, of all rows or of those where another column is true.
fn call<S>(call: &AggCall<S>, input: &Schema) -> String {
    let name = match call.func {
        AggFunc::Count => "count",
        AggFunc::Sum => "sum",
        AggFunc::Avg => "avg",
        AggFunc::Min => "min",
        AggFunc::Max => "max",
        AggFunc::BoolAnd => "bool_and",
        AggFunc::BoolOr => "bool_or",
        AggFunc::StringAgg => "string_agg",
        AggFunc::ArrayAgg => "array_agg",
        AggFunc::FirstValue => "first_value",
        AggFunc::LastValue => "last_value",
        AggFunc::PercentileCont => "percentile_cont",
        AggFunc::PercentileDisc => "percentile_disc",
        AggFunc::Mode => "mode",
        AggFunc::JsonbObjectAgg => "jsonb_object_agg",
        func => millrace_functions::statistics::name_of(func).unwrap_or("?"),
    };
    let distinct = if call.distinct { "distinct " } else { "" };
    let arg = call.arg.map_or("*".into(), |a| column(input, a));
    let filter = call.filter.map_or(String::new(), |f| format!(" filter ({})", column(input, f)));
    format!("{name}({distinct}{arg}){filter}")
}

fn window_call(c: &WindowCall, input: &Schema) -> String {
    if let Some(framed) = Framed::of(c) {
        return framed_call(&framed, &c.args, input);
    }
    let args: Vec<String> = c.args.iter().map(|e| text(e, input)).collect();
    let distinct = if c.distinct { "distinct " } else { "" };
    let mut call = format!("{}({distinct}{})", c.function, args.join(", "));
    if c.ignore_nulls {
        call.push_str(" ignore nulls");
    }
    if let Some(filter) = &c.filter {
        let _ = write!(call, " filter ({})", text(filter, input));
    }
    if follows_frame(c) {
        let frame = c.frame.to_string().to_lowercase();
        let _ = write!(call, " {frame}");
    }
    call
}

/// A call over a frame of ours, as it was written.
fn framed_call(framed: &Framed, args: &[ExprRef], input: &Schema) -> String {
    let (filter, args) = framed.arguments(args);
    let args: Vec<String> = args.iter().map(|e| text(e, input)).collect();
    let distinct = if framed.distinct { "distinct " } else { "" };
    let mut call = format!("{}({distinct}{})", framed.function, args.join(", "));
    if framed.ignore_nulls {
        call.push_str(" ignore nulls");
    }
    if let Some(filter) = filter {
        let _ = write!(call, " filter ({})", text(filter, input));
    }
    if !["lag", "lead"].contains(&framed.function.as_str()) {
        let _ = write!(call, " {}", framed.frame);
    }
    call
}

pub(super) fn hop(time: &str, size_us: i64, slide_us: i64, offset_us: i64) -> String {
    let mut line = if size_us == slide_us {
        format!("Tumble {time} size {}", duration(size_us))
    } else {
        format!("Hop {time} size {} slide {}", duration(size_us), duration(slide_us))
    };
    if offset_us != 0 {
        let _ = write!(line, " offset {}", duration(offset_us));
    }
    line
}

pub(super) fn expand(e: &Expand, input: &Schema) -> String {
    let set = |s: &GroupingSet| {
        let kept = e.columns.iter().zip(&s.keep).filter(|(_, keep)| **keep).map(|(c, _)| *c);
        format!("({})", list(input, &kept.collect::<Vec<_>>()))
    };
    let sets: Vec<String> = e.sets.iter().map(set).collect();
    format!("Expand grouping sets {}", sets.join(", "))
}

pub(super) fn duration(us: i64) -> String {
    match us {
        us if us % 1_000_000 == 0 => format!("{}s", us / 1_000_000),
        us if us % 1_000 == 0 => format!("{}ms", us / 1_000),
        us => format!("{us}us"),
    }
}

pub(super) fn values(batch: &RecordBatch) -> String {
    if batch.num_rows() > SHOWN_ROWS {
        return format!("Values {} rows", batch.num_rows());
    }
    let cell = |c: usize, row: usize| {
        arrow::util::display::array_value_to_string(batch.column(c), row).unwrap_or_default()
    };
    let row = |row: usize| {
        let cells: Vec<String> = (0..batch.num_columns()).map(|c| cell(c, row)).collect();
        format!("({})", cells.join(", "))
    };
    let rows: Vec<String> = (0..batch.num_rows()).map(row).collect();
    format!("Values {}", if rows.is_empty() { "no rows".into() } else { rows.join(", ") })
}

/// What an aggregation groups by and calls.
pub(super) fn aggregate<S, T>(a: &Aggregate<S, T>, input: &Schema) -> String {
    let mut line = if a.calls.is_empty() { "Distinct".to_owned() } else { "Aggregate".into() };
    if !a.group.is_empty() {
        let _ = write!(line, " by ({})", list(input, &a.group));
    }
    if !a.calls.is_empty() {
        let calls: Vec<String> = a.calls.iter().map(|c| call(c, input)).collect();
        let _ = write!(line, ": {}", calls.join(", "));
    }
    line
}

/// A join's kind, its equalities, what else must hold, and its columns.
pub(super) fn join<S>(j: &Join<S>, [left, right]: [&Schema; 2], output: &Schema) -> String {
    let kind = match j.kind {
        JoinKind::Inner => "inner",
        JoinKind::LeftOuter => "left outer",
        JoinKind::RightOuter => "right outer",
        JoinKind::FullOuter => "full outer",
        JoinKind::LeftSemi => "left semi",
        JoinKind::RightSemi => "right semi",
        JoinKind::LeftAnti => "left anti",
        JoinKind::RightAnti => "right anti",
        JoinKind::LeftMark => "left mark",
    };
    let equals = if j.null_equals_null { " is not distinct from " } else { " = " };
    let mut line =
        format!("Join {kind}{}", on([left, right], [&j.left.keys, &j.right.keys], equals));
    if let Some(residual) = &j.residual {
        let _ = write!(line, " where {}", text(residual, &pair_schema(left, right)));
    }
    if j.null_aware {
        line.push_str(", null aware");
    }
    line + &outputs(output)
}

/// A lookup join's kind, its equalities, what else must hold, and its columns.
pub(super) fn lookup(
    outer: bool,
    keys: [&[usize]; 2],
    residual: Option<&ExprRef>,
    [left, right]: [&Schema; 2],
    output: &Schema,
) -> String {
    let kind = if outer { "left outer" } else { "inner" };
    let keys = on([left, right], keys, " = ");
    let mut line = format!("Lookup join {kind}{keys} as of processing time");
    if let Some(residual) = residual {
        let _ = write!(line, " where {}", text(residual, &pair_schema(left, right)));
    }
    line + &outputs(output)
}

/// The columns that a join gives.
fn outputs(output: &Schema) -> String {
    let all: Vec<usize> = (0..output.fields().len()).collect();
    format!(" → ({})", list(output, &all))
}

/// Which rows of each group by which order.
pub(super) fn top_n<S>(top: &TopN<S>, input: &Schema) -> String {
    let rank = match top.rank {
        RankFunction::RowNumber => "row_number",
        RankFunction::Rank => "rank",
        RankFunction::DenseRank => "dense_rank",
    };
    let mut line = format!("TopN {rank}");
    match (top.offset, top.limit) {
        (0, Some(limit)) => drop(write!(line, " <= {limit}")),
        (0, None) => {}
        (offset, Some(limit)) => {
            let _ = write!(line, " in {}..{}", offset + 1, offset.saturating_add(limit));
        }
        (offset, None) => drop(write!(line, " > {offset}")),
    }
    line.push_str(&by_order(&top.group, &top.order, input));
    if top.emit_rank {
        line.push_str(", with rank");
    }
    line
}

/// Window calls and what they are over.
pub(super) fn window<S>(window: &Window<S>, input: &Schema) -> String {
    let calls: Vec<String> = window.calls.iter().map(|c| window_call(c, input)).collect();
    format!("Window {}{}", calls.join(", "), by_order(&window.group, &window.order, input))
}

fn by_order(group: &[usize], order: &[(usize, SortOptions)], input: &Schema) -> String {
    let mut line = String::new();
    if !group.is_empty() {
        let _ = write!(line, " by ({})", list(input, group));
    }
    if !order.is_empty() {
        let _ = write!(line, " order ({})", order_list(input, order));
    }
    line
}

pub(super) fn unnest(lists: &[usize], keep_empty: bool, input: &Schema) -> String {
    let lists: Vec<String> = lists.iter().map(|&c| column(input, c)).collect();
    let kept = if keep_empty { " keeping rows without elements" } else { "" };
    format!("Unnest {}{kept}", lists.join(", "))
}
