//! [`Hop`]: the windows that a row's time lies in.

use super::{Facts, OperatorMessage, Payload};
use crate::codec::decode::{self, Inputs};
use crate::codec::{Result, encode};

/// Appends `window_start` and `window_end` columns; a row goes into `size / slide` windows
/// (TUMBLE: slide = size). Microseconds. Rows with a NULL time vanish.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hop {
    pub time_column: usize,
    pub size_us: i64,
    pub slide_us: i64,
    pub offset_us: i64,
}

impl Payload for Hop {
    fn facts(&self) -> Facts {
        Facts::inner("Hop")
    }

    fn encode(&self) -> Result<OperatorMessage> {
        Ok(OperatorMessage::Hop(HopMessage {
            time_column: encode::position(self.time_column)?,
            size_us: self.size_us,
            slide_us: self.slide_us,
            offset_us: self.offset_us,
        }))
    }
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(crate) struct HopMessage {
    #[prost(uint32, tag = "1")]
    pub time_column: u32,
    #[prost(int64, tag = "2")]
    pub size_us: i64,
    #[prost(int64, tag = "3")]
    pub slide_us: i64,
    #[prost(int64, tag = "4")]
    pub offset_us: i64,
}

impl Hop {
    pub(crate) fn decode(m: &HopMessage, inputs: &Inputs<'_>) -> Result<Hop> {
        let HopMessage { time_column, size_us, slide_us, offset_us } = *m;
        let time_column = decode::column(time_column, inputs.one()?)?;
        Ok(Hop { time_column, size_us, slide_us, offset_us })
    }
}
