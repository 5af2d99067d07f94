//! What a measurement says: which way bytes went, over which rails, and how fast.

use super::{Case, Id, Level, Verdict};
use crate::rails::counters::{self, Moved};
use crate::rails::inventory::Rail;
use crate::rails::measured::{Answer, Measured, Probe, Run, Wire};

/// Share of a payload that the kernel must have counted one way to say that it went that way. Headers add to it,
/// packets counted a moment later take away. Our choice.
const WENT: f64 = 0.9;

/// Share of a payload below which a rail carried nothing: a rail that is slowed to a tenth still has five percent or
/// more, and what keeps a connection alive is far less than one. Our choice.
const NOTHING: f64 = 0.02;

/// What one rail of a Spark carries at least, in Gb/s by RDMA: both measured 92.6 and 97.3 together (dgx-spark-playbooks,
/// performance guide), 111.9 alone (ajclark).
const RAIL_GBIT_S: f64 = 90.0;

/// Below half of it something else is wrong than a few percent.
const RAIL_BAD_GBIT_S: f64 = 50.0;

/// What both carry at least: NVIDIA's own limit for a passing all_gather, 21.875 GB/s (dgx-spark-playbooks,
/// MIN_NCCL_TEST_BW).
const BOTH_GBIT_S: f64 = 175.0;

/// A card that was added again while running, and sometimes one after a start, carries 12.7 to 13.2 Gb/s with a healthy
/// link, full PCIe width and clean counters; this range is taken for that state (dgx-spark-playbooks issue 108; ajclark).
const DEGRADED_GBIT_S: std::ops::RangeInclusive<f64> = 8.0..=25.0;

pub(super) fn judge(case: &Case<'_>, measured: &Measured) -> Vec<Verdict> {
    let mut found = Vec::new();
    found.extend(measured.probes.iter().filter_map(probe));
    found.extend(
        measured.probes.iter().filter(|probe| !was_asked(measured, &probe.rail)).filter_map(unanswered),
    );
    let alone = &measured.alone;
    found.extend(alone.iter().filter_map(|run| silent_alone(case, measured, run)));
    found.extend(alone.iter().filter_map(|run| speed(case, measured.wire, run)));
    if let Some(run) = &measured.together {
        found.extend(together(case, measured, run));
    }
    found.extend(truth(case, measured));
    found.extend(errors(measured));
    found
}

/// A packet of full size that does not arrive while a small one does.
fn probe(probe: &Probe) -> Option<Verdict> {
    let Probe { rail, to, mtu, small, large } = probe;
    let how = match (small, large) {
        (Answer::Arrived, Answer::Silent) => "vanish".to_owned(),
        (Answer::Arrived, Answer::TooLarge(Some(takes))) => format!("are refused: the way takes {takes}"),
        (Answer::Arrived, Answer::TooLarge(None)) => "are refused".to_owned(),
        _ => return None,
    };
    Some(
        Verdict::new(
            Level::Fail,
            Id::MtuNotEndToEnd,
            format!("{rail} has MTU {mtu}, and packets of that size to {to} {how}"),
        )
        .on(rail)
        .because(
            "the other end, or a switch between, has a smaller MTU: large packets are dropped without a word",
        )
        .fix(format!(
            "set the same MTU on both boxes: ip link set {rail} mtu {mtu} there too, and in netplan to stay"
        )),
    )
}

fn was_asked(measured: &Measured, rail: &str) -> bool {
    measured.alone.iter().any(|run| run.over.iter().any(|device| device == rail))
}

/// Without a transfer, silence is all there is to go by; a firewall that drops probes is as silent as a dead cable.
fn unanswered(probe: &Probe) -> Option<Verdict> {
    let Probe { rail, to, small, .. } = probe;
    let what = match small {
        Answer::Arrived => return None,
        Answer::Silent | Answer::TooLarge(_) => format!("{to} does not answer on {rail}"),
        Answer::Unsent(why) => format!("nothing can be sent to {to} on {rail}: {why}"),
    };
    Some(
        Verdict::new(Level::Warn, Id::RailSilent, what)
            .on(rail)
            .because("the other end is off, has another address or no cable, or its firewall drops what it does not know")
            .fix(format!("ping -I {rail} {to} tells which; with nodes running on both boxes a transfer decides")),
    )
}

