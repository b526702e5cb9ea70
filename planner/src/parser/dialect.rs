//! PostgreSQL's dialect, with the table versions of streaming SQL.
//!
//! sqlparser asks a dialect for its `TypeId` in many places; ours answers with PostgreSQL's, and
//! delegates every method that PostgreSQL's dialect overrides.

use std::any::TypeId;
use std::cell::{Cell, OnceCell};

use millrace_common::SqlError;
use millrace_functions::interrupt;
use sqlparser::ast::{BinaryOperator, Expr, UnaryOperator};
use sqlparser::dialect::{Dialect, PostgreSqlDialect, Precedence};
use sqlparser::keywords::Keyword;
use sqlparser::parser::{Parser, ParserError};
use sqlparser::tokenizer::Token;

use crate::bind::desugar::{plain_call, size};

/// COLLATE's precedence in PostgreSQL's dialect of sqlparser, which does not name it.
const COLLATE_PREC: u8 = 120;
/// That of operators without one of their own.
const OPERATOR_PREC: u8 = 70;

#[derive(Debug, Default)]
pub struct MillraceDialect {
    base: PostgreSqlDialect,
    /// `t FOR SYSTEM_TIME AS OF …`. Only on for text that says SYSTEM_TIME, because it makes
    /// ordinary aliases (`at`, `before`, `changes`) special.
    pub table_versions: bool,
    work: Work,
}

/// What parsing a text has cost, in expressions begun or copied. Where one reading of a word fails the parser tries
/// another, so an error within calls within calls would be found twice as often at every level.
#[derive(Debug, Default)]
struct Work {
    done: Cell<usize>,
    most: Cell<usize>,
    /// How the statement has ended, if it has. To be asked again is too late: memory that was missing is free once the tree is
    /// dropped.
    ended: OnceCell<SqlError>,
}

impl Work {
    /// What a text of any size may cost.
    const SMALL: usize = 100_000;
    /// What each of its words adds.
    const WORD: usize = 32;
    /// What an expression takes, about.
    const BYTES: usize = 512;

    fn add(&self, steps: usize) -> Result<(), ParserError> {
        self.done.set(self.done.get().saturating_add(steps));
        if let Err(e) = interrupt::step(steps.saturating_mul(Work::BYTES)) {
            self.ended.get_or_init(|| e);
        }
        // A statement that has ended is told from one that is too complex where the error is worded.
        match self.is_spent() || self.ended.get().is_some() {
            true => Err(ParserError::RecursionLimitExceeded),
            false => Ok(()),
        }
    }

    fn is_spent(&self) -> bool {
        self.done.get() > self.most.get().max(Work::SMALL)
    }
}

impl MillraceDialect {
    /// Lets a text of so many words cost what it should need at most.
    pub fn allow(&self, words: usize) {
        self.work.most.set(words.saturating_mul(Work::WORD));
    }

    /// How the statement ended while it was parsed, if it did.
    pub fn ended(&self) -> Option<SqlError> {
        self.work.ended.get().cloned().or_else(|| interrupt::check().err())
    }

    /// Whether a text has cost more than it may; its errors say nothing then.
    pub fn is_spent(&self) -> bool {
        self.work.is_spent()
    }
}

/// `x ISNULL` is `x IS NULL`. sqlparser knows only its opposite.
const ISNULL: &str = "ISNULL";

/// The call that stands for `VARIADIC array` as an argument.
pub(crate) const VARIADIC: &str = "variadic";

fn begins_variadic(parser: &Parser) -> bool {
    let next = &parser.peek_nth_token_ref(1).token;
    super::is_word(&parser.peek_token_ref().token, VARIADIC)
        && matches!(
            next,
            Token::Word(_) | Token::SingleQuotedString(_) | Token::LParen | Token::Placeholder(_)
        )
}

