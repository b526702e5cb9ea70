//! Statements without their secrets, for everybody to see: `'***'` stands for passwords and keys.
//!
//! A statement is known to others before it is known to be right, so its words are read and not its syntax:
//! what looks like a secret is hidden, also in a text that does not parse.

mod word_reader;

use std::ops::Range;

use millrace_rpc::catalog::Relation;

use word_reader::{Kind, Word, words};

/// Stands for a secret.
const MASK: &str = "***";

/// Parts of the names of what nobody else should know.
const SECRET_NAMES: [&str; 11] = [
    "password",
    "passwd",
    "pwd",
    "passphrase",
    "secret",
    "token",
    "credential",
    "jaas",
    "private_key",
    "api_key",
    "key.pem",
];

/// Whether the value of an option of this name is a secret.
pub fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET_NAMES.iter().any(|part| name.contains(part))
}

/// A statement as other sessions see it. Whatever is assigned to or compared with a name that tells of a secret is
/// hidden, and all strings of a statement about users.
pub fn masked(text: &str) -> String {
    let lower = text.to_ascii_lowercase();
    let signs = ["user", "role", "group", "://"];
    // Most statements have nothing of it.
    match SECRET_NAMES.iter().chain(&signs).any(|part| lower.contains(part)) {
        true => Reader::new(text, false, 0).masked(),
        false => text.to_owned(),
    }
}

/// A definition without the secrets of its options. What its query says stays.
pub fn masked_definition(text: &str) -> String {
    Reader::new(text, true, 0).masked()
}

/// A relation's definition, for everybody to see.
pub fn shown_definition(relation: &Relation) -> String {
    match relation.options.is_empty() {
        true => relation.definition.clone(),
        false => masked_definition(&relation.definition),
    }
}

/// An option's value as it may be shown.
pub fn shown_value(name: &str, value: &str) -> String {
    match is_secret(name) {
        true => MASK.to_owned(),
        false => without_password(value, false).unwrap_or_else(|| value.to_owned()),
    }
}

/// What a clause about a user begins with.
#[rustfmt::skip]
const CLAUSES: [&str; 21] = [
    "login", "nologin", "superuser", "nosuperuser", "createdb", "nocreatedb", "createrole",
    "nocreaterole", "createuser", "nocreateuser", "inherit", "noinherit", "replication",
    "noreplication", "bypassrls", "nobypassrls", "encrypted", "unencrypted", "password", "sysid",
    "admin",
];

/// A parenthesis that is open.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Open {
    /// Around options: `WITH (…)`, `ENCODE … (…)`, `SET (…)`, `OPTIONS (…)`.
    Options,
    Other,
}

/// What the unquoted value of a secret goes up to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// The next comma, or the end of the parenthesis.
    Element,
    /// The next clause of a statement about a user.
    Clause,
    Statement,
}

/// Dollar-quoted texts within one another that are read; deeper ones are hidden.
const MAX_DEPTH: usize = 4;

/// Reads a text once, from its start to its end.
struct Reader<'a> {
    text: &'a str,
    words: Vec<Word>,
    /// Only within options.
    options_only: bool,
    /// Dollar-quoted texts around this one.
    depth: usize,
}

