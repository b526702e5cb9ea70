//! The simple query protocol: a string of statements, each run as it comes.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;

use super::live::passing_on;
use super::request::as_request;
use super::{Connection, Failure, guarded, panicked};
use crate::session::Outcome;
use crate::session::prepare::Running;

impl Connection {
    pub(super) async fn simple_query(&mut self, text: &str) -> std::io::Result<()> {
        // As in PostgreSQL, the statement without a name lasts until the next string.
        self.session.prepared.remove("");
        let work = AssertUnwindSafe(self.run_string(text)).catch_unwind().await;
        match work.unwrap_or_else(|_| Err(panicked().into())) {
            Ok(()) => {}
            Err(Failure::Io(e)) => return Err(e),
            Err(Failure::Sql(e)) => self.fail(&e),
        }
        self.ready().await
    }

    async fn run_string(&mut self, text: &str) -> Result<(), Failure> {
        let (statements, _held) = self.parse_string(text)?;
        self.session.arrive();
        if statements.is_empty() {
            // Ends what came before it without Sync, too.
            self.ends_string = true;
            let committed = self.commit_string().await;
            self.ends_string = false;
            committed?;
            self.out.empty_query();
        }
        for (i, parsed) in statements.iter().enumerate() {
            self.begin_statement(&parsed.text);
            if statements.len() > 1 {
                self.session.begin_implicit();
            }
            self.ends_string = i + 1 == statements.len();
            self.session.last_of_many = self.ends_string;
            let incarnation = self.session.shared.config.incarnation.get();
            // Boxed: such a future is large, and each that wraps it would hold it on the stack.
            let statement = Box::pin(self.run_statement(parsed));
            let result = as_request(incarnation, statement).await;
            self.ends_string = false;
            self.session.last_of_many = false;
            self.end_statement();
            result?;
        }
        Ok(())
    }

    async fn run_statement(
        &mut self,
        parsed: &millrace_planner::ParsedStatement,
    ) -> Result<(), Failure> {
        let (cancel, timeout) = (self.session.cancel.clone(), self.timeout());
        let live = Arc::clone(&self.session.live);
        let step = self.session.begin_step();
        let work = Box::pin(self.session.execute(parsed, &[], None));
        let work = guarded(&self.gone, &cancel, timeout, &step, work);
        let outcome = passing_on(&live, &mut self.out, &mut self.write, work).await?;
        self.note_commit(&step);
        self.flush_notices();
        match outcome {
            Outcome::Empty => {
                self.commit_string().await?;
                self.out.empty_query()
            }
            Outcome::Command(tag) => self.conclude(&tag).await?,
            Outcome::Rows(rows) => {
                self.out.row_description(&rows.fields, &[]);
                let mut running = Running::new(rows);
                self.send_rows(&mut running, &[], usize::MAX).await?;
                let tag = running.rows.tag.replace("{n}", &running.sent.to_string());
                self.conclude(&tag).await?;
            }
            Outcome::CopyIn(copy) => self.copy_in(*copy, false).await?,
            Outcome::CopyOut(copy) => self.copy_out(*copy).await?,
        }
        Ok(())
    }
}
