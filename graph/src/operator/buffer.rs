//! [`EventTimeBuffer`]: rows that wait for an instant.

use super::{Facts, OperatorMessage, Payload};
use crate::codec::decode::{self, Inputs};
use crate::codec::{Result, encode};

/// Rows kept in order of an instant: `column | all other columns → row`. `T`: its state table, `()` before tables are
/// numbered.
#[derive(Clone, Debug, PartialEq)]
pub struct EventTimeBuffer<T = usize> {
    pub mode: BufferMode,
    /// A timestamp column of the input.
    pub column: usize,
    /// Input columns whose hash is the vnode. Empty: vnode 0, one task.
    pub vnode: Vec<usize>,
    pub table: T,
}

/// What becomes of a row until its instant, and then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferMode {
    /// EMIT ON WINDOW CLOSE: holds rows back until the watermark of the column passes their value in it,
    /// then emits what they net to, once.
    WindowClose,
    /// A temporal filter: rows pass, and are retracted when the epoch's wall-clock time reaches the
    /// instant. Rows whose time has come already, or that have none, vanish.
    UpperBound,
    /// A temporal filter: rows wait until the epoch's wall-clock time reaches the instant. Rows that
    /// have none vanish.
    LowerBound,
}

impl Payload for EventTimeBuffer {
    /// It cleans up after itself: the watermark is what it waits for. A closed window is whole; a temporal filter lets
    /// each row pass by itself.
    fn facts(&self) -> Facts {
        Facts::inner(match self.mode {
            BufferMode::WindowClose => "WindowClose",
            BufferMode::UpperBound => "Expire",
            BufferMode::LowerBound => "Appear",
        })
    }

    fn encode(&self) -> Result<OperatorMessage> {
        let message = BufferMessage {
            column: encode::position(self.column)?,
            vnode: encode::positions(&self.vnode)?,
            table: encode::position(self.table)?,
        };
        Ok(match self.mode {
            BufferMode::WindowClose => OperatorMessage::WindowClose(message),
            BufferMode::UpperBound => OperatorMessage::TemporalUpperBound(message),
            BufferMode::LowerBound => OperatorMessage::TemporalLowerBound(message),
        })
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct BufferMessage {
    #[prost(uint32, tag = "1")]
    pub column: u32,
    #[prost(uint32, repeated, tag = "2")]
    pub vnode: Vec<u32>,
    #[prost(uint32, tag = "3")]
    pub table: u32,
}

impl EventTimeBuffer {
    pub(crate) fn decode(
        m: &BufferMessage,
        mode: BufferMode,
        inputs: &Inputs<'_>,
    ) -> Result<EventTimeBuffer> {
        let input = inputs.one()?;
        Ok(EventTimeBuffer {
            mode,
            column: decode::timestamp(m.column, input)?,
            vnode: decode::columns(&m.vnode, input)?,
            table: inputs.sizes.table(m.table)?,
        })
    }
}
