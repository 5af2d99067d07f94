//! How connections between nodes begin: dialling, accepting, greeting, joining.
//!
//! TLS proves who holds which key; the greeting decides what follows. A known node is greeted back. A stranger is
//! let in only by a token, and told why not otherwise; it learns nothing else and cannot relay. Dialling goes on
//! for as long as a node is known, with pauses that grow from a quarter of a second to five.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::drive::{Frames, session};
use super::identity::{self, Fingerprint, Pin};
use super::proto::{Hello, Message, VERSION};
use super::state::Join;
use super::token::{Secret, Token};
use super::{Inner, RelayStream, tls};
use crate::base::doorway::Doorway;
use crate::tasks::Kind;

/// Greetings in progress, in all and from one address: two nodes need a handful, and may share an address.
const GREETINGS: usize = 32;
const GREETINGS_OF_ONE: usize = 8;

/// Time for TLS and the greeting, on a local network.
const GREETING: Duration = Duration::from_secs(5);

/// Largest frame of a greeting.
const GREETING_BYTES: usize = 64 << 10;

/// First byte on an accepted relay stream, from the accepting side.
const RELAY_OPEN: u8 = 1;

/// Pause before a node is dialled again, and before one is dialled that just joined.
pub const PAUSE_FIRST: Duration = Duration::from_millis(250);
const PAUSE_LAST: Duration = Duration::from_secs(5);

type Tls = TlsStream<TcpStream>;

/// A connection on which both sides have greeted.
struct Greeted {
    frames: Frames<ReadHalf<Tls>>,
    to: WriteHalf<Tls>,
    hello: Hello,
}

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The other side, or this one, said no.
    #[error("{0}")]
    Refused(String),
    /// Somebody else answers at this address; the node may be at another.
    #[error("{0}")]
    Another(String),
}

impl From<tokio::time::error::Elapsed> for Failure {
    fn from(_: tokio::time::error::Elapsed) -> Self {
        Self::Io(io::Error::new(io::ErrorKind::TimedOut, "no answer in time"))
    }
}

