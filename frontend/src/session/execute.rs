//! One statement: to whom it goes.

use std::sync::Arc;

use arrow::array::ArrayRef;
use futures::FutureExt;
use millrace_common::{SqlError, SqlState};
use millrace_planner::ast::Show;
use millrace_planner::bind::locate;
use millrace_planner::parser::{folded, with_changes_rows};
use millrace_planner::{ParsedStatement, Statement};
use sqlparser::ast::{DataType, DiscardObject, Expr, Ident, ObjectName, Statement as Sql};

use super::known::{can_be_tried_again, changes_in_with};
use super::missing::observed;
use super::planned::REPLANS;
use super::{Block, Outcome, Prepared, RowSet, Session, params, transaction};
use crate::query::catalog_view::fold;
use crate::{copy, ddl, dml};

impl Session {
    /// Runs a statement with its parameters; `prepared`: if its columns are those that were described. It is planned again
    /// where it turns out to have been planned on an older catalog.
    pub async fn execute(
        &mut self,
        parsed: &ParsedStatement,
        values: &[ArrayRef],
        prepared: Option<&Prepared>,
    ) -> Result<Outcome, SqlError> {
        if matches!(self.block, Block::Failed { .. }) && !ends_block(&parsed.statement) {
            return Err(transaction::aborted());
        }
        let mut left = if can_be_tried_again(&parsed.statement) { REPLANS } else { 0 };
        self.replans = left > 0;
        let mut catalog = self.cluster().catalog();
        let observer = self.observer(parsed);
        // In a box each: they are large, and contain what EXECUTE executes.
        let mut result = observed(observer, Box::pin(self.attempt(parsed, values, prepared))).await;
        while left > 0
            && let Err(error) = &result
            && self.plans_again(error, &catalog).await
        {
            left -= 1;
            self.replans = left > 0;
            catalog = self.cluster().catalog();
            result = Box::pin(self.attempt(parsed, values, prepared)).await;
        }
        // What is read later for the statement, such as rows of a COPY, does not begin anew.
        self.replans = false;
        result.map(|outcome| self.in_zone(outcome))
    }

    /// What comes of it, with the places of errors.
    async fn attempt(
        &mut self,
        parsed: &ParsedStatement,
        values: &[ArrayRef],
        prepared: Option<&Prepared>,
    ) -> Result<Outcome, SqlError> {
        if let Some(prepared) = prepared {
            self.check_columns(prepared).await?;
        }
        let described = prepared.filter(|_| changes_in_with(&parsed.statement));
        self.described = described.and_then(|prepared| prepared.fields.clone());
        let result = self.execute_statement(parsed, values).await;
        result.map_err(|e| locate::in_statement(e, parsed))
    }

