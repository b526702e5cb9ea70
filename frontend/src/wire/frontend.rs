//! Messages from the client.

use bytes::{Buf, Bytes, BytesMut};

use super::{MAX_MESSAGE, MAX_STARTUP, ProtocolError};

/// What a connection may open with.
#[derive(Debug)]
pub enum Startup {
    Ssl,
    GssEnc,
    Cancel { pid: i32, secret: i32 },
    Parameters { minor: u16, parameters: Vec<(String, String)> },
}

/// A message after start-up.
#[derive(Debug)]
pub enum FrontendMessage {
    Query(String),
    Parse { name: String, sql: String, types: Vec<u32> },
    Bind(Bind),
    Describe { portal: bool, name: String },
    Execute { portal: String, max_rows: usize },
    Close { portal: bool, name: String },
    Sync,
    Flush,
    CopyData(Bytes),
    CopyDone,
    CopyFail(String),
    Password,
    Terminate,
}

#[derive(Debug)]
pub struct Bind {
    pub portal: String,
    pub statement: String,
    pub formats: Vec<i16>,
    pub params: Vec<Option<Bytes>>,
    pub result_formats: Vec<i16>,
}

const SSL_REQUEST: i32 = 80_877_103;
const GSS_REQUEST: i32 = 80_877_104;
const CANCEL_REQUEST: i32 = 80_877_102;

/// The next packet of a connection that has not started; `None`: more bytes are needed.
pub fn decode_startup(buf: &mut BytesMut) -> Result<Option<Startup>, ProtocolError> {
    if buf.len() < 8 {
        return Ok(None);
    }
    let length = i32::from_be_bytes([buf[0], buf[1], buf[2], buf[3]]);
    let length = usize::try_from(length).map_err(|_| ProtocolError::Length)?;
    if !(8..=MAX_STARTUP).contains(&length) {
        return Err(ProtocolError::Length);
    }
    if buf.len() < length {
        return Ok(None);
    }
    let mut body = buf.split_to(length).freeze();
    body.advance(4);
    match body.get_i32() {
        SSL_REQUEST => Ok(Some(Startup::Ssl)),
        GSS_REQUEST => Ok(Some(Startup::GssEnc)),
        CANCEL_REQUEST => {
            Ok(Some(Startup::Cancel { pid: int32(&mut body)?, secret: int32(&mut body)? }))
        }
        version => {
            let (major, minor) = ((version >> 16) as u16, version as u16);
            if major != 3 {
                return Err(ProtocolError::Version(major, minor));
            }
            let mut parameters = Vec::new();
            loop {
                let name = string(&mut body)?;
                if name.is_empty() {
                    break;
                }
                parameters.push((name, string(&mut body)?));
            }
            Ok(Some(Startup::Parameters { minor, parameters }))
        }
    }
}

/// The next message; `None`: more bytes are needed.
pub fn decode_message(buf: &mut BytesMut) -> Result<Option<FrontendMessage>, ProtocolError> {
    if buf.len() < 5 {
        return Ok(None);
    }
    let kind = buf[0];
    let length = i32::from_be_bytes([buf[1], buf[2], buf[3], buf[4]]);
    let length = usize::try_from(length).map_err(|_| ProtocolError::Length)?;
    if !(4..=MAX_MESSAGE).contains(&length) {
        return Err(ProtocolError::Length);
    }
    if buf.len() < length + 1 {
        // Grow by what has arrived, not by what a header claims.
        buf.reserve((length + 1 - buf.len()).min(1 << 20));
        return Ok(None);
    }
    let mut body = buf.split_to(length + 1).freeze();
    body.advance(5);
    decode_body(kind, body).map(Some)
}

