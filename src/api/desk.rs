//! The operator's desk: what the store of a running node holds, and what an operator does with it.
//!
//! Looking is for whoever may look at the node. Doing (verify, pin, unpin, drop, forget, measuring rails) are orders
//! ([`super::operators`]).

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::{Query, State as With};
use axum::response::{IntoResponse, Response};
use axum::routing::{Router, get, post};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{StatusCode, header};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Instant;

use super::operators::{self, refused};
use crate::base::block::{BlockHash, GroupId, RowKey, Space};
use crate::cluster::{self, Cluster};
use crate::observe::chains::{Chains, PrefixUse};
use crate::rails::Report;
use crate::store::{self, Damage, Store, Survey, Verification};
use crate::tasks::{Kind, Tasks};

/// Between two lines of a verification that runs.
const LINE: Duration = Duration::from_secs(1);

/// Prefixes and segments that are listed where nobody says how many.
const LIMIT: usize = 20;
const LIMIT_MAX: usize = 100_000;

/// Cache groups that a block hash alone is looked for in. A model has a handful.
const GROUPS: u32 = 64;

/// Requests and keys in one order; more of them are a namespace.
const NAMED_MAX: usize = 10_000;

/// Shortest beginning of a namespace that may stand for it.
const NAMESPACE_MIN: usize = 4;

/// What the desk works with.
#[derive(Clone)]
pub struct Desk {
    store: Store,
    chains: Arc<Mutex<Chains>>,
    cluster: Cluster,
    /// One verification at a time: two would halve each other and gain nothing.
    verifying: Arc<Semaphore>,
    tasks: Tasks,
    rails: Option<MeasureRails>,
    /// One measurement at a time: two would measure each other.
    measuring: Arc<Semaphore>,
}

/// Describes the node's rails, and with `true` moves bytes over them.
pub type MeasureRails = Arc<dyn Fn(bool) -> BoxFuture<'static, Report> + Send + Sync>;

impl Desk {
    pub fn new(store: Store, cluster: Cluster, chains: Arc<Mutex<Chains>>, tasks: Tasks) -> Self {
        let (verifying, measuring) = (Arc::new(Semaphore::new(1)), Arc::new(Semaphore::new(1)));
        Self { store, cluster, chains, verifying, tasks, rails: None, measuring }
    }

    /// Who measures rails when an operator asks.
    #[must_use]
    pub fn with_rails(self, rails: MeasureRails) -> Self {
        Self { rails: Some(rails), ..self }
    }

    /// The routes, to be merged with those of [`super::admin`]. Orders need `key`.
    pub fn routes(self, key: &str) -> Router {
        let orders = Router::new()
            .route("/api/v1/store/verify", post(verify))
            .route("/api/v1/store/pin", post(pin))
            .route("/api/v1/store/unpin", post(unpin))
            .route("/api/v1/store/drop", post(drop_rows))
            .route("/api/v1/rails/measure", post(measure_rails))
            .route("/api/v1/store/forget", post(forget));
        Router::new()
            .route("/api/v1/store", get(sheet))
            .merge(operators::only(orders, key, "spark-kv"))
            .with_state(self)
    }
}

/// Everything that `ls` and `du` show.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sheet {
    pub capacity: u64,
    pub used: u64,
    pub read_only: Option<String>,
    pub pinned_rows: u64,
    pub pinned_bytes: u64,
    #[serde(flatten)]
    pub survey: Survey,
    /// All there are; `survey.segments` and `prefixes` are limited.
    pub segments_total: usize,
    pub prefixes_total: usize,
    /// Prefixes of the last requests.
    pub prefixes: Vec<PrefixUse>,
    /// The last rows that were found damaged.
    pub damages: Vec<Damage>,
}

/// By what prefixes and segments are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    /// The largest first.
    #[default]
    Bytes,
    /// Those that most of the last requests begin with first.
    Asked,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    limit: Option<usize>,
    #[serde(default)]
    by: By,
}

