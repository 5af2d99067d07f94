//! Connections: the public port's, and those over which another node passes requests on.

use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use super::open::{Entry, Open};
use crate::router::Wire;
use crate::tasks::{Kind, Tasks};

/// A connection that brings no whole head for this long is closed, an idle one too.
const HEAD: Duration = Duration::from_secs(75);

/// Most connections at once; more wait in the kernel's queue. Many times what two boxes can serve, and far below
/// the descriptors a process may have.
const CONNECTIONS_MAX: usize = 4096;

/// The pause after an accept that failed, as it does when descriptors run out.
const PAUSE: Duration = Duration::from_millis(100);

/// A client that takes nothing of what is sent for this long is given up; else one that stopped reading would keep
/// its place, and the engine's, for ever.
const UNREAD: Duration = Duration::from_secs(300);

/// A client from which nothing needs to come is asked whether it is still there: after this long, and then as
/// often. One that lost its power while a long prompt is computed is noticed by that.
const ALIVE: Duration = Duration::from_secs(60);

/// Sets up a client's socket. What fails here on a socket that is already gone fails again at its first read.
fn tend(stream: &TcpStream) {
    let _ = stream.set_nodelay(true); // small frames must not wait for each other
    let _ = setsockopt(stream, sockopt::KeepAlive, &true);
    let seconds = u32::try_from(ALIVE.as_secs()).unwrap_or(u32::MAX);
    let _ = setsockopt(stream, sockopt::TcpKeepIdle, &seconds);
    let _ = setsockopt(stream, sockopt::TcpKeepInterval, &seconds);
    let unread = u32::try_from(UNREAD.as_millis()).unwrap_or(u32::MAX);
    let _ = setsockopt(stream, sockopt::TcpUserTimeout, &unread);
}

/// Serves the public port until the node stops.
pub async fn serve(listener: TcpListener, app: axum::Router, tasks: Tasks) {
    let stopping = tasks.stopping();
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        // Both arms lose nothing when dropped: a place is given back, a connection stays in the queue.
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let Some((place, accepted)) = stopping.run_until_cancelled(next).await else { return };
        match accepted {
            Ok((stream, _)) => {
                tend(&stream);
                let (app, stopping) = (app.clone(), stopping.clone());
                tasks.spawn(Kind::Serving, "connection", async move {
                    connection(stream, app, stopping).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Serves what other nodes pass on, until the node stops.
pub async fn serve_relays<S: Wire + 'static>(mut incoming: mpsc::Receiver<S>, open: Open, tasks: Tasks) {
    let stopping = tasks.stopping();
    let app = open.routes(Entry::Relay);
    while let Some(Some(stream)) = stopping.run_until_cancelled(incoming.recv()).await {
        let (app, stopping) = (app.clone(), stopping.clone());
        tasks.spawn(Kind::Serving, "relay", connection(stream, app, stopping));
    }
    // The sender's end is not ours to judge: without a cluster nothing is passed on.
    stopping.cancelled().await;
}

/// One connection to its end. When the node stops, the request that is running is finished and no other begun.
async fn connection<S: Wire + 'static>(stream: S, app: axum::Router, stopping: CancellationToken) {
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
    tokio::pin!(served);
    let ended = tokio::select! {
        ended = served.as_mut() => ended,
        () = stopping.cancelled() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::getsockopt;

    #[tokio::test]
    async fn a_client_that_is_gone_or_stopped_reading_is_noticed_by_the_kernel() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        tend(&stream);
        assert!(stream.nodelay().unwrap());
        assert!(getsockopt(&stream, sockopt::KeepAlive).unwrap());
        assert_eq!(getsockopt(&stream, sockopt::TcpKeepIdle).unwrap(), 60);
        assert_eq!(getsockopt(&stream, sockopt::TcpUserTimeout).unwrap(), 300_000);
    }
}
