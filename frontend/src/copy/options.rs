//! What follows the target of a COPY: its options, in both of PostgreSQL's forms, and WHERE.
//!
//! The parser of statements does not see this part (see [`crate::statements`]); it is read here from the statement's
//! text.

use millrace_common::{SqlError, SqlState};
use millrace_planner::ParsedStatement;
use sqlparser::ast::Expr;

use super::Format;
use super::text::{Arg, Given, Tail};

/// Columns that an option names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Columns {
    #[default]
    None,
    All,
    These(Vec<String>),
}

/// Columns of which a value is always, or never, what its quotes say.
#[derive(Debug, Default)]
pub struct Forced {
    pub quote: Columns,
    pub null: Columns,
    pub not_null: Columns,
}

/// The options of one COPY.
pub struct Options {
    pub format: Format,
    pub forced: Forced,
    /// WHERE.
    pub condition: Option<Expr>,
}

/// Reads the options of a COPY.
pub fn read(parsed: &ParsedStatement, to: bool) -> Result<Options, SqlError> {
    let Tail { given, condition } = Tail::read(parsed, to)?;
    let mut written = Written::default();
    for (i, option) in given.iter().enumerate() {
        if KNOWN.contains(&option.name.as_str()) && given[..i].iter().any(|o| o.name == option.name)
        {
            let e = SqlError::new(SqlState::SYNTAX_ERROR, "conflicting or redundant options");
            return Err(e.with_position(option.position));
        }
        written.take(option, to)?;
    }
    let (format, forced) = written.checked(to)?;
    Ok(Options { format, forced, condition })
}

const KNOWN: &[&str] = &[
    "format",
    "freeze",
    "delimiter",
    "null",
    "header",
    "quote",
    "escape",
    "force_quote",
    "force_not_null",
    "force_null",
    "encoding",
];

/// The options as they were written.
#[derive(Default)]
struct Written {
    csv: bool,
    binary: bool,
    header: bool,
    header_match: bool,
    delimiter: Option<String>,
    null: Option<String>,
    quote: Option<String>,
    escape: Option<String>,
    forced: Forced,
}

impl Written {
    fn take(&mut self, option: &Given, to: bool) -> Result<(), SqlError> {
        match option.name.as_str() {
            "format" => self.set_format(option)?,
            // Rows of a COPY are never seen before it is done.
            "freeze" => {
                boolean(option)?;
            }
            "delimiter" => self.delimiter = Some(text(option)?),
            "null" => self.null = Some(text(option)?),
            "quote" => self.quote = Some(text(option)?),
            "escape" => self.escape = Some(text(option)?),
            "header" => self.set_header(option, to)?,
            "force_quote" => self.forced.quote = columns(option, true)?,
            "force_not_null" => self.forced.not_null = columns(option, false)?,
            "force_null" => self.forced.null = columns(option, false)?,
            "encoding" => check_encoding(option)?,
            name => {
                let message = format!("option \"{name}\" not recognized");
                return Err(
                    SqlError::new(SqlState::SYNTAX_ERROR, message).with_position(option.position)
                );
            }
        }
        Ok(())
    }

    fn set_format(&mut self, option: &Given) -> Result<(), SqlError> {
        match text(option)?.as_str() {
            "text" => {}
            "csv" => self.csv = true,
            "binary" => self.binary = true,
            other => {
                let message = format!("COPY format \"{other}\" not recognized");
                return Err(invalid(message).with_position(option.position));
            }
        }
        Ok(())
    }

    fn set_header(&mut self, option: &Given, to: bool) -> Result<(), SqlError> {
        let matches = match &option.arg {
            Arg::Text(value) => value.eq_ignore_ascii_case("match"),
            _ => false,
        };
        if matches && to {
            return Err(refused("cannot use \"match\" with HEADER in COPY TO"));
        }
        self.header_match = matches;
        self.header = matches
            || boolean(option).map_err(|_| {
                let message = format!("{} requires a Boolean value or \"match\"", option.name);
                SqlError::new(SqlState::SYNTAX_ERROR, message)
            })?;
        Ok(())
    }

    /// The format, if its parts go together.
    fn checked(self, to: bool) -> Result<(Format, Forced), SqlError> {
        if self.binary {
            return self.checked_binary(to);
        }
        let mut format = Format::new(self.csv);
        format.header = self.header;
        format.header_match = self.header_match;
        if let Some(delimiter) = &self.delimiter {
            format.delimiter = single("delimiter", delimiter)?;
        }
        if let Some(null) = self.null {
            format.null = null;
        }
        check_plain(&format)?;
        for (what, text) in [("quote", &self.quote), ("escape", &self.escape)] {
            if !self.csv && text.is_some() {
                return Err(refused(format!("COPY {what} available only in CSV mode")));
            }
        }
        if let Some(quote) = &self.quote {
            format.quote = single("quote", quote)?;
        }
        if self.csv && format.delimiter == format.quote {
            return Err(invalid("COPY delimiter and quote must be different"));
        }
        format.escape = match &self.escape {
            Some(escape) => single("escape", escape)?,
            None => format.quote,
        };
        check_forced(&self.forced, self.csv, to)?;
        let null = format.null.as_bytes();
        if null.contains(&format.delimiter) {
            return Err(refused("COPY delimiter must not appear in the NULL specification"));
        }
        if self.csv && null.contains(&format.quote) {
            return Err(refused("CSV quote character must not appear in the NULL specification"));
        }
        Ok((format, self.forced))
    }

