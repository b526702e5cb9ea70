//! EXPLAIN of queries, of CREATE MATERIALIZED VIEW, and of running jobs.

pub mod form;
mod lookahead;

use std::any::Any;
use std::iter::repeat;
use std::sync::Arc;

use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::datasource::source_as_provider;
use datafusion::logical_expr::LogicalPlan;
use millrace_common::{RelationId, SqlError, SqlState};
use millrace_executor::stats::OperatorStats;
use millrace_functions::tree::Walk;
use millrace_graph::JobGraph;
use millrace_graph::codec::decode_graph;
use millrace_planner::Statement;
use millrace_planner::ast::{Explain, ExplainTarget};
use millrace_planner::bind::names::without_marks;
use millrace_planner::explain::{Relations, explain_graph, explain_stream, lookahead_subject};
use millrace_planner::stream::Watch;
use millrace_planner::stream::plan::Stream;
use millrace_rpc::catalog::RelationKind;
use sqlparser::ast::{Query, Statement as Sql};

use self::form::{Form, Line, Shown};
use super::{sink, view};
use crate::cluster::CatalogSnapshot;
use crate::display;
use crate::dml;
use crate::query::QueryEngine;
use crate::query::snapshot_table::SnapshotTable;
use crate::session::{RowSet, Session};

pub async fn explain(session: &mut Session, explain: &Explain) -> Result<RowSet, SqlError> {
    let form = Form::of(explain)?;
    let catalog = session.cluster().catalog();
    let shown = match &explain.target {
        ExplainTarget::Job(name) if !form.passes => {
            let relation = session.catalog_view().resolve(name)?;
            let kinds = [RelationKind::MaterializedView as i32, RelationKind::Sink as i32];
            if !kinds.contains(&relation.kind) {
                return Err(SqlError::new(
                    SqlState::WRONG_OBJECT_TYPE,
                    format!("\"{}\" is not a materialized view", relation.name),
                ));
            }
            let graph = decode_graph(&relation.graph)?;
            let lines = graph_lines(&graph, &catalog);
            Shown { job: job_lines(session, relation.id).await, ..Shown::of(lines) }
        }
        ExplainTarget::Statement(Statement::CreateView(def)) if def.materialized => {
            let view_catalog = session.catalog_view();
            let (bound, _) = view::bind(session, &view_catalog, def)?;
            let mut after = Passes::default();
            let graph = match form.passes {
                true => {
                    let watch: Watch<'_> = &mut |name, stream| after.add(name, stream);
                    view::plan_watched(&view_catalog, &bound, def, watch)?
                }
                false => view::plan(&view_catalog, &bound, def)?,
            };
            let graph = graph_lines(&graph, &catalog);
            Shown::of(if form.passes { after.then(graph) } else { graph })
        }
        _ if form.passes => {
            return Err(SqlError::unsupported("EXPLAIN (PASSES) of this statement")
                .with_hint("It shows how CREATE MATERIALIZED VIEW is planned."));
        }
        ExplainTarget::Statement(Statement::CreateSink(def)) => {
            let planned = sink::plan(session, &session.catalog_view(), def)?;
            Shown::of(graph_lines(&planned.graph, &catalog))
        }
        ExplainTarget::Statement(Statement::Sql(sql)) => {
            explain_sql(session, sql, explain.analyze, form).await?
        }
        ExplainTarget::Job(_) | ExplainTarget::Statement(_) => {
            return Err(SqlError::unsupported("EXPLAIN of this statement"));
        }
    };
    shown.rows(form)
}

/// A job's plan after each pass; of one that changes nothing only the name.
#[derive(Default)]
struct Passes {
    lines: Vec<String>,
    last: Vec<String>,
}

impl Passes {
    fn add(&mut self, name: &str, stream: &Stream) {
        let plan = explain_stream(stream);
        if plan == self.last {
            self.lines.push(format!("{name}: no change"));
            return;
        }
        self.lines.push(format!("{name}:"));
        self.lines.extend(plan.iter().map(|line| format!("  {line}")));
        self.last = plan;
    }

    /// All of them, and what the job runs.
    fn then(mut self, graph: Vec<String>) -> Vec<String> {
        self.lines.push("fragments:".into());
        self.lines.extend(graph.into_iter().map(|line| format!("  {line}")));
        self.lines
    }
}

/// What a job runs.
fn graph_lines(graph: &JobGraph, catalog: &CatalogSnapshot) -> Vec<String> {
    let name = |id: RelationId| name_of(catalog, id);
    let table = RelationKind::Table as i32;
    let is_table = |id: RelationId| catalog.by_id(id.0).is_some_and(|r| r.kind == table);
    let graph_of = |id: RelationId| {
        let stored = catalog.by_id(id.0).filter(|r| !r.graph.is_empty())?;
        decode_graph(&stored.graph).ok().map(Arc::new)
    };
    explain_graph(graph, &Relations { name: &name, is_table: &is_table, graph: &graph_of })
}

