//! Connections whose clients have not said yet who they are.
//!
//! Anybody who reaches the port can open them, so there is a bound on their number. Where it is reached the oldest
//! gives way, of the address that has most: somebody who opens many and says nothing hurts mostly himself. A
//! connection has [`GRACE`] before it gives way: clients that come in a burst and go on at once all get in, those
//! beyond the places a moment later.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// How long a client may take to say something before others may get its place.
const GRACE: Duration = Duration::from_millis(500);

/// A place for each connection that may wait at a time.
pub struct ConnectionLimit {
    places: usize,
    waiting: Mutex<Waiting>,
    /// Somebody has left.
    left: Notify,
}

#[derive(Default)]
struct Waiting {
    next: u64,
    /// By the order of their arrival.
    by_number: BTreeMap<u64, Place>,
}

struct Place {
    network: IpAddr,
    since: Instant,
    /// Something is being done for the client: nobody else gets the place.
    kept: bool,
    /// Somebody else gets the place.
    lost: CancellationToken,
}

/// The place of a connection whose client has not identified itself yet, given back when dropped.
pub struct PendingConnection {
    connection_limit: Arc<ConnectionLimit>,
    number: u64,
    lost: CancellationToken,
}

impl ConnectionLimit {
    pub fn new(places: usize) -> Arc<ConnectionLimit> {
        let (waiting, left) = (Mutex::default(), Notify::new());
        Arc::new(ConnectionLimit { places: places.max(1), waiting, left })
    }

    /// A place, once there is one: whoever loses his is waited for, so that there are never more connections than
    /// places.
    pub async fn enter(self: &Arc<Self>, address: IpAddr) -> PendingConnection {
        loop {
            let left = self.left.notified();
            match self.try_enter(address) {
                Ok(pending_connection) => return pending_connection,
                Err(None) => left.await,
                Err(Some(until)) => {
                    // Whether somebody left or somebody's time is over: tried again.
                    let _ = tokio::time::timeout_at(until, left).await;
                }
            }
        }
    }

    /// The next connection of a port with its place; `None` after `shutdown`. Meanwhile those of `tasks` that have
    /// ended are let go. `failure`: what the log says when nothing can be accepted, once in a row.
    pub async fn accept(
        self: &Arc<Self>,
        listener: &TcpListener,
        tasks: &mut JoinSet<()>,
        shutdown: &CancellationToken,
        failure: &'static str,
    ) -> Option<(TcpStream, SocketAddr, PendingConnection)> {
        let mut failing = false;
        loop {
            let accepted = tokio::select! {
                () = shutdown.cancelled() => return None,
                Some(_) = tasks.join_next() => continue,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((socket, address)) => {
                    let pending_connection = tokio::select! {
                        () = shutdown.cancelled() => return None,
                        pending_connection = self.enter(address.ip()) => pending_connection,
                    };
                    return Some((socket, address, pending_connection));
                }
                Err(error) => {
                    // Out of descriptors, say: others close in time.
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(%error, "{failure}");
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    /// A place, or when another one has to be given up at the earliest.
    fn try_enter(self: &Arc<Self>, address: IpAddr) -> Result<PendingConnection, Option<Instant>> {
        let (network, now) = (network_of(address), Instant::now());
        let mut waiting = self.waiting.lock();
        if waiting.by_number.len() >= self.places {
            return Err(waiting.make_room(network, now));
        }
        let (number, lost) = (waiting.next, CancellationToken::new());
        waiting.next += 1;
        let place = Place { network, since: now, kept: false, lost: lost.clone() };
        waiting.by_number.insert(number, place);
        Ok(PendingConnection { connection_limit: Arc::clone(self), number, lost })
    }
}

impl Waiting {
    /// Takes the place of the oldest connection of the network that has most, with the one that arrives; or says when
    /// that one will have had its time.
    fn make_room(&mut self, arriving: IpAddr, now: Instant) -> Option<Instant> {
        if self.by_number.values().any(|p| p.lost.is_cancelled()) {
            return None;
        }
        let mut counts = HashMap::from([(arriving, 1_usize)]);
        for place in self.by_number.values() {
            *counts.entry(place.network).or_default() += 1;
        }
        let count = |place: &Place| counts.get(&place.network).copied().unwrap_or_default();
        let idle = || self.by_number.values().filter(|p| !p.kept);
        let most = idle().map(count).max().unwrap_or_default();
        let oldest = idle().find(|p| count(p) == most)?;
        let until = oldest.since + GRACE;
        if now < until {
            return Some(until);
        }
        oldest.lost.cancel();
        None
    }
}

impl PendingConnection {
    /// Completes when the place goes to somebody else.
    pub async fn lost(&self) {
        self.lost.cancelled().await;
    }

    /// Whether nobody else may get the place for now.
    pub fn keep(&self, kept: bool) {
        if let Some(place) = self.connection_limit.waiting.lock().by_number.get_mut(&self.number) {
            place.kept = kept;
        }
        if !kept {
            self.connection_limit.left.notify_waiters();
        }
    }
}

impl Drop for PendingConnection {
    fn drop(&mut self) {
        self.connection_limit.waiting.lock().by_number.remove(&self.number);
        self.connection_limit.left.notify_waiters();
    }
}

/// What one owner usually has: an IPv4 address, or the first half of one of IPv6.
pub(crate) fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)))
        }
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_of_the_network_that_has_most_gives_way() {
        let connection_limit = ConnectionLimit::new(4);
        let enter = |text: &str| connection_limit.enter(address(text)).now_or_never();
        let alone = enter("10.0.0.1").unwrap();
        let many: Vec<PendingConnection> =
            ["2001:db8::1", "2001:db8::2", "2001:db8::3"].map(|a| enter(a).unwrap()).into();
        let lost = |e: &PendingConnection| e.lost().now_or_never().is_some();
        assert!(enter("10.0.0.2").is_none(), "nobody has left yet");
        assert!(!many.iter().any(lost), "nobody has had his time yet");
        tokio::time::advance(GRACE).await;
        for _ in 0..2 {
            assert!(enter("10.0.0.2").is_none(), "nobody has left yet");
        }
        assert!(!lost(&alone), "older, and the only one of its network");
        assert_eq!(many.iter().map(lost).collect::<Vec<_>>(), [true, false, false]);
        alone.keep(true);
        drop(many);
        let next = enter("10.0.0.2").expect("there is room");
        assert!(!lost(&next) && !lost(&alone));
    }

    #[tokio::test(start_paused = true)]
    async fn who_arrives_waits_for_the_place() {
        let connection_limit = ConnectionLimit::new(1);
        let first = connection_limit.enter(address("10.0.0.1")).await;
        let gone = async {
            first.lost().await;
            drop(first);
        };
        let (_second, ()) = tokio::join!(connection_limit.enter(address("10.0.0.2")), gone);
    }
}