    fn checked_binary(self, to: bool) -> Result<(Format, Forced), SqlError> {
        for (what, given) in
            [("DELIMITER", self.delimiter.is_some()), ("NULL", self.null.is_some())]
        {
            if given {
                let message = format!("cannot specify {what} in BINARY mode");
                return Err(SqlError::new(SqlState::SYNTAX_ERROR, message));
            }
        }
        if self.header {
            return Err(refused("cannot specify HEADER in BINARY mode"));
        }
        for (what, text) in [("quote", &self.quote), ("escape", &self.escape)] {
            if text.is_some() {
                return Err(refused(format!("COPY {what} available only in CSV mode")));
            }
        }
        check_forced(&self.forced, false, to)?;
        Ok((Format { binary: true, ..Format::new(false) }, self.forced))
    }
}

fn check_plain(format: &Format) -> Result<(), SqlError> {
    let newline = |b: &u8| matches!(b, b'\n' | b'\r');
    if newline(&format.delimiter) {
        return Err(invalid("COPY delimiter cannot be newline or carriage return"));
    }
    if format.null.as_bytes().iter().any(newline) {
        return Err(invalid("COPY null representation cannot use newline or carriage return"));
    }
    let confusing = matches!(format.delimiter, b'\\' | b'.' | b'a'..=b'z' | b'0'..=b'9');
    if !format.csv && confusing {
        let delimiter = char::from(format.delimiter);
        return Err(invalid(format!("COPY delimiter cannot be \"{delimiter}\"")));
    }
    Ok(())
}

fn check_forced(forced: &Forced, csv: bool, to: bool) -> Result<(), SqlError> {
    for (what, columns, only_to) in [
        ("quote", &forced.quote, true),
        ("not null", &forced.not_null, false),
        ("null", &forced.null, false),
    ] {
        if *columns == Columns::None {
            continue;
        }
        if !csv {
            return Err(refused(format!("COPY force {what} available only in CSV mode")));
        }
        if only_to != to {
            let direction = if only_to { "TO" } else { "FROM" };
            return Err(refused(format!(
                "COPY force {what} only available using COPY {direction}"
            )));
        }
    }
    Ok(())
}

/// Which of the columns of a COPY an option is about. `known`: the relation's columns; `None`: those of a query.
pub fn flags(
    option: &str,
    columns: &Columns,
    copied: &[String],
    known: Option<(&str, &[String])>,
) -> Result<Vec<bool>, SqlError> {
    let names = match columns {
        Columns::None => return Ok(Vec::new()),
        Columns::All => return Ok(vec![true; copied.len()]),
        Columns::These(names) => names,
    };
    for name in names {
        if copied.contains(name) {
            continue;
        }
        return Err(match known {
            Some((_, all)) if all.contains(name) => SqlError::new(
                SqlState("42P10"),
                format!("{option} column \"{name}\" not referenced by COPY"),
            ),
            Some((relation, _)) => SqlError::new(
                SqlState::UNDEFINED_COLUMN,
                format!("column \"{name}\" of relation \"{relation}\" does not exist"),
            ),
            None => SqlError::new(
                SqlState::UNDEFINED_COLUMN,
                format!("column \"{name}\" does not exist"),
            ),
        });
    }
    Ok(copied.iter().map(|c| names.contains(c)).collect())
}

fn text(option: &Given) -> Result<String, SqlError> {
    match &option.arg {
        Arg::Text(value) => Ok(value.clone()),
        Arg::Star => Ok("*".to_owned()),
        Arg::List(names) => Ok(names.join(".")),
        Arg::None => {
            let message = format!("{} requires a parameter", option.name);
            Err(SqlError::new(SqlState::SYNTAX_ERROR, message))
        }
    }
}

fn boolean(option: &Given) -> Result<bool, SqlError> {
    let value = match &option.arg {
        Arg::None => return Ok(true),
        _ => text(option)?,
    };
    match value.to_ascii_lowercase().as_str() {
        "true" | "on" | "1" => Ok(true),
        "false" | "off" | "0" => Ok(false),
        _ => {
            let message = format!("{} requires a Boolean value", option.name);
            Err(SqlError::new(SqlState::SYNTAX_ERROR, message))
        }
    }
}

