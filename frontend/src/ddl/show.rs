//! SHOW and DESCRIBE.

use std::collections::HashSet;
use std::sync::Arc;

use millrace_common::{RelationId, SqlError, SqlState};
use millrace_planner::ast::{ObjectKind, Show};
use millrace_rpc::catalog::{Column, Relation, RelationKind};
use sqlparser::ast::{Ident, ObjectName};

use super::drop::noun;
use super::{DETACHED, PAUSED, sink};
use crate::cluster::{CatalogSnapshot, Cluster, JobRow};
use crate::display::{duration, millis};
use crate::query::SessionCatalog;
use crate::query::catalog_view::{SYSTEM_SCHEMAS, fold};
use crate::secrets::shown_definition;
use crate::session::{RowSet, Session};

pub const DESCRIBE: &[&str] = &["Name", "Type", "Nullable", "Default", "Key"];
const JOBS: &[&str] = &[
    "id",
    "name",
    "kind",
    "state",
    "progress",
    "lag_ms",
    "reason",
    "rows",
    "state_bytes",
    "waits_for",
];
const SOURCES: &[&str] = &["Name", "Connector", "State", "Lag", "Reason"];
const SINKS: &[&str] = &["Name", "Target", "State", "Published", "Staged", "Lag_ms", "Reason"];

/// The columns a SHOW returns.
pub fn columns(show: &Show) -> &'static [&'static str] {
    match show {
        Show::Sources(_) => SOURCES,
        Show::Tables(_) | Show::Views(_) | Show::MaterializedViews(_) | Show::Indexes(_) => {
            &["Name"]
        }
        Show::Sinks(_) => SINKS,
        Show::Subscriptions(_) => &["Name", "From", "Retention"],
        Show::SubscriptionCursors => &["Name", "Subscription"],
        Show::Schemas => &["Schema"],
        Show::Databases => &["Database"],
        Show::Jobs => JOBS,
        Show::Columns(_) => DESCRIBE,
        Show::Create(..) => &["Name", "Create Sql"],
        Show::AllSettings => &["name", "setting", "description"],
        Show::Setting(_) => &["setting"],
    }
}

pub fn show(session: &Session, show: &Show) -> Result<RowSet, SqlError> {
    let names = columns(show);
    let one = |values: Vec<String>| values.into_iter().map(|v| vec![Some(v)]).collect::<Vec<_>>();
    let rows = match show {
        Show::Tables(schema) => one(relations(session, schema.as_ref(), RelationKind::Table)?),
        Show::Sources(schema) => sources(session, schema.as_ref())?,
        Show::Views(schema) => one(relations(session, schema.as_ref(), RelationKind::View)?),
        Show::MaterializedViews(schema) => {
            one(relations(session, schema.as_ref(), RelationKind::MaterializedView)?)
        }
        Show::Indexes(_) => one(relations(session, None, RelationKind::Index)?),
        Show::Sinks(schema) => sinks(session, schema.as_ref())?,
        Show::Subscriptions(schema) => subscriptions(session, schema.as_ref())?,
        Show::SubscriptionCursors => session.subscription_cursors(),
        Show::Schemas => {
            let mut all = session.cluster().catalog().schemas.clone();
            all.extend(SYSTEM_SCHEMAS.iter().map(|s| (*s).to_owned()));
            all.sort();
            one(all)
        }
        Show::Databases => one(vec![session.database.clone()]),
        Show::Jobs => jobs(session),
        Show::Columns(name) => return describe(session, name),
        Show::Create(kind, name) => vec![create_text(session, *kind, name)?],
        Show::AllSettings => return session.show_all(),
        Show::Setting(name) => return session.show(name),
    };
    RowSet::text(names, rows, "SHOW")
}

fn relations(
    session: &Session,
    schema: Option<&Ident>,
    kind: RelationKind,
) -> Result<Vec<String>, SqlError> {
    let found = of_kind(session, schema, kind)?;
    let mut names: Vec<String> = found.into_iter().map(|r| r.name.clone()).collect();
    names.sort();
    Ok(names)
}

/// A line a sink: where it goes, in what form, and how far it has come.
fn sinks(session: &Session, schema: Option<&Ident>) -> Result<Lines, SqlError> {
    let catalog = session.cluster().catalog();
    let jobs = told_jobs(session.cluster().as_ref(), &catalog);
    let mut found = of_kind(session, schema, RelationKind::Sink)?;
    found.sort_by(|a, b| a.name.cmp(&b.name));
    let line = |r: &Arc<Relation>| {
        let job = jobs.iter().find(|j| j.relation == r.id);
        let target = match sink::target_of(r).and_then(|t| catalog.by_id(t.0).cloned()) {
            Some(table) => format!("table {}", table.name),
            None => r.option("connector").unwrap_or_default().to_owned(),
        };
        vec![
            Some(r.name.clone()),
            Some(target),
            job.map(|j| j.state.clone()),
            job.map(|j| j.published.to_string()),
            job.map(|j| j.staged.to_string()),
            job.and_then(|j| j.lag_ms).map(|l| l.to_string()),
            job.and_then(|j| j.reason.clone()),
        ]
    };
    Ok(found.iter().map(line).collect())
}

