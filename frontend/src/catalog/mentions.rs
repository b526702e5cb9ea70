//! Which texts name system tables, or call functions over them, as far as their words tell.

/// A text that does has one of these words.
const WORDS: [&str; 4] = ["pg_", "millrace_catalog", "information_schema", "regclass"];

/// Whether a text may name a system table. Words within its literals count, too.
pub fn mentions_catalogs(text: &str) -> bool {
    WORDS.into_iter().any(|word| contains(text, word))
}

/// Whether a text has a word, in whatever case.
pub fn contains(text: &str, word: &str) -> bool {
    text.as_bytes().windows(word.len()).any(|part| part.eq_ignore_ascii_case(word.as_bytes()))
}
