//! Who is logged in to the web console.
//!
//! A login is a random token that the browser sends back as a cookie. It is kept in memory only, and ends with the
//! server, when its user logs out, is dropped or gets another password, after an hour without a request, and after
//! twelve hours at the latest. Whoever guesses passwords waits, ever longer, before the next guess is looked at.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::most_frequent;
use crate::auth;
use crate::connection_limit::network_of;
use crate::server::Shared;

/// A login ends when nothing was asked for so long,
const IDLE_LIMIT: Duration = Duration::from_secs(60 * 60);
/// and at the latest after this time.
pub const AGE_LIMIT: Duration = Duration::from_secs(12 * 60 * 60);
/// Logins at a time; another one ends one of the user who has most: that which was unused for longest.
const MAX_LOGINS: usize = 256;
/// Logins of one user at a time; another one ends the one that was unused for longest.
const MAX_OF_USER: usize = 16;
/// Passwords that are checked at a time: each costs some milliseconds of a processor.
const CHECKS: usize = 2;
/// Failures of one address that cost it no time.
const FREE_FAILURES: u32 = 5;
/// What a failure after these costs at most.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// After so long without another attempt failures are forgotten.
const FORGET: Duration = Duration::from_secs(15 * 60);
/// Addresses whose failures are kept; another one takes the place of that which has not been heard of for longest.
const MAX_ADDRESSES: usize = 4096;

type Token = [u8; 32];

struct Login {
    token: Token,
    user: String,
    /// Of the password it was made with.
    verifier: String,
    began: Instant,
    used: Instant,
}

impl Login {
    fn is_alive(&self, now: Instant) -> bool {
        now.duration_since(self.used) < IDLE_LIMIT && now.duration_since(self.began) < AGE_LIMIT
    }
}

/// Why somebody was not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// There is no such user, it has no password, or another one.
    Wrong,
    /// Too many attempts have failed: the next one is looked at after this time.
    Wait(Duration),
}

/// All logins of a server, and the attempts that failed.
pub struct Logins {
    open: Mutex<Vec<Login>>,
    attempts: Mutex<Attempts>,
    checks: Semaphore,
}

impl Default for Logins {
    fn default() -> Logins {
        Logins {
            open: Mutex::default(),
            attempts: Mutex::default(),
            checks: Semaphore::new(CHECKS),
        }
    }
}

impl Logins {
    /// The token of a new login.
    pub async fn enter(
        &self,
        shared: &Shared,
        from: IpAddr,
        user: &str,
        password: String,
    ) -> Result<String, Refused> {
        // Counted before it is checked: many attempts at once are as many.
        self.attempts.lock().begin(network_of(from), Instant::now()).map_err(Refused::Wait)?;
        // Another frontend may have changed the user. While the leader is asked, others have their turn.
        shared.cluster.newest_definitions().await;
        let Ok(_turn) = self.checks.acquire().await else { return Err(Refused::Wrong) };
        let verifier = shared.cluster.users().remove(user).flatten();
        let kept = verifier.clone();
        let check = move || auth::is_password(kept.as_deref(), &password);
        let right = tokio::task::spawn_blocking(check).await.unwrap_or(false);
        let Some(verifier) = verifier.filter(|_| right) else { return Err(Refused::Wrong) };
        let now = Instant::now();
        self.attempts.lock().succeeded(network_of(from));
        Ok(self.open(user, verifier, now))
    }

