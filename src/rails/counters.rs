//! What the kernel counted on each rail: bytes by RDMA, bytes by the network device, and every error that means
//! something.
//!
//! RDMA bypasses the network device's own counters, so the two columns say which way bytes went; that is how a
//! transfer that fell back to TCP is found, whatever its library says. Counts are read raw and compared as
//! differences, because nothing resets them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::inventory::{Inventory, Rail};
use super::tree::Tree;

/// `port_xmit_data` and `port_rcv_data` count words of four bytes (Documentation/ABI/stable/sysfs-class-infiniband).
const WORD: u64 = 4;

/// What an error that grows says about its rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Meaning {
    /// Packets were lost on the way.
    Loss,
    /// The receiver did not take what came.
    Receiver,
    /// Somebody on the way is full; on a cable between two boxes there is nobody.
    Congestion,
    /// The cable or the plug.
    Cable,
}

impl Meaning {
    /// In words, for a sentence that begins with the counter's name.
    pub fn words(self) -> &'static str {
        match self {
            Self::Loss => "packets are lost: cable, MTU or buffers",
            Self::Receiver => "the receiving program does not take what comes",
            Self::Congestion => "something on the way is full, which a cable between two boxes cannot be",
            Self::Cable => "the cable or its plug",
        }
    }
}

/// Folder of a counter, below the RDMA port or the network device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Folder {
    Port,
    Hardware,
    Device,
}

/// One counter that is watched.
#[derive(Debug)]
struct Watched {
    name: &'static str,
    folder: Folder,
    meaning: Meaning,
}

const fn watched(name: &'static str, folder: Folder, meaning: Meaning) -> Watched {
    Watched { name, folder, meaning }
}

/// Which counters mean what. RDMA: names from `rdma statistic show` of mlx5; those of loss and congestion are the ones
/// that christopherowen/dgx-spark-networking watches on Sparks; each of these stands still on a sound cable between
/// two boxes, so any growth is worth a word. `*_cqe_flush_error` grow whenever a connection ends and are left out.
const WATCHED: [Watched; 16] = [
    watched("roce_adp_retrans", Folder::Hardware, Meaning::Loss),
    watched("packet_seq_err", Folder::Hardware, Meaning::Loss),
    watched("out_of_sequence", Folder::Hardware, Meaning::Loss),
    watched("local_ack_timeout_err", Folder::Hardware, Meaning::Loss),
    watched("rnr_nak_retry_err", Folder::Hardware, Meaning::Receiver),
    watched("out_of_buffer", Folder::Hardware, Meaning::Receiver),
    watched("np_ecn_marked_roce_packets", Folder::Hardware, Meaning::Congestion),
    watched("np_cnp_sent", Folder::Hardware, Meaning::Congestion),
    watched("rp_cnp_handled", Folder::Hardware, Meaning::Congestion),
    watched("rx_icrc_encapsulated", Folder::Hardware, Meaning::Cable),
    watched("symbol_error", Folder::Port, Meaning::Cable),
    watched("link_downed", Folder::Port, Meaning::Cable),
    watched("link_error_recovery", Folder::Port, Meaning::Cable),
    watched("rx_errors", Folder::Device, Meaning::Cable),
    watched("tx_errors", Folder::Device, Meaning::Cable),
    watched("rx_missed_errors", Folder::Device, Meaning::Receiver),
];

/// What a counter means.
pub fn meaning(name: &str) -> Option<Meaning> {
    WATCHED.iter().find(|watched| watched.name == name).map(|watched| watched.meaning)
}

/// Raw counts of one rail at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counts {
    /// Words of four bytes. None: no RDMA device.
    pub rdma_out: Option<u64>,
    pub rdma_in: Option<u64>,
    /// Bytes.
    pub net_out: u64,
    pub net_in: u64,
    pub errors: BTreeMap<String, u64>,
}

/// Counts of all rails, by device.
pub type Sample = BTreeMap<String, Counts>;

/// Reads the counters of all rails.
pub fn read(tree: &Tree, inventory: &Inventory) -> Sample {
    inventory.rails.iter().map(|rail| (rail.device.clone(), of_rail(tree, rail))).collect()
}

fn of_rail(tree: &Tree, rail: &Rail) -> Counts {
    let device = format!("sys/class/net/{}/statistics", rail.device);
    let port =
        rail.rdma.as_ref().map(|rdma| format!("sys/class/infiniband/{}/ports/{}", rdma.device, rdma.port));
    let data = |name| tree.number(&format!("{}/counters/{name}", port.as_ref()?));
    let errors = WATCHED.iter().filter_map(|watched| {
        let folder = match watched.folder {
            Folder::Device => device.clone(),
            Folder::Port => format!("{}/counters", port.as_ref()?),
            Folder::Hardware => format!("{}/hw_counters", port.as_ref()?),
        };
        Some((watched.name.to_owned(), tree.number(&format!("{folder}/{}", watched.name))?))
    });
    Counts {
        rdma_out: data("port_xmit_data"),
        rdma_in: data("port_rcv_data"),
        net_out: tree.number(&format!("{device}/tx_bytes")).unwrap_or(0),
        net_in: tree.number(&format!("{device}/rx_bytes")).unwrap_or(0),
        errors: errors.collect(),
    }
}

/// What one rail did between two samples. Bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Moved {
    pub rdma_out: u64,
    pub rdma_in: u64,
    pub net_out: u64,
    pub net_in: u64,
    /// Those that grew.
    pub errors: BTreeMap<String, u64>,
}