impl Sheet {
    /// Orders and cuts the long lists.
    #[must_use]
    pub fn limited(mut self, limit: usize, by: By) -> Self {
        self.segments_total = self.survey.segments.len();
        self.prefixes_total = self.prefixes.len();
        self.survey.segments.sort_by_key(|segment| std::cmp::Reverse(segment.bytes));
        self.prefixes.sort_by_key(|prefix| {
            let (bytes, asked) = (prefix.bytes, prefix.asked);
            std::cmp::Reverse(if by == By::Bytes { (bytes, asked) } else { (asked, bytes) })
        });
        self.survey.segments.truncate(limit);
        self.prefixes.truncate(limit);
        self
    }
}

async fn sheet(With(desk): With<Desk>, asked: Query<Asked>) -> Response {
    let Asked { limit, by } = asked.0;
    let status = desk.store.status();
    let store = desk.store.clone();
    let chains = Arc::clone(&desk.chains);
    // A pass over every row: some tens of milliseconds for a million.
    let made = tokio::task::spawn_blocking(move || Sheet {
        capacity: status.capacity,
        used: status.used,
        read_only: status.read_only,
        pinned_rows: status.pinned,
        pinned_bytes: status.pinned_bytes,
        survey: store.survey(),
        prefixes: chains.lock().prefixes(|space, key| store.bytes_of(*space, key)),
        damages: store.damages(),
        ..Sheet::default()
    });
    match made.await {
        Ok(sheet) => Json(sheet.limited(limit.unwrap_or(LIMIT).min(LIMIT_MAX), by)).into_response(),
        Err(_) => refused(StatusCode::INTERNAL_SERVER_ERROR, "the store could not be looked through"),
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Measure {
    transfer: bool,
}

async fn measure_rails(With(desk): With<Desk>, Json(asked): Json<Measure>) -> Response {
    let Some(rails) = &desk.rails else {
        return refused(StatusCode::NOT_FOUND, "this node watches no rails");
    };
    let Ok(_seat) = desk.measuring.try_acquire() else {
        return refused(StatusCode::CONFLICT, "a measurement is running already");
    };
    Json(rails(asked.transfer).await).into_response()
}

/// One line of JSON a second, and a last one with every damage.
async fn verify(With(desk): With<Desk>) -> Response {
    let Ok(seat) = desk.verifying.clone().try_acquire_owned() else {
        return refused(StatusCode::CONFLICT, "a verification is running already");
    };
    let (lines, received) = mpsc::channel::<Bytes>(4);
    let (store, tasks) = (desk.store, desk.tasks);
    tasks.spawn(Kind::Chore, "verification", run_verify(store, lines, seat));
    let body = futures_util::stream::unfold(received, async |mut received| {
        received.recv().await.map(|line| (Ok::<_, Infallible>(line), received))
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(body)).into_response()
}

async fn run_verify(store: Store, lines: mpsc::Sender<Bytes>, seat: OwnedSemaphorePermit) {
    let mut said: Option<Instant> = None;
    let end = store.verify(|so_far| {
        if said.is_none_or(|at| at.elapsed() >= LINE) {
            said = Some(Instant::now());
            // A reader that is slow misses a line; the last one is awaited.
            let _ = lines.try_send(line(&Verification { named: Vec::new(), ..so_far.clone() }));
        }
        !lines.is_closed()
    });
    let end = end.await;
    let _ = lines.send(line(&end)).await;
    drop(seat);
}

fn line(so_far: &Verification) -> Bytes {
    let mut text = serde_json::to_vec(so_far).expect("plain data has a JSON form");
    text.push(b'\n');
    text.into()
}

/// Which rows are meant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Which {
    /// Ids of last requests.
    pub requests: Vec<String>,
    /// Block hashes (64 hex digits) or keys (72).
    pub keys: Vec<String>,
    /// A namespace or its beginning: bounds what the others mean; alone, all of its rows.
    pub space: Option<String>,
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Done {
    /// Rows that the words mean.
    pub meant: u64,
    /// Rows that are other than before.
    pub changed: u64,
}

/// Whose rows are to be gone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Whose {
    /// Name of the API key; empty: rows of requests without one.
    pub owner: String,
}

/// What was forgotten.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Forgot {
    /// Keys that were destroyed on this node.
    pub keys: u64,
    /// Rows that were held under them.
    pub rows: u64,
    /// What became of it on the other nodes.
    pub others: Vec<ForgotThere>,
}

/// What was forgotten on another node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ForgotThere {
    pub node: String,
    pub keys: u64,
    pub rows: u64,
    /// Why keys may still be there. Empty: none is.
    pub trouble: String,
}