fn name_of(catalog: &CatalogSnapshot, id: RelationId) -> Option<String> {
    catalog.by_id(id.0).map(|r| r.name.clone())
}

/// How long EXPLAIN ANALYZE watches a job to tell its rates.
const WATCHED: std::time::Duration = std::time::Duration::from_secs(1);

/// What the running job does: its numbers now, and its rates over [`WATCHED`].
async fn job_lines(session: &Session, id: u32) -> Vec<String> {
    let find = || session.cluster().jobs().into_iter().find(|j| j.relation == id);
    let Some(before) = find() else { return vec![] };
    let started = std::time::Instant::now();
    tokio::time::sleep(WATCHED).await;
    // The numbers from before are better than none.
    let _ = session.cluster().refresh_reports().await;
    let Some(job) = find() else { return vec![] };
    let seconds = started.elapsed().as_secs_f64();
    let catalog = session.cluster().catalog();
    let waits = super::show::waits_for(&job, &session.cluster().jobs(), &catalog);
    let mut lines = vec![format!("State: {}", job.state), format!("Epoch: {}", job.epoch)];
    lines.extend(job.progress.as_ref().map(|p| format!("Progress: {p}")));
    lines.extend(job.lag_ms.map(|l| format!("Lag: {}", display::millis(l))));
    lines.extend(waits.map(|w| format!("Waits for: {w}")));
    lines.extend(job.reason.as_ref().map(|r| format!("Reason: {r}")));
    lines.push(format!("Rows: {}", display::count(job.rows.max(0) as u64)));
    lines.push(format!("Commits: {}, restarts: {}", job.commits, job.restarts));
    lines.push(format!(
        "Epochs take: {} (p50), {} (p99)",
        display::duration(job.barrier_p50),
        display::duration(job.barrier_p99)
    ));
    lines.push(format!("Cache hits: {}", display::ratio(job.cache())));
    lines.push(format!("Operators, over {}:", display::duration(started.elapsed())));
    let graph = catalog.by_id(id).and_then(|r| decode_graph(&r.graph).ok());
    let name = |id: RelationId| name_of(&catalog, id);
    for o in &job.operators {
        let at = (o.fragment, o.node);
        let was = before.operators.iter().find(|b| (b.fragment, b.node) == at);
        lines.push(operator_line(o, was, seconds));
        let about = |subject| lookahead_subject(graph.as_ref()?, at, subject, &name);
        lines.extend(lookahead::lines(o, &about).into_iter().map(|line| format!("    {line}")));
    }
    lines.push(format!("State: {}", display::bytes(job.state_bytes())));
    for t in &job.tables {
        lines.push(format!(
            "  {}: {} in memory, {} stored, {} entries",
            t.name,
            display::bytes(t.memory_bytes),
            display::bytes(t.stored_bytes),
            display::count(t.entries)
        ));
    }
    lines
}

/// Of a running job: `was` are its numbers so many seconds before.
fn operator_line(o: &OperatorStats, was: Option<&OperatorStats>, seconds: f64) -> String {
    let rate = |f: fn(&OperatorStats) -> u64| {
        let delta = f(o).saturating_sub(was.map_or(0, f));
        display::count((delta as f64 / seconds).round() as u64)
    };
    let mut line = format!(
        "  {}.{} {}: {} rows/s in, {} rows/s out",
        o.fragment,
        o.node,
        o.name,
        rate(|o| o.rows_in),
        rate(|o| o.rows_out)
    );
    let reads = o.cache_hits + o.cache_misses;
    if reads > 0 || o.state_bytes > 0 {
        line += &format!(
            "; cache {}, hits {}, {} store rounds",
            display::bytes(o.state_bytes),
            display::ratio((o.cache_hits, reads)),
            display::count(o.fetch_rounds)
        );
    }
    if o.parked_rows > 0 {
        line += &format!(", {} rows parked", display::count(o.parked_rows));
    }
    line
}

