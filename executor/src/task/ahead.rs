//! What a task tells its operators ahead of rows and barriers.

use futures::FutureExt;
use futures::future::{BoxFuture, select_all};

use super::{Event, Kind, PlanNode, Task};
use crate::error::ExecError;
use crate::lookahead::edge::{HintReceiver, SentHint};
use crate::watermark::WatermarkSet;

/// Hints taken in a row while there is other work.
const HINTS_AT_ONCE: usize = 8;

impl Task {
    /// Takes hints that have come, though there is other work: a key is read ahead only if its hint does not wait.
    pub(super) fn take_hints(&mut self) -> Result<(), ExecError> {
        for _ in 0..HINTS_AT_ONCE {
            let next = self.hints.as_mut().and_then(HintReceiver::try_recv);
            let Some(hint) = next else { return Ok(()) };
            self.hint(hint)?;
        }
        Ok(())
    }

    /// Gives a hint to its operator, unless memory is tight.
    pub(super) fn hint(&mut self, hint: SentHint) -> Result<(), ExecError> {
        let Some(PlanNode { kind, metrics, .. }) = self.nodes.get_mut(hint.node) else {
            tracing::debug!(node = hint.node, "a hint for a node that there is not");
            return Ok(());
        };
        let count = hint.count() as u64;
        match kind {
            Kind::Operator(op) if !self.governor.is_tight() => match hint.open() {
                Ok(hint) => return op.hint(hint.port, &hint),
                Err(error) => tracing::debug!(%error, "a hint whose keys cannot be read"),
            },
            _ => {}
        }
        metrics.lookahead.dropped.add(count);
        Ok(())
    }

    /// Lets a node go on at a barrier until nothing in it waits for state, which takes as long as the slowest read of the
    /// epoch. Hints of the epochs after it are taken meanwhile, and what they ask for is read: their lead is this time.
    pub(super) async fn drain_at_barrier(&mut self, node: usize) -> Result<(), ExecError> {
        while self.is_pending(node) {
            self.relieve(node).await?;
            match self.read_or_hint(node).await? {
                Event::Hint(hint) => {
                    self.hint(hint)?;
                    // What has come with it is read with it.
                    self.take_hints()?;
                }
                Event::Progress(read) => {
                    self.pass_on(read)?;
                    self.flush().await?;
                }
                _ => return Err(ExecError::internal("a barrier was passed by what came after it")),
            }
            self.yield_if_due().await;
        }
        Ok(())
    }

    /// Waits for state of a node, for what others read ahead, and for hints. Of the others none that has rows waiting is
    /// asked: their output has to wait for its turn.
    async fn read_or_hint(&mut self, node: usize) -> Result<Event, ExecError> {
        let mut reads: Vec<BoxFuture<'_, Result<Event, ExecError>>> = Vec::new();
        for (i, slot) in self.nodes.iter_mut().enumerate() {
            let Kind::Operator(op) = &mut slot.kind else { continue };
            if i == node || op.is_prefetching() && !op.is_pending() {
                let progress = op.progress(&mut slot.out);
                reads.push(async move { progress.await.map(|()| Event::Progress(i)) }.boxed());
            }
        }
        if reads.is_empty() {
            return Err(ExecError::internal("a task has nothing to wait for"));
        }
        tokio::select! {
            biased;
            event = select_all(reads) => event.0,
            // Without walkers there is nothing to wait for.
            Some(hint) = next_hint(&mut self.hints) => Ok(Event::Hint(hint)),
        }
    }

    /// Has operators give up reads ahead of watermarks: while the task waits for memory nothing drives them on.
    pub(super) fn give_up_expected(&mut self) {
        for PlanNode { kind, .. } in &mut self.nodes {
            if let Kind::Operator(op) = kind {
                op.give_up_expected();
            }
        }
    }

    /// Tells operators what watermarks are likely to come, as far as they want to know.
    pub(super) fn expect(&mut self, marks: &WatermarkSet) -> Result<(), ExecError> {
        self.outlook.pass(marks);
        if self.governor.is_tight() {
            return Ok(());
        }
        for PlanNode { kind, inputs, .. } in &mut self.nodes {
            let Kind::Operator(op) = kind else { continue };
            let Some(epochs) = op.foresight() else { continue };
            let marks = self.outlook.after(epochs);
            for (port, columns) in inputs.iter().enumerate() {
                op.expect(port, &marks.columns(columns))?;
            }
        }
        Ok(())
    }
}

/// The next hint; `None`: none will ever come.
pub(super) async fn next_hint(hints: &mut Option<HintReceiver>) -> Option<SentHint> {
    hints.as_mut()?.recv().await
}