fn decode_body(kind: u8, mut body: Bytes) -> Result<FrontendMessage, ProtocolError> {
    let b = &mut body;
    Ok(match kind {
        b'Q' => FrontendMessage::Query(string(b)?),
        b'P' => {
            let (name, sql) = (string(b)?, string(b)?);
            let count = count(b)?;
            let types = (0..count).map(|_| int32(b).map(|t| t as u32)).collect::<Result<_, _>>()?;
            FrontendMessage::Parse { name, sql, types }
        }
        b'B' => FrontendMessage::Bind(decode_bind(b)?),
        b'D' => {
            let portal = target(b)?;
            FrontendMessage::Describe { portal, name: string(b)? }
        }
        b'E' => {
            let portal = string(b)?;
            let max_rows = usize::try_from(int32(b)?).unwrap_or(0);
            FrontendMessage::Execute { portal, max_rows }
        }
        b'C' => {
            let portal = target(b)?;
            FrontendMessage::Close { portal, name: string(b)? }
        }
        b'S' => FrontendMessage::Sync,
        b'H' => FrontendMessage::Flush,
        b'd' => FrontendMessage::CopyData(body),
        b'c' => FrontendMessage::CopyDone,
        b'f' => FrontendMessage::CopyFail(string(b)?),
        b'p' => FrontendMessage::Password,
        b'X' => FrontendMessage::Terminate,
        other => return Err(ProtocolError::UnknownMessage(other)),
    })
}

fn decode_bind(b: &mut Bytes) -> Result<Bind, ProtocolError> {
    let (portal, statement) = (string(b)?, string(b)?);
    let formats = formats(b)?;
    let n = count(b)?;
    let mut params = Vec::with_capacity(n.min(1024));
    for _ in 0..n {
        let length = int32(b)?;
        params.push(match usize::try_from(length) {
            Err(_) => None,
            Ok(length) if b.len() >= length => Some(b.split_to(length)),
            Ok(_) => return Err(ProtocolError::Truncated),
        });
    }
    Ok(Bind { portal, statement, formats, params, result_formats: self::formats(b)? })
}

fn formats(b: &mut Bytes) -> Result<Vec<i16>, ProtocolError> {
    let n = count(b)?;
    (0..n).map(|_| int16(b)).collect()
}

fn target(b: &mut Bytes) -> Result<bool, ProtocolError> {
    if b.is_empty() {
        return Err(ProtocolError::Truncated);
    }
    match b.get_u8() {
        b'P' => Ok(true),
        b'S' => Ok(false),
        _ => Err(ProtocolError::Text),
    }
}

/// Counts are unsigned 16 bits on the wire.
fn count(b: &mut Bytes) -> Result<usize, ProtocolError> {
    int16(b).map(|n| usize::from(n as u16))
}

fn int16(b: &mut Bytes) -> Result<i16, ProtocolError> {
    if b.len() < 2 { Err(ProtocolError::Truncated) } else { Ok(b.get_i16()) }
}

fn int32(b: &mut Bytes) -> Result<i32, ProtocolError> {
    if b.len() < 4 { Err(ProtocolError::Truncated) } else { Ok(b.get_i32()) }
}

fn string(b: &mut Bytes) -> Result<String, ProtocolError> {
    let end = b.iter().position(|&c| c == 0).ok_or(ProtocolError::Text)?;
    let bytes = b.split_to(end);
    b.advance(1);
    String::from_utf8(bytes.into()).map_err(|_| ProtocolError::Text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_waits_for_all_its_bytes() {
        let mut buf = BytesMut::from(&b"Q\0\0\0\x0dselect 1"[..]);
        assert!(decode_message(&mut buf).unwrap().is_none());
        buf.extend_from_slice(b"\0");
        assert!(
            matches!(decode_message(&mut buf).unwrap(), Some(FrontendMessage::Query(q)) if q == "select 1")
        );
        assert!(buf.is_empty());
    }

    #[test]
    fn malformed_messages_are_errors() {
        for bytes in [
            &b"Q\0\0\0\x06ab"[..],
            b"B\0\0\0\x05a",
            b"Q\0\0\0\x01",
            b"?\0\0\0\x04",
            b"Q\xff\xff\xff\xff",
        ] {
            assert!(decode_message(&mut BytesMut::from(bytes)).is_err(), "{bytes:?}");
        }
    }
}
