//! GROUP BY, aggregate functions and plain DISTINCT.

use std::sync::Arc;

use arrow::datatypes::Field;
use datafusion::common::DFSchema;
use datafusion::logical_expr::expr::AggregateFunction;
use datafusion::logical_expr::{Aggregate, Distinct, Expr};

use crate::error::sql_error_from_datafusion;
use crate::graph::AggFunc;
use crate::stream::convert::{Converter, Extended, Result, check_key, in_view};
use crate::stream::expr;
use crate::stream::plan::{Call, Stream};

impl Converter<'_> {
    pub(super) fn aggregate(&self, aggregate: &Aggregate) -> Result<Stream> {
        let input = self.convert(&aggregate.input)?;
        let schema = aggregate.input.schema();
        let mut input = Extended::new(input);
        let mut group = Vec::with_capacity(aggregate.group_expr.len());
        for e in &aggregate.group_expr {
            group.push(input.add(expr::compile(e, schema)?));
        }
        let mut calls = Vec::with_capacity(aggregate.aggr_expr.len());
        for (e, field) in aggregate.aggr_expr.iter().zip(&aggregate.schema.fields()[group.len()..])
        {
            calls.push(call(e, field, schema, &mut input)?);
        }
        let input = input.finish()?;
        check_key(&input, &group, "grouping by")?;
        check_values(&input, &calls)?;
        // A column that is grouped by twice is one group column and two outputs; so with calls.
        let (unique_group, group_at) = dedup(&group);
        let (unique_calls, call_at) = dedup_calls(calls);
        let width = unique_group.len();
        let output: Vec<usize> =
            group_at.into_iter().chain(call_at.into_iter().map(|c| c + width)).collect();
        let stream = input.aggregate(unique_group, unique_calls);
        let columns = output
            .iter()
            .zip(aggregate.schema.fields())
            .map(|(&c, field)| (expr::column(&stream.schema, c), field.name().clone()))
            .collect();
        stream.project(columns).map_err(sql_error_from_datafusion)
    }

    pub(super) fn distinct(&self, distinct: &Distinct) -> Result<Stream> {
        match distinct {
            Distinct::All(input) => {
                let input = self.convert(input)?;
                let all: Vec<usize> = (0..input.width()).collect();
                check_key(&input, &all, "DISTINCT over")?;
                Ok(input.aggregate(all, vec![]))
            }
            Distinct::On(on) => self.distinct_on(on),
        }
    }
}

fn dedup(columns: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let mut unique: Vec<usize> = Vec::new();
    let mut at = Vec::with_capacity(columns.len());
    for &c in columns {
        at.push(unique.iter().position(|&u| u == c).unwrap_or_else(|| {
            unique.push(c);
            unique.len() - 1
        }));
    }
    (unique, at)
}

fn dedup_calls(calls: Vec<Call>) -> (Vec<Call>, Vec<usize>) {
    let same = |a: &Call, b: &Call| {
        (a.func, a.arg, a.distinct, a.filter) == (b.func, b.arg, b.distinct, b.filter)
            && a.output.data_type() == b.output.data_type()
    };
    let mut unique: Vec<Call> = Vec::new();
    let mut at = Vec::with_capacity(calls.len());
    for c in calls {
        at.push(unique.iter().position(|u| same(u, &c)).unwrap_or_else(|| {
            unique.push(c);
            unique.len() - 1
        }));
    }
    (unique, at)
}

fn call(e: &Expr, field: &Field, schema: &DFSchema, input: &mut Extended) -> Result<Call> {
    let function = match e {
        Expr::AggregateFunction(f) => f,
        Expr::Alias(alias) => return call(&alias.expr, field, schema, input),
        other => return Err(in_view(format!("the aggregate {other}"))),
    };
    let func = known(function)?;
    let params = &function.params;
    let filter = params.filter.as_deref().map(|f| expr::compile(f, schema)).transpose()?;
    let filter = filter.map(|f| input.add(f));
    let mut arg = None;
    for (i, e) in params.args.iter().enumerate() {
        let compiled = expr::compile(e, schema)?;
        if func == AggFunc::Count && !params.distinct && never_null(&compiled, input.input()) {
            continue; // count(*)
        }
        if i > 0 || arg.is_some() {
            return Err(in_view(format!("{} of several arguments", function.func.name())));
        }
        arg = Some(input.add(compiled));
    }
    if arg.is_none() && func != AggFunc::Count {
        return Err(in_view(format!("{} without an argument", function.func.name())));
    }
    // Repetition changes nothing about extremes.
    let distinct = params.distinct && matches!(func, AggFunc::Count | AggFunc::Sum | AggFunc::Avg);
    let nullable = func != AggFunc::Count;
    let output = Arc::new(Field::new(field.name(), field.data_type().clone(), nullable));
    Ok(Call { func, arg, distinct, filter, output })
}

fn known(f: &AggregateFunction) -> Result<AggFunc> {
    Ok(match f.func.name() {
        "count" => AggFunc::Count,
        "sum" => AggFunc::Sum,
        "avg" | "mean" => AggFunc::Avg,
        "min" => AggFunc::Min,
        "max" => AggFunc::Max,
        "bool_and" | "every" => AggFunc::BoolAnd,
        "bool_or" => AggFunc::BoolOr,
        other => return Err(in_view(format!("the aggregate function {other}"))),
    })
}

/// A literal, or a column that holds no NULL.
fn never_null(e: &crate::graph::ExprRef, input: &Stream) -> bool {
    match (expr::as_literal(e), expr::as_column(e)) {
        (Some(literal), _) => !literal.is_null(),
        (_, Some(c)) => !input.schema.field(c).is_nullable(),
        _ => false,
    }
}

fn check_values(input: &Stream, calls: &[Call]) -> Result<()> {
    for call in calls {
        let keyed = call.distinct || matches!(call.func, AggFunc::Min | AggFunc::Max);
        if let (true, Some(arg)) = (keyed, call.arg) {
            check_key(input, &[arg], "this aggregate over")?;
        }
    }
    Ok(())
}
