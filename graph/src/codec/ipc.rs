//! Schemas and batches as bytes: Arrow IPC streams.

use std::io::Cursor;

use arrow::array::RecordBatch;
use arrow::datatypes::{Schema, SchemaRef};
use arrow::error::ArrowError;
use arrow::ipc::reader::StreamReader;
use arrow::ipc::writer::StreamWriter;
use prost::bytes::Bytes;

use crate::codec::CodecError;

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
