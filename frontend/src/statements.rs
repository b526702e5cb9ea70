//! SQL text to statements, with what our parser leaves to us.
//!
//! It knows a part only of what may follow the target of a COPY, only directions of FETCH that go forward,
//! and not SET of a quoted name. That is hidden from it by blanks and the like, so that places stay what
//! they are, and read here.

use std::ops::Range;
use std::sync::Arc;

use millrace_common::{SqlError, SqlState};
use millrace_planner::{ParsedStatement, Statement};
use sqlparser::ast::{
    CopyTarget, Expr, FetchDirection, Ident, ObjectName, Set, Statement as Sql, Value,
};
use sqlparser::tokenizer::{Token, TokenWithSpan};

use crate::catalog::objects::quote_ident;
use crate::copy::text::CopyText;
use crate::fetch_direction;
use crate::unsupported;
use crate::word_reader::{Places, is_word, text_of, tokens};

/// What stands in the text for a statement that the parser does not see at all.
const PLACEHOLDER: &str = "WAIT";

/// A statement of which the parser does not see all.
struct Partial {
    /// Characters before it.
    offset: usize,
    /// Bytes that are hidden, in their order, and what stands in their place.
    hidden: Hidden,
    meaning: Meaning,
}

enum Meaning {
    Copy {
        statement: Range<usize>,
        stdin: bool,
    },
    Fetch {
        statement: Range<usize>,
        direction: FetchDirection,
    },
    /// A setting's name, which is its own.
    Set {
        statement: Range<usize>,
    },
    /// What only [`unsupported`] knows.
    Utility {
        statement: Range<usize>,
    },
    /// SET SCHEMA 'name', as the assignment that it is.
    Schema {
        statement: Range<usize>,
        schema: String,
    },
}

/// Parses a string of statements; an empty string has none.
pub fn parse(sql: &str) -> Result<Vec<ParsedStatement>, SqlError> {
    millrace_common::fault_injection::panic_if_planted(sql);
    match parse_with(sql, &partials(sql, false)) {
        // What the parser does not know is looked for when it has failed: most strings have nothing of it.
        Err(e) if e.state == SqlState::SYNTAX_ERROR => {
            let partials = partials(sql, true);
            if !partials.iter().any(|p| matches!(p.meaning, Meaning::Utility { .. })) {
                return Err(e);
            }
            parse_with(sql, &partials)
        }
        parsed => parsed,
    }
}

fn parse_with(sql: &str, partials: &[Partial]) -> Result<Vec<ParsedStatement>, SqlError> {
    if partials.is_empty() {
        return millrace_planner::parse(sql);
    }
    let mut statements = millrace_planner::parse(&without_hidden(sql, partials))?;
    let source: Arc<str> = Arc::from(sql);
    for parsed in &mut statements {
        parsed.source = Arc::clone(&source);
        if let Some(partial) = partials.iter().find(|p| p.offset == parsed.offset) {
            complete(parsed, sql, &partial.meaning);
        }
    }
    Ok(statements)
}

/// The statements that are read here; `utilities`: also those that are read by their words alone.
fn partials(sql: &str, utilities: bool) -> Vec<Partial> {
    // Most strings have none, and are read once only.
    let mentions =
        |word: &[u8]| sql.as_bytes().windows(word.len()).any(|w| w.eq_ignore_ascii_case(word));
    let words: [&[u8]; 5] = [b"copy", b"fetch", b"move", b"set '", b"set schema"];
    if !utilities && !words.into_iter().any(mentions) {
        return Vec::new();
    }
    let Some(tokens) = tokens(sql) else { return Vec::new() };
    let places = Places::new(sql);
    let statements = tokens.split(|t| t.token == Token::SemiColon);
    statements.filter_map(|statement| partial(&places, statement, utilities)).collect()
}

