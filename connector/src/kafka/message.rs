//! A message into rows: what FORMAT says its value and key mean.

use std::borrow::Cow;
use std::sync::Arc;

use arrow::array::{Int64Array, RecordBatch};
use millrace_common::{SqlError, SqlState, SqlType};

use crate::ConnectorError;
use crate::batch::{BatchBuilder, Facts};
use crate::columns::Columns;
use crate::decode::json::{Object, Strings};
use crate::decode::{Decoder, Encoding, text};

/// FORMAT of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Envelope {
    /// A message is a row; one without a value is none.
    Plain,
    /// A message without a value deletes the row of its key.
    Upsert,
    /// `{before, after, op}`.
    Debezium,
}

impl Envelope {
    pub fn parse(format: &str) -> Result<Envelope, SqlError> {
        match format {
            "PLAIN" => Ok(Envelope::Plain),
            "UPSERT" => Ok(Envelope::Upsert),
            "DEBEZIUM" => Ok(Envelope::Debezium),
            other => Err(SqlError::unsupported(format!("FORMAT {other}"))
                .with_hint("Use FORMAT PLAIN, UPSERT or DEBEZIUM.")),
        }
    }
}

/// Turns messages into batches of the wanted columns.
pub struct Messages {
    columns: Arc<Columns>,
    envelope: Envelope,
    key: Arc<Vec<usize>>,
    decoder: Decoder,
    object: Object,
    inner: Object,
    out: BatchBuilder,
}

impl Messages {
    pub fn new(
        columns: Arc<Columns>,
        encoding: Encoding,
        envelope: Envelope,
        key: Arc<Vec<usize>>,
        wanted: &[usize],
    ) -> Result<Messages, ConnectorError> {
        let out = BatchBuilder::new(Arc::clone(&columns), wanted)?;
        let decoder = Decoder::new(Arc::clone(&columns), encoding);
        let (object, inner) = Default::default();
        Ok(Messages { columns, envelope, key, decoder, object, inner, out })
    }

    pub fn rows(&self) -> usize {
        self.out.rows()
    }

    pub fn finish(&mut self) -> Result<(RecordBatch, Option<Int64Array>), ConnectorError> {
        self.out.finish()
    }

    /// Adds a message. An error tells why it was left out.
    pub fn push(&mut self, value: Option<&[u8]>, facts: &Facts<'_>) -> Result<(), SqlError> {
        match (self.envelope, value) {
            (Envelope::Plain, Some(value)) | (Envelope::Upsert, Some(value)) => {
                self.decoder.push(value, facts, 1, &mut self.out)
            }
            (Envelope::Debezium, Some(value)) => self.change(value, facts),
            (Envelope::Upsert, None) => self.delete_by_key(facts),
            (Envelope::Plain | Envelope::Debezium, None) => Ok(()),
        }
    }

    fn change(&mut self, value: &[u8], facts: &Facts<'_>) -> Result<(), SqlError> {
        self.object.parse(value)?;
        // With the schema in the message, the change is one level down.
        let change = match self.object.nested("payload") {
            Some(payload) => {
                self.inner.parse(payload.as_bytes())?;
                &self.inner
            }
            None => &self.object,
        };
        let (before, after) = (change.nested("before"), change.nested("after"));
        if before.is_none() && after.is_none() {
            return Err(SqlError::new(
                SqlState::INVALID_TEXT_REPRESENTATION,
                "the message has neither \"before\" nor \"after\"",
            ));
        }
        // The key may change: the old row goes first.
        if let Some(before) = before {
            let before = before.as_bytes().to_vec();
            let after = after.map(|a| a.as_bytes().to_vec());
            self.decoder.push(&before, facts, -1, &mut self.out)?;
            return match after {
                Some(after) => self.decoder.push(&after, facts, 1, &mut self.out),
                None => Ok(()),
            };
        }
        match after.map(|a| a.as_bytes().to_vec()) {
            Some(after) => self.decoder.push(&after, facts, 1, &mut self.out),
            None => Ok(()),
        }
    }

    /// The key is a JSON object of the key's columns, or the value of its one column.
    fn delete_by_key(&mut self, facts: &Facts<'_>) -> Result<(), SqlError> {
        let missing = || {
            SqlError::new(
                SqlState::INVALID_TEXT_REPRESENTATION,
                "a message that deletes has no key",
            )
        };
        let bytes = facts.key.ok_or_else(missing)?;
        let columns = Arc::clone(&self.columns);
        let key = Arc::clone(&self.key);
        if bytes.trim_ascii_start().starts_with(b"{") {
            self.object.parse(bytes)?;
            let object = &self.object;
            return self.out.push(facts, -1, |c| match key.contains(&c) {
                true => object.field(&columns.names[c], columns.types[c], Strings::Values),
                false => Ok(None),
            });
        }
        let &[only] = key.as_slice() else {
            return Err(SqlError::new(
                SqlState::INVALID_TEXT_REPRESENTATION,
                "the key of a message that deletes is not a JSON object of the key's columns",
            ));
        };
        let whole = text(bytes)?;
        let whole = match columns.types[only] {
            // A JSON string as it is.
            SqlType::Jsonb => whole,
            _ => whole.strip_prefix('"').and_then(|w| w.strip_suffix('"')).unwrap_or(whole),
        };
        self.out.push(facts, -1, |c| Ok((c == only).then_some(Cow::Borrowed(whole))))
    }
}
