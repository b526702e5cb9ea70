//! SQL text to statements, with what our parser leaves to us.

use millrace_common::SqlError;
use millrace_planner::ParsedStatement;

/// Parses a string of statements; an empty string has none.
pub fn parse(sql: &str) -> Result<Vec<ParsedStatement>, SqlError> {
    millrace_common::planted::panic_if_planted(sql);
    millrace_planner::parse(sql)
}