    fn open(&self, user: &str, verifier: String, now: Instant) -> String {
        let token: Token = rand::random();
        let mut open = self.open.lock();
        open.retain(|l| l.is_alive(now));
        if open.iter().filter(|l| l.user == user).count() >= MAX_OF_USER {
            end_oldest_of(user, &mut open);
        } else if open.len() >= MAX_LOGINS
            && let Some(user) = most_frequent(open.iter().map(|l| l.user.as_str()))
        {
            end_oldest_of(&user, &mut open);
        }
        open.push(Login { token, user: user.to_owned(), verifier, began: now, used: now });
        token.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Whose login a token is. The login is used by that.
    pub fn user_of(&self, shared: &Shared, token: &str) -> Option<String> {
        let (user, verifier) = self.used(token, Instant::now())?;
        // Another password, or none: the login was made with what does not count any more.
        if shared.cluster.users().remove(&user).flatten() == Some(verifier) {
            return Some(user);
        }
        self.leave(token);
        None
    }

    fn used(&self, token: &str, now: Instant) -> Option<(String, String)> {
        let token = parse(token)?;
        let mut open = self.open.lock();
        open.retain(|l| l.is_alive(now));
        let login = open.iter_mut().find(|l| auth::is_same(&l.token, &token))?;
        login.used = now;
        Some((login.user.clone(), login.verifier.clone()))
    }

    /// Ends a login, if there is one.
    pub fn leave(&self, token: &str) {
        if let Some(token) = parse(token) {
            self.open.lock().retain(|l| !auth::is_same(&l.token, &token));
        }
    }
}

fn end_oldest_of(user: &str, open: &mut Vec<Login>) {
    let of_user = open.iter().enumerate().filter(|(_, l)| l.user == user);
    if let Some((oldest, _)) = of_user.min_by_key(|(_, l)| l.used) {
        open.swap_remove(oldest);
    }
}

fn parse(text: &str) -> Option<Token> {
    let digits = text.as_bytes();
    let mut token = Token::default();
    if digits.len() != 2 * token.len() {
        return None;
    }
    for (byte, pair) in token.iter_mut().zip(digits.chunks_exact(2)) {
        let text = std::str::from_utf8(pair).ok().filter(|t| !t.starts_with('+'))?;
        *byte = u8::from_str_radix(text, 16).ok()?;
    }
    Some(token)
}

/// Attempts of one address that have not succeeded.
struct Failures {
    count: u32,
    last: Instant,
    /// Nothing is looked at before.
    until: Instant,
}

#[derive(Default)]
struct Attempts(HashMap<IpAddr, Failures>);

impl Attempts {
    /// Counts an attempt as a failure, until it succeeds; the error is how long to wait with it.
    fn begin(&mut self, from: IpAddr, now: Instant) -> Result<(), Duration> {
        if self.0.len() >= MAX_ADDRESSES && !self.0.contains_key(&from) {
            self.0.retain(|_, f| now.duration_since(f.last) < FORGET);
            let oldest = self.0.iter().min_by_key(|(_, f)| f.last).map(|(from, _)| *from);
            if let Some(oldest) = oldest.filter(|_| self.0.len() >= MAX_ADDRESSES) {
                self.0.remove(&oldest);
            }
        }
        let none = Failures { count: 0, last: now, until: now };
        let failures = self.0.entry(from).or_insert(none);
        if now.duration_since(failures.last) >= FORGET {
            failures.count = 0;
        }
        if now < failures.until {
            return Err(failures.until.duration_since(now));
        }
        failures.count = failures.count.saturating_add(1);
        failures.last = now;
        if let Some(costly) = failures.count.checked_sub(FREE_FAILURES).filter(|n| *n > 0) {
            failures.until = now + MAX_WAIT.min(Duration::from_secs(1 << costly.min(10)));
        }
        Ok(())
    }

