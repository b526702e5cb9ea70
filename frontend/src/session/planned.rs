//! Whether the catalog that a statement was planned on is still right when the epoch that it reads is known
//! (docs/design.md §10).
//!
//! A frontend that is behind binds names by an older catalog. The record that a fresh read waits for brings it to that of
//! the leader's answer. Where a relation that the statement names is another one there, the statement is planned
//! again: by [`Session::execute`], which begins it anew, because it may have looked up more than a query's names. So a
//! statement sees every definition that was acknowledged before it began, as it sees the rows.

use std::sync::Arc;

use millrace_common::{Epoch, RelationId, SqlError, SqlState};
use millrace_planner::BoundQuery;
use millrace_rpc::catalog::{Relation, RelationKind};

use super::Session;
use crate::cluster::CatalogSnapshot;
use crate::query::SessionCatalog;

/// How often a statement is planned again. The second plan rests on all that was acknowledged before the statement began:
/// where the catalog goes on changing, the last plan counts.
pub(crate) const REPLANS: usize = 3;

/// Marks the error of a statement that is to be planned again.
const OUTDATED: &str = "PlannedOnOlderCatalog";

impl Session {
    /// Fixes the epoch of a bound query's scans. An error where the statement is to be planned again.
    pub async fn fix_epoch(
        &self,
        view: &SessionCatalog,
        bound: &BoundQuery,
    ) -> Result<(), SqlError> {
        let known = |r: &&Arc<Relation>| view.snapshot.by_id(r.id).is_some();
        let named: Vec<Arc<Relation>> = bound.relations.iter().filter(known).cloned().collect();
        let epoch = self.right_epoch_of(&view.snapshot, &named).await?;
        let _ = view.epoch.set(epoch);
        Ok(())
    }

    /// The epoch at which a statement reads what it names in a catalog. An error where the statement is to be planned again.
    pub(super) async fn right_epoch_of(
        &self,
        catalog: &CatalogSnapshot,
        named: &[Arc<Relation>],
    ) -> Result<Epoch, SqlError> {
        let (epoch, is_right) = self.epoch_of(catalog, named, self.replans).await?;
        match is_right {
            true => Ok(epoch.unwrap_or(Epoch::ZERO)),
            false => Err(outdated()),
        }
    }

    /// The epoch at which a statement reads what it names in a catalog, `None` where that has no rows of its own; and
    /// whether the catalog is still right for it. It is not looked at unless `replans`, nor where the epoch was chosen
    /// before, nor where whatever is known here may be read.
    pub(super) async fn epoch_of(
        &self,
        catalog: &CatalogSnapshot,
        named: &[Arc<Relation>],
        replans: bool,
    ) -> Result<(Option<Epoch>, bool), SqlError> {
        let is_looked_at =
            replans && !named.is_empty() && self.reads_fresh()? && !self.has_chosen_epoch();
        let ids = read_of(named);
        let epoch = match ids.is_empty() {
            false => Some(self.read_epoch(&ids).await?),
            true => None,
        };
        if !is_looked_at {
            return Ok((epoch, true));
        }
        if epoch.is_none() {
            // Plain views are definitions, too.
            self.cluster().fresh_catalog(self.read_timeout()?).await?;
        }
        let now = self.cluster().catalog();
        let is_right = std::ptr::eq(catalog, now.as_ref())
            || is_same(catalog, &now, &self.search_path(), named.iter().map(|r| r.id));
        if !is_right {
            // The block's epoch is that of its first read, which is yet to come.
            *self.frozen.lock() = None;
        }
        Ok((epoch, is_right))
    }

    /// Whether the epoch that the statement under way reads was chosen before.
    pub(super) fn has_chosen_epoch(&self) -> bool {
        let is_frozen = self.freezes_snapshot() && self.frozen.lock().is_some();
        is_frozen || self.scope_epoch().is_some()
    }
}