fn subscriptions(session: &Session, schema: Option<&Ident>) -> Result<Lines, SqlError> {
    let catalog = session.cluster().catalog();
    let mut found = of_kind(session, schema, RelationKind::Subscription)?;
    found.sort_by(|a, b| a.name.cmp(&b.name));
    let line = |r: &Arc<Relation>| {
        let from = r.depends_on.first().and_then(|id| catalog.by_id(*id));
        vec![
            Some(r.name.clone()),
            from.map(|f| format!("{}.{}", f.schema, f.name)),
            r.option("retention").map(str::to_owned),
        ]
    };
    Ok(found.iter().map(line).collect())
}

type Lines = Vec<Vec<Option<String>>>;

fn of_kind(
    session: &Session,
    schema: Option<&Ident>,
    kind: RelationKind,
) -> Result<Vec<Arc<Relation>>, SqlError> {
    let catalog = session.cluster().catalog();
    let schemas = match schema {
        Some(s) => {
            let s = fold(s);
            if !catalog.schemas.contains(&s) {
                return Err(SqlError::new(
                    SqlState::INVALID_SCHEMA_NAME,
                    format!("schema \"{s}\" does not exist"),
                ));
            }
            vec![s]
        }
        None => session.search_path(),
    };
    let all = catalog.all().iter().filter(|r| r.ephemeral == 0);
    let wanted = |r: &&Arc<Relation>| r.kind == kind as i32 && schemas.contains(&r.schema);
    Ok(all.filter(wanted).cloned().collect())
}

fn sources(
    session: &Session,
    schema: Option<&Ident>,
) -> Result<Vec<Vec<Option<String>>>, SqlError> {
    let catalog = session.cluster().catalog();
    let names = relations(session, schema, RelationKind::Source)?;
    let schemas = match schema {
        Some(s) => vec![fold(s)],
        None => session.search_path(),
    };
    let found = names.iter().filter_map(|n| schemas.iter().find_map(|s| catalog.get(s, n)));
    Ok(found
        .map(|r| {
            let report = session.cluster().source_report(RelationId(r.id)).unwrap_or_default();
            let lags: Vec<u64> = report.splits.iter().filter_map(|s| s.lag()).collect();
            vec![
                Some(r.name.clone()),
                r.option("connector").map(str::to_owned),
                Some(report.state),
                (!lags.is_empty()).then(|| lags.iter().sum::<u64>().to_string()),
                report.reason,
            ]
        })
        .collect())
}

/// The jobs as people are told of them. One that reads a paused source has all that the source has been told to give,
/// and yet nobody knows how far behind it is.
pub fn told_jobs(cluster: &dyn Cluster, catalog: &CatalogSnapshot) -> Vec<JobRow> {
    let mut all = cluster.jobs();
    for job in &mut all {
        let relation = catalog.by_id(job.relation);
        if let Some(sink) = relation.filter(|r| r.paused && r.kind == RelationKind::Sink as i32) {
            tell_paused(job, &sink.name);
        } else if let Some(paused) = paused_input(cluster, catalog, job.relation) {
            job.lag_ms = None;
            job.reason.get_or_insert_with(|| format!("{paused} is paused"));
        }
    }
    all
}

/// A paused sink is that from the ALTER on, though its job may take a moment to notice. A failure is told first.
fn tell_paused(job: &mut JobRow, name: &str) {
    if job.state != "failed" && job.state != DETACHED {
        job.state = PAUSED.to_owned();
        job.progress = None;
        job.reason = Some(format!("sink {name} is paused"));
    }
}

/// A source or table under a relation, or itself, that is paused and may have rows that have not been read.
fn paused_input(cluster: &dyn Cluster, catalog: &CatalogSnapshot, id: u32) -> Option<String> {
    let (mut waiting, mut seen) = (vec![id], HashSet::new());
    while let Some(id) = waiting.pop() {
        let Some(relation) = catalog.by_id(id).filter(|_| seen.insert(id)) else { continue };
        if relation.paused {
            let report = cluster.source_report(RelationId(id)).unwrap_or_default();
            if report.splits.is_empty() || report.splits.iter().any(|s| s.lag() != Some(0)) {
                return Some(format!("{} {}", noun(relation), relation.name));
            }
        }
        waiting.extend(&relation.depends_on);
    }
    None
}

