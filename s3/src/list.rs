//! ListObjectsV2: prefix, delimiter, pages.

use object_store::path::Path;
use s3s::dto::{CommonPrefix, ListObjectsV2Input, ListObjectsV2Output, Object};
use s3s::{S3Result, s3_error};

use crate::objects::{Objects, Taken, e_tag, last_modified, size};

/// Objects and common prefixes of one answer.
const MAX_KEYS: usize = 1000;

/// Where an answer begins.
enum After {
    Start,
    /// Behind this key.
    Key(String),
    /// Behind all keys that begin so.
    Prefix(String),
}

impl After {
    /// A continuation is what ended the answer before: `k` and a key, or `p` and a common prefix.
    fn of(input: &ListObjectsV2Input) -> S3Result<After> {
        let Some(token) = &input.continuation_token else {
            return Ok(input.start_after.clone().map_or(After::Start, After::Key));
        };
        match (token.strip_prefix('k'), token.strip_prefix('p')) {
            (Some(key), _) => Ok(After::Key(key.to_string())),
            (_, Some(prefix)) => Ok(After::Prefix(prefix.to_string())),
            _ => Err(s3_error!(InvalidArgument, "The continuation token provided is incorrect")),
        }
    }

    fn is_before(&self, key: &str) -> bool {
        match self {
            After::Start => true,
            After::Key(after) => key > after.as_str(),
            After::Prefix(prefix) => key > prefix.as_str() && !key.starts_with(prefix.as_str()),
        }
    }

    /// A name at or before the first one asked for, where the store's listing may begin.
    fn offset(&self, bucket: &str) -> Option<Path> {
        let (After::Key(text) | After::Prefix(text)) = self else { return None };
        Path::parse(format!("{bucket}/{}", text.trim_end_matches('/'))).ok()
    }
}

/// What an answer holds.
#[derive(Default)]
struct Page {
    contents: Vec<Object>,
    prefixes: Vec<String>,
    /// What came last, as a continuation.
    last: Option<String>,
    truncated: bool,
}

impl Page {
    fn len(&self) -> usize {
        self.contents.len() + self.prefixes.len()
    }
}

/// What a key has in common with others, up to the first delimiter behind the prefix.
fn common(key: &str, prefix: &str, delimiter: Option<&str>) -> Option<String> {
    let delimiter = delimiter.filter(|d| !d.is_empty())?;
    let rest = key.strip_prefix(prefix)?;
    let end = rest.find(delimiter)? + delimiter.len();
    Some(format!("{prefix}{}", &rest[..end]))
}

pub async fn list(objects: &Objects, input: ListObjectsV2Input) -> S3Result<ListObjectsV2Output> {
    objects.has_bucket(&input.bucket)?;
    let after = After::of(&input)?;
    let limit = usize::try_from(input.max_keys.unwrap_or(MAX_KEYS as i32))
        .map_err(|_| s3_error!(InvalidArgument, "max-keys must not be negative"))?
        .min(MAX_KEYS);
    let prefix = input.prefix.clone().unwrap_or_default();
    let mut page = Page::default();
    if limit > 0 {
        collect(objects, &input, &prefix, &after, limit, &mut page).await?;
    }
    let prefixes = page.prefixes.iter().cloned();
    let prefixes = prefixes.map(|prefix| CommonPrefix { prefix: Some(prefix) }).collect();
    Ok(ListObjectsV2Output {
        key_count: i32::try_from(page.len()).ok(),
        max_keys: i32::try_from(limit).ok(),
        is_truncated: Some(page.truncated),
        next_continuation_token: page.last.filter(|_| page.truncated),
        contents: Some(page.contents),
        common_prefixes: Some(prefixes),
        name: Some(input.bucket),
        prefix: Some(prefix),
        delimiter: input.delimiter,
        continuation_token: input.continuation_token,
        start_after: input.start_after,
        ..ListObjectsV2Output::default()
    })
}

async fn collect(
    objects: &Objects,
    input: &ListObjectsV2Input,
    prefix: &str,
    after: &After,
    limit: usize,
    page: &mut Page,
) -> S3Result<()> {
    // The directory that all the keys are in.
    let dir = prefix.rfind('/').map_or("", |end| &prefix[..end]);
    let Ok(dir) = Path::parse(format!("{}/{dir}", input.bucket)) else { return Ok(()) };
    let delimiter = input.delimiter.as_deref();
    let offset = after.offset(&input.bucket);
    let begins = input.bucket.len() + 1;
    let take = |meta: object_store::ObjectMeta| {
        let key = &meta.location.as_ref()[begins..];
        if !key.starts_with(prefix) {
            // Keys come in order: behind those with the prefix there are no more.
            return if key > prefix { Taken::Enough } else { Taken::More };
        }
        if !after.is_before(key) {
            return Taken::More;
        }
        let common = common(key, prefix, delimiter);
        if common.is_some() && page.prefixes.last() == common.as_ref() {
            return Taken::More;
        }
        if page.len() == limit {
            page.truncated = true;
            return Taken::Enough;
        }
        page.last = Some(match &common {
            Some(prefix) => format!("p{prefix}"),
            None => format!("k{key}"),
        });
        match common {
            Some(prefix) => page.prefixes.push(prefix),
            None => page.contents.push(Object {
                key: Some(key.to_string()),
                size: Some(size(meta.size)),
                e_tag: e_tag(&meta),
                last_modified: last_modified(&meta),
                ..Object::default()
            }),
        }
        Taken::More
    };
    objects.list(&dir, offset.as_ref(), take).await
}
