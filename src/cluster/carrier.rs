//! Which fabric rows travel over, and why that one: decided once, at start.
//!
//! NIXL is taken by itself only where it is faster for certain: the library is there and starts, and every rail has an
//! RDMA device. Asked for by name it is taken over TCP too, or the start is refused with the reason. Whatever happens,
//! one sentence says what is used and why; it goes to the log, the status and `spark-kv rails`.

use std::io;
use std::net::IpAddr;

use crate::base::units::Bytes;
use crate::rails::{Inventory, Nixl, Rail, Tree};
use crate::settings::Carries;
use crate::transfer::{Fabric, Local, nixl};

/// What is wanted, and what was found.
#[derive(Clone, Debug, Default)]
pub struct Carrier {
    pub wanted: Carries,
    /// Where the library lies.
    pub found: Nixl,
}

/// A fabric, and why it is that one.
#[derive(Debug)]
pub struct Chosen {
    pub fabric: Fabric,
    pub why: String,
}

impl Carrier {
    /// NIXL by the library at this path, over whatever the rails have.
    pub fn nixl(library: std::path::PathBuf) -> Self {
        let found = Nixl { library: Some(library), ..Nixl::default() };
        Self { wanted: Carries::Nixl, found }
    }

    /// Makes the fabric for these ends of rails. Blocks while the library starts.
    ///
    /// # Errors
    /// When this box lacks an address, or NIXL was asked for by name and cannot be used.
    pub fn choose(&self, rails: &[IpAddr], memory: Bytes) -> io::Result<Chosen> {
        let tcp = Fabric::tcp(rails)?;
        if self.wanted == Carries::Tcp {
            return Ok(Chosen { fabric: tcp, why: "the settings say so".into() });
        }
        let inventory = Inventory::read(&Tree::machine(), rails);
        match self.start(&tcp, &inventory, memory) {
            Ok(chosen) => Ok(chosen),
            Err(why) if self.wanted == Carries::Auto => Ok(Chosen { fabric: tcp, why }),
            Err(why) => {
                Err(io::Error::other(format!("cluster.fabric is nixl, and it cannot be used: {why}")))
            }
        }
    }

    fn start(&self, tcp: &Fabric, inventory: &Inventory, memory: Bytes) -> Result<Chosen, String> {
        let ends = tcp.ends();
        let (library, transports) = self.plan(ends, inventory)?;
        let by_rdma = transports.iter().all(|(_, how)| *how != nixl::Transport::Tcp) && !ends.is_empty();
        let options = nixl::Options { library: library.clone(), transports, memory: memory.0 };
        let remote = nixl::start(options).map_err(|error| format!("NIXL does not start: {error}"))?;
        let fabric = Fabric::one_sided(tcp.clone(), remote);
        fabric.warm().map_err(|error| format!("NIXL does not start: {error}"))?;
        let version = self.found.version.as_deref().map_or(String::new(), |version| format!(" {version}"));
        let mut why = format!("NIXL{version} at {} started", library.display());
        if !by_rdma {
            why += ", and cluster.fabric asks for it. Over TCP it opens ports that ask for no key: let nobody else reach \
                    these addresses";
        }
        Ok(Chosen { fabric, why })
    }

    /// What to start, or why not.
    fn plan(
        &self,
        ends: &[Local],
        inventory: &Inventory,
    ) -> Result<(std::path::PathBuf, Vec<(String, nixl::Transport)>), String> {
        let library = self.found.library.clone().ok_or_else(|| {
            let looked: Vec<String> =
                self.found.looked_in.iter().map(|at| at.display().to_string()).collect();
            format!("NIXL is not installed (looked in {})", looked.join(", "))
        })?;
        let transport = |end: &Local| {
            let rdma = inventory.rail(&end.device).and_then(rdma);
            (end.device.clone(), rdma.unwrap_or(nixl::Transport::Tcp))
        };
        let transports: Vec<_> = ends.iter().map(transport).collect();
        if self.wanted == Carries::Auto {
            if ends.is_empty() {
                return Err("cluster.rails names no rail that NIXL could be pinned to".into());
            }
            let without = transports.iter().filter(|(_, how)| *how == nixl::Transport::Tcp);
            let without: Vec<&str> = without.map(|(device, _)| device.as_str()).collect();
            if !without.is_empty() {
                return Err(format!(
                    "{} has no RDMA device that is active; NIXL over TCP gains nothing",
                    without.join(" and ")
                ));
            }
        }
        Ok((library, transports))
    }
}

