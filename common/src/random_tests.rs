//! How long the tests of random cases run: a short form in continuous integration, a long form on demand.

/// Set to 1: every test of random cases runs its long form, which tries more cases.
const VARIABLE: &str = "MILLRACE_LONG_TESTS";

/// Whether the long form is asked for.
pub fn is_long() -> bool {
    asks_for_long(std::env::var(VARIABLE).ok().as_deref())
}

/// How many cases a test tries.
pub fn cases(short: u32, long: u32) -> u32 {
    if is_long() { long } else { short }
}

fn asks_for_long(value: Option<&str>) -> bool {
    value.is_some_and(|value| !matches!(value, "" | "0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_long_form_is_asked_for() {
        assert!(asks_for_long(Some("1")));
        assert!(![None, Some(""), Some("0")].into_iter().any(asks_for_long));
    }
}