/// Accepts connections until the node stops.
pub async fn accept(inner: Arc<Inner>, listener: TcpListener) {
    let stopping = inner.shared.tasks.stopping();
    let doorway = Doorway::new(GREETINGS, GREETINGS_OF_ONE);
    loop {
        let accepted = tokio::select! {
            () = stopping.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, mostly: others may close some meanwhile.
                tracing::warn!(%error, "failed to accept a connection between nodes");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(guest) = doorway.admit(from.ip()) else {
            inner.shared.metrics.refused.with_label_values(&["crowd"]).inc();
            continue;
        };
        let (connection, stopping) = (inner.clone(), stopping.clone());
        inner.shared.tasks.spawn(Kind::Serving, "control connection", async move {
            let greeting = tokio::time::timeout(GREETING, greet_in(&connection, stream, from));
            let greeted = tokio::select! {
                () = stopping.cancelled() => return,
                greeted = greeting => greeted,
            };
            drop(guest);
            match greeted.map_err(Failure::from).and_then(|greeted| greeted) {
                Ok(Some((of, greeted))) => run(connection, of, greeted, false).await,
                Ok(None) => {}
                Err(error) => tracing::info!(%from, %error, "a connection between nodes came to nothing"),
            }
        });
    }
}

/// Runs a session on a greeted connection, when it is the one to use.
async fn run(inner: Arc<Inner>, of: Fingerprint, greeted: Greeted, dialled: bool) {
    let Greeted { frames, to, hello } = greeted;
    match inner.shared.begin(of, &hello, dialled) {
        Ok(begun) => {
            tracing::info!(peer = hello.name, generation = hello.generation, dialled, "a session begins");
            session(inner, of, begun, frames, to).await;
        }
        Err(why) => tracing::debug!(peer = hello.name, why, "a connection is not used"),
    }
}

/// The accepting side. `None`: it was a relay stream, and is where it belongs.
async fn greet_in(
    inner: &Arc<Inner>,
    stream: TcpStream,
    from: SocketAddr,
) -> Result<Option<(Fingerprint, Greeted)>, Failure> {
    stream.set_nodelay(true)?;
    let tls = TlsAcceptor::from(inner.server_tls.clone()).accept(stream).await?;
    let of = tls::fingerprint(tls.get_ref().1).ok_or_else(|| Failure::Refused("no certificate".into()))?;
    let relay = tls.get_ref().1.alpn_protocol() == Some(tls::RELAY);
    let mut tls = TlsStream::from(tls);
    if relay {
        if !inner.shared.knows(of) {
            inner.shared.metrics.refused.with_label_values(&["stranger"]).inc();
            return Err(Failure::Refused("a stranger asked for a relay".into()));
        }
        tls.write_all(&[RELAY_OPEN]).await?;
        tls.flush().await?;
        inner.take_relay(RelayStream::new(tls));
        return Ok(None);
    }
    let (from_it, mut to) = tokio::io::split(tls);
    let mut frames = Frames::new(from_it);
    match admit(inner, of, frames.message(GREETING_BYTES).await?, from.ip()).await {
        Ok(hello) => {
            to.write_all(&Message::Hello(inner.hello(None)).encode()).await?;
            to.flush().await?;
            Ok(Some((of, Greeted { frames, to, hello })))
        }
        Err((label, reason)) => {
            inner.shared.metrics.refused.with_label_values(&[label]).inc();
            tracing::warn!(%from, reason, "a node was not let in");
            to.write_all(&Message::Refused(reason.clone()).encode()).await?;
            to.shutdown().await?;
            Err(Failure::Refused(reason))
        }
    }
}

/// Decides whether the node with certificate `of` may come in; a token makes it a known one.
async fn admit(
    inner: &Arc<Inner>,
    of: Fingerprint,
    said: Message,
    from: IpAddr,
) -> Result<Hello, (&'static str, String)> {
    let mut hello = match said {
        Message::Hello(hello) => hello,
        Message::ForeignHello(theirs) => {
            let reason = format!("it speaks version {theirs}, this node speaks version {VERSION}");
            return Err(("version", reason));
        }
        _ => return Err(("stranger", "the first message must be a greeting".into())),
    };
    if of == inner.shared.me {
        return Err(("stranger", "this node dialled itself".into()));
    }
    let known = inner.shared.knows(of);
    if !known && hello.secret.is_none() {
        return Err(("stranger", "this node does not know you; join with a token".into()));
    }
    // Names stand in pages, in requests and in engine ids; two nodes of one name cannot be told apart there.
    let theirs = |pin: &Pin| pin.name == hello.name && pin.fingerprint != of;
    if hello.name == inner.name || inner.shared.pins().iter().any(theirs) {
        let reason =
            format!("another node is called `{}` already: give one of them another --name", hello.name);
        return Err(("name", reason));
    }
    if let Some(secret) = hello.secret.filter(|_| !known) {
        inner.redeem(&secret).map_err(|refusal| (refusal.label(), refusal.to_string()))?;
        tracing::info!(peer = hello.name, ?of, "a node joined by a token");
    }
    seen_from(&mut hello, from);
    know(inner, of, &hello.name, &hello.control)
        .await
        .map_err(|error| ("unknown", format!("it cannot be remembered: {error}")))?;
    Ok(hello)
}

/// Addresses that say "any", or "this machine" from another one, mean the one that the node was seen at.
fn seen_from(hello: &mut Hello, ip: IpAddr) {
    for address in std::iter::once(&mut hello.control).chain(&mut hello.data) {
        if let Ok(said) = address.parse::<SocketAddr>()
            && (said.ip().is_unspecified() || (said.ip().is_loopback() && !ip.is_loopback()))
        {
            *address = SocketAddr::new(ip, said.port()).to_string();
        }
    }
}

/// Pins a node, or its new name and address, on the drive too, and keeps dialling it.
async fn know(inner: &Arc<Inner>, of: Fingerprint, name: &str, address: &str) -> Result<(), identity::Error> {
    let pin = Pin { name: name.to_owned(), fingerprint: of, address: address.to_owned() };
    let _one_writer = inner.pin_file.lock().await;
    let first = !inner.shared.knows(of);
    if first && inner.shared.pins().len() >= identity::PINS {
        let (path, what) = (inner.folder.join("pins.json"), "it is full".to_owned());
        return Err(identity::Error::Damaged { path, what });
    }
    if inner.shared.pin(pin) {
        write(inner, inner.shared.pins()).await?;
    }
    if first {
        dial_always(inner, of, PAUSE_FIRST);
    }
    Ok(())
}

/// Does not know a node any more, on the drive too: it can come back only by a token.
pub async fn forget(inner: &Arc<Inner>, of: Fingerprint) -> Result<(), identity::Error> {
    let _one_writer = inner.pin_file.lock().await;
    let pins: Vec<Pin> = inner.shared.pins().into_iter().filter(|pin| pin.fingerprint != of).collect();
    write(inner, pins).await?;
    inner.shared.unpin(of);
    Ok(())
}

async fn write(inner: &Arc<Inner>, pins: Vec<Pin>) -> Result<(), identity::Error> {
    let folder = inner.folder.clone();
    let written = tokio::task::spawn_blocking(move || identity::write_pins(&folder, &pins)).await;
    written.unwrap_or_else(|panic| {
        let source = io::Error::other(panic);
        Err(identity::Error::Io { path: inner.folder.clone(), source })
    })
}

/// Starts the task that dials a known node whenever it has no session.
pub fn dial_always(inner: &Arc<Inner>, of: Fingerprint, pause: Duration) {
    let task = keep(inner.clone(), of, pause);
    inner.shared.tasks.spawn(Kind::Serving, "dialler", task);
}

async fn keep(inner: Arc<Inner>, of: Fingerprint, mut pause: Duration) {
    let shared = &inner.shared;
    let stopping = shared.tasks.stopping();
    let moved = shared.moved(of);
    loop {
        if stopping.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
            return;
        }
        let change = moved.notified();
        tokio::pin!(change);
        change.as_mut().enable();
        if !shared.is_known_by(of, &moved) {
            return;
        }
        let Some(address) = shared.to_dial(of) else {
            if stopping.run_until_cancelled(change).await.is_none() {
                return;
            }
            pause = PAUSE_FIRST;
            continue;
        };
        let dialled = tokio::time::timeout(GREETING, greet_out(&inner, &address, of, None));
        let dialled = tokio::select! {
            () = stopping.cancelled() => return,
            dialled = dialled => dialled.map_err(Failure::from).and_then(|dialled| dialled),
        };
        match dialled {
            Ok(greeted) => {
                let (name, control) = (&greeted.hello.name, &greeted.hello.control);
                if let Err(error) = know(&inner, of, name, control).await {
                    tracing::warn!(peer = name, %error, "failed to remember a node's address");
                }
                run(inner.clone(), of, greeted, true).await;
                pause = PAUSE_FIRST;
            }
            Err(error) => {
                tracing::debug!(address, %error, "failed to reach a node");
                shared.trouble(of, error.to_string());
                pause = (pause * 2).clamp(PAUSE_FIRST, PAUSE_LAST);
            }
        }
    }
}

