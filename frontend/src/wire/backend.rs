//! Messages to the client, appended to a send buffer.

use bytes::{BufMut, BytesMut};
use millrace_common::SqlError;

/// The status byte of ReadyForQuery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransactionStatus {
    Idle,
    Block,
    Failed,
}

impl TransactionStatus {
    fn byte(self) -> u8 {
        match self {
            TransactionStatus::Idle => b'I',
            TransactionStatus::Block => b'T',
            TransactionStatus::Failed => b'E',
        }
    }
}

/// A column of a RowDescription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    pub name: String,
    pub type_oid: u32,
    pub type_len: i16,
    pub typmod: i32,
}

/// Appends backend messages to a buffer.
#[derive(Debug, Default)]
pub struct Backend {
    pub buf: BytesMut,
}

impl Backend {
    /// One message: its type, then its body, then its length filled in.
    fn message(&mut self, kind: u8, body: impl FnOnce(&mut BytesMut)) {
        let start = self.begin(kind);
        body(&mut self.buf);
        self.end(start);
    }

    /// Begins a message whose body the caller appends to `buf`; give the result to [`Self::end`].
    pub fn begin(&mut self, kind: u8) -> usize {
        self.buf.put_u8(kind);
        self.buf.put_u32(0);
        self.buf.len() - 4
    }

    pub fn end(&mut self, start: usize) {
        let length = (self.buf.len() - start) as u32;
        self.buf[start..start + 4].copy_from_slice(&length.to_be_bytes());
    }

    pub fn authentication_ok(&mut self) {
        self.message(b'R', |b| b.put_i32(0));
    }

    pub fn parameter_status(&mut self, name: &str, value: &str) {
        self.message(b'S', |b| {
            put_str(b, name);
            put_str(b, value);
        });
    }

    pub fn backend_key_data(&mut self, pid: i32, secret: i32) {
        self.message(b'K', |b| {
            b.put_i32(pid);
            b.put_i32(secret);
        });
    }

    /// Asks a client of a newer minor version to go on with 3.0.
    pub fn negotiate_version(&mut self, unknown_options: &[String]) {
        self.message(b'v', |b| {
            b.put_i32(0);
            b.put_i32(unknown_options.len() as i32);
            for option in unknown_options {
                put_str(b, option);
            }
        });
    }

    pub fn ready_for_query(&mut self, status: TransactionStatus) {
        self.message(b'Z', |b| b.put_u8(status.byte()));
    }

    pub fn parse_complete(&mut self) {
        self.message(b'1', |_| {});
    }

    pub fn bind_complete(&mut self) {
        self.message(b'2', |_| {});
    }

    pub fn close_complete(&mut self) {
        self.message(b'3', |_| {});
    }

    pub fn no_data(&mut self) {
        self.message(b'n', |_| {});
    }

    pub fn portal_suspended(&mut self) {
        self.message(b's', |_| {});
    }

    pub fn empty_query(&mut self) {
        self.message(b'I', |_| {});
    }

    pub fn command_complete(&mut self, tag: &str) {
        self.message(b'C', |b| put_str(b, tag));
    }

    pub fn parameter_description(&mut self, oids: &[u32]) {
        self.message(b't', |b| {
            b.put_u16(oids.len() as u16);
            oids.iter().for_each(|oid| b.put_u32(*oid));
        });
    }

    /// `formats` is as in Bind: none, one for all, or one a column.
    pub fn row_description(&mut self, fields: &[Field], formats: &[i16]) {
        self.message(b'T', |b| {
            b.put_u16(fields.len() as u16);
            for (i, field) in fields.iter().enumerate() {
                put_str(b, &field.name);
                b.put_i32(0);
                b.put_i16(0);
                b.put_u32(field.type_oid);
                b.put_i16(field.type_len);
                b.put_i32(field.typmod);
                b.put_i16(format_of(formats, i));
            }
        });
    }

    pub fn copy_in_response(&mut self, columns: usize) {
        self.copy_response(b'G', columns);
    }

    pub fn copy_out_response(&mut self, columns: usize) {
        self.copy_response(b'H', columns);
    }

    fn copy_response(&mut self, kind: u8, columns: usize) {
        self.message(kind, |b| {
            b.put_i8(0);
            b.put_u16(columns as u16);
            b.put_bytes(0, columns * 2);
        });
    }

    pub fn copy_data(&mut self, data: &[u8]) {
        self.message(b'd', |b| b.put_slice(data));
    }

    pub fn copy_done(&mut self) {
        self.message(b'c', |_| {});
    }

    pub fn error(&mut self, severity: &str, error: &SqlError) {
        self.report(b'E', severity, error);
    }

    pub fn notice(&mut self, severity: &str, notice: &SqlError) {
        self.report(b'N', severity, notice);
    }

    fn report(&mut self, kind: u8, severity: &str, e: &SqlError) {
        self.message(kind, |b| {
            let position = e.position.map(|p| p.to_string());
            let fields = [
                (b'S', Some(severity)),
                (b'V', Some(severity)),
                (b'C', Some(e.state.0)),
                (b'M', Some(e.message.as_str())),
                (b'D', e.detail.as_deref()),
                (b'H', e.hint.as_deref()),
                (b'P', position.as_deref()),
                (b'W', e.context.as_deref()),
            ];
            for (code, value) in fields {
                if let Some(value) = value {
                    b.put_u8(code);
                    put_str(b, value);
                }
            }
            b.put_u8(0);
        });
    }
}

/// The format code of column `i`: none given means text, one given holds for all.
pub fn format_of(formats: &[i16], i: usize) -> i16 {
    match formats {
        [] => 0,
        [one] => *one,
        many => many.get(i).copied().unwrap_or(0),
    }
}

/// A zero-terminated string; zero bytes inside, which the protocol cannot carry, are dropped.
fn put_str(b: &mut BytesMut, s: &str) {
    if s.as_bytes().contains(&0) {
        b.extend(s.bytes().filter(|&c| c != 0));
    } else {
        b.put_slice(s.as_bytes());
    }
    b.put_u8(0);
}