fn rdma(rail: &Rail) -> Option<nixl::Transport> {
    let rdma = rail.rdma.as_ref().filter(|rdma| rdma.active)?;
    let gid = rdma.gid.as_ref().map(|gid| gid.index);
    Some(nixl::Transport::Rdma { device: rdma.device.clone(), port: rdma.port, gid })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rails::{Gid, Rdma};

    fn end(device: &str) -> Local {
        Local { address: "10.0.0.1".parse().unwrap(), prefix: 24, device: device.into() }
    }

    fn inventory() -> Inventory {
        let gid = Gid { index: 5, address: "10.0.0.1".parse().unwrap() };
        let rdma = Rdma { device: "mlx5_0".into(), port: 1, active: true, gid: Some(gid), ..Rdma::default() };
        let with = Rail { device: "fast".into(), rdma: Some(rdma.clone()), ..Rail::default() };
        let down = Rdma { active: false, ..rdma };
        let without = Rail { device: "down".into(), rdma: Some(down), ..Rail::default() };
        Inventory { rails: vec![with, without], ..Inventory::default() }
    }

    #[test]
    fn it_is_taken_by_itself_only_where_every_rail_has_rdma() {
        let carrier = Carrier { wanted: Carries::Auto, ..Carrier::nixl("/x.so".into()) };
        let (_, transports) = carrier.plan(&[end("fast")], &inventory()).unwrap();
        let rdma = nixl::Transport::Rdma { device: "mlx5_0".into(), port: 1, gid: Some(5) };
        assert_eq!(transports, [("fast".to_owned(), rdma)]);
        for (ends, says) in [
            (vec![], "cluster.rails"),
            (vec![end("fast"), end("down")], "down has no RDMA device"),
            (vec![end("eth")], "eth has no RDMA device"),
        ] {
            let why = carrier.plan(&ends, &inventory()).unwrap_err();
            assert!(why.contains(says), "{why}");
        }
        let asked = Carrier { wanted: Carries::Nixl, ..carrier };
        let (_, transports) = asked.plan(&[end("eth")], &inventory()).unwrap();
        assert_eq!(transports, [("eth".to_owned(), nixl::Transport::Tcp)]);
    }

    #[test]
    fn without_the_library_auto_takes_tcp_and_a_name_is_refused_both_with_the_reason() {
        let found = Nixl { looked_in: vec!["/somewhere".into()], ..Nixl::default() };
        let auto = Carrier { wanted: Carries::Auto, found: found.clone() };
        let chosen = auto.choose(&[], Bytes::mib(1)).unwrap();
        assert_eq!(chosen.fabric.name(), "TCP");
        assert_eq!(chosen.why, "NIXL is not installed (looked in /somewhere)");
        let refused =
            Carrier { wanted: Carries::Nixl, found }.choose(&[], Bytes::mib(1)).unwrap_err().to_string();
        assert!(refused.contains("looked in /somewhere") && refused.contains("cluster.fabric"), "{refused}");
        let broken = Carrier { wanted: Carries::Auto, ..Carrier::nixl("/nowhere/libnixl_capi.so".into()) };
        let why = broken.choose(&["127.0.0.1".parse().unwrap()], Bytes::mib(1)).unwrap().why;
        assert!(why.contains("no RDMA device"), "{why}");
    }
}