/// Why an order was not carried out.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("name rows: requests, keys or a space")]
    Nothing,
    #[error("at most {NAMED_MAX} requests and keys at a time; a namespace takes any number of rows")]
    TooMany,
    #[error("`{0}` is no key: write 64 hex digits of a block hash, or 72 with its group")]
    NoKey(String),
    #[error("`{0}` is no namespace: write at least {NAMESPACE_MIN} of its hex digits")]
    NoNamespace(String),
    #[error("no rows of namespace `{0}` are held; `spark-kv store ls` lists those that are")]
    UnknownNamespace(String),
    #[error("`{0}` can be {1}: write more of it")]
    Ambiguous(String, String),
    #[error("no request `{0}` is remembered; `spark-kv store ls` lists those that are")]
    UnknownRequest(String),
    #[error("no row of key `{0}` is held")]
    UnknownKey(String),
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let code = match &self {
            Self::Nothing | Self::TooMany | Self::NoKey(_) | Self::NoNamespace(_) | Self::Ambiguous(..) => {
                StatusCode::BAD_REQUEST
            }
            Self::UnknownNamespace(_)
            | Self::UnknownRequest(_)
            | Self::UnknownKey(_)
            | Self::Store(store::Error::UnknownOwner { .. }) => StatusCode::NOT_FOUND,
            Self::Store(store::Error::KeyNotDestroyed(_)) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Store(store::Error::Closed) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Store(_) => StatusCode::CONFLICT,
        };
        refused(code, &self.to_string())
    }
}

/// Rows by their space, in the order in which they were named.
type Meant = BTreeMap<Space, Vec<RowKey>>;

impl Desk {
    /// Spaces whose namespace begins so. More than one only when it is one namespace with several ranks.
    fn spaces(&self, asked: &str) -> Result<Vec<Space>, Refused> {
        let text = asked.to_ascii_lowercase();
        if text.len() < NAMESPACE_MIN || text.len() > 64 || !text.chars().all(|c| c.is_ascii_hexdigit()) {
            return Err(Refused::NoNamespace(short(asked)));
        }
        let begins = |space: &Space| space.namespace.to_string().starts_with(&text);
        let spaces: Vec<Space> = self.store.spaces().into_iter().filter(begins).collect();
        let Some(first) = spaces.first() else { return Err(Refused::UnknownNamespace(short(asked))) };
        match spaces.iter().find(|space| space.namespace != first.namespace) {
            None => Ok(spaces),
            Some(other) => {
                let both = format!("{:?} or {:?}", first.namespace, other.namespace);
                Err(Refused::Ambiguous(short(asked), both))
            }
        }
    }

    /// Rows that are held and that the words mean.
    fn find(&self, which: &Which) -> Result<Meant, Refused> {
        if which.requests.len() + which.keys.len() > NAMED_MAX {
            return Err(Refused::TooMany);
        }
        let within = which.space.as_deref().map(|asked| self.spaces(asked)).transpose()?;
        let mut meant = Meant::new();
        for id in &which.requests {
            let mut rows = self.chains.lock().find(id);
            rows.retain(|(space, _)| within.as_ref().is_none_or(|spaces| spaces.contains(space)));
            if rows.is_empty() {
                return Err(Refused::UnknownRequest(short(id)));
            }
            for (space, key) in rows.into_iter().filter(|(space, key)| self.store.holds(*space, key)) {
                meant.entry(space).or_default().push(key);
            }
        }
        let spaces = within.unwrap_or_else(|| self.store.spaces());
        for text in &which.keys {
            let keys = keys(text).ok_or_else(|| Refused::NoKey(short(text)))?;
            let all = spaces.iter().flat_map(|space| keys.iter().map(move |key| (*space, *key)));
            let held: Vec<_> = all.filter(|(space, key)| self.store.holds(*space, key)).collect();
            if held.is_empty() {
                return Err(Refused::UnknownKey(short(text)));
            }
            held.into_iter().for_each(|(space, key)| meant.entry(space).or_default().push(key));
        }
        Ok(meant)
    }