async fn explain_sql(
    session: &mut Session,
    sql: &Sql,
    analyze: bool,
    form: Form,
) -> Result<Shown, SqlError> {
    let catalog = session.catalog_view();
    let plan;
    let (head, query): (Option<String>, &Query) = match sql {
        Sql::Query(query) => (None, query),
        Sql::Update(update) => {
            plan = dml::update::plan_update(&catalog, update)?;
            (Some(format!("Update on {}", plan.table.name)), &plan.query)
        }
        Sql::Delete(delete) => {
            plan = dml::update::plan_delete(&catalog, delete)?;
            (Some(format!("Delete on {}", plan.table.name)), &plan.query)
        }
        Sql::Insert(insert) => {
            let table = dml::insert::table_of(&catalog, insert)?;
            let head = format!("Insert on {}", table.name);
            match &insert.source {
                Some(query) => (Some(head), query.as_ref()),
                None => return Ok(Shown::of([head])),
            }
        }
        _ => return Err(SqlError::unsupported("EXPLAIN of this statement")),
    };
    if analyze {
        if head.is_some() {
            return Err(SqlError::unsupported("EXPLAIN ANALYZE of a write"));
        }
        return explain_analyze(session, query, form).await;
    }
    let (bound, _) = session.bind(&catalog, query, &[])?;
    let plan = session.engine().optimize(bound.plan)?;
    let depth = usize::from(head.is_some());
    let text = without_marks(&plan.display_indent().to_string());
    let mut shown = Shown::of(text.lines().map(str::to_owned));
    let outputs = if form.verbose { outputs(&plan) } else { Vec::new() };
    let mut accesses = accesses(&plan).into_iter();
    let whole = outputs.len() == shown.lines.len();
    for (line, output) in
        shown.lines.iter_mut().zip(outputs.into_iter().map(Some).chain(repeat(None)))
    {
        line.depth += depth;
        line.output = output.filter(|_| whole);
        if line.text.starts_with("TableScan:")
            && let Some(access) = accesses.next().flatten()
        {
            line.text += &format!(", {access}");
        }
    }
    if let Some(head) = head {
        shown.lines.splice(..0, Shown::of([head]).lines);
    }
    Ok(shown)
}

/// The columns that each operator gives, in the order the plan is printed.
fn outputs(plan: &LogicalPlan) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut visit = |node: &LogicalPlan| {
        let columns = node.schema().columns();
        found.push(columns.iter().map(|c| without_marks(&c.flat_name())).collect());
        Ok(TreeNodeRecursion::Continue)
    };
    // The visitor never fails.
    let _ = plan.walk(&mut visit);
    found
}

/// How each scan of a plan gets at its rows, in the order the plan is printed.
fn accesses(plan: &LogicalPlan) -> Vec<Option<String>> {
    let mut found = Vec::new();
    let mut visit = |node: &LogicalPlan| {
        if let LogicalPlan::TableScan(scan) = node {
            let provider = source_as_provider(&scan.source).ok();
            let table = provider
                .as_ref()
                .and_then(|p| (p.as_ref() as &dyn Any).downcast_ref::<SnapshotTable>());
            found.push(table.and_then(|t| t.access(scan.projection.as_ref(), &scan.filters)));
        }
        Ok(TreeNodeRecursion::Continue)
    };
    // The visitor never fails.
    let _ = plan.walk(&mut visit);
    found
}

/// Runs the query and shows the physical plan with its metrics.
/// What measures rows on their way into joins is not of the plan.
fn leave_out_measures(lines: &mut Vec<Line>) {
    let mut above: Vec<usize> = Vec::new();
    lines.retain_mut(|line| {
        above.retain(|depth| *depth < line.depth);
        let measures = line.text.starts_with("Measured");
        if measures {
            above.push(line.depth);
        } else {
            line.depth -= above.len();
        }
        !measures
    });
}

async fn explain_analyze(session: &Session, query: &Query, form: Form) -> Result<Shown, SqlError> {
    use datafusion::physical_plan::display::DisplayableExecutionPlan;
    use futures::StreamExt;
    let catalog = session.catalog_view();
    let (bound, _) = session.bind(&catalog, query, &[])?;
    session.fix_epoch(&catalog, &bound).await?;
    let plan = session.engine().optimize(bound.plan)?;
    let physical = QueryEngine::measured(session.engine().physical(&plan).await?)?;
    let started = std::time::Instant::now();
    let mut stream = session.engine().execute(physical.clone(), &session.plan_memory());
    let mut rows = 0;
    while let Some(batch) = stream.next().await {
        rows += batch?.num_rows();
    }
    let plan = DisplayableExecutionPlan::with_metrics(physical.as_ref()).indent(form.verbose);
    let text = without_marks(&plan.to_string());
    let mut shown = Shown::of(text.lines().map(str::to_owned));
    leave_out_measures(&mut shown.lines);
    let took = format!("{:.3} ms", started.elapsed().as_secs_f64() * 1000.0);
    shown.footer = vec![("Rows".to_owned(), rows.to_string()), ("Execution Time".to_owned(), took)];
    Ok(shown)
}
