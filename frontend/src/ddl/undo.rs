//! Relations whose creation is undone where their statement does not come to its end: Ctrl-C, time-out, a lost client.

use std::sync::{Arc, Weak};
use std::time::Duration;

use millrace_common::{RelationId, SqlError, SqlState};
use millrace_rpc::catalog::Relation;
use millrace_rpc::request::carried;
use tokio::sync::oneshot;

use crate::cluster::Cluster;
use crate::session::{Session, Step};

/// How often, and after which pauses, a relation of a session is looked for whose creation has no known outcome.
const LOOKS: u32 = 60;
const LOOK_PAUSE: Duration = Duration::from_secs(5);

/// Drops a relation whose creation did not come to its end.
pub struct Undo {
    cluster: Option<(Arc<dyn Cluster>, RelationId)>,
    /// For the log.
    name: String,
    /// Nobody can name it but its session: left behind, it is nothing that the statement has done.
    is_of_session: bool,
    /// Which step of its statement waits for that.
    step: Arc<Step>,
}

impl Undo {
    /// Of a relation that has just been created.
    fn of(cluster: Arc<dyn Cluster>, step: Arc<Step>, id: RelationId, is_of_session: bool) -> Undo {
        let name = cluster.catalog().by_id(id.0).map_or_else(|| id.to_string(), |r| r.label());
        Undo { cluster: Some((cluster, id)), name, is_of_session, step }
    }

    /// There is nothing to undo any more.
    pub fn keep(mut self) {
        self.cluster = None;
    }

    /// What is to be done, and whether nothing of the statement is left then; nothing is left to undo.
    fn work(&mut self) -> impl Future<Output = bool> + Send + use<> {
        let (cluster, name) = (self.cluster.take(), std::mem::take(&mut self.name));
        let is_of_session = self.is_of_session;
        async move {
            let Some((cluster, id)) = cluster else { return true };
            match cluster.drop_relations(vec![id]).await {
                Ok(()) => true,
                // Another session has dropped it.
                Err(e) if e.state == SqlState::UNDEFINED_TABLE => true,
                Err(e) => {
                    tracing::warn!(relation = name, error = %e, "a cancelled creation could not be removed");
                    is_of_session
                }
            }
        }
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if self.cluster.is_some()
            && let Ok(handle) = tokio::runtime::Handle::try_current()
        {
            let (work, step) = (self.work(), Arc::clone(&self.step));
            let undone = async move { step.carry_out_undo(work).await };
            self.step.undo(handle.spawn(carried(undone)));
        }
    }
}

/// Creates a relation that is undone unless it is kept. Where the statement is cut off before it is known whether it has been
/// created, its step waits for that, and for what undoes it.
pub async fn create(
    session: &Session,
    relation: Relation,
    table_count: u32,
    or_replace: bool,
) -> Result<(RelationId, Undo), SqlError> {
    let (cluster, step) = (Arc::clone(session.cluster()), Arc::clone(&session.step));
    cluster.await_process_for(&relation).await?;
    let (answer, created) = oneshot::channel();
    let creating = async move {
        let of_session =
            (relation.ephemeral != 0).then(|| (relation.schema.clone(), relation.name.clone()));
        let done = step.define(cluster.create_relation(relation, table_count, or_replace)).await;
        let is_unknown = done.as_ref().is_err_and(is_unknown);
        let is_of_session = of_session.is_some();
        let undo = |id| (id, Undo::of(Arc::clone(&cluster), Arc::clone(&step), id, is_of_session));
        match answer.send(done.map(undo)) {
            Ok(()) => {}
            Err(Ok((_, mut undo))) => step.carry_out_undo(undo.work()).await,
            // Who is cut off is told so.
            Err(Err(_)) if is_unknown => step.entered().set(),
            Err(Err(_)) => {}
        }
        if let (true, Some((schema, name))) = (is_unknown, of_session) {
            // Nobody can name it but its session, which has nothing of it.
            tokio::spawn(carried(drop_found(Arc::downgrade(&cluster), schema, name)));
        }
    };
    session.step.undo(tokio::spawn(carried(creating)));
    created
        .await
        .unwrap_or_else(|_| Err(SqlError::internal("a creation has ended without an answer")))
}

fn is_unknown(error: &SqlError) -> bool {
    matches!(error.state, SqlState::TRANSACTION_RESOLUTION_UNKNOWN | SqlState::ADMIN_SHUTDOWN)
}

/// Drops a relation that may come into being.
async fn drop_found(cluster: Weak<dyn Cluster>, schema: String, name: String) {
    for _ in 0..LOOKS {
        tokio::time::sleep(LOOK_PAUSE).await;
        let Some(cluster) = cluster.upgrade() else { return };
        if cluster.refresh_catalog().await.is_err() {
            continue;
        }
        let found = cluster.catalog().get(&schema, &name).map(|r| RelationId(r.id));
        if let Some(id) = found
            && cluster.drop_relations(vec![id]).await.is_ok()
        {
            return;
        }
    }
}
