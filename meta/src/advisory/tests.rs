//! Who has a lock, who waits, and who is told no.

use std::sync::Arc;
use std::time::Duration;

use super::*;

fn session(pid: i32) -> SessionId {
    SessionId { process: 1, pid }
}

fn request(pid: i32, key: i64, mode: Mode) -> Request {
    Request { holder: session(pid), key: Key::One(key), mode, scope: Scope::Session, number: 0 }
}

/// Locks of sessions 1, 2 and 3.
fn locks() -> AdvisoryLocks {
    let locks = AdvisoryLocks::default();
    (1..=3).for_each(|pid| locks.enter(session(pid)));
    locks
}

impl AdvisoryLocks {
    fn takes(&self, request: &Request) -> bool {
        self.try_acquire(request).unwrap()
    }
}

#[test]
fn a_lock_is_given_back_as_often_as_it_was_taken() {
    let locks = locks();
    let own = request(1, 7, Mode::Exclusive);
    assert!(locks.takes(&own) && locks.takes(&own));
    assert!(!locks.takes(&request(2, 7, Mode::Shared)));
    assert!(locks.release(&own));
    assert!(!locks.takes(&request(2, 7, Mode::Shared)));
    assert!(locks.release(&own) && !locks.release(&own));
    assert!(locks.takes(&request(2, 7, Mode::Shared)));
    assert!(locks.takes(&request(3, 7, Mode::Shared)));
    assert!(!locks.release(&request(3, 7, Mode::Exclusive)));
    locks.release_all(session(2));
    locks.release_session(session(3));
    assert!(locks.list().is_empty());
    assert_eq!(locks.table.lock().entries, 0);
}

#[test]
fn a_transactions_locks_end_with_it() {
    let locks = locks();
    let key = Key::Two(1, -1);
    let own = Request { key, scope: Scope::Transaction, ..request(1, 0, Mode::Exclusive) };
    let longer = Request { scope: Scope::Session, ..own };
    assert!(locks.takes(&own) && !locks.release(&longer));
    assert_eq!(locks.list(), [Listed { key, holder: session(1), mode: own.mode, granted: true }]);
    assert!(locks.takes(&longer));
    locks.release_transaction(session(1));
    assert!(!locks.takes(&Request { holder: session(2), ..own }));
    locks.release_session(session(1));
    assert!(locks.takes(&Request { holder: session(2), ..own }));
}

#[test]
fn a_transaction_goes_back_to_a_savepoint() {
    let locks = locks();
    let of = |key| Request { scope: Scope::Transaction, ..request(1, key, Mode::Exclusive) };
    assert!(locks.takes(&of(1)));
    let then = locks.transaction_holds(session(1));
    assert!(locks.takes(&of(1)) && locks.takes(&of(2)));
    assert!(locks.takes(&request(1, 3, Mode::Shared)));
    locks.back_to(session(1), &then);
    assert!(!locks.takes(&request(2, 1, Mode::Shared)));
    assert!(locks.takes(&request(2, 2, Mode::Exclusive)));
    assert!(!locks.takes(&request(2, 3, Mode::Exclusive)));
    assert_eq!(locks.transaction_holds(session(1)), then);
    assert!(locks.release(&of(1)) && !locks.release(&of(1)));
}

#[test]
fn who_has_ended_takes_nothing() {
    let locks = locks();
    locks.release_all(session(1));
    let late = locks.try_acquire(&request(1, 7, Mode::Exclusive)).unwrap_err();
    assert_eq!(late.state.0, "57P01");
    assert!(locks.list().is_empty());
}

#[test]
fn there_is_an_end_of_locks() {
    let locks = locks();
    let all = MAX_ENTRIES as i64;
    (0..all).for_each(|key| assert!(locks.takes(&request(1, key, Mode::Exclusive))));
    let e = locks.try_acquire(&request(2, all, Mode::Exclusive)).unwrap_err();
    assert_eq!((e.state.0, e.message.as_str()), ("53200", "out of shared memory"));
    // What is held already takes no more room.
    assert!(locks.takes(&request(1, 0, Mode::Exclusive)));
    assert!(locks.release(&request(1, 1, Mode::Exclusive)));
    assert!(locks.takes(&request(2, all, Mode::Exclusive)));
    locks.release_all(session(1));
    assert_eq!(locks.table.lock().entries, 1);
}