fn parse_symmetric(
    parser: &mut Parser,
    e: &Expr,
    negated: bool,
    precedence: u8,
    work: &Work,
) -> Result<Expr, ParserError> {
    let low = parser.parse_subexpr(precedence)?;
    parser.expect_keyword(Keyword::AND)?;
    let high = parser.parse_subexpr(precedence)?;
    // Each stands in what it becomes twice.
    [e, &low, &high].into_iter().try_for_each(|part| work.add(size(part)))?;
    let between = |low: &Expr, high: &Expr| {
        Box::new(Expr::Nested(Box::new(Expr::Between {
            expr: Box::new(e.clone()),
            negated: false,
            low: Box::new(low.clone()),
            high: Box::new(high.clone()),
        })))
    };
    let either = Expr::Nested(Box::new(Expr::BinaryOp {
        left: between(&low, &high),
        op: BinaryOperator::Or,
        right: between(&high, &low),
    }));
    Ok(match negated {
        true => Expr::UnaryOp { op: UnaryOperator::Not, expr: Box::new(either) },
        false => either,
    })
}

/// `x IN ((SELECT …), y)`: of a list the first item may be a subquery, which sqlparser takes for the whole.
fn parse_in(parser: &mut Parser, expr: &Expr, negated: bool) -> Result<Expr, ParserError> {
    parser.expect_token(&Token::LParen)?;
    let whole = parser.maybe_parse(|p| {
        let query = p.parse_query()?;
        p.expect_token(&Token::RParen)?;
        Ok(query)
    })?;
    let expr = Box::new(expr.clone());
    if let Some(subquery) = whole {
        return Ok(Expr::InSubquery { expr, subquery, negated });
    }
    let list = parser.parse_comma_separated(Parser::parse_expr)?;
    parser.expect_token(&Token::RParen)?;
    Ok(Expr::InList { expr, list, negated })
}

/// `None`: another kind of IS.
fn parse_distinct(
    parser: &mut Parser,
    left: &Expr,
    precedence: u8,
) -> Option<Result<Expr, ParserError>> {
    let distinct = [Keyword::IS, Keyword::DISTINCT, Keyword::FROM];
    let not_distinct = [Keyword::IS, Keyword::NOT, Keyword::DISTINCT, Keyword::FROM];
    let differ = parser.parse_keywords(&distinct);
    if !differ && !parser.parse_keywords(&not_distinct) {
        return None;
    }
    let left = Box::new(left.clone());
    Some(parser.parse_subexpr(precedence).map(|right| match differ {
        true => Expr::IsDistinctFrom(left, Box::new(right)),
        false => Expr::IsNotDistinctFrom(left, Box::new(right)),
    }))
}

macro_rules! delegate_flags {
    ($($name:ident),* $(,)?) => {
        $(fn $name(&self) -> bool { self.base.$name() })*
    };
}

impl Dialect for MillraceDialect {
    fn dialect(&self) -> TypeId {
        self.base.dialect()
    }

    fn supports_table_versioning(&self) -> bool {
        self.table_versions
    }

    fn supports_named_fn_args_with_assignment_operator(&self) -> bool {
        true
    }

    fn identifier_quote_style(&self, identifier: &str) -> Option<char> {
        self.base.identifier_quote_style(identifier)
    }

    fn is_delimited_identifier_start(&self, ch: char) -> bool {
        self.base.is_delimited_identifier_start(ch)
    }

    fn is_identifier_start(&self, ch: char) -> bool {
        self.base.is_identifier_start(ch)
    }

    fn is_identifier_part(&self, ch: char) -> bool {
        self.base.is_identifier_part(ch)
    }

    /// A sign binds tighter than every operator but `::`, subscripts and fields: `-2 ^ 2` is 4. Other prefix operators bind
    /// weaker than arithmetic: `~1 + 1` is -3. `VARIADIC array` becomes a call of that name.
    fn parse_prefix(&self, parser: &mut Parser) -> Option<Result<Expr, ParserError>> {
        if let Err(e) = self.work.add(1) {
            return Some(Err(e));
        }
        if begins_variadic(parser) {
            parser.advance_token();
            return Some(parser.parse_expr().map(|array| plain_call(VARIADIC, [array])));
        }
        let (op, precedence) = match parser.peek_token_ref().token {
            Token::Minus => (UnaryOperator::Minus, COLLATE_PREC),
            Token::Plus => (UnaryOperator::Plus, COLLATE_PREC),
            Token::Tilde => (UnaryOperator::BitwiseNot, OPERATOR_PREC),
            Token::AtSign => (UnaryOperator::PGAbs, OPERATOR_PREC),
            Token::PGSquareRoot => (UnaryOperator::PGSquareRoot, OPERATOR_PREC),
            Token::PGCubeRoot => (UnaryOperator::PGCubeRoot, OPERATOR_PREC),
            _ => return None,
        };
        parser.advance_token();
        let operand = parser.parse_subexpr(precedence);
        Some(operand.map(|expr| Expr::UnaryOp { op, expr: Box::new(expr) }))
    }

