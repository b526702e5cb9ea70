//! Texts, encodings, and arrays of column numbers.

use super::{Entry, NULL, int, text};
use crate::catalog::objects::quote_ident;
use crate::catalog::rows::Cell;

pub(super) const FUNCTIONS: &[Entry] = &[
    ("pg_collation_for", 't', NULL),
    ("pg_encoding_max_length", 'd', |_, a| Ok(int(a, 0)?.map(|_| 4i64).into())),
    ("pg_encoding_to_char", 'n', |_, a| {
        Ok(int(a, 0)?.map(|e| if e == 6 { "UTF8" } else { "" }).into())
    }),
    ("pg_char_to_encoding", 'd', |_, a| {
        Ok(text(a, 0)
            .map(|e| if e.replace('-', "").eq_ignore_ascii_case("utf8") { 6i64 } else { -1 })
            .into())
    }),
    ("pg_client_encoding", 'n', |_, _| Ok("UTF8".into())),
    ("getdatabaseencoding", 'n', |_, _| Ok("UTF8".into())),
    ("quote_ident", 't', |_, a| Ok(text(a, 0).map(quote_ident).into())),
    ("quote_literal", 't', |_, a| Ok(text(a, 0).map(quote_literal).into())),
    ("quote_nullable", 't', |_, a| Ok(text(a, 0).map_or("NULL".to_owned(), quote_literal).into())),
    ("#any_eq", 'b', |_, a| Ok(any_eq(a).into())),
    ("#vector_get", 'i', |_, a| {
        let Some(Cell::Texts(v)) = a.first() else { return Ok(Cell::Null) };
        let at = int(a, 1)?.and_then(|i| usize::try_from(i).ok());
        Ok(at.and_then(|i| v.get(i)).and_then(|s| s.parse::<i64>().ok()).into())
    }),
    ("#vector_text", 't', |_, a| {
        Ok(match a.first() {
            Some(Cell::Texts(v)) => v.join(" ").into(),
            // A column of the same name that is none.
            Some(Cell::Int(i)) => i.to_string().into(),
            Some(Cell::Bool(b)) => b.to_string().into(),
            Some(Cell::Text(t)) => t.into(),
            _ => Cell::Null,
        })
    }),
    ("#numbers", 'l', |_, a| {
        let Some(Cell::Texts(v)) = a.first() else { return Ok(Cell::Null) };
        Ok(Cell::Ints(v.iter().filter_map(|s| s.parse().ok()).collect()))
    }),
    ("#vector_slice", 'k', |_, a| {
        let Some(Cell::Texts(v)) = a.first() else { return Ok(Cell::Null) };
        let (Some(from), Some(to)) = (int(a, 1)?, int(a, 2)?) else { return Ok(Cell::Null) };
        let places = v.iter().enumerate().filter(|(i, _)| (from..=to).contains(&(*i as i64)));
        Ok(Cell::Ints(places.filter_map(|(_, s)| s.parse().ok()).collect()))
    }),
    ("#subscripts", 'l', |_, a| {
        let Some(Cell::Texts(v)) = a.first() else { return Ok(Cell::Null) };
        let first = int(a, 1)?.unwrap_or(1);
        Ok(Cell::Ints((0..v.len() as i64).map(|i| first + i).collect()))
    }),
    ("#no_texts", 'a', |_, _| Ok(Cell::Texts(vec![]))),
    ("#options", 'a', |_, a| {
        let Some(Cell::Texts(options)) = a.first() else { return Ok(Cell::Texts(vec![])) };
        let shown = |o: &String| {
            let (name, value) = o.split_once('=').unwrap_or((o, ""));
            format!("{} {}", quote_ident(name), quote_literal(value))
        };
        Ok(Cell::Texts(options.iter().map(shown).collect()))
    }),
];

/// `left = ANY (array)` by the values' text; an array may be text in braces.
fn any_eq(args: &[Cell]) -> Option<bool> {
    let left = match args.first()? {
        Cell::Null | Cell::Ints(_) | Cell::Texts(_) => return None,
        Cell::Bool(b) => (if *b { "true" } else { "false" }).to_owned(),
        Cell::Int(i) => i.to_string(),
        Cell::Float(f) => f.to_string(),
        Cell::Text(t) => t.clone(),
    };
    match args.get(1)? {
        Cell::Texts(v) => Some(v.contains(&left)),
        Cell::Text(t) => {
            Some(crate::encoding::array::array_items(t)?.into_iter().flatten().any(|i| i == left))
        }
        _ => None,
    }
}

pub fn quote_literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if quoted.contains('\\') {
        format!("E'{}'", quoted.replace('\\', "\\\\"))
    } else {
        format!("'{quoted}'")
    }
}
