//! `store`: what the operator does with the rows on the drive.
//!
//! Looking and verifying go through the node when one runs, and into its folder, under the folder's lock, when none
//! does. So does forgetting an owner. Pins and drops are the running node's to keep.

use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, Subcommand, ValueEnum};

use super::Layers;
use super::ask::{Running, not_found};
use super::out::{Exit, Out, Tint, Told, say};
use super::status::{about, ago, clean};
use crate::api::desk::{By, Done, Forgot, ForgotThere, Sheet, Which, Whose};
use crate::base::clock::unix_seconds;
use crate::observe::chains::PrefixUse;
use crate::settings::load;
use crate::store::{Error, Forgotten, GroupUse, SegmentUse, Shut, ShutError, SpaceUse, Verification};

/// Between two words about how far a verification is.
const WORD: Duration = Duration::from_secs(2);

#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// List spaces, the largest segments, and the prefixes of the last requests.
    Ls(Ls),
    /// Sum up rows and bytes by namespace, cache group and position; bytes per token by group.
    Du(Look),
    /// Read every row back and check it. Exit code 1 when something is damaged. Through the running node damaged rows
    /// are dropped from it; without one the folder is only read.
    Verify(Look),
    /// Keep rows whatever else needs their room, over restarts too. Needs a running node.
    Pin(Name),
    /// End pins. Needs a running node.
    Unpin(Name),
    /// Take rows out for good, pinned ones too. Needs a running node.
    Drop(Name),
    /// Destroy the keys that rows of an API key are sealed under: nobody can read those rows any more. Rows that several
    /// share are under the key of whoever computed them first. To be said on each box; a node that does not run need not
    /// be started for it.
    Forget(Forget),
}