    /// `x [NOT] BETWEEN SYMMETRIC a AND b`: the bounds in either order. `x [NOT] IN ((SELECT …), y)`: a list. `x IS [NOT] DISTINCT FROM y`, whose right operand ends
    /// before AND and OR.
    fn parse_infix(
        &self,
        parser: &mut Parser,
        expr: &Expr,
        _precedence: u8,
    ) -> Option<Result<Expr, ParserError>> {
        let word = |t: &Token, text: &str| matches!(t, Token::Word(w) if w.quote_style.is_none() && w.value.eq_ignore_ascii_case(text));
        if word(&parser.peek_nth_token(0).token, "IS") {
            return parse_distinct(parser, expr, self.prec_value(Precedence::Is));
        }
        if word(&parser.peek_nth_token(0).token, ISNULL) {
            parser.advance_token();
            return Some(Ok(Expr::IsNull(Box::new(expr.clone()))));
        }
        let negated = word(&parser.peek_nth_token(0).token, "NOT");
        let at = usize::from(negated);
        let opens = |n| parser.peek_nth_token_ref(n).token == Token::LParen;
        if word(&parser.peek_nth_token(at).token, "IN") && opens(at + 1) && opens(at + 2) {
            (0..=at).for_each(|_| drop(parser.next_token()));
            return Some(parse_in(parser, expr, negated));
        }
        if !word(&parser.peek_nth_token(at).token, "BETWEEN")
            || !word(&parser.peek_nth_token(at + 1).token, "SYMMETRIC")
        {
            return None;
        }
        (0..at + 2).for_each(|_| drop(parser.next_token()));
        let precedence = self.prec_value(Precedence::Between);
        Some(parse_symmetric(parser, expr, negated, precedence, &self.work))
    }

    /// What PostgreSQL reserves and begins an expression is nothing else: read once, also where there is a mistake in it.
    fn is_reserved_for_identifier(&self, kw: Keyword) -> bool {
        matches!(kw, Keyword::CASE | Keyword::CAST | Keyword::NOT)
            || self.base.is_reserved_for_identifier(kw)
    }

    fn is_custom_operator_part(&self, ch: char) -> bool {
        self.base.is_custom_operator_part(ch)
    }

    fn get_next_precedence(&self, parser: &Parser) -> Option<Result<u8, ParserError>> {
        if super::is_word(&parser.peek_token_ref().token, ISNULL) {
            return Some(Ok(self.prec_value(Precedence::Is)));
        }
        self.base.get_next_precedence(parser)
    }

    fn prec_value(&self, prec: Precedence) -> u8 {
        self.base.prec_value(prec)
    }

    delegate_flags!(
        supports_unicode_string_literal,
        supports_filter_during_aggregation,
        supports_group_by_expr,
        allow_extract_custom,
        allow_extract_single_quotes,
        supports_create_index_with_clause,
        supports_explain_with_utility_options,
        supports_listen_notify,
        supports_factorial_operator,
        supports_bitwise_shift_operators,
        supports_comment_on,
        supports_load_extension,
        supports_named_fn_args_with_colon_operator,
        supports_empty_projections,
        supports_nested_comments,
        supports_string_escape_constant,
        supports_numeric_literal_underscores,
        supports_array_typedef_with_brackets,
        supports_geometric_types,
        supports_set_names,
        supports_alter_column_type_using,
        supports_notnull_operator,
        supports_interval_options,
        supports_insert_table_alias,
        supports_create_table_like_parenthesized,
        supports_comma_separated_trim,
        supports_xml_expressions,
        supports_comment_optimizer_hint,
    );
}
