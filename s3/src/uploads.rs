//! Uploads in parts. The parts are files, too, apart from all buckets; the object is put together when they are complete.

use bytes::Bytes;
use object_store::path::Path;
use object_store::{GetOptions, PutMode, PutPayload};
use s3s::dto::{CompletedPart, ETag, PartNumber};
use s3s::{S3Result, s3_error};

use crate::answer;
use crate::objects::{Objects, Taken};

/// No bucket has a name like this.
const UPLOADS: &str = ".uploads";
/// Parts of one upload.
const MAX_PARTS: i32 = 10_000;
/// Bytes of an object: it is put together in memory.
const MAX_OBJECT: u64 = 2 << 30;

fn no_such_upload() -> s3s::S3Error {
    s3_error!(
        NoSuchUpload,
        "The specified upload does not exist. It may have been aborted or completed."
    )
}

/// Where an upload's files are; ids are those that `begin` makes.
fn dir(id: &str) -> S3Result<Path> {
    if id.is_empty() || !id.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(no_such_upload());
    }
    Ok(Path::from_iter([UPLOADS, id]))
}

/// The object that it will be.
fn target(dir: &Path) -> Path {
    dir.clone().join("target")
}

fn part(dir: &Path, number: PartNumber) -> S3Result<Path> {
    if !(1..=MAX_PARTS).contains(&number) {
        return Err(s3_error!(InvalidArgument, "a part's number is 1 to {MAX_PARTS}"));
    }
    Ok(dir.clone().join(format!("part-{number:05}")))
}

/// Begins an upload; its id.
pub async fn begin(objects: &Objects, object: &Path) -> S3Result<String> {
    let id = objects.unique();
    let name = Bytes::copy_from_slice(object.as_ref().as_bytes());
    objects.put(target(&dir(&id)?), name.into(), PutMode::Create).await?;
    Ok(id)
}

/// The directory of an upload that has begun for this object.
async fn begun(objects: &Objects, id: &str, object: &Path) -> S3Result<Path> {
    let dir = dir(id)?;
    match objects.read(&target(&dir)).await {
        Ok(name) if name == object.as_ref().as_bytes() => Ok(dir),
        Ok(_) | Err(object_store::Error::NotFound { .. }) => Err(no_such_upload()),
        Err(e) => Err(answer::error(e)),
    }
}

pub async fn put_part(
    objects: &Objects,
    id: &str,
    object: &Path,
    number: PartNumber,
    payload: PutPayload,
) -> S3Result<ETag> {
    let dir = begun(objects, id, object).await?;
    objects.put(part(&dir, number)?, payload, PutMode::Overwrite).await
}

/// Makes the object of the parts that the client names, each by number and entity tag.
pub async fn complete(
    objects: &Objects,
    id: &str,
    object: &Path,
    parts: &[CompletedPart],
    mode: PutMode,
) -> S3Result<ETag> {
    let dir = begun(objects, id, object).await?;
    if parts.is_empty() {
        return Err(s3_error!(MalformedXML, "an upload has at least one part"));
    }
    if !parts.is_sorted_by(|a, b| a.part_number < b.part_number) {
        return Err(s3_error!(InvalidPartOrder, "The list of parts was not in ascending order."));
    }
    let mut whole = Vec::with_capacity(parts.len());
    let mut total = 0;
    for named in parts {
        let bytes = read_part(objects, &dir, named).await?;
        total += bytes.len() as u64;
        if total > MAX_OBJECT {
            return Err(s3_error!(EntityTooLarge, "an object has at most {MAX_OBJECT} bytes here"));
        }
        whole.push(bytes);
    }
    let tag = objects.put(object.clone(), PutPayload::from_iter(whole), mode).await?;
    forget(objects, &dir).await?;
    Ok(tag)
}

async fn read_part(objects: &Objects, dir: &Path, named: &CompletedPart) -> S3Result<Bytes> {
    let number = named.part_number.unwrap_or_default();
    let found = objects.store.get_opts(&part(dir, number)?, GetOptions::default()).await;
    let wrong = || s3_error!(InvalidPart, "part {number} is missing or has another entity tag");
    let found = match found {
        Ok(found) => found,
        Err(object_store::Error::NotFound { .. }) => return Err(wrong()),
        Err(e) => return Err(answer::error(e)),
    };
    let asked = named.e_tag.as_ref().map(ETag::value);
    if asked.is_some() && asked != found.meta.e_tag.as_deref() {
        return Err(wrong());
    }
    found.bytes().await.map_err(answer::error)
}

pub async fn abort(objects: &Objects, id: &str, object: &Path) -> S3Result<()> {
    let dir = begun(objects, id, object).await?;
    forget(objects, &dir).await
}

/// Deletes an upload's files.
async fn forget(objects: &Objects, dir: &Path) -> S3Result<()> {
    let mut files = Vec::new();
    let take = |meta: object_store::ObjectMeta| {
        files.push(meta.location);
        Taken::More
    };
    objects.list(dir, None, take).await?;
    for file in files {
        objects.delete(file).await?;
    }
    Ok(())
}