    /// As [`Self::find`], and a space alone means all of its rows.
    fn find_all(&self, which: &Which) -> Result<Meant, Refused> {
        if !which.requests.is_empty() || !which.keys.is_empty() {
            return self.find(which);
        }
        let spaces = self.spaces(which.space.as_deref().ok_or(Refused::Nothing)?)?;
        let rows = |space: Space| self.store.subscribe(space).0.into_iter().map(|(key, _)| key).collect();
        Ok(spaces.into_iter().map(|space| (space, rows(space))).collect())
    }
}

/// What is done to rows.
#[derive(Clone, Copy)]
enum Word {
    Pin,
    Unpin,
    Drop,
}

/// Does it to the rows that are meant, a space at a time.
async fn each(store: &Store, word: Word, meant: Meant) -> Result<Json<Done>, Refused> {
    let mut done = Done::default();
    for (space, keys) in meant {
        done.meant += keys.len() as u64;
        done.changed += match word {
            Word::Pin => store.pin(space, keys).await,
            Word::Unpin => store.unpin(space, keys).await,
            Word::Drop => store.drop_rows(space, keys).await,
        }?;
    }
    Ok(Json(done))
}

async fn pin(With(desk): With<Desk>, Json(which): Json<Which>) -> Result<Json<Done>, Refused> {
    each(&desk.store, Word::Pin, desk.find_all(&which)?).await
}

async fn unpin(With(desk): With<Desk>, Json(which): Json<Which>) -> Result<Json<Done>, Refused> {
    each(&desk.store, Word::Unpin, desk.find_all(&which)?).await
}

async fn drop_rows(With(desk): With<Desk>, Json(which): Json<Which>) -> Result<Json<Done>, Refused> {
    if which.requests.is_empty() && which.keys.is_empty() {
        let mut done = Done::default();
        for space in desk.spaces(which.space.as_deref().ok_or(Refused::Nothing)?)? {
            done.changed += desk.store.forget(space).await?;
        }
        done.meant = done.changed;
        return Ok(Json(done));
    }
    each(&desk.store, Word::Drop, desk.find(&which)?).await
}

async fn forget(With(desk): With<Desk>, Json(whose): Json<Whose>) -> Result<Json<Forgot>, Refused> {
    let here = match desk.store.forget_owner(&whose.owner).await {
        Ok(done) => Ok(done),
        // Others may know the name.
        Err(unknown @ store::Error::UnknownOwner { .. }) => Err(unknown),
        Err(error) => return Err(error.into()),
    };
    let others: Vec<ForgotThere> =
        desk.cluster.forget_owner(&whose.owner).await.into_iter().map(there).collect();
    let nobody = others.iter().all(|other| other.keys == 0);
    let store::Forgotten { keys, rows } = if nobody { here? } else { here.unwrap_or_default() };
    Ok(Json(Forgot { keys, rows, others }))
}

fn there((node, done): (String, Result<cluster::Forgotten, String>)) -> ForgotThere {
    match done {
        Ok(cluster::Forgotten { keys, rows, .. }) => ForgotThere { node, keys, rows, trouble: String::new() },
        Err(trouble) => ForgotThere { node, trouble, ..ForgotThere::default() },
    }
}

/// The keys that a text means: one, or a block's of every group.
fn keys(text: &str) -> Option<Vec<RowKey>> {
    let bytes = hex::decode(text.trim()).ok()?;
    if let Ok(key) = <[u8; RowKey::LEN]>::try_from(bytes.as_slice()) {
        return Some(vec![RowKey::from_bytes(&key)]);
    }
    let hash = BlockHash(bytes.try_into().ok()?);
    Some((0..GROUPS).map(|group| RowKey { hash, group: GroupId(group) }).collect())
}

/// What somebody sent, for a sentence of ours.
fn short(text: &str) -> String {
    text.chars().take(80).flat_map(char::escape_default).collect()
}
