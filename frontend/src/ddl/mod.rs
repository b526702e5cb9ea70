//! Definitions: what CREATE, DROP, TRUNCATE and the statements about jobs do.

pub mod alter;
pub mod drop;
pub mod explain;
pub mod generated;
pub mod index;
pub mod progress;
pub mod show;
pub mod sink;
pub mod source;
pub mod subscription;
pub mod table;
pub mod types;
pub mod undo;
pub mod user;
pub mod view;

use millrace_common::{RelationId, SqlError, SqlState, settings};
use millrace_executor::options::{ExecOptions, JOB_OPTIONS};
use millrace_planner::Statement;
use millrace_planner::ast::{AlterAction, ObjectKind};
use millrace_rpc::catalog::{OptionEntry, Relation, RelationKind};
use sqlparser::ast::ObjectName;
use tokio_util::sync::CancellationToken;

use self::progress::wait_created;
use crate::cluster::JobRow;
use crate::dml;
use crate::query::SessionCatalog;
use crate::query::catalog_view::{SYSTEM_SCHEMAS, fold};
use crate::session::{Outcome, Session};

/// The state of a sink that waits to be resumed.
pub const PAUSED: &str = "paused";
/// The state of a job that no longer follows its inputs.
pub const DETACHED: &str = "detached";

/// Runs a statement of ours.
pub async fn execute(
    session: &mut Session,
    statement: &Statement,
    text: &str,
) -> Result<Outcome, SqlError> {
    let tag = match statement {
        Statement::CreateTable(def) => table::create_table(session, def, text).await?,
        Statement::CreateSource(def) => table::create_source(session, def, text).await?,
        Statement::CreateView(def) => view::create_view(session, def, text).await?,
        Statement::CreateIndex(def) => index::create_index(session, def, text).await?,
        Statement::CreateSink(def) => sink::create_sink(session, def, text).await?,
        Statement::CreateSubscription(def) => {
            subscription::create_subscription(session, def, text).await?
        }
        Statement::CreateSchema { name, if_not_exists } => {
            create_schema(session, &fold(name), *if_not_exists).await?
        }
        Statement::Drop(def) => drop::drop_objects(session, def).await?,
        Statement::AlterRelation {
            kind: kind @ (ObjectKind::Source | ObjectKind::Table),
            name,
            if_exists,
            action: action @ (AlterAction::SetOptions(_) | AlterAction::Pause(_)),
        } => source::alter(session, *kind, name, *if_exists, action).await?,
        Statement::AlterRelation { kind, name, if_exists, action } => {
            alter::alter(session, *kind, name, *if_exists, action).await?
        }
        Statement::User(statement) => user::execute(session, statement).await?,
        Statement::AlterSystem { name, value } => {
            let set = session.cluster().set_setting(name, value.as_deref());
            session.step.define(set).await?;
            "ALTER SYSTEM".to_owned()
        }
        Statement::Truncate { tables, .. } => {
            let catalog = session.catalog_view();
            let tables = tables.iter().map(|name| dml::update::to_truncate(&catalog, name));
            // Before the first one: where one is wrong nothing is removed.
            for table in tables.collect::<Result<Vec<_>, _>>()? {
                dml::update::truncate(session, table).await?;
                session.step.note_part();
            }
            "TRUNCATE TABLE".to_owned()
        }
        Statement::Flush => {
            session.cluster().flush().await?;
            "FLUSH".to_owned()
        }
        Statement::Wait => {
            wait_for_all(session).await?;
            "WAIT".to_owned()
        }
        Statement::CancelJobs(ids) => cancel_jobs(session, ids).await?,
        _ => return Err(SqlError::unsupported("this statement")),
    };
    Ok(Outcome::Command(tag))
}

async fn create_schema(
    session: &mut Session,
    name: &str,
    if_not_exists: bool,
) -> Result<String, SqlError> {
    if name.starts_with("pg_") || SYSTEM_SCHEMAS.contains(&name) {
        return Err(SqlError::new(
            SqlState("42939"),
            format!("unacceptable schema name \"{name}\""),
        )
        .with_detail("The prefix \"pg_\" is reserved for system schemas."));
    }
    if session.cluster().catalog().schemas.iter().any(|s| s == name) {
        let message = format!("schema \"{name}\" already exists");
        if !if_not_exists {
            return Err(SqlError::new(SqlState::DUPLICATE_SCHEMA, message));
        }
        session.notice("NOTICE", SqlState::DUPLICATE_SCHEMA, format!("{message}, skipping"));
    } else {
        session.step.define(session.cluster().create_schema(name)).await?;
    }
    Ok("CREATE SCHEMA".to_owned())
}

/// Jobs that are being created: of these states.
fn creating(jobs: &[JobRow], state: impl Fn(&str) -> bool) -> Vec<RelationId> {
    let creating = |j: &&JobRow| j.progress.is_some() && !j.rebuilding && state(&j.state);
    jobs.iter().filter(creating).map(|j| RelationId(j.relation)).collect()
}

/// Jobs that compute anew what they have. What they are about at this moment does not matter: one that waits for an
/// input or is started again is no nearer to its end.
fn rebuilding(jobs: &[JobRow]) -> Vec<RelationId> {
    jobs.iter().filter(|j| j.rebuilding).map(|j| RelationId(j.relation)).collect()
}

