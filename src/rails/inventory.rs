//! What rails a machine has: each network device with an RDMA device beside it, and plain devices that carry data.
//!
//! Nothing is known by name: which RDMA device belongs to which network device, which two functions share a cage and
//! which GID is the RoCE v2 one is found anew at each reading, because all three differ between machines and the last
//! one drifts while a machine runs.
//!
//! On a DGX Spark one ConnectX-7 sits behind two PCIe Gen5 x4 links, and each of its two cages appears once per link:
//! four network devices for two cages (github.com/NVIDIA/dgx-spark-playbooks, connect-two-sparks;
//! ajclark/GLM-5.3-DCP4-DFlash2-NVMe-KV-Offload-4x-DGX-Spark, NETWORK.md). The two of a cage are twins here.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use super::tree::{Access, Net, Tree};

/// GIDs of one port that are looked at; mlx5 has 256.
const GIDS: u32 = 256;

/// What RoCE puts before a payload at most: GRH 40, UDP 8, BTH 12, XRC 4, atomic 28, ICRC 4 bytes. The kernel takes the
/// largest RDMA MTU that fits beside it (`iboe_get_mtu` in include/rdma/ib_addr.h).
const ROCE_HEADERS: u32 = 96;

/// Sizes that an RDMA port can have as MTU, in bytes.
const RDMA_MTUS: [u32; 5] = [4096, 2048, 1024, 512, 256];

/// Capability to pin memory beyond every limit, as a bit of `CapEff` (include/uapi/linux/capability.h).
const CAP_IPC_LOCK: u32 = 14;

/// A machine's rails, and what of the machine decides whether they work.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Inventory {
    pub rails: Vec<Rail>,
    pub host: Host,
}

/// One network device that carries, or could carry, rows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rail {
    pub device: String,
    /// Hardware address.
    pub mac: String,
    /// Without link-local ones.
    pub addresses: Vec<Net>,
    /// Whether the cable gives a signal. None: the device is down, so nobody knows.
    pub carrier: Option<bool>,
    /// What the device says of its cable. Both twins of a Spark say 200,000 although each can carry half of it.
    pub link_mb_s: Option<u64>,
    pub mtu: u32,
    pub rdma: Option<Rdma>,
    pub pcie: Option<Pcie>,
    /// The device that shares the cage, over the other PCIe link.
    pub twin: Option<String>,
    /// Name of the port on the card, such as `p0`, where the driver says it.
    pub port_name: Option<String>,
}

/// The RDMA device beside a network device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rdma {
    pub device: String,
    pub port: u32,
    /// Whether the port is active.
    pub active: bool,
    /// RoCE v2 over IPv4, for one of the device's own addresses. None: there is no such GID.
    pub gid: Option<Gid>,
    /// Bytes, as the kernel derives them from the network device's MTU. None: smaller than the smallest.
    pub mtu: Option<u32>,
    pub firmware: Option<String>,
    /// The device file that programs open, and whether it opens here.
    pub verbs: Option<(String, Access)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gid {
    pub index: u32,
    pub address: Ipv4Addr,
}

/// Where a device sits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pcie {
    /// Domain, bus, device and function.
    pub address: String,
    pub gt_s: Option<f64>,
    pub width: Option<u32>,
    pub vendor: String,
    pub model: String,
}

/// Facts of the machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// Release of the kernel.
    pub kernel: String,
    /// Bytes that this process may pin. None: unlimited, or the process may pin beyond every limit.
    pub memlock: Option<u64>,
    pub cma_total_kb: Option<u64>,
    pub cma_free_kb: Option<u64>,
    /// What the kernel's command line says of the kernel hand-over: `kho=off` and the like.
    pub kho: Option<String>,
    /// Whether the card's power switch of DGX OS has it off.
    pub card_switched_off: bool,
}

impl Inventory {
    /// Reads everything. `data` are the addresses that carry rows: plain devices with one of them are rails too.
    /// Without any, every device with an address that others can reach is one, unless RDMA devices are there.
    pub fn read(tree: &Tree, data: &[IpAddr]) -> Self {
        let mut rails = rails(tree);
        let has_rdma = rails.iter().any(|rail| rail.rdma.is_some());
        rails.retain(|rail| {
            let named = rail.addresses.iter().any(|net| data.contains(&net.ip));
            let open = data.is_empty() && !has_rdma && !rail.addresses.is_empty();
            rail.rdma.is_some() || named || open
        });
        Self { rails, host: host(tree) }
    }

