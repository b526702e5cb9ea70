//! Messages from the client: one frame at a time to the library's decoder.

use bytes::{Buf, BytesMut};
use pgwire::messages::cancel::CancelRequest;
use pgwire::messages::startup::{PasswordMessageFamily, Startup};
use pgwire::messages::{DecodeContext, Message, ProtocolVersion, SslNegotiationMetaMessage};

use super::{FrontendMessage, MAX_MESSAGE, MAX_PASSWORD, MAX_STARTUP, ProtocolError, shape};

/// The next packet of a connection that has not started (SSLRequest, GSSENCRequest, CancelRequest,
/// StartupMessage); `None`: more bytes are needed.
pub fn decode_startup(buf: &mut BytesMut) -> Result<Option<FrontendMessage>, ProtocolError> {
    if buf.len() < 4 {
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
    let mut frame = buf.split_to(length);
    let mut context = context();
    context.awaiting_frontend_ssl = true;
    context.awaiting_frontend_startup = true;
    match FrontendMessage::decode(&mut frame, &context)? {
        // Not a negotiation: the frame is untouched.
        Some(FrontendMessage::SslNegotiation(SslNegotiationMetaMessage::None)) => {}
        other => return Ok(other),
    }
    context.awaiting_frontend_ssl = false;
    let major = u16::from_be_bytes([frame[4], frame[5]]);
    if CancelRequest::is_cancel_request_packet(&frame) {
        // Its key may be longer than that of a client.
        context.protocol_version = ProtocolVersion::PROTOCOL3_2;
    } else {
        if major != Startup::PG_PROTOCOL_LATEST {
            return Err(ProtocolError::Version(major, u16::from_be_bytes([frame[6], frame[7]])));
        }
        if std::str::from_utf8(&frame[8..]).is_err() {
            return Err(ProtocolError::Encoding);
        }
        if frame.last() != Some(&0) {
            return Err(ProtocolError::Shape);
        }
    }
    Ok(FrontendMessage::decode(&mut frame, &context)?)
}

/// The next message after start-up; `None`: more bytes are needed.
pub fn decode_message(buf: &mut BytesMut) -> Result<Option<FrontendMessage>, ProtocolError> {
    decode_within(buf, MAX_MESSAGE)
}

/// The kind of the message that the buffer begins with, and its bytes in all; `None`: more bytes are needed, or
/// the length is none.
pub fn incoming(buf: &BytesMut) -> Option<(u8, usize)> {
    let head: [u8; 5] = buf.get(..5)?.try_into().ok()?;
    let length = i32::from_be_bytes([head[1], head[2], head[3], head[4]]);
    Some((head[0], usize::try_from(length).ok()?.checked_add(1)?))
}

/// The next message of a client that is proving who it is; `None`: more bytes are needed.
pub fn decode_password(buf: &mut BytesMut) -> Result<Option<FrontendMessage>, ProtocolError> {
    decode_within(buf, MAX_PASSWORD)
}

fn decode_within(
    buf: &mut BytesMut,
    most: usize,
) -> Result<Option<FrontendMessage>, ProtocolError> {
    if buf.len() < 5 {
        return Ok(None);
    }
    let kind = buf[0];
    let length = i32::from_be_bytes([buf[1], buf[2], buf[3], buf[4]]);
    let length = usize::try_from(length).map_err(|_| ProtocolError::Length)?;
    if !(4..=most).contains(&length) {
        return Err(ProtocolError::Length);
    }
    if buf.len() < length + 1 {
        // Grow by what has arrived, not by what a header claims.
        buf.reserve((length + 1 - buf.len()).min(1 << 20));
        return Ok(None);
    }
    let mut frame = buf.split_to(length + 1);
    shape::check(kind, &frame[5..])?;
    let message = FrontendMessage::decode(&mut frame, &context())?;
    debug_assert!(!frame.has_remaining());
    Ok(message)
}

/// SASL's first answer: the mechanism and the client's first message. The library would trust the
/// length in it.
pub fn sasl_initial(body: &PasswordMessageFamily) -> Result<(String, BytesMut), ProtocolError> {
    let mut bytes = BytesMut::new();
    body.encode_body(&mut bytes)?;
    let end = bytes.iter().position(|&c| c == 0).ok_or(ProtocolError::Shape)?;
    let name = std::str::from_utf8(&bytes[..end]).map_err(|_| ProtocolError::Encoding)?.to_owned();
    bytes.advance(end + 1);
    if bytes.len() < 4 || usize::try_from(bytes.get_i32()) != Ok(bytes.len()) {
        return Err(ProtocolError::Shape);
    }
    Ok((name, bytes))
}

/// Past start-up, protocol 3.0: what we negotiate newer clients down to.
fn context() -> DecodeContext {
    let mut context = DecodeContext::new(ProtocolVersion::PROTOCOL3_0);
    context.awaiting_frontend_ssl = false;
    context.awaiting_frontend_startup = false;
    context
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
            matches!(decode_message(&mut buf).unwrap(), Some(FrontendMessage::Query(q)) if q.query == "select 1")
        );
        assert!(buf.is_empty());
    }

    #[test]
    fn malformed_messages_are_errors() {
        for bytes in [
            &b"Q\0\0\0\x06ab"[..],
            b"Q\0\0\0\x07a\0b",
            b"Q\0\0\0\x06\xff\0",
            b"B\0\0\0\x05a",
            b"B\0\0\0\x0e\0\0\0\0\0\x01\0\0\x7f\xff",
            b"B\0\0\0\x0c\0\0\0\0\0\0\xff\xff",
            b"P\0\0\0\x08\0\0\xff\xff",
            b"E\0\0\0\x05\0",
            b"D\0\0\0\x04",
            b"D\0\0\0\x06Q\0",
            b"C\0\0\0\x05S",
            b"S\0\0\0\x05x",
            b"Q\0\0\0\x01",
            b"?\0\0\0\x04",
            b"Q\xff\xff\xff\xff",
        ] {
            assert!(decode_message(&mut BytesMut::from(bytes)).is_err(), "{bytes:?}");
        }
    }

    /// Every message, cut short at every byte with its length put right: refused or decoded, never a
    /// panic, and never a byte of what follows it.
    #[test]
    fn no_truncation_reaches_into_the_next_message() {
        let whole: [&[u8]; 5] = [
            b"P\0\0\0\0name\0select $1\0\0\x01\0\0\0\x17",
            b"B\0\0\0\0p\0s\0\0\x01\0\x01\0\x02\0\0\0\x02ab\xff\xff\xff\xff\0\x01\0\0",
            b"E\0\0\0\0portal\0\0\0\0\x05",
            b"D\0\0\0\0Sname\0",
            b"f\0\0\0\0why\0",
        ];
        for message in whole {
            for end in 5..=message.len() {
                let mut buf = BytesMut::from(&message[..end]);
                let length = (end - 1) as u32;
                buf[1..5].copy_from_slice(&length.to_be_bytes());
                buf.extend_from_slice(b"S\0\0\0\x04");
                let first = decode_message(&mut buf);
                assert_eq!(first.is_ok(), end == message.len(), "{message:?} cut at {end}");
                let next = decode_message(&mut buf).unwrap();
                assert!(matches!(next, Some(FrontendMessage::Sync(_))));
            }
        }
    }

    #[test]
    fn startup_packets() {
        let packet = |body: &[u8]| {
            let mut buf = BytesMut::from(&((body.len() + 4) as u32).to_be_bytes()[..]);
            buf.extend_from_slice(body);
            decode_startup(&mut buf)
        };
        assert!(matches!(
            packet(&80_877_103u32.to_be_bytes()),
            Ok(Some(FrontendMessage::SslNegotiation(SslNegotiationMetaMessage::PostgresSsl(_))))
        ));
        assert!(matches!(
            packet(b"\x04\xd2\x16\x2e\0\0\0\x07\0\0\0\x08"),
            Ok(Some(FrontendMessage::CancelRequest(c)))
                if c.pid == 7 && c.secret_key.as_i32() == Some(8)
        ));
        assert!(matches!(
            packet(b"\x04\xd2\x16\x2e\0\0\0\x07\0\0\0\x08\x09"),
            Ok(Some(FrontendMessage::CancelRequest(c))) if c.secret_key.to_bytes().len() == 5
        ));
        let started = packet(b"\0\x03\0\x02user\0root\0database\0\0\0");
        let Ok(Some(FrontendMessage::Startup(s))) = started else { panic!("{started:?}") };
        assert_eq!(s.protocol_number_minor, 2);
        assert_eq!(s.parameters["user"], "root");
        assert!(matches!(packet(b"\0\x02\0\0\0"), Err(ProtocolError::Version(2, 0))));
        assert!(packet(b"\0\x03\0\0us").is_err());
        assert!(packet(b"\x04\xd2\x16\x2e\0\0").is_err());
    }
}