/// Those that have rows of their own, each once.
fn read_of(named: &[Arc<Relation>]) -> Vec<RelationId> {
    let without = [RelationKind::View, RelationKind::Subscription].map(|kind| kind as i32);
    let with_rows = named.iter().filter(|r| !without.contains(&r.kind));
    let mut ids: Vec<RelationId> = with_rows.map(|r| RelationId(r.id)).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Whether relations are in one catalog what they are in another, and their names stand for the same.
fn is_same(
    before: &CatalogSnapshot,
    now: &CatalogSnapshot,
    search_path: &[String],
    ids: impl IntoIterator<Item = u32>,
) -> bool {
    let named = |catalog: &CatalogSnapshot, name: &str| {
        let found = search_path.iter().find_map(|schema| catalog.get(schema, name));
        found.map(|relation| relation.id)
    };
    ids.into_iter().all(|id| match (before.by_id(id), now.by_id(id)) {
        (Some(old), Some(new)) => {
            (Arc::ptr_eq(old, new) || old == new)
                && named(before, &old.name) == named(now, &new.name)
        }
        // What a statement has in hand is in no catalog.
        (None, None) => true,
        _ => false,
    })
}

fn outdated() -> SqlError {
    let message = "the catalog has changed since the statement was planned";
    SqlError::new(SqlState::SERIALIZATION_FAILURE, message)
        .with_routine(OUTDATED)
        .with_hint("Retry the statement.")
}

/// Whether a statement has failed because it was planned on an older catalog, and has done nothing.
pub(super) fn is_outdated(error: &SqlError) -> bool {
    error.routine == Some(OUTDATED)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: [&str; 2] = ["own", "public"];

    fn relation(id: u32, schema: &str, name: &str, query: &str) -> Arc<Relation> {
        let (schema, name, query) = (schema.to_owned(), name.to_owned(), query.to_owned());
        let kind = RelationKind::View as i32;
        Arc::new(Relation { id, schema, name, query, kind, ..Relation::default() })
    }

    fn catalog(relations: &[Arc<Relation>]) -> CatalogSnapshot {
        let schemas = PATH.map(str::to_owned).to_vec();
        CatalogSnapshot::after(&CatalogSnapshot::default(), schemas, relations.to_vec())
    }

    fn same(before: &CatalogSnapshot, now: &CatalogSnapshot, ids: &[u32]) -> bool {
        is_same(before, now, &PATH.map(str::to_owned), ids.iter().copied())
    }

    #[test]
    fn a_plan_is_right_until_something_that_it_names_is_another() {
        let (v, w) =
            (relation(7, "public", "v", "SELECT 1"), relation(8, "public", "w", "TABLE v"));
        let before = catalog(&[v.clone(), w.clone()]);
        assert!(same(&before, &catalog(&[v.clone(), w.clone()]), &[7, 8]));
        let again = relation(7, "public", "v", "SELECT 1");
        assert!(same(&before, &catalog(&[again, w.clone()]), &[7, 8]), "read from a snapshot");

        let replaced = catalog(&[relation(7, "public", "v", "SELECT 2"), w.clone()]);
        assert!(!same(&before, &replaced, &[8, 7]), "what is below a view counts");
        assert!(same(&before, &replaced, &[8]), "what is not named does not");
        let recreated = catalog(&[w.clone(), relation(9, "public", "v", "SELECT 1")]);
        assert!(!same(&before, &recreated, &[7]));
        assert!(!same(&before, &catalog(std::slice::from_ref(&w)), &[7]));
        let created = catalog(&[v.clone(), w.clone(), relation(9, "public", "u", "SELECT 1")]);
        assert!(same(&before, &created, &[7, 8]));
        let hidden = catalog(&[v.clone(), w.clone(), relation(9, "own", "v", "SELECT 1")]);
        assert!(!same(&before, &hidden, &[7]), "its name stands for another one");
        assert!(same(&before, &hidden, &[8, 1]));
    }
}