fn jobs(session: &Session) -> Vec<Vec<Option<String>>> {
    let catalog = session.cluster().catalog();
    let all = told_jobs(session.cluster().as_ref(), &catalog);
    all.iter()
        .map(|j| {
            let relation = catalog.by_id(j.relation);
            let waits = waits_for(j, &all, &catalog);
            vec![
                Some(j.relation.to_string()),
                relation.map(|r| format!("{}.{}", r.schema, r.name)),
                relation.map(|r| noun(r).to_owned()),
                Some(j.state.clone()),
                j.progress.clone(),
                j.lag_ms.map(|v| v.to_string()),
                j.reason.clone(),
                Some(j.rows.to_string()),
                Some(j.state_bytes().to_string()),
                waits,
            ]
        })
        .collect()
}

/// A job that is behind by less is on its way.
const BEHIND_MS: u64 = 1000;

fn is_behind(job: &JobRow) -> bool {
    job.state == "failed" || job.state == "stalled" || job.lag_ms >= Some(BEHIND_MS)
}

/// Why a job is behind: an input that is further behind or has failed, reads of its own state, or its
/// own work. `None`: it is not.
pub fn waits_for(job: &JobRow, all: &[JobRow], catalog: &CatalogSnapshot) -> Option<String> {
    let name = |id: u32| catalog.by_id(id).map_or_else(|| id.to_string(), |r| r.name.clone());
    let inputs = catalog.by_id(job.relation).map_or(&[][..], |r| &r.depends_on);
    if job.state == "waiting" {
        let unready = |j: &&JobRow| inputs.contains(&j.relation) && j.progress.is_some();
        return all
            .iter()
            .find(unready)
            .map(|j| format!("input {} ({})", name(j.relation), j.state));
    }
    if job.state == DETACHED {
        return Some("REBUILD".to_owned());
    }
    let lag = job.lag_ms.filter(|lag| *lag >= BEHIND_MS)?;
    if job.state == PAUSED {
        return Some("RESUME".to_owned());
    }
    let worst = all
        .iter()
        .filter(|j| inputs.contains(&j.relation))
        .filter(|j| is_behind(j))
        .max_by_key(|j| (j.state == "failed", j.lag_ms));
    if let Some(input) = worst {
        let ms = input.lag_ms.unwrap_or(0);
        return Some(match input.state.as_str() {
            "running" | "creating" => format!("input {} ({})", name(input.relation), millis(ms)),
            state => format!("input {} ({state})", name(input.relation)),
        });
    }
    let parked = job.operators.iter().max_by_key(|o| o.parked_rows).filter(|o| o.parked_rows > 0);
    Some(match parked {
        Some(o) => format!("state of {} ({} rows parked)", o.name, o.parked_rows),
        None => {
            format!(
                "its own work (epochs take {}, behind {})",
                duration(job.barrier_p99),
                millis(lag)
            )
        }
    })
}

fn create_text(
    session: &Session,
    kind: ObjectKind,
    name: &ObjectName,
) -> Result<Vec<Option<String>>, SqlError> {
    let relation = session.catalog_view().resolve(name)?;
    if noun(&relation) != kind.noun() {
        return Err(SqlError::new(
            SqlState::WRONG_OBJECT_TYPE,
            format!("\"{}\" is not a {}", relation.name, kind.noun()),
        ));
    }
    Ok(vec![
        Some(format!("{}.{}", relation.schema, relation.name)),
        Some(shown_definition(&relation)),
    ])
}

pub fn describe(session: &Session, name: &ObjectName) -> Result<RowSet, SqlError> {
    let view: SessionCatalog = session.catalog_view();
    let relation = view.resolve(name)?;
    RowSet::text(DESCRIBE, describe_rows(&relation)?, "DESCRIBE")
}

/// The DEFAULT of a column, or where else its values come from.
fn described_default(c: &Column) -> Option<String> {
    let generated = c.generated_sql.as_ref().map(|e| format!("generated always as ({e})"));
    let included = c.include.as_ref().map(|i| format!("include {i}"));
    generated.or(included).or_else(|| c.default_sql.clone())
}

fn describe_rows(relation: &Relation) -> Result<Vec<Vec<Option<String>>>, SqlError> {
    relation
        .columns
        .iter()
        .enumerate()
        .filter(|(_, c)| !c.hidden)
        .map(|(i, c)| {
            let key = relation.primary_key && relation.key.contains(&(i as u32));
            Ok(vec![
                Some(c.name.clone()),
                Some(c.sql_type()?.to_string()),
                Some(if c.nullable { "yes" } else { "no" }.to_owned()),
                described_default(c),
                key.then(|| "primary key".to_owned()),
            ])
        })
        .collect()
}