    /// Takes one attempt back. The others stay: their guesses may have been at another user's password.
    fn succeeded(&mut self, from: IpAddr) {
        if let Some(failures) = self.0.get_mut(&from) {
            failures.count = failures.count.saturating_sub(1);
            failures.until = failures.last;
            if failures.count == 0 {
                self.0.remove(&from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    #[test]
    fn a_login_ends_when_it_is_unused_and_when_it_is_old() {
        let (logins, began) = (Logins::default(), Instant::now());
        let token = logins.open("ann", "v".to_owned(), began);
        assert_eq!(token.len(), 64);
        let mut now = began;
        while now + IDLE_LIMIT / 2 < began + AGE_LIMIT {
            now += IDLE_LIMIT / 2;
            assert!(logins.used(&token, now).is_some());
        }
        assert!(logins.used(&token, began + AGE_LIMIT).is_none(), "old");
        let token = logins.open("ann", "v".to_owned(), began);
        assert!(logins.used(&token, began + IDLE_LIMIT).is_none(), "unused");
    }

    #[test]
    fn only_the_whole_token_counts() {
        let (logins, now) = (Logins::default(), Instant::now());
        let (ann, bob) =
            (logins.open("ann", "v".to_owned(), now), logins.open("bob", "w".to_owned(), now));
        assert_eq!(logins.used(&bob, now).unwrap().0, "bob");
        for wrong in ["", &ann[..62], &format!("{ann}00"), &"+1".repeat(32)] {
            assert!(logins.used(wrong, now).is_none(), "{wrong}");
        }
        logins.leave(&ann);
        assert!(logins.used(&ann, now).is_none() && logins.used(&bob, now).is_some());
    }

    #[test]
    fn logins_are_bounded() {
        let (logins, now) = (Logins::default(), Instant::now());
        let ann = logins.open("ann", "v".to_owned(), now);
        let first = logins.open("bob", "w".to_owned(), now);
        let later = now + Duration::from_secs(1);
        for _ in 0..MAX_OF_USER {
            logins.open("bob", "w".to_owned(), later);
        }
        assert!(logins.used(&first, later).is_none());
        assert_eq!(logins.open.lock().len(), 1 + MAX_OF_USER);
        for user in 0..MAX_LOGINS {
            logins.open(&format!("user {}", user / 2), "w".to_owned(), later);
        }
        assert!(logins.used(&ann, later).is_some(), "those of others do not end it");
        assert_eq!(logins.open.lock().len(), MAX_LOGINS);
    }

    #[test]
    fn a_new_address_is_listened_to_however_many_have_failed() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        let address = |n: usize| IpAddr::from((n as u128).to_be_bytes());
        for n in 0..MAX_ADDRESSES {
            let later = Duration::from_millis(u64::try_from(n).unwrap());
            assert_eq!(attempts.begin(address(n), now + later), Ok(()));
        }
        assert_eq!(attempts.begin(HERE, now + Duration::from_secs(10)), Ok(()));
        assert_eq!(attempts.0.len(), MAX_ADDRESSES);
        assert!(!attempts.0.contains_key(&address(0)) && attempts.0.contains_key(&address(1)));
    }

    #[test]
    fn guesses_cost_ever_more_time() {
        let (mut attempts, mut now) = (Attempts::default(), Instant::now());
        for _ in 0..=FREE_FAILURES {
            assert_eq!(attempts.begin(HERE, now), Ok(()));
        }
        let mut waited = Duration::ZERO;
        for _ in 0..8 {
            let wait = attempts.begin(HERE, now).unwrap_err();
            assert!(wait >= waited && wait <= MAX_WAIT, "{wait:?} after {waited:?}");
            assert_eq!(attempts.begin("10.0.0.1".parse().unwrap(), now), Ok(()), "another address");
            attempts.succeeded("10.0.0.1".parse().unwrap());
            waited = wait;
            now += wait;
            assert_eq!(attempts.begin(HERE, now), Ok(()));
        }
        assert_eq!(waited, MAX_WAIT);
        // A login of one's own does not make guesses at others' passwords free.
        now += MAX_WAIT;
        assert_eq!(attempts.begin(HERE, now), Ok(()));
        attempts.succeeded(HERE);
        assert_eq!(attempts.begin(HERE, now), Ok(()));
        assert!(attempts.begin(HERE, now).is_err());
        assert_eq!(attempts.begin(HERE, now + FORGET), Ok(()));
    }
}
