//! `docker/cluster.yml`: each container is killed and started again, and what was acknowledged is there, at both frontends.
//!
//! Where there is no engine for containers, no base image or no binary of millrace-s3, the test says so and passes.

mod docker;

use std::time::{Duration, Instant};

use docker::{Project, Skipped};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, NoTls};

const SERVICES: [&str; 9] = [
    "s3",
    "meta-1",
    "meta-2",
    "compute-1",
    "compute-2",
    "compute-3",
    "compactor",
    "frontend-1",
    "frontend-2",
];
const FRONTENDS: [&str; 2] = ["frontend-1", "frontend-2"];
/// Until a started cluster answers, and until it answers after a loss.
const LIMIT: Duration = Duration::from_secs(90);
const ATTEMPT: Duration = Duration::from_secs(20);

type Failure = Box<dyn std::error::Error + Send + Sync>;

async fn connect(address: &str) -> Result<Client, Failure> {
    let (host, port) = address.rsplit_once(':').ok_or("no port")?;
    let config = format!("host={host} port={port} user=root dbname=dev connect_timeout=5");
    let (client, connection) = tokio_postgres::connect(&config, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// Adds a row at a frontend. A row of an earlier attempt whose answer was lost is the same row.
async fn add(address: &str, id: i32) -> Result<(), Failure> {
    let client = connect(address).await?;
    let sql = format!("INSERT INTO parts VALUES ({id}, {})", id * 10);
    match client.batch_execute(&sql).await {
        Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => Ok(()),
        other => Ok(other?),
    }
}

/// Sum and number of the rows, of the view and of the table.
async fn sums(address: &str) -> Result<[(i64, i64); 2], Failure> {
    let client = connect(address).await?;
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
    let addresses = FRONTENDS.map(|name| project.address(name, "4566"));
    let writer = &addresses[id as usize % FRONTENDS.len()];
    eventually(project, "INSERT", async || add(writer, id).await).await;
    let n = i64::from(id);
    let expected = (5 * n * (n + 1), n);
    for address in &addresses {
        let found = eventually(project, "SELECT", async || sums(address).await).await;
        assert_eq!(found, [expected; 2], "at {address} after row {id}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_container_is_killed_and_started_again() {
    let project = match Project::prepare() {
        Ok(project) => project,
        Err(Skipped(reason)) => return println!("skipped: {reason}"),
    };
    let began = Instant::now();
    project.up();
    let first = project.address("frontend-1", "4566");
    eventually(&project, "CREATE", async || {
        let sql = "CREATE TABLE IF NOT EXISTS parts (id int PRIMARY KEY, weight int);
                   CREATE MATERIALIZED VIEW IF NOT EXISTS totals AS
                       SELECT sum(weight) AS total, count(*) AS number FROM parts";
        Ok(connect(&first).await?.batch_execute(sql).await?)
    })
    .await;
    write_and_read(&project, 1).await;
    println!("started after {:?}", began.elapsed());
    for (id, service) in (2..).zip(SERVICES) {
        let killed = Instant::now();
        project.kill(service);
        let left = project.running();
        assert_eq!(left.lines().count(), SERVICES.len() - 1, "{service} was killed: {left}");
        project.up();
        write_and_read(&project, id).await;
        println!("{service}: killed, started, written and read after {:?}", killed.elapsed());
    }
}
