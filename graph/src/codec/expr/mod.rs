//! Expressions as bytes: messages of our own ([`message`]), independent of DataFusion's.
//!
//! Functions are stored by name and version (`millrace_functions::versions`); nothing of a session goes
//! in or comes out. Neither direction recurses into an expression, so its depth costs no stack, and
//! deeper ones than [`MAX_DEPTH`], which could not be evaluated either, are refused both ways.

mod decode;
mod encode;
mod literal;
mod message;
#[cfg(test)]
mod tests;
mod types;

use arrow::datatypes::Schema;
use millrace_functions::expr::ExprRef;
use prost::Message;
use prost::bytes::Bytes;

use crate::codec::CodecError;

/// Levels of an expression.
pub const MAX_DEPTH: usize = 4_096;

/// Refuses by name what has no message: kinds of expressions, functions outside the registry, types.
pub fn encode_expr(e: &ExprRef) -> Result<Bytes, CodecError> {
    Ok(encode::expression(e)?.encode_to_vec().into())
}

/// `input`: the schema of the columns it reads.
pub fn decode_expr(bytes: &[u8], input: &Schema) -> Result<ExprRef, CodecError> {
    let expression = message::Expression::decode(bytes);
    decode::expression(&expression.map_err(|e| CodecError::Damaged(e.to_string()))?, input)
}
