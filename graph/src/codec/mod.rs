//! The stored form of a job graph: our own versioned protobuf (docs/design.md §5).
//!
//! A restart decodes it and plans nothing; it needs no catalog, only the function registry. The
//! format is pinned by a golden file (`planner/tests/golden`). Version 1, whose expressions were
//! DataFusion's messages, is not read.

pub(crate) mod decode;
pub(crate) mod encode;
pub(crate) mod expr;
pub(crate) mod ipc;
pub(crate) mod names;
pub(crate) mod proto;

use arrow::datatypes::Schema;
use millrace_common::hash::hash_bytes;
use millrace_common::{SqlError, SqlState};
use millrace_functions::expr::ExprRef;
use prost::Message;
use prost::bytes::Bytes;

use crate::JobGraph;

/// The version that [`encode_graph`] writes.
pub const VERSION: u32 = 2;

/// Why a graph could not be stored or loaded.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    #[error("{0} cannot be stored in a job graph")]
    Encode(String),
    #[error("the job graph has format version {0}, which this release does not read")]
    Version(u32),
    #[error("the job graph has an edge of kind {0}, which this release does not know")]
    EdgeKind(u32),
    #[error("the job graph is damaged: {0}")]
    Damaged(String),
    #[error("the function {name}, version {version}, is not known to this release")]
    UnknownFunction { name: String, version: u32 },
    /// A message that a later release writes.
    #[error("{0} is not known to this release")]
    Unknown(String),
    #[error("an expression is nested more than {} levels deep", expr::MAX_DEPTH)]
    TooDeep,
}

pub(crate) type Result<T, E = CodecError> = std::result::Result<T, E>;

impl From<CodecError> for SqlError {
    fn from(e: CodecError) -> SqlError {
        let state = match e {
            CodecError::Encode(_) => SqlState::FEATURE_NOT_SUPPORTED,
            CodecError::TooDeep => SqlState::STATEMENT_TOO_COMPLEX,
            CodecError::Version(_)
            | CodecError::EdgeKind(_)
            | CodecError::Damaged(_)
            | CodecError::UnknownFunction { .. }
            | CodecError::Unknown(_) => return SqlError::internal(e.to_string()),
        };
        SqlError::new(state, e.to_string())
    }
}

/// The graph as bytes, in the newest format version.
pub fn encode_graph(graph: &JobGraph) -> Result<Bytes, CodecError> {
    let graph = Bytes::from(encode::graph(graph)?.encode_to_vec());
    let stored = proto::Stored { version: VERSION, checksum: hash_bytes(&graph), graph };
    Ok(stored.encode_to_vec().into())
}

/// A graph from its bytes, of any known version. Needs no catalog and plans nothing.
pub fn decode_graph(bytes: &[u8]) -> Result<JobGraph, CodecError> {
    let damaged = |e: prost::DecodeError| CodecError::Damaged(e.to_string());
    let stored = proto::Stored::decode(bytes).map_err(damaged)?;
    if stored.version != VERSION {
        return Err(CodecError::Version(stored.version));
    }
    // Arrow's reader trusts its input and panics on nonsense, so nonsense must not reach it.
    if hash_bytes(&stored.graph) != stored.checksum {
        return Err(CodecError::Damaged("its checksum does not match".into()));
    }
    decode::graph(&proto::JobGraph::decode(stored.graph).map_err(damaged)?)
}

/// A watermark expression for the catalog.
pub fn encode_watermark(e: &ExprRef) -> Result<Bytes, CodecError> {
    expr::encode_expr(e)
}

/// A watermark expression of the catalog, over the columns of its relation.
pub fn decode_watermark(bytes: &[u8], schema: &Schema) -> Result<ExprRef, CodecError> {
    expr::decode_expr(bytes, schema)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use millrace_common::RelationId;
    use millrace_rpc::catalog::RowStorage;

    use super::*;
    use crate::{
        Edge, EdgeKind, Exchange, Fragment, Materialize, Node, Operator, RelationLayout, Subscribe,
        Union,
    };

    fn node(op: Operator, inputs: Vec<usize>) -> Node {
        let schema = Arc::new(Schema::empty());
        Node { op, inputs, schema, append_only: false, marks: vec![] }
    }

    /// A union of two ways out of one fragment.
    fn two_ways() -> JobGraph {
        let leaf = Operator::Subscribe(Subscribe { relation: RelationId(1), columns: vec![] });
        let exchange = |output| node(Operator::Exchange(Exchange { fragment: 0, output }), vec![]);
        let rows = || Edge { from: 0, to: 1, carries: EdgeKind::Rows { hash: vec![] } };
        let schema = Arc::new(Schema::empty());
        let first = Fragment {
            nodes: vec![node(leaf, vec![])],
            singleton: true,
            outputs: vec![rows(), rows()],
        };
        let union = node(Operator::Union(Union), vec![0, 1]);
        let nodes = vec![
            exchange(0),
            exchange(1),
            union,
            node(Operator::Materialize(Materialize), vec![2]),
        ];
        let table = crate::StateTable {
            name: "rows".into(),
            class: millrace_common::access::AccessClass::Merge,
            value_schema: Arc::clone(&schema),
            storage: RowStorage::Multiset,
            relation: true,
            retention: None,
        };
        let output = RelationLayout {
            schema,
            storage: RowStorage::Multiset,
            key: vec![],
            distribution: vec![],
            append_only: false,
            marks: vec![],
        };
        let last = Fragment { nodes, singleton: true, outputs: vec![] };
        JobGraph { fragments: vec![first, last], tables: vec![table], output }
    }

    fn stored(message: &proto::JobGraph) -> Vec<u8> {
        let graph = Bytes::from(message.encode_to_vec());
        let checksum = hash_bytes(&graph);
        proto::Stored { version: VERSION, checksum, graph }.encode_to_vec()
    }

    #[test]
    fn several_ways_out_of_a_fragment_are_stored() {
        let graph = two_ways();
        let loaded = decode_graph(&encode_graph(&graph).unwrap()).unwrap();
        assert_eq!(format!("{loaded:?}"), format!("{graph:?}"));
    }

    #[test]
    fn an_edge_of_an_unknown_kind_is_refused() {
        let mut message = encode::graph(&two_ways()).unwrap();
        message.fragments[0].outputs[1].kind = 2;
        let error = decode_graph(&stored(&message)).unwrap_err();
        assert!(matches!(error, CodecError::EdgeKind(2)), "{error}");
        // Neither is a kind that is not said taken for rows.
        message.fragments[0].outputs[1].kind = 0;
        assert!(matches!(decode_graph(&stored(&message)), Err(CodecError::EdgeKind(0))));
    }

    #[test]
    fn a_stored_edge_that_leads_back_is_damage() {
        let mut message = encode::graph(&two_ways()).unwrap();
        message.fragments[0].outputs[0].to = 0;
        assert!(matches!(decode_graph(&stored(&message)), Err(CodecError::Damaged(_))));
    }
}