    async fn execute_statement(
        &mut self,
        parsed: &ParsedStatement,
        values: &[ArrayRef],
    ) -> Result<Outcome, SqlError> {
        if !ends_block(&parsed.statement) {
            self.shared.locks.check(self.pid)?;
        }
        self.queried |= takes_snapshot(&parsed.statement);
        self.refresh_shown(parsed).await?;
        match &parsed.statement {
            Statement::Sql(sql) => {
                // The parameters of PREPARE are given at EXECUTE.
                let prepares = matches!(sql.as_ref(), Sql::Prepare { .. });
                if !prepares && params::count(sql.as_ref()) > values.len() {
                    return Err(params::undefined(values.len() + 1));
                }
                // A long statement is not copied without need.
                if (prepares || values.is_empty()) && self.settings.zone().is_none() {
                    return self.execute_sql(sql, parsed).await;
                }
                let mut sql = sql.as_ref().clone();
                if !prepares {
                    params::substitute(&mut sql, values)?;
                }
                folded::unfold_rows(&mut sql)?;
                self.fit_to_zone(&mut sql)?;
                self.execute_sql(&sql, parsed).await
            }
            Statement::Show(Show::Setting(name)) => Ok(Outcome::Rows(self.show(name)?)),
            Statement::Show(Show::AllSettings) => Ok(Outcome::Rows(self.show_all()?)),
            Statement::Show(show) => Ok(Outcome::Rows(ddl::show::show(self, show)?)),
            Statement::Describe { name } => Ok(Outcome::Rows(ddl::show::describe(self, name)?)),
            Statement::Explain(explain) => {
                Ok(Outcome::Rows(ddl::explain::explain(self, explain).await?))
            }
            Statement::DeclareSubscriptionCursor(declare) => {
                Ok(Outcome::Command(self.declare_feed(declare).await?))
            }
            Statement::FetchWait { cursor, count, timeout } => {
                let timeout = millrace_common::settings::parse_duration(timeout)?;
                let wanted = usize::try_from(*count).unwrap_or(usize::MAX);
                Ok(Outcome::Rows(self.fetch_changes(&fold(cursor), wanted, Some(timeout)).await?))
            }
            Statement::Move { cursor, direction } => {
                let passed = self.pass(&fold(cursor), direction).await?;
                Ok(Outcome::Command(format!("MOVE {passed}")))
            }
            Statement::Subscribe(subscribe) => {
                // It lasts, and a view is made for it: it is planned on nothing that may have been replaced before.
                let refreshed = self.cluster().refresh_catalog().await;
                if self.reads_fresh()? {
                    refreshed?;
                }
                self.subscribe(subscribe).await
            }
            statement => {
                self.refuse_in_block(noun(statement))?;
                self.commit_implicit().await?;
                self.cluster().refresh_catalog().await?;
                ddl::execute(self, statement, &parsed.text).await
            }
        }
    }

    async fn execute_sql(
        &mut self,
        sql: &Sql,
        parsed: &ParsedStatement,
    ) -> Result<Outcome, SqlError> {
        match sql {
            Sql::Query(query) if with_changes_rows(query) => {
                self.check_writable("a write")?;
                // Of a type that is not looked into: what writes wait for is nested deeply.
                let result = dml::with::execute(self, query).boxed().await;
                self.notice_late();
                result
            }
            Sql::Query(query) => match crate::catalog::rewrite::sets(query) {
                Some(settings) => Ok(Outcome::Rows(self.set_configs(settings)?)),
                None => Ok(Outcome::Rows(self.query(query).await?)),
            },
            Sql::Insert(_) | Sql::Update(_) | Sql::Delete(_) => {
                self.execute_write(sql).boxed().await
            }
            Sql::Copy { .. } => copy::plan(self, sql, parsed).await,
            Sql::StartTransaction { modes, .. } => Ok(Outcome::Command(self.begin(modes)?)),
            Sql::Commit { chain, .. } => self.execute_commit(*chain).await,
            Sql::Rollback { savepoint: None, chain } => self.execute_rollback(*chain),
            Sql::Rollback { savepoint: Some(name), .. } => {
                Ok(Outcome::Command(self.rollback_to(&fold(name))?))
            }
            Sql::Savepoint { name } => Ok(Outcome::Command(self.savepoint(fold(name))?)),
            Sql::ReleaseSavepoint { name } => Ok(Outcome::Command(self.release(&fold(name))?)),
            Sql::Set(set) => {
                self.set(set)?;
                done("SET")
            }
            Sql::Reset(reset) => self.execute_reset(&reset.to_string()),
            Sql::Discard { object_type } => {
                if matches!(object_type, DiscardObject::ALL) {
                    self.discard_all()?;
                }
                Ok(Outcome::Command(format!("DISCARD {object_type}")))
            }
            Sql::Declare { stmts } => match stmts.as_slice() {
                [declare] => Ok(Outcome::Command(self.declare(declare, &parsed.text).await?)),
                _ => Err(SqlError::unsupported("this form of DECLARE")),
            },
            Sql::Fetch { name, direction, .. } => {
                Ok(Outcome::Rows(self.fetch(&fold(name), direction).await?))
            }
            Sql::Close { cursor } => Ok(Outcome::Command(self.close(cursor)?)),
            Sql::Prepare { name, statement, data_types } => {
                let inner = ParsedStatement {
                    statement: Statement::Sql(statement.clone()),
                    text: parsed.text.clone(),
                    offset: parsed.offset,
                    source: Arc::clone(&parsed.source),
                };
                self.execute_prepare(fold(name), inner, data_types)
            }
            Sql::Execute { name: Some(name), parameters, .. } => {
                Box::pin(self.execute_prepared(&prepared_name(name), parameters)).await
            }
            Sql::Deallocate { name, .. } => self.execute_deallocate(name),
            Sql::UNLISTEN { .. } => done("UNLISTEN"),
            Sql::Analyze(_) => done("ANALYZE"),
            Sql::Vacuum(_) => done("VACUUM"),
            _ => Ok(Outcome::Command(crate::unsupported::run(self, &parsed.text)?)),
        }
    }

