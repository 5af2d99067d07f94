//! `explain`: why a request went where it went, what each box would have cost, and what came of it.

use clap::Args;

use super::Layers;
use super::ask::{Running, not_found};
use super::out::{Exit, Out, Tint};
use super::status::clean;
use crate::observe::requests::Request;
use crate::router::{Basis, Fit, Terms};
use crate::settings::load;

#[derive(Debug, Args)]
pub(super) struct Explain {
    #[command(flatten)]
    layers: Layers,
    /// The request's id, as its answer's X-Request-Id says; one of the last 512 of this node.
    #[arg(value_name = "REQUEST-ID")]
    id: String,
    /// Everything that is known of it, as JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(explain: &Explain) -> anyhow::Result<Exit> {
    let running = Running::find(&load(&explain.layers.inputs().with_environment())?.places.node_file())?;
    let body = running.get(&format!("/api/v1/requests/{}", escaped(&explain.id)))?;
    let odd = |error: &dyn std::fmt::Display| {
        not_found(format!("what the node says is not to be understood: {error}"))
    };
    let request: Request = serde_json::from_slice(&body).map_err(|error| odd(&error))?;
    let mut out = Out::new();
    if explain.json {
        out.line(&serde_json::to_string_pretty(&request)?)?;
        out.done()?;
        return Ok(Exit::Done);
    }
    out.line(&out.tint(Tint::Bold, &clean(&request.why)))?;
    match &request.decision {
        None => out.line("there was nothing to decide")?,
        Some(decision) => {
            let basis: Basis = decision.read().map_err(|error| odd(&error))?;
            for line in table(&basis) {
                out.line(&line)?;
            }
            for line in outcome(&basis, &request) {
                out.line(&line)?;
            }
        }
    }
    if let Some(miss) = &request.miss {
        out.line(&out.tint(Tint::Bold, &format!("missed: {}", clean(&miss.why))))?;
        out.line(&format!("what to do: {}", clean(&miss.advice)))?;
    }
    out.done()?;
    Ok(Exit::Done)
}

/// An id as a part of a path.
fn escaped(id: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    let escape = |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    id.bytes().map(escape).collect()
}

/// The rows of the table, as one box has them.
fn rows(terms: &Terms) -> [(&'static str, String); 12] {
    let seconds = |seconds: f64| format!("{seconds:.3}");
    [
        ("requests in flight", terms.running.to_string()),
        ("tokens there", terms.cached.to_string()),
        ("tokens to compute", terms.uncached.to_string()),
        ("queue", seconds(terms.queue_s)),
        ("load, beside the queue", seconds(terms.load_s)),
        ("compute the prompt", seconds(terms.prefill_s)),
        ("others stand still meanwhile", seconds(terms.interference_s)),
        ("words, and others' words slower", seconds(terms.decode_s)),
        ("blocks pushed out", seconds(terms.eviction_s)),
        ("who comes next waits too", seconds(terms.congestion_s)),
        ("strained", seconds(terms.strain_s)),
        ("price in seconds", seconds(terms.total_s)),
    ]
}

/// The price of each box, term by term.
fn table(basis: &Basis) -> Vec<String> {
    let names: Vec<String> = basis.boxes.iter().map(|box_| clean(&box_.node)).collect();
    let widths: Vec<usize> = names.iter().map(|name| name.len().max(9)).collect();
    let line = |label: &str, cells: Vec<String>| {
        let cells = cells.iter().zip(&widths).map(|(cell, width)| format!("  {cell:>width$}"));
        format!("{label:<32}{}", cells.collect::<String>())
    };
    let mut lines = vec![line("", names)];
    let columns: Vec<_> = basis.terms.iter().map(|terms| terms.as_ref().map(rows)).collect();
    for (n, (label, _)) in rows(&Terms::default()).into_iter().enumerate() {
        let cells =
            columns.iter().map(|column| column.as_ref().map_or("-".to_owned(), |rows| rows[n].1.clone()));
        lines.push(line(label, cells.collect()));
    }
    for box_ in &basis.boxes {
        if let Fit::Unfit(why) | Fit::Strained(why) = &box_.fit {
            lines.push(format!("{}: {}", clean(&box_.node), clean(why)));
        }
    }
    lines
}

/// What was foretold, and what happened.
fn outcome(basis: &Basis, request: &Request) -> Vec<String> {
    let Some(terms) = basis.terms() else { return Vec::new() };
    let about = if basis.request.approximate { "about " } else { "" };
    let tokens = basis.request.tokens;
    let mut lines = vec![format!(
        "foretold: first token in {:.2} s, {about}{} of {tokens} tokens from a cache",
        terms.ttft_s(),
        terms.cached
    )];
    let ttft = request.ttft_ms.map(|ms| format!("first token in {:.2} s", ms as f64 / 1000.0));
    let cached = request.cached_tokens.zip(request.prompt_tokens);
    let cached = cached.map(|(cached, prompt)| format!("{cached} of {prompt} tokens from a cache"));
    let seen: Vec<String> = ttft.into_iter().chain(cached).collect();
    if !seen.is_empty() {
        lines.push(format!("it was:   {}", seen.join(", ")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_a_part_of_a_path() {
        assert_eq!(escaped("a-1_b.~"), "a-1_b.~");
        assert_eq!(escaped("a/b c%"), "a%2Fb%20c%25");
    }
}
