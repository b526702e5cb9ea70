//! What a task tells its operators ahead of rows and barriers.

use super::{Kind, PlanNode, Task};
use crate::error::ExecError;
use crate::lookahead::Hint;
use crate::watermark::WatermarkSet;

/// Hints taken in a row while there is other work.
const HINTS_AT_ONCE: usize = 8;

impl Task {
    /// Takes hints that have come, though there is other work: a key is read ahead only if its hint does not wait.
    pub(super) fn take_hints(&mut self) -> Result<(), ExecError> {
        for _ in 0..HINTS_AT_ONCE {
            let Ok(hint) = self.hints.try_recv() else { return Ok(()) };
            self.hint(&hint)?;
        }
        Ok(())
    }

    /// Gives a hint to its operator, unless memory is tight.
    pub(super) fn hint(&mut self, hint: &Hint) -> Result<(), ExecError> {
        let Some(PlanNode { kind, metrics, .. }) = self.nodes.get_mut(hint.node) else {
            tracing::debug!(node = hint.node, "a hint for a node that there is not");
            return Ok(());
        };
        match kind {
            Kind::Operator(op) if !self.governor.is_tight() => op.hint(hint.port, hint),
            _ => {
                metrics.lookahead.dropped.add(hint.count() as u64);
                Ok(())
            }
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
