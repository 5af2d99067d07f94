//! What is wrong before a byte has moved: cables, addresses, PCIe links, GIDs, and what forbids registration.

use super::{Case, Id, Level, Verdict};
use crate::base::units::Bytes;
use crate::rails::inventory::{Inventory, Rail, Rdma};
use crate::rails::tree::Access;

/// A function of the card with fewer lanes carries less than half of its cage: both links are Gen5 x4, of which one
/// carries 109 Gb/s (ajclark, NETWORK.md). BIOS before April 2026 wired the second one x2
/// (tonyd2wild/DeepSeek-v4-Flash-Vision pull request 35).
const LANES: u32 = 4;
const GT_S: f64 = 32.0;

/// The first network MTU whose RDMA MTU is 4096, the largest: 4096 and 96 bytes of headers.
const LARGE_MTU: u32 = 4192;

pub(super) fn judge(case: &Case<'_>) -> Vec<Verdict> {
    let mut found = Vec::new();
    let rails = &case.here.rails;
    if rails.is_empty() {
        let what = "no network device with an RDMA device beside it, and none that carries data";
        return vec![
            Verdict::new(Level::Fail, Id::NoRails, what)
                .because("no such device has an address, or the network is not visible from here")
                .fix("give the devices of the cable between the boxes an address, then name them in cluster.rails"),
        ];
    }
    found.extend(cables(rails));
    found.extend(rails.iter().filter_map(|rail| twin(rail, rails)));
    found.extend(rails.iter().filter_map(|rail| unused(case, rail)));
    found.extend(subnets(rails));
    found.extend(case.context.there.as_ref().and_then(|there| crossed(case.here, there)));
    for rail in rails {
        found.extend(pcie(rail));
        found.extend(rail.rdma.as_ref().and_then(|rdma| gid(case, rail, rdma)));
        found.extend(mtu(rail));
    }
    if case.here.host.card_switched_off {
        found.push(
            Verdict::new(Level::Warn, Id::CardSwitchedOff, "DGX OS has switched the ConnectX-7 off to save power")
                .because("debug_state of /sys/devices/platform/MTKP0001:00/pcie_hotplug is 0")
                // Adding it again leaves it at 13 Gb/s (ajclark; dgx-spark-playbooks issue 108).
                .fix("switch it on, then shut the box down and start it cold: a card that was only added again stays at some 13 Gb/s"),
        );
    }
    found.extend(registration(case.here, case.context.pinned));
    found
}

/// Of a card with several cages only the cabled one matters; a rail that has an address should have a cable.
fn cables(rails: &[Rail]) -> Vec<Verdict> {
    let dead = |rail: &&Rail| rail.carrier == Some(false) && !rail.addresses.is_empty();
    let mut found: Vec<Verdict> = rails
        .iter()
        .filter(dead)
        .map(|rail| {
            Verdict::new(Level::Fail, Id::NoCable, format!("{} has an address and no link", rail.device))
                .on(&rail.device)
                .because("no cable, a loose plug, or the other box is off")
                .fix("plug the cable into the same cage on both boxes; `ip link` then says LOWER_UP")
        })
        .collect();
    if found.is_empty() && rails.iter().all(|rail| rail.carrier != Some(true)) {
        found.push(
            Verdict::new(Level::Fail, Id::NoCable, "no rail has a link")
                .because("no cable, a loose plug, or the other box is off")
                .fix("plug the cable into the same cage on both boxes; `ip link` then says LOWER_UP"),
        );
    }
    found
}

/// One cage carries 200 Gb/s only over both of its PCIe links; with one configured it is some 98
/// (tonyd2wild/DeepSeek-v4-Flash-Vision pull request 35).
fn twin(rail: &Rail, rails: &[Rail]) -> Option<Verdict> {
    let twin = rails.iter().find(|other| Some(&other.device) == rail.twin.as_ref())?;
    let half = rail.addresses.is_empty() && rail.carrier != Some(false) && twin.ipv4().is_some();
    half.then(|| {
        let (device, twin) = (&rail.device, &twin.device);
        Verdict::new(Level::Fail, Id::TwinNotConfigured, format!("{device}, the twin of {twin}, has no address"))
            .on(device)
            .because("each cage hangs on two PCIe links of some 100 Gb/s; half of the cable is not used")
            .fix(format!("give {device} an IPv4 address in a subnet of its own in /etc/netplan/40-cx7.yaml, on both boxes, and the MTU of {twin}; then `netplan apply`"))
    })
}

/// A rail that is ready and that rows are not told to use. Only one of RDMA: of other devices nobody knows what they
/// are for.
fn unused(case: &Case<'_>, rail: &Rail) -> Option<Verdict> {
    let data = &case.context.data;
    let used = rail.addresses.iter().any(|net| data.contains(&net.ip));
    let address = rail.ipv4()?.ip;
    (rail.rdma.is_some() && rail.carrier == Some(true) && !data.is_empty() && !used).then(|| {
        Verdict::new(
            Level::Warn,
            Id::RailNotUsed,
            format!("{} is ready ({address}), and rows do not travel over it", rail.device),
        )
        .on(&rail.device)
        .because("cluster.rails does not name its address")
        .fix(format!("add \"{address}\" to cluster.rails, and the address at its other end on the other box"))
    })
}

