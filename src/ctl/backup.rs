//! `millrace ctl backup` and `millrace ctl restore`.

use clap::{Args, Subcommand};
use millrace_frontend::display;
use millrace_meta::backup::copy::{Purpose, Which};
use millrace_rpc::operator::{BackupList, BackupOverview, OperatorService};
use millrace_rpc::remote::RemoteOperator;
use millrace_rpc::version::StatementId;
use serde_json::{Value, json};

use super::asking::Answered;
use super::connection::Connection;
use super::listing::Listing;
use super::{LeaderCommand, change, instant, show};
use crate::copy;

#[derive(Subcommand, Debug)]
pub enum BackupCommand {
    /// Keeps everything as it is now: what a backup names stays in the object store until it is released
    Create {
        /// Its name; without one it is called by the time
        #[arg(long)]
        name: Option<String>,
    },
    /// Shows the backups that are not released
    List,
    /// Keeps nothing for a backup any more
    Release {
        /// Its name
        name: String,
    },
}

#[derive(Args, Debug)]
pub struct Restore {
    /// The backup: its name, or the number of its log record
    backup: String,
    /// The object store that it is in: file:///path or s3://bucket/prefix
    #[arg(long, value_name = "URL")]
    from: String,
    /// The new store: an empty directory or prefix
    #[arg(long, value_name = "URL")]
    to: String,
}

/// `of`: the command that has this one.
pub(super) async fn run(
    leader: &Connection,
    of: &LeaderCommand,
    command: &BackupCommand,
    as_json: bool,
) -> Result<String, String> {
    Ok(match command {
        BackupCommand::Create { name } => {
            if name.as_deref() == Some("") {
                return Err("a backup has a name, or --name is left out".to_owned());
            }
            let name = name.clone().unwrap_or_default();
            let create = |leader: RemoteOperator, id: Option<StatementId>| {
                let name = name.clone();
                async move { leader.create_backup(name, id).await }
            };
            created(&change(leader, of, create).await?.answer, as_json)
        }
        BackupCommand::List => {
            let listing = listed(&list(leader).await?);
            if as_json { listing.json() } else { listing.table() }
        }
        BackupCommand::Release { name } => {
            let before = list(leader).await?.backups.into_iter().find(|b| b.name == *name);
            let release = |leader: RemoteOperator, id: Option<StatementId>| {
                let name = name.clone();
                async move { leader.release_backup(name, id).await }
            };
            let Answered { answer, is_repeat } = change(leader, of, release).await?;
            // Of one that an attempt without an answer has released, the leader knows the name alone.
            let backup = before.filter(|_| is_repeat).unwrap_or(answer);
            released(&backup, as_json)
        }
    })
}

async fn list(leader: &Connection) -> Result<BackupList, String> {
    show(leader, |leader| async move { leader.backups().await }).await
}

/// Copies a backup into a new store. The object stores are all it needs.
pub async fn restore(restore: &Restore, as_json: bool) -> Result<String, String> {
    let Restore { backup, from, to } = restore;
    let copied = copy::copy(from, to, Which::Backup(backup), Purpose::Run).await?;
    Ok(match as_json {
        true => json!({
            "record": copied.record,
            "objects": copied.objects,
            "bytes": copied.bytes,
            "paused_sinks": copied.paused_sinks,
        })
        .to_string(),
        false => copy::told(&copied),
    })
}

fn created(backup: &BackupOverview, as_json: bool) -> String {
    if as_json {
        return object(backup).to_string();
    }
    format!(
        "Backup {} has everything up to log record {}: {} objects, {}. They stay until it is released.",
        backup.name,
        backup.record,
        backup.objects,
        display::bytes(backup.bytes)
    )
}

fn released(backup: &BackupOverview, as_json: bool) -> String {
    match as_json {
        true => object(backup).to_string(),
        false => format!("Nothing is kept for backup {} any more.", backup.name),
    }
}

fn object(backup: &BackupOverview) -> Value {
    json!({
        "name": backup.name,
        "record": backup.record,
        "made": instant(backup.made_ms),
        "objects": backup.objects,
        "bytes": backup.bytes,
        "kept_objects": backup.kept_objects,
    })
}

fn listed(list: &BackupList) -> Listing {
    let columns = ["name", "record", "made", "age_ms", "state", "objects", "bytes", "kept_objects"];
    let mut listing = Listing::new(&columns);
    for backup in &list.backups {
        listing.add([
            json!(backup.name),
            json!(backup.record),
            json!(instant(backup.made_ms)),
            json!(list.now_ms.saturating_sub(backup.made_ms)),
            json!(if backup.is_complete { "complete" } else { "incomplete" }),
            json!(backup.objects),
            json!(backup.bytes),
            json!(backup.kept_objects),
        ]);
    }
    listing
}
