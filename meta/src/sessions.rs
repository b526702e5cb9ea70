//! The sessions of all frontends of a cluster: each frontend keeps a call open by which it is asked for its own, and tells
//! them with the next one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_rpc::control::{ListedSession, SessionsTold};
use tokio::sync::watch;

/// How long frontends may take to tell.
const LIMIT: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Told {
    /// Of the request that it answers.
    number: u64,
    sessions: Vec<ListedSession>,
}

/// See the module. Holds what each frontend has told last.
#[derive(Debug, Default)]
pub struct SessionBoard {
    /// The number of the last request.
    asked: watch::Sender<u64>,
    told: watch::Sender<BTreeMap<u64, Told>>,
}

impl SessionBoard {
    /// A frontend tells its sessions, and waits for the next request. Returns its number.
    pub async fn tell(&self, told: SessionsTold) -> u64 {
        let SessionsTold { process, number, sessions, .. } = told;
        if number > 0 {
            let told = Told { number, sessions };
            self.told.send_modify(|all| drop(all.insert(process, told)));
        }
        let mut asked = self.asked.subscribe();
        // The sender is in `self`: there is no error.
        asked.wait_for(|asked| *asked > number).await.map_or(number, |asked| *asked)
    }

    /// What these frontends have by now, and those of them that do not tell.
    pub async fn ask(&self, frontends: &BTreeSet<u64>) -> (Vec<ListedSession>, Vec<u64>) {
        let mut number = 0;
        self.asked.send_modify(|asked| {
            *asked += 1;
            number = *asked;
        });
        let has_told = |all: &BTreeMap<u64, Told>, frontend: &u64| {
            all.get(frontend).is_some_and(|told| told.number >= number)
        };
        let mut told = self.told.subscribe();
        let all_have = told.wait_for(|all| frontends.iter().all(|f| has_told(all, f)));
        // Who has told by now is listed.
        let _ = tokio::time::timeout(LIMIT, all_have).await;
        let all = self.told.borrow();
        let (there, silent): (Vec<u64>, Vec<u64>) =
            frontends.iter().copied().partition(|frontend| has_told(&all, frontend));
        let told = there.iter().filter_map(|frontend| all.get(frontend));
        (told.flat_map(|told| told.sessions.iter().cloned()).collect(), silent)
    }

    /// The frontend is gone.
    pub fn forget(&self, frontend: u64) {
        self.told.send_if_modified(|all| all.remove(&frontend).is_some());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// A frontend with one session, whose id counts how often it has told of it.
    async fn frontend(board: Arc<SessionBoard>, process: u64) {
        let (mut number, mut pid) = (0, 0);
        loop {
            let sessions = vec![ListedSession { pid, ..ListedSession::default() }];
            number = board.tell(SessionsTold { process, number, sessions, term: 0 }).await;
            pid += 1;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_is_told_what_is_there_now() {
        let board = Arc::<SessionBoard>::default();
        let asked = async |of: &[u64]| {
            let (sessions, silent) = board.ask(&of.iter().copied().collect()).await;
            (sessions.iter().map(|s| s.pid).collect::<Vec<_>>(), silent)
        };
        let began = tokio::time::Instant::now();
        assert_eq!(asked(&[]).await, (vec![], vec![]));
        assert_eq!(asked(&[1]).await, (vec![], vec![1]));
        assert!(began.elapsed() < LIMIT * 2, "nobody waits for who does not answer");
        let running = tokio::spawn(frontend(Arc::clone(&board), 1));
        assert_eq!(asked(&[1, 2]).await.1, [2]);
        let began = tokio::time::Instant::now();
        let (first, silent) = asked(&[1]).await;
        assert!(silent.is_empty() && began.elapsed() < LIMIT);
        assert_eq!(asked(&[1]).await.0, [first[0] + 1], "what it has told before is past");
        running.abort();
        assert_eq!(asked(&[1]).await, (vec![], vec![1]));
        board.forget(1);
        assert!(board.told.borrow().is_empty());
    }
}
