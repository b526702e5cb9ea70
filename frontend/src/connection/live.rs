//! Passes on what a statement tells its client while it runs.

use std::future::Future;
use std::pin::pin;

use millrace_common::SqlError;

use super::{Failure, SEND_BYTES, Writer, send};
use crate::session::LiveNotices;
use crate::wire::Backend;

/// Awaits a statement. Notices are sent as they come, as far as the client takes them: one that reads nothing
/// does not hold up its statement, nor the end of it.
pub(super) async fn passing_on<T>(
    live: &LiveNotices,
    out: &mut Backend,
    write: &mut Writer,
    work: impl Future<Output = Result<T, SqlError>>,
) -> Result<T, Failure> {
    let mut work = pin!(work);
    let mut unsent = false;
    let result = loop {
        tokio::select! {
            biased;
            result = &mut work => break result,
            sent = send(write, out), if unsent => {
                sent?;
                unsent = false;
            }
            notices = live.next() => {
                // What it cannot take by now is out of date.
                if out.buf.len() < SEND_BYTES {
                    notices.iter().for_each(|notice| out.notice("NOTICE", notice));
                    unsent = true;
                }
            }
        }
    };
    live.take();
    Ok(result?)
}