/// Two rails in one subnet: the kernel answers and sends over either, and one stays silent (dgx-spark-playbooks, switch
/// playbook).
fn subnets(rails: &[Rail]) -> Vec<Verdict> {
    let mut found = Vec::new();
    for (n, one) in rails.iter().enumerate() {
        for other in &rails[n + 1..] {
            let same =
                one.addresses.iter().find_map(|a| Some((a, other.addresses.iter().find(|b| a.overlaps(b))?)));
            let Some((a, b)) = same else { continue };
            found.push(
                Verdict::new(
                    Level::Fail,
                    Id::SameSubnet,
                    format!("{} ({a}) and {} ({b}) are in one subnet", one.device, other.device),
                )
                .on(&other.device)
                .because("the kernel sends to that subnet over one of the two, and NCCL fails to pair them")
                .fix("give each rail a subnet of its own, such as 192.168.100.0/24 and 192.168.101.0/24, on both boxes"),
            );
        }
    }
    found
}

/// The same port of the card at both ends (dgx-spark-playbooks, connect-two-sparks), told by who shares a subnet.
fn crossed(here: &Inventory, there: &Inventory) -> Option<Verdict> {
    let pairs: Vec<(&Rail, &Rail)> = here
        .rails
        .iter()
        .filter(|rail| rail.is_usable())
        .filter_map(|mine| Some((mine, there.rail_to(mine.ipv4()?.ip).filter(|theirs| theirs.is_usable())?)))
        .collect();
    let (mine, theirs) = pairs
        .into_iter()
        .find(|(mine, theirs)| matches!((mine.port(), theirs.port()), (Some(a), Some(b)) if a != b))?;
    Some(
        Verdict::new(
            Level::Warn,
            Id::CableCrossed,
            format!("{} here meets {} there", mine.device, theirs.device),
        )
        .on(&mine.device)
        .because(
            "the cable joins different ports of the two cards, or the addresses were given to different ones",
        )
        .fix("use the same cage on both boxes, and give its devices the same subnets"),
    )
}

fn pcie(rail: &Rail) -> Option<Verdict> {
    let link = rail.pcie.as_ref().filter(|_| rail.is_spark_port())?;
    let (width, speed) = (link.width?, link.gt_s?);
    (width < LANES || speed < GT_S).then(|| {
        let what = format!("{} is on PCIe {speed} GT/s x{width}; {GT_S} GT/s x{LANES} is what it has", rail.device);
        Verdict::new(Level::Fail, Id::PcieNarrow, what)
            .on(&rail.device)
            .because("firmware before April 2026 wired the second link x2; or the card was added again while running")
            .fix("fwupdmgr refresh && fwupdmgr update, then shut down and start cold")
    })
}

/// The index is found anew at each start: it is mostly 3, was 5 on another kit (MiaAI-Lab/GLM-5.3-Flash-EXL3-2x issue
/// 47), and moves when the link goes down and up. A wrong one makes NCCL fail at init with "unhandled system error".
fn gid(case: &Case<'_>, rail: &Rail, rdma: &Rdma) -> Option<Verdict> {
    if !rail.is_usable() {
        return None;
    }
    let device = &rail.device;
    let Some(gid) = &rdma.gid else {
        return Some(
            Verdict::new(Level::Fail, Id::GidMissing, format!("{} has no RoCE v2 GID for IPv4", rdma.device))
                .on(device)
                .because(format!(
                    "{device} has no IPv4 address, or one that came after the RDMA device looked"
                ))
                .fix(format!("give {device} an IPv4 address; take it down and up once when it has one")),
        );
    };
    let index = gid.index;
    let fixed = case.context.gids_fixed.iter().find(|(_, value)| value.trim() != index.to_string());
    let before = case.context.gids_at_start.get(&rdma.device).filter(|before| **before != index);
    let (what, cause, fix) = match (fixed, before) {
        (Some((name, value)), _) => (
            format!(
                "{} has its RoCE v2 GID at index {index}, and {name}={value} is set for the engine",
                rdma.device
            ),
            "indices differ between boxes and move when a link goes down and up".to_owned(),
            format!("take {name} out of engine.env: UCX and NCCL find the index by themselves"),
        ),
        (None, Some(before)) => (
            format!(
                "the RoCE v2 GID of {} moved from index {before} to {index} since the node started",
                rdma.device
            ),
            "a link that goes down and up gets its addresses, and their indices, anew".to_owned(),
            "restart spark-kv when the engine spans both boxes: what it opened still uses the old index"
                .to_owned(),
        ),
        (None, None) => return None,
    };
    Some(Verdict::new(Level::Fail, Id::GidDrift, what).on(device).because(cause).fix(fix))
}

