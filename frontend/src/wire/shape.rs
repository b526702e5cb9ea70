//! What a frontend message must look like, checked before it is decoded.

use bytes::Buf;

use super::ProtocolError;

/// A part of a message's body.
#[derive(Clone, Copy)]
enum Part {
    /// A string ended by a zero byte, in UTF-8.
    Text,
    /// So many bytes.
    Fixed(usize),
    /// `P` or `S`: what Describe and Close are about.
    Target,
    /// A 16-bit count, then so many elements of so many bytes.
    List(usize),
    /// A 16-bit count, then values: a 32-bit length (−1: NULL) and as many bytes.
    Values,
    /// Whatever is left.
    Rest,
}

/// The parts of the message of that type; `None`: there is no such message.
fn parts(kind: u8) -> Option<&'static [Part]> {
    Some(match kind {
        b'Q' | b'f' => &[Part::Text],
        b'P' => &[Part::Text, Part::Text, Part::List(4)],
        b'B' => &[Part::Text, Part::Text, Part::List(2), Part::Values, Part::List(2)],
        b'D' | b'C' => &[Part::Target, Part::Text],
        b'E' => &[Part::Text, Part::Fixed(4)],
        b'S' | b'H' | b'c' | b'X' => &[],
        b'd' | b'p' => &[Part::Rest],
        _ => return None,
    })
}

/// Checks a whole message body.
pub fn check(kind: u8, mut body: &[u8]) -> Result<(), ProtocolError> {
    let b = &mut body;
    for part in parts(kind).ok_or(ProtocolError::UnknownMessage(kind))? {
        match part {
            Part::Text => {
                let end = b.iter().position(|&c| c == 0).ok_or(ProtocolError::Shape)?;
                std::str::from_utf8(&b[..end]).map_err(|_| ProtocolError::Encoding)?;
                b.advance(end + 1);
            }
            Part::Fixed(n) => skip(b, *n)?,
            Part::Target => match b.first() {
                Some(b'P' | b'S') => b.advance(1),
                _ => return Err(ProtocolError::Shape),
            },
            Part::List(size) => {
                let n = count(b)?;
                skip(b, n * size)?;
            }
            Part::Values => {
                for _ in 0..count(b)? {
                    if b.len() < 4 {
                        return Err(ProtocolError::Shape);
                    }
                    // Any negative length is NULL to the decoder.
                    let length = usize::try_from(b.get_i32()).unwrap_or(0);
                    skip(b, length)?;
                }
            }
            Part::Rest => b.advance(b.len()),
        }
    }
    if b.is_empty() { Ok(()) } else { Err(ProtocolError::Shape) }
}

fn skip(b: &mut &[u8], n: usize) -> Result<(), ProtocolError> {
    if b.len() < n {
        return Err(ProtocolError::Shape);
    }
    b.advance(n);
    Ok(())
}

/// Counts are unsigned 16 bits on the wire.
fn count(b: &mut &[u8]) -> Result<usize, ProtocolError> {
    if b.len() < 2 { Err(ProtocolError::Shape) } else { Ok(usize::from(b.get_u16())) }
}