#[derive(Debug, Args)]
pub(super) struct Forget {
    #[command(flatten)]
    layers: Layers,
    /// Name of the API key (the part before the colon in `listen.api_keys_file`). Empty: rows of requests without one.
    #[arg(long, value_name = "NAME")]
    key: String,
    /// What was done, as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(super) struct Look {
    #[command(flatten)]
    layers: Layers,
    /// Everything, as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(super) struct Ls {
    #[command(flatten)]
    look: Look,
    /// Segments and prefixes that are listed at most.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    limit: u32,
    /// What comes first: the largest prefixes, or those that most of the last requests begin with.
    #[arg(long, value_enum, default_value_t = Order::Bytes)]
    by: Order,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Order {
    Bytes,
    Asked,
}

#[derive(Debug, Args)]
pub(super) struct Name {
    #[command(flatten)]
    layers: Layers,
    /// Ids of last requests (`X-Request-Id`): the rows of their prompts. `store ls` and `status` list them.
    #[arg(value_name = "REQUEST")]
    requests: Vec<String>,
    /// A row: 64 hex digits of its block hash, or 72 with its group. Can be given again.
    #[arg(long, value_name = "HEX")]
    key: Vec<String>,
    /// A namespace or its beginning. Alone: all of its rows. With the others: only rows of it are meant.
    #[arg(long, value_name = "NAMESPACE")]
    space: Option<String>,
    /// What was done, as JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(verb: Verb) -> anyhow::Result<Exit> {
    match verb {
        Verb::Ls(ls) => list(&ls),
        Verb::Du(look) => sum(&look),
        Verb::Verify(look) => verify(&look),
        Verb::Pin(name) => order("pin", "pinned", name),
        Verb::Unpin(name) => order("unpin", "unpinned", name),
        Verb::Drop(name) => order("drop", "dropped", name),
        Verb::Forget(whose) => forget(whose),
    }
}

/// Where the rows are reached.
enum Place {
    Running(Running),
    Shut(Box<Shut>),
}

fn place(layers: &Layers) -> anyhow::Result<Place> {
    let loaded = load(&layers.inputs().with_environment())?;
    let running = Running::find(&loaded.places.node_file());
    if let Ok(running) = running
        && running.answers()
    {
        return Ok(Place::Running(running));
    }
    match Shut::lock(&loaded.places.segments(), &loaded.places.store_keys()) {
        Ok(shut) => Ok(Place::Shut(Box::new(shut))),
        Err(error @ (ShutError::NoStore(_) | ShutError::InUse(_))) => {
            Err(not_found(format!("no node answers, and {error}")))
        }
        Err(error) => Err(error.into()),
    }
}

fn sheet(layers: &Layers, limit: u32, by: Order) -> anyhow::Result<(Sheet, bool)> {
    let (word, by) = match by {
        Order::Bytes => ("bytes", By::Bytes),
        Order::Asked => ("asked", By::Asked),
    };
    match place(layers)? {
        Place::Running(running) => {
            let body = running.get(&format!("/api/v1/store?limit={limit}&by={word}"))?;
            let sheet = serde_json::from_slice(&body)
                .map_err(|error| not_found(format!("what the node says is not to be understood: {error}")))?;
            Ok((sheet, true))
        }
        Place::Shut(shut) => {
            let sheet = Sheet { survey: shut.survey(), ..Sheet::default() };
            Ok((sheet.limited(usize::try_from(limit)?, by), false))
        }
    }
}

fn json(sheet: &impl serde::Serialize, out: &mut Out) -> anyhow::Result<()> {
    out.line(&serde_json::to_string_pretty(sheet)?)?;
    Ok(())
}

fn list(ls: &Ls) -> anyhow::Result<Exit> {
    let (sheet, running) = sheet(&ls.look.layers, ls.limit, ls.by)?;
    let mut out = Out::new();
    if ls.look.json {
        json(&sheet, &mut out)?;
        out.done()?;
        return Ok(Exit::Done);
    }
    head(&sheet, running, &mut out)?;
    for space in &sheet.survey.spaces {
        out.line(&format!("  {}", space_words(space)))?;
    }
    let now = unix_seconds();
    part(&mut out, "segments, the largest first", sheet.survey.segments.len(), sheet.segments_total)?;
    for segment in &sheet.survey.segments {
        out.line(&format!("  {}", segment_words(segment, now)))?;
    }
    if running {
        let by = match ls.by {
            Order::Bytes => "prefixes of the last requests, the largest first",
            Order::Asked => "prefixes of the last requests, the most asked first",
        };
        part(&mut out, by, sheet.prefixes.len(), sheet.prefixes_total)?;
        for prefix in &sheet.prefixes {
            out.line(&format!("  {}", prefix_words(prefix)))?;
        }
    }
    out.done()?;
    Ok(Exit::Done)
}

fn head(sheet: &Sheet, running: bool, out: &mut Out) -> std::io::Result<()> {
    let survey = &sheet.survey;
    let rows = format!("{} rows, {} of payload", survey.rows, about(survey.bytes));
    if !running {
        return out.line(&format!("{rows} (no node runs)"));
    }
    let taken = format!("{} of {} taken", about(sheet.used), about(sheet.capacity));
    out.line(&format!("{rows}; {taken}; {} rows pinned ({})", sheet.pinned_rows, about(sheet.pinned_bytes)))?;
    if let Some(why) = &sheet.read_only {
        out.line(&out.tint(Tint::Warn, &format!("! no rows are taken: {}", clean(why))))?;
    }
    Ok(())
}

fn part(out: &mut Out, title: &str, shown: usize, all: usize) -> std::io::Result<()> {
    out.line("")?;
    let cut = if shown < all { format!(" ({shown} of {all})") } else { String::new() };
    out.line(&format!("{}{cut}", out.tint(Tint::Bold, title)))
}

fn space_words(space: &SpaceUse) -> String {
    let attached = if space.attached { ", in use" } else { "" };
    let SpaceUse { namespace, rank, ranks, rows, bytes, .. } = space;
    format!("{} rank {rank}/{ranks}: {rows} rows, {}{attached}", clean(namespace), about(*bytes))
}

fn segment_words(segment: &SegmentUse, now: u64) -> String {
    let verified = match segment.verified_unix {
        Some(at) => format!(", verified {}", ago(now, at).replacen("for ", "", 1) + " ago"),
        None => String::new(),
    };
    format!("{} {} rows, {}{verified}", clean(&segment.file), segment.rows, about(segment.bytes))
}

fn prefix_words(prefix: &PrefixUse) -> String {
    let PrefixUse { request, tokens, rows, bytes, asked, .. } = prefix;
    let times = if *asked == 1 { "once".to_owned() } else { format!("{asked} times") };
    format!("{tokens} tokens, {rows} rows, {}, asked {times}: {}", about(*bytes), clean(request))
}

fn sum(look: &Look) -> anyhow::Result<Exit> {
    let (sheet, running) = sheet(&look.layers, 0, Order::Bytes)?;
    let mut out = Out::new();
    if look.json {
        json(&sheet.survey.spaces, &mut out)?;
        out.done()?;
        return Ok(Exit::Done);
    }
    head(&sheet, running, &mut out)?;
    for space in &sheet.survey.spaces {
        out.line("")?;
        out.line(&out.tint(Tint::Bold, &space_words(space)))?;
        for group in &space.groups {
            group_lines(group, &mut out)?;
        }
    }
    out.done()?;
    Ok(Exit::Done)
}

fn group_lines(group: &GroupUse, out: &mut Out) -> std::io::Result<()> {
    out.line(&format!(
        "  group {}: {} rows, {}; a row spans {} tokens, {:.0} bytes per token; up to token {}",
        group.group,
        group.rows,
        about(group.bytes),
        group.tokens_per_row,
        group.bytes_per_token,
        group.deepest
    ))?;
    for band in &group.bands {
        let to = band.up_to.map_or("the end".to_owned(), |to| format!("token {to}"));
        out.line(&format!("    to {to:13} {:>9} rows {:>10}", band.rows, about(band.bytes)))?;
    }
    Ok(())
}

/// Says now and then how far it is.
struct Words {
    begin: Instant,
    said: Instant,
}

impl Words {
    fn new() -> Self {
        Self { begin: Instant::now(), said: Instant::now() }
    }

    fn rate(&self, so_far: &Verification) -> String {
        let seconds = self.begin.elapsed().as_secs_f64().max(0.001);
        format!("{:.0} MB/s", so_far.bytes as f64 / 1e6 / seconds)
    }

