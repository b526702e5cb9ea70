//! Which server listens on a SQL port: a question that is asked before a session, in the clear, and answered by the one
//! server that it names.
//!
//! A server that runs all roles names its SQL port in the log, with the random number by which it has registered (its
//! nonce). Whoever is about to take the lead on the same object store asks there whether that server still answers. So
//! the port answers from before that registration on: [`StartingPort`] answers while the server starts, and keeps the
//! connections of clients until they can be served.
//!
//! The question is a packet like a cancel request: length, a code that PostgreSQL does not use, and the nonce. The
//! answer is one byte, `L`, and the nonce with all bits inverted, or nothing. Only who has read the log knows the nonce;
//! others are told nothing.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::task::spawn;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

/// In the place of a protocol version; PostgreSQL's own are 1234 and 5678 to 5680.
const CODE: u32 = 1234 << 16 | 5700;
/// Length, code and nonce.
const QUESTION_BYTES: usize = 16;
/// Of which so many tell that it is one.
const HEAD_BYTES: usize = 8;
const ANSWER_BYTES: usize = 9;
/// After an error of the port.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Between two looks at a question of which a part has come.
const PART_PAUSE: Duration = Duration::from_millis(10);

type Question = [u8; QUESTION_BYTES];

fn question(nonce: u64) -> Question {
    let mut bytes = [0; QUESTION_BYTES];
    bytes[..4].copy_from_slice(&(QUESTION_BYTES as u32).to_be_bytes());
    bytes[4..HEAD_BYTES].copy_from_slice(&CODE.to_be_bytes());
    bytes[HEAD_BYTES..].copy_from_slice(&nonce.to_be_bytes());
    bytes
}

fn answer(nonce: u64) -> [u8; ANSWER_BYTES] {
    let mut bytes = [b'L'; ANSWER_BYTES];
    bytes[1..].copy_from_slice(&(!nonce).to_be_bytes());
    bytes
}

/// What the first bytes of a connection are.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Opening {
    /// Too few have come.
    Unknown,
    /// Not a question.
    Client,
    Question(Question),
}

/// Looks at the first bytes of a connection.
pub(crate) fn opening(bytes: &[u8]) -> Opening {
    let head = bytes.len().min(HEAD_BYTES);
    if bytes[..head] != question(0)[..head] {
        return Opening::Client;
    }
    match bytes.first_chunk::<QUESTION_BYTES>() {
        Some(question) => Opening::Question(*question),
        None => Opening::Unknown,
    }
}

/// Who this server is, for those who ask. Without a nonce it answers nobody.
#[derive(Debug, Default)]
pub struct Identification {
    /// As it registers in the log; 0: it has none.
    nonce: u64,
    /// Told when somebody has asked who knows the nonce: another server may be about to take the lead, or have it.
    pub asked: Notify,
}

impl Identification {
    pub fn new(nonce: u64) -> Identification {
        Identification { nonce, asked: Notify::new() }
    }

    /// The answer to a question; `None`: another server is meant.
    pub(crate) fn answer(&self, asked: &Question) -> Option<[u8; ANSWER_BYTES]> {
        if self.nonce == 0 || *asked != question(self.nonce) {
            return None;
        }
        self.asked.notify_one();
        Some(answer(self.nonce))
    }
}

/// Whether the server with this nonce answers at an address, within this time: a machine that is gone refuses nothing.
pub async fn is_there(address: &str, nonce: u64, limit: Duration) -> bool {
    let exchange = async {
        let mut socket = TcpStream::connect(address).await?;
        socket.write_all(&question(nonce)).await?;
        let mut answered = [0; ANSWER_BYTES];
        socket.read_exact(&mut answered).await.map(|_| answered)
    };
    let answered = tokio::time::timeout(limit, exchange).await;
    matches!(answered, Ok(Ok(bytes)) if bytes == answer(nonce))
}

/// A connection that has been accepted.
pub type Accepted = (TcpStream, SocketAddr);

/// The port of a server that starts: it answers who it is, and lets clients wait.
pub struct StartingPort {
    stop: CancellationToken,
    task: JoinHandle<(TcpListener, VecDeque<Accepted>)>,
}

impl StartingPort {
    /// At most `most` clients wait; beyond, the oldest is turned away.
    pub fn open(listener: TcpListener, identity: Arc<Identification>, most: usize) -> StartingPort {
        let stop = CancellationToken::new();
        let wait = wait_for_start(listener, identity, most.max(1), stop.clone());
        StartingPort { stop, task: spawn("answer on a port that starts", wait) }
    }

    /// The server has started: the port, and the clients that wait.
    pub async fn take(mut self) -> std::io::Result<(TcpListener, VecDeque<Accepted>)> {
        self.stop.cancel();
        (&mut self.task).await.map_err(std::io::Error::other)
    }
}

