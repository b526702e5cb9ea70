//! `docker-compose.yml`: each container is killed and started again, and what was acknowledged is there, through the one
//! address that clients have. The dashboard and the configuration of its profile `monitoring` are checked beside it.
//!
//! Where there is no engine for containers, no base image or no binary of millrace-s3, the first test says so and passes,
//! unless `MILLRACE_REQUIRE_CONTAINERS` is set (docs/development.md).

mod docker;
mod monitoring;

use std::process::Command;
use std::time::{Duration, Instant};

use docker::Project;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, NoTls};

const SERVICES: [&str; 11] = [
    "s3",
    "meta-1",
    "meta-2",
    "compute-1",
    "compute-2",
    "compute-3",
    "compactor-1",
    "compactor-2",
    "frontend-1",
    "frontend-2",
    "haproxy",
];
/// What is killed, in this order: one of each role, and the second compactor.
const KILLED: [&str; 7] =
    ["s3", LEADER, "compute-1", "compactor-1", "compactor-2", "frontend-1", "haproxy"];
/// The one of the meta processes that leads then.
const LEADER: &str = "leader";
/// Until a started cluster answers, and until it answers after a loss.
const LIMIT: Duration = Duration::from_secs(90);
const ATTEMPT: Duration = Duration::from_secs(20);
/// Within which sessions of clients no longer meet a frontend that was killed.
const TURN: Duration = Duration::from_secs(10);
/// Bits of a session's process id that tell its frontend.
const FRONTEND_BITS: i32 = 0xfff;

type Failure = Box<dyn std::error::Error + Send + Sync>;

