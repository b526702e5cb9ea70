//! A list that goes on where it failed.

use futures::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{Error, ObjectMeta, ObjectStore, Result};
use tokio::time::timeout;

use super::Failure;
use super::metered::{Attempts, Metered};
use super::pace::RequestClass;

/// Every item must come within a time-out; what fails is asked for again, from the last object on.
pub(super) struct Listing {
    store: Metered,
    prefix: Option<Path>,
    /// Objects with a name up to this one are not asked for.
    after: Option<Path>,
    /// Something came that was not in the order of names: what is missing cannot be told by a name.
    unordered: bool,
    /// The answer under way.
    answer: Option<BoxStream<'static, Result<ObjectMeta>>>,
    ended: bool,
}

impl Listing {
    pub fn new(store: &Metered, prefix: Option<&Path>, after: Option<&Path>) -> Listing {
        Listing {
            store: store.clone(),
            prefix: prefix.cloned(),
            after: after.cloned(),
            unordered: false,
            answer: None,
            ended: false,
        }
    }

    pub fn into_stream(self) -> BoxStream<'static, Result<ObjectMeta>> {
        stream::unfold(self, |mut listing| async move {
            let item = listing.next().await?;
            Some((item, listing))
        })
        .boxed()
    }

    async fn next(&mut self) -> Option<Result<ObjectMeta>> {
        if self.ended {
            return None;
        }
        let store = self.store.clone();
        let mut attempts = Attempts::new(&store, Some(RequestClass::List));
        loop {
            let error = match self.ask().await {
                Some(Ok(object)) => {
                    self.unordered |= self.after.as_ref().is_some_and(|a| *a >= object.location);
                    self.after = Some(object.location.clone());
                    return Some(Ok(object));
                }
                None => {
                    self.ended = true;
                    return None;
                }
                Some(Err(error)) => error,
            };
            self.answer = None;
            store.pace.failed(Failure::of(&error));
            let last = match self.unordered {
                true => {
                    store.count_failure(&error);
                    Err(error)
                }
                false => attempts.failed(error).await,
            };
            if let Err(error) = last {
                self.ended = true;
                return Some(Err(error));
            }
        }
    }

    /// One more item of the answer under way, or the first of a new one.
    async fn ask(&mut self) -> Option<Result<ObjectMeta>> {
        let limit = self.store.options.request_timeout;
        let began = self.store.options.env.now();
        let is_first = self.answer.is_none();
        if is_first {
            self.store.pace.turn(RequestClass::List).await;
            self.store.count_list();
        }
        let _under_way = is_first.then(|| self.store.pace.begin(RequestClass::List));
        let (store, prefix, after) = (&self.store, self.prefix.as_ref(), self.after.as_ref());
        let answer = self.answer.get_or_insert_with(|| match after {
            Some(after) => store.inner.list_with_offset(prefix, after),
            None => store.inner.list(prefix),
        });
        let item: Option<Result<ObjectMeta, Error>> = match timeout(limit, answer.next()).await {
            Ok(item) => item,
            Err(_) => Some(Err(store.timed_out(limit))),
        };
        if is_first && !matches!(item, Some(Err(_))) {
            store.pace.answered(RequestClass::List, store.options.env.elapsed(began), 0);
        }
        item
    }
}
