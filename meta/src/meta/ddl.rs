//! Definitions: relations, schemas, settings and users are created, changed and dropped by entries of the log.

use std::time::Duration;

use millrace_common::{RelationId, SqlError, SqlState, crash};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::log::{
    AlterRelation, CreateRelation, CreateSchema, DropRelations, DropSchema, Entry, LogEntry,
    Rebuild, SetSetting, SetUser, UserChange,
};
use millrace_rpc::version::StatementId;

use super::Meta;
use crate::error::VoidReason;
use crate::fold::Verdict;
use crate::settings;

/// Clauses of a CREATE.
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateOptions {
    /// State tables of the job; table 0 is the relation's rows. At least 1 where there is a job.
    pub table_count: u32,
    pub or_replace: bool,
    pub if_not_exists: bool,
    /// By which the creation is asked for, once or again.
    pub statement: Option<StatementId>,
}

/// How long a CREATE TABLE waits for the table's tasks; the table exists whatever comes of it.
const TABLE_START_LIMIT: Duration = Duration::from_secs(10);
/// How long a DDL statement waits for its record.
const DDL_LIMIT: Duration = Duration::from_secs(30);
/// A setting of the log that SQL neither shows nor sets.
const AUTHENTICATION_SECRET: &str = "#authentication_secret";

impl Meta {
    /// Durable when it returns; the job starts by itself (a table's is running when this returns).
    /// `relation.id`, `first_table_id`, `table_count` and `created_epoch` are filled in here.
    pub async fn create_relation(
        &self,
        mut relation: Relation,
        options: CreateOptions,
    ) -> Result<RelationId, SqlError> {
        if options.if_not_exists
            && let Some(found) = self.catalog().by_name(&relation.schema, &relation.name)
        {
            return Ok(RelationId(found.id));
        }
        relation.table_count = options.table_count;
        let (schema, name) = (relation.schema.clone(), relation.name.clone());
        let is_table = relation.kind() == RelationKind::Table;
        let (or_replace, process) = (options.or_replace, self.runs_on(&relation));
        let entry = CreateRelation { relation, or_replace, process };
        let verdict = self.append(options.statement, Entry::CreateRelation(entry)).await?;
        let id = match verdict {
            Ok(applied) => {
                applied.relation.ok_or_else(|| SqlError::internal("a creation without an id"))?
            }
            Err(VoidReason::DuplicateRelation(_)) if options.if_not_exists => {
                let catalog = self.catalog();
                let found = catalog.by_name(&schema, &name);
                return found.map(|r| RelationId(r.id)).ok_or_else(|| {
                    SqlError::new(
                        SqlState::SERIALIZATION_FAILURE,
                        format!("\"{name}\" was dropped concurrently"),
                    )
                });
            }
            Err(void) => return Err(void.into()),
        };
        if is_table && let Some(handle) = self.shared.job(id) {
            handle.wait_attempted(TABLE_START_LIMIT).await;
        }
        Ok(id)
    }

    /// The process that a new relation's job runs on; 0: there is none.
    fn runs_on(&self, relation: &Relation) -> u64 {
        match self.cluster.get() {
            None => self.incarnation,
            Some(cluster) => cluster.place_of_new(relation),
        }
    }

    /// All or none; error 2BP01 when something outside the list depends on one inside
    /// (see `Catalog::cascade`). Never waits for a barrier or a job.
    pub async fn drop_relations(&self, ids: &[RelationId]) -> Result<(), SqlError> {
        self.apply(Entry::DropRelations(DropRelations { ids: ids.iter().map(|i| i.0).collect() }))
            .await
    }

    pub async fn create_schema(&self, name: &str, if_not_exists: bool) -> Result<(), SqlError> {
        let entry = Entry::CreateSchema(CreateSchema { name: name.to_owned() });
        match self.append(None, entry).await? {
            Err(VoidReason::DuplicateSchema(_)) if if_not_exists => Ok(()),
            Err(void) => Err(void.into()),
            Ok(_) => Ok(()),
        }
    }

    /// `cascade`: with all relations in it and everything that depends on them.
    pub async fn drop_schema(&self, name: &str, cascade: bool) -> Result<(), SqlError> {
        self.apply(Entry::DropSchema(DropSchema { name: name.to_owned(), cascade })).await
    }

    /// A cluster-wide setting; `None` resets it.
    pub async fn set_setting(&self, name: &str, value: Option<&str>) -> Result<(), SqlError> {
        self.apply(setting_entry(name, value)?).await
    }