/// What is known at a word.
#[derive(Default)]
struct State {
    open: Vec<Open>,
    /// The statement is about a user.
    of_user: bool,
    /// The statement sets a variable.
    of_set: bool,
    /// Words since the last semicolon.
    place: usize,
    /// What comes next is a secret.
    armed: bool,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str, options_only: bool, depth: usize) -> Reader<'a> {
        Reader { text, words: words(text), options_only, depth }
    }

    fn masked(&self) -> String {
        let mut state = State::default();
        let mut out = String::with_capacity(self.text.len());
        let mut copied = 0;
        for i in 0..self.words.len() {
            let word = &self.words[i];
            // A part of what is hidden.
            if word.range.start < copied {
                continue;
            }
            let armed = state.armed;
            let shown = self.shown(i, &mut state);
            let before = i.checked_sub(1).map_or(0, |b| self.words[b].range.end).max(copied);
            let of_secret = armed && (shown.is_some() || self.is(i, "="));
            if (of_secret || state.of_user) && self.has_comment(before..word.range.start) {
                out.push_str(&self.text[copied..before]);
                out.push(' ');
                copied = word.range.start;
            }
            if let Some((range, shown)) = shown {
                out.push_str(&self.text[copied..range.start]);
                out.push_str(&shown);
                copied = range.end;
            }
            match self.is(i, ";") {
                true => state = State::default(),
                false => state.place += 1,
            }
        }
        let end = self.words.last().map_or(0, |word| word.range.end).max(copied);
        let hides = (state.armed || state.of_user) && self.has_comment(end..self.text.len());
        out.push_str(&self.text[copied..if hides { end } else { self.text.len() }]);
        out
    }

    /// What stands for a word, and perhaps those after it, that is not to be seen as it is.
    fn shown(&self, i: usize, state: &mut State) -> Option<(Range<usize>, String)> {
        self.begin(i, state);
        let range = self.words[i].range.clone();
        let counts = !self.options_only || state.open.contains(&Open::Options);
        if counts
            && state.armed
            && let Some(end) = self.value_end(i, state)
        {
            state.armed = false;
            return Some((range.start..end, format!("'{MASK}'")));
        }
        match self.words[i].kind {
            // Strings may be continued on the next line.
            Kind::Text if counts && (state.armed || state.of_user) => {
                Some((range, format!("'{MASK}'")))
            }
            Kind::Text => Some((range.clone(), self.shown_text(range).filter(|_| counts)?)),
            Kind::Quoted | Kind::Plain => {
                // Words between a name and its value.
                let between = self.is_prefix(i) || self.is_any(i, &["to", "as", "encrypted"]);
                let goes_on = state.armed && between;
                state.armed = goes_on || self.names_secret(i);
                if !counts {
                    return None;
                }
                match self.words[i].kind {
                    Kind::Quoted => Some((range.clone(), self.shown_text(range)?)),
                    _ => Some((self.password_of_bare_url(i)?, MASK.to_owned())),
                }
            }
            Kind::Sign => {
                self.sign(i, state);
                None
            }
        }
    }

    /// A statement may begin here.
    fn begin(&self, i: usize, state: &mut State) {
        if state.place == 0 {
            let of_set = self.is(i, "set")
                || (self.is(i, "alter") && self.is_any(i + 1, &["system", "database"]));
            *state = State { of_user: self.is_of_user(i), of_set, ..State::default() };
        }
        // Within a block.
        let of_user = self.is_any(i, &["create", "alter"]) && self.is_of_user(i);
        state.of_user |= of_user && !self.options_only;
    }

    fn sign(&self, i: usize, state: &mut State) {
        match &self.text[self.words[i].range.clone()] {
            "(" => {
                state.open.push(if self.opens_options(i) { Open::Options } else { Open::Other });
                state.armed &= i.checked_sub(1).is_some_and(|before| self.is(before, "="));
            }
            ")" => {
                state.open.pop();
                state.armed = false;
            }
            "," => state.armed = self.ends_name_of_setting(i),
            // Of a text that goes on, not of a name that has something added.
            "|" => {
                let before = i.checked_sub(1);
                let goes_on = |b: usize| self.words[b].kind == Kind::Text || self.is(b, "|");
                state.armed &= before.is_some_and(goes_on);
            }
            // Of an assignment or a comparison, or part of a string's prefix.
            "=" | ":" | ">" | "<" | "!" | "&" | "~" => {}
            _ => state.armed = false,
        }
    }

    /// The end of a secret's value that begins with this word, however it is written; `None`: none begins here, or it
    /// is not known how far it would go.
    fn value_end(&self, i: usize, state: &State) -> Option<usize> {
        let before = i.checked_sub(1)?;
        let scope =
            if self.ends_name_of_setting(before) || state.open.last() == Some(&Open::Options) {
                Scope::Element
            } else if state.of_user {
                Scope::Clause
            } else if state.of_set {
                Scope::Statement
            } else {
                return None;
            };
        let name_before = matches!(self.words[before].kind, Kind::Plain | Kind::Quoted);
        let goes_on = (self.is(i, ".") && name_before && self.touches(i))
            || (self.is(i, ">") && self.is(before, "="))
            || self.is_any(i, &["=", ":", ";"]);
        let is_other = match scope {
            Scope::Element => self.is_any(i, &[",", ")"]),
            Scope::Clause => {
                self.is_any(i, &["password", "encrypted", "to", "as"])
                    || (self.is(i, "null") && self.ends_clause(i + 1))
            }
            Scope::Statement => self.is_any(i, &["to", "as"]),
        };
        if goes_on || is_other {
            return None;
        }
        let next = self.after_value(i, scope);
        let end = self.words[next - 1].range.end;
        let limit = self.words.get(next).map_or(self.text.len(), |word| word.range.start);
        // `a--b` looks like a comment.
        Some(end + self.text[end..limit].trim_end().len())
    }

    /// The word after a value that begins with word `i`.
    fn after_value(&self, i: usize, scope: Scope) -> usize {
        let mut depth = 0_usize;
        for at in i..self.words.len() {
            let ends = match scope {
                Scope::Element => depth == 0 && self.is_any(at, &[",", ")"]),
                Scope::Clause => at > i && self.ends_clause(at),
                Scope::Statement => self.is(at, ";"),
            };
            if ends {
                return at;
            }
            if self.is(at, "(") {
                depth += 1;
            } else if self.is(at, ")") {
                depth = depth.saturating_sub(1);
            }
        }
        self.words.len()
    }

    /// Whether a clause about a user has ended before this word.
    fn ends_clause(&self, i: usize) -> bool {
        if i >= self.words.len() || self.is(i, ";") {
            return true;
        }
        let apart = !self.touches(i) || self.words[i - 1].kind == Kind::Text;
        let pair = (self.is(i, "valid") && self.is(i + 1, "until"))
            || (self.is(i, "connection") && self.is(i + 1, "limit"))
            || (self.is(i, "in") && self.is_any(i + 1, &["role", "group"]));
        // A word of a value, `a login-b`, touches what comes after it.
        let whole = i + 1 >= self.words.len() || !self.touches(i + 1) || self.is(i + 1, ";");
        apart && (pair || (whole && self.is_any(i, &CLAUSES)))
    }

    /// Whether a comma comes after the name of a secret in `set_config('my.password', …)`.
    fn ends_name_of_setting(&self, comma: usize) -> bool {
        let opens = |at: &usize| {
            self.is(*at, "(") && self.is_any(at - 1, &["set_config", "\"set_config\""])
        };
        if !self.is(comma, ",") {
            return false;
        }
        let open = (comma.saturating_sub(6).max(1)..comma).rev().find(opens);
        open.is_some_and(|open| {
            is_secret(&self.text[self.words[open].range.end..self.words[comma].range.start])
        })
    }

    /// A quoted word without its secrets; what is dollar-quoted is read as statements.
    fn shown_text(&self, range: Range<usize>) -> Option<String> {
        let text = &self.text[range];
        let open = !is_closed(text);
        if !text.starts_with('$') {
            return without_password(text, open);
        }
        let tag = dollar_tag(text);
        let body = &text[tag.len()..text.len() - if open { 0 } else { tag.len() }];
        let shown = match self.depth < MAX_DEPTH {
            true => Reader::new(body, self.options_only, self.depth + 1).masked(),
            false => MASK.to_owned(),
        };
        let shown = without_password(&shown, open).unwrap_or(shown);
        (shown != body).then(|| format!("{tag}{shown}{}", if open { "" } else { tag }))
    }

    /// The password of a URL without quotes that begins with this word.
    fn password_of_bare_url(&self, i: usize) -> Option<Range<usize>> {
        let start = self.words[i].range.start;
        let rest = &self.text[start..];
        if !self.text[self.words[i].range.end..].starts_with("://") {
            return None;
        }
        let end = rest.find(char::is_whitespace);
        let range = password_of_url(&rest[..end.unwrap_or(rest.len())], end.is_none())?;
        Some(start + range.start..start + range.end)
    }

    fn has_comment(&self, gap: Range<usize>) -> bool {
        self.text.get(gap).is_some_and(|gap| !gap.trim().is_empty())
    }

    /// Whether nothing is between a word and the one before.
    fn touches(&self, i: usize) -> bool {
        i.checked_sub(1).is_some_and(|b| self.words[b].range.end == self.words[i].range.start)
    }

    /// `E` of `E'…'`, `U` of `U&'…'`.
    fn is_prefix(&self, i: usize) -> bool {
        let Some(next) = self.words.get(i + 1) else { return false };
        let follows = next.range.start == self.words[i].range.end;
        follows && (next.kind == Kind::Text || self.is(i + 1, "&"))
    }

    /// `CREATE | ALTER USER | ROLE | GROUP`, or what could be meant by that.
    fn is_of_user(&self, i: usize) -> bool {
        let others =
            ["drop", "select", "show", "comment", "set", "reset", "with", "update", "grant"];
        self.is_any(i + 1, &["user", "role", "group"]) && !self.is_any(i, &others)
    }

    /// Whether a name ends here that tells of a secret; the parts of a name are words of their own.
    fn names_secret(&self, i: usize) -> bool {
        let mut first = i;
        while first >= 2 && self.is(first - 1, ".") {
            first -= 2;
        }
        is_secret(&self.text[self.words[first].range.start..self.words[i].range.end])
    }

    fn opens_options(&self, i: usize) -> bool {
        let before = |n: usize, of: &[&str]| i.checked_sub(n).is_some_and(|b| self.is_any(b, of));
        before(1, &["with", "set", "options"]) || before(2, &["encode", "format"])
    }

    fn is(&self, i: usize, text: &str) -> bool {
        self.words.get(i).is_some_and(|w| self.text[w.range.clone()].eq_ignore_ascii_case(text))
    }

    fn is_any(&self, i: usize, texts: &[&str]) -> bool {
        texts.iter().any(|text| self.is(i, text))
    }
}

