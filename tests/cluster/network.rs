//! The network between processes under test: a proxy in front of each, so that what two of them send each other can be
//! held back, one way or both, and their connections reset.
//!
//! Bytes that are held back arrive when the way is open again, as TCP sends them again after a partition. A connection that
//! begins meanwhile is there and silent. Who has opened a connection is known by the process that owns its socket.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::sessions::LIMIT;

/// At the system's table of sockets: one in which others come and go may lack some.
const LOOKS: usize = 3;

/// Of names: who sends, and to whom.
pub type Way = (&'static str, &'static str);

#[derive(Clone, Debug, Default)]
struct Rules {
    held: BTreeSet<Way>,
    /// How often connections between two, in the order of their names, were reset.
    resets: BTreeMap<Way, u64>,
}

#[derive(Default)]
struct Known {
    /// By process id.
    processes: BTreeMap<u32, &'static str>,
    /// By who uses it, if that is one process, and the address that a process listens at, that of its proxy.
    proxies: BTreeMap<(Option<&'static str>, String), String>,
}

#[derive(Clone)]
pub struct Network {
    rules: watch::Sender<Rules>,
    /// How much is held back now, in pieces as they came.
    waiting: watch::Sender<BTreeMap<Way, usize>>,
    known: Arc<Mutex<Known>>,
}

fn in_order((a, b): Way) -> Way {
    (a.min(b), a.max(b))
}

impl Network {
    pub fn new() -> Network {
        let (rules, waiting) = (watch::Sender::default(), watch::Sender::default());
        Network { rules, waiting, known: Arc::default() }
    }

    /// Where others reach a process that listens at this address.
    pub fn proxy(&self, name: &'static str, listens: &str) -> String {
        self.proxy_of(None, name, listens)
    }

    /// Where one process, and no other, reaches one that listens at this address.
    pub fn proxy_for(&self, from: &'static str, to: &'static str, listens: &str) -> String {
        self.proxy_of(Some(from), to, listens)
    }

    fn proxy_of(&self, from: Option<&'static str>, to: &'static str, listens: &str) -> String {
        let mut known = self.known.lock().expect("nobody panics with it");
        let key = (from, listens.to_owned());
        if let Some(proxy) = known.proxies.get(&key) {
            return proxy.clone();
        }
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        let address = listener.local_addr().expect("an address").to_string();
        known.proxies.insert(key, address.clone());
        let listener = TcpListener::from_std(listener).expect("a socket");
        tokio::spawn(serve(self.clone(), listener, (from, to), listens.to_owned()));
        address
    }

    /// The process of this id has this name.
    pub fn know(&self, id: u32, name: &'static str) {
        self.known.lock().expect("nobody panics with it").processes.insert(id, name);
    }

    /// Holds back what goes these ways.
    pub fn hold(&self, ways: impl IntoIterator<Item = Way>) {
        self.rules.send_modify(|rules| rules.held.extend(ways));
    }

    /// Lets through what goes these ways, and what was held back.
    pub fn release(&self, ways: &[Way]) {
        self.rules.send_modify(|rules| rules.held.retain(|way| !ways.contains(way)));
    }

    /// Returns when bytes have come that go this way and are held back.
    pub async fn await_held(&self, way: Way) {
        let mut waiting = self.waiting.subscribe();
        let held = waiting.wait_for(|all| all.get(&way).is_some_and(|pieces| *pieces > 0));
        let held = tokio::time::timeout(LIMIT, held).await;
        assert!(held.is_ok(), "nothing goes this way: {way:?}");
    }

    /// Ends all connections between two.
    pub fn reset(&self, between: Way) {
        self.rules.send_modify(|rules| *rules.resets.entry(in_order(between)).or_default() += 1);
    }

    /// Bytes have come that go this way: returns when they are let through.
    async fn pass(&self, way: Way) {
        if self.rules.borrow().held.contains(&way) {
            let _piece = Piece::new(self, way);
            open(self, way).await;
        }
    }

    /// Who has opened a connection from this address to that one.
    fn owner(&self, from: SocketAddr, to: SocketAddr) -> Option<&'static str> {
        let inode = (0..LOOKS).find_map(|_| inode_of(from.port(), to.port()))?;
        let processes = self.known.lock().expect("nobody panics with it").processes.clone();
        processes.into_iter().find(|(id, _)| owns(*id, &inode)).map(|(_, name)| name)
    }
}

/// Bytes that are held back.
struct Piece<'a> {
    network: &'a Network,
    way: Way,
}

impl<'a> Piece<'a> {
    fn new(network: &'a Network, way: Way) -> Piece<'a> {
        network.waiting.send_modify(|all| *all.entry(way).or_default() += 1);
        Piece { network, way }
    }
}

impl Drop for Piece<'_> {
    fn drop(&mut self) {
        self.network.waiting.send_modify(|all| {
            if let Some(pieces) = all.get_mut(&self.way) {
                *pieces -= 1;
            }
        });
    }
}

