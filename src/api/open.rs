//! The open API: OpenAI's and Anthropic's endpoints as the engine has them, on either node, for both.
//!
//! What comes in goes to the engine byte for byte, and its answer comes back so, with the headers that belong to
//! one connection left out and these added: `x-request-id` (the client's, or one that was made), `x-spark-box`
//! (the node whose engine answered) and `x-spark-router-us` (what the routers added).
//!
//! Five exceptions, each a span of the body and no more. `/v1/responses` does not heed `X-Request-Id` but takes its id
//! out of the body; where the body has no `request_id`, one (`resp_` and the id) is put in front of its first field. A
//! stream is asked for its usage where the client did not, and the event with it is left out of the answer. A model that
//! is called by an alias (`router.aliases`) is called by its own name there, and by the alias in the answer. Prompts of a
//! key that is isolated get a `cache_salt`. Claude Code's billing line is left out of the system prompt
//! (`router.drop_billing_line`).
//!
//! A request may say where it is to be served: `x-spark-box: <name>` binds it to a node. `x-spark-forwarded` from
//! a client means no more than "serve it here".

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::{Body, HttpBody};
use axum::routing::{MethodRouter, any, get, post};
use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{Request, Response};

use super::keys::Keys;
use super::{body, errors};
use crate::base::units;
use crate::router::{
    Aim, Alias, Ask, BOX, Call, Carried, Class, Endpoint, FORWARDED, Flight, OWNER, PRIORITY, REQUEST_ID,
    Refusal, Rights, Router, drop_nonce, splice,
};

/// The open API. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Open(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    router: Router,
    keys: Keys,
    limits: Limits,
}

/// What is taken in, and under which names.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Largest body.
    pub max_body: units::Bytes,
    /// `router.drop_billing_line`.
    pub drop_billing_line: bool,
    /// Models by the names that clients may use for them beside their own.
    pub aliases: BTreeMap<String, String>,
}

/// Where a request comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// The public port.
    Public,
    /// A connection from another node, which proved who it is when it was made. Its requests are served here or
    /// refused.
    Relay,
}

/// How many times the limit of a body is read from one that is refused, so that most clients get to the answer.
const LINGER_TIMES: u64 = 4;

/// Bodies from this size on are read by a thread that may block: a megabyte takes some milliseconds.
const LARGE: usize = 1 << 20;

impl Open {
    pub fn new(router: Router, keys: Keys, limits: Limits) -> Self {
        Self(Arc::new(Inner { router, keys, limits }))
    }

    pub fn router(&self) -> &Router {
        &self.0.router
    }

    pub fn keys(&self) -> &Keys {
        &self.0.keys
    }

    /// The routes, for requests that come in at `entry`.
    pub fn routes(&self, entry: Entry) -> axum::Router {
        let to = |endpoint: Endpoint| {
            let open = self.clone();
            move |request: Request<Body>| open.clone().serve(entry, endpoint, request)
        };
        let other = |endpoint: Endpoint, refuse: fn(&Parts) -> Refusal| {
            let open = self.clone();
            move |request: Request<Body>| open.clone().refuse(endpoint, request, refuse)
        };
        let posted = |endpoint| post(to(endpoint)).fallback(other(endpoint, wrong_method));
        let got = |endpoint| -> MethodRouter { get(to(endpoint)).fallback(other(endpoint, wrong_method)) };
        axum::Router::new()
            .route("/v1/chat/completions", posted(Endpoint::Chat))
            .route("/v1/completions", posted(Endpoint::Completions))
            .route("/v1/messages", posted(Endpoint::Messages))
            .route("/v1/messages/count_tokens", posted(Endpoint::CountTokens))
            .route("/v1/responses", posted(Endpoint::Responses))
            .route("/v1/responses/{id}", got(Endpoint::ResponseById))
            .route("/v1/responses/{id}/cancel", posted(Endpoint::ResponseById))
            .route("/v1/models", got(Endpoint::Models))
            .route("/tokenize", posted(Endpoint::Tokenize))
            .route("/detokenize", posted(Endpoint::Detokenize))
            .route("/v1/embeddings", posted(Endpoint::Plain))
            .route("/v1/score", posted(Endpoint::Plain))
            .route("/v1/rerank", posted(Endpoint::Plain))
            .route("/rerank", posted(Endpoint::Plain))
            .route("/score", posted(Endpoint::Plain))
            .route("/pooling", posted(Endpoint::Plain))
            .route("/classify", posted(Endpoint::Plain))
            .route("/v1/{*rest}", any(other(Endpoint::Unknown, no_route)))
    }

