//! What carries data connections: TCP between boxes, with or without a library that reads memory, or memory inside one
//! process for tests and the simulator.
//!
//! A rail is one connection along one [`Path`]. With TCP it is pinned: bound to its own address and, where the kernel
//! allows, to the device that has it, on both sides (what a listener accepts inherits the device). So the bytes of a
//! rail use its cable whatever the routing table says. Everything above sees a [`Stream`] and does not know which
//! fabric it is; one conformance test (`conform.rs`) runs over all of them.
//!
//! Where a library can read the other box's memory into a row ([`Remote`]: RDMA), streams carry the words alone, along
//! the same paths and with the same tickets. The serving side says where a piece lies in its memory instead of sending
//! it; it stays there until the fetching side says that it was read, or the connection ends. What cannot be read so, on
//! either side, is sent over the stream after all.
//!
//! Cutting, order, credit, shares, deadlines and checksums are above the seam.

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

use super::onesided::{Host, Remote};
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
    /// Words over another fabric, bytes by reading the other box's memory.
    OneSided(Arc<OneSided>),
}

/// A fabric that reads memory, and the one that carries its words.
#[derive(Debug)]
pub struct OneSided {
    words: Fabric,
    remote: Arc<dyn Remote>,
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
    Mem {
        incoming: mpsc::Receiver<DuplexStream>,
        address: String,
    },
    /// At an end whose memory peers read.
    OneSided {
        words: Box<Listener>,
        host: Arc<dyn Host>,
    },
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

    /// Bytes by `remote`, words over `words`.
    pub fn one_sided(words: Self, remote: Arc<dyn Remote>) -> Self {
        Self::OneSided(Arc::new(OneSided { words, remote }))
    }

    /// Starts whatever each end of this box needs to be read from. Blocks.
    ///
    /// # Errors
    /// When one of them cannot be read from.
    pub fn warm(&self) -> io::Result<()> {
        let Some(remote) = self.remote() else { return Ok(()) };
        match self.ends() {
            [] => remote.host(None).map(drop),
            ends => ends.iter().try_for_each(|end| remote.host(Some(end)).map(drop)),
        }
    }

    /// This box's ends of rails; none: connections are not pinned.
    pub fn ends(&self) -> &[Local] {
        match self.words() {
            Self::Tcp(ends) => ends,
            _ => &[],
        }
    }

    /// For people: what rows travel over.
    pub fn name(&self) -> String {
        match self {
            Self::Tcp(_) => "TCP".to_owned(),
            Self::Mem(_) => "memory".to_owned(),
            Self::OneSided(one) => one.remote.name(),
        }
    }

    /// What reads other boxes' memory, where something does.
    pub(super) fn remote(&self) -> Option<&Arc<dyn Remote>> {
        match self {
            Self::OneSided(one) => Some(&one.remote),
            Self::Tcp(_) | Self::Mem(_) => None,
        }
    }

    /// What carries words.
    fn words(&self) -> &Self {
        match self {
            Self::OneSided(one) => &one.words,
            words => words,
        }
    }

    /// The ways from here to a box that has these addresses.
    pub fn paths(&self, remotes: &[String]) -> Vec<Path> {
        path::pair(self.ends(), remotes)
    }

    /// This box's end that has this address.
    fn end_at(&self, address: &str) -> Option<(SocketAddr, &Local)> {
        let at = address.parse::<SocketAddr>().ok()?;
        Some((at, self.ends().iter().find(|end| end.address == at.ip())?))
    }

    pub async fn listen(&self, address: &str) -> io::Result<Listener> {
        let words = self.listen_for_words(address).await?;
        let Some(remote) = self.remote() else { return Ok(words) };
        let host = remote.host(self.end_at(address).map(|(_, end)| end))?;
        Ok(Listener::OneSided { words: Box::new(words), host })
    }

    async fn listen_for_words(&self, address: &str) -> io::Result<Listener> {
        match self.words() {
            Self::Tcp(_) => {
                match self.end_at(address) {
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
            Self::OneSided(_) => Err(not_words()),
        }
    }

    pub async fn connect(&self, path: &Path) -> io::Result<Stream> {
        match self.words() {
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
            Self::OneSided(_) => Err(not_words()),
        }
    }
}

/// A one-sided fabric whose words would travel over another one.
fn not_words() -> io::Error {
    io::Error::other("words are not read out of memory")
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
        match self.words_mut() {
            Self::Tcp(listener) => {
                let (stream, from) = listener.accept().await?;
                tuned(&stream)?;
                Ok((Stream::Tcp(stream), from.ip()))
            }
            Self::Mem { incoming, .. } => {
                let stream = incoming.recv().await.ok_or(io::ErrorKind::NotConnected)?;
                Ok((Stream::Mem(stream), Ipv4Addr::LOCALHOST.into()))
            }
            Self::OneSided { .. } => Err(not_words()),
        }
    }

    fn words_mut(&mut self) -> &mut Self {
        match self {
            Self::OneSided { words, .. } => words,
            words => words,
        }
    }

    /// Whose memory peers read that come in here.
    pub(super) fn host(&self) -> Option<Arc<dyn Host>> {
        match self {
            Self::OneSided { host, .. } => Some(host.clone()),
            _ => None,
        }
    }

    /// Where it listens, with the port that was given for port 0.
    pub fn address(&self) -> io::Result<String> {
        match self {
            Self::OneSided { words, .. } => words.address(),
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
