//! The files that a process of a cluster proves who it is with.

use std::path::Path;

use millrace_rpc::remote::{Pem, Tls};

use super::options::{Role, RoleConfig, RpcTlsFiles};
use crate::standalone::StartError;

/// Reads and checks the files, if there are any. `advertised` is where others reach the process.
pub fn load(config: &RoleConfig, advertised: &str) -> Result<Option<Tls>, StartError> {
    let Some(files) = &config.rpc_tls else { return Ok(None) };
    let host = advertised.rsplit_once(':').map_or(advertised, |(host, _)| host);
    // A frontend takes no calls of other processes.
    let host = (config.role != Role::Frontend).then_some(host);
    load_files(files, host).map(Some)
}

/// `host`: where others reach the process; `None`: nowhere.
pub fn load_files(files: &RpcTlsFiles, host: Option<&str>) -> Result<Tls, StartError> {
    let failed = |reason: String| StartError::RpcTls { reason };
    let read = |path: &Path| {
        std::fs::read(path).map_err(|e| failed(format!("cannot read {}: {e}", path.display())))
    };
    let (chain, key, authority) = (read(&files.cert)?, read(&files.key)?, read(&files.ca)?);
    let pem = Pem { chain: &chain, key: &key, authority: &authority };
    Tls::from_pem(pem, host).map_err(|e| failed(e.to_string()))
}