async fn connect(address: &str) -> Result<Client, Failure> {
    let (host, port) = address.rsplit_once(':').ok_or("no port")?;
    let config = format!("host={host} port={port} user=root dbname=dev connect_timeout=5");
    let (client, connection) = tokio_postgres::connect(&config, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// Two sessions, one at each frontend: the proxy gives the next one to the frontend that has fewer.
async fn one_at_each(address: &str) -> Result<[Client; 2], Failure> {
    let sessions = [connect(address).await?, connect(address).await?];
    let mut frontends = Vec::new();
    for client in &sessions {
        let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[]).await?.get(0);
        frontends.push(pid & FRONTEND_BITS);
    }
    match frontends[0] == frontends[1] {
        true => Err(format!("only one frontend gets sessions: {frontends:?}").into()),
        false => Ok(sessions),
    }
}

/// Adds a row. A row of an earlier attempt whose answer was lost is the same row.
async fn add(client: &Client, id: i32) -> Result<(), Failure> {
    let sql = format!("INSERT INTO parts VALUES ({id}, {})", id * 10);
    match client.batch_execute(&sql).await {
        Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => Ok(()),
        other => Ok(other?),
    }
}

/// Sum and number of the rows, of the view and of the table.
async fn sums(client: &Client) -> Result<[(i64, i64); 2], Failure> {
    let view = client.query_one("SELECT total::bigint, number FROM totals", &[]).await?;
    let table = "SELECT sum(weight)::bigint, count(*) FROM parts";
    let table = client.query_one(table, &[]).await?;
    Ok([(view.get(0), view.get(1)), (table.get(0), table.get(1))])
}

/// Repeats what a process that is not there yet lets fail, within the limit.
async fn eventually<T>(
    project: &Project,
    what: &str,
    mut attempt: impl AsyncFnMut() -> Result<T, Failure>,
) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        let failure: Failure = match tokio::time::timeout(ATTEMPT, attempt()).await {
            Ok(Ok(value)) => return value,
            Ok(Err(failure)) => failure,
            Err(late) => late.into(),
        };
        if Instant::now() > deadline {
            panic!("{what}: {failure:?}\n{}\n{}", project.running(), project.logs());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Writes at one frontend and reads at both; the next call writes at the other one.
async fn write_and_read(project: &Project, id: i32) {
    let address = project.address("haproxy", "4566");
    let writer = id as usize % 2;
    let write = async || add(&one_at_each(&address).await?[writer], id).await;
    eventually(project, "INSERT", write).await;
    let read = async || {
        let [one, other] = one_at_each(&address).await?;
        Ok([sums(&one).await?, sums(&other).await?])
    };
    let found = eventually(project, "SELECT", read).await;
    let n = i64::from(id);
    assert_eq!(found, [[(5 * n * (n + 1), n); 2]; 2], "after row {id}");
}

/// The service of the meta process that leads: those that stand by are not in the log.
async fn leader(project: &Project) -> String {
    let address = project.address("haproxy", "4566");
    let found = eventually(project, "the leader", async || {
        let sql = "SELECT address FROM millrace_catalog.processes WHERE roles = ARRAY['meta']";
        let address: String = connect(&address).await?.query_one(sql, &[]).await?.get(0);
        Ok(address.split(':').next().unwrap_or_default().to_owned())
    });
    found.await
}

/// While one frontend is away, every session gets to the other one.
async fn sessions_without_one_frontend(project: &Project) {
    let address = project.address("haproxy", "4566");
    let killed = Instant::now();
    let mut in_a_row = 0;
    while in_a_row < 4 {
        let answered = async {
            connect(&address).await?.query_one("SELECT 1", &[]).await?;
            Ok::<_, Failure>(())
        };
        match answered.await {
            Ok(()) => in_a_row += 1,
            Err(failure) => {
                in_a_row = 0;
                assert!(killed.elapsed() < TURN, "{failure:?}\n{}", project.logs());
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    println!("one frontend is away: sessions after {:?}", killed.elapsed());
}

/// `millrace demo --connect` makes its sources and views, tells how they are, and drops them.
fn demo(project: &Project) {
    let address = project.address("haproxy", "4566");
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
    command.args(["demo", "--connect", &format!("postgres://root@{address}/dev")]);
    let ran = docker::run(command.args(["--seconds", "6", "--rate", "500"]), LIMIT);
    let ran = ran.expect("the binary is there");
    assert!(ran.succeeded(), "{}\n{}", ran.text, project.logs());
    let last = ran.text.lines().rfind(|line| line.contains("sellers")).unwrap_or_default();
    assert!(last.contains("high_bids"), "it has told nothing: {}", ran.text);
    assert!(!last.contains("bids_per_window 0 rows/s, 0 rows"), "nothing has moved: {last}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_role_is_killed_and_started_again() {
    let project = match Project::prepare() {
        Ok(project) => project,
        Err(skipped) => return skipped.tell(),
    };
    project.can_read("docker/standalone.yml");
    let began = Instant::now();
    project.up();
    let address = project.address("haproxy", "4566");
    eventually(&project, "CREATE", async || {
        let sql = "CREATE TABLE IF NOT EXISTS parts (id int PRIMARY KEY, weight int);
                   CREATE MATERIALIZED VIEW IF NOT EXISTS totals AS
                       SELECT sum(weight) AS total, count(*) AS number FROM parts";
        Ok(connect(&address).await?.batch_execute(sql).await?)
    })
    .await;
    write_and_read(&project, 1).await;
    println!("started after {:?}", began.elapsed());
    demo(&project);
    for (id, killed) in (2..).zip(KILLED) {
        let service = match killed {
            LEADER => leader(&project).await,
            other => other.to_owned(),
        };
        let killed = Instant::now();
        project.kill(&service);
        let left = project.running();
        assert_eq!(left.lines().count(), SERVICES.len() - 1, "{service} was killed: {left}");
        if service.starts_with("frontend") {
            sessions_without_one_frontend(&project).await;
        }
        project.up();
        write_and_read(&project, id).await;
        println!("{service}: killed, started, written and read after {:?}", killed.elapsed());
    }
}

/// Two builds of one name at a time fail, where the second finds that the first has made it.
#[test]
fn one_service_builds_each_image() {
    for (file, images) in [("docker-compose.yml", 2), ("docker/standalone.yml", 1)] {
        let text = monitoring::read(file);
        let builds = text.lines().filter(|line| line.trim_start().starts_with("build:"));
        assert_eq!(builds.count(), images, "{file}");
    }
}