/// The `$tag$` a dollar-quoted text begins with.
fn dollar_tag(text: &str) -> &str {
    let end = text[1..].find('$').map_or(text.len(), |end| end + 2);
    &text[..end]
}

/// Whether a quoted word has the quote that closes it. In doubt it has none.
fn is_closed(text: &str) -> bool {
    let Some(quote) = text.chars().next() else { return false };
    if quote == '$' {
        let tag = dollar_tag(text);
        return text.len() >= 2 * tag.len() && text.ends_with(tag);
    }
    let body = &text[1..];
    let rest = body.trim_end_matches(quote);
    // Quotes within are doubled.
    (body.len() - rest.len()) % 2 == 1 && !rest.ends_with('\\')
}

/// `password=…` of a list of settings, and `user:…@` of a URL; `None`: there is neither. An open text was cut off.
fn without_password(text: &str, open: bool) -> Option<String> {
    let mut out = text.to_owned();
    if let Some(range) = password_of_url(&out, open) {
        out.replace_range(range, MASK);
    }
    let mut from = 0;
    while let Some(range) = assigned_password(&out, from) {
        from = range.start + MASK.len();
        out.replace_range(range, MASK);
    }
    (out != text).then_some(out)
}

/// The password before the host of a URL. One with an `@` of its own goes to the last; where the text was cut off, this
/// may be still to come.
fn password_of_url(text: &str, open: bool) -> Option<Range<usize>> {
    let start = text.find("://")? + 3;
    let end = match open {
        true => text.len(),
        false => start + text[start..].rfind('@')?,
    };
    let colon = start + text[start..end].find(':')? + 1;
    (colon < end).then_some(colon..end)
}

