//! Materialized views that come and go over a table that is written to. One that was acknowledged as created is there and
//! equals its query, one that was acknowledged as dropped is gone, and what has no known outcome may be either.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use crate::writers::{Fate, Outcomes, Workload, Writers};
use crate::{assert_equal, compared};

/// How many of its statements later a session drops a view: odd, because it creates and drops by turns.
const LIFETIME: i64 = 3;
/// How long it may take at the end until a view whose outcome was not known can be read, or is gone.
const LIMIT: Duration = Duration::from_secs(90);

pub type Makers = Writers<Views>;

/// What became of each statement, by its number.
#[derive(Default)]
pub struct Views(Mutex<BTreeMap<i64, Fate>>);

/// What the statement of a number does. A view has the number of the statement that creates it.
enum Step {
    Create { view: i64 },
    Drop { view: i64 },
}

/// At first a session has nothing to drop, and creates two more views, which stay.
fn step(n: i64) -> Step {
    let index = n / 2;
    match index % 2 == 1 && index >= LIFETIME + 2 {
        true => Step::Drop { view: n - 2 * LIFETIME },
        false => Step::Create { view: n },
    }
}

/// The statement that drops a view, if one does.
fn dropped_by(view: i64) -> Option<i64> {
    let later = view + 2 * LIFETIME;
    matches!(step(later), Step::Drop { .. }).then_some(later)
}

fn name(view: i64) -> String {
    format!("made_{view}")
}

/// Over the counters of `records.rs`. No two views have the same rows.
fn query(view: i64) -> String {
    format!("SELECT id % 2 AS part, sum(n) + {view} AS total FROM counters GROUP BY id % 2")
}

impl Workload for Views {
    /// Jobs begin and end all the time, and leave the machine to the writes.
    const PAUSE: Duration = Duration::from_secs(1);

    fn statement(&self, n: i64) -> String {
        match step(n) {
            Step::Create { view } => {
                format!("CREATE MATERIALIZED VIEW {} AS {}", name(view), query(view))
            }
            Step::Drop { view } => format!("DROP MATERIALIZED VIEW {}", name(view)),
        }
    }

    fn note(&self, n: i64, fate: Fate, _began: Instant) {
        self.0.lock().expect("nobody panics with it").insert(n, fate);
    }
}

impl Outcomes<Views> {
    /// While nobody writes. A creation that has failed may have left its view where no leader was there to drop it.
    pub async fn check(&self, client: &Client) {
        let all = self.workload.0.lock().expect("nobody panics with it").clone();
        let mut kept = 0;
        for (n, created) in &all {
            let Step::Create { view } = step(*n) else { continue };
            let dropped = dropped_by(view).and_then(|later| all.get(&later));
            match (created, dropped) {
                (Fate::Acknowledged, None | Some(Fate::Failed)) => {
                    let content = format!("SELECT * FROM {}", name(view));
                    assert_equal(client, &content, &query(view)).await;
                    kept += 1;
                }
                (Fate::Acknowledged, Some(Fate::Acknowledged)) => {
                    assert!(!is_there(client, view).await, "{} was dropped", name(view));
                }
                _ => {
                    is_there(client, view).await;
                }
            }
        }
        assert_ne!(kept, 0, "no view was created and stays");
    }
}

/// Whether a view is there, which then equals its query. One that is still being created or dropped is waited for.
async fn is_there(client: &Client, view: i64) -> bool {
    let content = format!("SELECT * FROM {}", name(view));
    let deadline = Instant::now() + LIMIT;
    loop {
        let error = match compared(client, &content, &query(view)).await {
            Ok(None) => return true,
            Ok(Some(difference)) => panic!("{}: {difference}", name(view)),
            Err(error) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => return false,
            Err(error) => error,
        };
        assert!(Instant::now() < deadline, "{} cannot be read: {error:?}", name(view));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
