//! NVIDIA's NIXL as a fabric: RDMA where there is a card for it, and TCP where it is asked for all the same.
//!
//! Every end of this box has an agent that peers read from, and every rail to a peer one that reads. Each is pinned to
//! its device by UCX's own `NET_DEVICES` and to one kind of transport by `TLS`, both handed to UCX with the agent. (With
//! the names of two TCP devices in one agent all bytes ran over one of them.) If the environment of this process holds
//! either, UCX would take that instead, so it is refused: NVIDIA's own instructions for pairs set `UCX_NET_DEVICES` to a
//! network device, which means TCP.
//!
//! Over TCP nothing reads memory by itself: UCX asks a thread of the other process to send it, and that thread asks for no
//! key. Whoever reaches the port can read the process. So TCP is for tests and for cables that lead nowhere else, and
//! only used when it is asked for by name. With RDMA no such port is opened, and the card checks the key of the region.

mod arena;
mod library;

use std::collections::HashMap;
use std::ffi::CString;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;

use self::arena::Arena;
use self::library::{Agent, Nixl, Read, Region, Role};
use super::onesided::{Engine, Host, Lies, Reader, Remote};
use super::piece::Leave;
use super::{Local, Path};
use crate::base::rows::{AreaId, Rows};

pub use library::Error;

/// Variables that would overrule how agents are pinned.
const OVERRULING: [&str; 2] = ["UCX_NET_DEVICES", "UCX_TLS"];

/// What to do when memory cannot be registered.
const PINNING: &str = "memory must be allowed to be pinned (LimitMEMLOCK=infinity), and some kernels need kho=off; \
                       `spark-kv rails` says which it is";

/// How a rail's bytes travel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transport {
    Tcp,
    Rdma {
        /// RDMA device.
        device: String,
        port: u32,
        /// Index of its RoCE v2 GID, where it is known.
        gid: Option<u32>,
    },
}

/// How NIXL is used.
#[derive(Clone, Debug)]
pub struct Options {
    /// `libnixl_capi.so`.
    pub library: PathBuf,
    /// By network device. What is not listed uses TCP.
    pub transports: Vec<(String, Transport)>,
    /// Bytes for rows that peers read.
    pub memory: u64,
}

/// The library, started.
#[derive(Debug)]
struct Fabric {
    nixl: &'static Nixl,
    transports: Vec<(String, Transport)>,
    arena: Arc<Arena>,
    /// By the device, empty for connections that are not pinned.
    hosts: Mutex<HashMap<String, Arc<Desk>>>,
}

/// An agent that peers read from.
#[derive(Debug)]
struct Desk {
    card: Bytes,
    arena: Arc<Arena>,
    /// Dropped before the memory that it knows.
    _agent: Agent,
}

/// Opens the library and sets memory aside. Blocks.
///
/// # Errors
/// When it cannot be opened or is too old, or the environment overrules where bytes go.
pub fn start(options: Options) -> io::Result<Arc<dyn Remote>> {
    if let Some(name) = OVERRULING.into_iter().find(|name| std::env::var_os(name).is_some()) {
        return Err(io::Error::other(format!(
            "{name} is set and would decide which device is used: unset it"
        )));
    }
    let nixl = Nixl::open(&options.library)?;
    let arena = Arena::new(usize::try_from(options.memory).map_err(io::Error::other)?)?;
    let transports = options.transports;
    Ok(Arc::new(Fabric { nixl, transports, arena, hosts: Mutex::default() }))
}

impl Fabric {
    fn transport(&self, device: &str) -> &Transport {
        let listed = self.transports.iter().find(|(name, _)| name == device);
        listed.map_or(&Transport::Tcp, |(_, transport)| transport)
    }

    fn ucx(&self, device: Option<&str>) -> Vec<(String, String)> {
        ucx(device, device.map_or(&Transport::Tcp, |device| self.transport(device)))
    }
}

/// UCX's settings for an agent on a device.
fn ucx(device: Option<&str>, transport: &Transport) -> Vec<(String, String)> {
    let set = |name: &str, value: String| (name.to_owned(), value);
    match (transport, device) {
        (Transport::Tcp, None) => vec![set("TLS", "tcp".into())],
        (Transport::Tcp, Some(device)) => vec![set("TLS", "tcp".into()), set("NET_DEVICES", device.into())],
        (Transport::Rdma { device, port, gid }, _) => {
            let mut all = vec![set("TLS", "rc".into()), set("NET_DEVICES", format!("{device}:{port}"))];
            all.extend(gid.map(|index| set("IB_GID_INDEX", index.to_string())));
            all
        }
    }
}

fn agent_name() -> String {
    format!("spark-kv {:016x}", rand::random::<u64>())
}

impl Remote for Fabric {
    fn name(&self) -> String {
        let rdma = |transport: &Transport| matches!(transport, Transport::Rdma { .. });
        let all = self.transports.iter().all(|(_, transport)| rdma(transport));
        let how = if all && !self.transports.is_empty() { "RDMA" } else { "TCP" };
        format!("NIXL over {how}")
    }