/// Joins by a token, trying until there is an answer.
pub async fn join(inner: Arc<Inner>, token: Token) {
    let shared = &inner.shared;
    let stopping = shared.tasks.stopping();
    let (since, mut pause) = (shared.clock.now(), PAUSE_FIRST);
    // A node that is known needs no token, unless it has forgotten this one meanwhile.
    let known = shared.knows(token.fingerprint);
    if known && stopping.run_until_cancelled(tokio::time::sleep(GREETING)).await.is_none() {
        return;
    }
    loop {
        let mut others = 0;
        for address in &token.addresses {
            if shared.is_up(token.fingerprint) {
                shared.set_join(Join::None);
                return;
            }
            let greeting = greet_out(&inner, address, token.fingerprint, Some(token.secret));
            let dialled = tokio::select! {
                () = stopping.cancelled() => return,
                dialled = tokio::time::timeout(GREETING, greeting) => dialled,
            };
            match dialled.map_err(Failure::from).and_then(|dialled| dialled) {
                Ok(greeted) => {
                    let of = token.fingerprint;
                    let (name, control) = (&greeted.hello.name, &greeted.hello.control);
                    if let Err(error) = know(&inner, of, name, control).await {
                        shared.set_join(Join::Refused(format!("it cannot be remembered: {error}")));
                        return;
                    }
                    shared.set_join(Join::None);
                    run(inner.clone(), of, greeted, true).await;
                    return;
                }
                // A host's name may mean another box here, even this one: only when no address is right it is over.
                Err(Failure::Another(reason)) if others + 1 < token.addresses.len() => {
                    tracing::info!(address, reason, "not the node of the join token");
                    others += 1;
                }
                Err(Failure::Refused(reason) | Failure::Another(reason)) if known => {
                    // The token of the first start is on the command line still; the dialler goes on without it.
                    tracing::info!(address, reason, "the join token is of no use");
                    return;
                }
                Err(Failure::Refused(reason) | Failure::Another(reason)) => {
                    tracing::error!(address, reason, "the other node did not let this one in");
                    shared.set_join(Join::Refused(format!("the node at {address} said: {reason}")));
                    return;
                }
                Err(Failure::Io(_)) if known => return,
                Err(Failure::Io(error)) => {
                    tracing::info!(address, %error, "failed to reach the node of the join token");
                    let (address, error) = (address.clone(), error.to_string());
                    shared.set_join(Join::Trying { since, address, error });
                }
            }
        }
        if stopping.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
            return;
        }
        pause = (pause * 2).min(PAUSE_LAST);
    }
}

