//! Single statements whose outcomes can be checked: counters are raised, numbers appended to lists, and clicks, which
//! sessions are made of, inserted and deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Instant;

use tokio_postgres::Client;

use crate::writers::{Fate, Outcomes, Workload, Writers};
use crate::{assert_equal, execute, one};

const COUNTERS: i64 = 4;
/// Lists that are appended to at a time, and how many numbers each gets, so that long runs have many lists.
const LISTS: i64 = 4;
const LIST_LENGTH: i64 = 50;
/// How many of its statements later a session deletes a click.
const CLICK_LIFETIME: i64 = 24;

const COUNTED: &str = "SELECT sum(n) AS total, max(n) AS most FROM counters";
const LENGTHS: &str = "SELECT id, length(items) AS characters FROM lists";
const VISITS: &str = "SELECT who, window_start, window_end, count(*) AS clicks, sum(id) AS ids \
                      FROM SESSION(clicks, at, INTERVAL '10 seconds', who) GROUP BY who, window_start, window_end";

pub async fn create(client: &Client) {
    let counters = format!(
        "INSERT INTO counters SELECT i, 0 FROM generate_series(0, {}) AS g(i)",
        COUNTERS - 1
    );
    for sql in [
        "CREATE TABLE counters (id bigint PRIMARY KEY, n bigint NOT NULL)",
        "CREATE TABLE lists (id bigint PRIMARY KEY, items text NOT NULL)",
        "CREATE TABLE clicks (id bigint PRIMARY KEY, who bigint NOT NULL, at timestamp NOT NULL)",
        &counters,
    ] {
        execute(client, sql).await;
    }
    for (view, query) in [("counted", COUNTED), ("lengths", LENGTHS), ("visits", VISITS)] {
        execute(client, &format!("CREATE MATERIALIZED VIEW {view} AS {query}")).await;
    }
}

pub type Recorders = Writers<Records>;

/// What became of each statement, by its number.
#[derive(Default)]
pub struct Records(Mutex<BTreeMap<i64, Written>>);

#[derive(Clone, Copy)]
struct Written {
    fate: Fate,
    began: Instant,
    ended: Instant,
}

/// What the statement of a number does.
enum Step {
    Count { counter: i64 },
    Append { list: i64 },
    Click,
    Delete { click: i64 },
}

/// Both sessions have the same counters and lists.
fn step(n: i64) -> Step {
    let (round, kind) = (n / 2 / 4, n / 2 % 4);
    match kind {
        0 => Step::Count { counter: round * 7 % COUNTERS },
        1 => Step::Append { list: round / (LISTS * LIST_LENGTH / 2) * LISTS + round % LISTS },
        3 if n >= CLICK_LIFETIME && round % 2 == 0 => Step::Delete { click: n - CLICK_LIFETIME },
        _ => Step::Click,
    }
}

impl Workload for Records {
    fn statement(&self, n: i64) -> String {
        match step(n) {
            Step::Count { counter } => {
                format!("UPDATE counters SET n = n + 1 WHERE id = {counter}")
            }
            Step::Append { list } => format!(
                "INSERT INTO lists VALUES ({list}, ' {n}') \
                 ON CONFLICT (id) DO UPDATE SET items = lists.items || excluded.items"
            ),
            // Not in the order of time, so that sessions grow together, and some hundred in ten minutes.
            Step::Click => format!(
                "INSERT INTO clicks VALUES ({n}, {}, \
                 timestamp '2026-01-01' + {} * INTERVAL '10 minutes' + {} * INTERVAL '1 second')",
                n % 5,
                n / 1_000,
                n * 37 % 600
            ),
            Step::Delete { click } => format!("DELETE FROM clicks WHERE id = {click}"),
        }
    }

    fn note(&self, n: i64, fate: Fate, began: Instant) {
        let written = Written { fate, began, ended: Instant::now() };
        self.0.lock().expect("nobody panics with it").insert(n, written);
    }
}

impl Outcomes<Records> {
    /// What was acknowledged is there once and in order, what failed is not, and views equal their queries.
    pub async fn check(&self, client: &Client) {
        let all = self.workload.0.lock().expect("nobody panics with it").clone();
        check_counters(&all, client).await;
        check_lists(&all, client).await;
        check_clicks(&all, client).await;
        assert_equal(client, "SELECT * FROM counted", COUNTED).await;
        assert_equal(client, "SELECT * FROM lengths", LENGTHS).await;
        assert_equal(client, "SELECT * FROM visits", VISITS).await;
        assert_ne!(one::<i64>(client, "SELECT count(*) FROM visits").await, 0);
    }
}

