//! Sessions that write one statement after the other, whatever happens to their frontends, and note what became of each.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Error};

use crate::process::connect;

/// How long a number of statements may take, restarts of processes included.
const PROGRESS_LIMIT: Duration = Duration::from_secs(120);

/// What became of a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Acknowledged,
    Failed,
    /// Nobody knows, or the session was lost.
    Unknown,
}

/// What two sessions write. The numbers of the first one's statements are even, those of the other one's odd.
pub trait Workload: Default + Send + Sync + 'static {
    /// Between two statements of a session.
    const PAUSE: Duration = Duration::ZERO;

    /// A statement, or a transaction from BEGIN to COMMIT.
    fn statement(&self, n: i64) -> String;

    /// It began then, and its answer is here.
    fn note(&self, n: i64, fate: Fate, began: Instant);
}

/// What a session has had acknowledged.
#[derive(Clone, Copy, Default)]
struct Acknowledged {
    count: usize,
    /// When the newest one began.
    newest: Option<Instant>,
}

/// How it went.
pub struct Outcomes<W> {
    pub workload: Arc<W>,
    /// How many failed with which error.
    pub errors: BTreeMap<String, usize>,
    /// The longest time that a statement took until it succeeded or failed.
    pub longest: Duration,
}

#[derive(Default)]
struct Notes {
    errors: BTreeMap<String, usize>,
    longest: Duration,
}

/// Two sessions, at two frontends, that write until they are ended.
pub struct Writers<W> {
    workload: Arc<W>,
    addresses: Arc<Mutex<[String; 2]>>,
    notes: Arc<Mutex<Notes>>,
    acknowledged: watch::Sender<[Acknowledged; 2]>,
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

struct Session<W> {
    number: usize,
    workload: Arc<W>,
    addresses: Arc<Mutex<[String; 2]>>,
    notes: Arc<Mutex<Notes>>,
    acknowledged: watch::Sender<[Acknowledged; 2]>,
    stop: watch::Receiver<bool>,
}

impl<W: Workload> Writers<W> {
    pub fn start(addresses: [String; 2]) -> Writers<W> {
        let (acknowledged, stop) = (watch::Sender::default(), watch::Sender::new(false));
        let (addresses, notes) = (Arc::new(Mutex::new(addresses)), Arc::default());
        let workload = Arc::new(W::default());
        let session = |number| Session {
            number,
            workload: Arc::clone(&workload),
            addresses: Arc::clone(&addresses),
            notes: Arc::clone(&notes),
            acknowledged: acknowledged.clone(),
            stop: stop.subscribe(),
        };
        let tasks = [0, 1].map(|number| tokio::spawn(session(number).run())).into();
        Writers { workload, addresses, notes, acknowledged, stop, tasks }
    }

    /// Frontends are reached elsewhere now.
    pub fn move_to(&self, addresses: [String; 2]) {
        *self.addresses.lock().expect("nobody panics with it") = addresses;
    }

    /// Waits until so many more have been acknowledged.
    pub async fn progress(&self, more: usize) {
        let goal = self.counts().iter().sum::<usize>() + more;
        let mut acknowledged = self.acknowledged.subscribe();
        let count = |all: &[Acknowledged; 2]| all.iter().map(|a| a.count).sum::<usize>();
        let reached = acknowledged.wait_for(|all| count(all) >= goal);
        let reached = tokio::time::timeout(PROGRESS_LIMIT, reached).await;
        assert!(reached.is_ok(), "writes do not go on; errors until now: {}", self.errors());
    }

    /// How many each session has had acknowledged.
    pub fn counts(&self) -> [usize; 2] {
        self.acknowledged.borrow().map(|a| a.count)
    }

    /// Whether each session has had one acknowledged that began after this moment.
    pub fn have_written_since(&self, moment: Instant) -> [bool; 2] {
        self.acknowledged.borrow().map(|a| a.newest.is_some_and(|began| began >= moment))
    }

    pub fn errors(&self) -> String {
        format!("{:#?}", self.notes.lock().expect("nobody panics with it").errors)
    }

    pub async fn end(self) -> Outcomes<W> {
        self.stop.send_replace(true);
        for task in self.tasks {
            task.await.expect("a session that writes");
        }
        let notes = std::mem::take(&mut *self.notes.lock().expect("nobody panics with it"));
        Outcomes { workload: self.workload, errors: notes.errors, longest: notes.longest }
    }
}

impl<W: Workload> Session<W> {
    async fn run(self) {
        let mut n = self.number as i64;
        while !*self.stop.borrow() {
            let address =
                self.addresses.lock().expect("nobody panics with it")[self.number].clone();
            let Ok(client) = connect(&address).await else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            while !*self.stop.borrow() && !client.is_closed() {
                n += 2;
                self.write(&client, n).await;
                if !W::PAUSE.is_zero() {
                    tokio::time::sleep(W::PAUSE).await;
                }
            }
        }
    }

    async fn write(&self, client: &Client, n: i64) {
        let began = Instant::now();
        let done = client.batch_execute(&self.workload.statement(n)).await;
        self.note(began, done.as_ref().err());
        let Err(error) = done else {
            self.workload.note(n, Fate::Acknowledged, began);
            self.acknowledged.send_modify(|all| {
                let own = &mut all[self.number];
                *own = Acknowledged { count: own.count + 1, newest: Some(began) };
            });
            return;
        };
        // The session is gone, or the outcome is said to be unknown.
        let is_unknown = client.is_closed() || matches!(code(&error), "" | "08007" | "57P01");
        let fate = if is_unknown { Fate::Unknown } else { Fate::Failed };
        self.workload.note(n, fate, began);
        // After an error in the middle a transaction is still there; a lost session has none.
        let _ = client.batch_execute("ROLLBACK").await;
    }

    fn note(&self, began: Instant, error: Option<&Error>) {
        let mut notes = self.notes.lock().expect("nobody panics with it");
        notes.longest = notes.longest.max(began.elapsed());
        if let Some(error) = error {
            let text = error.as_db_error().map_or("", |e| e.message());
            *notes.errors.entry(format!("{} {text}", code(error))).or_default() += 1;
        }
    }
}

/// Empty: the error is not the server's.
fn code(error: &Error) -> &str {
    error.code().map_or("", |code| code.code())
}
