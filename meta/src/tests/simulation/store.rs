//! The object store: one bucket, and for each process a way to it on which requests are late, fail, are done without an
//! answer, or are done long after they were given up.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result,
};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::world::{Node, STORE, World};

#[derive(Clone, Debug)]
struct Stored {
    bytes: Bytes,
    modified: DateTime<Utc>,
}

/// What is in the store.
#[derive(Debug, Default)]
pub struct Bucket(Mutex<BTreeMap<String, Stored>>);

/// A process's way to the store.
pub struct ProcessStore {
    world: Arc<World>,
    node: Node,
}

impl ProcessStore {
    pub fn open(world: &Arc<World>, node: Node) -> Arc<dyn ObjectStore> {
        Arc::new(ProcessStore { world: Arc::clone(world), node })
    }
}

impl fmt::Debug for ProcessStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "store of {}", self.node)
    }
}

impl fmt::Display for ProcessStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("simulated store")
    }
}

fn lost() -> Error {
    Error::Generic { store: "simulated", source: "connection reset".into() }
}

fn not_found(path: &Path) -> Error {
    Error::NotFound { path: path.to_string(), source: "not there".into() }
}

/// What becomes of a request.
enum Fate {
    Done,
    /// It fails, and is not done.
    Refused,
    /// It is done, at once or after this time, and fails.
    LostAnswer(Duration),
}

impl World {
    fn request_takes(&self) -> Duration {
        match self.numbers.below(1_000) {
            n if n < self.climate.slow && self.is_rough() => self.numbers.between(500, 3_000),
            _ => Duration::from_micros(500 + self.numbers.below(12_000)),
        }
    }

    fn fate(&self) -> Fate {
        if !self.is_rough() {
            return Fate::Done;
        }
        if !self.numbers.chance(self.climate.failed) {
            return Fate::Done;
        }
        match self.numbers.below(10) {
            0..4 => Fate::Refused,
            4..8 => Fate::LostAnswer(Duration::ZERO),
            _ => Fate::LostAnswer(self.numbers.between(10, 8_000)),
        }
    }

    /// A request of a process, which is under way whatever becomes of the process.
    async fn request<T: Send + 'static>(
        self: &Arc<World>,
        node: Node,
        done: impl FnOnce(&Arc<World>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (answer, answered) = oneshot::channel();
        let world = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(world.request_takes()).await;
            if world.network.is_cut(node, STORE) {
                // The client's own time-out.
                tokio::time::sleep(world.numbers.between(500, 5_000)).await;
                let _ = answer.send(Err(lost()));
                return;
            }
            let said = match world.fate() {
                Fate::Done => done(&world),
                Fate::Refused => Err(lost()),
                Fate::LostAnswer(late) => {
                    let _ = answer.send(Err(lost()));
                    tokio::time::sleep(late).await;
                    let _ = done(&world);
                    return;
                }
            };
            tokio::time::sleep(world.request_takes()).await;
            let said = if world.network.is_cut(STORE, node) { Err(lost()) } else { said };
            let _ = answer.send(said);
        });
        answered.await.unwrap_or_else(|_| Err(lost()))
    }

    fn put(&self, path: &Path, bytes: Bytes, mode: &PutMode) -> Result<PutResult> {
        let mut objects = self.bucket.0.lock();
        let is_there = objects.contains_key(path.as_ref());
        if is_there && *mode == PutMode::Create {
            let source = "precondition failed".into();
            return Err(Error::AlreadyExists { path: path.to_string(), source });
        }
        let modified = DateTime::from_timestamp_millis(self.wall_ms() as i64).unwrap_or_default();
        objects.insert(path.to_string(), Stored { bytes: bytes.clone(), modified });
        drop(objects);
        if !path.as_ref().starts_with("meta/probe") {
            self.note(|| format!("put {path} {}", bytes.len()));
        }
        if let Some(number) = path.as_ref().strip_prefix("meta/log/") {
            self.record_appended(number.parse().unwrap_or_default(), &bytes);
        }
        Ok(PutResult { e_tag: None, version: None })
    }

    fn get(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let found = self.bucket.0.lock().get(path.as_ref()).cloned();
        let found = found.ok_or_else(|| not_found(path))?;
        let size = found.bytes.len() as u64;
        let range = match options.range {
            Some(range) => range.as_range(size).map_err(|_| lost())?,
            None => 0..size,
        };
        let bytes = found.bytes.slice(range.start as usize..range.end as usize);
        let payload = if options.head { Bytes::new() } else { bytes };
        let payload = stream::once(std::future::ready(Ok(payload))).boxed();
        Ok(GetResult {
            payload: GetResultPayload::Stream(payload),
            meta: described(path.as_ref(), &found),
            range,
            attributes: Default::default(),
        })
    }

    fn delete(&self, path: &Path) -> Result<()> {
        let removed = self.bucket.0.lock().remove(path.as_ref());
        if removed.is_some() && path.as_ref().starts_with("data/") {
            self.note(|| format!("delete {path}"));
            self.count("collected");
            self.object_deleted(path.as_ref());
        }
        removed.map(drop).ok_or_else(|| not_found(path))
    }

    /// Whether each backup of the log has its state here. What a late request left is deleted by the next leader.
    pub fn has_backups(&self) -> bool {
        let listed = self.list("meta/backup", "").into_iter();
        let there: BTreeSet<u64> =
            listed.filter_map(|o| o.location.filename()?.parse().ok()).collect();
        self.read_head(|state| state.backups.iter().all(|backup| there.contains(&backup.number)))
    }

    fn list(&self, prefix: &str, offset: &str) -> Vec<ObjectMeta> {
        let objects = self.bucket.0.lock();
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        let found = objects.iter().filter(|(n, _)| n.starts_with(&prefix) && n.as_str() > offset);
        found.map(|(name, stored)| described(name, stored)).collect()
    }
}

