//! Where a server listens, and what those who come in may name.

use std::net::SocketAddr;
use std::path::PathBuf;

use millrace_connector::paths::{self, Limited, PathLimit};
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

/// Before any job starts: whom the process takes for its owner may name every file, others only what the operator has
/// named. `trusting`: whoever comes in is taken for the owner.
pub(crate) fn limit_paths(
    access: &Access,
    limited: Limited,
    trusting: bool,
) -> Result<(), StartError> {
    paths::set_limit(path_limit(access, limited, trusting)?);
    Ok(())
}

/// `None`: no limit.
fn path_limit(
    access: &Access,
    limited: Limited,
    trusting: bool,
) -> Result<Option<PathLimit>, StartError> {
    let given = &access.allow_paths;
    if trusting && given.is_empty() {
        return Ok(None);
    }
    let limit = PathLimit::new(limited, given);
    limit.map(Some).map_err(|(path, source)| StartError::AllowPath { path, source })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_limited_unless_the_owner_alone_comes_in_and_names_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let named = Access { allow_paths: vec![dir.path().to_path_buf()], ..Access::default() };
        let limit = |access: &Access, trusting| {
            path_limit(access, Limited::Server, trusting).map_err(|e| e.to_string())
        };
        assert_eq!(limit(&Access::default(), true), Ok(None));
        let nothing = PathLimit::new(Limited::Server, &[]).unwrap();
        assert_eq!(limit(&Access::default(), false), Ok(Some(nothing)));
        let directory = PathLimit::new(Limited::Server, &named.allow_paths).unwrap();
        for trusting in [true, false] {
            assert_eq!(limit(&named, trusting), Ok(Some(directory.clone())));
        }
        let nowhere = Access { allow_paths: vec![dir.path().join("x")], ..Access::default() };
        assert!(limit(&nowhere, false).unwrap_err().contains("--allow-path"));
    }
}