    async fn refuse(
        self,
        endpoint: Endpoint,
        request: Request<Body>,
        refuse: fn(&Parts) -> Refusal,
    ) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let refusal = self.0.keys.check(&parts.headers).err().unwrap_or_else(|| refuse(&parts));
        self.0.router.turned_away(endpoint, &refusal);
        self.turn_away(endpoint, &request_id(&parts.headers), &refusal, &parts, body).await
    }

    async fn turn_away(
        &self,
        endpoint: Endpoint,
        id: &str,
        refusal: &Refusal,
        parts: &Parts,
        body: Body,
    ) -> Response<Body> {
        // A client that waits for our word has not sent its body yet, and now will not.
        let waits = parts.headers.contains_key(header::EXPECT);
        let whole = body.is_end_stream()
            || (!waits && body::linger(body, self.0.limits.max_body.0.saturating_mul(LINGER_TIMES)).await);
        errors::response(endpoint, id, refusal, !whole)
    }

    async fn serve(self, entry: Entry, endpoint: Endpoint, request: Request<Body>) -> Response<Body> {
        let (mut parts, mut body) = request.into_parts();
        let id = request_id(&parts.headers);
        let (flight, bytes) = match self.take_in(entry, endpoint, &id, &parts, &mut body).await {
            Ok(taken) => taken,
            Err(refusal) => return self.turn_away(endpoint, &id, &refusal, &parts, body).await,
        };
        match Box::pin(self.answer(entry, flight, &mut parts, bytes)).await {
            Ok(answer) => answer.map(Body::new),
            Err(refusal) => errors::response(endpoint, &id, &refusal, false),
        }
    }

    /// Lets a request in: key, room, body, in this order, so that a stranger's body costs nothing.
    async fn take_in(
        &self,
        entry: Entry,
        endpoint: Endpoint,
        id: &str,
        parts: &Parts,
        body: &mut Body,
    ) -> Result<(Flight, Bytes), Refusal> {
        let Inner { router, keys, limits } = &*self.0;
        let (from, owner, rights) = match entry {
            Entry::Relay => {
                let from = text(&parts.headers, &FORWARDED).unwrap_or("peer").to_owned();
                let told = text(&parts.headers, &OWNER).and_then(|name| hex::decode(name).ok());
                (Some(from), told.and_then(|name| String::from_utf8(name).ok()), None)
            }
            Entry::Public => match keys.guest(&parts.headers) {
                Ok(None) => (None, None, Some(Rights::default())),
                Ok(Some((name, rights))) => (None, Some(name.to_owned()), Some(rights.clone())),
                Err(refusal) => {
                    router.turned_away(endpoint, &refusal);
                    return Err(refusal);
                }
            },
        };
        let mut flight = router.admit(endpoint, id.to_owned(), from)?;
        if let Some(owner) = owner {
            flight.belongs_to(&owner);
        }
        // The node that passed it on has seen to what its key may do.
        if let Some(rights) = rights {
            let may = class(&parts.headers).and_then(|asked| flight.may(rights, asked));
            if let Err(refusal) = may {
                flight.refused(refusal.status());
                return Err(refusal);
            }
        }
        match body::read(body, limits.max_body.0).await {
            Ok(bytes) => {
                flight.body_arrived();
                Ok((flight, bytes))
            }
            Err(refusal) => {
                flight.refused(refusal.status());
                Err(refusal)
            }
        }
    }

    async fn answer(
        &self,
        entry: Entry,
        mut flight: Flight,
        parts: &mut Parts,
        mut bytes: Bytes,
    ) -> Result<Response<Carried>, Refusal> {
        let Inner { router, keys, limits } = &*self.0;
        let endpoint = flight.endpoint();
        if limits.drop_billing_line {
            bytes = drop_nonce(endpoint, &bytes);
        }
        let read = match endpoint {
            Endpoint::Models | Endpoint::ResponseById => Ok(Ask::bare(endpoint)),
            _ => self.read(endpoint, &parts.headers, &bytes, flight.salt().cloned()).await,
        };
        let ask = match read.and_then(|ask| router.knows(&ask).map(|()| ask)) {
            Ok(ask) => ask,
            Err(refusal) => {
                flight.refused(refusal.status());
                return Err(refusal);
            }
        };
        let alias = ask.alias.clone().zip(ask.model.clone()).map(|(alias, model)| Alias { alias, model });
        let (spliced, undo) =
            splice(endpoint, ask.stream, &bytes, &ask.spans, alias, flight.salt().map(|salt| &**salt));
        bytes = spliced;
        if endpoint == Endpoint::Responses && ask.request_id.is_none() {
            bytes = body::with_request_id(&bytes, flight.engine_id());
        }
        let aim = self.aim(entry, &ask, parts);
        let mut headers = std::mem::take(&mut parts.headers);
        if keys.required() {
            // Our keys are nobody's business further on.
            headers.remove(header::AUTHORIZATION);
            headers.remove("x-api-key");
        }
        if let Ok(id) = HeaderValue::from_str(flight.id()) {
            headers.insert(REQUEST_ID, id);
        }
        // Whatever a client says there.
        headers.remove(OWNER);
        if let Some(owner) = flight.owner().and_then(|name| HeaderValue::from_str(&hex::encode(name)).ok()) {
            headers.insert(OWNER, owner);
        }
        let target = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let call = Call { method: parts.method.clone(), target, headers, body: bytes, undo };
        match endpoint {
            Endpoint::Models => router.catalog(flight, aim, call, &limits.aliases).await,
            _ => router.carry(flight, ask, aim, call).await,
        }
    }

    async fn read(
        &self,
        endpoint: Endpoint,
        headers: &HeaderMap,
        bytes: &Bytes,
        salt: Option<Arc<str>>,
    ) -> Result<Ask, Refusal> {
        let malformed = |error: serde_json::Error| Refusal::Malformed(error.to_string());
        let inner = Arc::clone(&self.0);
        let own = move |called: &str| {
            let model = inner.limits.aliases.get(called)?;
            (!inner.router.serves(called)).then(|| model.clone())
        };
        if bytes.len() < LARGE {
            return Ask::read_as(endpoint, headers, bytes, own, salt.as_deref()).map_err(malformed);
        }
        let (headers, bytes) = (headers.clone(), bytes.clone());
        let reading = tokio::task::spawn_blocking(move || {
            Ask::read_as(endpoint, &headers, &bytes, own, salt.as_deref())
        });
        reading.await.map_err(|error| Refusal::Malformed(error.to_string()))?.map_err(malformed)
    }

    fn aim(&self, entry: Entry, ask: &Ask, parts: &Parts) -> Aim {
        let router = &self.0.router;
        let asked_for = text(&parts.headers, &BOX);
        let forwarded = text(&parts.headers, &FORWARDED);
        let held = match ask.endpoint {
            Endpoint::ResponseById => parts.uri.path().split('/').nth(3),
            _ => ask.previous.as_deref(),
        };
        match (entry, asked_for, held.and_then(|id| router.holder(id))) {
            (Entry::Relay, ..) => Aim::Here(format!("{} passed it on", forwarded.unwrap_or("a peer"))),
            (_, Some(node), _) => Aim::Pinned(node.to_owned()),
            _ if forwarded.is_some() => Aim::Here("the request asks to be served here".into()),
            (_, _, Some(node)) => Aim::Held(node),
            _ if ask.endpoint.generates() || ask.endpoint == Endpoint::Plain => Aim::Best,
            _ => Aim::Near,
        }
    }
}

