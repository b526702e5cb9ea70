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
            c => match p.take_word(rest) {
                0 if matches!(c, 'S' | 's') => p.nodes.push(Node::Sign),
                0 => p.nodes.push(Node::Char(c)),
                letters => used = letters,
            },
        }
        rest = &rest[used..];
    }
    Ok(p)
}

impl Pattern {
    /// Takes the word of several letters that a pattern goes on with; its length, 0 without one.
    fn take_word(&mut self, rest: &str) -> usize {
        let upper = |n: usize| rest.get(..n).map(str::to_ascii_uppercase).unwrap_or_default();
        if upper(4) == "EEEE" {
            self.exponent = true;
            return 4;
        }
        match upper(2).as_str() {
            "FM" => self.no_fill = true,
            "MI" => self.nodes.push(Node::Minus),
            "PL" => self.nodes.push(Node::Plus),
            "SG" => self.nodes.push(Node::Either),
            "PR" => self.brackets = true,
            "RN" => self.roman = Some(rest.starts_with('R')),
            "TH" => self.ordinal = Some(rest[..2].to_owned()),
            _ => return 0,
        }
        2
    }
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
    let sign_before = sign_precedes_digits(p);
    let mut number = Printed {
        pattern: p,
        digits,
        kept: kept_fraction(p, fraction),
        too_long,
        negative,
        sign_before,
        mark: mark_of_sign(p, negative, sign_before),
        position: 0,
        after: 0,
        started: false,
        past_point: false,
        out: String::new(),
    };
    p.nodes.iter().for_each(|node| number.push(*node));
    let mut out = number.out;
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

/// Whether an `S` of the pattern stands before its digits.
fn sign_precedes_digits(p: &Pattern) -> bool {
    let sign_first = p.nodes.iter().position(|n| *n == Node::Sign);
    let first_digit = p.nodes.iter().position(|n| matches!(n, Node::Digit(_) | Node::Point));
    matches!((sign_first, first_digit), (Some(s), Some(d)) if s < d)
}

/// What is written for the sign before the first digit; `None`: the pattern has a place for it.
fn mark_of_sign(p: &Pattern, negative: bool, sign_before: bool) -> Option<&'static str> {
    let has = |node: Node| p.nodes.contains(&node);
    let own_sign = !(has(Node::Sign) || has(Node::Minus) || has(Node::Either) || p.brackets);
    let mark = match (negative, p.brackets) {
        (true, true) => "<",
        (false, true) => " ",
        (true, false) => "-",
        (false, false) if sign_before => "+",
        (false, false) => " ",
    };
    let mark = if mark == " " && p.no_fill { "" } else { mark };
    (own_sign || sign_before || p.brackets).then_some(mark)
}

/// A number as far as it is written by the nodes of its pattern.
struct Printed<'a> {
    pattern: &'a Pattern,
    /// Digits before the point.
    digits: Vec<char>,
    /// Digits after it that are written.
    kept: Vec<char>,
    too_long: bool,
    negative: bool,
    sign_before: bool,
    /// Goes before the first digit; `None`: it is written, or there is none.
    mark: Option<&'static str>,
    /// Places for digits that have been met before the point, and after it.
    position: usize,
    after: usize,
    /// Whether there is a digit or the point already.
    started: bool,
    past_point: bool,
    out: String,
}

