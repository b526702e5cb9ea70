//! What leaves the system: CREATE SINK, CREATE SUBSCRIPTION, subscription cursors, SUBSCRIBE.

use sqlparser::ast::{FetchDirection, FetchPosition, ObjectName, Statement as SqlStatement, Value};
use sqlparser::parser::Parser;
use sqlparser::tokenizer::{Token, TokenWithSpan};

use super::{Result, SqlParser, is_word};
use crate::ast::{
    CreateSink, CreateSubscription, CursorStart, DeclareSubscriptionCursor, QueryText, Statement,
    Subscribe,
};

impl SqlParser<'_> {
    /// After CREATE SINK.
    pub(super) fn create_sink(&mut self) -> Result<CreateSink> {
        let if_not_exists = self.if_not_exists();
        let name = self.inner.parse_object_name(false)?;
        let into = if self.take_words(&["INTO"]) {
            let table = self.inner.parse_object_name(false)?;
            let columns = if self.inner.peek_token_ref().token == Token::LParen {
                self.inner
                    .parse_parenthesized(|p| p.parse_comma_separated(|p| p.parse_identifier()))?
            } else {
                Vec::new()
            };
            Some((table, columns))
        } else {
            None
        };
        let from_relation = self.take_words(&["FROM"]);
        let query = if from_relation {
            let relation = self.inner.parse_object_name(false)?;
            self.all_of(&relation)?
        } else {
            self.expect_words(&["AS"])?;
            self.query_until(ends_sink_query)?
        };
        let options = if self.take_words(&["WITH"]) { self.options()? } else { Vec::new() };
        let format = if self.take_words(&["FORMAT"]) { Some(self.sink_format()?) } else { None };
        Ok(CreateSink { name, if_not_exists, into, query, from_relation, options, format })
    }

    /// FORMAT name [ENCODE name [(options)]]: a target that takes rows has no encoding.
    fn sink_format(&mut self) -> Result<crate::ast::FormatClause> {
        let format = self.inner.parse_identifier()?.value.to_uppercase();
        let mut encode = String::new();
        let mut options = Vec::new();
        if self.take_words(&["ENCODE"]) {
            encode = self.inner.parse_identifier()?.value.to_uppercase();
            if self.inner.peek_token_ref().token == Token::LParen {
                options = self.options()?;
            }
        }
        Ok(crate::ast::FormatClause { format, encode, options })
    }

    /// After CREATE SUBSCRIPTION.
    pub(super) fn create_subscription(&mut self) -> Result<CreateSubscription> {
        let if_not_exists = self.if_not_exists();
        let name = self.inner.parse_object_name(false)?;
        self.expect_words(&["FROM"])?;
        let from = self.inner.parse_object_name(false)?;
        let options = if self.take_words(&["WITH"]) { self.options()? } else { Vec::new() };
        Ok(CreateSubscription { name, if_not_exists, from, options })
    }

    /// DECLARE name SUBSCRIPTION CURSOR FOR …; `None`: another DECLARE.
    pub(super) fn declare(&mut self) -> Result<Option<Statement>> {
        let is = |n: usize, word: &str| is_word(&self.inner.peek_nth_token_ref(n).token, word);
        if !(is(2, "SUBSCRIPTION") && is(3, "CURSOR")) {
            return Ok(None);
        }
        self.inner.advance_token();
        let name = self.inner.parse_identifier()?;
        self.expect_words(&["SUBSCRIPTION", "CURSOR", "FOR"])?;
        let subscription = self.inner.parse_object_name(false)?;
        let start = if self.take_words(&["FULL"]) {
            CursorStart::Full
        } else if self.take_words(&["SINCE"]) {
            if self.take_call("now") {
                CursorStart::Now
            } else if self.take_call("begin") {
                CursorStart::Begin
            } else {
                CursorStart::After(self.option_value()?)
            }
        } else {
            CursorStart::Now
        };
        let declare = DeclareSubscriptionCursor { name, subscription, start };
        Ok(Some(Statement::DeclareSubscriptionCursor(Box::new(declare))))
    }

    /// `name()`
    fn take_call(&mut self, name: &str) -> bool {
        let parentheses = self.inner.peek_nth_token_ref(1).token == Token::LParen
            && self.inner.peek_nth_token_ref(2).token == Token::RParen;
        let found = parentheses && is_word(&self.inner.peek_token_ref().token, name);
        if found {
            (0..3).for_each(|_| self.inner.advance_token());
        }
        found
    }

    /// FETCH and MOVE forward, with FROM, IN or neither; `None`: another direction.
    pub(super) fn fetch(&mut self) -> Result<Option<Statement>> {
        let moves = self.peek_words(&["MOVE"]);
        let Some((direction, words)) = self.direction_at(1) else { return Ok(None) };
        (0..1 + words).for_each(|_| self.inner.advance_token());
        let _ = self.take_words(&["FROM"]) || self.take_words(&["IN"]);
        let cursor = self.inner.parse_identifier()?;
        if moves {
            return Ok(Some(Statement::Move { cursor, direction }));
        }
        if !self.take_words(&["WITH"]) {
            let (position, into) = (FetchPosition::From, None);
            let fetch = SqlStatement::Fetch { name: cursor, direction, position, into };
            return Ok(Some(Statement::Sql(Box::new(fetch))));
        }
        let previous = self.inner.get_current_token().clone();
        let count = match &direction {
            FetchDirection::Count { limit } => limit.value.to_string().parse().ok(),
            FetchDirection::Next => Some(1),
            _ => None,
        };
        let Some(count) = count else { return self.inner.expected("end of statement", previous) };
        let options = self.options()?;
        match options.as_slice() {
            [(name, timeout)] if name == "timeout" => {
                Ok(Some(Statement::FetchWait { cursor, count, timeout: timeout.clone() }))
            }
            _ => {
                let previous = self.inner.get_current_token();
                self.inner.expected_ref("(timeout = '10s')", previous)
            }
        }
    }

    /// Which rows FETCH asks for by the words from the nth on, and how many words say so.
    fn direction_at(&self, n: usize) -> Option<(FetchDirection, usize)> {
        let token = |n: usize| &self.inner.peek_nth_token_ref(n).token;
        let count = |n: usize| match token(n) {
            Token::Number(_, _) => {
                Some(Value::Number(token(n).to_string(), false).with_empty_span())
            }
            _ => None,
        };
        let cursor_after = |n: usize| matches!(token(n), Token::Word(_));
        Some(match token(n) {
            t if is_word(t, "NEXT") && cursor_after(n + 1) => (FetchDirection::Next, 1),
            t if is_word(t, "ALL") => (FetchDirection::All, 1),
            t if is_word(t, "FORWARD") && is_word(token(n + 1), "ALL") => {
                (FetchDirection::ForwardAll, 2)
            }
            t if is_word(t, "FORWARD") => match count(n + 1) {
                Some(limit) => (FetchDirection::Forward { limit: Some(limit) }, 2),
                None => (FetchDirection::Forward { limit: None }, 1),
            },
            t if is_word(t, "FROM") || is_word(t, "IN") => (FetchDirection::Next, 0),
            Token::Number(_, _) => (FetchDirection::Count { limit: count(n)? }, 1),
            // Only a name: of the cursor.
            Token::Word(_) if !cursor_after(n + 1) => (FetchDirection::Next, 0),
            _ => return None,
        })
    }

    /// COPY (SUBSCRIBE …) TO STDOUT; `None`: another COPY.
    pub(super) fn copy_subscribe(&mut self) -> Result<Option<Statement>> {
        let parenthesis = self.inner.peek_nth_token_ref(1).token == Token::LParen;
        if !parenthesis || !is_word(&self.inner.peek_nth_token_ref(2).token, "SUBSCRIBE") {
            return Ok(None);
        }
        (0..2).for_each(|_| self.inner.advance_token());
        let mut subscribe = self.subscribe()?;
        self.inner.expect_token(&Token::RParen)?;
        self.expect_words(&["TO", "STDOUT"])?;
        let _ = self.take_words(&["WITH"]);
        let options = if self.inner.peek_token_ref().token == Token::LParen {
            self.copy_options()?
        } else {
            Vec::new()
        };
        subscribe.copy = Some(options);
        Ok(Some(Statement::Subscribe(Box::new(subscribe))))
    }

    /// `(FORMAT csv, HEADER)`: names in lower case.
    fn copy_options(&mut self) -> Result<Vec<(String, String)>> {
        self.inner.expect_token(&Token::LParen)?;
        let mut options = Vec::new();
        loop {
            let name = self.inner.parse_identifier()?.value.to_lowercase();
            let value = match self.inner.peek_token_ref().token {
                Token::Comma | Token::RParen => "true".to_owned(),
                _ => self.option_value()?,
            };
            options.push((name, value));
            if self.inner.consume_token(&Token::RParen) {
                return Ok(options);
            }
            self.inner.expect_token(&Token::Comma)?;
        }
    }

    /// SUBSCRIBE [TO] relation | query [AS OF …] [WITH (…)].
    pub(super) fn subscribe(&mut self) -> Result<Subscribe> {
        self.inner.advance_token();
        let _ = self.take_words(&["TO"]);
        let begins_query = ["SELECT", "WITH", "VALUES"].iter().any(|w| self.peek_words(&[w]))
            || self.inner.peek_token_ref().token == Token::LParen;
        let (relation, query) = if begins_query {
            (None, self.query_until(ends_subscribe_query)?)
        } else {
            let relation = self.inner.parse_object_name(false)?;
            let query = self.all_of(&relation)?;
            (Some(relation), query)
        };
        let as_of = if self.take_words(&["AS", "OF"]) { Some(self.option_value()?) } else { None };
        let options = if self.take_words(&["WITH"]) { self.options()? } else { Vec::new() };
        Ok(Subscribe { relation, query, as_of, options, copy: None })
    }

    fn all_of(&mut self, relation: &ObjectName) -> Result<QueryText> {
        let text = format!("SELECT * FROM {relation}");
        let mut parser = Parser::new(self.dialect).try_with_sql(&text)?;
        Ok(QueryText { query: parser.parse_query()?, text })
    }

    /// A query up to a clause of the statement around it, which sqlparser would take for its own.
    fn query_until(&mut self, ends: impl Fn(&Token, &Token, &Token) -> bool) -> Result<QueryText> {
        let mut tokens: Vec<TokenWithSpan> = Vec::new();
        let (mut depth, mut previous) = (0usize, Token::EOF);
        loop {
            let n = tokens.len();
            let token = self.inner.peek_nth_token_ref(n).clone();
            let next = self.inner.peek_nth_token_ref(n + 1).token.clone();
            let over = match token.token {
                Token::EOF | Token::SemiColon => true,
                Token::RParen if depth == 0 => true,
                _ => depth == 0 && ends(&previous, &token.token, &next),
            };
            if over {
                break;
            }
            match token.token {
                Token::LParen => depth += 1,
                Token::RParen => depth -= 1,
                _ => {}
            }
            previous = token.token.clone();
            tokens.push(token);
        }
        let Some(start) = tokens.first().map(|t| t.span.start) else {
            return self.inner.expected_ref("a query", self.inner.peek_token_ref());
        };
        let count = tokens.len();
        let mut parser = Parser::new(self.dialect)
            .with_recursion_limit(super::MAX_DEPTH)
            .with_tokens_with_locations(tokens);
        let query = parser.parse_query()?;
        let rest = parser.peek_token_ref();
        if rest.token != Token::EOF {
            return parser.expected_ref("end of the query", rest);
        }
        (0..count).for_each(|_| self.inner.advance_token());
        let end = self.inner.get_current_token().span.end;
        Ok(QueryText { query, text: self.source.slice(start, end).to_owned() })
    }
}

fn options_follow(token: &Token, next: &Token) -> bool {
    is_word(token, "WITH") && *next == Token::LParen
}

fn ends_sink_query(_: &Token, token: &Token, next: &Token) -> bool {
    let formats = ["PLAIN", "UPSERT", "DEBEZIUM"];
    options_follow(token, next)
        || (is_word(token, "FORMAT") && formats.iter().any(|f| is_word(next, f)))
}

fn ends_subscribe_query(previous: &Token, token: &Token, next: &Token) -> bool {
    options_follow(token, next)
        || (is_word(token, "AS") && is_word(next, "OF") && !is_word(previous, "SYSTEM_TIME"))
}
