//! The other nodes: who they are, what they hold, and how to get it.
//!
//! Each node has a key of its own and knows others by their certificates; a token lets a new one in ([`token`],
//! [`identity`], [`link`]). Nodes that know each other keep one control connection, on which each tells the other
//! what it holds ([`proto`], [`peer`], [`drive`]); rows travel on data connections of their own
//! ([`crate::transfer`]). In idle moments rows that several nodes use are copied, and those that a full node would drop
//! are taken over ([`sharing`], [`copy`]). There is no master and no vote: a node that hears nothing of another forgets what the
//! other held, serves alone, and goes on dialling. Everything here is a hint that makes a cache larger: when it is
//! wrong or gone, rows are computed again.

mod carrier;
mod copy;
mod drive;
mod facts;
mod identity;
mod link;
mod metrics;
mod peer;
mod proto;
mod sharing;
mod source;
mod state;
mod telling;
mod tls;
mod token;

#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::pin::Pin as Pinned;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::time::Instant;
use tokio_rustls::TlsStream;

pub use proto::{Forgotten, SpaceFacts};
pub use sharing::Sharing;
pub use state::{Member, MemberState, PeerChange};
pub use token::NotAToken;

use crate::base::block::{RowItem, RowKey, Space};
use crate::base::clock::{Clock, Micros};
use crate::base::fault::Fault;
use crate::base::frame::Outcome;
use crate::base::rows::Rows;
use crate::base::units::Bytes;
use crate::meter::Meter;
use crate::store::Store;
use crate::tasks::{Kind, Tasks};
use crate::transfer::{Fetcher, Server};
pub use carrier::{Carrier, Chosen};
use identity::{Identity, Pin};
use proto::{Hello, MAX_NOTE, Message, Word};
use state::{Parts, Shared};
use token::{Invites, Refusal, Secret, Token};

/// How long another node's answer to an operator's order is awaited.
const ORDER: Duration = Duration::from_secs(10);

/// What another node answered to such an order.
async fn answered(
    (name, answer): (String, oneshot::Receiver<Forgotten>),
) -> (String, Result<Forgotten, String>) {
    let done = match tokio::time::timeout(ORDER, answer).await {
        Ok(Ok(Forgotten { trouble, .. })) if !trouble.is_empty() => Err(trouble),
        Ok(Ok(done)) => Ok(done),
        Ok(Err(_)) => Err("it is not connected".to_owned()),
        Err(_) => Err(format!("no answer within {} seconds", ORDER.as_secs())),
    };
    (name, done)
}

/// Relay streams that wait to be taken.
const RELAYS: usize = 64;

/// What a node needs to be one of several.
#[derive(Clone, Debug)]
pub struct Options {
    pub name: String,
    /// Folder of key, certificate and known nodes.
    pub identity: PathBuf,
    /// Address and port for control between nodes.
    pub control: String,
    /// Addresses and ports for rows: one, or one per rail.
    pub data: Vec<String>,
    /// Addresses of this node's ends of the rails; each connection for rows is pinned to one. Empty: not pinned.
    pub rails: Vec<IpAddr>,
    /// What rows travel over.
    pub carrier: Carrier,
    /// Where others reach the two, when that is not where they listen (containers, forwarded ports).
    pub seen_as: SeenAs,
    /// Token of a node to join. Of no effect when that node is known already, and knows this one.
    pub join: Option<String>,
    /// Time without a word until a node counts as gone.
    pub silence: Duration,
    /// Most bytes of rows read for others at one time.
    pub serve_memory: Bytes,
    pub sharing: Sharing,
    /// Number of this start; larger than that of every start before.
    pub generation: u64,
}

/// Addresses that others use instead of those listened on.
#[derive(Clone, Debug, Default)]
pub struct SeenAs {
    pub control: Option<String>,
    pub data: Option<String>,
}

