//! Messages to the client, gathered in a send buffer.

use bytes::BytesMut;
use millrace_common::SqlError;
use pgwire::messages::copy::{CopyData, CopyDone, CopyInResponse, CopyOutResponse};
use pgwire::messages::data::{
    DataRow, FieldDescription, NoData, ParameterDescription, RowDescription,
};
use pgwire::messages::extendedquery::{
    BindComplete, CloseComplete, ParseComplete, PortalSuspended,
};
use pgwire::messages::response::{
    CommandComplete, EmptyQueryResponse, ErrorResponse, NoticeResponse, ReadyForQuery,
};
use pgwire::messages::startup::{
    Authentication, BackendKeyData, NegotiateProtocolVersion, ParameterStatus, SecretKey,
};
use pgwire::messages::{Message, ProtocolVersion};

pub use pgwire::messages::response::TransactionStatus;

/// A column of a RowDescription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    pub name: String,
    pub type_oid: u32,
    pub type_len: i16,
    pub typmod: i32,
    /// What clients are told beside that.
    pub told: Told,
}

/// What only clients are told of a column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// OID of the relation whose column it is; 0: of none.
    pub table_oid: u32,
    /// The number of that column.
    pub column: i16,
    /// OID and modifier of the type instead of those that it is computed with.
    pub declared: Option<(u32, i32)>,
}

impl Field {
    /// OID and modifier of the type, as clients are told.
    pub fn told_type(&self) -> (u32, i32) {
        self.told.declared.unwrap_or((self.type_oid, self.typmod))
    }

    /// Whether a client can read one as it reads the other.
    pub fn reads_as(&self, other: &Field) -> bool {
        self.name == other.name && self.told_type() == other.told_type()
    }
}

/// Appends backend messages to a buffer.
#[derive(Debug, Default)]
pub struct Backend {
    pub buf: BytesMut,
    /// The row under construction; its memory serves all rows.
    row: DataRow,
    copy: BytesMut,
}

impl Backend {
    /// Appends a message. One the protocol cannot carry is left out whole, and logged.
    pub fn put(&mut self, message: &impl Message) {
        let start = self.buf.len();
        if let Err(e) = message.encode(&mut self.buf) {
            self.buf.truncate(start);
            tracing::error!(error = %e, "a message to a client could not be encoded");
        }
    }

    pub fn authentication(&mut self, message: &Authentication) {
        self.put(message);
    }

    pub fn parameter_status(&mut self, name: &str, value: &str) {
        self.put(&ParameterStatus::new(plain(name), plain(value)));
    }

    pub fn backend_key_data(&mut self, pid: i32, secret: i32) {
        self.put(&BackendKeyData::new(pid, SecretKey::I32(secret)));
    }

    /// Asks a client of a newer minor version to go on with 3.0.
    pub fn negotiate_version(&mut self, unknown_options: Vec<String>) {
        let version = i32::from(ProtocolVersion::PROTOCOL3_0);
        self.put(&NegotiateProtocolVersion::new(version, unknown_options));
    }

    pub fn ready_for_query(&mut self, status: TransactionStatus) {
        self.put(&ReadyForQuery::new(status));
    }

    pub fn parse_complete(&mut self) {
        self.put(&ParseComplete::new());
    }

    pub fn bind_complete(&mut self) {
        self.put(&BindComplete::new());
    }

    pub fn close_complete(&mut self) {
        self.put(&CloseComplete::new());
    }

    pub fn no_data(&mut self) {
        self.put(&NoData::new());
    }

    pub fn portal_suspended(&mut self) {
        self.put(&PortalSuspended::new());
    }

    pub fn empty_query(&mut self) {
        self.put(&EmptyQueryResponse::new());
    }

    pub fn command_complete(&mut self, tag: &str) {
        self.put(&CommandComplete::new(plain(tag)));
    }

    pub fn parameter_description(&mut self, oids: &[u32]) {
        self.put(&ParameterDescription::new(oids.to_vec()));
    }

    /// `formats` is as in Bind: none, one for all, or one a column.
    pub fn row_description(&mut self, fields: &[Field], formats: &[i16]) {
        let describe = |(i, f): (usize, &Field)| {
            let (name, format) = (plain(&f.name), format_of(formats, i));
            let (Told { table_oid, column, .. }, (oid, typmod)) = (f.told, f.told_type());
            // The crate's number is 32 bits wide but for the wire.
            let table = table_oid as i32;
            FieldDescription::new(name, table, column, oid, f.type_len, typmod, format)
        };
        self.put(&RowDescription::new(fields.iter().enumerate().map(describe).collect()));
    }

    /// One row: `fill` appends each column's length and bytes. A row that fails leaves nothing behind.
    pub fn data_row(
        &mut self,
        columns: usize,
        fill: impl FnOnce(&mut BytesMut) -> Result<(), SqlError>,
    ) -> Result<(), SqlError> {
        let mut row = std::mem::take(&mut self.row);
        row.data.clear();
        // The count is 16 bits on the wire and read as unsigned.
        row.field_count = columns as u16 as i16;
        let filled = fill(&mut row.data);
        if filled.is_ok() {
            self.put(&row);
        }
        self.row = row;
        filled
    }

    pub fn copy_in_response(&mut self, columns: usize, binary: bool) {
        let formats = vec![i16::from(binary); columns];
        self.put(&CopyInResponse::new(i8::from(binary), columns as i16, formats));
    }

    pub fn copy_out_response(&mut self, columns: usize, binary: bool) {
        let formats = vec![i16::from(binary); columns];
        self.put(&CopyOutResponse::new(i8::from(binary), columns as i16, formats));
    }

    pub fn copy_data(&mut self, data: &[u8]) {
        self.copy.extend_from_slice(data);
        let message = CopyData::new(self.copy.split().freeze());
        self.put(&message);
    }

    pub fn copy_done(&mut self) {
        self.put(&CopyDone::new());
    }

    pub fn error(&mut self, severity: &str, error: &SqlError) {
        self.put(&ErrorResponse::new(report(severity, error)));
    }

    pub fn notice(&mut self, severity: &str, notice: &SqlError) {
        self.put(&NoticeResponse::new(report(severity, notice)));
    }
}

/// The fields of an ErrorResponse or NoticeResponse.
fn report(severity: &str, e: &SqlError) -> Vec<(u8, String)> {
    let position = e.position.map(|p| p.to_string());
    let object = e.object.as_ref();
    let fields = [
        (b'S', Some(severity)),
        (b'V', Some(severity)),
        (b'C', Some(e.state.0)),
        (b'M', Some(e.message.as_str())),
        (b'D', e.detail.as_deref()),
        (b'H', e.hint.as_deref()),
        (b'P', position.as_deref()),
        (b'W', e.context.as_deref()),
        (b's', object.map(|o| o.schema.as_str())),
        (b't', object.map(|o| o.table.as_str())),
        (b'c', object.and_then(|o| o.column.as_deref())),
        (b'n', object.and_then(|o| o.constraint.as_deref())),
        (b'R', e.routine),
    ];
    fields.into_iter().filter_map(|(code, value)| Some((code, plain(value?)))).collect()
}

/// The format code of column `i`: none given means text, one given holds for all.
pub fn format_of(formats: &[i16], i: usize) -> i16 {
    match formats {
        [] => 0,
        [one] => *one,
        many => many.get(i).copied().unwrap_or(0),
    }
}

/// A string without zero bytes, which end a string on the wire.
fn plain(s: &str) -> String {
    if s.contains('\0') { s.replace('\0', "") } else { s.to_owned() }
}