    /// INSERT, UPDATE and DELETE.
    async fn execute_write(&mut self, sql: &Sql) -> Result<Outcome, SqlError> {
        self.check_writable("a write")?;
        let result = dml::execute(self, sql).await;
        self.notice_late();
        let result = result?;
        Ok(match result.returning {
            Some((fields, stream)) => Outcome::Rows(RowSet { fields, stream, tag: result.tag }),
            None => Outcome::Command(result.tag),
        })
    }

    async fn execute_commit(&mut self, chain: bool) -> Result<Outcome, SqlError> {
        let next = if chain { Some(self.chained("COMMIT AND CHAIN")?) } else { None };
        let tag = self.commit().await?;
        self.begin_chained(next)?;
        Ok(Outcome::Command(tag))
    }

    fn execute_rollback(&mut self, chain: bool) -> Result<Outcome, SqlError> {
        let next = if chain { Some(self.chained("ROLLBACK AND CHAIN")?) } else { None };
        let tag = self.rollback();
        self.begin_chained(next)?;
        Ok(Outcome::Command(tag))
    }

    /// RESET, given by its text.
    fn execute_reset(&mut self, text: &str) -> Result<Outcome, SqlError> {
        let name = text.trim_start_matches("RESET ").trim();
        if name.eq_ignore_ascii_case("all") {
            self.reset_all()
        } else if name.eq_ignore_ascii_case("role") {
            // Nobody has another than their own.
        } else {
            self.reset(&name.replace('"', ""))?
        }
        done("RESET")
    }

    /// PREPARE name (types) AS statement.
    fn execute_prepare(
        &mut self,
        name: String,
        statement: ParsedStatement,
        types: &[DataType],
    ) -> Result<Outcome, SqlError> {
        let oids: Vec<u32> = types
            .iter()
            .map(|t| ddl::types::sql_type(t).map(|t| t.oid()))
            .collect::<Result<_, _>>()?;
        if self.prepared.contains_key(&name) {
            return Err(SqlError::new(
                SqlState("42P05"),
                format!("prepared statement \"{name}\" already exists"),
            ));
        }
        let described = self.describe(statement, &oids)?;
        let prepared = Prepared { from_sql: true, ..described };
        self.prepared.insert(name, Arc::new(prepared));
        done("PREPARE")
    }

    fn execute_deallocate(&mut self, name: &Ident) -> Result<Outcome, SqlError> {
        if name.quote_style.is_none() && name.value.eq_ignore_ascii_case("all") {
            self.prepared.clear();
            return done("DEALLOCATE ALL");
        }
        let name = fold(name);
        self.prepared.remove(&name).ok_or_else(|| no_statement(&name))?;
        done("DEALLOCATE")
    }