impl Drop for StartingPort {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn wait_for_start(
    listener: TcpListener,
    identity: Arc<Identification>,
    most: usize,
    stop: CancellationToken,
) -> (TcpListener, VecDeque<Accepted>) {
    let (mut tasks, mut clients) = (JoinSet::new(), VecDeque::new());
    // Of those that wait, by the order of their arrival: what turns each away.
    let mut waiting: VecDeque<Arc<CancellationToken>> = VecDeque::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            Some(ended) = tasks.join_next() => {
                clients.extend(ended.ok().flatten());
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        let Ok((socket, address)) = accepted else {
            // Out of descriptors, say: others close in time.
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        waiting.retain(|token| Arc::strong_count(token) > 1);
        if waiting.len() >= most
            && let Some(oldest) = waiting.pop_front()
        {
            oldest.cancel();
        }
        let turned_away = Arc::new(CancellationToken::new());
        waiting.push_back(Arc::clone(&turned_away));
        let (identity, started) = (Arc::clone(&identity), stop.clone());
        tasks.spawn(async move {
            tokio::select! {
                biased;
                () = turned_away.cancelled() => None,
                client = client_of(socket, &identity, &started) => Some((client?, address)),
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        clients.extend(ended.ok().flatten());
    }
    (listener, clients)
}

/// Answers a question; else the connection, once the server has started. `None`: it is over.
async fn client_of(
    mut socket: TcpStream,
    identity: &Identification,
    started: &CancellationToken,
) -> Option<TcpStream> {
    let mut bytes = [0; QUESTION_BYTES];
    loop {
        let seen = tokio::select! {
            biased;
            () = started.cancelled() => return Some(socket),
            seen = socket.peek(&mut bytes) => seen.ok()?,
        };
        match opening(&bytes[..seen]) {
            Opening::Unknown if seen == 0 => return None,
            // Looking again would not wait for more.
            Opening::Unknown => tokio::time::sleep(PART_PAUSE).await,
            Opening::Client => {
                started.cancelled().await;
                return Some(socket);
            }
            Opening::Question(asked) => {
                // Read before it is answered: a socket that is closed with unread bytes is reset.
                socket.read_exact(&mut bytes).await.ok()?;
                if let Some(answer) = identity.answer(&asked) {
                    // Whoever has gone needs no answer.
                    let _ = socket.write_all(&answer).await;
                }
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONCE: u64 = 0x1234_5678_9abc_def0;

    async fn answers(address: &str, nonce: u64) -> bool {
        is_there(address, nonce, Duration::from_secs(60)).await
    }

    async fn port() -> (StartingPort, Arc<Identification>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let identity = Arc::new(Identification::new(NONCE));
        (StartingPort::open(listener, Arc::clone(&identity), 2), identity, address)
    }

    #[test]
    fn a_question_is_told_from_what_clients_say() {
        let asked = question(NONCE);
        assert_eq!(opening(&asked), Opening::Question(asked));
        assert_eq!(opening(&asked[..7]), Opening::Unknown);
        assert_eq!(opening(&[]), Opening::Unknown);
        // A startup packet, a request for TLS, and an HTTP request.
        for client in [&b"\0\0\0\x10\0\x03\0\0"[..], b"\0\0\0\x08\x04\xd2\x16\x2f", b"GET / HTTP/1"]
        {
            assert_eq!(opening(client), Opening::Client);
        }
    }

    #[tokio::test]
    async fn only_the_server_that_is_meant_answers() {
        let (port, identity, address) = port().await;
        assert!(!answers(&address, NONCE + 1).await);
        assert!(!answers(&address, 0).await, "nobody has this one");
        assert!(answers(&address, NONCE).await);
        identity.asked.notified().await;
        let (listener, clients) = port.take().await.unwrap();
        assert!(clients.is_empty());
        drop(listener);
        assert!(!answers(&address, NONCE).await, "nobody listens");
    }

    #[tokio::test]
    async fn clients_wait_until_the_server_has_started() {
        let (port, _, address) = port().await;
        let mut clients = Vec::new();
        for said in ["", "one", "a startup packet"] {
            let mut client = TcpStream::connect(&address).await.unwrap();
            client.write_all(said.as_bytes()).await.unwrap();
            clients.push(client);
            assert!(answers(&address, NONCE).await, "clients keep nobody from asking");
        }
        let (_listener, waiting) = port.take().await.unwrap();
        let mut said = Vec::new();
        for (mut socket, _) in waiting {
            let mut bytes = [0; 3];
            socket.read_exact(&mut bytes).await.unwrap();
            said.push(String::from_utf8_lossy(&bytes).into_owned());
        }
        assert!(said.contains(&"a s".to_owned()), "the newest is there: {said:?}");
        assert_eq!(clients[0].read(&mut [0]).await.unwrap(), 0, "the oldest was turned away");
    }
}