async fn wait_for_all(session: &Session) -> Result<(), SqlError> {
    let cluster = session.cluster();
    cluster.refresh_reports().await?;
    // Nobody waits for one that was told to wait itself.
    for id in creating(&cluster.jobs(), |state| state != PAUSED) {
        wait_created(session, id, session.cancel.clone()).await?;
    }
    for id in rebuilding(&cluster.jobs()) {
        cluster.wait_rebuilt(id, session.cancel.clone()).await?;
    }
    Ok(())
}

/// Cancelling a job under creation removes its relation.
async fn cancel_jobs(session: &Session, ids: &[u32]) -> Result<String, SqlError> {
    session.cluster().refresh_reports().await?;
    let creating = creating(&session.cluster().jobs(), |_| true);
    for id in ids {
        if !creating.contains(&RelationId(*id)) {
            return Err(SqlError::new(
                SqlState::UNDEFINED_OBJECT,
                format!("job {id} is not being created"),
            )
            .with_hint(
                "SHOW JOBS lists jobs; a running view is ended by DROP MATERIALIZED VIEW.",
            ));
        }
    }
    let ids = ids.iter().copied().map(RelationId).collect();
    session.step.define(session.cluster().drop_relations(ids)).await?;
    Ok("CANCEL JOBS".to_owned())
}

/// What a CREATE finds under its name.
pub enum Existing {
    None,
    /// IF NOT EXISTS: nothing to do.
    Skip,
    Replace,
}

pub fn check_name(
    session: &mut Session,
    view: &SessionCatalog,
    schema: &str,
    name: &str,
    kind: RelationKind,
    if_not_exists: bool,
    or_replace: bool,
) -> Result<Existing, SqlError> {
    let Some(found) = view.snapshot.get(schema, name) else { return Ok(Existing::None) };
    if or_replace && found.kind == kind as i32 {
        return Ok(Existing::Replace);
    }
    let message = format!("relation \"{name}\" already exists");
    if if_not_exists {
        session.notice("NOTICE", SqlState::DUPLICATE_TABLE, format!("{message}, skipping"));
        return Ok(Existing::Skip);
    }
    Err(SqlError::new(SqlState::DUPLICATE_TABLE, message))
}

/// Where a relation that is to be created goes: the catalog, a schema and a name. `None`: it is there, and the statement
/// says that this is no failure.
pub fn new_name(
    session: &mut Session,
    name: &ObjectName,
    kind: RelationKind,
    if_not_exists: bool,
) -> Result<Option<(SessionCatalog, String, String)>, SqlError> {
    let catalog = session.catalog_view();
    let (schema, name) = catalog.target(name)?;
    let existing = check_name(session, &catalog, &schema, &name, kind, if_not_exists, false)?;
    Ok((!matches!(existing, Existing::Skip)).then_some((catalog, schema, name)))
}

/// Creates a relation.
async fn create(
    session: &Session,
    relation: Relation,
    table_count: u32,
    or_replace: bool,
) -> Result<RelationId, SqlError> {
    let cluster = session.cluster();
    cluster.await_process_for(&relation).await?;
    session.step.define(cluster.create_relation(relation, table_count, or_replace)).await
}

/// Creates a relation and waits until it can be read. A wait that is cut off, however, drops it.
pub async fn create_and_wait(
    session: &mut Session,
    mut relation: Relation,
    table_count: u32,
    or_replace: bool,
) -> Result<(), SqlError> {
    relation.options.extend(job_options(session)?);
    let background = session.settings.bool("background_ddl");
    if background {
        return create(session, relation, table_count, or_replace).await.map(drop);
    }
    let (id, undo) = undo::create(session, relation, table_count, or_replace).await?;
    wait_created(session, id, CancellationToken::new()).await?;
    undo.keep();
    Ok(())
}

/// How the session's settings have the job run, where they say anything.
fn job_options(session: &Session) -> Result<Vec<OptionEntry>, SqlError> {
    let mut options = Vec::new();
    for name in JOB_OPTIONS {
        let value = session.settings.get(name)?;
        if value != settings::find(name)?.default {
            options.push(OptionEntry { name: name.to_owned(), value: value.to_owned() });
        }
    }
    check_sketch(&options)?;
    Ok(options)
}

/// Settings of the sketch of frequent keys are right each by itself, and may make no sense together.
fn check_sketch(options: &[OptionEntry]) -> Result<(), SqlError> {
    let value = |name: &str| options.iter().find(|o| o.name == name).map(|o| o.value.as_str());
    let sketch = ExecOptions::default().for_job(value).sketch;
    sketch.check().map_err(|misfit| {
        SqlError::new(SqlState::INVALID_PARAMETER_VALUE, misfit.to_string())
            .with_hint(misfit.hint())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rebuild_is_waited_for_whatever_its_job_is_about() {
        // What a rebuild goes through, and how it may be held up: with progress and, once it has failed, without.
        let states = ["rebuilding", "waiting", "starting", "stalled", "failed", "running"];
        for (state, progress) in states.iter().flat_map(|s| [(s, None), (s, Some("0%".to_owned()))])
        {
            let state = (*state).to_owned();
            let row = |relation, rebuilding| JobRow {
                relation,
                rebuilding,
                state: state.clone(),
                progress: progress.clone(),
                ..JobRow::default()
            };
            let jobs = [row(1, true), row(2, false)];
            assert_eq!(rebuilding(&jobs), [RelationId(1)], "{state}");
            let created = if progress.is_some() { vec![RelationId(2)] } else { vec![] };
            assert_eq!(creating(&jobs, |_| true), created, "{state}");
        }
    }
}
