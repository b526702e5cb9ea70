//! The services of one process through bytes: every request and answer is encoded and decoded as between processes,
//! by the same adapters, without a network. For tests: what works so works on several machines.

use std::sync::Arc;

use crate::control::MetaControl;
use crate::dml::DmlService;
use crate::read::ReadService;
use crate::remote::{
    Admission, Peer, RemoteCompactor, RemoteCompute, RemoteDml, RemoteMeta, RemoteReads, Server,
};
use crate::services::{CompactorService, ComputeService};

/// Makes an implementation of a service one that is called through bytes.
pub struct Encoded;

impl Encoded {
    pub fn compute(service: Arc<dyn ComputeService>) -> RemoteCompute {
        RemoteCompute::new(through(|server| server.compute(service)))
    }

    pub fn compactor(service: Arc<dyn CompactorService>) -> RemoteCompactor {
        RemoteCompactor::new(through(|server| server.compactor(service)))
    }

    pub fn meta(service: Arc<dyn MetaControl>) -> RemoteMeta {
        RemoteMeta::new(through(|server| server.meta(service)))
    }

    pub fn dml(service: Arc<dyn DmlService>) -> RemoteDml {
        RemoteDml::new(through(|server| server.dml(service)))
    }

    pub fn reads(service: Arc<dyn ReadService>) -> RemoteReads {
        RemoteReads::new(through(|server| server.reads(service)))
    }
}

fn through(serve: impl FnOnce(Server) -> Server) -> Peer {
    let server = serve(Server::new(Arc::<Admission>::default()));
    Peer::loopback(server.into_routes())
}
