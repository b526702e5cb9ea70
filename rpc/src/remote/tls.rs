//! Mutual TLS between processes: every connection is encrypted, and each side proves with a certificate of the cluster's
//! certificate authority (CA) that it belongs to the cluster.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::ServerCertVerifier;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, client};
use tonic::transport::server::TcpIncoming;
use tower::util::{ServiceFn, service_fn};

/// Protocol of the connections, as TLS names it.
const HTTP2: &[u8] = b"h2";
/// How long a caller may take for its handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Handshakes at a time.
const HANDSHAKES: usize = 256;

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("no {what} could be read: {cause}")]
    Pem { what: &'static str, cause: String },
    #[error("a certificate of the CA cannot be used: {0}")]
    Authority(String),
    #[error("the private key does not fit the certificate, or cannot be used: {0}")]
    Key(rustls::Error),
    #[error("the CA's certificates do not prove that this process may call others: {0}")]
    Client(rustls::Error),
    #[error("the CA's certificates do not prove that this process is \"{host}\": {cause}")]
    Server { host: String, cause: rustls::Error },
    #[error("\"{0}\" is neither a host name nor an IP address")]
    Host(String),
}

/// PEM texts.
#[derive(Clone, Copy)]
pub struct Pem<'a> {
    /// The certificate of this process, and those between it and the CA's.
    pub chain: &'a [u8],
    /// Of the first certificate of the chain.
    pub key: &'a [u8],
    /// Certificates of the CA that all processes are checked by.
    pub authority: &'a [u8],
}

/// What a process proves who it is with, and checks others by.
#[derive(Clone)]
pub struct Tls {
    acceptor: TlsAcceptor,
    connector: TlsConnector,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(…)")
    }
}

impl Tls {
    /// Checks its own certificate as others will: its time, its CA and its uses, and the host that others connect to, if
    /// it takes calls.
    pub fn from_pem(pem: Pem<'_>, host: Option<&str>) -> Result<Tls, TlsError> {
        let chain = certificates(pem.chain, "certificate")?;
        let key = PrivateKeyDer::from_pem_slice(pem.key);
        let key = key.map_err(|e| TlsError::Pem { what: "private key", cause: e.to_string() })?;
        let authority = |e: &dyn fmt::Display| TlsError::Authority(e.to_string());
        let mut roots = RootCertStore::empty();
        for certificate in certificates(pem.authority, "certificate of the CA")? {
            roots.add(certificate).map_err(|e| authority(&e))?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
        let callers =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .build()
                .map_err(|e| authority(&e))?;
        let called =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .build()
                .map_err(|e| authority(&e))?;
        // Reading certificates has made sure that there is one.
        let (own, between) = chain.split_first().ok_or_else(|| authority(&"none"))?;
        let now = UnixTime::now();
        callers.verify_client_cert(own, between, now).map_err(TlsError::Client)?;
        if let Some(host) = host {
            let name = server_name(host)?;
            let checked = called.verify_server_cert(own, between, &name, &[], now);
            checked.map_err(|cause| TlsError::Server { host: host.to_owned(), cause })?;
        }
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(TlsError::Key)?
            .with_client_cert_verifier(callers)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(TlsError::Key)?;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(TlsError::Key)?
            .with_webpki_verifier(called)
            .with_client_auth_cert(chain, key)
            .map_err(TlsError::Key)?;
        server.alpn_protocols = vec![HTTP2.to_vec()];
        client.alpn_protocols = vec![HTTP2.to_vec()];
        Ok(Tls { acceptor: Arc::new(server).into(), connector: Arc::new(client).into() })
    }

    /// The connections of callers that have proved who they are; others are logged.
    pub(super) fn accept(
        self,
        incoming: TcpIncoming,
    ) -> impl Stream<Item = io::Result<TlsStream<TcpStream>>> {
        let handshakes = incoming.map(move |stream| {
            let acceptor = self.acceptor.clone();
            async move {
                match stream {
                    Ok(stream) => handshake(acceptor, stream).await.map(Ok),
                    Err(e) => Some(Err(e)),
                }
            }
        });
        handshakes.buffer_unordered(HANDSHAKES).filter_map(futures::future::ready)
    }

    /// Connects to processes, and checks that each is who it is taken for.
    pub(super) fn connect(
        &self,
    ) -> ServiceFn<
        impl Fn(http::Uri) -> futures::future::BoxFuture<'static, io::Result<Connection>>
        + Send
        + Clone
        + use<>,
    > {
        let connector = self.connector.clone();
        service_fn(move |uri: http::Uri| {
            let connector = connector.clone();
            let connected: futures::future::BoxFuture<'static, _> =
                Box::pin(async move { connected(connector, uri).await });
            connected
        })
    }
}

/// A connection to another process.
pub(super) type Connection = TokioIo<client::TlsStream<TcpStream>>;

async fn connected(connector: TlsConnector, uri: http::Uri) -> io::Result<Connection> {
    let invalid = |e: &dyn fmt::Display| io::Error::new(io::ErrorKind::InvalidInput, e.to_string());
    let (host, port) = (uri.host().unwrap_or_default(), uri.port_u16().unwrap_or_default());
    let name = server_name(host).map_err(|e| invalid(&e))?;
    let stream = TcpStream::connect((bare(host), port)).await?;
    stream.set_nodelay(true)?;
    Ok(TokioIo::new(connector.connect(name, stream).await?))
}

async fn handshake(acceptor: TlsAcceptor, stream: TcpStream) -> Option<TlsStream<TcpStream>> {
    let from = stream.peer_addr().map_or_else(|_| "unknown".to_owned(), |a| a.to_string());
    match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => return Some(stream),
        Ok(Err(error)) => {
            tracing::warn!(from, %error, "a connection from another process was refused");
        }
        Err(_) => tracing::warn!(from, "a connection from another process made no handshake"),
    }
    None
}

fn certificates(pem: &[u8], what: &'static str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |cause: String| TlsError::Pem { what, cause };
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read.map_err(|e| failed(e.to_string()))? {
        none if none.is_empty() => Err(failed("there is none in PEM format".to_owned())),
        certificates => Ok(certificates),
    }
}

/// An IPv6 address without its brackets.
fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host)
}

fn server_name(host: &str) -> Result<ServerName<'static>, TlsError> {
    if let Ok(address) = bare(host).parse::<IpAddr>() {
        return Ok(ServerName::from(address));
    }
    ServerName::try_from(host.to_owned()).map_err(|_| TlsError::Host(host.to_owned()))
}
