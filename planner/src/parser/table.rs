//! CREATE TABLE and CREATE SOURCE: PostgreSQL's elements, and watermarks, options with dots,
//! APPEND ONLY, ON CONFLICT and FORMAT … ENCODE ….

use sqlparser::ast::{ColumnDef, ColumnOption, ColumnOptionDef, DataType, GeneratedAs};
use sqlparser::keywords::Keyword;
use sqlparser::tokenizer::{Location, Token};

use super::{Result, SqlParser};
use crate::ast::{ConflictAction, FormatClause, TableDefinition, WatermarkDefinition};

impl SqlParser<'_> {
    /// After CREATE [OR REPLACE] TABLE | SOURCE.
    pub(super) fn table_definition(&mut self, or_replace: bool) -> Result<TableDefinition> {
        let if_not_exists = self.if_not_exists();
        let name = self.inner.parse_object_name(false)?;
        let mut table = TableDefinition {
            name,
            or_replace,
            if_not_exists,
            columns: Vec::new(),
            constraints: Vec::new(),
            watermark: None,
            append_only: false,
            on_conflict: None,
            options: Vec::new(),
            format: None,
            includes: Vec::new(),
            query: None,
            with_data: true,
        };
        let mut untyped = None;
        if self.inner.consume_token(&Token::LParen) {
            untyped = self.table_elements(&mut table)?;
        }
        self.table_clauses(&mut table)?;
        match untyped {
            // Only a query gives names their types.
            Some(at) if table.query.is_none() => Err(super::located("", at)),
            _ => Ok(table),
        }
    }

    /// The elements in parentheses. Where the type of the first column without one is missing.
    fn table_elements(&mut self, table: &mut TableDefinition) -> Result<Option<Location>> {
        let mut untyped = None;
        if self.inner.consume_token(&Token::RParen) {
            return Ok(untyped);
        }
        loop {
            if self.peek_words(&["WATERMARK", "FOR"]) {
                if table.watermark.is_some() {
                    let next = self.inner.peek_token_ref();
                    return self.inner.expected_ref("only one watermark", next);
                }
                table.watermark = Some(self.watermark()?);
            } else if let Some(constraint) = self.inner.parse_optional_table_constraint()? {
                table.constraints.push(constraint);
            } else if self.peek_nth_word(1, "AS") {
                table.columns.push(self.computed_column()?);
            } else if matches!(self.inner.peek_nth_token_ref(1).token, Token::Comma | Token::RParen)
            {
                let name = self.inner.parse_identifier()?;
                untyped.get_or_insert(self.inner.peek_token_ref().span.start);
                table.columns.push(ColumnDef {
                    name,
                    data_type: DataType::Unspecified,
                    options: Vec::new(),
                });
            } else {
                table.columns.push(self.column_definition()?);
            }
            if self.inner.consume_token(&Token::Comma) {
                continue;
            }
            self.inner.expect_token(&Token::RParen)?;
            return Ok(untyped);
        }
    }

    /// column type [options], and `column type AS expr`: a generated column of that type.
    fn column_definition(&mut self) -> Result<ColumnDef> {
        let mut column = self.inner.parse_column_def()?;
        // The parser beneath takes an AS for which it then has no use.
        let taken = super::is_word(&self.inner.get_current_token().token, "AS");
        if taken || self.take_words(&["AS"]) {
            column.options.push(self.generation()?);
        }
        Ok(column)
    }

    /// column AS expr: a generated column of the expression's type.
    fn computed_column(&mut self) -> Result<ColumnDef> {
        let name = self.inner.parse_identifier()?;
        self.inner.expect_keyword_is(Keyword::AS)?;
        let options = vec![self.generation()?];
        Ok(ColumnDef { name, data_type: DataType::Unspecified, options })
    }

    /// The expression after AS.
    fn generation(&mut self) -> Result<ColumnOptionDef> {
        let option = ColumnOption::Generated {
            generated_as: GeneratedAs::Always,
            sequence_options: None,
            generation_expr: Some(self.inner.parse_expr()?),
            generation_expr_mode: None,
            generated_keyword: false,
        };
        Ok(ColumnOptionDef { name: None, option })
    }

    fn peek_nth_word(&self, n: usize, word: &str) -> bool {
        super::is_word(&self.inner.peek_nth_token_ref(n).token, word)
    }

    /// WATERMARK FOR column AS expr
    fn watermark(&mut self) -> Result<WatermarkDefinition> {
        self.expect_words(&["WATERMARK", "FOR"])?;
        let column = self.inner.parse_identifier()?;
        self.inner.expect_keyword_is(Keyword::AS)?;
        let (expr, text) = self.expr_text()?;
        Ok(WatermarkDefinition { column, expr, text })
    }

    fn table_clauses(&mut self, table: &mut TableDefinition) -> Result<()> {
        loop {
            if self.take_words(&["APPEND", "ONLY"]) {
                table.append_only = true;
            } else if self.take_words(&["ON", "CONFLICT"]) {
                table.on_conflict = Some(self.conflict_action()?);
            } else if self.peek_words(&["WITH"]) {
                self.inner.advance_token();
                table.options = self.options()?;
            } else if self.take_words(&["FORMAT"]) {
                table.format = Some(self.format_clause()?);
            } else if self.take_words(&["INCLUDE"]) {
                let fact = self.inner.parse_identifier()?.value.to_lowercase();
                let name = match self.inner.parse_keyword(Keyword::AS) {
                    true => Some(self.inner.parse_identifier()?),
                    false => None,
                };
                table.includes.push((fact, name));
            } else if self.inner.parse_keyword(Keyword::AS) {
                table.query = Some(self.query_text()?);
                table.with_data = self.with_data()?;
            } else {
                return Ok(());
            }
        }
    }

    /// `WITH [NO] DATA` after a query.
    pub(super) fn with_data(&mut self) -> Result<bool> {
        if !self.peek_words(&["WITH"]) {
            return Ok(true);
        }
        self.inner.advance_token();
        let with = !self.take_words(&["NO"]);
        self.expect_words(&["DATA"])?;
        Ok(with)
    }

    fn conflict_action(&mut self) -> Result<ConflictAction> {
        let _ = self.take_words(&["DO"]);
        if self.take_words(&["OVERWRITE"]) || self.take_words(&["UPDATE", "FULL"]) {
            Ok(ConflictAction::Overwrite)
        } else if self.take_words(&["IGNORE"]) || self.take_words(&["NOTHING"]) {
            Ok(ConflictAction::Ignore)
        } else {
            self.inner.expected_ref("OVERWRITE or IGNORE", self.inner.peek_token_ref())
        }
    }

    /// FORMAT name ENCODE name [(options)]
    fn format_clause(&mut self) -> Result<FormatClause> {
        let format = self.inner.parse_identifier()?.value.to_uppercase();
        self.expect_words(&["ENCODE"])?;
        let encode = self.inner.parse_identifier()?.value.to_uppercase();
        let options = if self.inner.peek_token_ref().token == Token::LParen {
            self.options()?
        } else {
            Vec::new()
        };
        Ok(FormatClause { format, encode, options })
    }

    /// `(dotted.name = value, …)`
    pub(super) fn options(&mut self) -> Result<Vec<(String, String)>> {
        self.inner.expect_token(&Token::LParen)?;
        let mut options: Vec<(String, String)> = Vec::new();
        while !self.inner.consume_token(&Token::RParen) {
            if !options.is_empty() {
                self.inner.expect_token(&Token::Comma)?;
            }
            let name = self.option_name()?;
            if options.iter().any(|(n, _)| *n == name) {
                let previous = self.inner.get_current_token();
                return self.inner.expected_ref("each option once", previous);
            }
            self.inner.expect_token(&Token::Eq)?;
            options.push((name, self.option_value()?));
        }
        Ok(options)
    }

    pub(super) fn option_name(&mut self) -> Result<String> {
        let mut name = String::new();
        loop {
            let next = self.inner.next_token();
            match next.token {
                Token::Word(w) if w.quote_style.is_some() => name.push_str(&w.value),
                Token::Word(w) => name.push_str(&w.value.to_lowercase()),
                Token::SingleQuotedString(s) if name.is_empty() => name = s,
                _ => return self.inner.expected("an option name", next),
            }
            let separator = match self.inner.peek_token_ref().token {
                Token::Period => '.',
                Token::Minus => '-',
                _ => return Ok(name),
            };
            self.inner.advance_token();
            name.push(separator);
        }
    }

    pub(super) fn option_value(&mut self) -> Result<String> {
        let next = self.inner.next_token();
        match next.token {
            Token::SingleQuotedString(s) | Token::EscapedStringLiteral(s) => Ok(s),
            Token::DollarQuotedString(s) => Ok(s.value),
            Token::Number(n, _) => Ok(n),
            Token::Minus => Ok(format!("-{}", self.option_value()?)),
            Token::Word(w) => Ok(w.value),
            _ => self.inner.expected("an option value", next),
        }
    }
}
