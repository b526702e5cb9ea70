//! The extended query protocol: Parse, Bind, Describe, Execute, Close.

use std::sync::Arc;

use millrace_common::{SqlError, SqlState};
use pgwire::messages::extendedquery::{Bind, TARGET_TYPE_BYTE_PORTAL};

use super::{Connection, Failure, SEND_BYTES, guarded};
use crate::session::execute::no_statement;
use crate::session::prepare::{PortalState, Running};
use crate::session::{Outcome, Portal, Session};
use crate::wire::{Field, FrontendMessage};

impl Connection {
    pub(super) async fn extended(&mut self, message: FrontendMessage) -> Result<(), Failure> {
        match message {
            FrontendMessage::Parse(m) => {
                self.parse(m.name.unwrap_or_default(), &m.query, &m.type_oids)?
            }
            FrontendMessage::Bind(bind) => self.bind(bind)?,
            FrontendMessage::Describe(m) => {
                let portal = m.target_type == TARGET_TYPE_BYTE_PORTAL;
                self.describe(portal, m.name.as_deref().unwrap_or_default())?
            }
            FrontendMessage::Execute(m) => {
                // Zero and below: all rows.
                let max_rows = usize::try_from(m.max_rows).unwrap_or(0);
                self.execute(m.name.as_deref().unwrap_or_default(), max_rows).await?
            }
            FrontendMessage::Close(m) => {
                let name = m.name.unwrap_or_default();
                if m.target_type == TARGET_TYPE_BYTE_PORTAL {
                    self.session.portals.remove(&name);
                } else {
                    self.session.prepared.remove(&name);
                }
                self.out.close_complete();
            }
            FrontendMessage::Flush(_) => self.flush().await?,
            // What is left of a COPY that failed, and passwords nobody asked for.
            _ => {}
        }
        if self.out.buf.len() >= SEND_BYTES {
            self.flush().await?;
        }
        Ok(())
    }

    fn parse(&mut self, name: String, sql: &str, types: &[u32]) -> Result<(), SqlError> {
        if !name.is_empty() && self.session.prepared.contains_key(&name) {
            return Err(SqlError::new(
                SqlState("42P05"),
                format!("prepared statement \"{name}\" already exists"),
            ));
        }
        if matches!(self.session.block, crate::session::Block::Failed { .. }) {
            let ends = sql.trim_start().get(..4).map(str::to_ascii_uppercase);
            if !matches!(ends.as_deref(), Some("ROLL" | "COMM" | "ABOR" | "END" | "END;")) {
                return Err(crate::session::transaction::aborted());
            }
        }
        let prepared = self.session.prepare(sql, types)?;
        self.session.prepared.insert(name, Arc::new(prepared));
        self.out.parse_complete();
        Ok(())
    }

    fn bind(&mut self, bind: Bind) -> Result<(), SqlError> {
        let statement = bind.statement_name.unwrap_or_default();
        let name = bind.portal_name.unwrap_or_default();
        let prepared = self
            .session
            .prepared
            .get(&statement)
            .cloned()
            .ok_or_else(|| no_statement(&statement))?;
        if !name.is_empty() && self.session.portals.contains_key(&name) {
            return Err(SqlError::new(
                SqlState("42P03"),
                format!("portal \"{name}\" already exists"),
            ));
        }
        let values =
            Session::bind_values(&prepared, &bind.parameter_format_codes, &bind.parameters)?;
        let portal = Portal {
            prepared,
            values,
            formats: bind.result_column_format_codes,
            state: PortalState::Ready,
            hold: false,
        };
        self.session.portals.insert(name, portal);
        self.out.bind_complete();
        Ok(())
    }

    fn describe(&mut self, portal: bool, name: &str) -> Result<(), SqlError> {
        let (fields, formats) = if portal {
            let portal = self.session.portals.get(name).ok_or_else(|| no_portal(name))?;
            (portal.prepared.fields.clone(), portal.formats.clone())
        } else {
            let prepared = self.session.prepared.get(name).ok_or_else(|| no_statement(name))?;
            self.out.parameter_description(&prepared.param_oids);
            (prepared.fields.clone(), vec![])
        };
        match fields {
            Some(fields) => self.out.row_description(&fields, &formats),
            None => self.out.no_data(),
        }
        Ok(())
    }

    async fn execute(&mut self, name: &str, max_rows: usize) -> Result<(), Failure> {
        let mut portal = self.session.portals.remove(name).ok_or_else(|| no_portal(name))?;
        let text = portal.prepared.statement.as_ref().map_or(String::new(), |s| s.text.clone());
        self.begin_statement(&text);
        let result = self.execute_portal(&mut portal, max_rows).await;
        self.end_statement();
        self.session.portals.insert(name.to_owned(), portal);
        result
    }

    async fn execute_portal(
        &mut self,
        portal: &mut Portal,
        max_rows: usize,
    ) -> Result<(), Failure> {
        if matches!(portal.state, PortalState::Ready) {
            let Some(parsed) = portal.prepared.statement.clone() else {
                self.out.empty_query();
                return Ok(());
            };
            portal.state = PortalState::Done;
            let (cancel, timeout) = (self.session.cancel.clone(), self.timeout());
            let outcome = guarded(
                &self.gone,
                &cancel,
                timeout,
                self.session.execute(&parsed, &portal.values),
            )
            .await?;
            self.flush_notices();
            match outcome {
                Outcome::Empty => self.out.empty_query(),
                Outcome::Command(tag) => self.complete(&tag),
                Outcome::CopyIn(copy) => self.copy_in(*copy).await?,
                Outcome::CopyOut(copy) => self.copy_out(*copy).await?,
                Outcome::Rows(rows) => {
                    same_shape(portal.prepared.fields.as_deref(), &rows.fields)?;
                    portal.state =
                        PortalState::Running(Box::new(parking_lot::Mutex::new(Running {
                            rows,
                            current: None,
                            sent: 0,
                        })));
                }
            }
            if matches!(portal.state, PortalState::Done) {
                return Ok(());
            }
        }
        let PortalState::Running(running) = &mut portal.state else {
            self.complete("SELECT 0");
            return Ok(());
        };
        let running = running.get_mut();
        let limit = if max_rows == 0 { usize::MAX } else { max_rows };
        let before = running.sent;
        if self.send_rows(running, &portal.formats, limit).await? {
            let sent = running.sent - before;
            let tag = running.rows.tag.replace("{n}", &sent.to_string());
            portal.state = PortalState::Done;
            self.complete(&tag);
        } else {
            self.out.portal_suspended();
        }
        Ok(())
    }
}

/// A client that was told of other columns would misread these.
fn same_shape(told: Option<&[Field]>, given: &[Field]) -> Result<(), SqlError> {
    let types = |fields: &[Field]| fields.iter().map(|f| f.type_oid).collect::<Vec<_>>();
    match told {
        Some(told) if types(told) != types(given) => Err(SqlError::new(
            SqlState::FEATURE_NOT_SUPPORTED,
            "cached plan must not change result type",
        )),
        _ => Ok(()),
    }
}

fn no_portal(name: &str) -> SqlError {
    SqlError::new(SqlState::INVALID_CURSOR_NAME, format!("portal \"{name}\" does not exist"))
}
