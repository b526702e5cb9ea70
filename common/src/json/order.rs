//! The order of documents: that of `jsonb`'s comparison operators, as bytes in that order.
//!
//! null < string < number < boolean < array < object, of arrays and objects first the one with fewer parts, then part
//! by part; numbers go by value. An empty array that is the whole document comes before everything, which PostgreSQL keeps
//! for historical reasons.
//!
//! Whatever orders documents orders them by these bytes, so there is no second opinion.

use std::cmp::Ordering;

use super::Json;

/// What a value's bytes begin with.
mod tag {
    pub const EMPTY: u8 = 0;
    pub const NULL: u8 = 1;
    pub const STRING: u8 = 2;
    pub const NUMBER: u8 = 3;
    pub const BOOLEAN: u8 = 4;
    pub const ARRAY: u8 = 5;
    pub const OBJECT: u8 = 6;
}

/// What a number's bytes begin with.
mod sign {
    pub const NEGATIVE: u8 = 0;
    pub const ZERO: u8 = 1;
    pub const POSITIVE: u8 = 2;
}

impl Json {
    /// Bytes whose order is that of documents; equal documents have the same.
    pub fn order_key(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Json::Array(items) if items.is_empty() => out.push(tag::EMPTY),
            value => push(value, &mut out),
        }
        out
    }

    /// The order of `jsonb`'s comparison operators.
    pub fn compare(&self, other: &Json) -> Ordering {
        self.order_key().cmp(&other.order_key())
    }
}

/// No value's bytes are the beginning of another's.
fn push(value: &Json, out: &mut Vec<u8>) {
    match value {
        Json::Null => out.push(tag::NULL),
        Json::String(s) => {
            out.push(tag::STRING);
            push_text(s, out);
        }
        Json::Number(digits) => {
            out.push(tag::NUMBER);
            push_number(digits, out);
        }
        Json::Bool(b) => out.extend([tag::BOOLEAN, u8::from(*b)]),
        Json::Array(items) => {
            out.push(tag::ARRAY);
            push_count(items.len(), out);
            items.iter().for_each(|item| push(item, out));
        }
        Json::Object(entries) => {
            out.push(tag::OBJECT);
            push_count(entries.len(), out);
            for (key, value) in entries {
                push_text(key, out);
                push(value, out);
            }
        }
    }
}

fn push_count(count: usize, out: &mut Vec<u8>) {
    out.extend((count as u64).to_be_bytes());
}

/// A text and its end, which comes before all that may go on. Documents hold no zero byte.
fn push_text(text: &str, out: &mut Vec<u8>) {
    out.extend(text.bytes().filter(|b| *b != 0));
    out.push(0);
}

/// Sign, power of ten, digits. Of a negative number all of them count the other way round.
fn push_number(text: &str, out: &mut Vec<u8>) {
    let (negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits: Vec<u8> = whole.bytes().chain(fraction.bytes()).collect();
    let Some(first) = digits.iter().position(|d| *d != b'0') else {
        out.push(sign::ZERO);
        return;
    };
    let last = digits.iter().rposition(|d| *d != b'0').unwrap_or(first);
    out.push(if negative { sign::NEGATIVE } else { sign::POSITIVE });
    let start = out.len();
    let power = whole.len() as i64 - first as i64;
    // As an unsigned number in the same order.
    out.extend(((power as u64) ^ (1 << 63)).to_be_bytes());
    out.extend_from_slice(&digits[first..=last]);
    out.push(0);
    if negative {
        out[start..].iter_mut().for_each(|b| *b = !*b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In the order that PostgreSQL 15 has them (`ORDER BY x::jsonb`), level ones in one string.
    const ORDERED: [&str; 33] = [
        "[]",
        "null",
        "\"\"",
        "\"1\"",
        "\"10\"",
        "\"9\"",
        "\"B\"",
        "\"a\"",
        "\"ab\"",
        "\"é\"",
        "-1e20",
        "-10",
        "-9.5",
        "-9",
        "-0.5",
        "-0.05",
        "0 0.0 -0",
        "0.05",
        "0.5",
        "9 9.0 9e0 90e-1",
        "9.5",
        "10 1e1",
        "1e20",
        "false",
        "true",
        "[null]",
        "[1] [1.0]",
        "[[]]",
        "[{}]",
        "[0,0]",
        "{}",
        "{\"b\":1}",
        "{\"a\":1,\"b\":2} {\"b\":2.0,\"a\":1}",
    ];

    #[test]
    fn documents_are_in_the_order_of_postgres() {
        let keys = ORDERED.map(|level| {
            let keys = level.split(' ').map(|text| Json::parse(text).unwrap().order_key());
            keys.collect::<Vec<_>>()
        });
        for (at, level) in keys.iter().enumerate() {
            assert!(level.iter().all(|key| *key == level[0]), "{}", ORDERED[at]);
            if let Some(next) = keys.get(at + 1) {
                assert!(level[0] < next[0], "{} < {}", ORDERED[at], ORDERED[at + 1]);
            }
        }
    }
}
