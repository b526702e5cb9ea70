//! What is done to a text's tokens before sqlparser reads them: signs and clauses that it does not know.

use millrace_common::{SqlError, SqlState};
use millrace_functions::window_fn::EXCLUDE;
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
        // Nothing is looked for behind other tokens: each blank of a long line would look for its end.
        let next = match is_string(&tokens[at]) {
            true => tokens[at + 1..].iter().position(|t| !is_space(t)).map(|n| at + 1 + n),
            false => None,
        };
        let Some(next) = next.filter(|&next| is_string(&tokens[next])) else {
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

/// Blanks words that change nothing: ONLY before a table, since no table has descendants, and FROM right behind
/// `trim(LEADING`, where nothing says what to trim.
pub(super) fn blank_noise(tokens: &mut [TokenWithSpan]) {
    if !tokens.iter().any(|t| is_word(&t.token, "ONLY") || is_word(&t.token, "TRIM")) {
        return;
    }
    let words: Vec<usize> =
        (0..tokens.len()).filter(|&i| !matches!(tokens[i].token, Token::Whitespace(_))).collect();
    let any = |token: &Token, of: &[&str]| of.iter().any(|word| is_word(token, word));
    let mut blank = Vec::new();
    for four in words.windows(4) {
        let [trim, open, side, from] = [0, 1, 2, 3].map(|i| &tokens[four[i]].token);
        if !is_word(trim, "TRIM") || *open != Token::LParen {
            continue;
        }
        if is_word(side, "FROM") {
            blank.push(four[2]);
        } else if any(side, &["LEADING", "TRAILING", "BOTH"]) && is_word(from, "FROM") {
            blank.push(four[3]);
        }
    }
    for three in words.windows(3) {
        let [before, only, table] = [0, 1, 2].map(|i| &tokens[three[i]].token);
        let before = *before == Token::Comma
            || any(before, &["FROM", "JOIN", "UPDATE", "TABLE", "TRUNCATE"]);
        if before && is_word(only, "ONLY") && matches!(table, Token::Word(_)) {
            blank.push(three[1]);
        }
    }
    for at in blank {
        tokens[at].token = Token::Whitespace(Whitespace::Space);
    }
}

/// Blanks what standard SQL writes around the arguments of a window function in FROM:
/// `TUMBLE(TABLE t, DESCRIPTOR(ts), size)` is `TUMBLE(t, ts, size)`.
pub(super) fn plain_windows(tokens: &mut [TokenWithSpan]) {
    const WINDOWS: [&str; 3] = ["TUMBLE", "HOP", "SESSION"];
    if !tokens.iter().any(|t| WINDOWS.iter().any(|w| is_word(&t.token, w))) {
        return;
    }
    let words: Vec<usize> =
        (0..tokens.len()).filter(|&i| !matches!(tokens[i].token, Token::Whitespace(_))).collect();
    let mut blank = Vec::new();
    for (n, three) in words.windows(3).enumerate() {
        let [function, open, table] = [0, 1, 2].map(|i| &tokens[three[i]].token);
        let window = WINDOWS.iter().any(|w| is_word(function, w)) && *open == Token::LParen;
        if window && is_word(table, "TABLE") {
            blank.push(three[2]);
            blank.extend(descriptor(tokens, &words[n + 3..]));
        }
    }
    for at in blank {
        tokens[at].token = Token::Whitespace(Whitespace::Space);
    }
}

/// What to blank of `DESCRIPTOR(column)` among the arguments that begin at the first of `words`.
fn descriptor(tokens: &[TokenWithSpan], words: &[usize]) -> Vec<usize> {
    let mut depth = 0usize;
    for (n, &at) in words.iter().enumerate() {
        match &tokens[at].token {
            Token::LParen => depth += 1,
            Token::RParen if depth == 0 => break,
            Token::RParen => depth -= 1,
            word if depth == 0 && is_word(word, "DESCRIPTOR") => {
                let Some(&[open, column, close]) = words.get(n + 1..n + 4) else { break };
                let named = matches!(tokens[column].token, Token::Word(_));
                let enclosed =
                    tokens[open].token == Token::LParen && tokens[close].token == Token::RParen;
                return if named && enclosed { vec![at, open, close] } else { Vec::new() };
            }
            _ => {}
        }
    }
    Vec::new()
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

/// Blanks the parentheses of `(t).*` in a list of outputs, which sqlparser does not know: it is `t.*`.
pub(super) fn bare_rows(tokens: &mut [TokenWithSpan]) {
    const BEFORE: [&str; 4] = ["SELECT", "ALL", "DISTINCT", "RETURNING"];
    let words: Vec<usize> =
        (0..tokens.len()).filter(|&i| !matches!(tokens[i].token, Token::Whitespace(_))).collect();
    for six in words.windows(6) {
        let [before, open, name, close, dot, star] =
            [0, 1, 2, 3, 4, 5].map(|n| &tokens[six[n]].token);
        let begins = *before == Token::Comma || BEFORE.iter().any(|w| is_word(before, w));
        let row = matches!(
            (open, close, dot, star),
            (Token::LParen, Token::RParen, Token::Period, Token::Mul)
        );
        if begins && row && matches!(name, Token::Word(_)) {
            tokens[six[1]].token = Token::Whitespace(Whitespace::Space);
            tokens[six[3]].token = Token::Whitespace(Whitespace::Space);
        }
    }
}

/// Takes a sign off the end of an operator, as PostgreSQL does: `a>-5` is `a > -5`. Operators with special characters
/// keep it.
pub(super) fn part_signs(tokens: Vec<TokenWithSpan>) -> Vec<TokenWithSpan> {
    if !tokens.iter().any(|t| matches!(t.token, Token::CustomBinaryOperator(_))) {
        return tokens;
    }
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

/// Puts the string that an offset of a window frame begins with into parentheses: sqlparser would take it
/// for an interval, and nothing but that.
pub(super) fn enclose_offsets(tokens: &mut Vec<TokenWithSpan>) {
    let words: Vec<usize> =
        (0..tokens.len()).filter(|&i| !matches!(tokens[i].token, Token::Whitespace(_))).collect();
    let is_any = |at: usize, words: &[&str]| words.iter().any(|w| is_word(&tokens[at].token, w));
    let is_offset = |three: &&[usize]| {
        let &[before, string, behind] = *three else { return false };
        matches!(tokens[string].token, Token::SingleQuotedString(_))
            && (is_any(before, &["ROWS", "RANGE", "GROUPS"])
                || is_any(before, &["BETWEEN", "AND"])
                    && is_any(behind, &["PRECEDING", "FOLLOWING"]))
    };
    let found: Vec<usize> = words.windows(3).filter(is_offset).map(|three| three[1]).collect();
    if found.is_empty() {
        return;
    }
    let mut found = found.into_iter().peekable();
    let mut enclosed = Vec::with_capacity(tokens.len());
    for (at, token) in std::mem::take(tokens).into_iter().enumerate() {
        let span = token.span;
        match found.next_if_eq(&at) {
            Some(_) => enclosed.extend([
                TokenWithSpan { token: Token::LParen, span },
                token,
                TokenWithSpan { token: Token::RParen, span },
            ]),
            None => enclosed.push(token),
        }
    }
    *tokens = enclosed;
}

/// Writes `interval(n) 'text'` as the cast that it is: sqlparser would lose the precision.
pub(super) fn cast_intervals(tokens: &mut Vec<TokenWithSpan>) {
    let words: Vec<usize> =
        (0..tokens.len()).filter(|&i| !matches!(tokens[i].token, Token::Whitespace(_))).collect();
    let is_literal = |five: &&[usize]| {
        let &[interval, open, digits, close, string] = *five else { return false };
        is_word(&tokens[interval].token, "INTERVAL")
            && tokens[open].token == Token::LParen
            && matches!(tokens[digits].token, Token::Number(..))
            && tokens[close].token == Token::RParen
            && matches!(tokens[string].token, Token::SingleQuotedString(_))
    };
    let mut found: Vec<Vec<usize>> =
        words.windows(5).filter(is_literal).map(<[usize]>::to_vec).collect();
    // From the end, so that what is found stays where it is.
    while let Some(five) = found.pop() {
        let (Some(&first), Some(&last)) = (five.first(), five.last()) else { continue };
        let string = tokens.remove(last);
        let span = string.span;
        tokens.splice(first..first, [string, TokenWithSpan { token: Token::DoubleColon, span }]);
    }
}

/// Takes what window frames leave out, of which sqlparser knows nothing, from the ends of their definitions.
/// `EXCLUDE NO OTHERS` changes nothing; of others a mark is put among the expressions of PARTITION BY, for
/// [`crate::bind::windows::frames`].
pub(super) fn take_frame_exclusions(tokens: &mut Vec<TokenWithSpan>) {
    if !tokens.iter().any(|t| is_word(&t.token, "EXCLUDE")) {
        return;
    }
    let mut marks = Vec::new();
    for (clause, what, open) in exclusions(tokens) {
        let span = tokens[clause[0]].span;
        for &at in &clause {
            tokens[at].token = Token::Whitespace(Whitespace::Space);
        }
        marks.extend(what.map(|what| mark_exclusion(tokens, open, what, span)));
    }
    marks.sort_by_key(|(at, _)| *at);
    let mut marks = marks.into_iter().peekable();
    let mut marked = Vec::with_capacity(tokens.len());
    for (at, token) in std::mem::take(tokens).into_iter().enumerate() {
        while let Some((_, put)) = marks.next_if(|(place, _)| *place == at) {
            marked.extend(put);
        }
        marked.push(token);
    }
    marked.extend(marks.flat_map(|(_, put)| put));
    *tokens = marked;
}

/// A frame's clause: its tokens, what it leaves out, and the window's opening parenthesis.
type Exclusion = (Vec<usize>, Option<&'static str>, usize);

/// The clauses at the ends of windows that have a frame.
fn exclusions(tokens: &[TokenWithSpan]) -> Vec<Exclusion> {
    const CLAUSES: [(&[&str], Option<&str>); 4] = [
        (&["EXCLUDE", "NO", "OTHERS"], None),
        (&["EXCLUDE", "CURRENT", "ROW"], Some("current row")),
        (&["EXCLUDE", "GROUP"], Some("group")),
        (&["EXCLUDE", "TIES"], Some("ties")),
    ];
    let words: Vec<usize> =
        (0..tokens.len()).filter(|&i| !matches!(tokens[i].token, Token::Whitespace(_))).collect();
    let mut found = Vec::new();
    // What is open, and whether there is a frame in it.
    let mut opened: Vec<(usize, bool)> = Vec::new();
    for (at, &i) in words.iter().enumerate() {
        let token = &tokens[i].token;
        match token {
            Token::LParen => opened.push((i, false)),
            Token::RParen => {
                opened.pop();
            }
            _ => {
                if let Some((_, frame)) = opened.last_mut() {
                    *frame |= ["ROWS", "RANGE", "GROUPS"].iter().any(|w| is_word(token, w));
                }
            }
        }
        let Some(&(open, true)) = opened.last() else { continue };
        for (clause, what) in CLAUSES {
            let Some(&end) = words.get(at + clause.len()) else { continue };
            let part = &words[at..at + clause.len()];
            let same = part.iter().zip(clause).all(|(&i, w)| is_word(&tokens[i].token, w));
            if same && tokens[end].token == Token::RParen {
                found.push((part.to_vec(), what, open));
            }
        }
    }
    found
}

/// `PARTITION BY "#exclude"('what')`, before what the window is parted by already, behind its name; and
/// where it is to be put.
fn mark_exclusion(
    tokens: &[TokenWithSpan],
    open: usize,
    what: &str,
    span: sqlparser::tokenizer::Span,
) -> (usize, Vec<TokenWithSpan>) {
    let word = |i: &usize| !matches!(tokens[*i].token, Token::Whitespace(_));
    let words: Vec<usize> = (open + 1..tokens.len()).filter(word).take(3).collect();
    let clause = |i: usize| {
        let clauses = ["PARTITION", "ORDER", "ROWS", "RANGE", "GROUPS"];
        clauses.iter().any(|w| is_word(&tokens[i].token, w))
    };
    let named = words.first().is_some_and(|&i| !clause(i));
    let first = words.get(usize::from(named)).copied().unwrap_or(open + 1);
    let parted = is_word(&tokens[first].token, "PARTITION");
    let by = words.get(usize::from(named) + 1).copied().filter(|_| parted);
    let mut put: Vec<Token> = Vec::new();
    if by.is_none() {
        put.extend([Token::make_keyword("PARTITION"), Token::make_keyword("BY")]);
    }
    put.extend([
        Token::make_word(EXCLUDE, Some('"')),
        Token::LParen,
        Token::SingleQuotedString(what.to_owned()),
        Token::RParen,
    ]);
    if by.is_some() {
        put.push(Token::Comma);
    }
    let at = by.map_or(first, |by| by + 1);
    let spaced = put.into_iter().flat_map(|token| [token, Token::Whitespace(Whitespace::Space)]);
    (at, spaced.map(|token| TokenWithSpan { token, span }).collect())
}
