//! Window functions. Ranking functions become unlimited top-Ns, because a filter above may limit them
//! (the pass `rank`); all others over the same groups and order share a window operator.

use arrow::datatypes::{DataType, FieldRef};
use datafusion::common::DFSchema;
use datafusion::logical_expr::expr::{NullTreatment, WindowFunction, WindowFunctionParams};
use datafusion::logical_expr::{
    Expr, LogicalPlan, SortExpr, Window, WindowFrameUnits, WindowFunctionDefinition,
};
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::expr;
use millrace_functions::window_call::RankFunction;
use millrace_functions::window_call::WindowCall;

use crate::stream::compile::compile;
use crate::stream::convert::{Converter, Extended, Result, check_key, in_view};
use crate::stream::order::{check_order, order_of};
use crate::stream::plan::{self, Identity, Stream, TopN};

/// What a function is computed over.
type Spec<'a> = (&'a [Expr], &'a [SortExpr]);

impl Converter<'_> {
    pub(super) fn window(&self, window: &Window) -> Result<Stream> {
        let mut stream = self.convert(&window.input)?;
        let own = stream.width();
        let functions =
            window.window_expr.iter().map(window_function).collect::<Result<Vec<_>>>()?;
        let fields = &window.schema.fields()[own..];
        // Where each function's column lies.
        let mut at: Vec<Option<usize>> = vec![None; functions.len()];
        for i in 0..functions.len() {
            if at[i].is_some() {
                continue;
            }
            let width = stream.width();
            if let Some(rank) = ranking(functions[i]) {
                let ranked = rank_rows(stream, &window.input, functions[i], rank)?;
                let columns: Vec<usize> = (0..width).chain([ranked.width() - 1]).collect();
                stream = ranked.select(&columns);
                at[i] = Some(width);
                continue;
            }
            let spec = spec_of(functions[i]);
            let same =
                |j: &usize| ranking(functions[*j]).is_none() && spec_of(functions[*j]) == spec;
            let together: Vec<usize> = (i..functions.len()).filter(same).collect();
            let calls: Vec<(&WindowFunction, &FieldRef)> =
                together.iter().map(|&j| (functions[j], &fields[j])).collect();
            stream = compute(stream, &window.input, spec, &calls)?;
            for (k, &j) in together.iter().enumerate() {
                at[j] = Some(width + k);
            }
        }
        let mut columns: Vec<_> = (0..own)
            .map(|c| (expr::column(&stream.schema, c), stream.schema.field(c).name().clone()))
            .collect();
        for (c, field) in at.into_iter().flatten().zip(fields) {
            let mut value = expr::column(&stream.schema, c);
            if field.data_type() != stream.schema.field(c).data_type() {
                value = expr::cast(value, field.data_type().clone());
            }
            columns.push((value, field.name().clone()));
        }
        stream.project(columns).map_err(sql_error_from_datafusion)
    }
}

fn window_function(e: &Expr) -> Result<&WindowFunction> {
    match e {
        Expr::WindowFunction(f) => Ok(f),
        Expr::Alias(alias) => window_function(&alias.expr),
        other => Err(in_view(format!("the window expression {other}"))),
    }
}

fn spec_of(f: &WindowFunction) -> Spec<'_> {
    (&f.params.partition_by, &f.params.order_by)
}

fn ranking(f: &WindowFunction) -> Option<RankFunction> {
    match &f.fun {
        WindowFunctionDefinition::WindowUDF(udf) => match udf.name() {
            "row_number" => Some(RankFunction::RowNumber),
            "rank" => Some(RankFunction::Rank),
            "dense_rank" => Some(RankFunction::DenseRank),
            _ => None,
        },
        WindowFunctionDefinition::AggregateUDF(_) => None,
    }
}

fn group_of(f: Spec<'_>, schema: &DFSchema, input: &mut Extended) -> Result<Vec<usize>> {
    let mut group = Vec::new();
    for e in f.0 {
        let c = input.add(compile(e, schema)?);
        if !group.contains(&c) {
            group.push(c);
        }
    }
    Ok(group)
}

fn rank_rows(
    input: Stream,
    plan: &LogicalPlan,
    f: &WindowFunction,
    rank: RankFunction,
) -> Result<Stream> {
    let mut input = Extended::new(input);
    let group = group_of(spec_of(f), plan.schema(), &mut input)?;
    let order = order_of(&f.params.order_by, plan, &mut input)?;
    let order: Vec<_> = order.into_iter().filter(|(c, _)| !group.contains(c)).collect();
    let input = input.finish()?;
    check_key(&input, &group, "PARTITION BY")?;
    check_order(&input, &order)?;
    Ok(input.top_n(TopN {
        group,
        order,
        offset: 0,
        limit: None,
        rank,
        emit_rank: true,
        vnode: vec![],
        state: Identity::default(),
    }))
}

/// The input's columns, then one a call.
fn compute(
    input: Stream,
    plan: &LogicalPlan,
    spec: Spec<'_>,
    calls: &[(&WindowFunction, &FieldRef)],
) -> Result<Stream> {
    let width = input.width();
    let mut input = Extended::new(input);
    let group = group_of(spec, plan.schema(), &mut input)?;
    let order = order_of(spec.1, plan, &mut input)?;
    let mut made = Vec::with_capacity(calls.len());
    for (f, field) in calls {
        made.push(call(f, field.data_type(), plan.schema(), &mut input)?);
    }
    let input = input.finish()?;
    check_key(&input, &group, "PARTITION BY")?;
    check_order(&input, &order)?;
    for call in &mut made {
        for e in call.args.iter_mut().chain(&mut call.filter) {
            // Names as in the extended input.
            if let Some(c) = expr::as_column(e) {
                *e = expr::column(&input.schema, c);
            }
        }
    }
    let grown = input.width();
    let columns: Vec<usize> = (0..width).chain(grown..grown + made.len()).collect();
    let window =
        plan::Window { group, order, calls: made, vnode: vec![], state: Identity::default() };
    Ok(input.window(window).select(&columns))
}

fn call(
    f: &WindowFunction,
    output_type: &DataType,
    schema: &DFSchema,
    input: &mut Extended,
) -> Result<WindowCall> {
    let WindowFunctionParams { args, window_frame, filter, null_treatment, distinct, .. } =
        &f.params;
    let (function, aggregate) = match &f.fun {
        WindowFunctionDefinition::AggregateUDF(udf) => (udf.name().to_owned(), true),
        WindowFunctionDefinition::WindowUDF(udf) => (udf.name().to_owned(), false),
    };
    // Arguments are columns, so that a failing expression is NULL here as everywhere; literals stay,
    // because some functions want them.
    let mut argument = |e: &Expr| -> Result<_> {
        let compiled = compile(e, schema)?;
        if expr::as_literal(&compiled).is_some() {
            return Ok(compiled);
        }
        let c = input.add(compiled);
        Ok(expr::placeholder(c))
    };
    let args = args.iter().map(&mut argument).collect::<Result<Vec<_>>>()?;
    let filter = filter.as_deref().map(&mut argument).transpose()?;
    if window_frame.units == WindowFrameUnits::Groups && f.params.order_by.is_empty() {
        return Err(in_view("GROUPS without ORDER BY"));
    }
    Ok(WindowCall {
        function,
        aggregate,
        args,
        filter,
        distinct: *distinct,
        ignore_nulls: *null_treatment == Some(NullTreatment::IgnoreNulls),
        frame: window_frame.clone(),
        numbering: None,
        output_type: output_type.clone(),
    })
}
