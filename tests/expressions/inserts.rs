//! What is inserted: `INSERT … VALUES (e)` puts into a column what `INSERT … SELECT e` puts there, and what PostgreSQL
//! does, where there is one to ask. VALUES of literals have a path of their own.

use tokio_postgres::{Client, SimpleQueryMessage};

/// Columns of every kind, by the names of their types.
const TYPES: [&str; 13] = [
    "smallint",
    "int",
    "bigint",
    "real",
    "double precision",
    "numeric",
    "numeric(6,2)",
    "text",
    "varchar(4)",
    "char(4)",
    "boolean",
    "date",
    "interval",
];

const ATOMS: [&str; 20] = [
    "5",
    "0",
    "1.5",
    "0.0",
    "-2.5",
    "1e3",
    "32768",
    "3000000000",
    "12345.678",
    "'3'",
    "'2.5'",
    "'true'",
    "E'7'",
    "$$8$$",
    "true",
    "NULL",
    "(6)",
    "('4')",
    "date '2024-02-29'",
    "interval '1 day'",
];

/// What may stand before an operand; `{}` is the operand.
const FORMS: [&str; 13] = [
    "{}", "+ {}", "- {}", "- (- {})", "+(- {})", "-(+ {})", "~ {}", "NOT {}", "@ {}", "|/ {}",
    "||/ {}", "({})", "(-({}))",
];

/// Columns that each expression is put into: together all kinds.
const COLUMNS: usize = 4;

/// The value that a statement returns, or its SQLSTATE; nothing is kept.
async fn inserted(client: &Client, insert: &str) -> String {
    let answer = client.simple_query(&format!("BEGIN; {insert}; ROLLBACK")).await;
    match answer {
        Ok(messages) => {
            let row = messages.iter().find_map(|m| match m {
                SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or("NULL").to_owned()),
                _ => None,
            });
            row.unwrap_or_else(|| "no row".to_owned())
        }
        Err(e) => {
            client.batch_execute("ROLLBACK").await.expect("a block that failed ends");
            e.code().map_or_else(|| e.to_string(), |c| format!("error {}", c.code()))
        }
    }
}

/// A value without the zeros that only the scale of a numeric puts behind it.
fn value(shown: &str) -> &str {
    match shown.contains('.') {
        true => shown.trim_end_matches('0').trim_end_matches('.'),
        false => shown,
    }
}

fn column(i: usize) -> String {
    format!("c{i}")
}

async fn create(client: &Client) {
    let columns: Vec<String> =
        TYPES.iter().enumerate().map(|(i, t)| format!("{} {t}", column(i))).collect();
    let create = format!("CREATE TABLE inserted (id int, {})", columns.join(", "));
    client.batch_execute("DROP TABLE IF EXISTS inserted").await.expect("the table is new");
    client.batch_execute(&create).await.expect("the table is created");
}

/// What differs, for every form of every atom in every column.
pub async fn differences(ours: &Client, postgres: Option<&Client>) -> (usize, Vec<String>) {
    create(ours).await;
    if let Some(postgres) = postgres {
        create(postgres).await;
    }
    let (mut count, mut failures) = (0, Vec::new());
    for (f, form) in FORMS.iter().enumerate() {
        for (a, atom) in ATOMS.iter().enumerate() {
            let e = form.replace("{}", atom);
            for step in 0..COLUMNS {
                let i = (f * ATOMS.len() + a + step * TYPES.len() / COLUMNS) % TYPES.len();
                let (c, t) = (column(i), TYPES[i]);
                let values = format!("INSERT INTO inserted ({c}) VALUES ({e}) RETURNING {c}");
                let select = format!("INSERT INTO inserted ({c}) SELECT {e} RETURNING {c}");
                let (by_values, by_select) =
                    (inserted(ours, &values).await, inserted(ours, &select).await);
                count += 1;
                if by_values != by_select {
                    failures.push(format!("{e} as {t}: VALUES {by_values}, SELECT {by_select}"));
                }
                // The last digit of a cube root is the C library's.
                if let Some(postgres) = postgres.filter(|_| !form.contains("||/")) {
                    let theirs = inserted(postgres, &values).await;
                    if value(&theirs) != value(&by_values) {
                        failures.push(format!("{e} as {t}: here {by_values}, PostgreSQL {theirs}"));
                    }
                }
            }
        }
    }
    (count, failures)
}