async fn check_counters(all: &BTreeMap<i64, Written>, client: &Client) {
    for counter in 0..COUNTERS {
        let of = |fate: Fate| {
            let raises = |n: i64| matches!(step(n), Step::Count { counter: c } if c == counter);
            all.iter().filter(|(n, w)| w.fate == fate && raises(**n)).count() as i64
        };
        let least = of(Fate::Acknowledged);
        let most = least + of(Fate::Unknown);
        let n: i64 = one(client, &format!("SELECT n FROM counters WHERE id = {counter}")).await;
        assert!((least..=most).contains(&n), "counter {counter} is {n}, not {least} to {most}");
    }
}

async fn check_lists(all: &BTreeMap<i64, Written>, client: &Client) {
    let rows = client.query("SELECT id, items FROM lists ORDER BY id", &[]).await.expect("a read");
    let mut found = BTreeSet::new();
    for row in rows {
        let (list, items): (i64, String) = (row.get(0), row.get(1));
        let items: Vec<i64> =
            items.split_whitespace().map(|n| n.parse().expect("a number")).collect();
        for n in &items {
            assert!(found.insert(*n), "{n} was appended twice: list {list}: {items:?}");
            let is_its = matches!(step(*n), Step::Append { list: l } if l == list);
            assert!(is_its, "{n} was appended to another list: list {list}: {items:?}");
            let fate = all.get(n).map(|w| w.fate);
            let is_possible = fate.is_some_and(|fate| fate != Fate::Failed);
            assert!(is_possible, "{n} failed and is there: list {list}: {items:?}");
        }
        check_order(all, list, &items);
    }
    let acknowledged = |(n, w): &(&i64, &Written)| {
        w.fate == Fate::Acknowledged && matches!(step(**n), Step::Append { .. })
    };
    let lost: Vec<_> =
        all.iter().filter(acknowledged).map(|(n, _)| *n).filter(|n| !found.contains(n)).collect();
    assert!(lost.is_empty(), "acknowledged and lost: {lost:?}");
}

/// What began after another was acknowledged comes after it.
fn check_order(all: &BTreeMap<i64, Written>, list: i64, items: &[i64]) {
    let acknowledged = |n: &&i64| all.get(n).is_some_and(|w| w.fate == Fate::Acknowledged);
    // The earliest end of those that come later.
    let mut earliest: Option<(Instant, i64)> = None;
    for n in items.iter().rev().filter(acknowledged) {
        let written = &all[n];
        if let Some((ended, later)) = earliest {
            let is_in_order = written.began <= ended;
            assert!(is_in_order, "list {list}: {n} comes before {later}, and began after it");
        }
        if earliest.is_none_or(|(ended, _)| written.ended < ended) {
            earliest = Some((written.ended, *n));
        }
    }
}

async fn check_clicks(all: &BTreeMap<i64, Written>, client: &Client) {
    let rows = client.query("SELECT id FROM clicks", &[]).await.expect("a read");
    let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    let found: BTreeSet<i64> = ids.iter().copied().collect();
    assert_eq!(ids.len(), found.len(), "a click is there twice");
    let mut deleted = BTreeMap::new();
    for (n, written) in all {
        if let Step::Delete { click } = step(*n) {
            deleted.insert(click, written.fate);
        }
    }
    for id in &found {
        let is_there = all.get(id).is_some_and(|w| w.fate != Fate::Failed);
        assert!(is_there && matches!(step(*id), Step::Click), "click {id} failed and is there");
        // A delete that found nothing, because the outcome of the insert was unknown, may have come before it.
        let is_deleted = deleted.get(id) == Some(&Fate::Acknowledged);
        let was_known = all[id].fate == Fate::Acknowledged;
        assert!(!(is_deleted && was_known), "click {id} was deleted and is there");
    }
    for (n, written) in all {
        let stays = deleted.get(n).is_none_or(|fate| *fate == Fate::Failed);
        if written.fate == Fate::Acknowledged && stays && matches!(step(*n), Step::Click) {
            assert!(found.contains(n), "click {n} was acknowledged and is lost");
        }
    }
}
