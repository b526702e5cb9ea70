//! Statements of PostgreSQL that ask for what is not here, by their words: our parser does not know all of them.
//!
//! What is true anyway is accepted, with a notice where that is not plain (everybody may do everything, so a GRANT
//! grants nothing new). Everything else is refused by its name, with a hint.

use millrace_common::{SqlError, SqlState};
use millrace_planner::bind::desugar::plain_call;
use sqlparser::ast::{Expr, Ident, ObjectName, Statement as Sql};
use sqlparser::tokenizer::{Token, TokenWithSpan};

use crate::query::SessionCatalog;
use crate::query::catalog_view::fold;
use crate::session::Session;
use crate::word_reader::{text_of, tokens};

/// The name of the call that stands for a statement which is read here, and which nobody can write.
const MARK: &str = "#utility";

/// What a statement asks for.
#[derive(Debug, PartialEq)]
enum What {
    Done(&'static str),
    /// The tag, and why there is nothing to do.
    Nothing(&'static str, &'static str),
    Revoke,
    Comment,
    AlterTable,
    CreateExtension,
    /// DROP of a kind of object of which there are none.
    DropNone {
        kind: &'static str,
        /// The error of one that is missing.
        missing: SqlState,
        /// The place of its name.
        name: usize,
        if_exists: bool,
    },
    Refuse(String, &'static str),
}

/// The kinds of objects that are not here: their words, the error of one that is missing, and a hint.
const KINDS: [(&str, SqlState, &str); 32] = [
    (
        "SEQUENCE",
        SqlState::UNDEFINED_TABLE,
        "Give keys in the INSERT; a table without a key has a hidden one. gen_random_uuid() makes unique values.",
    ),
    ("TYPE", SqlState::UNDEFINED_OBJECT, "Use text or another type of the server."),
    ("DOMAIN", SqlState::UNDEFINED_OBJECT, "Use the type that it stands for."),
    ("FUNCTION", SqlState::UNDEFINED_FUNCTION, NO_CODE),
    ("PROCEDURE", SqlState::UNDEFINED_FUNCTION, NO_CODE),
    ("ROUTINE", SqlState::UNDEFINED_FUNCTION, NO_CODE),
    ("AGGREGATE", SqlState::UNDEFINED_FUNCTION, NO_CODE),
    ("OPERATOR", SqlState::UNDEFINED_FUNCTION, NO_CODE),
    ("CAST", SqlState::UNDEFINED_OBJECT, NO_CODE),
    ("CONVERSION", SqlState::UNDEFINED_OBJECT, NO_CODE),
    ("LANGUAGE", SqlState::UNDEFINED_OBJECT, NO_CODE),
    ("TRANSFORM", SqlState::UNDEFINED_OBJECT, NO_CODE),
    ("TRIGGER", SqlState::UNDEFINED_OBJECT, FOLLOW),
    ("EVENT TRIGGER", SqlState::UNDEFINED_OBJECT, FOLLOW),
    ("RULE", SqlState::UNDEFINED_OBJECT, FOLLOW),
    ("POLICY", SqlState::UNDEFINED_OBJECT, "Every user may do everything."),
    ("EXTENSION", SqlState::UNDEFINED_OBJECT, "What the server has is there from the start."),
    ("COLLATION", SqlState::UNDEFINED_OBJECT, "Texts are ordered by their bytes."),
    ("DATABASE", SqlState::INVALID_CATALOG_NAME, "A server is one database; schemas divide it."),
    ("TABLESPACE", SqlState::UNDEFINED_OBJECT, STORE),
    (
        "PUBLICATION",
        SqlState::UNDEFINED_OBJECT,
        "CREATE SINK and SUBSCRIBE TO bring changes to others.",
    ),
    ("STATISTICS", SqlState::UNDEFINED_OBJECT, "The server keeps the statistics that it needs."),
    ("SERVER", SqlState::UNDEFINED_OBJECT, SOURCES),
    ("FOREIGN TABLE", SqlState::UNDEFINED_TABLE, SOURCES),
    ("FOREIGN DATA WRAPPER", SqlState::UNDEFINED_OBJECT, SOURCES),
    ("USER MAPPING", SqlState::UNDEFINED_OBJECT, SOURCES),
    ("ACCESS METHOD", SqlState::UNDEFINED_OBJECT, STORE),
    ("TEXT SEARCH", SqlState::UNDEFINED_OBJECT, "LIKE and regular expressions search texts."),
    ("GROUP", SqlState::UNDEFINED_OBJECT, "CREATE USER makes users, who may do everything."),
    ("UNLOGGED TABLE", SqlState::UNDEFINED_TABLE, "Leave UNLOGGED out: tables are durable."),
    ("TEMP TABLE", SqlState::UNDEFINED_TABLE, TEMPORARY),
    ("TEMPORARY TABLE", SqlState::UNDEFINED_TABLE, TEMPORARY),
];

/// Lists of other systems that are asked for by SHOW, and what there is instead.
const LISTS: [(&str, &str); 3] = [
    ("CLUSTERS", "A server is one cluster; SHOW JOBS lists what it runs."),
    (
        "OBJECTS",
        "Use SHOW TABLES, SHOW SOURCES, SHOW VIEWS, SHOW MATERIALIZED VIEWS, SHOW INDEXES or SHOW SINKS.",
    ),
    (
        "CONNECTIONS",
        "Each source, table and sink has the options of its own connection; see SHOW CREATE SOURCE.",
    ),
];

const NO_CODE: &str = "Code of users does not run in the server.";
const FOLLOW: &str = "A materialized view, a sink or SUBSCRIBE TO follows changes.";
const STORE: &str = "All data is in the object store.";
const SOURCES: &str = "CREATE SOURCE reads other systems.";
const TEMPORARY: &str = "Create a table and drop it afterwards, or use WITH in the query.";
const EVERYTHING: &str = "every user may do everything";
const BLOCKS: &str = "A transaction is committed by COMMIT, in one step.";

/// The words of a statement in capitals; what is not a plain word is a dot, or the parenthesis that it closes.
fn words(tokens: &[TokenWithSpan]) -> Vec<String> {
    let word = |t: &TokenWithSpan| match &t.token {
        Token::Word(w) if w.quote_style.is_none() => w.value.to_ascii_uppercase(),
        Token::RParen => ")".to_owned(),
        _ => ".".to_owned(),
    };
    tokens.iter().map(word).collect()
}

/// The error of SHOW of a list that other systems have; `None`: it is no such list.
pub fn list_of_elsewhere(name: &str) -> Option<SqlError> {
    let (list, hint) = *LISTS.iter().find(|(list, _)| list.eq_ignore_ascii_case(name))?;
    Some(SqlError::unsupported(format!("SHOW {list}")).with_hint(hint))
}

/// What streaming databases say that PostgreSQL does not.
fn of_other_dialects(words: &[&str]) -> Option<What> {
    match words {
        ["SHOW", list, ..] => {
            let (list, hint) = *LISTS.iter().find(|(name, _)| name == list)?;
            refuse(&format!("SHOW {list}"), hint)
        }
        ["CREATE", "DEFAULT", "INDEX", ..] => refuse(
            "CREATE DEFAULT INDEX",
            "What a materialized view has is kept by its key without one; CREATE INDEX ON t (column) finds rows by others.",
        ),
        ["CREATE", rest @ ..] => {
            let head = rest.iter().take_while(|w| !matches!(**w, "AS" | "ON" | "FROM"));
            let head: Vec<&str> = head.copied().collect();
            if !head.windows(2).any(|w| w == ["IN", "CLUSTER"]) {
                return None;
            }
            refuse("IN CLUSTER", "Leave it out: a server is one cluster.")
        }
        _ => None,
    }
}

fn refuse(feature: &str, hint: &'static str) -> Option<What> {
    Some(What::Refuse(feature.to_owned(), hint))
}

fn find(words: &[&str]) -> Option<What> {
    if let Some(what) = of_other_dialects(words) {
        return Some(what);
    }
    match words {
        ["CHECKPOINT", ..] => Some(What::Done("CHECKPOINT")),
        ["VACUUM", ..] => Some(What::Done("VACUUM")),
        ["ANALYZE" | "ANALYSE", ..] => Some(What::Done("ANALYZE")),
        ["REINDEX", ..] => Some(What::Nothing("REINDEX", "indexes are always up to date")),
        ["SET", "CONSTRAINTS", "ALL", "DEFERRED" | "IMMEDIATE"] => {
            Some(What::Done("SET CONSTRAINTS"))
        }
        ["GRANT", ..] => Some(What::Nothing("GRANT", EVERYTHING)),
        ["ALTER", "DEFAULT", "PRIVILEGES", ..] => {
            Some(What::Nothing("ALTER DEFAULT PRIVILEGES", EVERYTHING))
        }
        ["REVOKE", ..] => Some(What::Revoke),
        ["COMMENT", "ON", ..] => Some(What::Comment),
        ["CREATE", "EXTENSION", ..] => Some(What::CreateExtension),
        ["LOCK", ..] => refuse(
            "LOCK TABLE",
            "Nothing is locked: a COMMIT fails with 40001 if another session has changed its rows. Sessions can agree on pg_advisory_lock.",
        ),
        ["LISTEN", ..] | ["NOTIFY", ..] => {
            refuse("LISTEN/NOTIFY", "SUBSCRIBE TO tells a session what changes.")
        }
        ["REFRESH", "MATERIALIZED", "VIEW", ..] => refuse(
            "REFRESH MATERIALIZED VIEW",
            "It is always up to date; FLUSH waits until it has everything.",
        ),
        ["SECURITY", "LABEL", ..] => refuse("SECURITY LABEL", "Every user may do everything."),
        ["SET", "CONSTRAINTS", ..] => {
            refuse("SET CONSTRAINTS of some", "SET CONSTRAINTS ALL is taken.")
        }
        ["CLUSTER", ..] => refuse("CLUSTER", "A table is ordered by its primary key."),
        ["DO", ..] => refuse("DO", NO_CODE),
        ["CALL", ..] => refuse("CALL", NO_CODE),
        ["LOAD", ..] => refuse("LOAD", NO_CODE),
        ["REASSIGN", "OWNED", ..] => {
            refuse("REASSIGN OWNED", "ALTER … OWNER TO is taken for each object.")
        }
        ["DROP", "OWNED", ..] => {
            refuse("DROP OWNED", "Drop the objects, or their schema with CASCADE.")
        }
        ["IMPORT", "FOREIGN", "SCHEMA", ..] => refuse("IMPORT FOREIGN SCHEMA", SOURCES),
        ["PREPARE", "TRANSACTION", ..] => refuse("PREPARE TRANSACTION", BLOCKS),
        ["COMMIT", "PREPARED", ..] => refuse("COMMIT PREPARED", BLOCKS),
        ["ROLLBACK", "PREPARED", ..] => refuse("ROLLBACK PREPARED", BLOCKS),
        _ => of_definitions(words),
    }
}

/// CREATE, ALTER and DROP, of which some are here.
fn of_definitions(words: &[&str]) -> Option<What> {
    match words {
        ["ALTER", "ROLE" | "USER", rest @ ..]
            if rest.contains(&"SET") || rest.contains(&"RESET") =>
        {
            refuse("ALTER ROLE … SET", "ALTER SYSTEM SET changes what new sessions begin with.")
        }
        ["CREATE", "INDEX", rest @ ..] | ["CREATE", "UNIQUE", "INDEX", rest @ ..]
            if rest.contains(&"WHERE") =>
        {
            refuse(
                "a partial index",
                "Create a materialized view of those rows, and an index on that.",
            )
        }
        ["CREATE", "TABLE", rest @ ..] if rest.windows(2).any(|w| w == [")", "INHERITS"]) => {
            refuse("INHERITS", "Name the columns in the table.")
        }
        ["CREATE", "TABLE", rest @ ..]
            if rest.windows(3).any(|w| w == [")", "PARTITION", "BY"]) =>
        {
            refuse("PARTITION BY of a table", "Tables are divided by their keys anyway.")
        }
        ["ALTER", "TABLE", ..] => Some(What::AlterTable),
        [verb @ ("CREATE" | "ALTER" | "DROP"), rest @ ..] => of_kind(verb, rest),
        _ => None,
    }
}

/// CREATE, ALTER and DROP of what is not here.
fn of_kind(verb: &str, words: &[&str]) -> Option<What> {
    let (skipped, words) = match words {
        ["OR", "REPLACE", rest @ ..] => (2, rest),
        ["TRUSTED" | "CONSTRAINT" | "PROCEDURAL", rest @ ..] => (1, rest),
        all => (0, all),
    };
    let is = |kind: &str| {
        let parts: Vec<&str> = kind.split(' ').collect();
        words.starts_with(&parts)
    };
    let (kind, missing, hint) = *KINDS.iter().find(|k| is(k.0))?;
    let length = kind.split(' ').count();
    if verb == "DROP" {
        let if_exists = words.get(length..length + 2) == Some(&["IF", "EXISTS"][..]);
        let name = 1 + skipped + length + if if_exists { 2 } else { 0 };
        return Some(What::DropNone { kind, missing, name, if_exists });
    }
    Some(What::Refuse(format!("{verb} {kind}"), hint))
}

/// Whether a statement is one of these. Of ALTER TABLE the parser takes what there is.
pub fn is_utility(tokens: &[TokenWithSpan]) -> bool {
    let words = words(tokens);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    find(&words).is_some_and(|what| what != What::AlterTable)
}

/// What stands for such a statement among those that are parsed.
pub fn mark() -> Option<Sql> {
    match plain_call(MARK, []) {
        Expr::Function(f) => Some(Sql::Call(f)),
        _ => None,
    }
}

/// Runs a statement that nobody else knows, or refuses it; the answer is its tag.
pub fn run(session: &mut Session, text: &str) -> Result<String, SqlError> {
    let tokens = tokens(text).unwrap_or_default();
    let words = words(&tokens);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let Some(what) = find(&words) else {
        let named: Vec<&str> = words.iter().copied().take_while(|w| *w != ".").take(2).collect();
        return Err(SqlError::unsupported(format!("the statement {}", named.join(" "))));
    };
    match what {
        What::Done(tag) => Ok(tag.to_owned()),
        What::Nothing(tag, why) => {
            session.notice("NOTICE", SqlState::SUCCESS, format!("{tag} has no effect: {why}"));
            Ok(tag.to_owned())
        }
        What::Revoke => {
            let message = "no privileges could be revoked: every user may do everything";
            session.notice("WARNING", SqlState("01006"), message);
            Ok("REVOKE".to_owned())
        }
        What::Comment => comment(session, &tokens, &words),
        What::AlterTable => alter_table(session, &tokens, &words),
        What::CreateExtension => create_extension(session, &tokens, &words),
        What::DropNone { kind, missing, name, if_exists } => {
            let name = name_at(&tokens, name).map(|(name, _)| name);
            if kind == "DATABASE" && name.as_ref().is_some_and(|n| is_plain(n, &session.database)) {
                let message = "cannot drop the currently open database";
                return Err(SqlError::new(SqlState("55006"), message));
            }
            let name = name.map(|name| name.to_string());
            let (noun, name) = (kind.to_lowercase(), name.unwrap_or_default());
            let message = format!("{noun} \"{name}\" does not exist");
            if !if_exists {
                return Err(SqlError::new(missing, message));
            }
            session.notice("NOTICE", SqlState::SUCCESS, format!("{message}, skipping"));
            Ok(format!("DROP {kind}"))
        }
        What::Refuse(feature, hint) => Err(SqlError::unsupported(feature).with_hint(hint)),
    }
}

/// Whether a name of one part is this one.
fn is_plain(name: &ObjectName, wanted: &str) -> bool {
    matches!(name.0.as_slice(), [part] if part.as_ident().map(fold).as_deref() == Some(wanted))
}

/// A name with its dots, and the place after it.
fn name_at(tokens: &[TokenWithSpan], mut at: usize) -> Option<(ObjectName, usize)> {
    let mut parts: Vec<Ident> = Vec::new();
    while let Token::Word(w) = &tokens.get(at)?.token {
        parts.push(Ident { quote_style: w.quote_style, ..Ident::new(w.value.clone()) });
        at += 1;
        if tokens.get(at).is_none_or(|t| t.token != Token::Period) {
            return Some((ObjectName::from(parts), at));
        }
        at += 1;
    }
    None
}

/// COMMENT ON: what it speaks of must exist; the text is not kept.
fn comment(
    session: &mut Session,
    tokens: &[TokenWithSpan],
    words: &[&str],
) -> Result<String, SqlError> {
    let (at, column) = match words.get(2..) {
        Some(["TABLE" | "VIEW" | "INDEX", ..]) => (Some(3), false),
        Some(["MATERIALIZED", "VIEW", ..] | ["FOREIGN", "TABLE", ..]) => (Some(4), false),
        Some(["COLUMN", ..]) => (Some(3), true),
        _ => (None, false),
    };
    if let Some((name, _)) = at.and_then(|at| name_at(tokens, at)) {
        let (mut parts, view) = (name.0, session.catalog_view());
        let of = if column { parts.pop() } else { None };
        let relation = view.resolve(&ObjectName(parts))?;
        let of = of.as_ref().and_then(|p| p.as_ident()).map(crate::query::catalog_view::fold);
        if let Some(missing) = of.filter(|of| !relation.columns.iter().any(|c| c.name == *of)) {
            let message =
                format!("column \"{missing}\" of relation \"{}\" does not exist", relation.name);
            return Err(SqlError::new(SqlState::UNDEFINED_COLUMN, message));
        }
    }
    session.notice("NOTICE", SqlState::SUCCESS, "comments are not kept");
    Ok("COMMENT".to_owned())
}

/// ALTER TABLE of columns, constraints and the like: refused by the action's name, but for what is so anyway.
fn alter_table(
    session: &mut Session,
    tokens: &[TokenWithSpan],
    words: &[&str],
) -> Result<String, SqlError> {
    let tag = "ALTER TABLE".to_owned();
    let mut at = 2;
    let if_exists = words.get(at..at + 2) == Some(&["IF", "EXISTS"][..]);
    at += if if_exists { 2 } else { 0 };
    at += usize::from(words.get(at) == Some(&"ONLY"));
    let Some((name, at)) = name_at(tokens, at) else {
        return Err(SqlError::unsupported("this form of ALTER TABLE"));
    };
    let relation = match session.catalog_view().resolve(&name) {
        Err(e) if if_exists && e.state == SqlState::UNDEFINED_TABLE => {
            let message = format!("{}, skipping", e.message);
            session.notice("NOTICE", SqlState::SUCCESS, message);
            return Ok(tag);
        }
        found => found?,
    };
    let action = words.get(at..).unwrap_or_default();
    match action {
        // There are none.
        ["ENABLE" | "DISABLE", "TRIGGER", "ALL" | "USER"] => return Ok(tag),
        ["ADD", "COLUMN", "IF", "NOT", "EXISTS", ..] => {
            let column = name_at(tokens, at + 5)
                .and_then(|(name, _)| SessionCatalog::split_name(&name).ok())
                .map(|(_, column)| column);
            let known = column.filter(|c| relation.columns.iter().any(|k| k.name == *c));
            if let Some(column) = known {
                let message = format!(
                    "column \"{column}\" of relation \"{}\" already exists, skipping",
                    relation.name
                );
                session.notice("NOTICE", SqlState::DUPLICATE_COLUMN, message);
                return Ok(tag);
            }
        }
        _ => {}
    }
    let verbs: Vec<&str> = match action {
        [verb @ ("ADD" | "DROP" | "ALTER" | "RENAME"), what, ..]
            if !matches!(
                *what,
                "COLUMN" | "CONSTRAINT" | "PRIMARY" | "UNIQUE" | "CHECK" | "FOREIGN"
            ) =>
        {
            vec![*verb, "COLUMN"]
        }
        other => other.iter().copied().take(2).collect(),
    };
    let hint = match action.first() {
        Some(&("ADD" | "DROP" | "ALTER" | "RENAME")) => {
            "What reads the table names its columns. Create another table, INSERT … SELECT, and put a view in front."
        }
        _ => "Leave it out.",
    };
    Err(SqlError::unsupported(format!("{tag} … {}", verbs.join(" "))).with_hint(hint))
}

/// CREATE EXTENSION. Schemas are dumped with one that is always there in PostgreSQL: asking for it with IF
/// NOT EXISTS is no reason to stop.
fn create_extension(
    session: &mut Session,
    tokens: &[TokenWithSpan],
    words: &[&str],
) -> Result<String, SqlError> {
    let if_not_exists = words.get(2..5) == Some(&["IF", "NOT", "EXISTS"][..]);
    let name = match tokens.get(if if_not_exists { 5 } else { 2 }).map(|t| &t.token) {
        Some(Token::Word(w)) => w.value.clone(),
        Some(other) => text_of(other).unwrap_or_default().to_owned(),
        None => String::new(),
    };
    if if_not_exists && name.eq_ignore_ascii_case("plpgsql") {
        let message = "CREATE EXTENSION has no effect: there is no code of users in the server";
        session.notice("NOTICE", SqlState::SUCCESS, message);
        return Ok("CREATE EXTENSION".to_owned());
    }
    Err(SqlError::unsupported(format!("the extension \"{name}\"")).with_hint(
        "What the server has is there from the start: gen_random_uuid(), for example, needs no extension.",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(sql: &str) -> Option<What> {
        let tokens = tokens(sql).unwrap();
        let words = words(&tokens);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        find(&words)
    }

    #[test]
    fn statements_are_known_by_their_words() {
        let refused = |sql: &str| match found(sql) {
            Some(What::Refuse(feature, _)) => feature,
            other => format!("{other:?}"),
        };
        assert_eq!(
            refused("create or replace function f() returns int as $$ select 1; $$ language sql"),
            "CREATE FUNCTION"
        );
        assert_eq!(refused("CREATE SEQUENCE s"), "CREATE SEQUENCE");
        assert_eq!(refused("create index on t (a) where a > 1"), "a partial index");
        assert_eq!(
            refused("create table p (a int) partition by range (a)"),
            "PARTITION BY of a table"
        );
        assert_eq!(refused("alter role r set search_path = x"), "ALTER ROLE … SET");
        assert_eq!(refused("create temp table t (a int)"), "CREATE TEMP TABLE");
        assert_eq!(found("VACUUM (ANALYZE) t"), Some(What::Done("VACUUM")));
        let none = |if_exists, name| What::DropNone {
            kind: "TYPE",
            missing: SqlState::UNDEFINED_OBJECT,
            name,
            if_exists,
        };
        assert_eq!(found("drop type if exists mood"), Some(none(true, 4)));
        assert_eq!(found("drop type mood"), Some(none(false, 2)));
        let windowed = "create table t as select rank() over (partition by a) from u";
        assert_eq!(found(windowed), None);
        assert_eq!(refused("create default index on t"), "CREATE DEFAULT INDEX");
        assert_eq!(refused("create materialized view v in cluster c as select 1"), "IN CLUSTER");
        assert_eq!(refused("show objects from s"), "SHOW OBJECTS");
        assert_eq!(found("create view v as select a in cluster from t"), None);
        assert_eq!(found("show tables"), None);
        assert_eq!(found("create table t (a int)"), None);
        assert_eq!(found("create role r"), None);
        assert_eq!(found("select 1"), None);
    }
}
