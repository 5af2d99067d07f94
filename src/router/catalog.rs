//! `/v1/models` over all nodes: the own engine's answer as it is while it names everything, else with the entries
//! that only another node has, and the aliases of models that are there, at its end.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::Response;
use http::header::{self, HeaderValue};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::flight::{End, Flight};
use super::passage::Passage;
use super::relay::{Call, To};
use super::{Aim, Ask, Carried, Endpoint, Fit, Refusal, Router};

/// A list of models is some kilobytes; what is larger is none.
const LIST_MAX: usize = 1 << 20;

#[derive(Deserialize)]
struct List<'a> {
    #[serde(borrow)]
    data: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct Entry<'a> {
    #[serde(borrow)]
    id: std::borrow::Cow<'a, str>,
}

/// One list out of several. An entry that an earlier list has is left out; what is no list counts as empty.
fn merge(lists: &[Bytes]) -> Bytes {
    #[derive(Serialize)]
    struct Out<'a> {
        object: &'static str,
        data: Vec<&'a RawValue>,
    }
    let mut out = Out { object: "list", data: Vec::new() };
    let mut seen = Vec::new();
    for list in lists {
        let Ok(list) = serde_json::from_slice::<List<'_>>(list) else { continue };
        for entry in list.data {
            let Ok(Entry { id }) = serde_json::from_str(entry.get()) else { continue };
            if !seen.contains(&id) {
                seen.push(id);
                out.data.push(entry);
            }
        }
    }
    serde_json::to_vec(&out).unwrap_or_default().into()
}

impl Router {
    /// Answers `GET /v1/models`. `aliases`: models by the other names that they have here.
    pub async fn catalog(
        &self,
        mut flight: Flight,
        aim: Aim,
        call: Call,
        aliases: &BTreeMap<String, String>,
    ) -> Result<Response<Carried>, Refusal> {
        let ask = Ask::bare(Endpoint::Models);
        let own = self.shared.own();
        let more: Vec<String> = self
            .shared
            .peers()
            .into_iter()
            .filter(|peer| !matches!(peer.fit(), Fit::Unfit(_)))
            .filter(|peer| {
                peer.note.iter().flat_map(|note| &note.models).any(|name| !own.models.contains(name))
            })
            .map(|peer| peer.name)
            .collect();
        let plain = more.is_empty() && aliases.is_empty();
        if aim != Aim::Near || plain || matches!(own.fit, Fit::Unfit(_)) {
            return self.carry(flight, ask, aim, call).await;
        }
        flight.placed(self.name(), 0, "all nodes are asked what they serve".into(), None);
        flight.sent();
        let mut lists = Vec::new();
        lists.extend(self.list(To::Engine(&own.url), &call).await);
        for name in &more {
            lists.extend(self.list(To::Peer { name, own: self.name() }, &call).await);
        }
        if lists.is_empty() {
            let refusal = Refusal::NotReady("no node answers".into());
            flight.refused(refusal.status());
            return Err(refusal);
        }
        lists.push(self.named_otherwise(aliases));
        flight.answered(200);
        let headers = self.dress(&flight, header::HeaderMap::new());
        let body = merge(&lists);
        if body.is_empty() {
            flight.ended(End::Broken);
        }
        let mut response = Response::new(Carried::from(Passage::of(body, flight)));
        *response.headers_mut() = headers;
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(response)
    }

    /// A list of the aliases whose model is there.
    fn named_otherwise(&self, aliases: &BTreeMap<String, String>) -> Bytes {
        let there = aliases.iter().filter(|(_, model)| self.serves(model));
        let entry = |(alias, model): (&String, &String)| serde_json::json!({"id": alias, "object": "model", "owned_by": "spark-kv", "root": model});
        let list = serde_json::json!({"object": "list", "data": there.map(entry).collect::<Vec<_>>()});
        list.to_string().into()
    }

    /// One node's list. A node that does not give one is left out: the others' models are still there.
    async fn list(&self, to: To<'_>, call: &Call) -> Option<Bytes> {
        let answer: Response<Incoming> = self.relay.send(to, call, self.idle).await.ok()?;
        if !answer.status().is_success() {
            return None;
        }
        let body = Limited::new(answer.into_body(), LIST_MAX).collect();
        Some(tokio::time::timeout(self.idle, body).await.ok()?.ok()?.to_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_kept_as_they_are_and_named_once() {
        let merged = merge(&[
            Bytes::from_static(br#"{"object":"list","data":[{"id":"a","x": 1.50}]}"#),
            Bytes::from_static(b"no list"),
            Bytes::from_static(br#"{"data":[{"id":"a"},{"no":"id"},{"id":"b" }]}"#),
        ]);
        assert_eq!(merged, &br#"{"object":"list","data":[{"id":"a","x": 1.50},{"id":"b" }]}"#[..]);
    }
}
