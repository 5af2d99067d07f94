//! One connection to a node's door, as an engine has it: hello, jobs, reports, and the lookup table.
//!
//! It keeps the door's rules unless it is told to send bytes of its own ([`DoorClient::send_bytes`]): tests break
//! rules with those.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::base::block::RowItem;
use crate::base::codec::Malformed;
use crate::base::frame::{FromEngine, FromNode, Outcome, PROTOCOL};
use crate::base::geometry::{Hello, Welcome};
use crate::base::handover::{self, Inbox};
use crate::base::shm::Mapping;
use crate::base::table::Probe;

const READ_STEP: usize = 64 << 10;

/// Why there is no connection, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the node refused: {0}")]
    Refused(String),
    #[error("the node closed the connection")]
    Closed,
    #[error("the node said {0} where WELCOME was due")]
    NotWelcome(&'static str),
    #[error("WELCOME came without the table's descriptor")]
    NoDescriptor,
    #[error("the node speaks protocol {theirs}, this engine speaks {PROTOCOL}")]
    Protocol { theirs: u16 },
    #[error("the node answered job {got} with {count} outcomes where {wanted} was awaited")]
    Answer { got: u64, count: usize, wanted: u64 },
    #[error("WELCOME is not to be understood: {0}")]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The rows that an engine shares with its node: memory without a name.
#[derive(Debug)]
pub struct Area {
    map: Mapping,
    fd: OwnedFd,
    row_bytes: usize,
}

impl Area {
    pub fn new(rows: u32, row_bytes: u32) -> io::Result<Self> {
        let row_bytes = row_bytes as usize;
        let (map, fd) = Mapping::anonymous("spark-kv-mock-rows", rows as usize * row_bytes)?;
        Ok(Self { map, fd, row_bytes })
    }

    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Lends a row for writing. The caller has it, and no open job does.
    pub fn fill<T>(&self, row: u32, fill: impl FnOnce(&mut [u8]) -> T) -> T {
        self.map.fill(row as usize * self.row_bytes, self.row_bytes, fill)
    }

    pub fn look<T>(&self, row: u32, look: impl FnOnce(&[u8]) -> T) -> T {
        self.map.look(row as usize * self.row_bytes, self.row_bytes, look)
    }
}

/// A connection that was welcomed.
#[derive(Debug)]
pub struct DoorClient {
    stream: UnixStream,
    inbox: Inbox,
    pub welcome: Welcome,
    pub table: Arc<Probe>,
    jobs: u64,
}

impl DoorClient {
    /// Says hello with `area` and waits for the answer.
    pub async fn connect(socket: &Path, hello: &Hello, area: &OwnedFd) -> Result<Self, Error> {
        let stream = UnixStream::connect(socket).await?;
        let frame = FromEngine::Hello(serde_json::to_vec(hello)?).encode();
        let send = || handover::send_with(stream.as_fd(), &frame, area.as_fd());
        let sent = stream.async_io(Interest::WRITABLE, send).await?;
        write_all(&stream, &frame[sent..]).await?;
        Self::welcomed(stream).await
    }

    async fn welcomed(stream: UnixStream) -> Result<Self, Error> {
        let (mut inbox, mut table, mut buffer) = (Inbox::default(), None, vec![0; READ_STEP]);
        loop {
            let receive = || handover::receive_with(stream.as_fd(), &mut buffer);
            let (n, fd) = stream.async_io(Interest::READABLE, receive).await?;
            if n == 0 {
                return Err(Error::Closed);
            }
            table = table.or(fd);
            inbox.feed(&buffer[..n]);
            let Some(frame) = inbox.frame()? else { continue };
            let welcome: Welcome = match FromNode::decode(frame)? {
                FromNode::Welcome(json) => serde_json::from_slice(&json)?,
                FromNode::Refuse { reason } => return Err(Error::Refused(reason)),
                FromNode::Done { .. } => return Err(Error::NotWelcome("DONE")),
                FromNode::Tier { .. } => return Err(Error::NotWelcome("TIER")),
                FromNode::Pace { .. } => return Err(Error::NotWelcome("PACE")),
            };
            if welcome.protocol != PROTOCOL {
                return Err(Error::Protocol { theirs: welcome.protocol });
            }
            let table = Probe::attach(welcome.table_slots, &table.ok_or(Error::NoDescriptor)?)?;
            return Ok(Self { stream, inbox, welcome, table: Arc::new(table), jobs: 0 });
        }
    }

    /// A job number that was not used on this connection.
    pub fn next_job(&mut self) -> u64 {
        self.jobs += 1;
        self.jobs
    }

    pub async fn send(&self, frame: &FromEngine) -> Result<(), Error> {
        self.send_bytes(&frame.encode()).await
    }

    /// Sends bytes as they are, rules or not.
    pub async fn send_bytes(&self, bytes: &[u8]) -> Result<(), Error> {
        Ok(write_all(&self.stream, bytes).await?)
    }

    /// What the node says next. Cancel-safe: a frame that is not whole yet stays.
    pub async fn heard(&mut self) -> Result<FromNode, Error> {
        loop {
            if let Some(frame) = self.inbox.frame()? {
                return Ok(FromNode::decode(frame)?);
            }
            self.stream.readable().await?;
            let mut buffer = [0; 4096];
            match self.stream.try_read(&mut buffer) {
                Ok(0) => return Err(Error::Closed),
                Ok(n) => self.inbox.feed(&buffer[..n]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Offers rows and waits until the node is done with them. Only for one job at a time.
    pub async fn store(&mut self, items: Vec<RowItem>) -> Result<Vec<Outcome>, Error> {
        self.store_for("test", items).await
    }

    /// The same, of rows that this request computed.
    pub async fn store_for(&mut self, request: &str, items: Vec<RowItem>) -> Result<Vec<Outcome>, Error> {
        let (job, count, request) = (self.next_job(), items.len(), request.to_owned());
        self.send(&FromEngine::Store { job, request, items }).await?;
        self.done(job, count).await
    }

    /// Asks for rows and waits until the node is done with them. Only for one job at a time.
    pub async fn load(&mut self, items: Vec<RowItem>, deadline_us: u32) -> Result<Vec<Outcome>, Error> {
        let (job, count) = (self.next_job(), items.len());
        let request = "test".to_owned();
        self.send(&FromEngine::Load { job, deadline_us, request, items }).await?;
        self.done(job, count).await
    }

    /// Waits for the DONE of `wanted`, passing over what is pushed meanwhile.
    pub async fn done(&mut self, wanted: u64, count: usize) -> Result<Vec<Outcome>, Error> {
        loop {
            if let FromNode::Done { job, outcomes, .. } = self.heard().await? {
                return if job == wanted && outcomes.len() == count {
                    Ok(outcomes)
                } else {
                    Err(Error::Answer { got: job, count: outcomes.len(), wanted })
                };
            }
        }
    }
}

async fn write_all(stream: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.writable().await?;
        match stream.try_write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
