//! An immutable picture of the catalog, replaced as a whole when a record changes it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use millrace_common::RelationId;
use millrace_common::shared_map::SharedMap;
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::catalog_diff::differences;

/// All relations, schemas and settings after some log record.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    /// Rises with every change of the catalog.
    pub version: u64,
    relations: BTreeMap<RelationId, Arc<Relation>>,
    /// By schema and name.
    names: SharedMap<(String, String), RelationId>,
    schemas: BTreeSet<String>,
    /// What each relation names or reads.
    dependencies: SharedMap<RelationId, BTreeSet<RelationId>>,
    dependants: SharedMap<RelationId, Vec<RelationId>>,
    settings: BTreeMap<String, String>,
    users: BTreeMap<String, Option<String>>,
}

impl Catalog {
    /// The catalog that follows `previous`. Costs what differs, but for a look at each pointer. `inputs`: what a job
    /// that is in the new catalog reads.
    pub fn after(
        previous: &Catalog,
        version: u64,
        relations: BTreeMap<RelationId, Arc<Relation>>,
        schemas: BTreeSet<String>,
        settings: BTreeMap<String, String>,
        users: BTreeMap<String, Option<String>>,
        inputs: impl Fn(RelationId) -> Vec<RelationId>,
    ) -> Catalog {
        let mut next = Catalog {
            version,
            relations: BTreeMap::new(),
            names: previous.names.clone(),
            schemas,
            dependencies: previous.dependencies.clone(),
            dependants: previous.dependants.clone(),
            settings,
            users,
        };
        let (gone, added) = differences(previous.relations.values(), relations.values());
        for relation in gone {
            next.forget(relation);
        }
        for relation in added {
            let named = relation.depends_on.iter().copied().map(RelationId);
            let all = named.chain(inputs(RelationId(relation.id))).collect();
            next.take_in(relation, all);
        }
        next.relations = relations;
        next
    }

    /// Relations that are new, gone or changed. Costs what differs, but for a look at each pointer.
    pub fn differs_from(&self, previous: &Catalog) -> BTreeSet<RelationId> {
        let (gone, added) = differences(previous.relations.values(), self.relations.values());
        gone.into_iter().chain(added).map(|r| RelationId(r.id)).collect()
    }

    fn take_in(&mut self, relation: &Relation, dependencies: BTreeSet<RelationId>) {
        let id = RelationId(relation.id);
        self.names.insert((relation.schema.clone(), relation.name.clone()), id);
        for dependency in &dependencies {
            let mut all = self.dependants.get(dependency).cloned().unwrap_or_default();
            if let Err(at) = all.binary_search(&id) {
                all.insert(at, id);
                self.dependants.insert(*dependency, all);
            }
        }
        self.dependencies.insert(id, dependencies);
    }

    fn forget(&mut self, relation: &Relation) {
        let id = RelationId(relation.id);
        self.names.remove(&(relation.schema.clone(), relation.name.clone()));
        for dependency in self.dependencies.remove(&id).unwrap_or_default() {
            let mut all = self.dependants.get(&dependency).cloned().unwrap_or_default();
            all.retain(|dependant| *dependant != id);
            match all.is_empty() {
                true => drop(self.dependants.remove(&dependency)),
                false => drop(self.dependants.insert(dependency, all)),
            }
        }
    }

    pub fn relation(&self, id: RelationId) -> Option<&Arc<Relation>> {
        self.relations.get(&id)
    }

    pub fn by_name(&self, schema: &str, name: &str) -> Option<&Arc<Relation>> {
        let id = self.names.get(&(schema.to_owned(), name.to_owned()))?;
        self.relations.get(id)
    }

    /// In order of their ids: inputs before what reads them, except replaced views.
    pub fn relations(&self) -> impl Iterator<Item = &Arc<Relation>> {
        self.relations.values()
    }

    pub fn in_schema<'a>(&'a self, schema: &'a str) -> impl Iterator<Item = &'a Arc<Relation>> {
        self.relations.values().filter(move |r| r.schema == schema)
    }

    pub fn schemas(&self) -> impl Iterator<Item = &str> {
        self.schemas.iter().map(String::as_str)
    }

    pub fn has_schema(&self, name: &str) -> bool {
        self.schemas.contains(name)
    }

    /// Relations that name this one directly, or read it through a plain view.
    pub fn dependants(&self, id: RelationId) -> &[RelationId] {
        self.dependants.get(&id).map_or(&[], Vec::as_slice)
    }

    /// All that would go with these under CASCADE, these included, dependants first.
    pub fn cascade(&self, ids: &[RelationId]) -> Vec<RelationId> {
        let mut order = Vec::new();
        let mut seen = BTreeSet::new();
        for id in ids {
            self.visit_dependants(*id, &mut seen, &mut order);
        }
        order
    }

    fn visit_dependants(
        &self,
        id: RelationId,
        seen: &mut BTreeSet<RelationId>,
        order: &mut Vec<RelationId>,
    ) {
        if !seen.insert(id) {
            return;
        }
        for dependant in self.dependants(id) {
            self.visit_dependants(*dependant, seen, order);
        }
        order.push(id);
    }

    /// The relations with rows of their own that these read: plain views are replaced by theirs.
    pub fn base_relations(&self, ids: &[RelationId]) -> Vec<RelationId> {
        without_views(&self.relations, ids.iter().copied())
    }

    /// Users that were created or changed, with their SCRAM verifiers.
    pub fn users(&self) -> &BTreeMap<String, Option<String>> {
        &self.users
    }

    /// Cluster-wide settings that differ from their defaults.
    pub fn settings(&self) -> &BTreeMap<String, String> {
        &self.settings
    }
}

/// The relations with plain views replaced by what they read, in the order of their numbers.
pub fn without_views(
    relations: &BTreeMap<RelationId, Arc<Relation>>,
    ids: impl Iterator<Item = RelationId>,
) -> Vec<RelationId> {
    let mut out = BTreeSet::new();
    let mut seen = BTreeSet::new();
    let mut todo: Vec<RelationId> = ids.collect();
    while let Some(id) = todo.pop() {
        if !seen.insert(id) {
            continue;
        }
        match relations.get(&id) {
            Some(r) if r.kind() == RelationKind::View => {
                todo.extend(r.depends_on.iter().copied().map(RelationId));
            }
            Some(_) => drop(out.insert(id)),
            None => {}
        }
    }
    out.into_iter().collect()
}
