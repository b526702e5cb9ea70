//! The listener: connections, health, and the end.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use millrace_common::EnvHandle;
use millrace_common::task::spawn;
use millrace_storage::StorageError;
use millrace_storage::sim::{Faults, Profile, SimStore};
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{Body, HttpResponse};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::answer::RESET;
use crate::directory::{Directory, Shared};
use crate::objects::Objects;

/// Answers 200 to everybody; no bucket has this name.
pub const HEALTH: &str = "/-/health";
/// Connections at a time; further ones wait.
const CONNECTIONS: usize = 4096;
/// How long the head of a request may take to arrive.
const HEAD_PATIENCE: Duration = Duration::from_secs(10);
/// How long requests under way have to end when the server does.
const STOP_PATIENCE: Duration = Duration::from_secs(5);
/// Before another attempt to accept, when there are no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a server is started with.
#[derive(Clone, Debug)]
pub struct Options {
    /// `host:port`; port 0: any that is free.
    pub listen: String,
    /// Every bucket is a directory in it.
    pub data_dir: PathBuf,
    /// Made at start; those that are there already stay.
    pub buckets: Vec<String>,
    pub access_key: String,
    pub secret_key: String,
    /// How slow it is.
    pub profile: Profile,
    /// What goes wrong.
    pub faults: Faults,
    /// Of latencies and faults.
    pub seed: u64,
    /// Creates look first and write then, so that two can win: to test that such a server is refused.
    pub racy: bool,
}

impl Options {
    /// A fast server without faults on a free port of this machine.
    pub fn new(data_dir: impl Into<PathBuf>, bucket: &str) -> Options {
        Options {
            listen: "127.0.0.1:0".to_string(),
            data_dir: data_dir.into(),
            buckets: vec![bucket.to_string()],
            access_key: "millrace".to_string(),
            secret_key: "millrace-secret".to_string(),
            profile: Profile::INSTANT,
            faults: Faults::default(),
            seed: 1,
            racy: false,
        }
    }
}

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot listen on {listen}: {source}")]
    Listen { listen: String, source: io::Error },
    #[error("cannot use the data directory {}: {source}", path.display())]
    DataDir { path: PathBuf, source: io::Error },
    #[error("the data directory {} is used by another process", path.display())]
    Locked { path: PathBuf },
    #[error(transparent)]
    Store(#[from] StorageError),
    #[error("\"{bucket}\" is no name of a bucket: 3 to 63 small letters, digits, - and .")]
    Bucket { bucket: String },
    #[error("the access key and the secret key must not be empty")]
    Keys,
}

/// A running server. Dropping it stops it as a crash would.
pub struct Server {
    address: SocketAddr,
    store: SimStore,
    stopping: CancellationToken,
    accepting: JoinHandle<()>,
    _lock: File,
}

impl Server {
    pub async fn start(options: Options) -> Result<Server, StartError> {
        if options.access_key.is_empty() || options.secret_key.is_empty() {
            return Err(StartError::Keys);
        }
        let lock = lock(&options.data_dir)?;
        let directory = Directory::open(&options.data_dir, options.racy)?;
        let buckets = make_buckets(&options)?;
        let store =
            SimStore::new(Arc::new(Shared(Arc::new(directory))), options.profile, options.seed);
        store.set_faults(options.faults);
        let objects = Objects {
            store: Arc::new(store.clone()),
            buckets: Arc::new(buckets),
            env: EnvHandle::default(),
        };
        let mut builder = S3ServiceBuilder::new(objects);
        builder.set_auth(SimpleAuth::from_single(options.access_key, options.secret_key));
        let listen = |source| StartError::Listen { listen: options.listen.clone(), source };
        let listener = TcpListener::bind(&options.listen).await.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let stopping = CancellationToken::new();
        let accepting =
            spawn("accept connections", accept(listener, builder.build(), stopping.clone()));
        Ok(Server { address, store, stopping, accepting, _lock: lock })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// As `AWS_ENDPOINT_URL` wants it.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Counts requests; slows them down and lets them fail.
    pub fn store(&self) -> &SimStore {
        &self.store
    }

    /// Accepts nothing more and waits, not for long, for the requests under way.
    pub async fn stop(mut self) {
        self.stopping.cancel();
        let _ = tokio::time::timeout(STOP_PATIENCE, &mut self.accepting).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopping.cancel();
        self.accepting.abort();
    }
}

fn lock(dir: &PathBuf) -> Result<File, StartError> {
    let failed = |source| StartError::DataDir { path: dir.clone(), source };
    fs::create_dir_all(dir).map_err(failed)?;
    let file = File::create(dir.join(".lock")).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(StartError::Locked { path: dir.clone() }),
        Err(TryLockError::Error(e)) => Err(failed(e)),
    }
}

/// Those asked for, and those that are there from an earlier time.
fn make_buckets(options: &Options) -> Result<BTreeSet<String>, StartError> {
    let dir = &options.data_dir;
    let failed = |source| StartError::DataDir { path: dir.clone(), source };
    for bucket in &options.buckets {
        if !s3s::path::check_bucket_name(bucket) {
            return Err(StartError::Bucket { bucket: bucket.clone() });
        }
        fs::create_dir_all(dir.join(bucket)).map_err(failed)?;
    }
    File::open(dir).and_then(|d| d.sync_all()).map_err(failed)?;
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if s3s::path::check_bucket_name(&name) && entry.path().is_dir() {
            found.insert(name);
        }
    }
    Ok(found)
}

async fn accept(listener: TcpListener, service: S3Service, stopping: CancellationToken) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            () = stopping.cancelled() => break,
            next = next => next,
        };
        match accepted {
            Ok((socket, peer)) => {
                let (service, stopping) = (service.clone(), stopping.clone());
                spawn("serve a connection", async move {
                    let _place = place;
                    if let Err(error) = serve(socket, service, stopping).await {
                        tracing::debug!(%peer, %error, "a connection ended");
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    // Those under way end their request and give back their places.
    let _ = places.acquire_many(CONNECTIONS as u32).await;
}

async fn serve(
    socket: TcpStream,
    service: S3Service,
    stopping: CancellationToken,
) -> hyper::Result<()> {
    let _ = socket.set_nodelay(true);
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEAD_PATIENCE);
    let respond = service_fn(move |request| respond(service.clone(), request));
    let connection = server.serve_connection(TokioIo::new(socket), respond);
    tokio::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => return ended,
        () = stopping.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    connection.await
}

/// The connection is to be reset instead of an answer.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct NoAnswer(String);

async fn respond(service: S3Service, request: Request<Incoming>) -> Result<HttpResponse, NoAnswer> {
    if request.uri().path() == HEALTH {
        let mut response = Response::new(Body::from("ok\n".to_string()));
        *response.status_mut() = StatusCode::OK;
        return Ok(response);
    }
    let response = service.call(request.map(Body::from)).await;
    let response = response.map_err(|e| NoAnswer(format!("{e:?}")))?;
    if response.headers().contains_key(RESET) {
        return Err(NoAnswer("a fault: the connection is reset".to_string()));
    }
    Ok(response)
}
