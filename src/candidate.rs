//! How a server that runs all roles takes the lead: it asks the one before, and answers the one after.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;

use millrace_frontend::identification::Identification;
use millrace_meta::{Meta, MetaOptions};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::leadership::Leadership;
use crate::predecessor::{Predecessor, may_claim, tell};
use crate::standalone::Overrides;

/// A server that is about to take the lead, or has it.
pub struct Candidate {
    nonce: u64,
    /// Where others ask for it.
    address: String,
    pub identification: Arc<Identification>,
    /// What its data directory says. `None`: it asks nobody, because nobody else has its object store.
    own: Option<Leadership>,
    takes_over: bool,
    /// From whom it takes the lead, and who may still be there.
    predecessors: Arc<Mutex<Vec<Predecessor>>>,
}

impl Candidate {
    /// One that listens at this address.
    pub async fn new(config: &Config, overrides: &Overrides, listens: SocketAddr) -> Candidate {
        let nonce = overrides.env.random().max(1);
        let own = match overrides.object_store {
            Some(_) => None,
            None => Some(read_leadership(config).await),
        };
        Candidate {
            nonce,
            address: config.advertise.clone().unwrap_or_else(|| reachable(listens).to_string()),
            identification: Arc::new(Identification::new(nonce)),
            own,
            takes_over: config.take_over,
            predecessors: Arc::default(),
        }
    }

    /// The same options, for this server.
    pub fn options(&self, options: MetaOptions) -> MetaOptions {
        let found = || Arc::clone(&self.predecessors);
        let claim = self.own.as_ref().map(|own| may_claim(own.clone(), found(), self.takes_over));
        MetaOptions {
            address: self.address.clone(),
            nonce: Some(self.nonce),
            may_claim: claim,
            ..options
        }
    }

    /// It leads from now on, until `shutdown`: whoever asks for it may be about to take over, or have done so.
    pub fn lead(&self, meta: &Arc<Meta>, shutdown: &CancellationToken) {
        if self.takes_over {
            let before = std::mem::take(&mut *self.predecessors.lock());
            let told = tell(before, Arc::clone(meta));
            tokio::spawn(shutdown.clone().run_until_cancelled_owned(told));
        }
        let (identification, meta) = (Arc::clone(&self.identification), Arc::downgrade(meta));
        let prove = async move {
            loop {
                identification.asked.notified().await;
                let Some(meta) = meta.upgrade() else { return };
                // Where another leads, that ends the log, of which others are told.
                let _ = meta.prove_lead().await;
            }
        };
        tokio::spawn(shutdown.clone().run_until_cancelled_owned(prove));
    }
}

async fn read_leadership(config: &Config) -> Leadership {
    let data_dir = config.data_dir.clone();
    let read = tokio::task::spawn_blocking(move || Leadership::read(&data_dir));
    read.await.unwrap_or_default()
}

/// Where others reach a port: that of all addresses of the machine at the one by which it reaches others itself.
fn reachable(listens: SocketAddr) -> SocketAddr {
    if !listens.ip().is_unspecified() {
        return listens;
    }
    // Reserved for documentation. Nothing is sent: the system only says by which address it would be.
    let (any, far): (IpAddr, IpAddr) = match listens {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into()),
        SocketAddr::V6(_) => {
            (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into())
        }
    };
    let outward = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((far, 9))?;
        socket.local_addr()
    });
    match outward {
        Ok(own) => SocketAddr::new(own.ip(), listens.port()),
        // It reaches nobody: others on this machine may still ask.
        Err(_) => listens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_of_all_addresses_is_reached_at_one_of_them() {
        let one: SocketAddr = "10.1.2.3:4566".parse().unwrap();
        assert_eq!(reachable(one), one);
        for all in ["0.0.0.0:4566", "[::]:4566"] {
            let listens: SocketAddr = all.parse().unwrap();
            let reached = reachable(listens);
            assert_eq!(reached.port(), 4566);
            // Without a network there is no such address.
            assert!(reached == listens || !reached.ip().is_unspecified(), "{reached}");
        }
    }
}
