//! A way to the S3-compatible server on which requests go wrong as the weather is: late, refused, cut off, done but
//! not answered, answered in part, never answered, or done long after whoever asked has given up.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

use crate::locked;
use crate::rng::Rng;

/// Longer than a server waits for an answer.
const HANG: Duration = Duration::from_secs(15);
/// Heads of requests are shorter.
const MOST_HEAD: usize = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weather {
    Calm,
    /// Every request takes its time.
    Slow,
    /// Some requests go wrong, each in its own way.
    Flaky,
    NoWrites,
    NoReads,
    /// Nothing goes through, or is answered.
    Outage,
    Hanging,
}

const BAD: [Weather; 8] = [
    Weather::Slow,
    Weather::Slow,
    Weather::Flaky,
    Weather::Flaky,
    Weather::NoWrites,
    Weather::NoReads,
    Weather::Outage,
    Weather::Hanging,
];

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Passes,
    Delayed,
    /// With 500.
    Refused,
    /// With 503.
    SlowedDown,
    Reset,
    /// It is done, and the answer is lost.
    Unanswered,
    /// It is done, and half of the answer comes.
    Cut,
    /// It is not done, and nothing comes.
    Hangs,
    /// Nothing comes, and it is done later, maybe when its server is long gone.
    Late,
}

pub struct Proxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    target: String,
    weather: Mutex<Weather>,
    rng: Mutex<Rng>,
    /// How many requests had a fate.
    fates: Mutex<BTreeMap<&'static str, u64>>,
}

impl Proxy {
    /// Between a free port and `target`, an address as `http://host:port`.
    pub async fn start(target: &str, seed: u64) -> io::Result<Proxy> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            target: target.trim_start_matches("http://").to_string(),
            weather: Mutex::new(Weather::Calm),
            rng: Mutex::new(Rng::new(seed)),
            fates: Mutex::default(),
        });
        let serving = Arc::clone(&shared);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let shared = Arc::clone(&serving);
                // The client sees for itself what went wrong.
                tokio::spawn(async move { drop(serve(&shared, client).await) });
            }
        });
        Ok(Proxy { address, shared })
    }

    pub fn set(&self, weather: Weather) {
        *locked(&self.shared.weather) = weather;
    }

    /// Changes the weather every now and then until the moment; then it is calm.
    pub async fn storm(&self, rng: &mut Rng, until: Instant) {
        while Instant::now() < until {
            let (weather, most) = match rng.chance(50) {
                true => (Weather::Calm, 1_500),
                false => (BAD[rng.below(BAD.len())], 2_500),
            };
            self.set(weather);
            let stays = Duration::from_millis(rng.between(100, most) as u64);
            tokio::time::sleep_until((Instant::now() + stays).min(until).into()).await;
        }
        self.set(Weather::Calm);
    }

    /// Requests by what became of them.
    pub fn fates(&self) -> BTreeMap<&'static str, u64> {
        locked(&self.shared.fates).clone()
    }
}

impl Shared {
    fn fate(&self, writes: bool) -> (Fate, Duration) {
        let weather = *locked(&self.weather);
        let mut rng = locked(&self.rng);
        let fate = match weather {
            Weather::Calm => Fate::Passes,
            Weather::Slow => Fate::Delayed,
            Weather::NoWrites if writes => Fate::Refused,
            Weather::NoReads if !writes => Fate::Refused,
            Weather::NoWrites | Weather::NoReads => Fate::Passes,
            Weather::Outage if rng.chance(50) => Fate::Reset,
            Weather::Outage => Fate::SlowedDown,
            Weather::Hanging if rng.chance(6) => Fate::Hangs,
            Weather::Hanging => Fate::Delayed,
            Weather::Flaky => match rng.below(100) {
                0..5 => Fate::Refused,
                5..10 => Fate::SlowedDown,
                10..16 => Fate::Reset,
                16..22 => Fate::Unanswered,
                22..26 => Fate::Cut,
                26..29 => Fate::Late,
                29..45 => Fate::Delayed,
                _ => Fate::Passes,
            },
        };
        let wait = match fate {
            Fate::Late => rng.between(1_000, 14_000),
            // Most are quick, few are slow.
            Fate::Delayed => rng.between(5, 60) * if rng.chance(10) { 12 } else { 1 },
            _ => 0,
        };
        *locked(&self.fates).entry(fate.name()).or_default() += 1;
        (fate, Duration::from_millis(wait as u64))
    }
}