fn partial(places: &Places<'_>, tokens: &[TokenWithSpan], utilities: bool) -> Option<Partial> {
    let statement = places.range(tokens.first()?).start..places.range(tokens.last()?).end;
    let offset = places.characters(statement.start);
    if utilities && unsupported::is_utility(tokens) {
        // Some statement, as long as its word.
        let word = statement.start + PLACEHOLDER.len();
        if word <= statement.end && places.sql.is_char_boundary(word) {
            let hidden =
                vec![(statement.start..word, Some(PLACEHOLDER)), (word..statement.end, None)];
            return Some(Partial { offset, hidden, meaning: Meaning::Utility { statement } });
        }
    }
    if let Some(copy) = CopyText::find(places, tokens) {
        let mut hidden: Vec<_> = copy.binary.into_iter().map(|range| (range, None)).collect();
        // After STDIN the parser would take the rest of the text for rows: so it sees a file.
        let stdin = copy.stdin.is_some();
        hidden.extend(copy.stdin.into_iter().map(|range| (range, Some("'STD'"))));
        hidden.push((copy.tail, None));
        return Some(Partial { offset, hidden, meaning: Meaning::Copy { statement, stdin } });
    }
    if let Some((hidden, meaning)) = setting(places, tokens, &statement) {
        return Some(Partial { offset, hidden, meaning });
    }
    let (words, direction) = fetch_direction::find(tokens)?;
    let (first, last) = (tokens.get(words.start)?, tokens.get(words.end.checked_sub(1)?)?);
    let hidden = vec![(places.range(first).start..places.range(last).end, None)];
    Some(Partial { offset, hidden, meaning: Meaning::Fetch { statement, direction } })
}

