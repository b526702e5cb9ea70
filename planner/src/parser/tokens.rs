//! What is done to a text's tokens before sqlparser reads them: signs and clauses that it does not know.

use millrace_common::{SqlError, SqlState};
use sqlparser::keywords::Keyword;
use sqlparser::tokenizer::{Location, Token, TokenWithSpan, Tokenizer, Whitespace};

use super::dialect::MillraceDialect;
use super::{Source, is_word};

/// Words that PostgreSQL reserves and sqlparser takes for names.
const RESERVED: [&str; 20] = [
    "WHERE",
    "GROUP",
    "HAVING",
    "ORDER",
    "LIMIT",
    "OFFSET",
    "FETCH",
    "UNION",
    "INTERSECT",
    "EXCEPT",
    "ON",
    "USING",
    "FROM",
    "AND",
    "OR",
    "THEN",
    "WHEN",
    "END",
    "RETURNING",
    "WINDOW",
];

fn is_reserved(token: &Token) -> bool {
    RESERVED.iter().any(|w| is_word(token, w))
}

/// Puts string constants together that go on in a next line; on the same line that is an error.
pub(super) fn join_strings(
    tokens: &mut Vec<TokenWithSpan>,
    source: &Source<'_>,
) -> Result<(), SqlError> {
    let is_string = |t: &TokenWithSpan| matches!(t.token, Token::SingleQuotedString(_));
    let is_space = |t: &TokenWithSpan| matches!(t.token, Token::Whitespace(_));
    let ends_line = |t: &TokenWithSpan| {
        matches!(
            t.token,
            Token::Whitespace(Whitespace::Newline | Whitespace::SingleLineComment { .. })
        )
    };
    let mut at = 0;
    while at < tokens.len() {
        let next = tokens[at + 1..].iter().position(|t| !is_space(t)).map(|n| at + 1 + n);
        let Some(next) = next.filter(|&next| is_string(&tokens[at]) && is_string(&tokens[next]))
        else {
            at += 1;
            continue;
        };
        let span = tokens[next].span;
        if !tokens[at + 1..next].iter().any(ends_line) {
            let near = source.slice(span.start, span.end);
            let message = format!("syntax error at or near \"{near}\"");
            return Err(SqlError::new(SqlState::SYNTAX_ERROR, message)
                .with_position(source.chars_before(span.start) as u32 + 1));
        }
        let rest = match tokens.drain(at + 1..=next).next_back() {
            Some(TokenWithSpan { token: Token::SingleQuotedString(rest), .. }) => rest,
            _ => String::new(),
        };
        if let Token::SingleQuotedString(text) = &mut tokens[at].token {
            text.push_str(&rest);
        }
        tokens[at].span.end = span.end;
    }
    Ok(())
}

/// Makes plain names of the words that have a meaning in other dialects of sqlparser and none in ours.
pub(super) fn free_words(tokens: &mut [TokenWithSpan]) {
    use Keyword as K;
    for t in tokens {
        if let Token::Word(word) = &mut t.token
            && matches!(
                word.keyword,
                K::TOP
                    | K::SETTINGS
                    | K::SAMPLE
                    | K::MATCH
                    | K::CLUSTER
                    | K::DISTRIBUTE
                    | K::SORT
                    | K::MINUS
                    | K::PIVOT
                    | K::UNPIVOT
                    | K::GLOBAL
                    | K::CONNECT
                    | K::OPEN
                    | K::PREWHERE
                    | K::EXCLUDE
            )
        {
            word.keyword = K::NoKeyword;
        }
    }
}

/// Spells `TABLE t` out as `SELECT * FROM t` where a query may begin.
pub(super) fn spell_out_tables(tokens: &mut Vec<TokenWithSpan>) {
    if !tokens.iter().any(|t| is_word(&t.token, "TABLE")) {
        return;
    }
    const BEFORE: [&str; 6] = ["AS", "UNION", "INTERSECT", "EXCEPT", "ALL", "EXPLAIN"];
    let word = |i: usize| tokens[i..].iter().find(|t| !matches!(t.token, Token::Whitespace(_)));
    let mut before: Option<&Token> = None;
    let mut found = Vec::new();
    for (i, t) in tokens.iter().enumerate() {
        if matches!(t.token, Token::Whitespace(_)) {
            continue;
        }
        let begins = match before {
            None | Some(Token::SemiColon | Token::LParen) => true,
            Some(before) => BEFORE.iter().any(|w| is_word(before, w)),
        };
        let named = |t: &TokenWithSpan| matches!(t.token, Token::Word(_)) && !is_reserved(&t.token);
        if begins && is_word(&t.token, "TABLE") && word(i + 1).is_some_and(named) {
            found.push(i);
        }
        before = Some(&t.token);
    }
    let spelled: Vec<Token> =
        Tokenizer::new(&MillraceDialect::default(), "SELECT * FROM").tokenize().unwrap_or_default();
    for at in found.into_iter().rev() {
        let span = tokens[at].span;
        let new = spelled.iter().cloned().map(|token| TokenWithSpan { token, span });
        tokens.splice(at..=at, new);
    }
}

