//! `sim`: plays recorded sessions against the store and its rivals, and prints what each lost.

use super::Sim;
use super::out::{Exit, Out, Told};
use crate::base::units::Bytes;
use crate::sim::{self, Capacity, Kind, Options, Policy, Report, Run};

pub(super) fn play(order: Sim) -> anyhow::Result<Exit> {
    let sessions = super::trace::read(&order.traces)?;
    let options = Options {
        capacities: order.capacity,
        policies: order.policy,
        row_tokens: order.row_tokens,
        bytes_per_token: order.bytes_per_token,
        state_groups: order.state_groups,
        segment: order.segment,
        at_once: order.sessions_at_once,
        seed: order.seed,
    };
    let report = sim::run(&sessions, &options).map_err(told)?;
    let mut out = Out::new();
    if order.json {
        out.line(&serde_json::to_string(&report)?)?;
    } else {
        screen(&report, &mut out)?;
    }
    out.done()?;
    Ok(Exit::Done)
}

/// What follows from the arguments is said as such; the rest is a failure.
fn told(error: sim::Error) -> anyhow::Error {
    use sim::Error::{Failed, Io, Nothing, Option, Row, Rows, Small, Store};
    match error {
        Nothing | Rows(_) | Option(_) | Small { .. } | Row { .. } => {
            Told { exit: Exit::Usage, what: error.to_string() }.into()
        }
        Store(_) | Io(_) | Failed(_) => error.into(),
    }
}

pub(super) fn capacity(text: &str) -> Result<Capacity, String> {
    let Some(pct) = text.strip_suffix('%') else {
        return text
            .parse::<Bytes>()
            .map(Capacity::Bytes)
            .map_err(|e| format!("{e}, or a share such as `25%`"));
    };
    match pct.trim().parse::<f64>() {
        Ok(pct) if pct > 0.0 && pct <= 1000.0 => Ok(Capacity::Percent(pct)),
        _ => Err(format!("`{text}` is no share: write a number above 0 and up to 1000 before the %")),
    }
}

pub(super) fn policy(text: &str) -> Result<Policy, String> {
    let named = Policy::ALL.into_iter().find(|p| p.name() == text);
    named.ok_or_else(|| "it is none of worth, lru, s3fifo, sieve".to_owned())
}

fn screen(report: &Report, out: &mut Out) -> std::io::Result<()> {
    out.line(&format!(
        "{} sessions, {} requests, {:.1} M prompt tokens; a request finds {:.1} sessions open, seed {}",
        report.sessions,
        report.requests,
        report.prompt_tokens as f64 / 1e6,
        report.sessions_open_mean,
        report.seed
    ))?;
    out.line(&format!(
        "rows of {} tokens and {:.2} MB, {} state groups; {} different rows, {:.1} GB; ceiling {:.2} %",
        report.row_tokens,
        report.row_bytes as f64 / 1e6,
        report.state_groups,
        report.working_set_rows,
        report.working_set_bytes as f64 / 1e9,
        report.ceiling_pct
    ))?;
    for kind in &report.kinds {
        let share = kind.prompt_tokens as f64 / report.prompt_tokens.max(1) as f64 * 100.0;
        let name = kind.kind.name();
        out.line(&format!("  {name:<12}{:>6} requests, {share:>6.2} % of prompt tokens", kind.requests))?;
    }
    out.line("")?;
    out.line("Computed twice, in % of all prompt tokens, and by kind of turn:")?;
    let kinds: String = Kind::ALL.iter().map(|k| format!("{:>11}", k.name())).collect();
    out.line(&format!(
        "{:>8} {:<7}{:>8}{kinds}{:>9}{:>9}{:>10}{:>8}",
        "capacity", "policy", "lost", "loaded", "prefill", "rows", "B/token"
    ))?;
    for run in &report.runs {
        out.line(&line(run))?;
    }
    out.line("")?;
    out.line(
        "loaded: % of prompt tokens. prefill: tokens computed over those that nothing could have spared.",
    )?;
    out.line("rows: rows written, moved ones included. B/token: bytes written per prompt token.")
}

fn line(run: &Run) -> String {
    let figures = &run.figures;
    let kinds: String = figures.lost_pct_by_kind.values().map(|pct| format!("{pct:>11.3}")).collect();
    format!(
        "{:>7.1}% {:<7}{:>8.3}{kinds}{:>9.2}{:>8.2}x{:>10}{:>8.0}",
        run.capacity_pct,
        run.policy.name(),
        figures.lost_pct,
        figures.loaded_pct,
        figures.excess_prefill,
        figures.rows_written,
        figures.bytes_written_per_prompt_token
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_are_sizes_or_shares() {
        assert_eq!(capacity("64GiB"), Ok(Capacity::Bytes(Bytes::gib(64))));
        assert_eq!(capacity("2.5%"), Ok(Capacity::Percent(2.5)));
        for wrong in ["%", "0%", "-1%", "NaN%", "much", "2000%"] {
            assert!(capacity(wrong).is_err(), "{wrong}");
        }
        assert!(policy("lru").is_ok() && policy("LRU!").is_err());
    }
}
