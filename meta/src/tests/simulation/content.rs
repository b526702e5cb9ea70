//! What relations hold. A table's row is a key with the list of all statements that have appended to it, so that one that
//! is lost, repeated or overtaken is seen; a view has, for each group of its inputs' keys, the statements of all of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use millrace_common::Epoch;
use millrace_rpc::version::{JobVersion, RunMeta, SliceRef};
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt};

pub type Key = u32;
/// Numbers of statements.
pub type List = Vec<u32>;
pub type Rows = BTreeMap<Key, List>;

/// A key's list as of an epoch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    pub key: Key,
    /// 0: that of its slice, which the log assigns.
    pub epoch: u64,
    /// Of its slice or run.
    pub sequence: u64,
    pub list: List,
}

pub fn encode(entries: &[Entry]) -> Bytes {
    let mut bytes = Vec::new();
    for entry in entries {
        bytes.extend(entry.key.to_le_bytes());
        bytes.extend(entry.epoch.to_le_bytes());
        bytes.extend((entry.list.len() as u32).to_le_bytes());
        entry.list.iter().for_each(|op| bytes.extend(op.to_le_bytes()));
    }
    bytes.into()
}

fn number(bytes: &[u8], at: &mut usize) -> u32 {
    let number = u32::from_le_bytes(bytes[*at..*at + 4].try_into().unwrap());
    *at += 4;
    number
}

/// `epoch`: of entries without one.
fn decode(bytes: &[u8], epoch: u64, sequence: u64) -> Vec<Entry> {
    let (mut entries, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let key = number(bytes, &mut at);
        let own = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        at += 8;
        let length = number(bytes, &mut at);
        let list = (0..length).map(|_| number(bytes, &mut at)).collect();
        let epoch = if own == 0 { epoch } else { own };
        entries.push(Entry { key, epoch, sequence, list });
    }
    entries
}

/// The rows at an epoch: of each key the newest entry, of those of one epoch the one with the largest sequence.
pub fn rows_at(entries: &[Entry], epoch: Epoch) -> Rows {
    let mut newest: BTreeMap<Key, &Entry> = BTreeMap::new();
    for entry in entries.iter().filter(|e| e.epoch <= epoch.0) {
        let known = newest.entry(entry.key).or_insert(entry);
        if (known.epoch, known.sequence) <= (entry.epoch, entry.sequence) {
            *known = entry;
        }
    }
    newest.into_iter().map(|(key, entry)| (key, entry.list.clone())).collect()
}

/// What a compaction keeps: of entries at or below the horizon one for each key, of equal epochs the newest.
pub fn merged(mut entries: Vec<Entry>, horizon: Epoch) -> Vec<Entry> {
    entries.sort_by_key(|e| (e.key, std::cmp::Reverse((e.epoch, e.sequence))));
    let mut kept: Vec<Entry> = Vec::new();
    for entry in entries {
        let is_hidden = kept.last().is_some_and(|newer| {
            newer.key == entry.key && (newer.epoch == entry.epoch || newer.epoch <= horizon.0)
        });
        if !is_hidden {
            kept.push(entry);
        }
    }
    kept
}

/// By what a view divides the keys of its inputs.
pub fn groups(name: &str) -> Key {
    2 + name.bytes().last().map_or(0, |b| Key::from(b) % 3)
}

/// What a view holds, given the rows of its inputs.
pub fn grouped<'a>(name: &str, inputs: impl IntoIterator<Item = &'a Rows>) -> Rows {
    let mut rows = Rows::new();
    for (key, list) in inputs.into_iter().flatten() {
        rows.entry(key % groups(name)).or_default().extend(list);
    }
    rows.values_mut().for_each(|list| list.sort_unstable());
    rows
}

/// Reads an object; a store that fails is asked again.
async fn read(store: &Arc<dyn ObjectStore>, name: &str) -> Result<Bytes, String> {
    const ATTEMPTS: u32 = 60;
    for _ in 0..ATTEMPTS {
        match store.get(&Path::from(name)).await {
            Ok(found) => match found.bytes().await {
                Ok(bytes) => return Ok(bytes),
                Err(error) => return Err(error.to_string()),
            },
            Err(Error::NotFound { .. }) => return Err(format!("\"{name}\" is gone")),
            Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    }
    Err(format!("\"{name}\" cannot be read"))
}

pub async fn read_run(store: &Arc<dyn ObjectStore>, run: &RunMeta) -> Result<Vec<Entry>, String> {
    Ok(decode(&read(store, &run.object).await?, 0, run.sequence))
}

pub async fn read_slice(
    store: &Arc<dyn ObjectStore>,
    slice: &SliceRef,
) -> Result<Vec<Entry>, String> {
    let bytes = match slice.object.as_str() {
        "" => slice.inline.clone(),
        object => read(store, object).await?,
    };
    Ok(decode(&bytes, slice.epoch, slice.sequence))
}

/// All entries of a version.
pub async fn read_version(
    store: &Arc<dyn ObjectStore>,
    version: &JobVersion,
) -> Result<Vec<Entry>, String> {
    let mut entries = Vec::new();
    for run in &version.runs {
        entries.extend(read_run(store, run).await?);
    }
    for slice in &version.tail {
        entries.extend(read_slice(store, slice).await?);
    }
    Ok(entries)
}
