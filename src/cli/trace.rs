//! `trace info`: what recorded sessions hold, and the most that a cache can save of them.

use super::TraceInfo;
use super::out::{Exit, Out, Told};
use crate::trace::{self, Info, Session};

pub(super) fn info(order: &TraceInfo) -> anyhow::Result<Exit> {
    let info = Info::of(&read(&order.files)?);
    let mut out = Out::new();
    if order.json {
        out.line(&serde_json::to_string(&info)?)?;
    } else {
        screen(&info, &mut out)?;
    }
    out.done()?;
    Ok(Exit::Done)
}

/// A file that cannot be taken is a wrong argument: trying again changes nothing.
pub(super) fn read(files: &[std::path::PathBuf]) -> anyhow::Result<Vec<Session>> {
    trace::read(files).map_err(|error| {
        let cause = std::error::Error::source(&error).map(|e| format!(": {e}")).unwrap_or_default();
        Told { exit: Exit::Usage, what: format!("{error}{cause}") }.into()
    })
}

fn screen(info: &Info, out: &mut Out) -> std::io::Result<()> {
    for (what, count) in [
        ("sessions", info.sessions as u64),
        ("sub-agents", info.sub_agents as u64),
        ("requests", info.requests as u64),
        ("unique tokens", info.unique_tokens),
        ("input tokens", info.input_tokens),
        ("output tokens", info.output_tokens),
    ] {
        out.line(&format!("{what:<24}{count:>12}"))?;
    }
    out.line(&format!("{:<24}{:>12.2} %", "ceiling over blocks", info.ceiling_pct))?;
    out.line(&format!("{:<24}{:>12.2} %", "ceiling over tokens", info.ceiling_tokens_pct))?;
    out.line("")?;
    out.line("tokens per row      cold %      warm %")?;
    for at in &info.ceiling_by_block {
        out.line(&format!("{:>14}{:>12.2}{:>12.2}", at.tokens_per_row, at.cold_pct, at.warm_pct))?;
    }
    Ok(())
}