/// The next value after `password =`, or after `password` within a quoted statement.
fn assigned_password(text: &str, from: usize) -> Option<Range<usize>> {
    const NAME: &str = "password";
    let lower = text.to_ascii_lowercase();
    let mut from = from;
    loop {
        let after = from + lower.get(from..)?.find(NAME)? + NAME.len();
        from = after;
        let rest = lower[after..].trim_start();
        let in_statement = rest.starts_with("''") || rest.starts_with("\\'");
        let value = match rest.strip_prefix('=') {
            Some(value) => value.trim_start(),
            None if in_statement => rest,
            None => continue,
        };
        let start = text.len() - value.len();
        // The quotes around the text are no part of the value.
        let closes = text.ends_with('\'') || (text.starts_with('"') && text.ends_with('"'));
        let last = text.len() - usize::from(text.len() > start && closes);
        let end = end_of_value(value, text[..after].contains("://"));
        let end = end.map_or(last, |n| start + n).min(last);
        if start < end {
            return Some(start..end);
        }
    }
}

/// The end of a setting's value; `None`: it goes to the end of the text, as one in the quotes of a quoted text does.
fn end_of_value(value: &str, of_url: bool) -> Option<usize> {
    let quote = value.chars().next().filter(|c| matches!(c, '\'' | '"'));
    if value.starts_with('\\') || quote.is_some_and(|quote| value[1..].starts_with(quote)) {
        return None;
    }
    let mut chars = value.char_indices().skip(usize::from(quote.is_some())).peekable();
    while let Some((at, c)) = chars.next() {
        if c == '\\' {
            // `\x`; in `E'…'` the backslash is doubled.
            while chars.next_if(|(_, next)| *next == '\\').is_some() {}
            chars.next();
        } else if Some(c) == quote {
            if chars.next_if(|(_, next)| *next == c).is_none() {
                return Some(at + 1);
            }
        } else if quote.is_none() && (c.is_whitespace() || (of_url && c == '&')) {
            return Some(at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use millrace_rpc::catalog::OptionEntry;

    use super::*;

    #[test]
    fn passwords_of_users_are_hidden_however_they_are_written() {
        for (text, shown) in [
            ("CREATE USER a PASSWORD 'x'", "CREATE USER a PASSWORD '***'"),
            (
                "alter role a with encrypted password 'it''s' login",
                "alter role a with encrypted password '***' login",
            ),
            ("ALTER USER a PASSWORD E'\\'x'", "ALTER USER a PASSWORD '***'"),
            ("ALTER USER a PASSWORD $q$x' y$q$", "ALTER USER a PASSWORD '***'"),
            ("ALTER USER a PASSWORD \"x y\"", "ALTER USER a PASSWORD '***'"),
            ("ALTER USER a PASSWORD hunter2", "ALTER USER a PASSWORD '***'"),
            ("ALTER USER a PASSWORD 'x", "ALTER USER a PASSWORD '***'"),
            ("ALTER USER a PASSWORD 'x'\n 'y'", "ALTER USER a PASSWORD '***'"),
            ("ALTER USER a PASSWORT 'x'", "ALTER USER a PASSWORT '***'"),
            ("ALTR USER a PASSWORD 'x'", "ALTR USER a PASSWORD '***'"),
            ("ALTR ROL a PASSWORD 'x'", "ALTR ROL a PASSWORD '***'"),
            ("CREATE USER a PASSWORD/* ' */'x'", "CREATE USER a PASSWORD '***'"),
            ("CREATE USER a PASSWORD -- hunter1\n'x'", "CREATE USER a PASSWORD '***'"),
            ("CREATE USER a PASSWORD -- hunter1", "CREATE USER a PASSWORD"),
            ("ALTR ROL a PASSWORD -- hunter1\n'x'", "ALTR ROL a PASSWORD '***'"),
            ("ALTER USER a PASSWORD abc-hunter1 LOGIN", "ALTER USER a PASSWORD '***' LOGIN"),
            ("ALTER USER a PASSWORD abc--hunter1", "ALTER USER a PASSWORD '***'"),
            ("ALTER USER a PASSWORD @hunter1; SELECT 1", "ALTER USER a PASSWORD '***'; SELECT 1"),
            (
                "ALTER USER a PASSWORD = ('x') VALID UNTIL 'y'",
                "ALTER USER a PASSWORD = '***' VALID UNTIL '***'",
            ),
            ("ALTER USER a PASSWORD 'x' || hunter1", "ALTER USER a PASSWORD '***'"),
            ("ALTER USER a PASSWORD a login-b in c", "ALTER USER a PASSWORD '***'"),
            ("CREATE ROLE a PASSWORD 'x' IN ROLE b", "CREATE ROLE a PASSWORD '***' IN ROLE b"),
            (
                "DO $a$ BEGIN ALTER USER a PASSWORD hunter1; PERFORM 'x'; END $a$",
                "DO $a$ BEGIN ALTER USER a PASSWORD '***'; PERFORM 'x'; END $a$",
            ),
            ("DO $$ALTR ROL a PASSWORD 'hun", "DO $$ALTR ROL a PASSWORD '***'"),
            (
                "DO $$BEGIN EXECUTE 'ALTER ROLE a PASSWORD ''hunter'''; END$$",
                "DO $$BEGIN EXECUTE 'ALTER ROLE a PASSWORD ***'; END$$",
            ),
            ("CREATE USER a PASSWORD NULL", "CREATE USER a PASSWORD NULL"),
            (
                "SELECT 'x'; ALTER USER a PASSWORD 'y'; SELECT 'z'",
                "SELECT 'x'; ALTER USER a PASSWORD '***'; SELECT 'z'",
            ),
        ] {
            assert_eq!(masked(text), shown, "{text}");
        }
    }

    #[test]
    fn secrets_of_options_are_hidden() {
        for (text, shown) in [
            (
                "CREATE SOURCE s WITH (s3.secret_access_key = 'o''x', path = 'p')",
                "CREATE SOURCE s WITH (s3.secret_access_key = '***', path = 'p')",
            ),
            (
                "CREATE SINK s WITH (\"sasl.password\" = x1, topic = 'secret')",
                "CREATE SINK s WITH (\"sasl.password\" = '***', topic = 'secret')",
            ),
            (
                "CREATE SINK s WITH (url = 'postgresql://u:p:@w@h:1/d?a=b')",
                "CREATE SINK s WITH (url = 'postgresql://u:***@h:1/d?a=b')",
            ),
            (
                "CREATE SINK s WITH (url = 'host=a password = b user=c')",
                "CREATE SINK s WITH (url = 'host=a password = *** user=c')",
            ),
            (
                "CREATE SINK s WITH (url = 'postgresql://u@h/d?password=p&x=y')",
                "CREATE SINK s WITH (url = 'postgresql://u@h/d?password=***&x=y')",
            ),
            (
                "CREATE SINK s WITH (url = 'host=a password=''b c''')",
                "CREATE SINK s WITH (url = 'host=a password=***')",
            ),
            ("WITH (url = 'password=hun\\ ter2 user=c')", "WITH (url = 'password=*** user=c')"),
            ("WITH (url = E'password=hun\\\\ ter2 a=c')", "WITH (url = E'password=*** a=c')"),
            ("WITH (url = 'password=hun&ter user=c')", "WITH (url = 'password=*** user=c')"),
            ("WITH (url = \"password=\"\"b c\"\"\")", "WITH (url = \"password=***\")"),
            ("WITH (url = \"a://b:hunter1@h\", x = 1)", "WITH (url = \"a://b:***@h\", x = 1)"),
            ("WITH (url = a://b:hun,ter)@h, x = 1)", "WITH (url = a://b:***@h, x = 1)"),
            ("WITH (url = $$password='b c' x=y$$)", "WITH (url = $$password=*** x=y$$)"),
            ("WITH (password = p@hunter1, a = 'b')", "WITH (password = '***', a = 'b')"),
            ("WITH (password = f('a', (b)) || c) SELECT 'x'", "WITH (password = '***') SELECT 'x'"),
            ("WITH (password = /* hunter1 */ 'x')", "WITH (password = '***')"),
            ("WITH (password = a--hunter1\n, a = b)", "WITH (password = '***'\n, a = b)"),
            ("OPTIONS (password hunter1, a 'b')", "OPTIONS (password '***', a 'b')"),
            ("WITH (secret.name = x, key.pem = -y)", "WITH (secret.name = '***', key.pem = '***')"),
            ("SET my.password = p@hunter1; SELECT 1", "SET my.password = '***'; SELECT 1"),
            ("SET LOCAL my.password TO 'a' || b", "SET LOCAL my.password TO '***'"),
            (
                "SELECT set_config('my.password', 'a' || f('b', 1), false), 'x'",
                "SELECT set_config('my.password', '***', false), 'x'",
            ),
            (
                "SELECT set_config('my.password'::text,$1,true)",
                "SELECT set_config('my.password'::text,'***',true)",
            ),
            ("CREATE SOURCE s WITH (token", "CREATE SOURCE s WITH (token"),
            ("CREATE SOURCE s WITH (token = 'x", "CREATE SOURCE s WITH (token = '***'"),
            (
                "FORMAT PLAIN ENCODE AVRO (auth_token = x)",
                "FORMAT PLAIN ENCODE AVRO (auth_token = '***')",
            ),
        ] {
            assert_eq!(masked(text), shown, "{text}");
        }
    }

    /// As the start of a long statement is shown.
    #[test]
    fn what_is_cut_off_tells_no_more() {
        let texts = [
            "ALTER USER größe PASSWORD E'hun\\'ter' 'hunter'",
            "CREATE SINK s WITH (password = $q$hunter$q$, token = \"hunter\")",
            "CREATE SINK s WITH (url = 'postgresql://ann:hunter@hunter@h', x = 'y')",
            "CREATE SINK s WITH (url = \"postgresql://ann:hunter@hunter@h\", x = 'y')",
            "CREATE SINK s WITH (url = postgresql://ann:hunter@hunter@h, x = 'y')",
            "CREATE SINK s WITH (url = $q$postgresql://ann:hunter@hunter@h$q$, x = 'y')",
            "CREATE SINK s WITH (password = p@hunter-hunter--hunter, x = 'y')",
            "CREATE USER ann PASSWORD /* hunter */ ('p' || hunter) -- hunter",
            "SELECT set_config('my.password', E'hun\\'ter' || 'hunter', false)",
            "DO $a$BEGIN ALTER USER ann PASSWORD 'a' || $b$hunter$b$; END$a$",
        ];
        for text in texts {
            for end in (0..text.len()).filter(|end| text.is_char_boundary(*end)) {
                assert!(!masked(&text[..end]).contains("hu"), "{}", &text[..end]);
            }
        }
    }

    #[test]
    fn texts_within_texts_are_read_to_a_depth() {
        let text: String = (0..10_000).map(|n| format!("$a{n}$")).collect();
        assert_eq!(
            masked(&format!("SELECT 'user', {text}")),
            "SELECT 'user', $a0$$a1$$a2$$a3$$a4$***"
        );
    }

    #[test]
    fn other_statements_are_shown_as_they_are() {
        for text in [
            "SELECT password, 'x' FROM users WHERE id = 7",
            "SELECT a FROM t WHERE token = other.token AND n = 'x'",
            "INSERT INTO t VALUES ('it''s', $$password$$, E'\\'', \"q\"\"x\") -- 'open",
            "SELECT 'größe' /* /* nested */ ' */, U&'x', 1.5e3, a->>'b', $1, 'http://h/p:q'",
            "SELECT password FROM t WHERE key = 'x'",
            "SELECT password -- its hash\n, token || 'x' FROM t WHERE key = ('x')",
            "INSERT INTO t (key, password, token) VALUES ('a', 'b', 'c'), (1, -2, NULL)",
            "CREATE TABLE t (key int, token text, password varchar(8) DEFAULT f(1, 'x'))",
            "CREATE TABLE t (key int, token text) WITH (retention = '1 day', a = b) -- token",
            "UPDATE t SET (token, n) = (SELECT token, 'x' FROM users)",
            "SELECT set_config('work_mem', 'x', false), token, f('password', 'x')",
            "DO $$BEGIN PERFORM 'x', password FROM users; END$$",
            "CREATE ROLE reader",
            "DROP USER a; SELECT 'x'",
            "",
        ] {
            assert_eq!(masked(text), text);
        }
        assert_eq!(
            masked("SELECT 1 FROM u WHERE password = 'x'"),
            "SELECT 1 FROM u WHERE password = '***'"
        );
    }

    #[test]
    fn definitions_lose_the_secrets_of_their_options_alone() {
        let options = vec![OptionEntry { name: "password".into(), value: "t".into() }];
        let definition = "CREATE SINK s AS SELECT * FROM t WHERE token = 'a' WITH (password = 't')";
        let mut relation =
            Relation { definition: definition.into(), options, ..Relation::default() };
        let shown = "CREATE SINK s AS SELECT * FROM t WHERE token = 'a' WITH (password = '***')";
        assert_eq!(shown_definition(&relation), shown);
        relation.options.clear();
        assert_eq!(shown_definition(&relation), definition);
        assert_eq!(shown_value("sasl.password", "x"), "***");
        assert_eq!(shown_value("url", "host=a password=b"), "host=a password=***");
    }
}
