//! `spark-kv mock-engine`: an engine without a model, for load, demos and faults.
//!
//! It speaks vLLM's HTTP interface and the plugin's side of the door, with real rows in shared memory and vLLM's own
//! block hashes, and it computes nothing: the bytes of a row and the words of a reply follow from the prompt. So it
//! knows what every row must hold, checks each one that a hit uses, and says `WRONG` when one differs: in the reply
//! and in `mock_wrong_rows_total`. Two nodes with mock engines of one seed must say the same to the same prompt,
//! whatever was damaged, killed or evicted in between.
//!
//! To a router it is as slow as vLLM would be, and for the same reasons: [`schedule`] plans its steps, [`pool`] and
//! [`hits`] say what of a prompt is there, [`pace`] how long a step takes, [`publish`] tells what the cache holds, and
//! [`faults`] fail on command.

mod cache;
pub mod client;
mod control;
pub mod counts;
pub mod engine;
mod faces;
pub mod faults;
pub mod hits;
mod http;
pub mod link;
pub mod model;
pub mod options;
pub mod pace;
pub mod pool;
pub mod profile;
pub mod publish;
mod rows;
pub mod schedule;
pub mod steps;
pub mod wire;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

pub use self::engine::Engine;
pub use self::options::{Options, Shape};
use crate::tasks::{Kind, Tasks};

/// From the order to stop until what still runs is cut off.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// Why the mock engine does not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Options(#[from] options::Error),
    #[error("failed to listen on {address}: {source}")]
    Listen { address: String, source: io::Error },
    #[error("failed to share {rows} rows of {row_bytes} bytes: {source}")]
    Rows { rows: u32, row_bytes: u32, source: io::Error },
    #[error("failed to write {path}: {source}")]
    Model { path: PathBuf, source: io::Error },
    #[error("failed to publish events on {endpoint}: {source}")]
    Events { endpoint: String, source: zeromq::ZmqError },
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A running mock engine.
pub struct Mock {
    pub address: SocketAddr,
    pub engine: Engine,
    /// Where its events are published, with the ports that were taken.
    pub events: Option<Arc<options::EventConfig>>,
}

impl Mock {
    /// Listens and connects; serves until `tasks` stop.
    pub async fn start(options: &Options, tasks: &Tasks) -> Result<Self, Error> {
        let shape = options.shape()?;
        let (rows, row_bytes) = (shape.rows, shape.row_bytes);
        let area = client::Area::new(rows, row_bytes);
        let area = Arc::new(area.map_err(|source| Error::Rows { rows, row_bytes, source })?);
        let model = match &options.root {
            Some(root) => write_model(root, &shape)?.to_string_lossy().into_owned(),
            None => String::new(),
        };
        let hello = engine::hello(&shape, &options.engine_id, &model);
        let link =
            options.socket.clone().map(|socket| link::Link::start(socket, hello, Arc::clone(&area), tasks));
        let address = format!("{}:{}", options.host, options.port);
        let listener = TcpListener::bind(&address).await;
        let listener = listener.map_err(|source| Error::Listen { address, source })?;
        let address = listener.local_addr()?;
        let counts = Arc::new(counts::Counts::default());
        let (events, publish) = publisher(options, &shape, &counts, tasks).await?;
        let name = options.served_name.as_str();
        let engine = Engine::new(shape, name, area, link, publish, counts, tasks.clone());
        let served = http::Served {
            engine: engine.clone(),
            name: name.into(),
            events: events.clone(),
            serial: Arc::new(AtomicU64::new(0)),
        };
        let stopping = tasks.stopping();
        tasks.spawn(Kind::Owner, "mock engine", async move {
            let serving = axum::serve(listener, http::routes(served));
            let serving = serving.with_graceful_shutdown(stopping.cancelled_owned());
            if let Err(error) = serving.await {
                tracing::error!(%error, "failed to serve");
            }
        });
        Ok(Self { address, engine, events })
    }
}

type Published = (Option<Arc<options::EventConfig>>, Option<steps::Publish>);

async fn publisher(
    options: &Options,
    shape: &Shape,
    counts: &Arc<counts::Counts>,
    tasks: &Tasks,
) -> Result<Published, Error> {
    let Some(config) = options.events()? else { return Ok((None, None)) };
    let endpoint = config.endpoint.clone();
    let (groups, counts) = (shape.grid.groups.clone(), Arc::clone(counts));
    let started = publish::start(config, &options.host, shape.events, groups, counts, tasks).await;
    let publisher = started.map_err(|source| Error::Events { endpoint, source })?;
    Ok((Some(Arc::new(publisher.config)), Some(publisher.publish)))
}

/// A folder that passes for a model: a node fingerprints it as it would any other. Equal for equal seeds.
fn write_model(root: &Path, shape: &Shape) -> Result<PathBuf, Error> {
    let folder = root.join("mock-model");
    let seed = shape.seed;
    let files = [
        ("config.json", format!("{{\"model_type\": \"mock\", \"seed\": {seed}}}\n")),
        ("model.bin", format!("weights of mock {seed}\n").repeat(512)),
    ];
    let write = |(name, content): &(&str, String)| {
        let path = folder.join(name);
        std::fs::write(&path, content).map_err(|source| Error::Model { path, source })
    };
    std::fs::create_dir_all(&folder).map_err(|source| Error::Model { path: folder.clone(), source })?;
    files.iter().try_for_each(write)?;
    Ok(folder)
}

/// Runs until it is told to stop (TERM or INT).
pub async fn run(options: Options) -> Result<(), Error> {
    let tasks = Tasks::new();
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mock = Mock::start(&options, &tasks).await?;
    tracing::info!(address = %mock.address, engine = options.engine_id, "mock engine serves");
    let failed = tasks.failed();
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
        () = failed.cancelled() => {}
    }
    tasks.stop(STOP_GRACE).await;
    Ok(())
}