/// Why the cluster did not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Identity(#[from] identity::Error),
    #[error(transparent)]
    Token(#[from] NotAToken),
    #[error("failed to listen on {address} for {what}: {source}")]
    Listen { what: &'static str, address: String, source: io::Error },
    #[error("failed to set up TLS: {0}")]
    Tls(#[from] rustls::Error),
    #[error("failed to read the identity: {0}")]
    Read(#[from] tokio::task::JoinError),
}

/// Why a node is not forgotten.
#[derive(Debug, thiserror::Error)]
pub enum ForgetError {
    #[error("no node `{0}` is known; `spark-kv cluster ls` lists those that are")]
    Unknown(String),
    #[error(
        "{1} nodes are called `{0}`: name the one that is meant by its id; `spark-kv cluster ls` lists it"
    )]
    Ambiguous(String, usize),
    #[error("the list of known nodes cannot be written: {0}")]
    Write(#[from] identity::Error),
}

/// The other nodes. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Cluster(Arc<Inner>);

/// What the parts of this module share.
#[derive(Debug)]
struct Inner {
    shared: Shared,
    store: Store,
    desk: copy::Desk,
    identity: Identity,
    folder: PathBuf,
    server_tls: Arc<rustls::ServerConfig>,
    name: String,
    generation: u64,
    control: String,
    data: Vec<String>,
    control_listener: String,
    data_listeners: Vec<String>,
    carried_by: String,
    /// Secrets that were given out.
    invites: Mutex<Invites>,
    /// Held while the file of known nodes is written.
    pin_file: tokio::sync::Mutex<()>,
    relays_in: mpsc::Sender<RelayStream>,
    /// Taken once, by whoever serves them.
    relays_out: Mutex<Option<mpsc::Receiver<RelayStream>>>,
}

impl Cluster {
    /// Reads or makes the identity, listens, and begins to dial the nodes that are known.
    pub async fn start(
        options: Options,
        store: Store,
        clock: Clock,
        tasks: &Tasks,
        meter: &Meter,
    ) -> Result<Self, Error> {
        let token = options.join.as_deref().map(str::parse::<Token>).transpose()?;
        let folder = options.identity.clone();
        let (identity, pins) = tokio::task::spawn_blocking(move || {
            Ok::<_, identity::Error>((Identity::open(&folder)?, identity::read_pins(&folder)?))
        })
        .await??;
        let failed = |what, address: &str| {
            let address = address.to_owned();
            move |source| Error::Listen { what, address, source }
        };
        let control = failed("control", &options.control);
        let control_listener = TcpListener::bind(&options.control).await.map_err(control)?;
        let failed_rails = failed("rows", &options.data.join(", "));
        let (carrier, rails, memory) = (options.carrier.clone(), options.rails.clone(), options.serve_memory);
        let chosen = tokio::task::spawn_blocking(move || carrier.choose(&rails, memory)).await?;
        let Chosen { fabric, why } = chosen.map_err(failed_rails)?;
        let carried_by = format!("{}: {why}", fabric.name());
        tracing::info!(fabric = fabric.name(), why, "rows travel between nodes");
        let mut data_listeners = Vec::new();
        let mut data_at = Vec::new();
        for address in &options.data {
            let listener = fabric.listen(address).await.map_err(failed("rows", address))?;
            data_at.push(listener.address().map_err(failed("rows", address))?);
            data_listeners.push(listener);
        }
        let known = pins.iter().map(|pin| pin.fingerprint).collect::<Vec<_>>();
        let parts = Parts {
            me: identity.fingerprint,
            silence: options.silence,
            clock,
            tasks: tasks.clone(),
            fabric: fabric.clone(),
            room: peer::Room::default(),
        };
        let shared = Shared::new(parts, pins, meter);
        let listens = |address: io::Result<String>, what, asked: &str| {
            address.map_err(|source| Error::Listen { what, address: asked.to_owned(), source })
        };
        let control_at = control_listener.local_addr().map(|a| a.to_string());
        let control_at = listens(control_at, "control", &options.control)?;
        let (relays_in, relays_out) = mpsc::channel(RELAYS);
        let inner = Arc::new(Inner {
            server_tls: tls::server(&identity)?,
            store,
            desk: copy::Desk::new(options.sharing, meter),
            identity,
            folder: options.identity,
            name: options.name,
            generation: options.generation,
            control: options.seen_as.control.unwrap_or_else(|| control_at.clone()),
            data: options.seen_as.data.map_or_else(|| data_at.clone(), |seen| vec![seen]),
            control_listener: control_at,
            data_listeners: data_at,
            carried_by,
            invites: Mutex::default(),
            pin_file: tokio::sync::Mutex::default(),
            relays_in,
            relays_out: Mutex::new(Some(relays_out)),
            shared,
        });
        let server = Server::new(
            Arc::new(inner.store.clone()),
            inner.shared.tickets.clone(),
            options.serve_memory,
            options.silence,
            inner.shared.transfer.clone(),
            tasks,
        );
        for listener in data_listeners {
            tasks.spawn(Kind::Owner, "data listener", server.clone().run(listener));
        }
        tasks.spawn(Kind::Owner, "control listener", link::accept(inner.clone(), control_listener));
        tasks.spawn(Kind::Serving, "copies", copy::run(inner.clone()));
        for of in known {
            // Both sides dial; the one whose connection would win goes first, so that mostly there is only one.
            let first = inner.shared.me < of;
            link::dial_always(&inner, of, if first { Duration::ZERO } else { link::PAUSE_FIRST });
        }
        if let Some(token) = token {
            tasks.spawn(Kind::Serving, "join", link::join(inner.clone(), token));
        }
        Ok(Self(inner))
    }

    /// What rows travel over between nodes, and why.
    pub fn carried_by(&self) -> &str {
        &self.0.carried_by
    }

    /// A fresh token that lets one node in, once, within an hour and until this node restarts.
    pub fn invite(&self) -> String {
        let secret = Secret(rand::random());
        self.0.invites.lock().add(self.0.shared.clock.now(), &secret);
        let addresses = reachable(&self.0.control);
        Token { addresses, fingerprint: self.0.shared.me, secret }.to_string()
    }

    /// Says what this node's rows are, or that it has no engine. Keys flow to and from nodes with equal facts.
    pub fn set_space(&self, facts: Option<SpaceFacts>) {
        self.0.shared.set_facts(facts);
    }

    /// Everything that other nodes hold of `space`, and what changes from exactly there on. A receiver that lags
    /// subscribes again.
    pub fn subscribe(&self, space: Space) -> (Vec<RowKey>, broadcast::Receiver<PeerChange>) {
        self.0.shared.subscribe(space)
    }

    /// Fetches rows from whoever holds them, verified, into `rows`; `FromPeer` or `Failed` for each item. After
    /// `deadline` nothing more is accepted. When this ends, or is dropped, nothing of it touches the rows.
    pub async fn fetch(
        &self,
        rows: &Arc<Rows>,
        items: Vec<RowItem>,
        deadline: Option<Micros>,
    ) -> Vec<Outcome> {
        let _load = self.0.desk.loads.begin(&self.0.shared.clock);
        self.0.fetch(rows, items, deadline).await
    }

    /// The rows of the engine that is served, or that there is none: what is copied from other nodes has their layout.
    pub fn set_rows(&self, rows: Option<Arc<Rows>>) {
        self.0.desk.set_engine(rows);
    }

    /// A request here, of this owner if that is clear, has used this chain, each row with the tokens up to its end. Rows
    /// that come from other nodes again and again are copied, for that owner.
    pub fn used(&self, space: Space, owner: Option<&Arc<str>>, chain: &[(RowKey, u32)]) {
        self.0.used(space, owner, chain);
    }

    /// Has the keys of an owner destroyed on every other node. For each its name and what became of it, or why that is not
    /// known.
    pub async fn forget_owner(&self, owner: &str) -> Vec<(String, Result<Forgotten, String>)> {
        self.0.desk.share.lock().on_owner_forgotten(owner);
        join_all(self.0.shared.tell_to_forget(owner).into_iter().map(answered)).await
    }

    /// Does not know the node with this name (or fingerprint, in hex, or its first 8 digits) any more; it can come back
    /// only by a token. Gives its name.
    ///
    /// # Errors
    /// When no node or more than one is called so, or it cannot be written down.
    pub async fn forget(&self, node: &str) -> Result<String, ForgetError> {
        let found = self.0.shared.named(node);
        let Pin { name, fingerprint, .. } = match &found[..] {
            [pin] => pin.clone(),
            [] => return Err(ForgetError::Unknown(node.to_owned())),
            [first, ..] => return Err(ForgetError::Ambiguous(first.name.clone(), found.len())),
        };
        link::forget(&self.0, fingerprint).await?;
        tracing::info!(peer = name, of = ?fingerprint, "a node was forgotten");
        Ok(name)
    }

    /// The other nodes that this one knows.
    pub fn members(&self) -> Vec<Member> {
        self.0.shared.members()
    }

    /// JSON that the others get with the next heartbeat. Over 64 KiB it is not sent.
    pub fn tell(&self, note: serde_json::Value) {
        let text = note.to_string();
        if text.len() > MAX_NOTE {
            tracing::warn!(bytes = text.len(), "a note to other nodes is too long and was not sent");
            return;
        }
        self.0.shared.set_note(text);
    }

    /// Bytes of rows that were received and sent since the start.
    pub fn moved_bytes(&self) -> u64 {
        self.0.shared.transfer.moved_bytes()
    }

    pub fn faults(&self) -> Vec<Fault> {
        self.0.shared.faults()
    }

    /// A stream to the node with this name (or fingerprint, in hex), encrypted and to that node only.
    pub async fn dial(&self, peer: &str) -> io::Result<RelayStream> {
        let pin =
            self.0.shared.find(peer).ok_or_else(|| {
                io::Error::new(io::ErrorKind::NotFound, format!("no node `{peer}` is known"))
            })?;
        let stream = link::relay(&self.0, &pin).await?;
        self.0.shared.metrics.relays.with_label_values(&["out"]).inc();
        Ok(stream)
    }

    /// Streams that other nodes open. There is one receiver; the second caller gets none.
    pub fn relays(&self) -> Option<mpsc::Receiver<RelayStream>> {
        self.0.relays_out.lock().take()
    }

    /// Where control between nodes listens, on this machine.
    pub fn control_address(&self) -> &str {
        &self.0.control_listener
    }

    /// Where rows are served, on this machine: one address, or one per rail.
    pub fn data_addresses(&self) -> &[String] {
        &self.0.data_listeners
    }

    /// The rails to each node that is connected, by its name.
    pub fn rails(&self) -> Vec<(String, Fetcher)> {
        self.0.shared.fetchers()
    }

    /// This node's fingerprint, in hex.
    pub fn id(&self) -> String {
        self.0.shared.me.to_string()
    }
}

impl Inner {
    /// As [`Cluster::fetch`], for whatever purpose.
    async fn fetch(&self, rows: &Arc<Rows>, items: Vec<RowItem>, deadline: Option<Micros>) -> Vec<Outcome> {
        let mut outcomes = vec![Outcome::Failed; items.len()];
        let now = self.shared.clock.now();
        if deadline.is_some_and(|deadline| deadline <= now) {
            return outcomes;
        }
        let deadline = deadline.map(|deadline| Instant::now() + deadline.since(now));
        let holders = self.shared.holders(rows.space, items.iter().map(|item| item.key));
        let fetches = holders.into_iter().map(|(fetcher, indices)| {
            let items: Vec<RowItem> = indices.iter().map(|&index| items[index]).collect();
            async move { (fetcher.fetch(rows, &items, deadline).await, indices) }
        });
        for (fetched, indices) in join_all(fetches).await {
            for (outcome, index) in fetched.into_iter().zip(indices) {
                outcomes[index] = outcome;
            }
        }
        outcomes
    }

    fn hello(&self, secret: Option<Secret>) -> Hello {
        Hello {
            generation: self.generation,
            name: self.name.clone(),
            control: self.control.clone(),
            data: self.data.clone(),
            secret,
        }
    }

    /// A frame with a word of this node.
    fn say(&self, word: Word) -> Vec<u8> {
        Message::Word { generation: self.generation, word }.encode()
    }

    fn redeem(&self, secret: &Secret) -> Result<(), Refusal> {
        self.invites.lock().redeem(self.shared.clock.now(), secret)
    }

    /// Hands a relay stream to whoever serves them; nobody, or too many: it is closed.
    fn take_relay(&self, stream: RelayStream) {
        match self.relays_in.try_send(stream) {
            Ok(()) => self.shared.metrics.relays.with_label_values(&["in"]).inc(),
            Err(_) => tracing::warn!("a relay stream was closed: nobody takes them as fast as they come"),
        }
    }
}

/// Where others may reach what listens on `address`: for "any address", the one that packets leave from, and the
/// host's name.
fn reachable(address: &str) -> Vec<String> {
    let Ok(any) = address.parse::<SocketAddr>() else { return vec![address.to_owned()] };
    if !any.ip().is_unspecified() {
        return vec![address.to_owned()];
    }
    // Connecting a UDP socket sends nothing; it only asks the routing table. The address is of the range that is
    // reserved for documentation.
    let routed = UdpSocket::bind("0.0.0.0:0")
        .and_then(|socket| socket.connect("192.0.2.1:9").and_then(|()| socket.local_addr()))
        .map(|local| SocketAddr::new(local.ip(), any.port()).to_string());
    let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    let named = host.map(|host| format!("{host}:{}", any.port()));
    let list: Vec<String> =
        routed.into_iter().chain(named).filter(|address| token::is_address(address)).collect();
    if list.is_empty() { vec![format!("127.0.0.1:{}", any.port())] } else { list }
}

/// A stream of bytes to or from another node, inside TLS.
#[derive(Debug)]
pub struct RelayStream(TlsStream<TcpStream>);

impl RelayStream {
    fn new(stream: TlsStream<TcpStream>) -> Self {
        Self(stream)
    }
}

impl AsyncRead for RelayStream {
    fn poll_read(
        mut self: Pinned<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pinned::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for RelayStream {
    fn poll_write(mut self: Pinned<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pinned::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pinned<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pinned::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pinned<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pinned::new(&mut self.0).poll_shutdown(cx)
    }
}
