//! Reading a WITH clause: typed values, and a clear error for what is missing, malformed or unknown.

use std::str::FromStr;

use millrace_common::{SqlError, SqlState};
use millrace_rpc::catalog::Relation;

/// An error about an option (SQLSTATE 22023).
pub fn invalid(message: impl Into<String>) -> SqlError {
    SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message)
}

/// The value of `name`, or an error that names it and shows an example.
pub fn required<'a>(
    relation: &'a Relation,
    name: &str,
    example: &str,
) -> Result<&'a str, SqlError> {
    relation.option(name).ok_or_else(|| {
        invalid(format!("missing option \"{name}\""))
            .with_hint(format!("Add it to the WITH clause, for example {name} = {example}."))
    })
}

/// A number with a default; `what` says what is expected, for the error.
pub fn number<T: FromStr + PartialOrd>(
    relation: &Relation,
    name: &str,
    default: T,
    min: T,
    what: &str,
) -> Result<T, SqlError> {
    let Some(text) = relation.option(name) else {
        return Ok(default);
    };
    match text.trim().parse::<T>() {
        Ok(value) if value >= min => Ok(value),
        _ => Err(invalid(format!("invalid value for option \"{name}\": \"{text}\""))
            .with_hint(format!("Give {what}."))),
    }
}

/// Refuses options that nobody reads.
pub fn only_known(relation: &Relation, known: &[&str]) -> Result<(), SqlError> {
    match relation.options.iter().find(|o| !known.contains(&o.name.as_str())) {
        None => Ok(()),
        Some(o) => Err(invalid(format!("unknown option \"{}\"", o.name))
            .with_hint(format!("Options of this connector: {}.", known.join(", ")))),
    }
}
