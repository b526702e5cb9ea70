//! Unary operators, and literals that are cast, as columns of views.

use crate::rng::Rng;

/// Such a column now and then. It draws from a stream of its own, so that what a seed writes else stays as it is.
pub fn operand(rng: &Rng, q: &str) -> Option<String> {
    let mut own = Rng::new(rng.clone().next());
    own.chance(40).then(|| match own.below(2) {
        0 => unary(&mut own, q),
        _ => cast_literal(&mut own, q),
    })
}

fn unary(rng: &mut Rng, q: &str) -> String {
    match rng.below(9) {
        0 => format!("-{q}a"),
        1 => format!("+{q}n"),
        2 => format!("~{q}b"),
        3 => format!("@ {q}n"),
        4 => format!("-(-{q}f)"),
        5 => format!("NOT ({q}a > 1)"),
        6 => format!("|/ @ ({q}a::float8)"),
        7 => format!("{q}a - -{q}b"),
        _ => format!("-{q}f"),
    }
}

fn cast_literal(rng: &mut Rng, q: &str) -> String {
    match rng.below(9) {
        0 => format!("{q}s = 'x'::text"),
        1 => format!("{q}a + '2'::int"),
        2 => format!("{q}n > '1.5'::numeric"),
        3 => format!("'x'::text || {q}a"),
        4 => format!("{q}t + '1 hour'::interval"),
        5 => format!("{q}f <> 'NaN'::float8"),
        6 => format!("'2024-01-01'::date < {q}t"),
        7 => format!("CAST('-0' AS float8) = {q}f"),
        _ => format!("coalesce({q}a, '7'::int)"),
    }
}
