//! The network: every call is a message there and one back, each of which may be late, lost or, where that does no harm,
//! come twice; links are cut one way or both.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use millrace_common::task::{Gate, within};
use millrace_rpc::call_error::CallError;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::world::{Node, Process, World};

/// How long a caller waits at most: then the connection counts as broken.
const PATIENCE: Duration = Duration::from_secs(10);

/// What may become of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// It comes once at most.
    Once,
    /// It may come twice, the second time late.
    Repeated,
}

/// Which links are cut: from, to.
#[derive(Debug, Default)]
pub struct Network {
    cuts: Mutex<BTreeSet<(Node, Node)>>,
}

impl Network {
    pub fn cut(&self, from: Node, to: Node) {
        self.cuts.lock().insert((from, to));
    }

    pub fn mend(&self, from: Node, to: Node) {
        self.cuts.lock().remove(&(from, to));
    }

    pub fn mend_all(&self) {
        self.cuts.lock().clear();
    }

    pub fn is_cut(&self, from: Node, to: Node) -> bool {
        self.cuts.lock().contains(&(from, to))
    }
}

type Handler<T> =
    Arc<dyn Fn(Arc<Process>) -> BoxFuture<'static, Result<T, CallError>> + Send + Sync>;

fn unreachable(to: Node) -> CallError {
    CallError::Unreachable { peer: to.to_string(), cause: "no answer".into() }
}

impl World {
    /// How long a message is on its way.
    fn latency(&self) -> Duration {
        let slow = if self.is_rough() { self.climate.late } else { 0 };
        match self.numbers.below(1_000) {
            n if n < slow / 4 => self.numbers.between(1_000, 6_000),
            n if n < slow => self.numbers.between(100, 1_500),
            _ => Duration::from_micros(200 + self.numbers.below(4_000)),
        }
    }

    fn is_lost(&self, from: Node, to: Node) -> bool {
        self.network.is_cut(from, to) || (self.is_rough() && self.numbers.chance(self.climate.lost))
    }

    /// Has the process at a node do something, and answers with what it says. Whoever drops the call does not call it
    /// back.
    pub async fn call<T, F>(
        self: &Arc<World>,
        from: &Process,
        to: Node,
        delivery: Delivery,
        handler: impl Fn(Arc<Process>) -> F + Send + Sync + 'static,
    ) -> Result<T, CallError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, CallError>> + Send + 'static,
    {
        let handler: Handler<T> = Arc::new(move |process| Box::pin(handler(process)));
        let (answer, answered) = oneshot::channel();
        let (world, from) = (Arc::clone(self), from.node);
        let repeats = delivery == Delivery::Repeated && self.is_rough();
        if repeats && self.numbers.chance(self.climate.repeated) {
            let (world, handler) = (Arc::clone(self), Arc::clone(&handler));
            tokio::spawn(async move {
                tokio::time::sleep(world.numbers.between(0, 5_000)).await;
                if !world.is_lost(from, to) {
                    let _ = world.deliver(to, handler).await;
                }
            });
        }
        tokio::spawn(async move {
            let said = world.carry(from, to, handler).await;
            let _ = answer.send(said);
        });
        match tokio::time::timeout(PATIENCE, answered).await {
            Ok(Ok(said)) => said,
            Ok(Err(_)) | Err(_) => Err(unreachable(to)),
        }
    }

    async fn carry<T: Send + 'static>(
        self: &Arc<World>,
        from: Node,
        to: Node,
        handler: Handler<T>,
    ) -> Result<T, CallError> {
        tokio::time::sleep(self.latency()).await;
        if self.is_lost(from, to) {
            tokio::time::sleep(self.numbers.between(100, 4_000)).await;
            return Err(unreachable(to));
        }
        let said = self.deliver(to, handler).await;
        tokio::time::sleep(self.latency()).await;
        if self.is_lost(to, from) {
            tokio::time::sleep(self.numbers.between(100, 4_000)).await;
            return Err(unreachable(to));
        }
        said
    }

    async fn deliver<T: Send + 'static>(
        self: &Arc<World>,
        to: Node,
        handler: Handler<T>,
    ) -> Result<T, CallError> {
        let Some(process) = self.process(to) else {
            let cause = "nobody listens".to_owned();
            return Err(CallError::NotConnected { peer: to.to_string(), cause });
        };
        let (answer, answered) = oneshot::channel();
        let gate = Arc::clone(&process.gate) as Arc<dyn Gate>;
        tokio::spawn(within(gate, async move {
            let said = handler(process).await;
            let _ = answer.send(said);
        }));
        answered.await.unwrap_or_else(|_| Err(unreachable(to)))
    }
}