    /// EXECUTE name (expr, …).
    async fn execute_prepared(
        &mut self,
        name: &str,
        parameters: &[Expr],
    ) -> Result<Outcome, SqlError> {
        let prepared = self.prepared.get(name).cloned().ok_or_else(|| no_statement(name))?;
        let Some(parsed) = &prepared.statement else { return Ok(Outcome::Empty) };
        if parameters.len() != prepared.param_types.len() {
            return Err(SqlError::new(
                SqlState::SYNTAX_ERROR,
                format!("wrong number of parameters for prepared statement \"{name}\""),
            )
            .with_detail(format!(
                "Expected {} parameters but got {}.",
                prepared.param_types.len(),
                parameters.len()
            )));
        }
        let mut left = REPLANS;
        let values = loop {
            self.replans = left > 0;
            let catalog = self.cluster().catalog();
            match self.values_of(name, &prepared, parameters).await {
                Ok(values) => break values,
                Err(error) if left > 0 && self.plans_again(&error, &catalog).await => left -= 1,
                Err(error) => return Err(error),
            }
        };
        self.execute(parsed, &values, Some(prepared.as_ref())).await
    }

    /// The values of parameters of EXECUTE.
    async fn values_of(
        &self,
        name: &str,
        prepared: &Prepared,
        parameters: &[Expr],
    ) -> Result<Vec<ArrayRef>, SqlError> {
        let mut values = Vec::with_capacity(parameters.len());
        for (expr, t) in parameters.iter().zip(&prepared.param_types) {
            let to = millrace_common::SqlType::from_arrow(t)?;
            let expr = dml::rewrite::type_unknown(expr.clone(), to)?;
            let expr = self.fit_value(expr, to)?;
            let query = dml::rewrite::parse_query(&format!("SELECT {expr}"))?;
            let (_, batches) = self.collect(&self.catalog_view(), &query).await?;
            let value = batches.iter().find(|b| b.num_rows() > 0).map(|b| b.column(0).slice(0, 1));
            let value = value.ok_or_else(|| SqlError::internal("a parameter has no value"))?;
            values.push(dml::assign::assign(&value, name, to)?);
        }
        Ok(values)
    }
}

/// The outcome of a statement that answers with its tag alone.
fn done(tag: &str) -> Result<Outcome, SqlError> {
    Ok(Outcome::Command(tag.to_owned()))
}

/// The name that EXECUTE gives, as PREPARE has kept it.
pub fn prepared_name(name: &ObjectName) -> String {
    match name.0.as_slice() {
        [part] => part.as_ident().map(fold).unwrap_or_else(|| part.to_string()),
        _ => name.to_string(),
    }
}

pub fn no_statement(name: &str) -> SqlError {
    let message = match name {
        "" => "unnamed prepared statement does not exist".to_owned(),
        name => format!("prepared statement \"{name}\" does not exist"),
    };
    SqlError::new(SqlState::INVALID_SQL_STATEMENT_NAME, message)
}

/// Whether a failed block takes a statement: its end, or the way back to a savepoint.
pub fn ends_block(statement: &Statement) -> bool {
    matches!(statement, Statement::Sql(s) if matches!(s.as_ref(), Sql::Commit { .. } | Sql::Rollback { .. }))
}

/// Whether the isolation of the block cannot change any more after it.
fn takes_snapshot(statement: &Statement) -> bool {
    match statement {
        Statement::Sql(sql) => matches!(
            sql.as_ref(),
            Sql::Query(_)
                | Sql::Insert(_)
                | Sql::Update(_)
                | Sql::Delete(_)
                | Sql::Copy { .. }
                | Sql::Declare { .. }
        ),
        Statement::Explain(_) => true,
        _ => false,
    }
}

fn noun(statement: &Statement) -> &'static str {
    match statement {
        Statement::Flush => "FLUSH",
        Statement::Wait => "WAIT",
        Statement::CancelJobs(_) => "CANCEL JOBS",
        Statement::Truncate { .. } => "TRUNCATE",
        Statement::AlterSystem { .. } => "ALTER SYSTEM",
        Statement::User(_) => "a change of users",
        _ => "a definition",
    }
}