/// A rail that carries nothing even when it is asked alone.
fn silent_alone(case: &Case<'_>, measured: &Measured, run: &Run) -> Option<Verdict> {
    let [device] = &run.over[..] else { return None };
    let silent = |id, what: String| Verdict::new(Level::Fail, id, what).on(device);
    if let Some(why) = &run.failed {
        let (cause, fix) = why_silent(case, measured, device);
        let what = format!("{device} carries nothing: {why}");
        return Some(silent(Id::RailSilent, what).because(cause).fix(fix));
    }
    if run.share(device) >= NOTHING {
        return None;
    }
    let other = run.moved.iter().filter(|(name, _)| *name != device).max_by_key(|(_, moved)| moved.carried());
    let (other, _) = other.filter(|(name, _)| run.share(name) >= WENT)?;
    // What acknowledges a payload is a thousandth of it and more.
    let asked = run.moved.get(device).is_some_and(|moved| moved.all() > run.bytes / 1000);
    Some(if asked {
        silent(Id::CableCrossed, format!("asked on {device}, answered on {other}"))
            .because("the cables are crossed, or the other box routes its answers over another rail")
            .fix("join the same cages on both boxes; `ip route get ADDRESS` on the other box says which device it answers over")
    } else {
        silent(Id::RailSilent, format!("what was sent for {device} came over {other}"))
            .because("the kernel routes that address over the other rail: same subnet, or a route that wins")
            .fix(format!("give each rail a subnet of its own; `ip route get ADDRESS` must say {device}"))
    })
}

fn why_silent(case: &Case<'_>, measured: &Measured, device: &str) -> (String, String) {
    let dead = case.here.rail(device).is_some_and(|rail| rail.carrier == Some(false));
    let probed = measured.probes.iter().find(|probe| probe.rail == device);
    match probed.map(|probe| &probe.small) {
        _ if dead => {
            ("there is no link".to_owned(), "plug the cable into the same cage on both boxes".to_owned())
        }
        Some(Answer::Arrived) => (
            "the other box answers on this rail, but not at the port for rows".to_owned(),
            "let the other node listen on this address too, or open the port in its firewall".to_owned(),
        ),
        Some(Answer::Unsent(why)) => (
            format!("packets cannot be sent: {why}"),
            format!("`ip addr show {device}` must show an address, `ip route` its subnet"),
        ),
        _ => (
            "the other box does not answer on this rail".to_owned(),
            format!("look at the address, cable and firewall of the other end: ping -I {device} ADDRESS"),
        ),
    }
}

/// How fast a rail is alone. Only a Spark's ports are known well enough to be called slow.
fn speed(case: &Case<'_>, wire: Wire, run: &Run) -> Option<Verdict> {
    let [device] = &run.over[..] else { return None };
    let rail = case.here.rail(device)?;
    if run.failed.is_some() || run.share(device) < NOTHING {
        return None;
    }
    let gbit_s = run.gbit_s();
    let by_rdma = run.moved.get(device).is_some_and(|moved| moved.rdma() > moved.net());
    // What fell back to TCP is judged as that; its speed says nothing about the card.
    if !rail.is_spark_port() || (wire == Wire::Rdma && !by_rdma) {
        return Some(described(rail, gbit_s, by_rdma));
    }
    let degraded = DEGRADED_GBIT_S.contains(&gbit_s);
    let cold = "shut the box down, wait until it is off, start it: a reboot is not enough. Never switch the card off and on while running";
    let verdict = match (by_rdma, degraded) {
        (true, true) => Verdict::new(
            Level::Fail,
            Id::NicDegraded,
            format!("{device} carries {gbit_s:.1} Gb/s by RDMA, and its link is healthy"),
        )
        .because("the state of some 13 Gb/s that a ConnectX-7 of a Spark is in after it was added again, sometimes after a start")
        .fix(cold),
        (false, true) => Verdict::new(
            Level::Warn,
            Id::NicDegraded,
            format!("{device} carries {gbit_s:.1} Gb/s by TCP"),
        )
        .because("a card in the 13 Gb/s state looks like this, and so does TCP that lacks a core; RDMA tells")
        .fix(format!("ib_write_bw -d {} --report_gbits between the boxes: 8 to 25 Gb/s there too means {cold}", rdma_name(rail))),
        (true, false) if gbit_s < RAIL_GBIT_S => {
            let level = if gbit_s < RAIL_BAD_GBIT_S { Level::Fail } else { Level::Warn };
            Verdict::new(level, Id::RailSlow, format!("{device} carries {gbit_s:.1} Gb/s alone; {RAIL_GBIT_S:.0} is the least of a healthy rail"))
                .because("something else uses the rail or the memory, the MTU is small, or packets are lost")
                .fix("stop what runs and measure again; then MTU 9000 on both ends; then another cable")
        }
        _ => described(rail, gbit_s, by_rdma),
    };
    Some(verdict.on(device))
}