    fn host(&self, end: Option<&Local>) -> io::Result<Arc<dyn Host>> {
        let device = end.map(|end| end.device.as_str());
        let mut hosts = self.hosts.lock();
        if let Some(there) = hosts.get(device.unwrap_or_default()) {
            return Ok(there.clone());
        }
        let agent = Agent::new(self.nixl, &agent_name(), Role::Host, &self.ucx(device))?;
        register(&agent, &self.arena)?;
        let desk = Arc::new(Desk { card: agent.card()?, arena: self.arena.clone(), _agent: agent });
        hosts.insert(device.unwrap_or_default().to_owned(), desk.clone());
        Ok(desk)
    }

    fn reader(&self, path: &Path, card: Bytes) -> BoxFuture<'static, io::Result<Reader>> {
        let (nixl, name) = (self.nixl, path.name.clone());
        let ucx = self.ucx(path.local.as_ref().map(|local| local.device.as_str()));
        let open = move || {
            let agent = Agent::new(nixl, &agent_name(), Role::Reader, &ucx)?;
            let peer = agent.meet(&card)?;
            Ok(Reads { agent, peer, areas: Vec::new() })
        };
        async move { Reader::start(&name, open).await }.boxed()
    }
}

#[expect(unsafe_code, reason = "memory that a library is told of")]
fn register(agent: &Agent, arena: &Arena) -> io::Result<()> {
    // SAFETY: the arena is held by the same Desk as the agent, which is dropped first.
    let registered = unsafe { agent.register(arena.region()) };
    registered.map_err(|error| io::Error::other(format!("{error}: {PINNING}")))
}

impl Host for Desk {
    fn card(&self) -> Bytes {
        self.card.clone()
    }

    fn lend(&self, parts: &[Bytes]) -> Option<Lies> {
        self.arena.lend(parts)
    }
}

/// An agent that reads one peer's memory.
struct Reads {
    agent: Agent,
    peer: CString,
    areas: Vec<(AreaId, Region)>,
}

impl Engine for Reads {
    type Read = Read;

    #[expect(unsafe_code, reason = "memory that a library is told of")]
    fn attach(&mut self, rows: &Arc<Rows>) -> io::Result<()> {
        let (address, bytes) = rows.whole();
        let region = Region { address: address as usize, bytes };
        // SAFETY: an area that is gone is detached before another one is attached, which alone could have its
        // address; reads go to pieces, which hold their area.
        let registered = unsafe { self.agent.register(region) };
        registered.map_err(|error| io::Error::other(format!("{error}, {bytes} bytes of rows: {PINNING}")))?;
        self.areas.push((rows.id, region));
        Ok(())
    }

    fn detach(&mut self, area: AreaId) {
        if let Some(n) = self.areas.iter().position(|(id, _)| *id == area) {
            let (_, region) = self.areas.swap_remove(n);
            if let Err(error) = self.agent.deregister(region) {
                tracing::warn!(%error, "an area of rows that is gone stays pinned");
            }
        }
    }

    #[expect(unsafe_code, reason = "a library writes memory that a landing holds")]
    fn post(&mut self, into: &Leave, at: u64) -> io::Result<Read> {
        let (address, bytes) = into.region();
        // SAFETY: the landing holds the piece until the read has ended or the agent is dropped (onesided.rs), and is
        // given only for areas that were attached.
        Ok(unsafe { self.agent.read(&self.peer, at, Region { address, bytes }) }?)
    }

    fn ended(&mut self, read: &mut Read) -> io::Result<bool> {
        Ok(self.agent.ended(read)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rail_is_pinned_to_its_device_by_ucx() {
        let rdma = Transport::Rdma { device: "rocep1s0f1".into(), port: 1, gid: Some(3) };
        let words = |device, transport: &Transport| {
            let all: Vec<String> =
                ucx(device, transport).into_iter().map(|(n, v)| format!("{n}={v}")).collect();
            all.join(",")
        };
        assert_eq!(
            words(Some("enp1s0f1np1"), &rdma),
            "TLS=rc,NET_DEVICES=rocep1s0f1:1,IB_GID_INDEX=3",
            "a network device's name would mean TCP"
        );
        assert_eq!(words(Some("rail0"), &Transport::Tcp), "TLS=tcp,NET_DEVICES=rail0");
        assert_eq!(words(None, &Transport::Tcp), "TLS=tcp");
    }

    #[test]
    fn without_the_library_it_says_which_file_it_looked_for() {
        let options =
            Options { library: "/nowhere/libnixl_capi.so".into(), transports: Vec::new(), memory: 1 };
        let error = start(options).unwrap_err().to_string();
        assert!(error.contains("/nowhere/libnixl_capi.so"), "{error}");
    }
}
