//! What a rail carries, without rows: bytes of no meaning from there to here, or from here to there.
//!
//! A probe opens connections of its own, along the same paths, with the same ticket and pinned in the same way as
//! those that carry rows, so that the kernel's counters of each device can be compared with what was moved. It is at
//! most [`PROBE_MOST`] per call, in several words of at most 64 MiB each.
//!
//! To look at rails: [`Fetcher::rails`](super::Fetcher::rails) names them (device, address, the other end), and
//! [`Fetcher::probe`](super::Fetcher::probe) moves bytes along one or all. Without a fetcher, [`probe`] takes the
//! [`Path`]s of [`Fabric::paths`](super::Fabric::paths) and a ticket of the other side's
//! [`Tickets::issue`](super::Tickets::issue).

use std::io;
use std::time::Instant;

use futures_util::future::try_join_all;
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::rail::open;
use super::wire::{Ask, HEAD, Head, Kind, MAX_PROBE, Ticket, Want};
use super::{Fabric, Path};

/// Most bytes of one probe, over all its rails.
pub const PROBE_MOST: u64 = 1 << 30;

/// Bytes handed to the socket at a time.
const CHUNK: usize = 256 << 10;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// From the other box to this one, as rows that are fetched.
    Here,
    /// From this box to the other one, as rows that are served.
    There,
}

/// What a probe moved.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Probe {
    /// Over all rails. At least what was asked for.
    pub bytes: u64,
    /// From the first word to the last byte; opening the connections is not part of it.
    pub seconds: f64,
    pub rails: Vec<Carried>,
}

/// What one rail of a probe moved.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Carried {
    #[serde(flatten)]
    pub path: Path,
    pub bytes: u64,
    pub seconds: f64,
}

/// Moves `bytes` along `paths` at once, divided as it goes: a rail that is done with one portion takes the next.
///
/// # Errors
/// When a connection cannot be opened or fails, or the ticket is not known. Over TCP a cable that is cut meanwhile is
/// such a failure within seconds.
pub async fn probe(
    fabric: &Fabric,
    paths: &[Path],
    ticket: Ticket,
    way: Way,
    bytes: u64,
) -> io::Result<Probe> {
    if paths.is_empty() || bytes > PROBE_MOST {
        let what = format!(
            "{bytes} bytes over {} rails: at least one rail, at most {PROBE_MOST} bytes",
            paths.len()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let streams = try_join_all(paths.iter().map(|path| open(fabric, path, ticket))).await?;
    // Small enough that equal rails end together, large enough that a portion's round trip is little of it.
    let portion = (bytes / (8 * paths.len() as u64)).clamp(64 << 10, 8 << 20).min(MAX_PROBE.into());
    let left = std::sync::atomic::AtomicU64::new(bytes.div_ceil(portion));
    let begin = Instant::now();
    let runs = streams.into_iter().zip(paths).map(|(stream, path)| {
        let next = || {
            use std::sync::atomic::Ordering::Relaxed;
            left.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1)).is_ok()
        };
        async move {
            let moved = carry(stream, way, portion as u32, next).await?;
            Ok::<_, io::Error>(Carried {
                path: path.clone(),
                bytes: moved,
                seconds: begin.elapsed().as_secs_f64(),
            })
        }
    });
    let rails = try_join_all(runs).await?;
    let seconds = begin.elapsed().as_secs_f64();
    Ok(Probe { bytes: rails.iter().map(|rail| rail.bytes).sum(), seconds, rails })
}

/// One rail's part. Two portions are always asked for, so that the line does not run dry between them.
async fn carry(
    mut stream: super::Stream,
    way: Way,
    portion: u32,
    next: impl Fn() -> bool,
) -> io::Result<u64> {
    let (mut moved, mut id, mut owed) = (0, 0, 0);
    let mut buffer = vec![0x5A; CHUNK];
    loop {
        while owed < 2 && next() {
            id += 1;
            owed += 1;
            let want = if way == Way::Here { Want::Fill } else { Want::Sink };
            stream.write_all(&Ask::plain(want, 0, id, portion).encode()).await?;
            if way == Way::There {
                let mut left = portion as usize;
                while left > 0 {
                    let chunk = left.min(CHUNK);
                    stream.write_all(&buffer[..chunk]).await?;
                    left -= chunk;
                }
            }
        }
        if owed == 0 {
            return Ok(moved);
        }
        let mut head = [0; HEAD];
        stream.read_exact(&mut head).await?;
        let head = Head::decode(&head).map_err(io::Error::other)?;
        if head.kind == Kind::Wait {
            continue;
        }
        let mut left = head.length as usize;
        while left > 0 {
            let most = left.min(CHUNK);
            let n = stream.read(&mut buffer[..most]).await?;
            if n == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            left -= n;
        }
        owed -= 1;
        moved += u64::from(portion);
    }
}