type Hidden = Vec<(Range<usize>, Option<&'static str>)>;

/// `SET 'name' = value` and `RESET 'name'`, and SET SCHEMA 'name'.
fn setting(
    places: &Places<'_>,
    tokens: &[TokenWithSpan],
    statement: &Range<usize>,
) -> Option<(Hidden, Meaning)> {
    let sets = is_word(tokens.first(), "SET");
    if !sets && !is_word(tokens.first(), "RESET") {
        return None;
    }
    let statement = statement.clone();
    if let Token::SingleQuotedString(name) = &tokens.get(1)?.token {
        let range = places.range(tokens.get(1)?);
        if name.contains(['\'', '"']) || range.len() != name.len() + 2 {
            return None;
        }
        let quotes = [range.start..range.start + 1, range.end - 1..range.end];
        let hidden = quotes.into_iter().map(|quote| (quote, Some("\""))).collect();
        return Some((hidden, Meaning::Set { statement }));
    }
    let [_, word, name] = tokens else { return None };
    let schema = text_of(&name.token).filter(|_| sets && is_word(Some(word), "SCHEMA"))?.to_owned();
    // Some assignment, as long as the word.
    let hidden = vec![(places.range(word), Some("a=b   ")), (places.range(name), None)];
    Some((hidden, Meaning::Schema { statement, schema }))
}

fn complete(parsed: &mut ParsedStatement, sql: &str, meaning: &Meaning) {
    let (Meaning::Copy { statement, .. }
    | Meaning::Fetch { statement, .. }
    | Meaning::Set { statement }
    | Meaning::Utility { statement }
    | Meaning::Schema { statement, .. }) = meaning;
    parsed.text = sql[statement.clone()].to_owned();
    match (&mut parsed.statement, meaning) {
        (statement, Meaning::Utility { .. }) => {
            if let Some(mark) = unsupported::mark() {
                *statement = Statement::Sql(Box::new(mark));
            }
        }
        (Statement::Sql(sql), Meaning::Copy { stdin: true, .. }) => {
            if let Sql::Copy { target, .. } = sql.as_mut() {
                *target = CopyTarget::Stdin;
            }
        }
        (Statement::Sql(sql), Meaning::Fetch { direction: meant, .. }) => {
            if let Sql::Fetch { direction, .. } = sql.as_mut() {
                *direction = meant.clone();
            }
        }
        (Statement::Sql(sql), Meaning::Schema { schema, .. }) => {
            if let Sql::Set(Set::SingleAssignment { variable, values, .. }) = sql.as_mut() {
                *variable = ObjectName::from(vec![Ident::new("search_path")]);
                let value = Value::SingleQuotedString(quote_ident(schema));
                *values = vec![Expr::Value(value.with_empty_span())];
            }
        }
        (Statement::Move { direction, .. }, Meaning::Fetch { direction: meant, .. }) => {
            *direction = meant.clone();
        }
        _ => {}
    }
}

fn without_hidden(sql: &str, partials: &[Partial]) -> String {
    let mut text = String::with_capacity(sql.len());
    let mut at = 0;
    for (range, instead) in partials.iter().flat_map(|p| &p.hidden) {
        text.push_str(&sql[at..range.start]);
        match instead {
            Some(instead) => text.push_str(instead),
            None => {
                let blank = |c: char| if c == '\n' { c } else { ' ' };
                text.extend(sql[range.clone()].chars().map(blank));
            }
        }
        at = range.end;
    }
    text.push_str(&sql[at..]);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_keeps_its_text_and_its_neighbours() {
        let sql = "SELECT 'é'; COPY binary t (a) FROM STDIN (HEADER match, FORCE_NULL (a))
            WHERE a > 1; COPY (SELECT 1) TO STDOUT csv force quote *; SELECT 2";
        let parsed = parse(sql).unwrap();
        let texts: Vec<&str> = parsed.iter().map(|p| p.text.as_str()).collect();
        assert_eq!(
            texts,
            [
                "SELECT 'é'",
                "COPY binary t (a) FROM STDIN (HEADER match, FORCE_NULL (a))\n            WHERE a > 1",
                "COPY (SELECT 1) TO STDOUT csv force quote *",
                "SELECT 2"
            ]
        );
        for p in &parsed {
            let text: String = sql.chars().skip(p.offset).take(p.text.chars().count()).collect();
            assert_eq!(text, p.text);
        }
        let Statement::Sql(copy) = &parsed[1].statement else { panic!("no COPY") };
        assert!(matches!(copy.as_ref(), Sql::Copy { target: CopyTarget::Stdin, to: false, .. }));
        let e = parse("COPY t FRM STDIN (FORMAT csv)").unwrap_err();
        assert_eq!(e.state.0, "42601");
    }

    #[test]
    fn utilities_are_left_to_their_words() {
        let sql = "SELECT 'é'; DO $$ begin; end $$;\n checkpoint; SELECT 2";
        let parsed = parse(sql).unwrap();
        let texts: Vec<&str> = parsed.iter().map(|p| p.text.as_str()).collect();
        assert_eq!(texts, ["SELECT 'é'", "DO $$ begin; end $$", "checkpoint", "SELECT 2"]);
        for p in &parsed {
            let text: String = sql.chars().skip(p.offset).take(p.text.chars().count()).collect();
            assert_eq!(text, p.text);
        }
        assert!(matches!(&parsed[1].statement, Statement::Sql(s) if matches!(**s, Sql::Call(_))));
        assert!(matches!(&parsed[3].statement, Statement::Sql(s) if matches!(**s, Sql::Query(_))));
        assert_eq!(parse("checkpoint; SELEC 1").unwrap_err().state.0, "42601");
        assert_eq!(parse("nonsense").unwrap_err().state.0, "42601");
    }

    #[test]
    fn settings() {
        let set = |sql: &str| match parse(sql).unwrap().remove(0).statement {
            Statement::Sql(sql) => sql.to_string(),
            other => format!("{other:?}"),
        };
        assert_eq!(
            set("SET 'table.exec.state.ttl' = '1 d'"),
            "SET \"table.exec.state.ttl\" = '1 d'"
        );
        assert_eq!(set("set schema 'x'"), "SET search_path = 'x'");
        assert_eq!(set("SET SCHEMA ''"), "SET search_path = '\"\"'");
        assert_eq!(set("SET search_path = a, b"), "SET search_path = a, b");
    }

    #[test]
    fn directions() {
        let direction = |sql: &str| match parse(sql).unwrap().remove(0).statement {
            Statement::Move { direction, cursor } => format!("{direction} {cursor}"),
            Statement::Sql(sql) => match *sql {
                Sql::Fetch { direction, name, .. } => format!("{direction} {name}"),
                other => other.to_string(),
            },
            other => format!("{other:?}"),
        };
        for (sql, expected) in [
            ("FETCH BACKWARD FROM c", "BACKWARD c"),
            ("FETCH BACKWARD 2 IN c", "BACKWARD 2 c"),
            ("FETCH backward all c", "BACKWARD ALL c"),
            ("FETCH -1 FROM c", "-1 c"),
            ("FETCH 2 c", "2 c"),
            ("FETCH FORWARD -2 FROM c", "FORWARD -2 c"),
            ("FETCH FORWARD FROM c", "FORWARD c"),
            ("FETCH PRIOR c", "PRIOR c"),
            ("FETCH prior", "NEXT prior"),
            ("FETCH LAST FROM c", "LAST c"),
            ("MOVE FIRST IN c", "FIRST c"),
            ("MOVE ABSOLUTE -2 c", "ABSOLUTE -2 c"),
            ("FETCH RELATIVE 0 FROM c", "RELATIVE 0 c"),
        ] {
            assert_eq!(direction(sql), expected, "{sql}");
        }
    }
}
