//! Reads of committed rows: small ones that the process of the job answers from its memory, what becomes of them where it
//! does not, and those from log and bucket.

use std::sync::atomic::AtomicU64;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use millrace_common::Generation;
use millrace_rpc::read::{FoundRows, ReadAnswer, ReadRefusal, ReadRequest};
use millrace_rpc::remote::{Admission, Server as CallServer};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use parking_lot::Mutex;
use tokio::net::TcpListener;

use super::*;

/// How a process answers reads.
#[derive(Clone, Copy, Debug)]
enum Answers {
    Well,
    NotConnected,
    Unreachable,
    /// The caller has been fenced.
    Fenced,
    /// Another process is there.
    Succeeded,
    Never,
    OtherColumns,
    /// What is right, and then changed.
    Spoiled(fn(&mut FoundRows)),
    Refused(ReadRefusal),
}

struct Owner {
    worker: Arc<Worker>,
    answers: Mutex<Answers>,
    asked: AtomicU64,
}

impl Owner {
    fn new(worker: &Arc<Worker>) -> Arc<Owner> {
        let (worker, answers) = (Arc::clone(worker), Mutex::new(Answers::Well));
        Arc::new(Owner { worker, answers, asked: AtomicU64::new(0) })
    }

    fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }
}

#[async_trait]
impl ReadService for Owner {
    async fn read(&self, request: ReadRequest) -> Result<ReadAnswer, CallError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let (peer, cause) = ("the owner".to_owned(), "planted".to_owned());
        let answers = *self.answers.lock();
        match answers {
            Answers::Well => self.worker.read(request).await,
            Answers::NotConnected => Err(CallError::NotConnected { peer, cause }),
            Answers::Unreachable => Err(CallError::Unreachable { peer, cause }),
            Answers::Fenced => Err(CallError::Fenced { incarnation: 2_000 }),
            Answers::Succeeded => Err(CallError::StaleIncarnation { incarnation: 9_000 }),
            Answers::Never => std::future::pending().await,
            Answers::OtherColumns => {
                let text: ArrayRef = Arc::new(StringArray::from(vec!["wrong"]));
                let batch = RecordBatch::try_from_iter([("v", text)]).unwrap();
                let (positions, chunks) = (vec![0], vec![DeltaChunk::inserts(batch)]);
                Ok(ReadAnswer::Rows(FoundRows { positions, chunks }))
            }
            Answers::Spoiled(spoil) => {
                let mut answer = self.worker.read(request).await?;
                if let ReadAnswer::Rows(found) = &mut answer {
                    spoil(found);
                }
                Ok(answer)
            }
            Answers::Refused(why) => Ok(ReadAnswer::Refused(why)),
        }
    }
}

fn by_follower(ways: &ReadWays, why: &str) -> u64 {
    ways.by_follower().find(|(reason, _)| *reason == why).map_or(0, |(_, count)| count)
}

/// Reads until the process of the job answers: there is a connection then.
async fn connect(remote: &Sessions, ways: &ReadWays, small: &str) {
    let before = ways.by_owner();
    while ways.by_owner() == before {
        remote.text(small).await;
    }
}

