//! The durable messages: the structs that are written by hand are what proto/*.proto says.

use std::collections::BTreeSet;

use prost::Message;

use crate::filled::{POOL, encoded};

/// What is generated from the text.
mod twins {
    #![allow(clippy::all)]
    include!(concat!(env!("OUT_DIR"), "/twins/twins.rs"));
}

/// Names and values of all fields, whether a message must be there or may.
fn shown(message: &impl std::fmt::Debug) -> String {
    format!("{message:?}").replace("Some(", "").replace(['(', ')'], "")
}

fn compare<Hand, Twin>(name: &str)
where
    Hand: Message + Default + std::fmt::Debug,
    Twin: Message + Default + std::fmt::Debug,
{
    for bytes in encoded(name) {
        let hand = Hand::decode(&bytes[..]).unwrap();
        let twin = Twin::decode(&bytes[..]).unwrap();
        assert_eq!(shown(&hand), shown(&twin), "{name}: fields or their types differ");
        assert_eq!(hand.encode_to_vec(), twin.encode_to_vec(), "{name}: the bytes differ");
    }
}

macro_rules! compare_all {
    ($($package:ident: $($name:ident)*;)*) => {{
        let mut compared = BTreeSet::new();
        $($({
            let name = concat!("millrace.", stringify!($package), ".", stringify!($name));
            compare::<millrace_rpc::$package::$name, twins::millrace::$package::$name>(name);
            compared.insert(name.to_owned());
        })*)*
        compared
    }};
}

#[test]
fn structs_written_by_hand_are_the_messages_of_the_text() {
    let compared = compare_all! {
        catalog: Column ColumnType Relation Format OptionEntry Watermark;
        version: RunMeta SliceRef BackfillPosition BackfillState Detached JobVersion ColumnWatermark
            SourceWatermark PublishHandle VersionEdit Flushed JobCommit CommitGroup GroupMember
            StatementId;
        log: LogRecord LogEntry RegisterProcess FenceProcess PlaceJobs GiveUp DrainProcess
            ProcessSnapshot CreateBackup ReleaseBackup BackupSnapshot
            SetUser UserSnapshot Transaction CreateRelation DropRelations CreateSchema DropSchema
            EditVersion RaiseGenerations SourceAdvance SplitMark SplitMarkAt SourceSplit SourceFile
            AlterRelation SplitOffset SetSetting DeleteObjects StartBackfill Detach Rebuild Tick
            MoveParts MovedPart Published Snapshot JobSnapshot WatermarksAt SourceSnapshot
            SourcePosition TimelineSnapshot CounterRange CommittedStatement CommittedDefinition;
    };
    let durable = |name: &str| {
        ["catalog", "version", "log"].iter().any(|p| name.starts_with(&format!("millrace.{p}.")))
    };
    let all = POOL.all_messages().filter(|m| !m.is_map_entry());
    let all: BTreeSet<String> =
        all.map(|m| m.full_name().to_owned()).filter(|name| durable(name)).collect();
    assert_eq!(compared, all, "a message of the text is not compared");
}
