//! The services that a process has, on one listener.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::TcpListener;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use super::admission::Admission;
use super::meta::{self, LeaderSlot};
use super::metrics::Side;
use super::observe::Observe;
use super::operator::{self, OperatorSlot};
use super::{compactor, compute, dml, read};
use crate::call_error::{BUILD, CallError};
use crate::control::MetaControl;
use crate::dml::DmlService;
use crate::proto::node_server::{Node, NodeServer};
use crate::proto::{HandshakeAnswer, HandshakeRequest};
use crate::read::ReadService;
use crate::services::{CompactorService, ComputeService};
use crate::store_id::bytes_of;

/// Bytes of a call's headers, in which errors travel.
pub(super) const MAX_HEADER_BYTES: u32 = 256 << 10;
/// How long a caller may be silent before its connection is taken for broken, and what it holds is released.
const CALLER_SILENCE: Duration = Duration::from_secs(4);

/// Serves what it was given, and the handshake.
pub struct Server {
    admission: Arc<Admission>,
    routes: Routes,
}

impl Server {
    pub fn new(admission: Arc<Admission>) -> Server {
        let node = NodeServer::new(NodeService { admission: Arc::clone(&admission) });
        Server { admission, routes: Routes::new(node) }
    }

    pub fn compute(mut self, service: Arc<dyn ComputeService>) -> Server {
        self.routes = self.routes.add_service(compute::server(service, &self.admission));
        self
    }

    pub fn compactor(mut self, service: Arc<dyn CompactorService>) -> Server {
        self.routes = self.routes.add_service(compactor::server(service, &self.admission));
        self
    }

    pub fn meta(mut self, service: Arc<dyn MetaControl>) -> Server {
        self.routes = self.routes.add_service(meta::server(service, &self.admission));
        self
    }

    /// The same of a process that may lead: while it does not ([`Admission::lead`]), callers are told so.
    pub fn leader(mut self, slot: Arc<LeaderSlot>) -> Server {
        self.routes = self.routes.add_service(meta::leader(slot, &self.admission));
        self
    }

    /// What a process that may lead serves an operator while it leads.
    pub fn operator(mut self, slot: Arc<OperatorSlot>) -> Server {
        self.routes = self.routes.add_service(operator::server(slot, &self.admission));
        self
    }

    pub fn dml(mut self, service: Arc<dyn DmlService>) -> Server {
        self.routes = self.routes.add_service(dml::server(service, &self.admission));
        self
    }

    pub fn reads(mut self, service: Arc<dyn ReadService>) -> Server {
        self.routes = self.routes.add_service(read::server(service, &self.admission));
        self
    }

    pub(crate) fn into_routes(self) -> Routes {
        self.routes.prepare()
    }

    /// Answers calls until [`Admission::stop`]; calls under way are answered first.
    pub async fn serve(self, listener: TcpListener) -> Result<(), tonic::transport::Error> {
        let stopping = self.admission.stopping();
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let server = tonic::transport::Server::builder()
            .layer(Observe(Side::Server))
            .http2_keepalive_interval(Some(CALLER_SILENCE / 2))
            .http2_keepalive_timeout(Some(CALLER_SILENCE / 2))
            .http2_adaptive_window(Some(true))
            .http2_max_header_list_size(MAX_HEADER_BYTES)
            .add_routes(self.routes);
        let stopped = stopping.cancelled_owned();
        match self.admission.tls() {
            Some(tls) => server.serve_with_incoming_shutdown(tls.accept(incoming), stopped).await,
            None => server.serve_with_incoming_shutdown(incoming, stopped).await,
        }
    }
}

struct NodeService {
    admission: Arc<Admission>,
}

#[async_trait]
impl Node for NodeService {
    async fn handshake(
        &self,
        request: Request<HandshakeRequest>,
    ) -> Result<Response<HandshakeAnswer>, Status> {
        let met = self.admission.meet(&request);
        let ours = self.admission.protocol();
        let HandshakeRequest { protocol: theirs, build } = request.into_inner();
        // Who works on another store is of another cluster, which may speak what it likes.
        let is_stranger = matches!(met, Err(CallError::OtherStore { .. }));
        if theirs != ours && !is_stranger {
            return Err(CallError::Protocol { ours, theirs, build }.into_status());
        }
        met.map_err(CallError::into_status)?;
        let silence = self.admission.leader_silence();
        Ok(Response::new(HandshakeAnswer {
            protocol: ours,
            build: BUILD.into(),
            incarnation: self.admission.incarnation(),
            term: self.admission.term(),
            leads: self.admission.leads(),
            leader: self.admission.leader(),
            leader_silence_ms: silence.map(|silence| silence.as_millis() as u64),
            log_wait_ms: self.admission.log_wait().as_millis() as u64,
            store_id: bytes_of(self.admission.store()),
        }))
    }
}
