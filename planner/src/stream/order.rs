//! Whatever keeps the first rows of an order: LIMIT, DISTINCT ON.
//!
//! ORDER BY alone does nothing in a relation: rows have no order.

use arrow::compute::SortOptions;
use datafusion::logical_expr::{
    Distinct, DistinctOn, FetchType, Limit, LogicalPlan, SkipType, Sort, SortExpr,
};
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::expr;
use millrace_functions::window_call::RankFunction;

use crate::stream::compile::compile;
use crate::stream::convert::{self, Converter, Extended, Result, check_key, in_view};
use crate::stream::plan::{Identity, Stream, TopN};

/// `LIMIT` without an order: by the rows' own bytes, so that the result is a function of the content.
pub(super) fn first_rows(input: Stream, offset: u64, limit: Option<u64>) -> Stream {
    first_in_order(input, vec![], offset, limit)
}

fn first_in_order(
    input: Stream,
    order: Vec<(usize, SortOptions)>,
    offset: u64,
    limit: Option<u64>,
) -> Stream {
    input.top_n(TopN {
        group: vec![],
        order,
        offset,
        limit,
        rank: RankFunction::RowNumber,
        emit_rank: false,
        vnode: vec![],
        state: Identity::default(),
    })
}

impl Converter<'_> {
    pub(super) fn sort(&self, sort: &Sort) -> Result<Stream> {
        match sort.fetch {
            None => self.convert(&sort.input),
            Some(fetch) => self.sorted(sort, 0, Some(fetch as u64)),
        }
    }

    pub(super) fn limit(&self, limit: &Limit) -> Result<Stream> {
        let skip = limit.get_skip_type().map_err(sql_error_from_datafusion)?;
        let fetch = limit.get_fetch_type().map_err(sql_error_from_datafusion)?;
        match (skip, fetch) {
            (SkipType::Literal(0), FetchType::Literal(None)) => self.convert(&limit.input),
            (SkipType::Literal(skip), FetchType::Literal(fetch)) => {
                self.limited(&limit.input, skip as u64, fetch.map(|n| n as u64))
            }
            _ => Err(in_view("LIMIT or OFFSET with an expression")),
        }
    }

    /// Looks for the sort that the limit means below projections.
    fn limited(&self, plan: &LogicalPlan, offset: u64, limit: Option<u64>) -> Result<Stream> {
        match plan {
            LogicalPlan::Sort(sort) => self.sorted(sort, offset, limit),
            LogicalPlan::Distinct(Distinct::On(on)) if on.sort_expr.is_some() => {
                self.first_distinct(on, Some((offset, limit)))
            }
            LogicalPlan::Projection(p) if is_sorted(&p.input) => {
                convert::project(self.limited(&p.input, offset, limit)?, p)
            }
            LogicalPlan::SubqueryAlias(a) if is_sorted(&a.input) => {
                self.limited(&a.input, offset, limit)
            }
            other => Ok(first_rows(self.convert(other)?, offset, limit)),
        }
    }

    fn sorted(&self, sort: &Sort, offset: u64, limit: Option<u64>) -> Result<Stream> {
        let input = self.convert(&sort.input)?;
        // A fetch that an optimiser put into the sort counts from its first row.
        let fetch = sort.fetch.map(|n| (n as u64).saturating_sub(offset));
        let limit = match (limit, fetch) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let width = input.width();
        let mut input = Extended::new(input);
        let order = order_of(&sort.expr, &sort.input, &mut input)?;
        let input = input.finish()?;
        check_order(&input, &order)?;
        let grown = input.width() > width;
        let stream = first_in_order(input, order, offset, limit);
        Ok(if grown { stream.select(&(0..width).collect::<Vec<_>>()) } else { stream })
    }

    pub(super) fn distinct_on(&self, on: &DistinctOn) -> Result<Stream> {
        self.first_distinct(on, None)
    }

    /// `first`: OFFSET and LIMIT, which count the rows in their order.
    fn first_distinct(&self, on: &DistinctOn, first: Option<(u64, Option<u64>)>) -> Result<Stream> {
        let schema = on.input.schema();
        let mut input = Extended::new(self.convert(&on.input)?);
        let mut group = Vec::with_capacity(on.on_expr.len());
        for e in &on.on_expr {
            group.push(input.add(compile(e, schema)?));
        }
        let order = match &on.sort_expr {
            Some(sort) => order_of(sort, &on.input, &mut input)?,
            None => vec![],
        };
        // Of a group there is one row, so nothing behind the group's own columns orders the rows that are left.
        let (among, order): (Vec<_>, Vec<_>) =
            order.into_iter().partition(|(c, _)| group.contains(c));
        let input = input.finish()?;
        check_key(&input, &group, "DISTINCT ON")?;
        check_order(&input, &order)?;
        let stream = input.top_n(TopN {
            group,
            order,
            offset: 0,
            limit: Some(1),
            rank: RankFunction::RowNumber,
            emit_rank: false,
            vnode: vec![],
            state: Identity::default(),
        });
        let stream = match first {
            Some((offset, limit)) => first_in_order(stream, among, offset, limit),
            None => stream,
        };
        convert::project_as(stream, &on.select_expr, schema, &on.schema)
    }
}

pub(super) fn order_of(
    sort: &[SortExpr],
    plan: &LogicalPlan,
    input: &mut Extended,
) -> Result<Vec<(usize, SortOptions)>> {
    let mut order: Vec<(usize, SortOptions)> = Vec::with_capacity(sort.len());
    for s in sort {
        let compiled = compile(&s.expr, plan.schema())?;
        if expr::as_literal(&compiled).is_some() {
            continue;
        }
        let c = input.add(compiled);
        // A second mention of a column decides nothing.
        if order.iter().all(|(have, _)| *have != c) {
            order.push((c, SortOptions { descending: !s.asc, nulls_first: s.nulls_first }));
        }
    }
    Ok(order)
}

pub(super) fn check_order(input: &Stream, order: &[(usize, SortOptions)]) -> Result<()> {
    let columns: Vec<usize> = order.iter().map(|o| o.0).collect();
    check_key(input, &columns, "ordering by")
}

fn is_sorted(plan: &LogicalPlan) -> bool {
    match plan {
        LogicalPlan::Sort(_) => true,
        LogicalPlan::Distinct(Distinct::On(on)) => on.sort_expr.is_some(),
        LogicalPlan::Projection(p) => is_sorted(&p.input),
        LogicalPlan::SubqueryAlias(a) => is_sorted(&a.input),
        _ => false,
    }
}
