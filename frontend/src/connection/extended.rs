//! The extended query protocol: Parse, Bind, Describe, Execute, Close.

use std::sync::Arc;

use millrace_common::{SqlError, SqlState};
use pgwire::messages::extendedquery::{Bind, TARGET_TYPE_BYTE_PORTAL};

use super::live::passing_on;
use super::request::as_request;
use super::{Connection, Failure, SEND_BYTES, awaited, guarded};
use crate::query::planning::Held;
use crate::session::execute::{ends_block, no_statement};
use crate::session::prepare::{PortalState, Running, cannot_run, columns_changed};
use crate::session::scroll::{Fetched, Movement, Scroll};
use crate::session::{Outcome, Portal};
use crate::wire::{Field, FrontendMessage};

impl Connection {
    pub(super) async fn extended(&mut self, message: FrontendMessage) -> Result<(), Failure> {
        match message {
            FrontendMessage::Parse(m) => {
                self.parse(m.name.unwrap_or_default(), &m.query, &m.type_oids).await?
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

    async fn parse(&mut self, name: String, sql: &str, types: &[u32]) -> Result<(), SqlError> {
        // Of the one without a name the old one is gone even if there will be no new one.
        if name.is_empty() {
            self.session.prepared.remove(&name);
        } else if self.session.prepared.contains_key(&name) {
            return Err(SqlError::new(
                SqlState("42P05"),
                format!("prepared statement \"{name}\" already exists"),
            ));
        }
        if matches!(self.session.block, crate::session::Block::Failed { .. }) {
            let (statements, _held) = self.parse_string(sql)?;
            if let [only] = statements.as_slice()
                && !ends_block(&only.statement)
            {
                return Err(crate::session::transaction::aborted());
            }
        }
        self.begin_statement(sql);
        let catalog = self.session.cluster().catalog();
        let mut prepared = self.counted(|session| session.prepare(sql, types));
        if let Err(error) = &prepared
            && self.session.learns_more(error, &catalog).await
        {
            prepared = self.counted(|session| session.prepare(sql, types));
        }
        self.end_statement();
        let (prepared, held) = prepared?;
        let prepared = Arc::new(prepared.holding(held));
        self.session.prepared.insert(name, prepared);
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
        if name.is_empty() {
            self.session.portals.remove(&name);
        }
        let bytes = bind.parameters.iter().flatten().map(|value| value.len()).sum();
        let held = Held::of_values(self.session.engine(), bytes)?;
        let values =
            self.session.bind_values(&prepared, &bind.parameter_format_codes, &bind.parameters)?;
        let portal = Portal {
            prepared,
            values,
            _held: held,
            formats: bind.result_column_format_codes,
            state: PortalState::Ready,
            hold: false,
            declared: None,
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
        let mut text = String::new();
        if let Some(parsed) = &portal.prepared.statement {
            text.clone_from(&parsed.text);
            if matches!(portal.state, PortalState::Ready) {
                self.session.arrive();
                self.enter_pipeline(&parsed.statement).await?;
            }
        }
        self.begin_statement(&text);
        self.ends_string = self.session.last_of_many;
        let incarnation = self.session.shared.config.incarnation.get();
        // Boxed, as in a simple query: such a future is large, and each that wraps it would hold it on the stack.
        let executed = Box::pin(self.execute_portal(name, &mut portal, max_rows));
        let result = as_request(incarnation, executed).await;
        self.session.last_of_many = false;
        self.ends_string = false;
        self.end_statement();
        self.session.portals.insert(name.to_owned(), portal);
        result
    }

    async fn execute_portal(
        &mut self,
        name: &str,
        portal: &mut Portal,
        max_rows: usize,
    ) -> Result<(), Failure> {
        if matches!(portal.state, PortalState::Ready) {
            if portal.prepared.statement.is_none() {
                self.out.empty_query();
                return Ok(());
            }
            portal.state = PortalState::Failed;
            let (cancel, timeout) = (self.session.cancel.clone(), self.timeout());
            let live = Arc::clone(&self.session.live);
            let step = self.session.begin_step();
            let work = Box::pin(self.session.run_prepared(&portal.prepared, &portal.values));
            let work = guarded(&self.gone, &cancel, timeout, &step, work);
            let outcome = passing_on(&live, &mut self.out, &mut self.write, work).await?;
            self.note_commit(&step);
            self.flush_notices();
            portal.state = PortalState::Done;
            match outcome {
                Outcome::Empty => {
                    self.commit_string().await?;
                    self.out.empty_query()
                }
                Outcome::Command(tag) => self.conclude(&tag).await?,
                Outcome::CopyIn(copy) => self.copy_in(*copy, true).await?,
                Outcome::CopyOut(copy) => self.copy_out(*copy).await?,
                Outcome::Rows(rows) => {
                    same_shape(portal.prepared.fields.as_deref(), &rows.fields)?;
                    let running = Box::new(parking_lot::Mutex::new(Running::new(rows)));
                    portal.state = PortalState::Running(running);
                }
            }
            if matches!(portal.state, PortalState::Done) {
                return Ok(());
            }
        }
        // Rows that are lost on the way are not passed over in silence.
        let limit = if max_rows == 0 { usize::MAX } else { max_rows };
        match std::mem::replace(&mut portal.state, PortalState::Failed) {
            PortalState::Failed => return Err(cannot_run(name).into()),
            PortalState::Running(mut running) => {
                let rows = running.get_mut();
                let before = rows.sent;
                if self.send_rows(rows, &portal.formats, limit).await? {
                    let sent = rows.sent - before;
                    let tag = rows.rows.tag.replace("{n}", &sent.to_string());
                    portal.state = PortalState::Done;
                    self.conclude(&tag).await?;
                } else {
                    portal.state = PortalState::Running(running);
                    self.out.portal_suspended();
                    self.note_answer();
                }
            }
            PortalState::Scroll(mut scroll) => {
                let sent = self.send_scroll(scroll.get_mut(), portal, limit).await?;
                portal.state = PortalState::Scroll(scroll);
                match sent < limit {
                    true => self.complete(&format!("SELECT {sent}")),
                    false => self.out.portal_suspended(),
                }
            }
            state @ (PortalState::Ready | PortalState::Done) => {
                portal.state = state;
                self.complete("SELECT 0");
            }
        }
        Ok(())
    }

    /// Sends the next rows of a cursor that SQL has declared with SCROLL; how many there were.
    async fn send_scroll(
        &mut self,
        scroll: &mut Scroll,
        portal: &Portal,
        limit: usize,
    ) -> Result<usize, Failure> {
        let mut fetched = Fetched::new(self.session.engine().reservation("a cursor's rows"), true);
        let (cancel, timeout) = (self.session.cancel.clone(), self.timeout());
        let work = scroll.fetch(Movement::Forward(limit), &mut fetched);
        awaited(&self.gone, &cancel, timeout, work).await?;
        let sent = fetched.rows();
        let fields = portal.prepared.fields.clone().unwrap_or_default();
        if let Outcome::Rows(rows) = self.session.shown(fetched, fields) {
            let mut running = Running::new(rows);
            self.send_rows(&mut running, &portal.formats, usize::MAX).await?;
        }
        Ok(sent)
    }
}

/// A client that was told of other columns would misread these. They have been checked before the statement ran; this
/// is for a definition that came in between.
fn same_shape(told: Option<&[Field]>, given: &[Field]) -> Result<(), SqlError> {
    let types = |fields: &[Field]| fields.iter().map(|f| f.type_oid).collect::<Vec<_>>();
    match told {
        Some(told) if types(told) != types(given) => Err(columns_changed()),
        _ => Ok(()),
    }
}

fn no_portal(name: &str) -> SqlError {
    SqlError::new(SqlState::INVALID_CURSOR_NAME, format!("portal \"{name}\" does not exist"))
}
