//! The stored form of a job graph: our own versioned protobuf (docs/design.md §5).
//!
//! A restart decodes it and plans nothing; it needs no catalog, only the function registry. The
//! format is pinned by a golden file per version (`planner/tests/golden`): every release reads all.

mod decode;
mod encode;
mod expr;
mod names;
mod proto;

use arrow::datatypes::Schema;
use millrace_common::SqlError;
use millrace_common::hash::hash_bytes;
use millrace_functions::expr::ExprRef;
use prost::Message;
use prost::bytes::Bytes;

use crate::JobGraph;

/// The version that [`encode_graph`] writes.
pub const VERSION: u32 = 1;

/// Why a graph could not be stored or loaded.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    #[error("{0} cannot be stored in a job graph")]
    Encode(String),
    #[error("the job graph has format version {0}, which this release does not know")]
    Version(u32),
    #[error("the job graph is damaged: {0}")]
    Damaged(String),
    #[error("the job graph does not load: {0}")]
    Decode(String),
}

impl From<CodecError> for SqlError {
    fn from(e: CodecError) -> SqlError {
        SqlError::internal(e.to_string())
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
