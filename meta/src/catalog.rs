//! An immutable picture of the catalog, replaced as a whole when a record changes it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use millrace_common::RelationId;
use millrace_common::collections::HashMap;
use millrace_rpc::catalog::{Relation, RelationKind};

/// All relations, schemas and settings after some log record.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    /// Rises with every change of the catalog.
    pub version: u64,
    relations: BTreeMap<RelationId, Arc<Relation>>,
    names: HashMap<String, HashMap<String, RelationId>>,
    schemas: BTreeSet<String>,
    dependants: HashMap<RelationId, Vec<RelationId>>,
    settings: BTreeMap<String, String>,
    users: BTreeMap<String, Option<String>>,
}

impl Catalog {
    pub fn new(
        version: u64,
        relations: BTreeMap<RelationId, Arc<Relation>>,
        schemas: BTreeSet<String>,
        settings: BTreeMap<String, String>,
        users: BTreeMap<String, Option<String>>,
        inputs: impl Fn(RelationId) -> Vec<RelationId>,
    ) -> Catalog {
        let mut names: HashMap<String, HashMap<String, RelationId>> = HashMap::default();
        let mut dependants: HashMap<RelationId, Vec<RelationId>> = HashMap::default();
        for (id, relation) in &relations {
            names.entry(relation.schema.clone()).or_default().insert(relation.name.clone(), *id);
            let named = relation.depends_on.iter().copied().map(RelationId);
            let all: BTreeSet<RelationId> = named.chain(inputs(*id)).collect();
            for dep in all {
                dependants.entry(dep).or_default().push(*id);
            }
        }
        Catalog { version, relations, names, schemas, dependants, settings, users }
    }

    pub fn relation(&self, id: RelationId) -> Option<&Arc<Relation>> {
        self.relations.get(&id)
    }

    pub fn by_name(&self, schema: &str, name: &str) -> Option<&Arc<Relation>> {
        let id = self.names.get(schema)?.get(name)?;
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
        let mut out = BTreeSet::new();
        let mut seen = BTreeSet::new();
        let mut todo = ids.to_vec();
        while let Some(id) = todo.pop() {
            if !seen.insert(id) {
                continue;
            }
            match self.relations.get(&id) {
                Some(r) if r.kind() == RelationKind::View => {
                    todo.extend(r.depends_on.iter().copied().map(RelationId));
                }
                Some(_) => drop(out.insert(id)),
                None => {}
            }
        }
        out.into_iter().collect()
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