impl Printed<'_> {
    fn push(&mut self, node: Node) {
        let (negative, no_fill) = (self.negative, self.pattern.no_fill);
        match node {
            Node::Digit(zero) if !self.past_point => self.push_whole_digit(zero),
            Node::Digit(_) => {
                match (self.too_long, self.kept.get(self.after)) {
                    (true, _) => self.out.push('#'),
                    (_, Some(c)) => self.out.push(*c),
                    _ => {}
                }
                self.after += 1;
            }
            Node::Point => {
                self.push_mark();
                self.past_point = true;
                self.started = true;
                if !(no_fill && self.kept.is_empty()) || self.too_long {
                    self.out.push('.');
                }
            }
            Node::Group => match (self.started, no_fill) {
                (true, _) => self.out.push(','),
                (false, false) => self.out.push(' '),
                _ => {}
            },
            Node::Sign if self.sign_before => {}
            Node::Sign => self.out.push(if negative { '-' } else { '+' }),
            Node::Minus => match (negative, no_fill) {
                (true, _) => self.out.push('-'),
                (false, false) => self.out.push(' '),
                _ => {}
            },
            Node::Plus => match (negative, no_fill) {
                (false, _) => self.out.push('+'),
                (true, false) => self.out.push(' '),
                _ => {}
            },
            Node::Either => self.out.push(if negative { '-' } else { '+' }),
            Node::Currency => {
                if !no_fill {
                    self.out.push(' ');
                }
            }
            Node::Char(c) => self.out.push(c),
        }
    }

    fn push_whole_digit(&mut self, zero: bool) {
        let blanks = self.pattern.before - self.digits.len();
        if self.position < blanks {
            if zero || self.started {
                self.started = true;
                self.push_mark();
                self.out.push('0');
            } else if !self.pattern.no_fill {
                // The last blank before a point that follows no digit carries no sign yet.
                self.out.push(' ');
            }
        } else {
            self.started = true;
            self.push_mark();
            let digit = self.digits[self.position - blanks];
            self.out.push(digit);
        }
        self.position += 1;
    }

    fn push_mark(&mut self) {
        if let Some(mark) = self.mark.take() {
            self.out.push_str(mark);
        }
    }
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
    for node in &p.nodes {
        match node {
            Node::Digit(_) => {
                if digits.is_empty() {
                    negative |= take_sign(&mut rest);
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
            Node::Sign | Node::Minus | Node::Plus | Node::Either => {
                negative |= take_sign(&mut rest);
            }
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

/// Takes the sign that is next, where there is one; whether it is that of a negative number.
fn take_sign(rest: &mut std::iter::Peekable<std::str::Chars<'_>>) -> bool {
    while rest.peek() == Some(&' ') {
        rest.next();
    }
    match rest.peek() {
        Some('-' | '<') => {
            rest.next();
            true
        }
        Some('+') => {
            rest.next();
            false
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn digits_and_signs() {
        check(&[
            ("to_char(485, '999')", " 485"),
            ("to_char(-485, '999')", "-485"),
            ("to_char(485, '9 9 9')", " 4 8 5"),
            ("to_char(1485, '9,999')", " 1,485"),
            ("to_char(148.5, '999.999')", " 148.500"),
            ("to_char(148.5, 'FM999.999')", "148.5"),
            ("to_char(148.5, 'FM999.990')", "148.500"),
            ("to_char(0.1, '0.9')", " 0.1"),
            ("to_char(0.1, '9.9')", "  .1"),
            ("to_char(0.1, 'FM9.9')", ".1"),
            ("to_char(-0.1, 'FM99.99')", "-.1"),
            ("to_char(0, '99.99')", "   .00"),
            ("to_char(12, '9990999.9')", "    0012.0"),
            ("to_char(-485, '999S')", "485-"),
            ("to_char(-485, 'S999')", "-485"),
            ("to_char(485, 'SG999')", "+485"),
            ("to_char(-485, '999MI')", "485-"),
            ("to_char(485, '999MI')", "485 "),
            ("to_char(485, 'FM999MI')", "485"),
            ("to_char(-485, '9SG99')", "4-85"),
            ("to_char(-485, '999PR')", "<485>"),
            ("to_char(485, '999PR')", " 485 "),
            ("to_char(485, 'PL999')", "+ 485"),
            ("to_char(485, '\"Good number:\"999')", "Good number: 485"),
            ("to_char(485.8, '\"Pre:\"999\" Post:\" .999')", "Pre: 485 Post: .800"),
            ("to_char(1234567, '9G999G999')", " 1,234,567"),
            ("to_char(1.5, '9D9')", " 1.5"),
        ]);
    }

    #[test]
    fn values_that_do_not_fit() {
        check(&[
            ("to_char(12345, '999')", " ###"),
            ("to_char(-12345, '999')", "-###"),
            ("to_char(1234.56, '99.99')", " ##.##"),
            ("to_char(99.96, '99.9')", " ##.#"),
            ("to_char(9.99, '9.9')", " #.#"),
        ]);
    }

    #[test]
    fn roman_numerals_ordinals_and_shifts() {
        check(&[
            ("to_char(485, 'RN')", "        CDLXXXV"),
            ("to_char(485, 'FMRN')", "CDLXXXV"),
            ("to_char(5.2, 'FMRN')", "V"),
            ("to_char(4000, 'RN')", "###############"),
            ("to_char(0, 'RN')", "###############"),
            ("to_char(482, '999th')", " 482nd"),
            ("to_char(1, '9TH')", " 1ST"),
            ("to_char(11, '99th')", " 11th"),
            ("to_char(12, '99V999')", " 12000"),
            ("to_char(12.4, '99V999')", " 12400"),
            ("to_char(12.45, '99V9')", " 125"),
        ]);
    }

    #[test]
    fn floats_and_exponents() {
        check(&[
            ("to_char('0.000485'::float8, '9.99EEEE')", " 4.85e-04"),
            ("to_char('-12345.6789'::float8, '9.999EEEE')", "-1.235e+04"),
            ("to_char('1e100'::float8, '9.9EEEE')", " 1.0e+100"),
            ("to_char('1234.5'::float4, '9999.99')", " 1234.50"),
            ("to_char(1.5, NULL)", "NULL"),
            ("to_char(NULL::numeric, '9')", "NULL"),
        ]);
    }

    #[test]
    fn patterns_with_an_error() {
        check(&[("to_char(1, '9.9.9')", "error 42601"), ("to_char(1, '')", "")]);
    }

    #[test]
    fn numbers_are_read_by_patterns() {
        check(&[
            ("to_number('12,454.8-', '99G999D9S')", "-12454.8"),
            ("to_number('-34,338,492', '99G999G999')", "-34338492"),
            ("to_number('<564646.654564>', '999999.999999PR')", "-564646.654564"),
            ("to_number('0.00001-', '9.999999S')", "-0.00001"),
            ("to_number(' 4 4 4 4 5 5 5 4', '9 9 9 9 9 9 9 9')", "44445554"),
            ("to_number('$1,234.56', 'L99,999.99')", "1234.56"),
            ("to_number('123', '99')", "12"),
            ("to_number('1.5', '9')", "1"),
            ("to_number('42nd', '99th')", "42"),
            ("to_number('abc', '999')", "error 22P02"),
            ("to_number('', '999')", "error 22P02"),
            ("to_number(NULL, '9')", "NULL"),
        ]);
    }
}