impl Moved {
    /// By RDMA, in the direction that had more: rows travel one way, and what comes back only acknowledges.
    pub fn rdma(&self) -> u64 {
        self.rdma_out.max(self.rdma_in)
    }

    /// By the network device, that is by TCP.
    pub fn net(&self) -> u64 {
        self.net_out.max(self.net_in)
    }

    /// Both, both ways.
    pub fn all(&self) -> u64 {
        [self.rdma_out, self.rdma_in, self.net_out, self.net_in].into_iter().fold(0, u64::saturating_add)
    }

    /// The larger way of both together.
    pub fn carried(&self) -> u64 {
        let out = self.rdma_out.saturating_add(self.net_out);
        out.max(self.rdma_in.saturating_add(self.net_in))
    }
}

/// What each rail did between two samples. A rail that is only in one of them did nothing that is known.
///
/// Twins report the counts of their cage's plug and cable alike (christopherowen/dgx-spark-networking, counters.py):
/// those stand with the first of the two only.
pub fn between(before: &Sample, after: &Sample, inventory: &Inventory) -> BTreeMap<String, Moved> {
    let mut moved: BTreeMap<String, Moved> = after
        .iter()
        .filter_map(|(device, after)| Some((device.clone(), of_counts(before.get(device)?, after))))
        .collect();
    for rail in &inventory.rails {
        let first = rail.twin.as_ref().filter(|twin| **twin < rail.device);
        let Some(shared) = first.and_then(|twin| moved.get(twin)).map(|twin| twin.errors.clone()) else {
            continue;
        };
        if let Some(second) = moved.get_mut(&rail.device) {
            second.errors.retain(|name, grown| {
                meaning(name) != Some(Meaning::Cable) || shared.get(name) != Some(grown)
            });
        }
    }
    moved
}

fn of_counts(before: &Counts, after: &Counts) -> Moved {
    let words = |before: Option<u64>, after: Option<u64>| match (before, after) {
        (Some(before), Some(after)) => grown(before, after).saturating_mul(WORD),
        _ => 0,
    };
    let errors = after.errors.iter().filter_map(|(name, after)| {
        let n = grown(*before.errors.get(name)?, *after);
        (n > 0).then(|| (name.clone(), n))
    });
    Moved {
        rdma_out: words(before.rdma_out, after.rdma_out),
        rdma_in: words(before.rdma_in, after.rdma_in),
        net_out: grown(before.net_out, after.net_out),
        net_in: grown(before.net_in, after.net_in),
        errors: errors.collect(),
    }
}

/// How much a counter grew. Some are 32 bits wide and begin anew at their end; one that is smaller for another reason
/// was reset with its device and counts from zero.
fn grown(before: u64, after: u64) -> u64 {
    const NARROW: u64 = 1 << 32;
    if after >= before {
        return after - before;
    }
    let wraps = (NARROW / 2..NARROW).contains(&before) && after < NARROW / 2;
    if wraps { after + (NARROW - before) } else { after }
}

#[cfg(test)]
mod tests {
    use super::super::inventory::Rail;
    use super::*;

    #[test]
    fn a_counter_grows_over_its_end_and_begins_anew_after_a_reset() {
        assert_eq!(grown(5, 12), 7);
        assert_eq!(grown(u64::from(u32::MAX), 9), 10);
        assert_eq!(grown(1000, 9), 9, "a device that was added again");
        assert_eq!(grown(1 << 40, 9), 9, "a wide counter does not wrap in a lifetime");
    }

    #[test]
    fn words_are_four_bytes_and_directions_are_told_apart() {
        let before = Counts { rdma_in: Some(100), rdma_out: Some(0), net_in: 7, ..Counts::default() };
        let after = Counts { rdma_in: Some(350), rdma_out: Some(1), net_in: 9, ..Counts::default() };
        let moved = of_counts(&before, &after);
        assert_eq!((moved.rdma_in, moved.rdma_out, moved.net_in, moved.net_out), (1000, 4, 2, 0));
        assert_eq!((moved.rdma(), moved.net(), moved.carried(), moved.all()), (1000, 2, 1002, 1006));
    }

    #[test]
    fn an_error_of_the_cage_counts_once_for_both_twins() {
        let rail = |device: &str, twin: &str| Rail {
            device: device.into(),
            twin: Some(twin.into()),
            ..Rail::default()
        };
        let inventory = Inventory { rails: vec![rail("a", "b"), rail("b", "a")], ..Inventory::default() };
        let counts = |cable, loss| Counts {
            errors: [("symbol_error".to_owned(), cable), ("packet_seq_err".to_owned(), loss)].into(),
            ..Counts::default()
        };
        let before = Sample::from([("a".to_owned(), counts(0, 0)), ("b".to_owned(), counts(0, 0))]);
        let after = Sample::from([("a".to_owned(), counts(3, 2)), ("b".to_owned(), counts(3, 2))]);
        let moved = between(&before, &after, &inventory);
        assert_eq!(moved["a"].errors.len(), 2);
        assert_eq!(moved["b"].errors, BTreeMap::from([("packet_seq_err".to_owned(), 2)]));
    }

    #[test]
    fn every_watched_counter_has_one_line() {
        for watched in &WATCHED {
            assert_eq!(meaning(watched.name), Some(watched.meaning), "{}", watched.name);
        }
        assert_eq!(meaning("resp_cqe_flush_error"), None);
    }
}
