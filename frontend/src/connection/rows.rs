//! Rows to the client, as fast as it takes them.

use futures::StreamExt;
use tokio::io::AsyncWriteExt;

use super::{Connection, Failure, SEND_BYTES, awaited};
use crate::encoding::put_rows;
use crate::session::cursor::columns_of;
use crate::session::prepare::{Current, Running};

impl Connection {
    /// Sends at most `limit` rows; whether that was all there are.
    pub(super) async fn send_rows(
        &mut self,
        running: &mut Running,
        formats: &[i16],
        limit: usize,
    ) -> Result<bool, Failure> {
        let (cancel, timeout) = (self.session.cancel.clone(), self.timeout());
        let deadline = timeout.map(|t| tokio::time::Instant::now() + t);
        let mut left = limit;
        loop {
            while let Some(current) = &mut running.current {
                let columns = match current.columns.take() {
                    Some(columns) => columns,
                    None => columns_of(&current.batch, &running.rows.fields)?,
                };
                let n = (current.batch.num_rows() - current.at).min(left).min(1024);
                put_rows(&columns, formats, current.at..current.at + n, &mut self.out)?;
                current.columns = Some(columns);
                current.at += n;
                left -= n;
                running.sent += n as u64;
                if current.left() == 0 {
                    running.current = None;
                }
                if self.out.buf.len() >= SEND_BYTES {
                    let rest =
                        deadline.map(|d| d.saturating_duration_since(tokio::time::Instant::now()));
                    let (write, buf) = (&mut self.write, &mut self.out.buf);
                    let send = async { Ok(write.write_all_buf(buf).await) };
                    awaited(&self.gone, &cancel, rest, send).await??;
                }
                if left == 0 {
                    return Ok(false);
                }
            }
            let rest = deadline.map(|d| d.saturating_duration_since(tokio::time::Instant::now()));
            let next = async { running.rows.stream.next().await.transpose() };
            match awaited(&self.gone, &cancel, rest, next).await? {
                None => {
                    running.ended = true;
                    return Ok(true);
                }
                Some(batch) if batch.num_rows() == 0 => {}
                Some(batch) => running.current = Some(Current::new(batch)),
            }
        }
    }
}
