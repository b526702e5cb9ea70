//! Definitions that are asked for again by their ids, of the same leader and of the next one.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{EnvHandle, RelationId, SqlError, SqlState};
use millrace_rpc::call_error::CallError;
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::control::{
    CreateRelationRequest, DefineAnswer, DefineRequest, Definition, MetaControl,
};
use millrace_rpc::log::{CreateSchema, DropRelations, ProcessRole, SetSetting};
use millrace_rpc::version::StatementId;

use super::store::{Fault, TestStore};
use super::{TestEnv, relation};
use crate::meta::Meta;
use crate::options::MetaOptions;

/// A meta process that leads nobody else.
async fn lead(store: &Arc<TestStore>, seed: u64) -> Arc<Meta> {
    let options = MetaOptions {
        env: EnvHandle::new(TestEnv::new(seed)),
        alone: false,
        roles: vec![ProcessRole::Meta],
        address: format!("m:{seed}"),
        ..MetaOptions::new(Arc::clone(store) as _)
    };
    Meta::open(options).await.unwrap()
}

fn request(number: u64, change: Definition) -> DefineRequest {
    DefineRequest { id: Some(StatementId { frontend: 1, number }), since: 0, change: Some(change) }
}

fn create(relation: Relation) -> Definition {
    let relation = Some(relation);
    Definition::CreateRelation(CreateRelationRequest {
        relation,
        table_count: 0,
        or_replace: false,
    })
}

/// Creates a plain view, which has no job.
fn create_view(name: &str) -> Definition {
    create(relation(name, RelationKind::View, &[]))
}

fn create_schema(name: &str) -> Definition {
    Definition::CreateSchema(CreateSchema { name: name.to_owned() })
}

fn drop_relation(id: u32) -> Definition {
    Definition::DropRelations(DropRelations { ids: vec![id] })
}

async fn ask(meta: &Meta, request: &DefineRequest) -> Result<DefineAnswer, SqlError> {
    MetaControl::define(meta, request.clone()).await.map_err(SqlError::from)
}

async fn relation_of(meta: &Meta, request: &DefineRequest) -> Option<u32> {
    ask(meta, request).await.unwrap().relation
}

#[tokio::test(start_paused = true)]
async fn a_definition_is_made_once_whoever_is_asked_again() {
    let store = TestStore::new();
    let first = lead(&store, 1).await;
    let (view, schema) = (request(1, create_view("v")), request(2, create_schema("s")));
    let id = relation_of(&first, &view).await.expect("what was created");
    assert_eq!(relation_of(&first, &schema).await, None);
    // What others do meanwhile does not matter.
    let dropped = request(3, drop_relation(id));
    assert_eq!(relation_of(&first, &dropped).await, None);
    let record = first.record();
    for (asked, answer) in [(&view, Some(id)), (&schema, None), (&dropped, None)] {
        assert_eq!(relation_of(&first, asked).await, answer);
    }
    assert_eq!(first.record(), record, "something was written");

    let second = lead(&store, 2).await;
    let record = second.record();
    for (asked, answer) in [(&view, Some(id)), (&schema, None), (&dropped, None)] {
        assert_eq!(ask(&second, asked).await.unwrap(), DefineAnswer { relation: answer, record });
    }
    assert_eq!(second.record(), record, "something was written");
    let state = second.state_for_tests();
    assert!(state.relations.is_empty() && state.schemas.contains("s"));
    // Another statement.
    let error = ask(&second, &request(4, create_schema("s"))).await.unwrap_err();
    assert_eq!(error.state, SqlState::DUPLICATE_SCHEMA);
}

#[tokio::test(start_paused = true)]
async fn attempts_that_wait_together_make_one_definition() {
    let store = TestStore::new();
    let meta = lead(&store, 1).await;
    store.set_put_takes(Duration::from_millis(50));
    let (before, view) = (request(1, create_schema("s")), request(2, create_view("v")));
    let again = [&before, &view, &view, &before, &view].map(|asked| ask(&meta, asked));
    let answers = futures::future::join_all(again).await;
    let relations: Vec<Option<u32>> = answers.into_iter().map(|a| a.unwrap().relation).collect();
    let state = meta.state_for_tests();
    let ids: Vec<RelationId> = state.relations.keys().copied().collect();
    let [RelationId(id)] = ids[..] else { panic!("{ids:?}") };
    assert_eq!(relations, [None, Some(id), Some(id), None, Some(id)]);
}

#[tokio::test(start_paused = true)]
async fn what_a_lost_leader_has_logged_is_the_answer_of_the_next() {
    let store = TestStore::new();
    let first = lead(&store, 1).await;
    let view = request(1, create_view("v"));
    store.inject(Fault::HangAfterSuccess);
    let answer = tokio::time::timeout(Duration::from_millis(100), ask(&first, &view)).await;
    assert!(answer.is_err(), "its leader does not know yet: {answer:?}");
    assert_eq!(store.faults_left(), 0);
    let second = lead(&store, 2).await;
    let record = second.record();
    let state = second.state_for_tests();
    let id = state.relation_named("public", "v").expect("it was logged").id;
    assert_eq!(ask(&second, &view).await.unwrap(), DefineAnswer { relation: Some(id), record });
}

#[tokio::test(start_paused = true)]
async fn what_a_lost_leader_has_not_logged_the_next_one_makes() {
    let store = TestStore::new();
    let first = lead(&store, 1).await;
    let view = request(1, create_view("v"));
    // Its record comes to the store when another leads.
    store.set_put_takes(Duration::from_secs(5));
    let late = tokio::time::timeout(Duration::from_millis(100), ask(&first, &view)).await;
    assert!(late.is_err(), "its leader does not know yet: {late:?}");
    store.set_put_takes(Duration::ZERO);
    let second = lead(&store, 2).await;
    assert!(second.state_for_tests().relations.is_empty());
    let id = relation_of(&second, &view).await.expect("what was created");
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(relation_of(&second, &view).await, Some(id));
    let third = lead(&store, 3).await;
    assert_eq!(third.state_for_tests().relations.len(), 1);
    assert_eq!(relation_of(&third, &view).await, Some(id));
}

#[tokio::test(start_paused = true)]
async fn a_definition_that_has_failed_is_tried_again() {
    let store = TestStore::new();
    let meta = lead(&store, 1).await;
    let inside = Relation { schema: "s".into(), ..relation("v", RelationKind::View, &[]) };
    let view = request(1, create(inside));
    assert_eq!(ask(&meta, &view).await.unwrap_err().state, SqlState::INVALID_SCHEMA_NAME);
    ask(&meta, &request(2, create_schema("s"))).await.unwrap();
    assert!(relation_of(&meta, &view).await.is_some());
}

#[tokio::test(start_paused = true)]
async fn what_says_nothing_is_refused() {
    let meta = lead(&TestStore::new(), 1).await;
    let set = |name: &str| {
        let (name, value) = (name.to_owned(), Some("2s".to_owned()));
        request(1, Definition::SetSetting(SetSetting { name, value }))
    };
    for lacking in [
        DefineRequest { id: None, ..set("barrier_interval") },
        DefineRequest { change: None, ..set("barrier_interval") },
    ] {
        let refused = MetaControl::define(&*meta, lacking).await.unwrap_err();
        assert!(matches!(refused, CallError::Malformed(_)), "{refused:?}");
    }
    assert!(ask(&meta, &set("nobody_knows_it")).await.is_err());
    ask(&meta, &set("barrier_interval")).await.unwrap();
    assert!(meta.state_for_tests().settings.contains_key("barrier_interval"));
}