/// The socket of this machine's that is connected from its own port to this other one. Connections to different ports may
/// have the same port of their own.
fn inode_of(own: u16, other: u16) -> Option<String> {
    let table = std::fs::read_to_string("/proc/net/tcp").ok()?;
    // There may be thousands of rows: number, own address, other address, state, …, inode.
    let (own, other) = (format!(":{own:04X} "), format!(":{other:04X} 01"));
    let is_own = |line: &&str| {
        line.find(&own).is_some_and(|at| line[at + own.len()..].get(8..16) == Some(&*other))
    };
    let row = table.lines().skip(1).find(is_own)?;
    row.split_whitespace().nth(9).map(str::to_owned)
}

fn owns(process: u32, inode: &str) -> bool {
    let socket = format!("socket:[{inode}]");
    let Ok(files) = std::fs::read_dir(format!("/proc/{process}/fd")) else { return false };
    let mut links = files.flatten().filter_map(|file| std::fs::read_link(file.path()).ok());
    links.any(|link| link.as_os_str() == socket.as_str())
}

async fn serve(
    network: Network,
    listener: TcpListener,
    (from, to): (Option<&'static str>, &'static str),
    target: String,
) {
    while let Ok((client, address)) = listener.accept().await {
        let (network, target) = (network.clone(), target.clone());
        tokio::spawn(async move {
            // Looking takes a while, and the object store is served by the same threads. Whoever is not known, because it
            // has just ended, is not cut off.
            let looks = network.clone();
            let proxy = client.local_addr().expect("a socket that is connected");
            let owner = || tokio::task::spawn_blocking(move || looks.owner(address, proxy));
            let from = match from {
                Some(from) => from,
                None => owner().await.ok().flatten().unwrap_or_default(),
            };
            let ways = [(from, to), (to, from)];
            let reset = network.rules.subscribe();
            tokio::select! {
                () = reset_of(reset, in_order(ways[0])) => {}
                () = forward(&network, client, &target, ways) => {}
            }
        });
    }
}

async fn reset_of(mut rules: watch::Receiver<Rules>, between: Way) {
    let count = |rules: &Rules| rules.resets.get(&between).copied().unwrap_or_default();
    let before = count(&rules.borrow());
    // The network lives as long as the test.
    let _ = rules.wait_for(|rules| count(rules) != before).await;
}

/// Until one side ends the connection.
async fn forward(network: &Network, client: TcpStream, target: &str, [there, back]: [Way; 2]) {
    let mut first = [0];
    tokio::select! {
        biased;
        () = open(network, there) => {}
        // What is sent before the connection is there waits with it.
        Ok(1..) = client.peek(&mut first) => network.pass(there).await,
    }
    let Ok(server) = TcpStream::connect(target).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::join!(
        copy(network, from_client, to_server, there),
        copy(network, from_server, to_client, back)
    );
}

/// Returns when what goes this way is let through.
async fn open(network: &Network, way: Way) {
    let mut rules = network.rules.subscribe();
    let _ = rules.wait_for(|rules| !rules.held.contains(&way)).await;
}

async fn copy(
    network: &Network,
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    way: Way,
) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(read) = from.read(&mut bytes).await {
        // The end of a stream is held back like all else.
        match read {
            0 => open(network, way).await,
            _ => network.pass(way).await,
        }
        if read == 0 || to.write_all(&bytes[..read]).await.is_err() {
            break;
        }
    }
    let _ = to.shutdown().await;
}

/// All ways between one and these others.
pub fn around(one: &'static str, others: &[&'static str]) -> Vec<Way> {
    let others = others.iter().copied().filter(|other| *other != one);
    others.flat_map(|other| [(one, other), (other, one)]).collect()
}

#[tokio::test]
async fn what_is_held_back_arrives_later_and_one_way_only() {
    let network = Network::new();
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = network.proxy("server", &server.local_addr().unwrap().to_string());
    network.know(std::process::id(), "client");
    let mut client = TcpStream::connect(proxy).await.unwrap();
    client.write_all(b"1").await.unwrap();
    let (mut accepted, _) = server.accept().await.unwrap();
    assert_eq!(accepted.read_u8().await.unwrap(), b'1');
    network.hold([("client", "server")]);
    client.write_all(b"2").await.unwrap();
    network.await_held(("client", "server")).await;
    accepted.write_all(b"3").await.unwrap();
    assert_eq!(client.read_u8().await.unwrap(), b'3', "the other way is open");
    let held = tokio::time::timeout(Duration::from_millis(200), accepted.read_u8()).await;
    assert!(held.is_err(), "it has come through");
    network.release(&[("client", "server")]);
    assert_eq!(accepted.read_u8().await.unwrap(), b'2');
    network.reset(("server", "client"));
    assert_eq!(client.read(&mut [0]).await.unwrap_or(0), 0, "the connection has ended");
}

#[tokio::test]
async fn connections_with_the_same_port_of_their_own_are_told_apart() {
    let servers = [(), ()].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let mut own = "127.0.0.1:0".parse().unwrap();
    let mut clients = Vec::new();
    for server in &servers {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(own).unwrap();
        own = socket.local_addr().unwrap();
        clients.push(socket.connect(server.local_addr().unwrap()).await.unwrap());
    }
    for (server, client) in servers.iter().zip(&clients) {
        let inode = inode_of(own.port(), server.local_addr().unwrap().port());
        let link = std::fs::read_link(format!("/proc/self/fd/{}", client.as_raw_fd())).unwrap();
        assert_eq!(link.to_str(), Some(&*format!("socket:[{}]", inode.unwrap())));
    }
}