fn rdma_name(rail: &Rail) -> &str {
    rail.rdma.as_ref().map_or("DEVICE", |rdma| rdma.device.as_str())
}

fn described(rail: &Rail, gbit_s: f64, by_rdma: bool) -> Verdict {
    let how = if by_rdma { "by RDMA" } else { "by TCP" };
    let link = rail
        .link_mb_s
        .map_or("a link of unknown speed".to_owned(), |mb| format!("a link of {} Gb/s", mb as f64 / 1e3));
    Verdict::new(
        Level::Ok,
        Id::Carries,
        format!("{} carries {gbit_s:.1} Gb/s {how} alone, on {link}", rail.device),
    )
    .on(&rail.device)
}

/// Both together: each carries, and the sum is what it should be.
fn together(case: &Case<'_>, measured: &Measured, run: &Run) -> Vec<Verdict> {
    if let Some(why) = &run.failed {
        let what = format!("a transfer over all rails failed, and each works alone: {why}");
        let verdict = Verdict::new(Level::Fail, Id::RailSilent, what)
            .because("a rail was lost in the middle, or the other box allows fewer connections than there are rails")
            .fix("measure again; then look at the log of both nodes");
        return vec![verdict];
    }
    let works_alone = |device: &String| {
        let mut runs = measured.alone.iter().filter(|alone| alone.over == [device.clone()]);
        runs.any(|alone| alone.failed.is_none() && alone.share(device) >= NOTHING)
    };
    let (silent, loud): (Vec<&String>, Vec<&String>) =
        run.over.iter().partition(|device| run.share(device) < NOTHING);
    let mut found: Vec<Verdict> = silent
        .iter()
        .filter(|device| works_alone(device))
        .map(|device| {
            let others: Vec<&str> = loud.iter().map(|d| d.as_str()).collect();
            Verdict::new(
                Level::Fail,
                Id::OnlyOneRail,
                format!("with all rails asked, {device} carries nothing and {} everything", others.join(", ")),
            )
            .on(device)
            .because("it works alone: what divides the work leaves it out")
            .fix("name both devices: UCX_NET_DEVICES and NCCL_IB_HCA with both twins of the cabled cage, NCCL_IB_MERGE_NICS=1")
        })
        .collect();
    if silent.is_empty() && run.over.len() > 1 {
        found.push(sum(case, measured, run));
    }
    found
}

