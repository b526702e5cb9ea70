//! Lookup joins: `FROM s JOIN t FOR SYSTEM_TIME AS OF PROCTIME() ON s.k = t.k`.
//!
//! Each row of `s` meets the rows of `t` as they are when it is processed; later changes of `t` change
//! nothing. The binder marks `t` with a filter that calls `as_of_proctime` (`bind::relations::from_items`); the
//! optimiser moves it like any other, but never to another relation. Here the join whose side is marked
//! becomes a lookup, and the marks vanish. In batch there are no marks: the relations are read at one epoch.

use datafusion::logical_expr::utils::{conjunction, split_conjunction};
use datafusion::logical_expr::{self, Expr, JoinType, LogicalPlan};
use millrace_common::SqlError;
use millrace_functions::window_fn::AS_OF_PROCTIME;
use millrace_rpc::catalog::RelationKind;

use crate::stream::convert::{Converter, Result, in_view};
use crate::stream::plan::{Op, Stream};

const NAME: &str = "FOR SYSTEM_TIME AS OF PROCTIME()";

/// Which side of a join is looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    No,
    Right,
    /// The optimiser, or the query, has the sides the other way round.
    Left,
}

impl Converter<'_> {
    /// The predicate without marks; `None`: nothing else is in it.
    pub(super) fn without_marks(&self, predicate: &Expr) -> Option<Expr> {
        let all = split_conjunction(predicate);
        let marks = all.iter().filter(|e| is_mark(e)).count();
        if marks == 0 {
            return Some(predicate.clone());
        }
        self.marks.set(self.marks.get() + marks);
        conjunction(all.into_iter().filter(|e| !is_mark(e)).cloned())
    }

    /// Whether a join is a lookup, and of which side.
    pub(super) fn lookup(&self, join: &logical_expr::Join) -> Result<Lookup> {
        let (left, right) = (marks_in(&join.left), marks_in(&join.right));
        let (lookup, marks, side) = match (left, right) {
            (0, 0) => return Ok(Lookup::No),
            (0, marks) => (Lookup::Right, marks, &join.right),
            (marks, 0) => (Lookup::Left, marks, &join.left),
            _ => return Err(in_view(format!("{NAME} on both sides of a join"))),
        };
        self.check_looked_up(side)?;
        let kind = match (lookup, join.join_type) {
            (_, JoinType::Inner)
            | (Lookup::Right, JoinType::Left)
            | (Lookup::Left, JoinType::Right) => None,
            (_, kind) => Some(kind),
        };
        if let Some(kind) = kind {
            let kind = kind.to_string().to_lowercase();
            return Err(in_view(format!("{NAME} of the preserved side of a join ({kind})"))
                .with_hint(
                    "Use an inner join, or LEFT JOIN with the looked-up table on the right.",
                ));
        }
        if join.on.is_empty() {
            return Err(in_view(format!("{NAME} in a join without an equality")));
        }
        self.lookups.set(self.lookups.get() + marks);
        Ok(lookup)
    }

    /// A table or a materialised view, filtered and projected.
    fn check_looked_up(&self, plan: &LogicalPlan) -> Result<()> {
        match plan {
            LogicalPlan::Filter(f) => self.check_looked_up(&f.input),
            LogicalPlan::Projection(p) => self.check_looked_up(&p.input),
            LogicalPlan::SubqueryAlias(a) => self.check_looked_up(&a.input),
            LogicalPlan::TableScan(scan) => match self.relation(&scan.table_name)?.kind() {
                RelationKind::Source => Err(in_view(format!("{NAME} of a source"))
                    .with_hint("Look up a table, or a materialized view over the source.")),
                _ => Ok(()),
            },
            _ => Err(in_view(format!("{NAME} of a query"))
                .with_hint("Look up a table or a materialized view.")),
        }
    }

    /// Every mark belongs to a join.
    pub(super) fn check_lookups(&self) -> Result<()> {
        if self.marks.get() == self.lookups.get() {
            return Ok(());
        }
        Err(misplaced())
    }
}

/// What is looked up follows row by row from the relation, so that it is complete when the relation's
/// changes of an epoch are.
pub(super) fn check_linear(stream: &Stream) -> Result<()> {
    match (&stream.op, stream.inputs.as_slice()) {
        (Op::Scan(_), _) => Ok(()),
        (Op::Filter(_) | Op::Project(_), [input]) => check_linear(input),
        _ => Err(in_view(format!("{NAME} of rows that change with the time"))),
    }
}

fn misplaced() -> SqlError {
    in_view(format!("{NAME} of a relation that is not joined")).with_hint(
        "Write it behind the table on the right of a join: FROM s JOIN t FOR SYSTEM_TIME AS OF PROCTIME() ON …",
    )
}

fn is_mark(e: &Expr) -> bool {
    matches!(e, Expr::ScalarFunction(f) if f.func.name() == AS_OF_PROCTIME)
}

fn marks_of(predicate: &Expr) -> usize {
    split_conjunction(predicate).into_iter().filter(|e| is_mark(e)).count()
}

/// Marks of a relation, below filters and projections.
fn marks_in(plan: &LogicalPlan) -> usize {
    match plan {
        LogicalPlan::Filter(f) => marks_of(&f.predicate) + marks_in(&f.input),
        LogicalPlan::Projection(p) => marks_in(&p.input),
        LogicalPlan::SubqueryAlias(a) => marks_in(&a.input),
        LogicalPlan::TableScan(scan) => scan.filters.iter().map(marks_of).sum(),
        _ => 0,
    }
}
