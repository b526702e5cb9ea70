//! CREATE, ALTER and DROP of USER and ROLE.

use sqlparser::tokenizer::Token;

use super::{Result, SqlParser, is_word};
use crate::ast::{Statement, UserStatement};

/// Attributes that say what every user has here, and do nothing.
const GIVEN: [&str; 8] = [
    "LOGIN",
    "SUPERUSER",
    "CREATEDB",
    "CREATEROLE",
    "INHERIT",
    "NOREPLICATION",
    "NOBYPASSRLS",
    "ENCRYPTED",
];

impl SqlParser<'_> {
    /// A statement about users, if it is one.
    pub(super) fn user_statement(&mut self) -> Result<Option<Statement>> {
        let names_user =
            ["USER", "ROLE"].iter().any(|w| is_word(&self.inner.peek_nth_token_ref(1).token, w));
        // ALTER USER MAPPING and the like are somebody else's.
        if !names_user || is_word(&self.inner.peek_nth_token_ref(2).token, "MAPPING") {
            return Ok(None);
        }
        let verb = self.inner.next_token().token.to_string().to_ascii_uppercase();
        self.inner.advance_token();
        let statement = match verb.as_str() {
            "CREATE" => {
                let if_not_exists = self.if_not_exists();
                let name = self.inner.parse_identifier()?;
                UserStatement::Create { name, if_not_exists, password: self.attributes()? }
            }
            "ALTER" => {
                let name = self.inner.parse_identifier()?;
                UserStatement::Alter { name, password: self.attributes()? }
            }
            _ => {
                let if_exists = self.if_exists();
                let names = self.inner.parse_comma_separated(|p| p.parse_identifier())?;
                UserStatement::Drop { names, if_exists }
            }
        };
        Ok(Some(Statement::User(statement)))
    }

    /// `[WITH] [LOGIN …] [PASSWORD 'text' | PASSWORD NULL]`.
    fn attributes(&mut self) -> Result<Option<Option<String>>> {
        let _ = self.take_words(&["WITH"]);
        let mut password = None;
        loop {
            if self.take_words(&["PASSWORD"]) {
                password = Some(match self.take_words(&["NULL"]) {
                    true => None,
                    false => Some(self.inner.parse_literal_string()?),
                });
            } else if !GIVEN.iter().any(|word| self.take_words(&[word])) {
                break;
            }
        }
        let next = self.inner.peek_token_ref();
        if !matches!(next.token, Token::SemiColon | Token::EOF) {
            return self.inner.expected_ref("PASSWORD or end of statement", next);
        }
        Ok(password)
    }
}
