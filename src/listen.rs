//! Where a server listens, and what those who come in may name.

use std::net::SocketAddr;
use std::path::PathBuf;

use millrace_connector::paths::{self, PathLimit};
use millrace_frontend::auth::Tls;
use tokio::net::TcpListener;

use crate::config::{Access, Http};
use crate::standalone::StartError;

pub(crate) async fn bind(listen: &str) -> Result<(TcpListener, SocketAddr), StartError> {
    let failed = |source| StartError::Listen { address: listen.to_owned(), source };
    let listener = TcpListener::bind(listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// Whether only this machine can connect.
pub(crate) fn is_local(addresses: &[Option<SocketAddr>]) -> bool {
    addresses.iter().flatten().all(|a| a.ip().to_canonical().is_loopback())
}

pub(crate) fn load_tls(access: &Access) -> Result<Option<Tls>, StartError> {
    let Some((cert, key)) = &access.tls else { return Ok(None) };
    let read = |path: &PathBuf| {
        std::fs::read(path)
            .map_err(|e| StartError::Tls { reason: format!("cannot read {}: {e}", path.display()) })
    };
    let tls = Tls::from_pem(&read(cert)?, &read(key)?);
    tls.map(Some).map_err(|e| StartError::Tls { reason: e.to_string() })
}

/// Before any job starts: whom the server takes for its owner may name every file, others only what the operator has
/// named.
pub(crate) fn limit_paths(access: &Access, trusting: bool) -> Result<(), StartError> {
    let given = &access.allow_paths;
    if trusting && given.is_empty() {
        paths::set_limit(None);
        return Ok(());
    }
    let limit =
        PathLimit::new(given).map_err(|(path, source)| StartError::AllowPath { path, source })?;
    paths::set_limit(Some(limit));
    Ok(())
}

pub(crate) async fn bind_http(http: &Http) -> Result<Option<TcpListener>, StartError> {
    let Some(address) = http.address() else { return Ok(None) };
    match (TcpListener::bind(address).await, http) {
        (Ok(listener), _) => Ok(Some(listener)),
        (Err(e), Http::IfFree(_)) => {
            tracing::warn!(address, error = %e, "no web console and metrics; --http gives another address");
            Ok(None)
        }
        (Err(source), _) => Err(StartError::ListenHttp { address: address.to_owned(), source }),
    }
}
