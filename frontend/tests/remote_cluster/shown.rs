//! What a frontend shows that others know better: how jobs are, and what they have defined. Nobody hands it records, and it
//! asks for the first time.

use crate::{Server, run};

#[test]
fn whatever_reads_how_jobs_are_is_told() {
    let cases = [
        "SELECT count(*) FROM millrace_catalog.jobs",
        "SELECT count(*) FROM \"millrace_catalog\".\"jobs\"",
        "SELECT count(*) FROM told",
        "SELECT count(*) FROM above",
        "INSERT INTO seen SELECT name::text FROM millrace_catalog.jobs; SELECT count(*) FROM seen",
        "DELETE FROM seen WHERE name IN (SELECT name FROM told); SELECT 2 + count(*) FROM seen",
    ];
    run(async move {
        let server = Server::start().await;
        server.direct.rows("CREATE TABLE t (id bigint PRIMARY KEY)").await;
        server.direct.rows("CREATE TABLE seen (name text)").await;
        let told = "CREATE VIEW told AS SELECT name::text AS name FROM millrace_catalog.jobs";
        server.direct.rows(told).await;
        server.direct.rows("CREATE VIEW above AS SELECT name FROM told").await;
        for (incarnation, sql) in (2_000..).zip(cases) {
            assert_eq!(server.remote(incarnation).await.text(sql).await, "2", "{sql}");
        }
    });
}

#[test]
fn what_others_have_defined_is_in_system_tables() {
    let cases = [
        ("a", "SELECT count(*) FROM pg_class WHERE relname = 'a'", "1"),
        ("b", "SELECT count(*) FROM information_schema.tables WHERE table_name = 'b'", "1"),
        ("c", "SELECT to_regclass('c') IS NOT NULL", "t"),
        ("d", "SHOW VIEWS", "a b c d"),
        ("e", "SELECT count(*) FROM named WHERE relname = 'e'", "1"),
    ];
    run(async move {
        let server = Server::start().await;
        let remote = server.remote(2_000).await;
        for (view, looks, found) in cases {
            server.direct.rows(&format!("CREATE VIEW {view} AS SELECT 1 AS n")).await;
            assert_eq!(remote.text(looks).await, found, "{looks}");
            if view == "d" {
                server.direct.rows("CREATE VIEW named AS SELECT relname FROM pg_class").await;
            }
        }
        server.direct.rows("CREATE VIEW f AS SELECT 1 AS n").await;
        let looks = "SELECT count(*) FROM pg_class WHERE relname = 'f'";
        let any = format!("SET read_freshness = 'any'; {looks}");
        assert_eq!(remote.text(&any).await, "0", "it asks nobody");
        // Without a leader it shows what the log had when it was read.
        let alone = server.cut_off(3_000).await;
        assert_eq!(alone.text(looks).await, "1");
    });
}
