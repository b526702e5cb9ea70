//! The receiving end of an exchange: merges the channels of all sending tasks and aligns their
//! barriers. A channel that has delivered the barrier is not read again until all have.

use std::sync::Arc;
use std::task::{Context, Poll};

use async_trait::async_trait;

use crate::error::ExecError;
use crate::exchange::{Barrier, ChunkReceiver, Message};
use crate::input::Leaf;
use crate::watermark::WatermarkSet;

pub struct ExchangeLeaf {
    channels: Vec<Channel>,
    /// Where the next round begins, so that no channel starves another.
    turn: usize,
    waiting: usize,
}

struct Channel {
    receiver: Box<dyn ChunkReceiver>,
    aligned: Option<(Arc<Barrier>, Arc<WatermarkSet>)>,
}

impl ExchangeLeaf {
    pub fn new(receivers: Vec<Box<dyn ChunkReceiver>>) -> ExchangeLeaf {
        let waiting = receivers.len();
        let channels =
            receivers.into_iter().map(|receiver| Channel { receiver, aligned: None }).collect();
        ExchangeLeaf { channels, turn: 0, waiting }
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Message, ExecError>> {
        let count = self.channels.len();
        for i in 0..count {
            let at = (self.turn + i) % count;
            let channel = &mut self.channels[at];
            if channel.aligned.is_some() {
                continue;
            }
            match channel.receiver.poll_recv(cx) {
                Poll::Pending => {}
                Poll::Ready(None) => return Poll::Ready(Err(ExecError::Stopped)),
                Poll::Ready(Some(Message::Chunk(chunk))) => {
                    self.turn = at + 1;
                    return Poll::Ready(Ok(Message::Chunk(chunk)));
                }
                Poll::Ready(Some(Message::Barrier(barrier, marks))) => {
                    channel.aligned = Some((barrier, marks));
                    self.waiting -= 1;
                    if self.waiting == 0 {
                        return Poll::Ready(self.aligned());
                    }
                }
            }
        }
        Poll::Pending
    }

    /// All channels have delivered: they must agree.
    fn aligned(&mut self) -> Result<Message, ExecError> {
        self.waiting = self.channels.len();
        let mut barriers = self.channels.iter_mut().filter_map(|c| c.aligned.take());
        let (first, mut marks) =
            barriers.next().ok_or_else(|| ExecError::internal("an exchange has no channel"))?;
        for (other, more) in barriers {
            if *other != *first {
                return Err(ExecError::internal(format!(
                    "barriers {first:?} and {other:?} met in an exchange"
                )));
            }
            if *more != *marks {
                Arc::make_mut(&mut marks).merge(&more);
            }
        }
        Ok(Message::Barrier(first, marks))
    }
}

#[async_trait]
impl Leaf for ExchangeLeaf {
    async fn next(&mut self) -> Result<Message, ExecError> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }
}
