//! Template patterns of numbers, both ways: `to_char` and `to_number`.

use millrace_common::{SqlError, SqlState};

use super::kernels::out_of_range;
use super::numeric::Num;
use super::time_format::ordinal;
use super::times::invalid;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Node {
    /// `9` or `0`.
    Digit(bool),
    Point,
    Group,
    /// `S`: the sign next to the number; `MI`, `PL`, `SG` at their place.
    Sign,
    Minus,
    Plus,
    Either,
    Currency,
    Char(char),
}

#[derive(Default)]
struct Pattern {
    nodes: Vec<Node>,
    no_fill: bool,
    brackets: bool,
    roman: Option<bool>,
    exponent: bool,
    /// Digits after `V`.
    shift: usize,
    ordinal: Option<String>,
    before: usize,
    after: usize,
}

fn syntax(message: &str) -> SqlError {
    SqlError::new(SqlState::SYNTAX_ERROR, message)
}

fn read_pattern(text: &str) -> Result<Pattern, SqlError> {
    let mut p = Pattern::default();
    let mut rest = text;
    let (mut point, mut shifted) = (false, false);
    while let Some(c) = rest.chars().next() {
        let upper = |n: usize| rest.get(..n).map(str::to_ascii_uppercase).unwrap_or_default();
        let two = upper(2);
        let mut used = c.len_utf8();
        match c {
            '"' => {
                let end = rest[1..].find('"').map_or(rest.len(), |i| i + 2);
                p.nodes.extend(rest[1..end].trim_end_matches('"').chars().map(Node::Char));
                used = end;
            }
            '9' | '0' => {
                p.nodes.push(Node::Digit(c == '0'));
                match (shifted, point) {
                    (true, _) => {
                        p.shift += 1;
                        p.before += 1;
                    }
                    (_, true) => p.after += 1,
                    _ => p.before += 1,
                }
            }
            '.' | 'D' | 'd' => {
                if point {
                    return Err(syntax("multiple decimal points"));
                }
                point = true;
                p.nodes.push(Node::Point);
            }
            ',' | 'G' | 'g' => p.nodes.push(Node::Group),
            'L' | 'l' => p.nodes.push(Node::Currency),
            'V' | 'v' => shifted = true,
            _ if upper(4) == "EEEE" => {
                p.exponent = true;
                used = 4;
            }
            _ if two == "FM" => {
                p.no_fill = true;
                used = 2;
            }
            _ if two == "MI" => {
                p.nodes.push(Node::Minus);
                used = 2;
            }
            _ if two == "PL" => {
                p.nodes.push(Node::Plus);
                used = 2;
            }
            _ if two == "SG" => {
                p.nodes.push(Node::Either);
                used = 2;
            }
            _ if two == "PR" => {
                p.brackets = true;
                used = 2;
            }
            _ if two == "RN" => {
                p.roman = Some(c == 'R');
                used = 2;
            }
            _ if two == "TH" => {
                p.ordinal = Some(rest[..2].to_owned());
                used = 2;
            }
            'S' | 's' => p.nodes.push(Node::Sign),
            c => p.nodes.push(Node::Char(c)),
        }
        rest = &rest[used..];
    }
    Ok(p)
}

fn roman(n: i32, upper: bool, fill: bool) -> String {
    const STEPS: [(i32, &str); 13] = [
        (1000, "M"),
        (900, "CM"),
        (500, "D"),
        (400, "CD"),
        (100, "C"),
        (90, "XC"),
        (50, "L"),
        (40, "XL"),
        (10, "X"),
        (9, "IX"),
        (5, "V"),
        (4, "IV"),
        (1, "I"),
    ];
    // Beyond 3999 there are no letters for a number, and as many as its thousands would be written.
    let mut text = match (1..4000).contains(&n) {
        true => String::new(),
        false => "#".repeat(15),
    };
    let mut left = if text.is_empty() { n } else { 0 };
    for (value, letters) in STEPS {
        while left >= value {
            text.push_str(letters);
            left -= value;
        }
    }
    if !upper {
        text = text.to_lowercase();
    }
    if fill { format!("{text:>15}") } else { text }
}