impl Fate {
    fn name(self) -> &'static str {
        match self {
            Fate::Passes => "passed",
            Fate::Delayed => "delayed",
            Fate::Refused => "refused",
            Fate::SlowedDown => "slowed down",
            Fate::Reset => "reset",
            Fate::Unanswered => "done, unanswered",
            Fate::Cut => "done, answer cut",
            Fate::Hangs => "hung",
            Fate::Late => "done late",
        }
    }
}

/// One request; the connection ends with it.
async fn serve(shared: &Shared, mut client: TcpStream) -> io::Result<()> {
    let Some(request) = read_request(&mut client).await? else { return Ok(()) };
    let writes = !request.starts_with(b"GET") && !request.starts_with(b"HEAD");
    let (fate, wait) = shared.fate(writes);
    sleep(wait).await;
    match fate {
        Fate::Reset => return Ok(()),
        Fate::Hangs => {
            sleep(HANG).await;
            return Ok(());
        }
        Fate::Refused => return refuse(client, "500 Internal Server Error", "InternalError").await,
        Fate::SlowedDown => return refuse(client, "503 Slow Down", "SlowDown").await,
        _ => {}
    }
    let answer = forward(&shared.target, &request).await?;
    let sent = match fate {
        Fate::Unanswered | Fate::Late => 0,
        Fate::Cut => answer.len() / 2,
        _ => answer.len(),
    };
    client.write_all(&answer[..sent]).await?;
    client.shutdown().await
}

async fn refuse(mut client: TcpStream, status: &str, code: &str) -> io::Result<()> {
    let body = format!("<Error><Code>{code}</Code><Message>bad weather</Message></Error>");
    let length = body.len();
    let answer =
        format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
    client.write_all(answer.as_bytes()).await?;
    client.shutdown().await
}

/// Head and body as they came; `None`: the client has gone.
async fn read_request(client: &mut TcpStream) -> io::Result<Option<Vec<u8>>> {
    let mut request = Vec::with_capacity(4 << 10);
    let end = loop {
        if let Some(at) = request.windows(4).position(|w| w == b"\r\n\r\n") {
            break at + 4;
        }
        if client.read_buf(&mut request).await? == 0 || request.len() > MOST_HEAD {
            return Ok(None);
        }
    };
    let length = header(&request[..end], "content-length").and_then(|l| l.parse().ok());
    let whole = end + length.unwrap_or(0);
    while request.len() < whole {
        if client.read_buf(&mut request).await? == 0 {
            return Ok(None);
        }
    }
    Ok(Some(request))
}

fn header(head: &[u8], name: &str) -> Option<String> {
    let head = String::from_utf8_lossy(head);
    head.lines().find_map(|line| {
        let (found, value) = line.split_once(':')?;
        found.eq_ignore_ascii_case(name).then(|| value.trim().to_string())
    })
}

/// The server's answer, on a connection that ends with it.
async fn forward(target: &str, request: &[u8]) -> io::Result<Vec<u8>> {
    let mut server = TcpStream::connect(target).await?;
    let line = request.windows(2).position(|w| w == b"\r\n").unwrap_or(0);
    server.write_all(&request[..line]).await?;
    server.write_all(b"\r\nConnection: close").await?;
    server.write_all(&request[line..]).await?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer).await?;
    let line = answer.windows(2).position(|w| w == b"\r\n").unwrap_or(0);
    answer.splice(line..line, b"\r\nConnection: close".iter().copied());
    Ok(answer)
}
