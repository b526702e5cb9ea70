//! What listens at an address, where the process that should be there answers no handshake: a dead process leaves nothing
//! there, one that only does not talk with this one does.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What a client of HTTP/2 begins with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The first byte of a TLS alert, with which a port answers that expects TLS.
const TLS_ALERT: u8 = 21;
/// The first byte of the settings with which a server of HTTP/2 answers: of their length, in three bytes, which is small.
const SETTINGS: u8 = 0;

/// How a port answers whoever begins with HTTP/2 and no TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speaks {
    Tls,
    Http2,
}

/// What answers at an address within this time, if it is one of these.
pub async fn speaks(address: &str, limit: Duration) -> Option<Speaks> {
    let exchange = async {
        let mut socket = TcpStream::connect(address).await?;
        socket.write_all(PREFACE).await?;
        socket.read_u8().await
    };
    match tokio::time::timeout(limit, exchange).await {
        Ok(Ok(TLS_ALERT)) => Some(Speaks::Tls),
        Ok(Ok(SETTINGS)) => Some(Speaks::Http2),
        _ => None,
    }
}

#[cfg(test)]
pub mod tests {
    use std::sync::Arc;

    use millrace_rpc::remote::{Admission, Server};
    use tokio::net::TcpListener;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    /// A port that expects TLS and takes nobody, and its address.
    pub async fn expects_tls() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let mut said = [0; PREFACE.len()];
                let _ = socket.read_exact(&mut said).await;
                // An alert: unexpected message.
                let _ = socket.write_all(&[TLS_ALERT, 3, 3, 0, 2, 2, 10]).await;
            }
        });
        address
    }

    #[tokio::test]
    async fn a_port_is_known_by_its_first_byte() {
        assert_eq!(speaks(&expects_tls().await, LIMIT).await, Some(Speaks::Tls));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let serving = tokio::spawn(Server::new(Arc::<Admission>::default()).serve(listener));
        assert_eq!(speaks(&address, LIMIT).await, Some(Speaks::Http2));
        serving.abort();
        let _ = serving.await;
        assert_eq!(speaks(&address, LIMIT).await, None, "nobody is there");
    }
}