/// Opens TLS to the node with certificate `of`, and to no other.
async fn open(inner: &Inner, address: &str, of: Fingerprint, alpn: &[u8]) -> io::Result<(Tls, IpAddr)> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let ip = stream.peer_addr()?.ip();
    let config = tls::client(&inner.identity, of, alpn).map_err(io::Error::other)?;
    let tls = TlsConnector::from(config).connect(tls::name(), stream).await?;
    if tls.get_ref().1.alpn_protocol() != Some(alpn) {
        return Err(io::Error::other("it does not speak our protocol"));
    }
    Ok((TlsStream::from(tls), ip))
}

/// The dialling side of a greeting.
async fn greet_out(
    inner: &Inner,
    address: &str,
    of: Fingerprint,
    secret: Option<Secret>,
) -> Result<Greeted, Failure> {
    let (tls, ip) = match open(inner, address, of, tls::CONTROL).await {
        Ok(opened) => opened,
        Err(error) if is_another_node(&error) => {
            let reason = format!("the node at {address} is not the one that was expected: its key differs");
            return Err(Failure::Another(reason));
        }
        Err(error) => return Err(error.into()),
    };
    let (from_it, mut to) = tokio::io::split(tls);
    let mut frames = Frames::new(from_it);
    to.write_all(&Message::Hello(inner.hello(secret)).encode()).await?;
    to.flush().await?;
    match frames.message(GREETING_BYTES).await? {
        Message::Hello(mut hello) => {
            seen_from(&mut hello, ip);
            // What was dialled works; what it says of itself may be an address that only it can use.
            hello.control = address.to_owned();
            Ok(Greeted { frames, to, hello })
        }
        Message::Refused(reason) => Err(Failure::Refused(reason)),
        Message::ForeignHello(theirs) => {
            Err(Failure::Refused(format!("it speaks version {theirs}, this node speaks version {VERSION}")))
        }
        Message::Word { .. } => Err(io::Error::other("it did not greet").into()),
    }
}

fn is_another_node(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>());
    matches!(inner, Some(rustls::Error::InvalidCertificate(_)))
}

/// Opens a stream to a known node.
pub async fn relay(inner: &Inner, pin: &Pin) -> io::Result<RelayStream> {
    let open = async {
        let (mut tls, _) = open(inner, &pin.address, pin.fingerprint, tls::RELAY).await?;
        match tls.read_u8().await? {
            RELAY_OPEN => Ok(RelayStream::new(tls)),
            other => Err(io::Error::other(format!("a relay was answered with {other}"))),
        }
    };
    tokio::time::timeout(GREETING, open).await?
}