/// Takes a sign off the end of an operator, as PostgreSQL does: `a>-5` is `a > -5`. Operators with special characters
/// keep it.
pub(super) fn part_signs(tokens: Vec<TokenWithSpan>) -> Vec<TokenWithSpan> {
    let mut parted = Vec::with_capacity(tokens.len());
    for token in tokens {
        let Token::CustomBinaryOperator(text) = &token.token else {
            parted.push(token);
            continue;
        };
        let head = text.trim_end_matches(['+', '-']);
        let signs = &text[head.len()..];
        let sign = |c| if c == '+' { Token::Plus } else { Token::Minus };
        let (operator, signs) = match head {
            "" => (text.chars().next().map_or(Token::EOF, sign), &signs[1..]),
            ">" => (Token::Gt, signs),
            "<" => (Token::Lt, signs),
            ">=" => (Token::GtEq, signs),
            "<=" => (Token::LtEq, signs),
            "<>" => (Token::Neq, signs),
            "=" => (Token::Eq, signs),
            "*" => (Token::Mul, signs),
            "/" => (Token::Div, signs),
            "->" => (Token::Arrow, signs),
            "->>" => (Token::LongArrow, signs),
            _ => {
                parted.push(token);
                continue;
            }
        };
        let span = token.span;
        parted.push(TokenWithSpan { token: operator, span });
        parted.extend(signs.chars().map(|c| TokenWithSpan { token: sign(c), span }));
    }
    parted
}

/// Where a keyword that PostgreSQL reserves stands right after FROM or JOIN, in the place of a relation:
/// sqlparser takes it for a name.
pub(super) fn missing_relation(tokens: &[TokenWithSpan]) -> Option<Location> {
    let mut words = tokens.iter().filter(|t| !matches!(t.token, Token::Whitespace(_))).peekable();
    while let Some(t) = words.next() {
        let expects = is_word(&t.token, "FROM") || is_word(&t.token, "JOIN");
        if expects
            && let Some(next) = words.peek()
            && is_reserved(&next.token)
        {
            return Some(next.span.start);
        }
    }
    None
}

/// Blanks every `EMIT ON WINDOW CLOSE` (sqlparser would take EMIT for an alias) and returns where
/// each began.
pub(super) fn take_emit_clauses(tokens: &mut [TokenWithSpan]) -> Vec<Location> {
    let words: Vec<usize> =
        (0..tokens.len()).filter(|&i| !matches!(tokens[i].token, Token::Whitespace(_))).collect();
    let mut found = Vec::new();
    for four in words.windows(4) {
        let clause = ["EMIT", "ON", "WINDOW", "CLOSE"];
        if four.iter().zip(clause).all(|(&i, w)| is_word(&tokens[i].token, w)) {
            found.push(tokens[four[0]].span.start);
            for &i in four {
                tokens[i].token = Token::Whitespace(Whitespace::Space);
            }
        }
    }
    found
}

/// Blanks every `EXCLUDE NO OTHERS` at the end of a window frame, which changes nothing; other exclusions
/// are not supported. sqlparser knows none of them.
pub(super) fn take_frame_exclusions(
    tokens: &mut [TokenWithSpan],
    source: &Source<'_>,
) -> Result<(), SqlError> {
    const CLAUSES: [(&[&str], bool); 4] = [
        (&["EXCLUDE", "NO", "OTHERS"], true),
        (&["EXCLUDE", "CURRENT", "ROW"], false),
        (&["EXCLUDE", "GROUP"], false),
        (&["EXCLUDE", "TIES"], false),
    ];
    let words: Vec<usize> =
        (0..tokens.len()).filter(|&i| !matches!(tokens[i].token, Token::Whitespace(_))).collect();
    for at in 0..words.len() {
        for (clause, harmless) in CLAUSES {
            let Some(end) = words.get(at + clause.len()) else { continue };
            let found = &words[at..at + clause.len()];
            let same = found.iter().zip(clause).all(|(&i, w)| is_word(&tokens[i].token, w));
            if !same || tokens[*end].token != Token::RParen {
                continue;
            }
            if !harmless {
                let start = tokens[words[at]].span.start;
                return Err(SqlError::unsupported(format!(
                    "{} in a window frame",
                    clause.join(" ")
                ))
                .with_position(source.chars_before(start) as u32 + 1));
            }
            found.iter().for_each(|&i| tokens[i].token = Token::Whitespace(Whitespace::Space));
        }
    }
    Ok(())
}