    pub fn rail(&self, device: &str) -> Option<&Rail> {
        self.rails.iter().find(|rail| rail.device == device)
    }

    /// The rail in whose network `peer` lies.
    pub fn rail_to(&self, peer: IpAddr) -> Option<&Rail> {
        self.rails.iter().find(|rail| rail.addresses.iter().any(|net| net.holds(peer)))
    }

    /// GID index of each RDMA device that has one.
    pub fn gids(&self) -> BTreeMap<String, u32> {
        let rdma = self.rails.iter().filter_map(|rail| rail.rdma.as_ref());
        rdma.filter_map(|rdma| Some((rdma.device.clone(), rdma.gid.as_ref()?.index))).collect()
    }
}

impl Rail {
    /// A ConnectX-7 whose cage has a second function: how a Spark is wired, and nothing else that is known.
    pub fn is_spark_port(&self) -> bool {
        let card = self.pcie.as_ref().is_some_and(|pcie| pcie.vendor == "0x15b3" && pcie.model == "0x1021");
        card && self.twin.is_some()
    }

    /// Whether rows can travel: there is a cable and an address.
    pub fn is_usable(&self) -> bool {
        self.carrier != Some(false) && !self.addresses.is_empty()
    }

    pub fn ipv4(&self) -> Option<Net> {
        self.addresses.iter().copied().find(|net| net.ip.is_ipv4())
    }

    /// Which port of the card it is, in the device's words.
    pub fn port(&self) -> Option<&str> {
        let from_name = || self.device.rfind("np").map(|at| &self.device[at + 1..]);
        let numbered = |port: &&str| port.len() > 1 && port[1..].bytes().all(|b| b.is_ascii_digit());
        self.port_name.as_deref().or_else(from_name).filter(numbered)
    }
}

fn rails(tree: &Tree) -> Vec<Rail> {
    let mut addresses = tree.addresses();
    let rdma = tree.list("sys/class/infiniband");
    let mut rails: Vec<Rail> = tree
        .list("sys/class/net")
        .into_iter()
        // 772 is the loopback (include/uapi/linux/if_arp.h).
        .filter(|device| tree.number::<u32>(&format!("sys/class/net/{device}/type")) != Some(772))
        .map(|device| {
            let mut nets = addresses.remove(&device).unwrap_or_default();
            nets.retain(|net| !net.is_local());
            rail(tree, device, nets, &rdma)
        })
        .collect();
    let twins: Vec<Option<String>> =
        rails.iter().map(|rail| twin(rail, &rails).map(|twin| twin.device.clone())).collect();
    for (rail, twin) in rails.iter_mut().zip(twins) {
        rail.twin = twin;
    }
    rails
}

fn rail(tree: &Tree, device: String, addresses: Vec<Net>, rdma: &[String]) -> Rail {
    let at = format!("sys/class/net/{device}");
    let mtu = tree.number(&format!("{at}/mtu")).unwrap_or(0);
    let pci = tree.link(&format!("{at}/device"));
    let beside = rdma.iter().find(|rdma| is_beside(tree, rdma, &device, pci.as_deref()));
    Rail {
        mac: tree.text(&format!("{at}/address")).unwrap_or_default(),
        carrier: tree.text(&format!("{at}/carrier")).map(|text| text == "1"),
        // A device without a cable says -1.
        link_mb_s: tree.number::<i64>(&format!("{at}/speed")).and_then(|n| u64::try_from(n).ok()),
        mtu,
        rdma: beside.map(|rdma| self::rdma(tree, rdma, &device, &addresses, mtu)),
        pcie: pci.and_then(|pci| pcie(tree, pci)),
        twin: None,
        port_name: tree.text(&format!("{at}/phys_port_name")),
        addresses,
        device,
    }
}

/// An RDMA device belongs to the network device on the same PCI function; one in software names it as its parent.
fn is_beside(tree: &Tree, rdma: &str, device: &str, pci: Option<&str>) -> bool {
    let at = format!("sys/class/infiniband/{rdma}");
    match tree.link(&format!("{at}/device")) {
        Some(function) => pci == Some(function.as_str()),
        None => tree.text(&format!("{at}/parent")).as_deref() == Some(device),
    }
}