    fn hear(&mut self, so_far: &Verification) {
        if self.said.elapsed() >= WORD {
            self.said = Instant::now();
            let Verification { segments, segments_total, rows, bytes, damaged, .. } = so_far;
            let (bytes, rate) = (about(*bytes), self.rate(so_far));
            say(&format!(
                "{segments} of {segments_total} segments, {rows} rows, {bytes}, {rate}, {damaged} damaged"
            ));
        }
    }
}

fn verify(look: &Look) -> anyhow::Result<Exit> {
    let mut words = Words::new();
    let end = match place(&look.layers)? {
        Place::Shut(shut) => shut.verify(|so_far| {
            words.hear(so_far);
            true
        }),
        Place::Running(running) => {
            let mut last = Verification::default();
            running.order("/api/v1/store/verify", "{}", |line| {
                last = serde_json::from_str(line).context("what the node says is not to be understood")?;
                words.hear(&last);
                Ok(())
            })?;
            last
        }
    };
    let mut out = Out::new();
    if look.json {
        let mut whole = serde_json::to_value(&end)?;
        whole["seconds"] = words.begin.elapsed().as_secs_f64().into();
        out.line(&whole.to_string())?;
    } else {
        let rate = words.rate(&end);
        let Verification { segments, rows, bytes, damaged, unkeyed, .. } = &end;
        out.line(&format!("{segments} segments, {rows} rows, {} read back, {rate}", about(*bytes)))?;
        if *unkeyed > 0 {
            out.line(&format!(
                "{unkeyed} of them are sealed under keys that are not here, and were not opened"
            ))?;
        }
        for damage in &end.named {
            let what = format!("! {} at byte {}: {}", clean(&damage.file), damage.offset, clean(&damage.why));
            let key =
                if damage.key.is_empty() { String::new() } else { format!(" (key {})", clean(&damage.key)) };
            out.line(&format!("  {}{key}", out.tint(Tint::Bad, &what)))?;
        }
        if *damaged == 0 {
            out.line("nothing is damaged")?;
        } else {
            out.line(&format!(
                "{damaged} damaged; their prompts are computed again. Look at the drive: smartctl -a"
            ))?;
        }
    }
    out.done()?;
    if !end.done {
        anyhow::bail!("the verification ended before everything was looked at");
    }
    Ok(if end.damaged > 0 { Exit::Failed } else { Exit::Done })
}

fn forget(whose: Forget) -> anyhow::Result<Exit> {
    let Forget { layers, key: owner, json } = whose;
    let (told, is_running) = match place(&layers)? {
        Place::Running(running) => {
            let whose = serde_json::to_string(&Whose { owner })?;
            let answer = running.order_whole("/api/v1/store/forget", &whose)?;
            let told = serde_json::from_str(&answer).context("what the node says is not to be understood")?;
            (told, true)
        }
        Place::Shut(shut) => {
            let Forgotten { keys, rows } = shut.forget_owner(&owner).map_err(|error| match error {
                Error::UnknownOwner { .. } => not_found(error.to_string()),
                error => error.into(),
            })?;
            (Forgot { keys, rows, others: Vec::new() }, false)
        }
    };
    let mut out = Out::new();
    if json {
        out.line(&serde_json::to_string(&told)?)?;
    } else {
        let gone = |keys, rows| format!("{keys} keys destroyed; {rows} rows can be read by nobody any more");
        out.line(&gone(told.keys, told.rows))?;
        for ForgotThere { node, keys, rows, trouble } in &told.others {
            let node = clean(node);
            match trouble.as_str() {
                "" => out.line(&format!("on {node}: {}", gone(*keys, *rows)))?,
                why => {
                    let what =
                        format!("! {node} may still have keys of its own ({}): run this there", clean(why));
                    out.line(&out.tint(Tint::Warn, &what))?;
                }
            }
        }
        if !is_running {
            out.line("no node runs here, so no others are known: if there are, run this there too")?;
        }
    }
    out.done()?;
    let all = told.others.iter().all(|other| other.trouble.is_empty());
    Ok(if all { Exit::Done } else { Exit::Failed })
}

fn order(verb: &str, done: &str, name: Name) -> anyhow::Result<Exit> {
    let Name { layers, requests, key: keys, space, json } = name;
    if requests.is_empty() && keys.is_empty() && space.is_none() {
        let what = "name the rows: ids of requests, --key HEX, or --space NAMESPACE".to_owned();
        return Err(Told { exit: Exit::Usage, what }.into());
    }
    let loaded = load(&layers.inputs().with_environment())?;
    let running = Running::find(&loaded.places.node_file())?;
    let which = serde_json::to_string(&Which { requests, keys, space })?;
    let answer = running.order_whole(&format!("/api/v1/store/{verb}"), &which)?;
    let told: Done = serde_json::from_str(&answer).context("what the node says is not to be understood")?;
    let mut out = Out::new();
    if json {
        out.line(&answer)?;
    } else {
        out.line(&format!("{} of {} rows {done}", told.changed, told.meant))?;
    }
    out.done()?;
    Ok(Exit::Done)
}