/// A float: rounded to the digits that it has.
pub fn print_float(v: f64, digits: usize, pattern: &str) -> Result<String, SqlError> {
    let p = read_pattern(pattern)?;
    if let Some(upper) = p.roman {
        let whole = v.round_ties_even();
        // As of every number that has no Roman numeral, there is none of NaN and infinity.
        let whole = if whole.abs() < f64::from(i32::MAX) { whole as i32 } else { 0 };
        return Ok(roman(whole, upper, !p.no_fill));
    }
    if !v.is_finite() {
        return Err(SqlError::unsupported("to_char of NaN or infinity"));
    }
    if p.exponent {
        return Ok(exponent(v, &p));
    }
    let (value, scale) = super::parse::numeric(&format!("{v:.*e}", digits - 1))?;
    let n = Num::from_big(value.into(), scale.max(0));
    print_pattern(&n, &p)
}

fn exponent(v: f64, p: &Pattern) -> String {
    let text = format!("{v:.*e}", p.after);
    let (mantissa, power) = text.split_once('e').unwrap_or((&text, "0"));
    let power: i32 = power.parse().unwrap_or(0);
    let sign = if power < 0 { '-' } else { '+' };
    let lead = if v < 0.0 || p.no_fill { "" } else { " " };
    format!("{lead}{mantissa}e{sign}{:02}", power.abs())
}

pub fn print(n: &Num, pattern: &str) -> Result<String, SqlError> {
    let p = read_pattern(pattern)?;
    if p.exponent {
        return Ok(exponent(n.to_f64(), &p));
    }
    print_pattern(n, &p)
}

fn print_pattern(n: &Num, p: &Pattern) -> Result<String, SqlError> {
    if let Some(upper) = p.roman {
        let whole = n.round(0).to_i64().and_then(|n| i32::try_from(n).ok());
        let whole = whole.ok_or_else(|| out_of_range("integer"))?;
        return Ok(roman(whole, upper, !p.no_fill));
    }
    let shifted = match p.shift {
        0 => n.clone(),
        s => n.mul(&Num::new(10i128.pow(s.min(30) as u32), 0)),
    };
    let rounded = shifted.round(p.after as i32);
    let negative = rounded.is_negative();
    let text = rounded.abs().to_text();
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    // A single zero before the point is not written, except for a `0` in the pattern or a whole number.
    let whole = if whole == "0" && p.after > 0 { "" } else { whole };
    let too_long = whole.len() > p.before;
    let digits: Vec<char> = match too_long {
        true => vec!['#'; p.before],
        false => whole.chars().collect(),
    };
    let blanks = p.before - digits.len();
    let kept = kept_fraction(p, fraction);

    let has = |node: Node| p.nodes.contains(&node);
    let own_sign = !(has(Node::Sign) || has(Node::Minus) || has(Node::Either) || p.brackets);
    let sign_first = p.nodes.iter().position(|n| *n == Node::Sign);
    let first_digit = p.nodes.iter().position(|n| matches!(n, Node::Digit(_) | Node::Point));
    let sign_before = matches!((sign_first, first_digit), (Some(s), Some(d)) if s < d);

    let mark = match (negative, p.brackets) {
        (true, true) => "<",
        (false, true) => " ",
        (true, false) => "-",
        (false, false) if sign_before => "+",
        (false, false) => " ",
    };
    let mark = if mark == " " && p.no_fill { "" } else { mark };
    let wants_mark = own_sign || sign_before || p.brackets;
    let mut out = String::new();
    let mut marked = !wants_mark;
    let (mut position, mut after, mut started, mut past_point) = (0, 0, false, false);
    let mut mark_now = |out: &mut String| {
        if !marked {
            out.push_str(mark);
            marked = true;
        }
    };
    for node in &p.nodes {
        match *node {
            Node::Digit(zero) if !past_point => {
                if position < blanks {
                    if zero || started {
                        started = true;
                        mark_now(&mut out);
                        out.push('0');
                    } else if !p.no_fill {
                        // The last blank before a point that follows no digit carries no sign yet.
                        out.push(' ');
                    }
                } else {
                    started = true;
                    mark_now(&mut out);
                    out.push(digits[position - blanks]);
                }
                position += 1;
            }
            Node::Digit(_) => {
                match (too_long, kept.get(after)) {
                    (true, _) => out.push('#'),
                    (_, Some(c)) => out.push(*c),
                    _ => {}
                }
                after += 1;
            }
            Node::Point => {
                mark_now(&mut out);
                past_point = true;
                started = true;
                if !(p.no_fill && kept.is_empty()) || too_long {
                    out.push('.');
                }
            }
            Node::Group => match (started, p.no_fill) {
                (true, _) => out.push(','),
                (false, false) => out.push(' '),
                _ => {}
            },
            Node::Sign if sign_before => {}
            Node::Sign => out.push(if negative { '-' } else { '+' }),
            Node::Minus => match (negative, p.no_fill) {
                (true, _) => out.push('-'),
                (false, false) => out.push(' '),
                _ => {}
            },
            Node::Plus => match (negative, p.no_fill) {
                (false, _) => out.push('+'),
                (true, false) => out.push(' '),
                _ => {}
            },
            Node::Either => out.push(if negative { '-' } else { '+' }),
            Node::Currency => {
                if !p.no_fill {
                    out.push(' ');
                }
            }
            Node::Char(c) => out.push(c),
        }
    }
    if p.brackets {
        match (negative, p.no_fill) {
            (true, _) => out.push('>'),
            (false, false) => out.push(' '),
            _ => {}
        }
    }
    if let (Some(suffix), false) = (&p.ordinal, negative) {
        out.push_str(&ordinal(rounded.to_i64().unwrap_or(0), suffix));
    }
    Ok(out)
}