fn rdma(tree: &Tree, name: &str, device: &str, addresses: &[Net], mtu: u32) -> Rdma {
    let at = format!("sys/class/infiniband/{name}");
    let port = tree.list(&format!("{at}/ports")).iter().find_map(|port| port.parse().ok()).unwrap_or(1);
    let state = tree.text(&format!("{at}/ports/{port}/state"));
    let verbs = tree
        .list("sys/class/infiniband_verbs")
        .into_iter()
        .find(|verbs| {
            tree.text(&format!("sys/class/infiniband_verbs/{verbs}/ibdev")).as_deref() == Some(name)
        })
        .map(|verbs| {
            let access = tree.access(&format!("dev/infiniband/{verbs}"));
            (format!("/dev/infiniband/{verbs}"), access)
        });
    Rdma {
        device: name.to_owned(),
        port,
        active: state.is_some_and(|state| state.ends_with("ACTIVE")),
        gid: gid(tree, &format!("{at}/ports/{port}"), device, addresses),
        mtu: RDMA_MTUS.into_iter().find(|fits| fits + ROCE_HEADERS <= mtu),
        firmware: tree.text(&format!("{at}/fw_ver")),
        verbs,
    }
}

/// The RoCE v2 GID of one of the device's IPv4 addresses.
fn gid(tree: &Tree, port: &str, device: &str, addresses: &[Net]) -> Option<Gid> {
    (0..GIDS).find_map(|index| {
        // An empty entry has no type to read.
        let kind = tree.text(&format!("{port}/gid_attrs/types/{index}"))?;
        let address: Ipv6Addr = tree.text(&format!("{port}/gids/{index}"))?.parse().ok()?;
        let address = address.to_ipv4_mapped()?;
        let of = tree.text(&format!("{port}/gid_attrs/ndevs/{index}"));
        let ours = addresses.iter().any(|net| net.ip == address) && of.is_none_or(|of| of == device);
        (kind == "RoCE v2" && ours).then_some(Gid { index, address })
    })
}

fn pcie(tree: &Tree, address: String) -> Option<Pcie> {
    // What is not on PCI (veth, virtio, USB) has a link of another kind or none.
    let function = address.splitn(3, ':').count() == 3 && address.contains('.');
    let at = format!("sys/bus/pci/devices/{address}");
    let speed = tree.text(&format!("{at}/current_link_speed"));
    function.then(|| Pcie {
        gt_s: speed.and_then(|text| text.split_whitespace().next()?.parse().ok()),
        width: tree.number(&format!("{at}/current_link_width")),
        vendor: tree.text(&format!("{at}/vendor")).unwrap_or_default(),
        model: tree.text(&format!("{at}/device")).unwrap_or_default(),
        address,
    })
}

/// Twins are functions of the same number, on the same bus, of the same card, in two PCI domains.
fn twin<'a>(of: &Rail, all: &'a [Rail]) -> Option<&'a Rail> {
    let mine = of.pcie.as_ref()?;
    let place = |pcie: &Pcie| pcie.address.split_once(':').map(|(_, rest)| rest.to_owned());
    all.iter().find(|other| {
        let Some(theirs) = &other.pcie else { return false };
        mine.address != theirs.address
            && place(mine) == place(theirs)
            && (&mine.vendor, &mine.model) == (&theirs.vendor, &theirs.model)
            && !mine.vendor.is_empty()
            && of.port() == other.port()
    })
}

fn host(tree: &Tree) -> Host {
    let kb = |name| {
        let text = tree.field("proc/meminfo", name)?;
        text.split_whitespace().next()?.parse().ok()
    };
    let capabilities = tree.field("proc/self/status", "CapEff");
    let capabilities = capabilities.and_then(|text| u64::from_str_radix(&text, 16).ok()).unwrap_or(0);
    let limit = tree.field("proc/self/limits", "Max locked memory");
    let limit = limit.and_then(|text| text.split_whitespace().next()?.parse().ok());
    let words = tree.text("proc/cmdline").unwrap_or_default();
    let switch = "sys/devices/platform/MTKP0001:00/pcie_hotplug/debug_state";
    Host {
        kernel: tree.text("proc/sys/kernel/osrelease").unwrap_or_default(),
        memlock: limit.filter(|_| capabilities >> CAP_IPC_LOCK & 1 == 0),
        cma_total_kb: kb("CmaTotal"),
        cma_free_kb: kb("CmaFree"),
        kho: words.split_whitespace().find(|word| word.starts_with("kho=")).map(str::to_owned),
        card_switched_off: tree.text(switch).as_deref() == Some("0"),
    }
}