    /// What nobody outside knows and every start finds again. It is made at the first; where it cannot be kept, it
    /// comes with the error.
    pub async fn authentication_secret(&self) -> Result<String, (String, SqlError)> {
        if let Some(kept) = self.catalog().settings().get(AUTHENTICATION_SECRET) {
            return Ok(kept.clone());
        }
        let made: String = (0..4).map(|_| format!("{:016x}", self.shared.env.random())).collect();
        let (name, value) = (AUTHENTICATION_SECRET.to_owned(), Some(made.clone()));
        match self.apply(Entry::SetSetting(SetSetting { name, value })).await {
            Ok(()) => Ok(made),
            Err(error) => Err((made, error)),
        }
    }

    /// Creates, changes or removes a user; `verifier` is SCRAM's, none: no password.
    pub async fn set_user(
        &self,
        name: &str,
        change: UserChange,
        verifier: Option<String>,
    ) -> Result<(), SqlError> {
        let entry = SetUser { name: name.to_owned(), change: change as i32, verifier };
        self.apply(Entry::SetUser(entry)).await
    }

    /// Replaces options of a relation, pauses and resumes a source or sink, or changes how many tasks a job has. Durable
    /// when it returns.
    pub async fn alter_relation(&self, change: AlterRelation) -> Result<(), SqlError> {
        self.alter_by(None, change).await
    }

    pub(crate) async fn alter_by(
        &self,
        statement: Option<StatementId>,
        change: AlterRelation,
    ) -> Result<(), SqlError> {
        let id = RelationId(change.id);
        self.apply_by(statement, Entry::AlterRelation(change)).await?;
        // Jobs that failed at what was altered need not wait.
        let readers = self.shared.state.read().readers(id);
        for job in readers.into_iter().chain([id]).filter_map(|j| self.shared.job(j)) {
            job.retry.notify_waiters();
        }
        Ok(())
    }

    /// Has a derived relation's job compute its result anew, from a snapshot of its inputs: a view or index keeps its
    /// content meanwhile and then changes by the difference; a sink begins with another snapshot. Durable when it
    /// returns.
    pub async fn rebuild(&self, id: RelationId) -> Result<(), SqlError> {
        self.rebuild_by(None, id).await
    }

    pub(crate) async fn rebuild_by(
        &self,
        statement: Option<StatementId>,
        id: RelationId,
    ) -> Result<(), SqlError> {
        crash::point("rebuild-before-log");
        self.apply_by(statement, Entry::Rebuild(Rebuild { job: id.0 })).await?;
        crash::point("rebuild-after-log");
        Ok(())
    }

    pub(crate) async fn apply(&self, entry: Entry) -> Result<(), SqlError> {
        self.apply_by(None, entry).await
    }

    /// The same for a definition that is asked for by this id, once or again.
    pub(crate) async fn apply_by(
        &self,
        statement: Option<StatementId>,
        entry: Entry,
    ) -> Result<(), SqlError> {
        self.append(statement, entry).await?.map(drop).map_err(SqlError::from)
    }

    /// A statement does not wait for ever for a store that does not answer; what became of it is then
    /// not known, and the error says so.
    async fn append(
        &self,
        statement: Option<StatementId>,
        entry: Entry,
    ) -> Result<Verdict, SqlError> {
        let append = self.shared.log()?.append_once(LogEntry { statement, entry: Some(entry) });
        match tokio::time::timeout(DDL_LIMIT, append).await {
            Ok(verdict) => Ok(verdict?),
            Err(_) => Err(SqlError::new(
                SqlState::TRANSACTION_RESOLUTION_UNKNOWN,
                format!(
                    "the object store has not confirmed the statement within {} s",
                    DDL_LIMIT.as_secs()
                ),
            )
            .with_detail("It takes effect if the store still confirms it.")
            .with_hint(
                "Check the object store and the server's log, then whether the object exists.",
            )),
        }
    }
}

/// Sets a cluster-wide setting, if there is one of that name that may have that value.
pub(crate) fn setting_entry(name: &str, value: Option<&str>) -> Result<Entry, SqlError> {
    let setting = settings::find(name)?;
    let value = value.map(|v| setting.check(v)).transpose()?;
    Ok(Entry::SetSetting(SetSetting { name: setting.name.to_owned(), value }))
}