fn columns(option: &Given, star: bool) -> Result<Columns, SqlError> {
    match &option.arg {
        Arg::List(names) => Ok(Columns::These(names.clone())),
        Arg::Star if star => Ok(Columns::All),
        _ => {
            let name = &option.name;
            let message = format!("argument to option \"{name}\" must be a list of column names");
            Err(invalid(message).with_position(option.position))
        }
    }
}

/// Text comes and goes in UTF-8.
fn check_encoding(option: &Given) -> Result<(), SqlError> {
    let name = text(option)?;
    let plain: String =
        name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase();
    if matches!(plain.as_str(), "utf8" | "unicode") {
        return Ok(());
    }
    let others = ["latin", "iso8859", "win", "koi8", "euc", "sqlascii", "sjis", "big5", "gbk"];
    if others.iter().any(|known| plain.starts_with(known)) {
        return Err(SqlError::unsupported(format!("COPY in the encoding {name}"))
            .with_hint("Text comes and goes in UTF8."));
    }
    let message = "argument to option \"encoding\" must be a valid encoding name";
    Err(invalid(message).with_position(option.position))
}

fn single(what: &str, text: &str) -> Result<u8, SqlError> {
    match text.as_bytes() {
        [one] => Ok(*one),
        _ => Err(refused(format!("COPY {what} must be a single one-byte character"))),
    }
}

fn invalid(message: impl Into<String>) -> SqlError {
    SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message)
}

fn refused(message: impl Into<String>) -> SqlError {
    SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(sql: &str) -> Result<Options, SqlError> {
        let parsed = crate::statements::parse(sql)?.pop().expect("there is a statement");
        read(&parsed, sql.contains(" to "))
    }

    fn error(sql: &str) -> (&'static str, String, Option<u32>) {
        let e = of(sql).err().map(|e| (e.state.0, e.message.clone(), e.position));
        e.unwrap_or_default()
    }

    #[test]
    fn both_forms_say_the_same() {
        let new = "copy t from stdin with (format csv, header, quote 'x', escape 'y', null 'z', delimiter e'\\t',
            force_null (a, \"B\"), force_not_null (c)) where a > 1";
        let old =
            "copy t from stdin delimiter as e'\\t' csv header quote 'x' escape as 'y' null 'z'
            force null a, \"B\" force not null c where a > 1";
        for sql in [new, old] {
            let options = of(sql).unwrap();
            let f = &options.format;
            assert!(f.csv && f.header && !f.header_match && !f.binary);
            assert_eq!((f.delimiter, f.quote, f.escape, f.null.as_str()), (b'\t', b'x', b'y', "z"));
            assert_eq!(options.forced.null, Columns::These(vec!["a".into(), "B".into()]));
            assert_eq!(options.forced.not_null, Columns::These(vec!["c".into()]));
            assert_eq!(options.condition.unwrap().to_string(), "a > 1");
        }
        assert!(of("copy binary t from stdin").unwrap().format.binary);
        assert!(of("copy t to stdout binary").unwrap().format.binary);
        assert!(of("copy t from stdin (header match)").unwrap().format.header_match);
        let all = of("copy t to stdout (force_quote *, format csv, encoding 'UTF-8')").unwrap();
        assert_eq!(all.forced.quote, Columns::All);
        assert_eq!(of("copy t to stdout csv force quote *").unwrap().forced.quote, Columns::All);
    }

    #[test]
    fn errors_are_those_of_postgres() {
        let case = |sql: &str, state: &str, message: &str| {
            let (s, m, _) = error(sql);
            assert_eq!((s, m.as_str()), (state, message), "{sql}");
        };
        case("copy t to stdout (foo bar)", "42601", "option \"foo\" not recognized");
        case(
            "copy t to stdout (header 2)",
            "42601",
            "header requires a Boolean value or \"match\"",
        );
        case("copy t to stdout (format xml)", "22023", "COPY format \"xml\" not recognized");
        case("copy t to stdout (delimiter 'x')", "22023", "COPY delimiter cannot be \"x\"");
        case("copy t to stdout csv csv", "42601", "conflicting or redundant options");
        case("copy t to stdout (format)", "42601", "format requires a parameter");
        case("copy t to stdout where a", "42601", "WHERE clause not allowed with COPY TO");
        case("copy t to stdout (format csv) foo", "42601", "syntax error at or near \"foo\"");
        case("copy t to stdout ()", "42601", "syntax error at or near \")\"");
        case("copy t to stdout (format", "42601", "syntax error at end of input");
        case("copy t from stdin where", "42601", "syntax error at end of input");
        assert_eq!(error("select 1; copy t to stdout (foo bar)").2, Some(29));
    }
}
