//! A node and somebody who speaks TLS to it by hand: what strangers and malformed frames get.

use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream as ClientStream;

use super::drive::Frames;
use super::proto::{MAX_FRAME, VERSION};
use super::*;
use crate::settings::Io;
use crate::store::{self, DiskKind, Mem};
use crate::transfer::Ticket;

struct Node {
    cluster: Cluster,
    tasks: Tasks,
    meter: Meter,
    folder: TempDir,
}

impl Node {
    async fn start() -> Self {
        let (tasks, meter, folder) = (Tasks::new(), Meter::new(), tempfile::tempdir().unwrap());
        let options = store::Options {
            folder: folder.path().join("segments"),
            capacity: Bytes::mib(4),
            segment: Bytes::mib(1),
            io: Io::Auto,
            queue_depth: 4,
        };
        let (store, _) = Store::open(options, DiskKind::Mem(Mem::new()), Clock::real(), &meter).unwrap();
        let options = Options {
            name: "a".into(),
            identity: folder.path().join("identity"),
            control: "127.0.0.1:0".into(),
            data: vec!["127.0.0.1:0".into()],
            rails: Vec::new(),
            seen_as: SeenAs::default(),
            join: None,
            silence: Duration::from_secs(60),
            serve_memory: Bytes::mib(1),
            carrier: Carrier::default(),
            sharing: Sharing::default(),
            generation: 1,
        };
        let cluster = Cluster::start(options, store, Clock::real(), &tasks, &meter).await.unwrap();
        Self { cluster, tasks, meter, folder }
    }

    fn count(&self, series: &str) -> u64 {
        let text = self.meter.text();
        let line = text.lines().find(|l| l.starts_with(&format!("sparkkv_cluster_{series} ")));
        line.unwrap_or_else(|| panic!("{series} in {text}")).rsplit(' ').next().unwrap().parse().unwrap()
    }

    async fn end(self) {
        assert_eq!(self.tasks.stop(Duration::from_secs(5)).await, 0, "everything ends when asked");
    }

    /// Somebody with a key, connected.
    async fn connect(&self, who: &str, alpn: &[u8]) -> io::Result<ClientStream<TcpStream>> {
        let identity = Identity::open(&self.folder.path().join(who)).unwrap();
        let config = tls::client(&identity, self.cluster.0.shared.me, alpn).unwrap();
        let tcp = TcpStream::connect(self.cluster.control_address()).await.unwrap();
        TlsConnector::from(config).connect(tls::name(), tcp).await
    }

    fn secret(&self) -> Option<Secret> {
        let token: Token = self.cluster.invite().parse().unwrap();
        assert_eq!(token.addresses, [self.cluster.control_address()]);
        Some(token.secret)
    }
}

fn hello(secret: Option<Secret>) -> Message {
    hello_of("b", secret)
}

fn hello_of(name: &str, secret: Option<Secret>) -> Message {
    let data = vec!["127.0.0.1:1".into()];
    Message::Hello(Hello { generation: 1, name: name.into(), control: "127.0.0.1:1".into(), data, secret })
}

/// Says one thing and returns the next answer.
async fn ask(stream: &mut ClientStream<TcpStream>, said: &Message) -> io::Result<Message> {
    stream.write_all(&said.encode()).await?;
    stream.flush().await?;
    Frames::new(stream).message(MAX_FRAME).await
}

#[tokio::test]
async fn a_stranger_is_told_why_and_gets_nothing_else() {
    let node = Node::start().await;
    let mut stream = node.connect("b", tls::CONTROL).await.unwrap();
    let Message::Refused(reason) = ask(&mut stream, &hello(None)).await.unwrap() else { panic!() };
    assert_eq!(reason, "this node does not know you; join with a token");
    assert_eq!(stream.read(&mut [0; 64]).await.unwrap_or(0), 0, "and the connection ends");
    let mut stream = node.connect("b", tls::CONTROL).await.unwrap();
    let made_up = hello(Some(Secret([1; 16])));
    let Message::Refused(reason) = ask(&mut stream, &made_up).await.unwrap() else { panic!() };
    assert!(reason.starts_with("the token is not one of this node's"), "{reason}");
    let mut relays = node.cluster.relays().unwrap();
    assert!(node.cluster.relays().is_none(), "there is one receiver");
    let mut stream = node.connect("b", tls::RELAY).await.unwrap();
    assert_eq!(stream.read(&mut [0; 64]).await.unwrap_or(0), 0);
    assert!(relays.try_recv().is_err());
    assert_eq!(node.count("joins_refused_total{reason=\"stranger\"}"), 2);
    assert_eq!(node.count("joins_refused_total{reason=\"unknown\"}"), 1);
    assert!(node.cluster.members().is_empty());
    assert_eq!(node.count("sessions_total"), 0);
    node.end().await;
}