#[test]
fn what_the_owner_has_in_memory_is_read_without_the_store() {
    run(async {
        let server = Server::start().await;
        let tables: Vec<String> = (0..20).map(|n| format!("t{n}")).collect();
        for table in &tables {
            let create = format!("CREATE TABLE {table} (id bigint PRIMARY KEY, v bigint)");
            server.direct.rows(&create).await;
            server.direct.rows(&format!("INSERT INTO {table} VALUES (1, 2), (3, 4)")).await;
        }
        let sim = SimStore::new(Arc::clone(&server.bucket), Profile::INSTANT, 1);
        let bucket = Arc::new(sim.clone()) as Arc<dyn ObjectStore>;
        let (leader, process) = (server.leader(), server.process());
        let (remote, ways) = server.frontend_on(&bucket, 2_000, leader, process).await;
        let [known, off, rest @ ..] = tables.as_slice() else { panic!("there are more") };
        // What is read of a table for the first time, of which nothing is in this frontend's memory.
        let first_read = async |table: &String| {
            sim.record_requests();
            let read = format!("SELECT v FROM {table} WHERE id = 3");
            assert_eq!(remote.text(&read).await, "4");
            let requests = sim.take_requests();
            requests.iter().filter(|request| request.location.starts_with("data/")).count()
        };
        let mut is_answered = false;
        for table in rest {
            connect(&remote, &ways, &format!("SELECT v FROM {known} WHERE id = 1")).await;
            let before = ways.by_owner();
            let requests = first_read(table).await;
            // On a busy machine it may not answer in time: then the next table is read.
            if ways.by_owner() > before {
                assert_eq!(requests, 0);
                is_answered = true;
                break;
            }
        }
        assert!(is_answered);
        remote.rows("ALTER SYSTEM SET read_from_owner = 'off'").await;
        let before = ways.by_owner();
        assert!(first_read(off).await > 0, "it reads the store");
        assert_eq!((ways.by_owner(), by_follower(&ways, "off")), (before, 1));
    });
}

