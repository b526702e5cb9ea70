//! GROUP BY, also with grouping sets, aggregate functions and plain DISTINCT.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, new_null_array};
use arrow::datatypes::{DataType, Field, Schema};
use datafusion::common::{DFSchema, ScalarValue};
use datafusion::logical_expr::expr::{AggregateFunction, AggregateFunctionParams, NullTreatment};
use datafusion::logical_expr::{
    Aggregate, Distinct, Expr, ExprSchemable, GroupingSet, LogicalPlan, LogicalPlanBuilder, ident,
    lit,
};
use millrace_common::{SqlError, SqlType};
use millrace_functions::aggregate_kind::AggFunc;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::exact_aggregates::{Shape, pair_entry};
use millrace_functions::expr;
use millrace_functions::ordered_entries::collect_entry;
use millrace_functions::{ordered, statistics};
use millrace_graph::Expand;

use crate::bind::operators::cast_expr;
use crate::bind::provider::columns_of;
use crate::bind::sort_keys::key_of;
use crate::stream::compile::compile;
use crate::stream::convert::{Converter, Extended, Result, check_key, in_view};
use crate::stream::plan::{Call, Named, Stream};

impl Converter<'_> {
    pub(super) fn aggregate(&self, aggregate: &Aggregate) -> Result<Stream> {
        if let [Expr::GroupingSet(sets)] = aggregate.group_expr.as_slice() {
            return self.grouping_sets(aggregate, sets);
        }
        let (below, calls_over) = computed_below(aggregate)?;
        let input = self.convert(&below)?;
        let schema = below.schema();
        let mut input = Extended::new(input);
        let mut group = Vec::with_capacity(aggregate.group_expr.len());
        for e in &aggregate.group_expr {
            group.push(input.add(compile(&e.clone().unalias(), schema)?));
        }
        let mut calls = Vec::with_capacity(aggregate.aggr_expr.len());
        for (e, field) in calls_over.iter().zip(&aggregate.schema.fields()[group.len()..]) {
            calls.push(one_call(e, field, schema, &mut input)?);
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

    /// Every row once for each set, then one aggregation by the copies of the columns and the set's id.
    ///
    /// The set `()` has a row over no input as well: a row that no call counts, by a filter on a
    /// column that is true for the input's rows only, keeps its group alive.
    fn grouping_sets(&self, aggregate: &Aggregate, sets: &GroupingSet) -> Result<Stream> {
        let (below, calls_over) = computed_below(aggregate)?;
        let input = self.convert(&below)?;
        let schema = below.schema();
        let mut input = Extended::new(input);
        let exprs = sets.distinct_expr();
        if exprs.len() > MAX_GROUPING_COLUMNS {
            return Err(in_view(format!(
                "GROUPING SETS over more than {MAX_GROUPING_COLUMNS} columns"
            )));
        }
        let mut keys = Vec::with_capacity(exprs.len());
        for &e in &exprs {
            keys.push(input.add(compile(e, schema)?));
        }
        let masks = masks(sets, &exprs)?;
        let sets = numbered(&masks);
        let outputs = &aggregate.schema.fields()[exprs.len() + 1..];
        let mut calls = Vec::with_capacity(aggregate.aggr_expr.len());
        for (e, field) in calls_over.iter().zip(outputs) {
            calls.push(one_call(e, field, schema, &mut input)?);
        }
        let totals: Vec<i64> =
            sets.iter().filter(|s| !s.keep.contains(&true)).map(|s| s.id).collect();
        if !totals.is_empty() {
            let real = input.add(expr::literal(ScalarValue::Boolean(Some(true))));
            calls.iter_mut().for_each(|c| c.filter = c.filter.or(Some(real)));
        }
        let input = input.finish()?;
        check_key(&input, &keys, "grouping by")?;
        check_values(&input, &calls)?;
        let width = input.width();
        let mut stream = input.expand(Expand { columns: keys, sets });
        if !totals.is_empty() {
            stream = with_totals(stream, &totals)?;
        }
        let group: Vec<usize> = (width..=width + exprs.len()).collect();
        let (calls, call_at) = dedup_calls(calls);
        let stream = stream.aggregate(group, calls);
        let groups = exprs.len() + 1;
        let output = (0..groups).chain(call_at.into_iter().map(|c| c + groups));
        let columns = output
            .zip(aggregate.schema.fields())
            .map(|(c, field)| {
                let mut column = expr::column(&stream.schema, c);
                if field.data_type() != stream.schema.field(c).data_type() {
                    column = expr::cast(column, field.data_type().clone());
                }
                (column, field.name().clone())
            })
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

/// An id has a bit a column, and room for a number that tells equal sets apart.
const MAX_GROUPING_COLUMNS: usize = 48;

/// Which of the distinct expressions each set groups by.
fn masks(sets: &GroupingSet, exprs: &[&Expr]) -> Result<Vec<Vec<bool>>> {
    let mask = |kept: &[Expr]| exprs.iter().map(|e| kept.contains(e)).collect::<Vec<_>>();
    Ok(match sets {
        GroupingSet::GroupingSets(sets) => sets.iter().map(|s| mask(s)).collect(),
        GroupingSet::Rollup(all) => (0..=all.len()).rev().map(|n| mask(&all[..n])).collect(),
        GroupingSet::Cube(all) => {
            if all.len() > MAX_CUBE_COLUMNS {
                return Err(in_view(format!("CUBE over more than {MAX_CUBE_COLUMNS} columns")));
            }
            let kept = |bits: u32| {
                let kept = all.iter().enumerate().filter(|(i, _)| bits & (1 << i) != 0);
                kept.map(|(_, e)| e.clone()).collect::<Vec<_>>()
            };
            (0..1u32 << all.len()).map(|bits| mask(&kept(bits))).collect()
        }
    })
}

/// A row leaves once for each set of a cube.
const MAX_CUBE_COLUMNS: usize = 12;

/// Sets with DataFusion's ids, which `grouping()` is computed of: a bit for each column that is left out,
/// the last column's lowest; above them how many equal sets came before.
fn numbered(masks: &[Vec<bool>]) -> Vec<millrace_graph::GroupingSet> {
    let id = |keep: &[bool]| keep.iter().fold(0i64, |id, kept| (id << 1) | i64::from(!kept));
    let one = |(i, keep): (usize, &Vec<bool>)| {
        let before = masks[..i].iter().filter(|m| *m == keep).count() as i64;
        millrace_graph::GroupingSet { keep: keep.clone(), id: id(keep) | (before << keep.len()) }
    };
    masks.iter().enumerate().map(one).collect()
}

/// Adds a row to each set `()`: NULLs, and the set's id in the last column.
fn with_totals(stream: Stream, ids: &[i64]) -> Result<Stream> {
    let fields = stream.schema.fields().iter();
    let nullable = fields.map(|f| f.as_ref().clone().with_nullable(true)).collect::<Vec<_>>();
    let schema = Arc::new(Schema::new(nullable));
    let last = stream.width() - 1;
    let nulls = schema.fields()[..last].iter().map(|f| new_null_array(f.data_type(), ids.len()));
    let columns = nulls.chain([Arc::new(Int64Array::from(ids.to_vec())) as ArrayRef]).collect();
    let batch = RecordBatch::try_new(Arc::clone(&schema), columns)
        .map_err(|e| sql_error_from_datafusion(e.into()))?;
    Ok(Stream::union(vec![stream, Stream::values(batch)], schema))
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
            && a.output_type == b.output_type
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

/// The input of an aggregation, and its calls over that. What goes into one entry of a collecting aggregate is computed
/// below it, each by itself: where a key fails on a row it is NULL, and the row stays.
fn computed_below(aggregate: &Aggregate) -> Result<(LogicalPlan, Vec<Expr>)> {
    let mut columns = columns_of(&aggregate.input);
    let width = columns.len();
    let mut moved: Vec<Expr> = Vec::new();
    let mut below = |e: &mut Expr| {
        if matches!(e, Expr::Column(_) | Expr::Literal(..)) {
            return;
        }
        let at = moved.iter().position(|have| have == e).unwrap_or(moved.len());
        let name = format!("#part {at}");
        if at == moved.len() {
            moved.push(e.clone());
            columns.push(e.clone().alias(&name));
        }
        *e = ident(name);
    };
    let mut calls = aggregate.aggr_expr.clone();
    for call in &mut calls {
        let call = match call {
            Expr::Alias(alias) => alias.expr.as_mut(),
            call => call,
        };
        let Expr::AggregateFunction(f) = call else { continue };
        if known(f)?.is_collected() {
            f.params.args.iter_mut().for_each(&mut below);
            f.params.order_by.iter_mut().for_each(|by| below(&mut by.expr));
        } else if let [Expr::ScalarFunction(row)] = f.params.args.as_mut_slice()
            && row.func.name() == "struct"
        {
            row.args.iter_mut().for_each(&mut below);
        }
    }
    if columns.len() == width {
        return Ok((aggregate.input.as_ref().clone(), calls));
    }
    let plan = LogicalPlanBuilder::from(aggregate.input.as_ref().clone());
    let plan = plan.project(columns).and_then(|b| b.build());
    Ok((plan.map_err(sql_error_from_datafusion)?, calls))
}

fn one_call(e: &Expr, field: &Field, schema: &DFSchema, input: &mut Extended) -> Result<Call> {
    let function = match e {
        Expr::AggregateFunction(f) => f,
        Expr::Alias(alias) => return one_call(&alias.expr, field, schema, input),
        other => return Err(in_view(format!("the aggregate {other}"))),
    };
    let func = known(function)?;
    let named = |nullable| Named { name: field.name().clone(), nullable };
    let call = |func, arg, distinct, filter, state| {
        let output_type = field.data_type().clone();
        Call { func, arg, distinct, filter, output_type, state }
    };
    let params = &function.params;
    let filter = params.filter.as_deref().map(|f| compile(f, schema)).transpose()?;
    let filter = filter.map(|f| input.add(f));
    let mut arg = None;
    if let Some(e) = ordering_error(func, function) {
        return Err(e);
    }
    if let Some((func, params)) = by_length(func, params, schema)? {
        let arg = Some(input.add(compile(&entry(func, &params, schema)?, schema)?));
        return Ok(call(func, arg, false, filter, named(true)));
    }
    if func.is_collected() {
        arg = Some(input.add(compile(&entry(func, params, schema)?, schema)?));
        return Ok(call(func, arg, params.distinct, filter, named(true)));
    }
    if let (Shape::Pair, [y, x]) = (func.shape(), params.args.as_slice()) {
        let pair = pair_entry().call(vec![y.clone(), x.clone()]);
        let arg = Some(input.add(compile(&pair, schema)?));
        let nullable = func != AggFunc::RegrCount;
        return Ok(call(func, arg, params.distinct, filter, named(nullable)));
    }
    if let (AggFunc::Count, true, [Expr::ScalarFunction(row)]) =
        (func, params.distinct, params.args.as_slice())
        && row.func.name() == "struct"
    {
        let arg = Some(input.add(compile(&row_entry(&row.args), schema)?));
        return Ok(call(func, arg, true, filter, named(false)));
    }
    for (i, e) in params.args.iter().enumerate() {
        let compiled = compile(e, schema)?;
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
    let counts = matches!(func, AggFunc::Count | AggFunc::Sum | AggFunc::Avg | AggFunc::BitXor);
    let distinct = params.distinct && (counts || func.shape() == Shape::Variance);
    let nullable = func != AggFunc::Count;
    Ok(call(func, arg, distinct, filter, named(nullable)))
}

/// What tells rows apart: the bytes of their columns, which a NULL has too.
fn row_entry(columns: &[Expr]) -> Expr {
    let flags = format!("k{}", "al".repeat(columns.len()));
    let args = [lit(flags), lit(""), lit("")].into_iter().chain(columns.iter().cloned());
    collect_entry().call(args.collect())
}

/// The least or greatest interval is the first or last one by its length, which is not the order of its parts.
fn by_length(
    func: AggFunc,
    params: &AggregateFunctionParams,
    schema: &DFSchema,
) -> Result<Option<(AggFunc, AggregateFunctionParams)>> {
    let place = match func {
        AggFunc::Min => AggFunc::FirstValue,
        AggFunc::Max => AggFunc::LastValue,
        _ => return Ok(None),
    };
    let Some(value) = params.args.first() else { return Ok(None) };
    let t = value.get_type(schema).map_err(sql_error_from_datafusion)?;
    if !matches!(t, DataType::Interval(_)) {
        return Ok(None);
    }
    let mut params = params.clone();
    params.null_treatment = Some(NullTreatment::IgnoreNulls);
    params.order_by = vec![value.clone().sort(true, false)];
    Ok(Some((place, params)))
}

/// What a collecting aggregate keeps of a row: see [`millrace_functions::ordered_entries`].
fn entry(func: AggFunc, params: &AggregateFunctionParams, schema: &DFSchema) -> Result<Expr> {
    let none = || in_view("an aggregate without an argument".to_owned());
    let first = params.args.first().ok_or_else(none)?;
    // Of an object, the key stands where others have a separator.
    let value = if func == AggFunc::JsonbObjectAgg { params.args.get(1) } else { None };
    let value = value.unwrap_or(first);
    let t = value.get_type(schema).map_err(sql_error_from_datafusion)?;
    let text = |e: Expr, t: &DataType| match t {
        DataType::Utf8 => Ok(e),
        t => cast_expr(e, t, SqlType::Text),
    };
    let shown = match func {
        AggFunc::StringAgg if !matches!(t, DataType::Utf8 | DataType::Binary) => {
            return Err(in_view("string_agg of another type than text and bytea".to_owned()));
        }
        _ if t.is_nested() => {
            return Err(in_view(format!("{} of arrays", func_name(func))));
        }
        _ => text(value.clone(), &t)?,
    };
    let mut flags = String::from(match func {
        AggFunc::StringAgg | AggFunc::PercentileCont | AggFunc::PercentileDisc | AggFunc::Mode => {
            "s"
        }
        _ if params.null_treatment == Some(NullTreatment::IgnoreNulls) => "s",
        AggFunc::JsonbObjectAgg => "o",
        _ => "k",
    });
    let mut keys = Vec::new();
    for key in &params.order_by {
        flags.push(if key.asc { 'a' } else { 'd' });
        flags.push(if key.nulls_first { 'f' } else { 'l' });
        keys.push(key_of(&key.expr, schema).map_err(sql_error_from_datafusion)?);
    }
    if keys.is_empty() {
        // Without an order of its own: that of the values.
        flags.push_str("al");
        keys.push(key_of(first, schema).map_err(sql_error_from_datafusion)?);
    }
    let separator = match (func, params.args.get(1)) {
        (AggFunc::StringAgg, Some(e)) if t == DataType::Binary => {
            // A literal is read as a bytea.
            let from = e.get_type(schema).map_err(sql_error_from_datafusion)?;
            text(cast_expr(e.clone(), &from, SqlType::Bytea)?, &DataType::Binary)?
        }
        (AggFunc::StringAgg, Some(e)) => e.clone(),
        (AggFunc::JsonbObjectAgg, _) => first.clone(),
        (AggFunc::PercentileCont | AggFunc::PercentileDisc, Some(e)) => {
            let t = e.get_type(schema).map_err(sql_error_from_datafusion)?;
            text(e.clone(), &t)?
        }
        _ => lit(""),
    };
    let args = [lit(flags), shown, separator].into_iter().chain(keys).collect();
    Ok(collect_entry().call(args))
}

/// `first_value` and `last_value` are of an order.
fn ordering_error(func: AggFunc, f: &AggregateFunction) -> Option<SqlError> {
    let ordered = matches!(func, AggFunc::FirstValue | AggFunc::LastValue);
    (ordered && f.params.order_by.is_empty()).then(|| {
        in_view(format!("{} without an ORDER BY of its own", f.func.name()))
            .with_hint(format!("Write {}(value ORDER BY …).", f.func.name()))
    })
}

fn func_name(func: AggFunc) -> &'static str {
    match func {
        AggFunc::FirstValue => "first_value",
        AggFunc::LastValue => "last_value",
        AggFunc::ArrayAgg => "array_agg",
        _ => "this aggregate",
    }
}

fn known(f: &AggregateFunction) -> Result<AggFunc> {
    let name = f.func.name();
    if let Some(func) = statistics::by_name(name).or_else(|| ordered::by_name(name)) {
        return Ok(func);
    }
    Ok(match name {
        "count" => AggFunc::Count,
        "sum" => AggFunc::Sum,
        "avg" | "mean" => AggFunc::Avg,
        "min" => AggFunc::Min,
        "max" => AggFunc::Max,
        "bool_and" | "every" => AggFunc::BoolAnd,
        "bool_or" => AggFunc::BoolOr,
        "string_agg" => AggFunc::StringAgg,
        "array_agg" => AggFunc::ArrayAgg,
        "first_value" => AggFunc::FirstValue,
        "last_value" => AggFunc::LastValue,
        other => return Err(in_view(format!("the aggregate function {other}"))),
    })
}

/// A literal, or a column that holds no NULL.
fn never_null(e: &millrace_functions::expr::ExprRef, input: &Stream) -> bool {
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
