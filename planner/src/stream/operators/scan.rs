//! [`Scan`]: a relation that is read; in a graph a subscription or a source.

use std::sync::Arc;

use arrow::datatypes::{FieldRef, Schema, SchemaRef};
use datafusion::common::Result;
use millrace_common::{RelationId, SqlError};
use millrace_graph as graph;
use millrace_graph::{DerivedWatermark, Operator, WatermarkTerm};
use millrace_rpc::catalog::{Relation, RelationKind, RowStorage};

use super::{Input, LineContext, Lowered, OperatorLine, RowRules};
use crate::explain::text::all_columns;
use crate::passes::identity::Keyed;
use crate::passes::properties::{Distribution, Properties};
use crate::passes::prune::{Pruned, Pruning, select};
use crate::stream::plan::{Op, Scan, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    pub fn scan(relation: Arc<Relation>, schema: SchemaRef, columns: Vec<usize>) -> Stream {
        Stream { op: Op::Scan(Scan { relation, columns }), inputs: vec![], schema }
    }
}

impl RowRules for Scan {
    fn properties(&self, _: usize, _: &[Properties]) -> Properties {
        let Scan { relation, columns } = self;
        let position = |c: &u32| columns.iter().position(|&have| have == *c as usize);
        let source = relation.kind() == RelationKind::Source;
        let all = |list: &[u32]| list.iter().map(position).collect::<Option<Vec<usize>>>();
        let keyed = source || relation.storage() == RowStorage::Keyed;
        // A view with at most one row is keyed by no columns; a root always has a key.
        let empty_key =
            relation.key.is_empty() && relation.kind() != RelationKind::MaterializedView;
        let keys = match all(&relation.key) {
            Some(key) if keyed && !empty_key => vec![key.into_iter().collect()],
            _ => vec![],
        };
        let hashed = !source && relation.storage() != RowStorage::Append;
        let distribution = match all(&relation.distribution) {
            Some(hash) if hashed && !hash.is_empty() => Distribution::Hash(hash),
            _ => Distribution::Any,
        };
        let append_only = source || relation.append_only;
        Properties { append_only, keys, ..Properties::unknown(columns.len(), distribution) }
    }

    fn watermarks(&self, _: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        let marked = self.relation.watermarked();
        let relation = RelationId(self.relation.id);
        let own = self.columns.iter().enumerate().filter(|(_, c)| marked.contains(c));
        own.map(|(i, &c)| DerivedWatermark {
            column: i,
            terms: vec![WatermarkTerm { relation, column: c, steps: vec![] }],
        })
        .collect()
    }

    fn with_key(&self, stream: &Stream) -> Result<Option<Keyed>> {
        Ok(with_key_columns(self, stream))
    }

    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        let (kept, schema, map) = select(at.schema, at.required);
        let columns = kept.iter().map(|&c| self.columns[c]).collect();
        Ok((Stream::scan(self.relation, schema, columns), map))
    }

    fn lower(self, _: &mut StateTables, _: &[Input<'_>]) -> Result<Lowered, SqlError> {
        let (relation, columns) = (RelationId(self.relation.id), self.columns);
        Ok(Lowered::of(match self.relation.kind() {
            RelationKind::Source => Operator::Source(graph::Source { relation, columns }),
            _ => Operator::Subscribe(graph::Subscribe { relation, columns }),
        }))
    }
}

/// A scan that reads the relation's key, too.
fn with_key_columns(scan: &Scan, stream: &Stream) -> Option<Keyed> {
    let relation = &scan.relation;
    let keyed = relation.storage() == RowStorage::Keyed || relation.kind() == RelationKind::Source;
    if relation.key.is_empty() || !keyed {
        return None;
    }
    let all = relation.arrow_schema().ok()?;
    let mut columns = scan.columns.clone();
    let mut fields: Vec<FieldRef> = stream.schema.fields().iter().cloned().collect();
    let mut key = Vec::with_capacity(relation.key.len());
    for &k in &relation.key {
        let k = k as usize;
        let at = columns.iter().position(|&c| c == k);
        key.push(at.unwrap_or(columns.len()));
        if at.is_none() {
            columns.push(k);
            fields.push(Arc::clone(all.fields().get(k)?));
        }
    }
    let schema = Arc::new(Schema::new(fields));
    Some((Stream::scan(Arc::clone(relation), schema, columns), key))
}

impl OperatorLine for Scan {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        format!("Scan {} ({})", self.relation.name, all_columns(at.output))
    }
}

impl OperatorLine for graph::Subscribe {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        read("Subscribe", self.relation, at)
    }
}

impl OperatorLine for graph::Source {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        read("Source", self.relation, at)
    }
}

fn read(how: &str, relation: RelationId, at: &LineContext<'_>) -> String {
    let name = (at.names)(relation).unwrap_or_else(|| format!("relation {relation}"));
    format!("{how} {name} ({})", all_columns(at.output))
}
