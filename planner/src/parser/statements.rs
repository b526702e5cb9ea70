//! The statements that are ours, by their first words.

use sqlparser::ast::{Ident, OrderByExpr, OrderByOptions, Statement as SqlStatement};
use sqlparser::keywords::Keyword;
use sqlparser::tokenizer::Token;

use super::{Result, SqlParser};
use crate::ast::{
    AlterAction, CreateIndex, CreateView, Drop, Explain, ExplainTarget, ObjectKind, Show, Statement,
};

impl SqlParser<'_> {
    pub(super) fn statement(&mut self) -> Result<Statement> {
        let Token::Word(first) = &self.inner.peek_token_ref().token else {
            return self.fall_through();
        };
        let ours = match first.value.to_ascii_uppercase().as_str() {
            verb @ ("CREATE" | "DROP" | "ALTER") => {
                let verb = verb.to_owned();
                match (self.user_statement()?, verb.as_str()) {
                    (Some(statement), _) => Some(statement),
                    (None, "CREATE") => self.create()?,
                    (None, "DROP") => self.drop_statement()?,
                    (None, _) => self.alter()?,
                }
            }
            "SHOW" => Some(self.show()?),
            "EXPLAIN" => Some(self.explain()?),
            "DESCRIBE" | "DESC" => {
                self.inner.advance_token();
                Some(Statement::Describe { name: self.inner.parse_object_name(false)? })
            }
            "TRUNCATE" => Some(self.truncate()?),
            // PostgreSQL's word for ROLLBACK.
            "ABORT" => {
                self.inner.advance_token();
                let chain = self.inner.parse_commit_rollback_chain()?;
                let rollback = SqlStatement::Rollback { chain, savepoint: None };
                Some(Statement::Sql(Box::new(rollback)))
            }
            "FLUSH" => {
                self.inner.advance_token();
                Some(Statement::Flush)
            }
            "WAIT" => {
                self.inner.advance_token();
                Some(Statement::Wait)
            }
            "CANCEL" => Some(self.cancel_jobs()?),
            "DECLARE" => self.declare()?,
            "FETCH" | "MOVE" => self.fetch()?,
            "COPY" => self.copy_subscribe()?,
            "SUBSCRIBE" => Some(Statement::Subscribe(Box::new(self.subscribe()?))),
            _ => None,
        };
        match ours {
            Some(statement) => Ok(statement),
            None => self.fall_through(),
        }
    }

    fn fall_through(&mut self) -> Result<Statement> {
        Ok(Statement::Sql(Box::new(super::with::take_in(self.inner.parse_statement()?))))
    }

    fn create(&mut self) -> Result<Option<Statement>> {
        let (or_replace, skip) =
            if self.peek_words(&["CREATE", "OR", "REPLACE"]) { (true, 3) } else { (false, 1) };
        let word = |i: usize| match &self.inner.peek_nth_token_ref(skip + i).token {
            Token::Word(w) => w.value.to_ascii_uppercase(),
            _ => String::new(),
        };
        let (first, second) = (word(0), word(1));
        let mut take = |n: usize| (0..skip + n).for_each(|_| self.inner.advance_token());
        let statement = match (first.as_str(), second.as_str()) {
            ("TABLE", _) => {
                take(1);
                Statement::CreateTable(Box::new(self.table_definition(or_replace)?))
            }
            ("SOURCE", _) => {
                take(1);
                Statement::CreateSource(Box::new(self.table_definition(or_replace)?))
            }
            ("MATERIALIZED", "VIEW") => {
                take(2);
                Statement::CreateView(Box::new(self.create_view(or_replace, true)?))
            }
            ("VIEW", _) => {
                take(1);
                Statement::CreateView(Box::new(self.create_view(or_replace, false)?))
            }
            ("SINK", _) if !or_replace => {
                take(1);
                Statement::CreateSink(Box::new(self.create_sink()?))
            }
            ("SUBSCRIPTION", _) if !or_replace => {
                take(1);
                Statement::CreateSubscription(Box::new(self.create_subscription()?))
            }
            ("INDEX", _) if !or_replace => {
                take(1);
                Statement::CreateIndex(Box::new(self.create_index(false)?))
            }
            ("UNIQUE", "INDEX") if !or_replace => {
                take(2);
                Statement::CreateIndex(Box::new(self.create_index(true)?))
            }
            ("SCHEMA", _) if !or_replace => {
                take(1);
                let if_not_exists = self.if_not_exists();
                Statement::CreateSchema { name: self.inner.parse_identifier()?, if_not_exists }
            }
            _ => return Ok(None),
        };
        Ok(Some(statement))
    }

    fn create_view(&mut self, or_replace: bool, materialized: bool) -> Result<CreateView> {
        let if_not_exists = self.if_not_exists();
        let name = self.inner.parse_object_name(false)?;
        let columns = if self.inner.peek_token_ref().token == Token::LParen {
            self.inner.parse_parenthesized(|p| p.parse_comma_separated(|p| p.parse_identifier()))?
        } else {
            Vec::new()
        };
        let options =
            if self.inner.parse_keyword(Keyword::WITH) { self.options()? } else { Vec::new() };
        self.inner.expect_keyword_is(Keyword::AS)?;
        let query = self.query_text()?;
        let with_data = if materialized { self.with_data()? } else { true };
        Ok(CreateView {
            name,
            materialized,
            or_replace,
            if_not_exists,
            columns,
            options,
            query,
            with_data,
            emit_on_window_close: false,
        })
    }

    fn create_index(&mut self, unique: bool) -> Result<CreateIndex> {
        let _ = self.take_words(&["CONCURRENTLY"]);
        let if_not_exists = self.if_not_exists();
        let name = match self.inner.peek_keyword(Keyword::ON) {
            true => None,
            false => Some(self.inner.parse_identifier()?),
        };
        self.inner.expect_keyword_is(Keyword::ON)?;
        let table = self.inner.parse_object_name(false)?;
        if self.take_words(&["USING"]) {
            self.inner.parse_identifier()?;
        }
        let columns = self.inner.parse_parenthesized(|p| {
            p.parse_comma_separated(|p| {
                let OrderByExpr { expr, options, with_fill: None } = p.parse_order_by_expr()?
                else {
                    let previous = p.get_current_token();
                    return p.expected_ref("a column of the index", previous);
                };
                let OrderByOptions { asc, nulls_first } = options;
                Ok((expr, asc.unwrap_or(true), nulls_first))
            })
        })?;
        let include = if self.take_words(&["INCLUDE"]) {
            self.inner.parse_parenthesized(|p| p.parse_comma_separated(|p| p.parse_identifier()))?
        } else {
            Vec::new()
        };
        Ok(CreateIndex { name, table, unique, if_not_exists, columns, include })
    }

    /// The kind after DROP, ALTER or SHOW CREATE, `skip` tokens ahead, and its number of words.
    fn peek_kind(&self, skip: usize) -> Option<(ObjectKind, usize)> {
        let word = |i: usize| match &self.inner.peek_nth_token_ref(skip + i).token {
            Token::Word(w) => w.value.to_ascii_uppercase(),
            _ => String::new(),
        };
        Some(match word(0).as_str() {
            "TABLE" => (ObjectKind::Table, 1),
            "SOURCE" => (ObjectKind::Source, 1),
            "VIEW" => (ObjectKind::View, 1),
            "MATERIALIZED" if word(1) == "VIEW" => (ObjectKind::MaterializedView, 2),
            "INDEX" => (ObjectKind::Index, 1),
            "SCHEMA" => (ObjectKind::Schema, 1),
            "SINK" => (ObjectKind::Sink, 1),
            "SUBSCRIPTION" => (ObjectKind::Subscription, 1),
            _ => return None,
        })
    }

    fn take(&mut self, tokens: usize) {
        (0..tokens).for_each(|_| self.inner.advance_token());
    }

    fn drop_statement(&mut self) -> Result<Option<Statement>> {
        let Some((kind, words)) = self.peek_kind(1) else { return Ok(None) };
        self.take(1 + words);
        if kind == ObjectKind::Index {
            let _ = self.take_words(&["CONCURRENTLY"]);
        }
        let if_exists = self.if_exists();
        let names = self.inner.parse_comma_separated(|p| p.parse_object_name(false))?;
        let cascade = self.cascade();
        Ok(Some(Statement::Drop(Drop { kind, names, if_exists, cascade })))
    }

    fn cascade(&mut self) -> bool {
        let cascade = self.take_words(&["CASCADE"]);
        if !cascade {
            let _ = self.take_words(&["RESTRICT"]);
        }
        cascade
    }

    /// ALTER of what sqlparser cannot parse or what has one meaning for all kinds; the rest of
    /// ALTER TABLE falls through.
    fn alter(&mut self) -> Result<Option<Statement>> {
        if self.peek_words(&["ALTER", "SYSTEM"]) {
            self.take(2);
            return Ok(Some(self.alter_system()?));
        }
        let Some((kind, words)) = self.peek_kind(1) else { return Ok(None) };
        let start = self.inner.get_current_index();
        self.take(1 + words);
        let if_exists = self.if_exists();
        let name = self.inner.parse_object_name(false)?;
        let action = if self.take_words(&["RENAME", "TO"]) {
            AlterAction::Rename(self.inner.parse_identifier()?)
        } else if self.take_words(&["SET", "SCHEMA"]) {
            AlterAction::SetSchema(self.inner.parse_identifier()?)
        } else if self.take_words(&["OWNER", "TO"]) {
            AlterAction::OwnerTo(self.inner.parse_identifier()?)
        } else if self.take_words(&["SET", "PARALLELISM"]) {
            let _ = self.inner.consume_token(&Token::Eq) || self.take_words(&["TO"]);
            let value = self.inner.next_token();
            AlterAction::SetParallelism(value.token.to_string())
        } else if self.take_words(&["SET"]) {
            AlterAction::SetOptions(self.options()?)
        } else if self.take_words(&["PAUSE"]) {
            AlterAction::Pause(true)
        } else if self.take_words(&["RESUME"]) {
            AlterAction::Pause(false)
        } else if kind != ObjectKind::Table && self.take_words(&["REBUILD"]) {
            AlterAction::Rebuild
        } else if kind == ObjectKind::Table {
            while self.inner.get_current_index() > start {
                self.inner.prev_token();
            }
            return Ok(None);
        } else {
            let next = self.inner.peek_token_ref();
            return self
                .inner
                .expected_ref("RENAME TO, SET, PAUSE, RESUME, REBUILD or OWNER TO", next);
        };
        Ok(Some(Statement::AlterRelation { kind, name, if_exists, action }))
    }

    fn alter_system(&mut self) -> Result<Statement> {
        if self.take_words(&["RESET"]) {
            return Ok(Statement::AlterSystem { name: self.option_name()?, value: None });
        }
        self.expect_words(&["SET"])?;
        let name = self.option_name()?;
        if !self.inner.consume_token(&Token::Eq) {
            self.expect_words(&["TO"])?;
        }
        let value = match self.take_words(&["DEFAULT"]) {
            true => None,
            false => Some(self.option_value()?),
        };
        Ok(Statement::AlterSystem { name, value })
    }

    fn truncate(&mut self) -> Result<Statement> {
        self.inner.advance_token();
        let _ = self.take_words(&["TABLE"]);
        let _ = self.take_words(&["ONLY"]);
        let tables = self.inner.parse_comma_separated(|p| p.parse_object_name(false))?;
        let _ =
            self.take_words(&["RESTART", "IDENTITY"]) || self.take_words(&["CONTINUE", "IDENTITY"]);
        Ok(Statement::Truncate { tables, cascade: self.cascade() })
    }

    fn cancel_jobs(&mut self) -> Result<Statement> {
        self.inner.advance_token();
        if !self.take_words(&["JOBS"]) {
            self.expect_words(&["JOB"])?;
        }
        let ids = self.inner.parse_comma_separated(|p| p.parse_literal_uint())?;
        Ok(Statement::CancelJobs(ids.into_iter().map(|id| id as u32).collect()))
    }

    fn from_schema(&mut self) -> Result<Option<Ident>> {
        if self.take_words(&["FROM"]) || self.take_words(&["IN"]) {
            Ok(Some(self.inner.parse_identifier()?))
        } else {
            Ok(None)
        }
    }

    fn show(&mut self) -> Result<Statement> {
        self.inner.advance_token();
        let show = if self.take_words(&["TABLES"]) {
            Show::Tables(self.from_schema()?)
        } else if self.take_words(&["SOURCES"]) {
            Show::Sources(self.from_schema()?)
        } else if self.take_words(&["MATERIALIZED", "VIEWS"]) {
            Show::MaterializedViews(self.from_schema()?)
        } else if self.take_words(&["VIEWS"]) {
            Show::Views(self.from_schema()?)
        } else if self.take_words(&["INDEXES"]) {
            let from = self.take_words(&["FROM"]) || self.take_words(&["ON"]);
            Show::Indexes(if from { Some(self.inner.parse_object_name(false)?) } else { None })
        } else if self.take_words(&["SINKS"]) {
            Show::Sinks(self.from_schema()?)
        } else if self.take_words(&["SUBSCRIPTIONS"]) {
            Show::Subscriptions(self.from_schema()?)
        } else if self.take_words(&["SUBSCRIPTION", "CURSORS"]) {
            Show::SubscriptionCursors
        } else if self.take_words(&["SCHEMAS"]) {
            Show::Schemas
        } else if self.take_words(&["DATABASES"]) {
            Show::Databases
        } else if self.take_words(&["JOBS"]) {
            Show::Jobs
        } else if self.take_words(&["COLUMNS", "FROM"]) {
            Show::Columns(self.inner.parse_object_name(false)?)
        } else if self.peek_words(&["CREATE"]) {
            self.inner.advance_token();
            let Some((kind, words)) = self.peek_kind(0) else {
                let next = self.inner.peek_token_ref();
                return self.inner.expected_ref("TABLE, SOURCE, VIEW or INDEX", next);
            };
            self.take(words);
            Show::Create(kind, self.inner.parse_object_name(false)?)
        } else if self.take_words(&["ALL"]) {
            Show::AllSettings
        } else if self.take_words(&["TIME", "ZONE"]) {
            Show::Setting("timezone".into())
        } else if self.take_words(&["TRANSACTION", "ISOLATION", "LEVEL"]) {
            Show::Setting("transaction_isolation".into())
        } else if self.take_words(&["SESSION", "AUTHORIZATION"]) {
            Show::Setting("session_authorization".into())
        } else {
            let name = self.inner.parse_object_name(false)?;
            Show::Setting(name.to_string().replace('"', "").to_lowercase())
        };
        Ok(Statement::Show(show))
    }

    fn explain(&mut self) -> Result<Statement> {
        self.inner.advance_token();
        let mut analyze = false;
        let mut verbose = false;
        let mut options = Vec::new();
        if self.inner.peek_token_ref().token == Token::LParen && !self.parenthesised_query(1) {
            options = self.explain_options()?;
            let on = |name: &str| {
                options
                    .iter()
                    .any(|(n, v)| n == name && !matches!(v.as_str(), "false" | "off" | "0"))
            };
            (analyze, verbose) = (on("analyze"), on("verbose"));
        }
        analyze |= self.take_words(&["ANALYZE"]) || self.take_words(&["ANALYSE"]);
        verbose |= self.take_words(&["VERBOSE"]);
        let job = |p: &mut Self| p.take_words(&["MATERIALIZED", "VIEW"]) || p.take_words(&["SINK"]);
        let target = if analyze && job(self) {
            ExplainTarget::Job(self.inner.parse_object_name(false)?)
        } else {
            let at = self.inner.peek_token_ref().clone();
            match self.statement()? {
                Statement::Sql(s) if matches!(*s, SqlStatement::Explain { .. }) => {
                    return self.inner.expected("a statement to explain", at);
                }
                Statement::Explain(_) => {
                    return self.inner.expected("a statement to explain", at);
                }
                statement => ExplainTarget::Statement(statement),
            }
        };
        Ok(Statement::Explain(Box::new(Explain { analyze, verbose, options, target })))
    }

    /// Whether a query starts at the nth token, perhaps behind more parentheses.
    fn parenthesised_query(&self, mut n: usize) -> bool {
        while self.inner.peek_nth_token_ref(n).token == Token::LParen {
            n += 1;
        }
        matches!(&self.inner.peek_nth_token_ref(n).token,
            Token::Word(w) if matches!(w.keyword, Keyword::SELECT | Keyword::WITH | Keyword::VALUES))
    }

    /// `(ANALYZE, COSTS off, FORMAT text)`
    fn explain_options(&mut self) -> Result<Vec<(String, String)>> {
        self.inner.parse_parenthesized(|p| {
            p.parse_comma_separated(|p| {
                let name = p.parse_identifier()?.value.to_lowercase();
                let value = match &p.peek_token_ref().token {
                    Token::Word(w) => w.value.to_lowercase(),
                    Token::SingleQuotedString(s) => s.to_lowercase(),
                    Token::Number(n, _) => n.clone(),
                    _ => return Ok((name, "true".into())),
                };
                p.advance_token();
                Ok((name, value))
            })
        })
    }
}
