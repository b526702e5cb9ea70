//! Sessions of the other frontends, for `pg_stat_activity`. The leader is asked for them, and asks each frontend.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_rpc::control::{ListedSession, MetaControl, SessionsTold};
use parking_lot::Mutex;

use crate::incarnation::Incarnation;
use crate::server::{Activity, IDLE, Shared, shown_name};

/// How long the leader may take: a little longer than it waits for frontends.
const WAIT: Duration = Duration::from_secs(2);
/// Before the leader is called again.
const PAUSE: Duration = Duration::from_secs(1);

/// What a session may be that is not active.
const RESTING: [&str; 3] = [IDLE, "idle in transaction", "idle in transaction (aborted)"];

/// The sessions of the other frontends, as they were told last.
pub struct OtherSessions {
    incarnation: Incarnation,
    /// `None`: there is no other frontend.
    leader: Option<Arc<dyn MetaControl>>,
    /// How often the leader was asked.
    asked: AtomicU64,
    known: Mutex<Known>,
}

/// What was told last.
#[derive(Default)]
struct Known {
    /// Of the request that was answered with it.
    number: u64,
    sessions: Arc<Vec<Activity>>,
    /// What could not be found out, in sentences.
    missing: Vec<String>,
}

impl OtherSessions {
    pub fn new(incarnation: Incarnation, leader: Option<Arc<dyn MetaControl>>) -> OtherSessions {
        OtherSessions { incarnation, leader, asked: AtomicU64::new(0), known: Mutex::default() }
    }

    /// Asks for them. What could not be found out, in sentences. Of requests at the same time the newest counts, whichever
    /// is answered first.
    pub(crate) async fn refresh(&self) -> Vec<String> {
        let Some(leader) = &self.leader else { return Vec::new() };
        let number = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        let told = tokio::time::timeout(WAIT, leader.sessions(self.incarnation.get())).await;
        let (sessions, missing) = match told {
            Ok(Ok(answer)) => {
                let silent = answer.silent.iter();
                let message = |process| {
                    format!("frontend {process} does not answer: its sessions are left out")
                };
                (answer.sessions, silent.map(message).collect())
            }
            Ok(Err(error)) => (Vec::new(), vec![unknown(&error.to_string())]),
            Err(_) => (Vec::new(), vec![unknown("it has not answered in time")]),
        };
        let sessions = Arc::new(sessions.into_iter().map(activity).collect());
        let mut known = self.known.lock();
        if number > known.number {
            *known = Known { number, sessions, missing };
        }
        known.missing.clone()
    }

    pub(crate) fn list(&self) -> Arc<Vec<Activity>> {
        Arc::clone(&self.known.lock().sessions)
    }
}

fn unknown(cause: &str) -> String {
    format!("sessions of other frontends are left out: the leader does not tell them ({cause})")
}

/// Tells the leader this frontend's sessions whenever it asks, once the frontend has registered. Runs until it is dropped.
pub async fn tell_sessions(shared: Arc<Shared>) {
    let Some(leader) = &shared.other_sessions.leader else { return };
    let process = shared.config.incarnation.known().await;
    let (mut term, mut number) = (0, 0);
    loop {
        let own = if number > 0 { shared.activity() } else { Vec::new() };
        let sessions = own.into_iter().map(listed).collect();
        let told = SessionsTold { process, term, number, sessions };
        match leader.tell_sessions(told).await {
            Ok(wanted) => (term, number) = (wanted.term, wanted.number),
            Err(error) => {
                tracing::debug!(%error, "the leader does not ask for sessions");
                // Another leader counts its requests anew.
                (term, number) = (0, 0);
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

fn listed(a: Activity) -> ListedSession {
    ListedSession {
        pid: a.pid,
        user: a.user,
        database: a.database,
        application: a.application,
        query: a.query,
        active: a.active,
        resting: a.resting.to_owned(),
        address: a.address,
        server_address: a.server_address,
        started: a.started,
        transaction_started: a.transaction_started,
        query_started: a.query_started,
        changed: a.changed,
    }
}

fn activity(s: ListedSession) -> Activity {
    let resting = RESTING.into_iter().find(|known| *known == s.resting);
    Activity {
        pid: s.pid,
        user: s.user,
        database: s.database,
        application: shown_name(&s.application).to_owned(),
        query: s.query,
        active: s.active,
        resting: resting.unwrap_or(IDLE),
        address: s.address,
        server_address: s.server_address,
        started: s.started,
        transaction_started: s.transaction_started,
        query_started: s.query_started,
        changed: s.changed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_programs_end_with_a_whole_character() {
        assert_eq!(shown_name("psql"), "psql");
        assert_eq!(shown_name(""), "");
        assert_eq!(shown_name(&"x".repeat(64)), "x".repeat(63));
        assert_eq!(shown_name(&"é".repeat(40)), "é".repeat(31));
    }

    #[test]
    fn a_session_is_told_as_it_is() {
        let session = Activity {
            pid: 7,
            user: "u".into(),
            query: "SELECT 1".into(),
            resting: RESTING[1],
            transaction_started: Some(-1),
            ..Activity::default()
        };
        let told = activity(listed(session.clone()));
        assert_eq!(format!("{told:?}"), format!("{session:?}"));
    }
}
