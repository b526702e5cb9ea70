//! Reads a client's messages, as a task of its own, within the memory that queries have.
//!
//! A message of any size is kept as a whole. A large one takes its bytes from the memory of queries as they arrive; what
//! finds no room is read over and answered with an error, as the next message is expected after it.

use std::sync::Arc;

use bytes::{Buf, BytesMut};
use datafusion::execution::memory_pool::MemoryReservation;
use millrace_common::SqlError;
use millrace_functions::error::sql_error_from_datafusion;
use tokio::io::AsyncReadExt;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::Reader;
use crate::query::QueryEngine;
use crate::server::Shared;
use crate::wire::{FrontendMessage, ProtocolError, decode_message, incoming};

/// Messages decoded ahead of the session.
pub(super) const READ_AHEAD: usize = 32;
/// What is taken at a time; messages smaller than this are not counted.
const STEP: usize = 512 << 10;

/// A message, and the memory it takes from that of queries.
pub(super) struct Arrived {
    pub message: FrontendMessage,
    pub memory: Option<MemoryReservation>,
}

/// Why a message cannot be handled.
pub(super) enum Unread {
    /// Nothing can be read after it.
    Protocol(ProtocolError),
    /// There is no memory for it; it has been read over.
    TooLarge { kind: u8, error: SqlError },
}

pub(super) type Message = Result<Arrived, Unread>;

/// Ends when the client goes away, the session ends or a message is malformed.
pub(super) async fn read_messages(
    mut read: Reader,
    mut buffer: BytesMut,
    shared: Arc<Shared>,
    sender: mpsc::Sender<Message>,
    gone: CancellationToken,
) {
    let _gone = gone.drop_guard();
    let mut memory = None;
    let mut waited = false;
    loop {
        let message = match decode_message(&mut buffer) {
            Ok(Some(message)) => {
                if memory.is_some() {
                    // The message's memory goes with it: the buffer would keep it for as long as the connection lasts.
                    buffer = BytesMut::from(&buffer[..]);
                }
                Ok(Arrived { message, memory: memory.take() })
            }
            Err(e) => Err(Unread::Protocol(e)),
            Ok(None) if memory.is_none() && buffer.len() >= STEP && !waited => {
                // What has been read ahead takes memory, too: it is handled first.
                if sender.reserve_many(READ_AHEAD).await.is_err() {
                    return;
                }
                waited = true;
                continue;
            }
            Ok(None) => match take_memory(&shared.engine, &mut memory, buffer.len()) {
                Ok(()) => match read.read_buf(&mut buffer).await {
                    Ok(n) if n > 0 => continue,
                    _ => return,
                },
                Err(error) => {
                    memory = None;
                    match read_over(&mut read, &mut buffer).await {
                        Ok(kind) => Err(Unread::TooLarge { kind, error }),
                        Err(_) => return,
                    }
                }
            },
        };
        waited = false;
        let ends = matches!(message, Err(Unread::Protocol(_)));
        if sender.send(message).await.is_err() || ends {
            return;
        }
    }
}

/// Takes what so many bytes of a message need.
fn take_memory(
    engine: &QueryEngine,
    memory: &mut Option<MemoryReservation>,
    bytes: usize,
) -> Result<(), SqlError> {
    if bytes < STEP {
        return Ok(());
    }
    let memory = memory.get_or_insert_with(|| engine.reservation("a message of the client"));
    let wanted = bytes.next_multiple_of(STEP);
    if memory.size() >= wanted {
        return Ok(());
    }
    memory.try_resize(wanted).map_err(sql_error_from_datafusion)
}

/// Reads to the end of the message of which the buffer has the beginning; its kind.
async fn read_over(read: &mut Reader, buffer: &mut BytesMut) -> std::io::Result<u8> {
    let Some((kind, length)) = incoming(buffer) else {
        return Err(std::io::ErrorKind::InvalidData.into());
    };
    let mut left = length;
    loop {
        let here = left.min(buffer.len());
        buffer.advance(here);
        left -= here;
        if left == 0 {
            return Ok(kind);
        }
        *buffer = BytesMut::with_capacity(64 << 10);
        if read.read_buf(buffer).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
}