#[tokio::test(start_paused = true)]
async fn waits_end_in_order_or_with_an_error() {
    let locks = Arc::new(locks());
    assert!(locks.takes(&request(1, 7, Mode::Exclusive)));
    // Who stops waiting stands in nobody's way.
    let limit = Duration::from_secs(1);
    let second = request(2, 7, Mode::Exclusive);
    let waited = tokio::time::timeout(limit, locks.acquire(&second));
    waited.await.unwrap_err();
    assert_eq!(locks.list().len(), 1);
    let waiting = {
        let locks = Arc::clone(&locks);
        tokio::spawn(async move {
            locks.acquire(&request(2, 7, Mode::Exclusive)).await?;
            locks.release_all(session(2));
            Ok::<(), SqlError>(())
        })
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(locks.blocking(session(2)), [session(1)]);
    // Who comes later does not pass who waits.
    locks.release_all(session(1));
    assert!(!locks.takes(&request(3, 7, Mode::Shared)));
    waiting.await.unwrap().unwrap();
    assert!(locks.takes(&request(3, 7, Mode::Shared)));
    assert_eq!(locks.table.lock().entries, 1);
}

#[tokio::test(start_paused = true)]
async fn a_wait_ends_with_its_session() {
    let locks = Arc::new(locks());
    assert!(locks.takes(&request(1, 7, Mode::Exclusive)));
    let waiting = {
        let locks = Arc::clone(&locks);
        tokio::spawn(async move { locks.acquire(&request(2, 7, Mode::Exclusive)).await })
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    locks.release_all(session(2));
    assert_eq!(waiting.await.unwrap().unwrap_err().state.0, "57P01");
    assert_eq!(locks.list().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_circle_is_found() {
    let locks = Arc::new(locks());
    assert!(locks.takes(&request(1, 1, Mode::Exclusive)));
    assert!(locks.takes(&request(2, 2, Mode::Exclusive)));
    let waiting = {
        let locks = Arc::clone(&locks);
        tokio::spawn(async move { locks.acquire(&request(1, 2, Mode::Exclusive)).await })
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    let e = locks.acquire(&request(2, 1, Mode::Shared)).await.unwrap_err();
    assert_eq!(e.state.0, "40P01");
    locks.release_all(session(2));
    waiting.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_was_given_back_is_not_taken_by_a_late_request() {
    let locks = Arc::new(locks());
    assert!(locks.takes(&request(1, 7, Mode::Exclusive)));
    let own = Request { number: 4, ..request(2, 7, Mode::Exclusive) };
    let waiting = {
        let locks = Arc::clone(&locks);
        tokio::spawn(async move { locks.acquire(&own).await })
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    locks.release_before(session(2), 5, &[(own.key, own.mode)]);
    waiting.await.unwrap().unwrap_err();
    locks.release_all(session(1));
    locks.try_acquire(&own).unwrap_err();
    assert!(locks.takes(&Request { number: 5, ..own }));
    locks.release_before(session(2), 6, &[(own.key, own.mode)]);
    assert!(locks.list().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_locks_of_a_fenced_process_are_free() {
    let locks = Arc::new(locks());
    let other = SessionId { process: 2, pid: 1 };
    locks.enter(other);
    let theirs = Request { holder: other, ..request(1, 7, Mode::Exclusive) };
    assert!(locks.takes(&theirs) && !locks.takes(&request(1, 7, Mode::Exclusive)));
    let waiting = {
        let locks = Arc::clone(&locks);
        tokio::spawn(async move { locks.acquire(&request(1, 7, Mode::Shared)).await })
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    locks.release_process(2);
    waiting.await.unwrap().unwrap();
    assert_eq!(locks.try_acquire(&theirs).unwrap_err().state.0, "57P01");
}

/// It may have been given one lock when it is fenced, and not know it.
#[test]
fn a_fenced_process_keeps_what_it_knows_of_until_all_is_freed() {
    let locks = locks();
    let (known, untold) = (request(1, 1, Mode::Exclusive), request(1, 2, Mode::Exclusive));
    let holder = SessionId { process: 2, pid: 9 };
    let other = |key| Request { holder, ..request(1, key, Mode::Shared) };
    locks.enter(holder);
    assert!(locks.takes(&known) && locks.takes(&untold) && locks.are_held_by(1));
    locks.release_untold(session(1), Some((untold.key, untold.mode)));
    assert!(locks.takes(&other(2)) && !locks.takes(&other(1)));
    locks.release_process(1);
    assert!(locks.takes(&other(1)) && !locks.are_held_by(1));
    // It has asked before, and is given nothing later.
    locks.enter(session(1));
    locks.release_untold(session(1), None);
    assert!(locks.try_acquire(&request(1, 3, Mode::Shared)).is_err());
}