fn sum(case: &Case<'_>, measured: &Measured, run: &Run) -> Verdict {
    let gbit_s = run.gbit_s();
    let parts: Vec<String> = run
        .over
        .iter()
        .map(|device| format!("{device} {:.0} %", share_of_all(run, device) * 100.0))
        .collect();
    let parts = parts.join(", ");
    let spark = run.over.iter().all(|device| case.here.rail(device).is_some_and(Rail::is_spark_port));
    let by_rdma = run.moved.values().map(Moved::rdma).sum::<u64>() > run.moved.values().map(Moved::net).sum();
    let slow = spark && by_rdma && gbit_s < BOTH_GBIT_S;
    // Where the rails are slow one by one, that is said of them, and their sum is no news.
    let alone: f64 = measured.alone.iter().map(Run::gbit_s).sum();
    if slow && alone >= BOTH_GBIT_S {
        let what = format!(
            "all rails together carry {gbit_s:.1} Gb/s ({parts}); {BOTH_GBIT_S:.0} is the least of a healthy pair"
        );
        return Verdict::new(Level::Warn, Id::BothSlow, what)
            .because("each carries, but not as much as alone: MTU, memory that is busy, or one PCIe link that is narrow")
            .fix("stop what runs and measure again; then look at MTU and PCIe width of both boxes");
    }
    let count = if run.over.len() == 2 {
        "both rails carry".to_owned()
    } else {
        format!("all {} rails carry", run.over.len())
    };
    let level = if slow { Level::Note } else { Level::Ok };
    Verdict::new(level, Id::Carries, format!("{count}: {gbit_s:.1} Gb/s together ({parts})"))
}

/// Of what the kernel counted on the rails that were asked.
fn share_of_all(run: &Run, device: &str) -> f64 {
    let all: f64 = run.over.iter().map(|device| run.share(device)).sum();
    if all > 0.0 { run.share(device) / all } else { 0.0 }
}

/// RDMA or TCP, by what the kernel counted.
fn truth(case: &Case<'_>, measured: &Measured) -> Option<Verdict> {
    let run =
        measured.together.iter().chain(&measured.alone).find(|run| run.failed.is_none() && run.bytes > 0)?;
    let of = |count: fn(&Moved) -> u64| run.moved.values().map(count).sum::<u64>() as f64 / run.bytes as f64;
    let (rdma, net) = (of(Moved::rdma), of(Moved::net));
    let has_rdma = case.here.rails.iter().any(|rail| rail.rdma.is_some() && rail.is_usable());
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    match measured.wire {
        Wire::Rdma if rdma >= WENT => None,
        Wire::Rdma if net >= WENT => Some(
            Verdict::new(
                Level::Fail,
                Id::RdmaWasTcp,
                format!("{} of the bytes went by TCP and {} by RDMA", percent(net), percent(rdma)),
            )
            .because("the library fell back without a word: UCX_NET_DEVICES that names network devices means TCP, NCCL falls back to sockets")
            .fix("name RDMA devices and ports (UCX_NET_DEVICES=rocep1s0f1:1,roceP2p1s0f1:1), leave tcp out of UCX_TLS, set NCCL_NET=IB: then it fails instead"),
        ),
        Wire::Tcp if net >= WENT && has_rdma => Some(
            Verdict::new(Level::Note, Id::TcpByChoice, "rows travel by TCP; the RDMA devices beside it are idle")
                .because("that is what this transfer was asked to use")
                .fix("nothing, unless TCP is slower than the drive: then an RDMA fabric is worth having"),
        ),
        Wire::Tcp if net >= WENT => None,
        _ => Some(
            Verdict::new(
                Level::Warn,
                Id::Uncounted,
                format!("the kernel counted {} by TCP and {} by RDMA of what was moved", percent(net), percent(rdma)),
            )
            .because("bytes went over a device that is no rail here, or counters stand still")
            .fix("`ip route get ADDRESS` says which device leads to the other box"),
        ),
    }
}

/// Errors that grew while measuring, over all runs.
fn errors(measured: &Measured) -> Vec<Verdict> {
    let mut grown = std::collections::BTreeMap::<(&str, &str), u64>::new();
    for run in measured.alone.iter().chain(&measured.together) {
        for (device, moved) in &run.moved {
            for (name, n) in &moved.errors {
                *grown.entry((device, name)).or_default() += n;
            }
        }
    }
    let words = |((device, name), n): ((&str, &str), u64)| {
        let cause = counters::meaning(name).map_or("", counters::Meaning::words);
        Verdict::new(Level::Warn, Id::Errors, format!("{name} of {device} grew by {n} while measuring"))
            .on(device)
            .because(cause)
            .fix("measure again; when it comes back: MTU on both ends, then another cable")
    };
    grown.into_iter().map(words).collect()
}
