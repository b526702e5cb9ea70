//! CSV records as PostgreSQL's COPY reads them.

use millrace_common::{SqlError, SqlState};

/// How records are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CsvFormat {
    pub header: bool,
    pub delimiter: u8,
    pub quote: u8,
    pub escape: u8,
    /// An unquoted field equal to this is null.
    pub null: String,
}

/// The fields of one record. Reused from record to record.
#[derive(Debug, Default)]
pub struct Record {
    text: Vec<u8>,
    /// End of each field in `text`, and whether any of it was quoted.
    ends: Vec<(usize, bool)>,
}

impl Record {
    /// Takes a record apart. `bytes` is without the end of its line.
    pub fn parse(&mut self, bytes: &[u8], format: &CsvFormat) -> Result<(), SqlError> {
        super::text(bytes)?;
        self.text.clear();
        self.ends.clear();
        let (mut quoted, mut was_quoted) = (false, false);
        let mut at = 0;
        while at < bytes.len() {
            let byte = bytes[at];
            at += 1;
            if quoted {
                let next = bytes.get(at).copied();
                if byte == format.escape
                    && next.is_some_and(|n| n == format.quote || n == format.escape)
                {
                    self.text.extend(next);
                    at += 1;
                } else if byte == format.quote {
                    quoted = false;
                } else {
                    self.text.push(byte);
                }
            } else if byte == format.quote {
                (quoted, was_quoted) = (true, true);
            } else if byte == format.delimiter {
                self.ends.push((self.text.len(), was_quoted));
                was_quoted = false;
            } else {
                self.text.push(byte);
            }
        }
        if quoted {
            return Err(SqlError::new(
                SqlState::BAD_COPY_FILE_FORMAT,
                "unterminated CSV quoted field",
            ));
        }
        self.ends.push((self.text.len(), was_quoted));
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// A field's text; quotes and escapes are ASCII, so what was UTF-8 still is.
    pub fn text(&self, field: usize) -> &str {
        let Some((end, _)) = self.ends.get(field) else { return "" };
        let start = field.checked_sub(1).map_or(0, |f| self.ends[f].0);
        std::str::from_utf8(&self.text[start..*end]).unwrap_or_default()
    }

    /// `None`: null.
    pub fn field(&self, field: usize, null: &str) -> Option<&str> {
        let quoted = self.ends.get(field)?.1;
        let text = self.text(field);
        (quoted || text != null).then_some(text)
    }
}

/// Finds ends of lines that are not inside quotes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quotes {
    inside: bool,
    /// The last byte was an escape that is not the quote itself: what follows stands for itself.
    escaped: bool,
}

impl Quotes {
    pub fn is_inside(&self) -> bool {
        self.inside
    }

    /// The position of the line feed that ends the record, looking from `from` on. `None`: it is not
    /// among these bytes; go on at their end with the same state.
    pub fn find_end(&mut self, bytes: &[u8], from: usize, quote: u8, escape: u8) -> Option<usize> {
        let mut at = from;
        if std::mem::take(&mut self.escaped) && at < bytes.len() {
            at += 1;
        }
        while at < bytes.len() {
            let position = at + memchr::memchr3(b'\n', quote, escape, &bytes[at..])?;
            let byte = bytes[position];
            at = position + 1;
            if byte == quote {
                // A doubled quote turns the state twice, which is right.
                self.inside = !self.inside;
            } else if byte == b'\n' {
                if !self.inside {
                    return Some(position);
                }
            } else if self.inside {
                self.escaped = at >= bytes.len();
                at += 1;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format() -> CsvFormat {
        let null = String::new();
        CsvFormat { header: false, delimiter: b',', quote: b'"', escape: b'"', null }
    }

    fn fields(line: &str) -> Vec<Option<String>> {
        let mut record = Record::default();
        record.parse(line.as_bytes(), &format()).unwrap();
        (0..record.len()).map(|i| record.field(i, "").map(str::to_owned)).collect()
    }

    fn some(list: &[&str]) -> Vec<Option<String>> {
        list.iter().map(|s| Some((*s).to_owned())).collect()
    }

    #[test]
    fn fields_quotes_and_nulls() {
        assert_eq!(fields("1,two,3.5"), some(&["1", "two", "3.5"]));
        assert_eq!(fields(r#""a,b","c ""d""",x"y z"q"#), some(&["a,b", "c \"d\"", "xy zq"]));
        assert_eq!(fields("\"line\nbreak\",é"), some(&["line\nbreak", "é"]));
        assert_eq!(fields("1,,\"\""), [Some("1".to_owned()), None, Some(String::new())]);
        assert!(Record::default().parse(b"\"open", &format()).is_err());
        assert!(Record::default().parse(b"a\xffb", &format()).is_err());
    }

    #[test]
    fn a_line_ends_outside_quotes_however_the_bytes_arrive() {
        let text = b"a,\"x\ny\",\"q\"\"\n\"\nnext\n";
        let expected = text.len() - 6;
        for cut in 0..text.len() {
            let mut quotes = Quotes::default();
            let found = quotes
                .find_end(&text[..cut], 0, b'"', b'"')
                .or_else(|| quotes.find_end(text, cut, b'"', b'"'));
            assert_eq!(found, Some(expected), "cut at {cut}");
        }
    }

    #[test]
    fn an_escape_of_its_own_hides_a_quote() {
        let text = br#""a\"
b",1
"#;
        for cut in 0..text.len() {
            let mut quotes = Quotes::default();
            let found = quotes
                .find_end(&text[..cut], 0, b'"', b'\\')
                .or_else(|| quotes.find_end(text, cut, b'"', b'\\'));
            assert_eq!(found, Some(text.len() - 1), "cut at {cut}");
        }
    }
}
