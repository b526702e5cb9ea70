//! At the end: a backup is made and restored, the restored database is the same, no object is missing, and the store
//! holds no more than what is named and what may not be deleted yet.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::TryStreamExt;
use millrace_sqllogictest::{Server, ServerOptions};
use object_store::ObjectStore;
use tokio_postgres::Client;

use crate::client::{describe, rows};
use crate::node::{BINARY, Place};

const PATIENCE: Duration = Duration::from_secs(120);
/// Objects beyond those that a version named a moment ago: what commits and compactions have just replaced.
const SLACK: usize = 40;

/// Names of the data objects.
async fn objects(store: &Arc<dyn ObjectStore>) -> Result<BTreeSet<String>, String> {
    let listed: Result<Vec<_>, _> =
        store.list(Some(&object_store::path::Path::from("data"))).try_collect().await;
    let listed = listed.map_err(|e| e.to_string())?;
    Ok(listed.into_iter().map(|o| o.location.to_string()).collect())
}

/// Every relation's rows but those that go and come by the clock, or by a table's own filling.
async fn contents(client: &Client) -> Result<BTreeMap<String, Vec<Vec<Option<String>>>>, String> {
    let failed = |e| describe(&e);
    let sql = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' \
        UNION SELECT matviewname FROM pg_matviews WHERE definition NOT LIKE '%now()%'";
    let mut out = BTreeMap::new();
    for row in rows(client, sql).await.map_err(failed)? {
        let name = row[0].clone().unwrap_or_default();
        let mut content = rows(client, &format!("SELECT * FROM {name}")).await.map_err(failed)?;
        content.sort();
        out.insert(name, content);
    }
    Ok(out)
}

fn millrace(args: &[&str], place: &Place) -> Result<String, String> {
    let output = Command::new(BINARY).args(args).envs(&place.env).output();
    let output = output.map_err(|e| e.to_string())?;
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    match output.status.success() {
        true => Ok(text),
        false => Err(format!("millrace {}: {text}", args.join(" "))),
    }
}

/// Backup, restore, and a server on what was restored.
pub async fn restored(client: &Client, place: &Place, folder: &Path) -> Result<String, String> {
    let url = |name: &str| format!("file://{}", folder.join(name).display());
    let made = millrace(&["backup", "--object-store", &place.url, "--to", &url("backup")], place)?;
    millrace(
        &["restore", "--from", &url("backup"), "--object-store", &url("restored/store")],
        place,
    )?;
    let options = ServerOptions::small(&folder.join("restored"));
    let server = Server::start(Path::new(BINARY), options)?;
    let other = server.connect().await.map_err(|e| describe(&e))?;
    crate::views::all_run(&other).await?;
    let (ours, theirs) = (contents(client).await?, contents(&other).await?);
    let differ: Vec<&String> = ours.keys().filter(|k| ours.get(*k) != theirs.get(*k)).collect();
    match differ.is_empty() && ours.len() == theirs.len() {
        true => Ok(made),
        false => Err(format!("the restored database differs in {differ:?}\n{}", server.log())),
    }
}

/// Deletes go on until little is left that no version names.
pub async fn no_garbage(client: &Client, place: &Place, folder: &Path) -> Result<usize, String> {
    let store = place.store().await?;
    let begun = Instant::now();
    for attempt in 0.. {
        // What a version names is what a backup of it copies.
        let to = folder.join(format!("named-{attempt}"));
        let copied = Arc::new(
            object_store::local::LocalFileSystem::new_with_prefix({
                let url = format!("file://{}", to.display());
                millrace(&["backup", "--object-store", &place.url, "--to", &url], place)?;
                &to
            })
            .map_err(|e| e.to_string())?,
        ) as Arc<dyn ObjectStore>;
        let named = objects(&copied).await?;
        let there = objects(&store).await?;
        let beyond = there.difference(&named).count();
        if beyond <= SLACK {
            return Ok(beyond);
        }
        if begun.elapsed() > PATIENCE {
            let some: Vec<_> = there.difference(&named).take(5).collect();
            return Err(format!(
                "{beyond} of {} objects are in no version and are not deleted, as {some:?}",
                there.len()
            ));
        }
        // Garbage is looked at when something has happened.
        let sql =
            "UPDATE counter SET x = x WHERE id = 0; UPDATE dim SET name = name || '' WHERE g = 0";
        client.batch_execute(sql).await.map_err(|e| describe(&e))?;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    Ok(0)
}
