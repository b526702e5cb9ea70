//! What an operator asks and tells arrives as it was sent, at the leader only.

use std::sync::Arc;

use millrace_common::RelationId;
use millrace_rpc::call_error::CallError;
use millrace_rpc::operator::OperatorService;
use millrace_rpc::remote::{Admission, Identity, OperatorSlot, RemoteOperator, Server};
use millrace_rpc::version::StatementId;
use tokio::net::TcpListener;

use crate::fake::{FAILING, Fake, error, peer};
use crate::filled;

#[tokio::test]
async fn an_operator_speaks_with_the_leader() {
    let (slot, admission) = (Arc::<OperatorSlot>::default(), Arc::new(Admission::default()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = Server::new(Arc::clone(&admission)).operator(Arc::clone(&slot));
    tokio::spawn(server.serve(listener));
    let operator = RemoteOperator::new(peer(&address, Arc::new(Identity::follower())));
    assert!(matches!(operator.overview().await, Err(CallError::NotLeader { .. })));

    let fake = Arc::<Fake>::default();
    assert!(slot.set(Arc::clone(&fake) as _).is_ok());
    admission.lead(3);
    // It takes no part, so it learns of the term by its first call.
    assert_eq!(operator.overview().await.unwrap(), filled::one("millrace.rpc.ClusterOverview"));
    assert_eq!(operator.versions().await.unwrap(), filled::one("millrace.rpc.JobVersions"));
    let placed = filled::one("millrace.rpc.PlacedJobs");
    let id = Some(StatementId { frontend: 1 << 50, number: 9 });
    assert_eq!(operator.move_job(RelationId(7), 1 << 40, id).await.unwrap(), placed);
    assert_eq!(operator.drain(300, true, None).await.unwrap(), placed);
    assert_eq!(operator.drain(300, false, id).await.unwrap(), placed);
    let none: Option<StatementId> = None;
    let seen = [
        format!("{:?}", (RelationId(7), 1u64 << 40, id)),
        format!("{:?}", (300u64, true, none)),
        format!("{:?}", (300u64, false, id)),
    ];
    assert_eq!(fake.seen(), seen);
    let collected = operator.collection(true).await.unwrap();
    assert_eq!(collected, filled::one("millrace.rpc.CollectionReport"));
    assert_eq!(fake.seen(), ["true"]);
    let backup = filled::one("millrace.rpc.BackupOverview");
    assert_eq!(operator.create_backup("a".into(), id).await.unwrap(), backup);
    assert_eq!(operator.release_backup("b".into(), id).await.unwrap(), backup);
    assert_eq!(fake.seen(), ["a", "b"].map(|name| format!("{:?}", (name, id))));
    assert_eq!(operator.backups().await.unwrap(), filled::one("millrace.rpc.BackupList"));
    match operator.move_job(FAILING, 1, None).await {
        Err(CallError::Sql(refused)) => assert_eq!(refused.message, error().message),
        other => panic!("{other:?}"),
    }
}