fn wrong_method(parts: &Parts) -> Refusal {
    Refusal::WrongMethod { method: parts.method.to_string(), path: shown(parts.uri.path()) }
}

fn no_route(parts: &Parts) -> Refusal {
    Refusal::NoRoute { method: parts.method.to_string(), path: shown(parts.uri.path()) }
}

fn shown(path: &str) -> String {
    path.chars().take(256).collect()
}

/// The class that a request asks for.
fn class(headers: &HeaderMap) -> Result<Option<Class>, Refusal> {
    let Some(value) = headers.get(PRIORITY) else { return Ok(None) };
    let name = String::from_utf8_lossy(value.as_bytes());
    let unknown = || Refusal::UnknownClass(name.chars().take(64).collect());
    Class::named(&name).map(Some).ok_or_else(unknown)
}

fn text<'h>(headers: &'h HeaderMap, name: &header::HeaderName) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// Longer ids are cut: they appear in logs, pages and the engine's own ids.
const ID_CHARS_MAX: usize = 128;

/// The id of a request: the client's, cleaned of what could not stand in a header, a log line or a JSON string, or
/// a new one.
fn request_id(headers: &HeaderMap) -> String {
    let brought = headers.get(REQUEST_ID).map(HeaderValue::as_bytes).unwrap_or_default();
    let clean: String = brought
        .iter()
        .map(|byte| char::from(*byte))
        .filter(|c| c.is_ascii_alphanumeric() || "-_.:~+=@/".contains(*c))
        .take(ID_CHARS_MAX)
        .collect();
    if clean.is_empty() { hex::encode(rand::random::<[u8; 16]>()) } else { clean }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(brought: &[u8]) -> String {
        request_id(&HeaderMap::from_iter([(REQUEST_ID, HeaderValue::from_bytes(brought).unwrap())]))
    }

    #[test]
    fn an_id_is_kept_cleaned_and_cut() {
        assert_eq!(id(b"req-1.2:3"), "req-1.2:3");
        assert_eq!(id(b"a\" b\\c\xff<d>"), "abcd");
        assert_eq!(id("x".repeat(500).as_bytes()).len(), 128);
    }

    #[test]
    fn an_id_is_made_where_there_is_none() {
        let (one, two) = (request_id(&HeaderMap::new()), id(b"\"\""));
        assert!(one.len() == 32 && two.len() == 32 && one != two);
    }
}
