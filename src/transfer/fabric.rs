//! What carries data connections: TCP between boxes, or memory inside one process for tests and the simulator.
//!
//! A rail is one connection along one [`Path`]. With TCP it is pinned: bound to its own address and, where the kernel
//! allows, to the device that has it, on both sides (what a listener accepts inherits the device). So the bytes of a
//! rail use its cable whatever the routing table says. Everything above sees a [`Stream`] and does not know which
//! fabric it is; one conformance test (`conform.rs`) runs over all of them.
//!
//! ## What a one-sided fabric has to provide
//!
//! A fabric that reads a region of the other box's memory into a row (RDMA) is a further variant of [`Fabric`]. It
//! uses streams for words, along the same paths and with the same tickets, and beside them:
//!
//! 1. *Register*, at start, the whole row area of the fetching side ([`crate::base::rows::Rows::whole`]) and the serving side's memory for
//!    rows; a failure is an error that says what to change, and the fabric is then not used at all.
//! 2. *Announce*: in place of a payload the serving side sends a head whose kind says that the piece lies in its
//!    registered memory, with the region's description. The memory stays the piece's until the fetching side answers
//!    that it has read it, or its connection ends.
//! 3. *Read* a region into one piece of a row, given a rail, and say when no more of it can land. It must do so also
//!    for a read that is given up: the gate of a piece (`piece.rs`) is then closed only after that word, or the
//!    device's queue is torn down first. A stream needs no such word, because nothing writes but the reader itself.
//! 4. *Fail* like a stream: a read that makes no progress ends with an error within the time that a silent stream
//!    takes, so that its piece goes to another rail.
//!
//! Cutting, order, credit, shares, deadlines and checksums stay where they are, above the seam.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use nix::sys::socket::{setsockopt, sockopt};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;

use super::path::{self, Local, Path};

/// Bytes under way inside a memory connection, as a socket's buffers would hold them.
const MEM_BUFFER: usize = 1 << 18;

/// Connections that wait to be accepted.
const BACKLOG: u32 = 64;

/// An idle connection is asked for a sign of life after so many seconds, so often, so many times: a cable that was
/// pulled while nothing moved is noticed in four.
const KEEPALIVE_IDLE_S: u32 = 1;
const KEEPALIVE_EVERY_S: u32 = 1;
const KEEPALIVE_COUNT: u32 = 3;

/// Milliseconds that sent bytes may stay unacknowledged. The kernel's own limit is a quarter of an hour.
const UNACKNOWLEDGED_MS: u32 = 3_000;

/// Which kind of connections.
#[derive(Clone, Debug)]
pub enum Fabric {
    /// Between boxes. The ends of this box's rails; none: connections leave as the routing table says.
    Tcp(Arc<[Local]>),
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
    /// TCP with one rail per address of this box; none of them: unpinned.
    ///
    /// # Errors
    /// When this box does not have one of the addresses.
    pub fn tcp(rails: &[IpAddr]) -> io::Result<Self> {
        let ends = if rails.is_empty() { Vec::new() } else { Local::find(rails)? };
        Ok(Self::Tcp(ends.into()))
    }

    /// The ways from here to a box that has these addresses.
    pub fn paths(&self, remotes: &[String]) -> Vec<Path> {
        match self {
            Self::Tcp(ends) => path::pair(ends, remotes),
            Self::Mem(_) => path::pair(&[], remotes),
        }
    }

    pub async fn listen(&self, address: &str) -> io::Result<Listener> {
        match self {
            Self::Tcp(ends) => {
                let ip = address.parse::<SocketAddr>().ok();
                match ip.and_then(|at| Some((at, ends.iter().find(|end| end.address == at.ip())?))) {
                    None => Ok(Listener::Tcp(TcpListener::bind(address).await?)),
                    Some((at, end)) => {
                        let socket = pinned(end)?;
                        // After a restart the port may still be in a closed connection's last minute.
                        socket.set_reuseaddr(true)?;
                        socket.bind(at)?;
                        Ok(Listener::Tcp(socket.listen(BACKLOG)?))
                    }
                }
            }
            Self::Mem(net) => {
                let (sender, incoming) = mpsc::channel(BACKLOG as usize);
                let mut net = net.0.lock();
                if net.get(address).is_some_and(|there| !there.is_closed()) {
                    return Err(io::ErrorKind::AddrInUse.into());
                }
                net.insert(address.to_owned(), sender);
                Ok(Listener::Mem { incoming, address: address.to_owned() })
            }
        }
    }

    pub async fn connect(&self, path: &Path) -> io::Result<Stream> {
        match self {
            Self::Tcp(_) => {
                let stream = match &path.local {
                    None => TcpStream::connect(&path.remote).await?,
                    Some(end) => {
                        let remote = tokio::net::lookup_host(&path.remote).await?;
                        let same = |at: &SocketAddr| at.is_ipv4() == end.address.is_ipv4();
                        let remote = { remote }.find(same).ok_or_else(|| {
                            io::Error::other(format!(
                                "{} has no address of the kind of {}",
                                path.remote, end.address
                            ))
                        })?;
                        let socket = pinned(end)?;
                        socket.bind(SocketAddr::new(end.address, 0))?;
                        socket.connect(remote).await?
                    }
                };
                tuned(&stream)?;
                Ok(Stream::Tcp(stream))
            }
            Self::Mem(net) => {
                let there = net.0.lock().get(&path.remote).cloned();
                let (ours, theirs) = tokio::io::duplex(MEM_BUFFER);
                let Some(there) = there else { return Err(io::ErrorKind::ConnectionRefused.into()) };
                there.try_send(theirs).map_err(|_| io::Error::from(io::ErrorKind::ConnectionRefused))?;
                Ok(Stream::Mem(ours))
            }
        }
    }
}

/// A socket whose bytes use the device of `end`.
fn pinned(end: &Local) -> io::Result<TcpSocket> {
    let socket = if end.address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // Kernels before 5.7 want a privilege for this. The address alone then decides, which is enough where each
    // rail has a subnet of its own.
    if let Err(error) = socket.bind_device(Some(end.device.as_bytes())) {
        tracing::warn!(device = end.device, %error, "a rail is bound to its address only, not to its device");
    }
    Ok(socket)
}

/// Small words go at once, and a connection whose other side is gone ends within seconds.
fn tuned(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE_S)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &KEEPALIVE_EVERY_S)?;
    setsockopt(stream, sockopt::TcpKeepCount, &KEEPALIVE_COUNT)?;
    setsockopt(stream, sockopt::TcpUserTimeout, &UNACKNOWLEDGED_MS)?;
    Ok(())
}

impl Listener {
    /// The next connection, and from where; memory has one address. Cancel-safe.
    pub async fn accept(&mut self) -> io::Result<(Stream, IpAddr)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, from) = listener.accept().await?;
                tuned(&stream)?;
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
