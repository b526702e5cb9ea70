//! Requests about sessions of other frontends: whoever gets one passes it on to the frontend that has the session.
//!
//! Clients reach frontends through one address, so a cancel request arrives at any of them. The low bits of a process id
//! are those of its frontend's incarnation, by which the frontend is found in the log. A request is passed on as a cancel
//! request with a longer key to the port at which the frontend takes clients; it names the incarnation that is meant, and
//! is never passed on again. Where the session's key is not known (`pg_cancel_backend`), the frontend proves that it is
//! one with the secret of the cluster.
//!
//! It goes in the clear, as cancel requests of most clients do: whoever reads it can cancel statements of that session.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use millrace_common::task::spawn_on;
use millrace_rpc::request::carried;
use pgwire::messages::Message;
use pgwire::messages::cancel::CancelRequest;
use pgwire::messages::startup::SecretKey;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tracing::debug;

use crate::auth::{OwnSecret, is_same};
use crate::server::Shared;

/// Bits of a process id that are those of its frontend's incarnation. The rest counts the sessions of the frontend.
const FRONTEND_BITS: u32 = 12;
const FRONTEND_MASK: i32 = (1 << FRONTEND_BITS) - 1;
/// Sessions after which their numbers begin again.
const NUMBERS: u32 = 1 << (31 - FRONTEND_BITS);
/// How long another frontend may take.
const LIMIT: Duration = Duration::from_secs(3);
/// Bytes of the key of a client.
const CLIENT_KEY: usize = 4;

/// A process id of a frontend's session; numbers count up, and begin again after [`NUMBERS`].
pub(crate) fn process_id(number: u32, incarnation: u64) -> i32 {
    let number = (number % NUMBERS).cast_signed();
    (number << FRONTEND_BITS) | low_bits(incarnation)
}

fn low_bits(incarnation: u64) -> i32 {
    (incarnation & FRONTEND_MASK.unsigned_abs() as u64) as i32
}

/// Whether the frontend of this incarnation may have given the process id.
fn is_of(pid: i32, incarnation: u64) -> bool {
    pid & FRONTEND_MASK == low_bits(incarnation)
}

/// What another frontend is to do with one of its sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// A client has asked for it, with this key.
    Cancel { secret: i32 },
    /// What `pg_cancel_backend` does.
    CancelStatement,
    /// What `pg_terminate_backend` does.
    Terminate,
}

impl Action {
    fn code(self) -> u8 {
        match self {
            Action::Cancel { .. } => 1,
            Action::CancelStatement => 2,
            Action::Terminate => 3,
        }
    }

    /// The key of the request that is passed on.
    fn key(self, pid: i32, incarnation: u64, own: &OwnSecret) -> Bytes {
        let mut key = BytesMut::new();
        key.put_u8(self.code());
        key.put_u64(incarnation);
        match self {
            Action::Cancel { secret } => key.put_i32(secret),
            Action::CancelStatement | Action::Terminate => {
                let proof = own.proof_of(&message(&key, pid));
                key.put_slice(&proof);
            }
        }
        key.freeze()
    }

    /// What a request of another frontend asks for, if it is one that this frontend is meant by.
    fn of_key(mut key: Bytes, pid: i32, incarnation: u64, own: &OwnSecret) -> Option<Action> {
        let head = key.get(..9)?.to_vec();
        let (code, meant) = (key.get_u8(), key.get_u64());
        if meant != incarnation {
            return None;
        }
        let is_proved =
            || own.is_known() && is_same(&own.proof_of(&message(&head, pid)), key.as_ref());
        match code {
            1 if key.len() == CLIENT_KEY => Some(Action::Cancel { secret: key.clone().get_i32() }),
            2 if is_proved() => Some(Action::CancelStatement),
            3 if is_proved() => Some(Action::Terminate),
            _ => None,
        }
    }
}

/// What a proof is about.
fn message(head: &[u8], pid: i32) -> Vec<u8> {
    let mut message = head.to_vec();
    message.put_i32(pid);
    message
}

impl Shared {
    /// Serves a cancel request, of a client or of another frontend. One that is wrong is ignored without a word, as the
    /// protocol wants.
    pub(crate) async fn serve_cancel(&self, pid: i32, key: &SecretKey) {
        let incarnation = self.config.incarnation.get();
        match key.as_i32() {
            Some(secret) if self.has_session(pid) => self.cancel(pid, secret),
            Some(secret) => {
                let targets = self.frontends_of(pid);
                self.pass_on(pid, Action::Cancel { secret }, targets).await;
            }
            None => {
                let own = &self.config.own_secret;
                match Action::of_key(key.to_bytes(), pid, incarnation, own) {
                    Some(Action::Cancel { secret }) => self.cancel(pid, secret),
                    Some(Action::CancelStatement) => drop(self.cancel_pid(pid)),
                    Some(Action::Terminate) => drop(self.terminate_pid(pid)),
                    None => {}
                }
            }
        }
    }

