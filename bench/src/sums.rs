//! Views with many sums by key over a table `(k BIGINT, v BIGINT)`: their state is large while the table stays small.

use tokio_postgres::{Client, SimpleQueryMessage};

/// A prime: values are below it, and no bytes of a sum can be saved.
const MODULUS: u64 = 2_147_483_647;
/// Between two values.
const STRIDE: u64 = 2_654_435_761;

/// What the sum of this number adds up.
fn summand(of: u64) -> String {
    // Odd, so that it is never 0.
    let factor = ((of + 1) * STRIDE % MODULUS) | 1;
    format!("v * {factor} % {MODULUS}")
}

/// The value of row `x`.
pub fn value() -> String {
    format!("x::bigint * {STRIDE} % {MODULUS}")
}

/// A view of a table: a count and so many sums by key.
pub fn create_view(view: &str, table: &str, sums: u64) -> String {
    let sums: String = (0..sums).map(|i| format!(", sum({}) AS s{i}", summand(i))).collect();
    format!(
        "CREATE MATERIALIZED VIEW {view} AS SELECT k, count(*) AS n{sums} FROM {table} GROUP BY k"
    )
}

/// The view is its query, of a few of its columns. `keys`: what counts the keys of the table.
pub async fn check_view(
    client: &Client,
    (view, table, sums): (&str, &str, u64),
    keys: &str,
) -> Result<(), String> {
    let last = sums.saturating_sub(1);
    let of_view = format!("SELECT count(*), sum(n), sum(s0), sum(s{last}) FROM {view}");
    let (first, other) = (summand(0), summand(last));
    let of_query = format!("SELECT {keys}, count(*), sum({first}), sum({other}) FROM {table}");
    let (of_view, of_query) =
        (only_row(client, &of_view).await?, only_row(client, &of_query).await?);
    match of_view == of_query {
        true => Ok(()),
        false => Err(format!("{view} has {of_view:?}, and its query {of_query:?}")),
    }
}

/// The only row of a query, as text.
pub async fn only_row(client: &Client, sql: &str) -> Result<Vec<Option<String>>, String> {
    let messages = client.simple_query(sql).await.map_err(|e| format!("{sql}: {e}"))?;
    let row = messages.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    });
    let row = row.ok_or_else(|| format!("no row: {sql}"))?;
    Ok((0..row.len()).map(|i| row.get(i).map(str::to_owned)).collect())
}