#[test]
fn what_the_owner_does_not_answer_is_read_from_log_and_bucket() {
    run(async {
        let server = Server::start().await;
        server.direct.rows("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
        server.direct.rows("INSERT INTO t VALUES (1, 2), (3, 4)").await;
        let cases = [
            // How it answers, how that is counted, and whether it is asked at once again.
            (Answers::NotConnected, "failed", false),
            (Answers::Unreachable, "failed", false),
            (Answers::Fenced, "failed", false),
            (Answers::Succeeded, "failed", false),
            (Answers::Never, "late", false),
            (Answers::OtherColumns, "failed", true),
            (Answers::Refused(ReadRefusal::NotOpen), "not_open", true),
            (Answers::Refused(ReadRefusal::NotYet), "not_yet", true),
            (Answers::Refused(ReadRefusal::TooOld), "too_old", true),
            (Answers::Refused(ReadRefusal::TooLarge), "too_large", true),
            (Answers::Refused(ReadRefusal::Busy), "busy", true),
        ];
        for ((answers, reason, is_asked_again), incarnation) in cases.into_iter().zip(2_000..) {
            let owner = Owner::new(&server.worker);
            let reads = Arc::clone(&owner) as Arc<dyn ReadService>;
            let process = TableProcess { reads, ..server.process() };
            let (bucket, leader) = (&server.bucket, server.leader());
            let (remote, ways) = server.frontend_on(bucket, incarnation, leader, process).await;
            let read = "SELECT v FROM t WHERE id = 3";
            connect(&remote, &ways, read).await;
            *owner.answers.lock() = answers;
            let (by_owner, asked) = (ways.by_owner(), owner.asked());
            let failed = by_follower(&ways, reason);
            assert_eq!(remote.text(read).await, "4", "{answers:?}");
            let now = (owner.asked() - asked, by_follower(&ways, reason) - failed);
            assert_eq!(now, (1, 1), "{answers:?}");
            assert_eq!(remote.text(read).await, "4", "{answers:?}");
            assert_eq!(owner.asked() - asked, 1 + u64::from(is_asked_again), "{answers:?}");
            assert_eq!(ways.by_owner(), by_owner, "{answers:?}");
        }
    });
}

#[test]
fn what_cannot_be_an_answer_is_read_from_log_and_bucket() {
    run(async {
        let server = Server::start().await;
        server.direct.rows("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
        server.direct.rows("INSERT INTO t VALUES (1, 2), (3, 4)").await;
        let owner = Owner::new(&server.worker);
        let reads = Arc::clone(&owner) as Arc<dyn ReadService>;
        let process = TableProcess { reads, ..server.process() };
        let (bucket, leader) = (&server.bucket, server.leader());
        let (remote, ways) = server.frontend_on(bucket, 2_000, leader, process).await;
        let by_key = ("SELECT v FROM t WHERE id = 3", "4");
        let few = ("SELECT count(*) FROM (SELECT id FROM t LIMIT 5) AS l", "2");
        let cases: [(&str, (&str, &str), fn(&mut FoundRows)); 11] = [
            ("a key that was not asked for", by_key, |found| found.positions = vec![7]),
            ("a position more", by_key, |found| found.positions.push(1)),
            ("no positions", by_key, |found| found.positions.clear()),
            ("a row more", by_key, |found| found.chunks.push(found.chunks[0].clone())),
            ("no rows", by_key, |found| found.chunks.clear()),
            ("a row twice", by_key, |found| {
                found.chunks[0].weights = Some(Int64Array::from(vec![2]))
            }),
            ("no columns", by_key, |found| {
                found.chunks[0].batch = found.chunks[0].batch.project(&[]).unwrap();
            }),
            ("a column more", by_key, |found| {
                let columns = [0].repeat(found.chunks[0].batch.num_columns() + 1);
                found.chunks[0].batch = found.chunks[0].batch.project(&columns).unwrap();
            }),
            ("positions", few, |found| found.positions = vec![0]),
            ("rows that are not there", few, |found| {
                let weights = vec![-1_i64; found.chunks[0].num_rows()];
                found.chunks[0].weights = Some(Int64Array::from(weights));
            }),
            ("more rows than there is memory for", few, |found| {
                let weights = vec![1_i64 << 60; found.chunks[0].num_rows()];
                found.chunks[0].weights = Some(Int64Array::from(weights));
            }),
        ];
        connect(&remote, &ways, by_key.0).await;
        for (name, (query, rows), spoil) in cases {
            *owner.answers.lock() = Answers::Spoiled(spoil);
            let (by_owner, asked) = (ways.by_owner(), owner.asked());
            let failed = by_follower(&ways, "failed");
            assert_eq!(remote.text(query).await, rows, "{name}");
            assert!(owner.asked() > asked && by_follower(&ways, "failed") > failed, "{name}");
            assert_eq!(ways.by_owner(), by_owner, "{name}");
            // It has answered, so it is asked again.
            *owner.answers.lock() = Answers::Well;
            connect(&remote, &ways, query).await;
        }
    });
}

#[test]
fn a_process_of_a_build_without_the_call_is_not_asked_for_a_while() {
    run(async {
        let server = Server::start().await;
        server.direct.rows("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
        server.direct.rows("INSERT INTO t VALUES (1, 2), (3, 4)").await;
        // It answers handshakes, and has no service for reads.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(CallServer::new(Arc::<Admission>::default()).serve(listener));
        let peer = Peer::new(&address, Arc::default(), CallLimits::default()).unwrap();
        let reads = Arc::new(RemoteReads::new(peer)) as Arc<dyn ReadService>;
        let process = TableProcess { reads, ..server.process() };
        let (bucket, leader) = (&server.bucket, server.leader());
        let (remote, ways) = server.frontend_on(bucket, 2_000, leader, process).await;
        let read = "SELECT v FROM t WHERE id = 3";
        while by_follower(&ways, "failed") == 0 {
            assert_eq!(remote.text(read).await, "4");
        }
        let set_aside = by_follower(&ways, "set_aside");
        assert_eq!(remote.text(read).await, "4");
        assert_eq!(by_follower(&ways, "set_aside"), set_aside + 1);
        assert_eq!((by_follower(&ways, "failed"), ways.by_owner()), (1, 0));
    });
}

#[test]
fn reads_have_the_same_rows_whichever_way_they_take() {
    run(async {
        let server = Server::start().await;
        let (bucket, leader, process) = (&server.bucket, server.leader(), server.process());
        let (remote, ways) = server.frontend_on(bucket, 2_000, leader, process).await;
        for statement in [
            "CREATE TABLE t (id bigint PRIMARY KEY, v bigint)",
            "CREATE INDEX by_v ON t (v)",
            "CREATE TABLE log (line text)",
            "CREATE MATERIALIZED VIEW lines AS SELECT line FROM log",
            "CREATE TABLE typed (id bigint PRIMARY KEY, a text, b numeric, c timestamptz, d jsonb, e bytea, f date, \
             g boolean, h double precision, i text[], j interval)",
            "CREATE MATERIALIZED VIEW typed_too AS SELECT h, i, id, a, b, c, d, e, f, g, j FROM typed",
            "INSERT INTO t SELECT i, i * 7 % 50 FROM generate_series(1, 300) AS g(i)",
            "DELETE FROM t WHERE id % 10 = 1",
            "INSERT INTO log VALUES ('a'), ('b'), ('a'), (NULL), ('a')",
            "INSERT INTO typed VALUES (1, 'é', 1.50, '2024-02-29 12:00:00+01', '{\"k\": [1]}', '\\x00ff', '2024-02-29', \
             true, -0.5, ARRAY['x', NULL], '1 month 2 days'), \
             (2, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)",
        ] {
            remote.rows(statement).await;
        }
        let queries = [
            "SELECT v FROM t WHERE id = 8",
            "SELECT count(*) FROM t WHERE id = 11",
            "SELECT id, v FROM t WHERE id IN (3, 999, 5, 21) ORDER BY id",
            "SELECT id FROM t WHERE v = 21 ORDER BY id",
            "SELECT v, id FROM t WHERE v > 46 ORDER BY v, id",
            "SELECT count(*) FROM (SELECT id FROM t LIMIT 5) AS l",
            "SELECT line FROM (SELECT line FROM lines LIMIT 100) AS l ORDER BY line",
            "SELECT * FROM typed WHERE id = 1",
            "SELECT * FROM typed WHERE id = 2",
            "SELECT * FROM typed_too WHERE id = 1",
            "SELECT * FROM (SELECT * FROM typed_too LIMIT 100) AS l ORDER BY id",
            "SELECT count(*), sum(v) FROM t",
            "UPDATE t SET v = v + 1 WHERE id = 4 RETURNING v",
            "BEGIN; UPDATE t SET v = 0 WHERE id = 5; SELECT v FROM t WHERE id IN (5, 6) ORDER BY id; ROLLBACK; \
             SELECT v FROM t WHERE id IN (4, 5) ORDER BY id",
        ];
        connect(&remote, &ways, queries[0]).await;
        let before = ways.by_owner();
        for setting in ["on", "off"] {
            remote.rows(&format!("ALTER SYSTEM SET read_from_owner = '{setting}'")).await;
            for query in queries {
                match query.starts_with("UPDATE") {
                    true => drop(remote.rows(query).await),
                    false => {
                        let (here, there) =
                            (server.direct.text(query).await, remote.text(query).await);
                        assert_eq!(there, here, "{query}");
                        assert!(!here.is_empty(), "{query}");
                    }
                }
            }
            if setting == "on" {
                assert!(ways.by_owner() > before);
            }
        }
        assert!(by_follower(&ways, "off") > 0 && by_follower(&ways, "scan") > 0);
        assert_eq!(by_follower(&ways, "failed"), 0, "what it answers can be read");
    });
}

#[test]
fn a_read_of_a_version_that_is_gone_goes_on_with_the_next() {
    run(async {
        let server = Server::start().await;
        server.direct.rows("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
        let rows = "SELECT i, i FROM generate_series(1, 3000) AS g(i)";
        server.direct.rows(&format!("INSERT INTO t {rows}")).await;
        // It has followed the log up to here.
        let alone = server.cut_off(2_000).await;
        let catalog = server.direct.shared().cluster.catalog();
        let id = RelationId(catalog.get("public", "t").unwrap().id);
        let before = server.meta.version(id).unwrap();
        assert!(!before.tail.is_empty());
        let edit = server.worker.store().job(id).unwrap().flush().await.unwrap();
        let generation = Generation(before.generation);
        let meta = server.meta.as_ref() as &dyn MetaService;
        assert!(meta.commit_edit(id, generation, edit).await.unwrap());
        assert!(server.meta.version(id).unwrap().tail.is_empty());
        for slice in &before.tail {
            server.bucket.delete(&Path::from(slice.object.as_str())).await.unwrap();
        }
        let any = "SET read_freshness = 'any'; ";
        assert_eq!(
            alone.text(&format!("{any}SELECT count(*), sum(v) FROM t")).await,
            "3000|4501500"
        );
    });
}
