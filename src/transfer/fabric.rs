//! What carries data connections: TCP between boxes, or memory inside one process for tests and the simulator.
//!
//! A rail is one connection to one address. Everything above sees a [`Stream`] and does not know which it is.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Bytes under way inside a memory connection, as a socket's buffers would hold them.
const MEM_BUFFER: usize = 1 << 18;

/// Connections that wait to be accepted.
const BACKLOG: usize = 16;

/// Which kind of connections.
#[derive(Clone, Debug)]
pub enum Fabric {
    Tcp,
    Mem(MemNet),
}

/// Addresses inside one process.
#[derive(Clone, Debug, Default)]
pub struct MemNet(Arc<Mutex<HashMap<String, mpsc::Sender<DuplexStream>>>>);

/// A connection.
#[derive(Debug)]
pub enum Stream {
    Tcp(TcpStream),
    Mem(DuplexStream),
}

/// Where connections come in.
#[derive(Debug)]
pub enum Listener {
    Tcp(TcpListener),
    Mem { incoming: mpsc::Receiver<DuplexStream>, address: String },
}

impl Fabric {
    pub async fn listen(&self, address: &str) -> io::Result<Listener> {
        match self {
            Self::Tcp => Ok(Listener::Tcp(TcpListener::bind(address).await?)),
            Self::Mem(net) => {
                let (sender, incoming) = mpsc::channel(BACKLOG);
                let mut net = net.0.lock();
                if net.get(address).is_some_and(|there| !there.is_closed()) {
                    return Err(io::ErrorKind::AddrInUse.into());
                }
                net.insert(address.to_owned(), sender);
                Ok(Listener::Mem { incoming, address: address.to_owned() })
            }
        }
    }

    pub async fn connect(&self, address: &str) -> io::Result<Stream> {
        match self {
            Self::Tcp => {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                Ok(Stream::Tcp(stream))
            }
            Self::Mem(net) => {
                let there = net.0.lock().get(address).cloned();
                let (ours, theirs) = tokio::io::duplex(MEM_BUFFER);
                let Some(there) = there else { return Err(io::ErrorKind::ConnectionRefused.into()) };
                there.try_send(theirs).map_err(|_| io::Error::from(io::ErrorKind::ConnectionRefused))?;
                Ok(Stream::Mem(ours))
            }
        }
    }
}

impl Listener {
    /// The next connection, and from where; memory has one address. Cancel-safe.
    pub async fn accept(&mut self) -> io::Result<(Stream, IpAddr)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, from) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok((Stream::Tcp(stream), from.ip()))
            }
            Self::Mem { incoming, .. } => {
                let stream = incoming.recv().await.ok_or(io::ErrorKind::NotConnected)?;
                Ok((Stream::Mem(stream), Ipv4Addr::LOCALHOST.into()))
            }
        }
    }

    /// Where it listens, with the port that was given for port 0.
    pub fn address(&self) -> io::Result<String> {
        match self {
            Self::Tcp(listener) => Ok(listener.local_addr()?.to_string()),
            Self::Mem { address, .. } => Ok(address.clone()),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(s) => Pin::new(s).poll_read(cx, buf),
            Self::Mem(s) => Pin::new(s).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(s) => Pin::new(s).poll_write(cx, buf),
            Self::Mem(s) => Pin::new(s).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(s) => Pin::new(s).poll_write_vectored(cx, bufs),
            Self::Mem(s) => Pin::new(s).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Tcp(s) => s.is_write_vectored(),
            Self::Mem(s) => s.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(s) => Pin::new(s).poll_flush(cx),
            Self::Mem(s) => Pin::new(s).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(s) => Pin::new(s).poll_shutdown(cx),
            Self::Mem(s) => Pin::new(s).poll_shutdown(cx),
        }
    }
}