fn described(name: &str, stored: &Stored) -> ObjectMeta {
    ObjectMeta {
        location: Path::from(name),
        last_modified: stored.modified,
        size: stored.bytes.len() as u64,
        e_tag: None,
        version: None,
    }
}

impl ProcessStore {
    fn listed(
        &self,
        prefix: Option<&Path>,
        offset: &str,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let (world, node) = (Arc::clone(&self.world), self.node);
        let prefix = prefix.map(Path::to_string).unwrap_or_default();
        let offset = offset.to_owned();
        let listing = async move {
            let listed = world.request(node, move |world| Ok(world.list(&prefix, &offset))).await;
            let all = match listed {
                Ok(all) => all.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error)],
            };
            stream::iter(all)
        };
        listing.flatten_stream().boxed()
    }
}

#[async_trait]
impl ObjectStore for ProcessStore {
    async fn put_opts(
        &self,
        to: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let (to, bytes, mode) = (to.clone(), Bytes::from(payload), options.mode);
        if to.as_ref().starts_with("meta/log/") && self.world.is_rough() {
            tokio::time::sleep(self.world.numbers.between(0, self.world.climate.append)).await;
        }
        self.world.request(self.node, move |world| world.put(&to, bytes, &mode)).await
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Err(Error::NotImplemented {
            operation: "multipart".into(),
            implementer: "simulated".into(),
        })
    }

    async fn get_opts(&self, from: &Path, options: GetOptions) -> Result<GetResult> {
        let from = from.clone();
        let ahead = from.as_ref().strip_prefix("meta/log/").and_then(|n| n.parse::<u64>().ok());
        if ahead.is_some_and(|n| n > self.world.head() + 1)
            && !self.world.network.is_cut(self.node, STORE)
        {
            // Who opens the log asks for many that nobody has written.
            return Err(not_found(&from));
        }
        self.world.request(self.node, move |world| world.get(&from, options)).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let (world, node) = (Arc::clone(&self.world), self.node);
        let delete = move |path: Result<Path>| {
            let world = Arc::clone(&world);
            async move {
                let path = path?;
                let name = path.clone();
                world.request(node, move |world| world.delete(&name)).await?;
                Ok(path)
            }
        };
        paths.then(delete).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.listed(prefix, "")
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.listed(prefix, offset.as_ref())
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        Err(Error::NotImplemented {
            operation: "delimiters".into(),
            implementer: "simulated".into(),
        })
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(Error::NotImplemented { operation: "copies".into(), implementer: "simulated".into() })
    }
}