#[tokio::test]
async fn another_version_is_named() {
    let node = Node::start().await;
    let mut stream = node.connect("b", tls::CONTROL).await.unwrap();
    let foreign = Message::ForeignHello(VERSION + 1);
    let Message::Refused(reason) = ask(&mut stream, &foreign).await.unwrap() else { panic!() };
    assert_eq!(reason, format!("it speaks version {}, this node speaks version {VERSION}", VERSION + 1));
    node.end().await;
}

#[tokio::test]
async fn a_token_lets_in_once_and_the_key_is_known_from_then_on() {
    let node = Node::start().await;
    let secret = node.secret();
    let mut stream = node.connect("b", tls::CONTROL).await.unwrap();
    let Message::Hello(theirs) = ask(&mut stream, &hello(secret)).await.unwrap() else { panic!() };
    assert_eq!((theirs.name.as_str(), theirs.generation, theirs.secret), ("a", 1, None));
    let mut other = node.connect("c", tls::CONTROL).await.unwrap();
    let Message::Refused(reason) = ask(&mut other, &hello_of("c", secret)).await.unwrap() else { panic!() };
    assert_eq!(reason, "the token was used already");
    assert_eq!(node.count("joins_refused_total{reason=\"used\"}"), 1);
    let mut again = node.connect("b", tls::CONTROL).await.unwrap();
    assert!(matches!(ask(&mut again, &hello(None)).await, Ok(Message::Hello(_))));
    let known = identity::read_pins(&node.folder.path().join("identity")).unwrap();
    assert_eq!(known.len(), 1);
    assert_eq!(known[0].name, "b");
    node.end().await;
}

#[tokio::test]
async fn two_nodes_of_one_name_do_not_come_together() {
    let node = Node::start().await;
    let secret = node.secret();
    let mut stream = node.connect("b", tls::CONTROL).await.unwrap();
    let Message::Refused(reason) = ask(&mut stream, &hello_of("a", secret)).await.unwrap() else { panic!() };
    assert_eq!(reason, "another node is called `a` already: give one of them another --name");
    assert_eq!(node.count("joins_refused_total{reason=\"name\"}"), 1);
    let mut stream = node.connect("b", tls::CONTROL).await.unwrap();
    assert!(
        matches!(ask(&mut stream, &hello(secret)).await, Ok(Message::Hello(_))),
        "the token is still good"
    );
    let mut third = node.connect("c", tls::CONTROL).await.unwrap();
    let Message::Refused(reason) = ask(&mut third, &hello(node.secret())).await.unwrap() else { panic!() };
    assert!(reason.contains("called `b`"), "{reason}");
    node.end().await;
}

#[tokio::test]
async fn oversized_and_senseless_frames_end_the_connection() {
    let node = Node::start().await;
    // Before the greeting: nothing but a greeting's size is taken.
    for bytes in [&u32::MAX.to_le_bytes()[..], &(1_u32 << 20).to_le_bytes(), &[1, 0, 0, 0, 77]] {
        let mut stream = node.connect("b", tls::CONTROL).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        assert_eq!(stream.read(&mut [0; 64]).await.unwrap_or(0), 0, "{bytes:?}");
    }
    // After it.
    let mut secret = node.secret();
    for bytes in [&u32::MAX.to_le_bytes()[..], &[1, 0, 0, 0, 77], &hello(None).encode()] {
        let malformed = node.count("malformed_total");
        let mut stream = node.connect("b", tls::CONTROL).await.unwrap();
        assert!(matches!(ask(&mut stream, &hello(secret.take())).await, Ok(Message::Hello(_))));
        stream.write_all(bytes).await.unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
        assert_eq!(node.count("malformed_total"), malformed + 1, "{bytes:?}");
    }
    assert_eq!(node.count("peers_connected"), 0);
    // Not TLS at all.
    let mut plain = TcpStream::connect(node.cluster.control_address()).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let mut rest = Vec::new();
    let _ = plain.read_to_end(&mut rest).await;
    node.end().await;
}

#[tokio::test]
async fn a_data_connection_without_a_ticket_of_a_live_session_gets_no_byte() {
    let node = Node::start().await;
    for ticket in [Ticket([0; 32]), Ticket([7; 32])] {
        let mut stream = TcpStream::connect(&node.cluster.data_addresses()[0]).await.unwrap();
        let mut preamble = b"SKVD\x01\x00".to_vec();
        preamble.extend(ticket.0);
        stream.write_all(&preamble).await.unwrap();
        assert_eq!(stream.read(&mut [0; 64]).await.unwrap_or(0), 0);
    }
    node.end().await;
}

#[tokio::test]
async fn whoever_dials_goes_away_from_a_node_with_another_key() {
    let node = Node::start().await;
    let identity = Identity::open(&node.folder.path().join("b")).unwrap();
    let config = tls::client(&identity, identity.fingerprint, tls::CONTROL).unwrap();
    let tcp = TcpStream::connect(node.cluster.control_address()).await.unwrap();
    assert!(TlsConnector::from(config).connect(tls::name(), tcp).await.is_err());
    node.end().await;
}
