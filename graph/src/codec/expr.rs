//! Expressions, schemas and batches as bytes.
//!
//! Functions are stored by name and found again in the registry that
//! [`millrace_functions::register_all`] fills; nothing of a session goes in or comes out.

use std::io::Cursor;
use std::sync::{Arc, OnceLock};

use arrow::array::RecordBatch;
use arrow::datatypes::{Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::reader::StreamReader;
use arrow::ipc::writer::StreamWriter;
use datafusion::execution::TaskContext;
use datafusion::prelude::SessionContext;
use datafusion_proto::physical_plan::DefaultPhysicalExtensionCodec;
use datafusion_proto::physical_plan::from_proto::parse_physical_expr;
use datafusion_proto::physical_plan::to_proto::serialize_physical_expr;
use datafusion_proto::protobuf::PhysicalExprNode;
use millrace_functions::expr::ExprRef;
use prost::Message;
use prost::bytes::Bytes;

use crate::codec::CodecError;

/// The functions an expression may name. Built once: registering them takes a millisecond.
fn functions() -> Result<&'static Arc<TaskContext>, CodecError> {
    static FUNCTIONS: OnceLock<Result<Arc<TaskContext>, String>> = OnceLock::new();
    let built = FUNCTIONS.get_or_init(|| {
        let mut session = SessionContext::new();
        millrace_functions::register_all(&mut session).map_err(|e| e.to_string())?;
        Ok(session.task_ctx())
    });
    built.as_ref().map_err(|e| CodecError::Decode(e.clone()))
}

pub fn encode_expr(e: &ExprRef) -> Result<Bytes, CodecError> {
    let node = serialize_physical_expr(e, &DefaultPhysicalExtensionCodec {})
        .map_err(|error| CodecError::Encode(format!("the expression {e} ({error})")))?;
    Ok(node.encode_to_vec().into())
}

/// `input`: the schema of the columns it reads.
pub fn decode_expr(bytes: &[u8], input: &Schema) -> Result<ExprRef, CodecError> {
    let node = PhysicalExprNode::decode(bytes).map_err(|e| CodecError::Damaged(e.to_string()))?;
    parse_physical_expr(&node, functions()?, input, &DefaultPhysicalExtensionCodec {})
        .map_err(|e| CodecError::Decode(e.to_string()))
}

pub fn encode_schema(schema: &Schema) -> Result<Bytes, CodecError> {
    let encode = || -> Result<Vec<u8>, ArrowError> {
        StreamWriter::try_new(Vec::new(), schema)?.into_inner()
    };
    encode().map(Bytes::from).map_err(|e| CodecError::Encode(e.to_string()))
}

pub fn decode_schema(bytes: &[u8]) -> Result<SchemaRef, CodecError> {
    let reader = StreamReader::try_new(Cursor::new(bytes), None);
    reader.map(|r| r.schema()).map_err(|e| CodecError::Damaged(e.to_string()))
}

pub fn encode_batch(batch: &RecordBatch) -> Result<Vec<u8>, CodecError> {
    let encode = || -> Result<Vec<u8>, ArrowError> {
        let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema())?;
        writer.write(batch)?;
        writer.into_inner()
    };
    encode().map_err(|e| CodecError::Encode(e.to_string()))
}

pub fn decode_batch(bytes: &[u8]) -> Result<RecordBatch, CodecError> {
    let decode = || -> Result<Option<RecordBatch>, ArrowError> {
        StreamReader::try_new(Cursor::new(bytes), None)?.next().transpose()
    };
    match decode() {
        Ok(Some(batch)) => Ok(batch),
        Ok(None) => Err(CodecError::Damaged("values without a batch".into())),
        Err(e) => Err(CodecError::Damaged(e.to_string())),
    }
}
