//! `ASOF LEFT JOIN`: the parser beneath knows ASOF JOIN only. The words LEFT and OUTER are taken out, and the
//! join's match condition is wrapped in a call that says so, for `bind::relations::asof`.

use sqlparser::tokenizer::{Token, TokenWithSpan, Whitespace, Word};

use super::is_word;

/// The name of the call; not one that SQL text can contain unquoted.
pub(crate) const ASOF_LEFT: &str = "#asof_left";

/// Rewrites the joins of a text.
pub(super) fn wrap_left(tokens: &mut Vec<TokenWithSpan>) {
    if !tokens.iter().any(|t| is_word(&t.token, "ASOF")) {
        return;
    }
    let mut out: Vec<TokenWithSpan> = Vec::with_capacity(tokens.len());
    // Parentheses open; those inside which a left join waits for its condition; those that close one.
    let (mut depth, mut waiting, mut closing) = (0usize, Vec::<usize>::new(), Vec::<usize>::new());
    let rest = std::mem::take(tokens);
    let mut after_asof = false;
    let mut at_condition = false;
    for token in rest {
        if matches!(token.token, Token::Whitespace(_)) {
            out.push(token);
            continue;
        }
        let join_word = is_word(&token.token, "LEFT") || is_word(&token.token, "OUTER");
        if after_asof && join_word {
            if is_word(&token.token, "LEFT") {
                waiting.push(depth);
            }
            out.push(at(&token, Token::Whitespace(Whitespace::Space)));
            continue;
        }
        after_asof = is_word(&token.token, "ASOF");
        match token.token {
            Token::LParen => {
                depth += 1;
                let wrapped = at_condition.then(|| call(&token));
                out.push(token);
                if let Some(wrapped) = wrapped {
                    closing.push(depth);
                    out.extend(wrapped);
                }
            }
            Token::RParen => {
                if closing.last() == Some(&depth) {
                    closing.pop();
                    out.push(at(&token, Token::RParen));
                }
                depth = depth.saturating_sub(1);
                out.push(token);
            }
            _ => {
                at_condition =
                    is_word(&token.token, "MATCH_CONDITION") && waiting.last() == Some(&depth);
                if at_condition {
                    waiting.pop();
                }
                out.push(token);
                continue;
            }
        }
        at_condition = false;
    }
    *tokens = out;
}

fn at(place: &TokenWithSpan, token: Token) -> TokenWithSpan {
    TokenWithSpan { token, span: place.span }
}

/// `"#asof_left" (`
fn call(place: &TokenWithSpan) -> [TokenWithSpan; 2] {
    let word = Word {
        value: ASOF_LEFT.to_owned(),
        quote_style: Some('"'),
        keyword: sqlparser::keywords::Keyword::NoKeyword,
    };
    [at(place, Token::Word(word)), at(place, Token::LParen)]
}
