//! COPY FROM STDIN and TO STDOUT.

use bytes::BytesMut;
use futures::StreamExt;
use millrace_common::{SqlError, SqlState};
use tokio::io::AsyncWriteExt;
use tokio_util::sync::CancellationToken;

use super::{Connection, Failure, SEND_BYTES, awaited, guarded, send};
use super::{reading::Unread, start::protocol_violation};
use crate::copy::{self, CopyIn, CopyOut};
use crate::session::RowSet;
use crate::session::cursor::columns_of;
use crate::wire::FrontendMessage;

impl Connection {
    /// Takes COPY data until the client is done with it. `pipelined`: other statements may follow before Sync.
    pub(super) async fn copy_in(
        &mut self,
        mut copy: CopyIn,
        pipelined: bool,
    ) -> Result<(), Failure> {
        self.out.copy_in_response(copy.columns(), copy.is_binary());
        self.flush().await?;
        let (cancel, timeout, gone) =
            (self.session.cancel.clone(), self.timeout(), self.gone.clone());
        loop {
            let next = async { Ok(self.receive().await) };
            match awaited(&CancellationToken::new(), &cancel, timeout, next).await? {
                Some(Ok(FrontendMessage::CopyData(data))) => {
                    copy.push(&data.data)?;
                    if copy.is_due() {
                        let step = self.session.begin_step();
                        let work = copy.flush(&self.session);
                        guarded(&gone, &cancel, timeout, &step, work).await?;
                    }
                }
                Some(Ok(FrontendMessage::CopyDone(_))) => break,
                Some(Ok(FrontendMessage::CopyFail(fail))) => {
                    let e = SqlError::new(
                        SqlState::QUERY_CANCELED,
                        format!("COPY from stdin failed: {}", fail.message),
                    );
                    return Err(e.into());
                }
                Some(Ok(FrontendMessage::Flush(_) | FrontendMessage::Sync(_))) => {}
                Some(Ok(_)) => {
                    return Err(SqlError::new(
                        SqlState::PROTOCOL_VIOLATION,
                        "unexpected message type during COPY from stdin",
                    )
                    .into());
                }
                Some(Err(Unread::Protocol(e))) => return Err(protocol_violation(&e).into()),
                Some(Err(Unread::TooLarge { error, .. })) => return Err(error.into()),
                None => return Err(Failure::Io(std::io::ErrorKind::UnexpectedEof.into())),
            }
        }
        if pipelined {
            self.enter_pipeline_after_copy(&copy).await?;
        }
        let step = self.session.begin_step();
        let work = copy.finish(&self.session);
        let tag = guarded(&gone, &cancel, timeout, &step, work).await?;
        self.note_commit(&step);
        self.session.notice_late();
        self.conclude(&tag).await
    }

    pub(super) async fn copy_out(&mut self, copy: CopyOut) -> Result<(), Failure> {
        let CopyOut { rows: RowSet { fields, mut stream, .. }, format, live } = copy;
        let (cancel, timeout) = (self.session.cancel.clone(), self.timeout());
        self.out.copy_out_response(fields.len(), format.binary);
        let (mut line, mut text) = (BytesMut::new(), BytesMut::new());
        if format.header {
            copy::writer::header(&fields, &format, &mut line);
            self.out.copy_data(&line);
            line.clear();
        }
        if format.binary {
            // It goes with the first row, or with the trailer: clients take each message for a row.
            copy::binary::put_header(&mut line);
        }
        let mut count = 0u64;
        loop {
            if live {
                // Under TLS the rest would wait for the next rows, however long that takes.
                let (write, out) = (&mut self.write, &mut self.out);
                let sent = async { Ok(send(write, out).await) };
                awaited(&self.gone, &cancel, timeout, sent).await??;
            }
            let next = async { stream.next().await.transpose() };
            let Some(batch) = awaited(&self.gone, &cancel, timeout, next).await? else { break };
            let columns = columns_of(&batch, &fields)?;
            for row in 0..batch.num_rows() {
                match format.binary {
                    true => copy::binary::put_row(&columns, row, &mut line)?,
                    false => copy::writer::row(&columns, row, &format, &mut text, &mut line)?,
                }
                self.out.copy_data(&line);
                line.clear();
                if self.out.buf.len() >= SEND_BYTES {
                    let (write, buf) = (&mut self.write, &mut self.out.buf);
                    let send = async { Ok(write.write_all_buf(buf).await) };
                    awaited(&self.gone, &cancel, timeout, send).await??;
                }
            }
            count += batch.num_rows() as u64;
        }
        if format.binary {
            copy::binary::put_trailer(&mut line);
            self.out.copy_data(&line);
        }
        self.out.copy_done();
        self.conclude(&format!("COPY {count}")).await
    }
}
