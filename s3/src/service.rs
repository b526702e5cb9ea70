//! The operations of S3 that are there; `s3s` answers all others with 501 NotImplemented.

use object_store::ObjectMeta;
use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};

use crate::objects::{Asked, Objects, e_tag, last_modified, put_mode, receive, send, size};
use crate::{list, uploads};

/// Keys of one DeleteObjects.
const MAX_DELETES: usize = 1000;

#[async_trait::async_trait]
impl S3 for Objects {
    async fn list_buckets(
        &self,
        _: S3Request<ListBucketsInput>,
    ) -> S3Result<S3Response<ListBucketsOutput>> {
        let names: Vec<String> = self.buckets.iter().cloned().collect();
        let bucket = |name| Bucket { name: Some(name), ..Bucket::default() };
        let buckets = Some(names.into_iter().map(bucket).collect());
        Ok(S3Response::new(ListBucketsOutput { buckets, ..ListBucketsOutput::default() }))
    }

    async fn head_bucket(
        &self,
        request: S3Request<HeadBucketInput>,
    ) -> S3Result<S3Response<HeadBucketOutput>> {
        self.has_bucket(&request.input.bucket)?;
        Ok(S3Response::new(HeadBucketOutput::default()))
    }

    async fn get_object(
        &self,
        request: S3Request<GetObjectInput>,
    ) -> S3Result<S3Response<GetObjectOutput>> {
        let input = request.input;
        let path = self.locate(&input.bucket, &input.key)?;
        let ranged = input.range.is_some();
        let asked = Asked {
            head: false,
            range: input.range,
            if_match: input.if_match,
            if_none_match: input.if_none_match,
            if_modified_since: input.if_modified_since,
            if_unmodified_since: input.if_unmodified_since,
        };
        let found = self.get(&path, asked.options()?).await?;
        let range = found.range.clone();
        let meta = found.meta.clone();
        let content_range = ranged.then(|| {
            format!("bytes {}-{}/{}", range.start, range.end.saturating_sub(1), meta.size)
        });
        Ok(S3Response::new(GetObjectOutput {
            body: Some(send(found).await?),
            content_length: Some(size(range.end - range.start)),
            content_range,
            content_type: Some(content_type()),
            e_tag: e_tag(&meta),
            last_modified: last_modified(&meta),
            accept_ranges: Some("bytes".to_string()),
            ..GetObjectOutput::default()
        }))
    }

    async fn head_object(
        &self,
        request: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        let input = request.input;
        let path = self.locate(&input.bucket, &input.key)?;
        let asked = Asked {
            head: true,
            range: None,
            if_match: input.if_match,
            if_none_match: input.if_none_match,
            if_modified_since: input.if_modified_since,
            if_unmodified_since: input.if_unmodified_since,
        };
        let meta: ObjectMeta = self.get(&path, asked.options()?).await?.meta;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: Some(size(meta.size)),
            content_type: Some(content_type()),
            e_tag: e_tag(&meta),
            last_modified: last_modified(&meta),
            accept_ranges: Some("bytes".to_string()),
            ..HeadObjectOutput::default()
        }))
    }

    async fn put_object(
        &self,
        request: S3Request<PutObjectInput>,
    ) -> S3Result<S3Response<PutObjectOutput>> {
        let input = request.input;
        let path = self.locate(&input.bucket, &input.key)?;
        let mode = put_mode(input.if_match, input.if_none_match)?;
        let payload = receive(input.body, input.content_length).await?;
        let e_tag = Some(self.put(path, payload, mode).await?);
        Ok(S3Response::new(PutObjectOutput { e_tag, ..PutObjectOutput::default() }))
    }

    async fn delete_object(
        &self,
        request: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        let input = request.input;
        if input.if_match.is_some() {
            return Err(s3_error!(NotImplemented, "a delete has no conditions here"));
        }
        self.delete(self.locate(&input.bucket, &input.key)?).await?;
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn delete_objects(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let DeleteObjectsInput { bucket, delete, .. } = request.input;
        self.has_bucket(&bucket)?;
        if delete.objects.len() > MAX_DELETES {
            return Err(s3_error!(
                MalformedXML,
                "at most {MAX_DELETES} keys can be deleted at once"
            ));
        }
        let (mut deleted, mut errors) = (Vec::new(), Vec::new());
        for object in delete.objects {
            let key = object.key;
            let outcome = match self.locate(&bucket, &key) {
                Ok(path) => self.delete(path).await,
                Err(e) => Err(e),
            };
            match outcome {
                Ok(()) => {
                    deleted.push(DeletedObject { key: Some(key), ..DeletedObject::default() })
                }
                Err(e) => errors.push(Error {
                    code: Some(e.code().as_str().to_string()),
                    message: e.message().map(str::to_string),
                    key: Some(key),
                    ..Error::default()
                }),
            }
        }
        let deleted = Some(deleted).filter(|_| delete.quiet != Some(true));
        Ok(S3Response::new(DeleteObjectsOutput {
            deleted,
            errors: Some(errors),
            ..DeleteObjectsOutput::default()
        }))
    }

    async fn list_objects_v2(
        &self,
        request: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        Ok(S3Response::new(list::list(self, request.input).await?))
    }

    async fn create_multipart_upload(
        &self,
        request: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let input = request.input;
        let path = self.locate(&input.bucket, &input.key)?;
        let id = uploads::begin(self, &path).await?;
        Ok(S3Response::new(CreateMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(id),
            ..CreateMultipartUploadOutput::default()
        }))
    }

    async fn upload_part(
        &self,
        request: S3Request<UploadPartInput>,
    ) -> S3Result<S3Response<UploadPartOutput>> {
        let input = request.input;
        let path = self.locate(&input.bucket, &input.key)?;
        let payload = receive(input.body, input.content_length).await?;
        let put = uploads::put_part(self, &input.upload_id, &path, input.part_number, payload);
        let e_tag = Some(put.await?);
        Ok(S3Response::new(UploadPartOutput { e_tag, ..UploadPartOutput::default() }))
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let input = request.input;
        let path = self.locate(&input.bucket, &input.key)?;
        let mode = put_mode(input.if_match, input.if_none_match)?;
        let parts = input.multipart_upload.and_then(|u| u.parts).unwrap_or_default();
        let e_tag = uploads::complete(self, &input.upload_id, &path, &parts, mode).await?;
        Ok(S3Response::new(CompleteMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            e_tag: Some(e_tag),
            ..CompleteMultipartUploadOutput::default()
        }))
    }

    async fn abort_multipart_upload(
        &self,
        request: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let input = request.input;
        let path = self.locate(&input.bucket, &input.key)?;
        uploads::abort(self, &input.upload_id, &path).await?;
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }
}

/// Of every object: what a client says about it is not kept.
fn content_type() -> String {
    "application/octet-stream".to_string()
}