    /// `pg_cancel_backend`, or with `ends` `pg_terminate_backend`: whether there is such a session. Of another frontend's
    /// it is only known that the frontend is there; the request is on its way when this returns.
    pub(crate) fn signal(self: &Arc<Shared>, pid: i64, ends: bool) -> bool {
        let Ok(pid) = i32::try_from(pid) else { return false };
        if self.has_session(pid) {
            return if ends { self.terminate_pid(pid) } else { self.cancel_pid(pid) };
        }
        let targets = self.frontends_of(pid);
        if targets.is_empty() {
            return false;
        }
        let action = if ends { Action::Terminate } else { Action::CancelStatement };
        let shared = Arc::clone(self);
        let passed_on = async move { shared.pass_on(pid, action, targets).await };
        spawn_on(self.engine.runtime(), "pass on a request", carried(passed_on));
        true
    }

    /// Incarnation and address of the other frontends that may have given a process id.
    fn frontends_of(&self, pid: i32) -> Vec<(u64, String)> {
        if pid <= 0 {
            return Vec::new();
        }
        let own = self.config.incarnation.get();
        let processes = self.cluster.processes().into_iter();
        processes
            .filter(|p| p.roles.contains(&"frontend") && !p.address.is_empty())
            .filter(|p| p.incarnation != own && is_of(pid, p.incarnation))
            .map(|p| (p.incarnation, p.address))
            .collect()
    }

    /// Returns when the frontends have taken the request, or do not answer.
    async fn pass_on(&self, pid: i32, action: Action, targets: Vec<(u64, String)>) {
        for (incarnation, address) in targets {
            let key = action.key(pid, incarnation, &self.config.own_secret);
            match tokio::time::timeout(LIMIT, send(&address, pid, key)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => debug!(%error, address, "a frontend took no cancel request"),
                Err(_) => debug!(address, "a frontend has not answered a cancel request"),
            }
        }
    }
}

/// Sends a cancel request, and waits until the other side has closed the connection: it has acted then.
async fn send(address: &str, pid: i32, key: Bytes) -> std::io::Result<()> {
    let mut request = BytesMut::new();
    let message = CancelRequest::new(pid, SecretKey::Bytes(key));
    message.encode(&mut request).map_err(std::io::Error::other)?;
    let mut socket = TcpStream::connect(address).await?;
    socket.write_all(&request).await?;
    let mut rest = [0u8; 64];
    while socket.read(&mut rest).await? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_id_is_positive_and_tells_whose_it_is() {
        for number in [1, 1000, NUMBERS - 1, NUMBERS, u32::MAX] {
            for incarnation in [1, 4095, 4096, u64::MAX] {
                let pid = process_id(number, incarnation);
                assert!(pid >= 0 && is_of(pid, incarnation), "{number} {incarnation}");
                assert!(!is_of(pid, incarnation.wrapping_add(1)));
            }
        }
        assert_ne!(process_id(1, 7), process_id(2, 7));
    }

    #[test]
    fn a_request_is_taken_by_the_frontend_that_is_meant() {
        let own = OwnSecret::new("s".to_owned());
        for action in [Action::Cancel { secret: -7 }, Action::CancelStatement, Action::Terminate] {
            let key = action.key(5, 41, &own);
            assert_ne!(key.len(), CLIENT_KEY);
            assert_eq!(Action::of_key(key.clone(), 5, 41, &own), Some(action));
            assert_eq!(Action::of_key(key.clone(), 5, 42, &own), None);
            assert_eq!(Action::of_key(key.slice(..key.len() - 1), 5, 41, &own), None);
        }
    }

    #[test]
    fn whoever_knows_neither_key_nor_secret_has_no_say() {
        let (own, other) = (OwnSecret::new("s".to_owned()), OwnSecret::new("t".to_owned()));
        let key = Action::Terminate.key(5, 41, &other);
        assert_eq!(Action::of_key(key.clone(), 5, 41, &own), None);
        let key = Action::Terminate.key(5, 41, &own);
        assert_eq!(Action::of_key(key.clone(), 6, 41, &own), None, "it is of another session");
        let unknown = OwnSecret::default();
        let key = Action::Terminate.key(5, 41, &unknown);
        assert_eq!(Action::of_key(key, 5, 41, &unknown), None, "everybody knows this secret");
    }
}
