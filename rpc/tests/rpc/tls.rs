//! Certificates between processes: who may call whom, and what is said of files that cannot be used.

use std::sync::Arc;

use async_trait::async_trait;
use millrace_common::SqlError;
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::MetaControl;
use millrace_rpc::log::MoveParts;
use millrace_rpc::remote::{
    Admission, Identity, Pem, RemoteCompactor, RemoteMeta, Server, Tls, TlsError,
};
use millrace_rpc::request::RequestId;
use millrace_rpc::services::{CompactionTask, CompactorService, LivePart};
use millrace_rpc::version::VersionEdit;
use tokio::net::TcpListener;

use crate::fake::{peer, serve};

macro_rules! file {
    ($name:literal) => {
        include_bytes!(concat!("../../../tests/certificates/", $name))
    };
}

/// Of `127.0.0.1`.
const OURS: Pem<'static> =
    Pem { chain: file!("process.pem"), key: file!("process.key"), authority: file!("ca.pem") };
/// The same of another CA.
const STRANGER: Pem<'static> = Pem {
    chain: file!("stranger.pem"),
    key: file!("stranger.key"),
    authority: file!("other-ca.pem"),
};

fn tls(pem: Pem<'_>) -> Option<Tls> {
    Some(Tls::from_pem(pem, None).unwrap())
}

async fn flush(address: &str, tls: Option<Tls>) -> Result<(), CallError> {
    RemoteMeta::new(peer(address, Arc::new(Identity::default().with_tls(tls)))).flush().await
}

#[tokio::test]
async fn only_processes_of_the_ca_call_each_other() {
    let (_fake, address) = serve(Arc::new(Admission::default().with_tls(tls(OURS)))).await;
    flush(&address, tls(OURS)).await.unwrap();
    // A name that the certificate has, too.
    flush(&address.replace("127.0.0.1", "localhost"), tls(OURS)).await.unwrap();

    let error = flush(&address, None).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    let error = flush(&address, tls(STRANGER)).await.unwrap_err().to_string();
    assert!(error.contains("certificate"), "{error}");
    // It takes the server for one of the cluster; the server does not take it.
    let impostor = Pem { authority: OURS.authority, ..STRANGER };
    let error = Tls::from_pem(impostor, None).unwrap_err();
    assert!(matches!(error, TlsError::Client(_)), "{error}");
    // Those that are refused leave the server as it was.
    flush(&address, tls(OURS)).await.unwrap();
}

#[tokio::test]
async fn a_server_is_called_by_the_name_in_its_certificate() {
    let elsewhere = Pem { chain: file!("other-host.pem"), ..OURS };
    let (_fake, address) = serve(Arc::new(Admission::default().with_tls(tls(elsewhere)))).await;
    let error = flush(&address, tls(OURS)).await.unwrap_err().to_string();
    assert!(error.contains("not valid for name"), "{error}");
    let (_fake, address) = serve(Arc::default()).await;
    assert!(flush(&address, tls(OURS)).await.unwrap_err().is_retryable());
}

#[test]
fn files_that_cannot_be_used_are_refused_by_what_is_wrong() {
    let error = |pem, host| Tls::from_pem(pem, host).unwrap_err().to_string();
    for host in ["127.0.0.1", "[::1]", "localhost"] {
        Tls::from_pem(OURS, Some(host)).unwrap();
    }
    let other_host = error(OURS, Some("10.0.0.1"));
    assert!(other_host.contains("10.0.0.1") && other_host.contains("prove"), "{other_host}");
    let expired = error(Pem { chain: file!("expired.pem"), ..OURS }, None);
    assert!(expired.to_lowercase().contains("expired"), "{expired}");
    let other_key = error(Pem { key: STRANGER.key, ..OURS }, None);
    assert!(other_key.contains("does not fit"), "{other_key}");
    let no_chain = error(Pem { chain: b"a text", ..OURS }, None);
    assert!(no_chain.contains("no certificate"), "{no_chain}");
    let no_key = error(Pem { key: OURS.chain, ..OURS }, None);
    assert!(no_key.contains("no private key"), "{no_key}");
    let no_authority = error(Pem { authority: b"", ..OURS }, None);
    assert!(no_authority.contains("of the CA"), "{no_authority}");
}

/// Answers with the request that it works for.
struct Telling;

#[async_trait]
impl CompactorService for Telling {
    async fn compact(&self, _: CompactionTask) -> Result<VersionEdit, SqlError> {
        let id = RequestId::current().map(|id| id.to_string());
        Err(SqlError::internal(id.unwrap_or_else(|| "none".into())))
    }

    async fn copy_parts(&self, _: Vec<LivePart>) -> Result<MoveParts, SqlError> {
        let id = RequestId::current().map(|id| id.to_string());
        Err(SqlError::internal(id.unwrap_or_else(|| "none".into())))
    }
}

#[tokio::test]
async fn a_request_keeps_its_id_in_the_process_that_is_called() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = Server::new(Arc::<Admission>::default()).compactor(Arc::new(Telling));
    tokio::spawn(server.serve(listener));
    let remote = RemoteCompactor::new(peer(&address, Arc::new(Identity::new(0, 30))));
    let told = || async { remote.copy_parts(Vec::new()).await.unwrap_err().message.clone() };
    let id = RequestId::next(7);
    assert_eq!(id.clone().scope(told()).await, id.as_str());
    // One that belongs to nothing is one of its own, of the process that calls.
    let own = told().await;
    assert!(own.starts_with("30-"), "{own}");
}