/// A note: prefill over both boxes was 1,311 tok/s at 1500 and 1,343 at 9000 (MiaAI-Lab/GLM-5.3-Flash-EXL3-2x pull
/// request 104), so it is worth setting and no fault.
fn mtu(rail: &Rail) -> Option<Verdict> {
    let rdma = rail.rdma.as_ref().filter(|_| rail.is_usable() && rail.mtu < LARGE_MTU)?;
    let bytes = rdma.mtu.map_or("none".to_owned(), |mtu| mtu.to_string());
    let what = format!("{} has MTU {}, which makes the RDMA MTU {bytes}", rail.device, rail.mtu);
    Some(
        Verdict::new(Level::Note, Id::SmallMtu, what)
            .on(&rail.device)
            .because("no MTU is set in netplan")
            .fix("mtu: 9000 on all rails of both boxes gives an RDMA MTU of 4096, and some percent"),
    )
}

/// Only where there is an RDMA device: nothing else registers memory.
fn registration(here: &Inventory, pinned: u64) -> Vec<Verdict> {
    let rdma: Vec<(&Rail, &Rdma)> =
        here.rails.iter().filter_map(|rail| Some((rail, rail.rdma.as_ref()?))).collect();
    let mut found = Vec::new();
    if rdma.is_empty() {
        return found;
    }
    found.extend(memlock(here, pinned));
    found.extend(handover(here));
    for (rail, rdma) in rdma.into_iter().filter(|(rail, _)| rail.is_usable()) {
        let Some((path, access)) = &rdma.verbs else {
            // A driver without its verbs part: `modprobe` is the fix, and there is no file to name.
            found.push(
                Verdict::new(
                    Level::Fail,
                    Id::DeviceForbidden,
                    format!("{} has no verbs device", rdma.device),
                )
                .on(&rail.device)
                .because("the module ib_uverbs is not loaded")
                .fix("modprobe ib_uverbs; on DGX OS it comes with the driver"),
            );
            continue;
        };
        found.extend(forbidden(rail, path, *access));
    }
    found
}

/// systemd gives a service 8 MiB (jschmied/dgx-spark-setup-guide), and registration fails beyond.
fn memlock(here: &Inventory, pinned: u64) -> Option<Verdict> {
    let limit = here.host.memlock.filter(|limit| *limit < pinned)?;
    let (limit, pinned) = (Bytes(limit), Bytes(pinned));
    Some(
        Verdict::new(Level::Fail, Id::MemlockSmall, format!("{limit} may be pinned, and rows take {pinned}"))
            .because("RLIMIT_MEMLOCK is smaller than the row area: registering it with the card fails")
            .fix("LimitMEMLOCK=infinity in the service, `ulimit -l unlimited` in a shell, --ulimit memlock=-1:-1 and --cap-add=IPC_LOCK for a container"),
    )
}

/// A kernel with kexec hand-over keeps some 9 GiB as CMA, and pinning fails with ENOMEM even for one page while nothing
/// says so. CmaFree above CmaTotal is the tell (NVIDIA/NV-Kernels pull requests 590 and 591; christopherowen).
fn handover(here: &Inventory) -> Option<Verdict> {
    let host = &here.host;
    let (total, free) = (host.cma_total_kb?, host.cma_free_kb?);
    (free > total).then(|| {
        let said = host.kho.as_deref().map_or(String::new(), |kho| format!(", command line has {kho}"));
        Verdict::new(
            Level::Fail,
            Id::KernelHandover,
            format!("CmaFree is {} MiB and CmaTotal {} MiB (kernel {}{said})", free >> 10, total >> 10, host.kernel),
        )
        .because("this kernel's hand-over (KHO) reserved memory that cannot be pinned: registration fails with ENOMEM, and no log says why")
        .fix("add kho=off to the kernel's command line (safe where /sys/kernel/kexec_crash_size is 0), or boot kernel 6.17")
    })
}

fn forbidden(rail: &Rail, path: &str, access: Access) -> Option<Verdict> {
    let (cause, fix) = match access {
        Access::Opens => return None,
        Access::Missing => (
            "the device file is not here: a container got the network and not the device",
            "start the container with --device=/dev/infiniband (and --cap-add=IPC_LOCK --ulimit memlock=-1:-1)",
        ),
        Access::Forbidden => (
            "the device cgroup forbids it: EPERM, whatever the file's mode says",
            "start the container with --device=/dev/infiniband, or let the service have DeviceAllow=/dev/infiniband rw",
        ),
        Access::Denied => (
            "the file's owner and mode forbid it: EACCES",
            "add the user to the group that owns it (ls -l /dev/infiniband), then log in again",
        ),
        Access::Fails => ("the driver refuses it", "look at `dmesg | grep mlx5`"),
    };
    Some(
        Verdict::new(Level::Fail, Id::DeviceForbidden, format!("{path} does not open"))
            .on(&rail.device)
            .because(cause)
            .fix(fix),
    )
}