/// Digits after the point that are written: with FM, trailing zeros go up to the last `0` of the pattern.
fn kept_fraction(p: &Pattern, fraction: &str) -> Vec<char> {
    let mut digits: Vec<char> = fraction.chars().collect();
    if !p.no_fill {
        return digits;
    }
    let point = p.nodes.iter().position(|n| *n == Node::Point).unwrap_or(p.nodes.len());
    let places = p.nodes[point..].iter().filter_map(|n| match n {
        Node::Digit(zero) => Some(*zero),
        _ => None,
    });
    let least = places.enumerate().filter(|(_, zero)| *zero).map(|(i, _)| i + 1).max().unwrap_or(0);
    while digits.len() > least && digits.last() == Some(&'0') {
        digits.pop();
    }
    digits
}

/// `to_number`.
pub fn parse(text: &str, pattern: &str) -> Result<Num, SqlError> {
    let p = read_pattern(pattern)?;
    let mut digits = String::new();
    let mut negative = false;
    let mut point = false;
    let mut rest = text.chars().peekable();
    let mut take_sign = |rest: &mut std::iter::Peekable<std::str::Chars<'_>>| {
        while rest.peek() == Some(&' ') {
            rest.next();
        }
        match rest.peek() {
            Some('-') => {
                rest.next();
                negative = true;
            }
            Some('<') => {
                rest.next();
                negative = true;
            }
            Some('+') => {
                rest.next();
            }
            _ => {}
        }
    };
    for node in &p.nodes {
        match node {
            Node::Digit(_) => {
                if digits.is_empty() {
                    take_sign(&mut rest);
                }
                if let Some(d) = rest.peek().filter(|c| c.is_ascii_digit()) {
                    digits.push(*d);
                    rest.next();
                }
            }
            Node::Point => {
                if rest.peek() == Some(&'.') {
                    rest.next();
                    if !point {
                        digits.push('.');
                    }
                    point = true;
                }
            }
            Node::Group => {
                if rest.peek() == Some(&',') {
                    rest.next();
                }
            }
            Node::Sign | Node::Minus | Node::Plus | Node::Either => take_sign(&mut rest),
            Node::Currency => {
                if rest.peek().is_some_and(|c| !c.is_ascii_digit() && !matches!(c, '-' | '+')) {
                    rest.next();
                }
            }
            Node::Char(_) => {
                if rest.peek().is_some_and(|c| !c.is_ascii_digit()) {
                    rest.next();
                }
            }
        }
    }
    if digits.trim_matches('.').is_empty() {
        return Err(SqlError::new(
            SqlState::INVALID_TEXT_REPRESENTATION,
            "invalid input syntax for type numeric: \" \"",
        ));
    }
    let (value, scale) = super::parse::numeric(&digits)?;
    let n = Num::from_big(value.into(), scale.max(0));
    if p.roman.is_some() {
        return Err(invalid("\"RN\" not supported for input"));
    }
    Ok(if negative { n.neg() } else { n })
}
