//! The web console's side of the server: who is logged in ([`logins`]), and statements that do not come over the
//! PostgreSQL protocol ([`runs`]).
//!
//! Each string of statements runs in a session of its own. It takes the time it takes: whoever wants its answers asks
//! for them, and may cancel it. Of the rows of each statement only the first are kept; values come as PostgreSQL prints
//! them.

pub mod logins;
mod rows;
pub mod runs;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::SqlError;

use crate::server::Shared;
pub use rows::Limits;

/// What came of one statement.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub tag: String,
    /// Their names; empty: the statement returns no rows.
    pub columns: Vec<String>,
    pub rows: Vec<Vec<Option<String>>>,
    /// What of the result is not here, as a sentence.
    pub cut: Option<String>,
    pub notices: Vec<String>,
    pub elapsed: Duration,
}

/// Runs a string of statements as the server's own user and waits for its end. The answers of those before the first
/// error come with it.
pub async fn run(
    shared: &Arc<Shared>,
    address: String,
    sql: &str,
) -> (Vec<Answer>, Option<SqlError>) {
    let run = runs::Run::new(own_user(shared), address, sql.to_owned(), Default::default());
    runs::execute(shared, &run, Limits::default()).await;
    run.take()
}

/// The user who comes most often.
fn most_frequent<'a>(users: impl Iterator<Item = &'a str>) -> Option<String> {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for user in users {
        *counts.entry(user).or_default() += 1;
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(user, _)| user.to_owned())
}

/// As whom statements run where nobody has to log in.
pub fn own_user(shared: &Shared) -> String {
    shared.config.users.first().cloned().unwrap_or_default()
}
