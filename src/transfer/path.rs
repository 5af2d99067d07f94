//! Rails by name: which of this box's ends goes with which of the other's, and over which device.
//!
//! A box with several cable functions has one address on each. Two boxes pair their ends by subnet; ends whose subnet
//! says nothing are paired in the order in which both sides list them. An end is used once, so a rail never leaves on
//! one cable and arrives on another's address. Devices are found by their address, never by a name that is written
//! down: names change with slots, firmware and kernels.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use serde::Serialize;

/// This box's end of a rail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Local {
    pub address: IpAddr,
    /// Bits of the address that are its subnet.
    pub prefix: u8,
    /// Network device that has the address.
    pub device: String,
}

/// One way to the other box.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Path {
    /// The local device, or `rail<n>` where none is pinned. No two paths of a list are named alike.
    pub name: String,
    /// Where its bytes leave; `None`: wherever the routing table says.
    pub local: Option<Local>,
    /// Address and port of the other end.
    pub remote: String,
}

impl Local {
    /// Finds the device of each address.
    ///
    /// # Errors
    /// When this box does not have one of them.
    pub fn find(addresses: &[IpAddr]) -> io::Result<Vec<Self>> {
        let all = devices()?;
        addresses.iter().map(|address| Self::among(&all, *address)).collect()
    }

    fn among(all: &[(Self, bool)], address: IpAddr) -> io::Result<Self> {
        let own = all.iter().find(|(local, _)| local.address == address);
        // All of 127.0.0.0/8 is this machine's; the device lists only the first.
        let found = own.or_else(|| all.iter().find(|(local, loops)| *loops && local.holds(address)));
        let Some((local, _)) = found else {
            let known: Vec<String> =
                all.iter().map(|(l, _)| format!("{} ({})", l.address, l.device)).collect();
            let what = format!(
                "no device of this machine has the address {address}; there are {}",
                known.join(", ")
            );
            return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, what));
        };
        Ok(Self { address, ..local.clone() })
    }

    /// Whether `other` lies in the same subnet.
    fn holds(&self, other: IpAddr) -> bool {
        let same = |own: u128, other: u128, bits: u8| {
            let shift = u32::from(bits.saturating_sub(self.prefix));
            own.checked_shr(shift).unwrap_or(0) == other.checked_shr(shift).unwrap_or(0)
        };
        match (self.address, other) {
            (IpAddr::V4(own), IpAddr::V4(other)) => same(u32::from(own).into(), u32::from(other).into(), 32),
            (IpAddr::V6(own), IpAddr::V6(other)) => same(own.into(), other.into(), 128),
            _ => false,
        }
    }
}

/// Every address of this machine, and whether its device is the loopback.
fn devices() -> io::Result<Vec<(Local, bool)>> {
    let mut found = Vec::new();
    for one in getifaddrs()? {
        let address = one.address.as_ref().and_then(|storage| {
            let v4 = storage.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
            v4.or_else(|| storage.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))
        });
        let Some(address) = address else { continue };
        let mask = one.netmask.as_ref().and_then(|storage| {
            let v4 = storage.as_sockaddr_in().map(|a| a.ip().to_bits().count_ones());
            v4.or_else(|| storage.as_sockaddr_in6().map(|a| u128::from(a.ip()).count_ones()))
        });
        let whole = if address == IpAddr::V4(Ipv4Addr::UNSPECIFIED) || address.is_ipv4() { 32 } else { 128 };
        let prefix = u8::try_from(mask.unwrap_or(whole)).unwrap_or(128);
        let loops = one.flags.contains(InterfaceFlags::IFF_LOOPBACK);
        found.push((Local { address, prefix, device: one.interface_name }, loops));
    }
    Ok(found)
}

/// Pairs this box's ends with the other's. Without ends of its own it goes to every address as the routing table
/// says. An end without a partner is not used.
pub fn pair(locals: &[Local], remotes: &[String]) -> Vec<Path> {
    if locals.is_empty() {
        let unpinned = |(n, remote): (usize, &String)| Path {
            name: format!("rail{n}"),
            local: None,
            remote: remote.clone(),
        };
        return remotes.iter().enumerate().map(unpinned).collect();
    }
    let ip = |remote: &String| remote.parse::<SocketAddr>().ok().map(|a| a.ip());
    let mut taken = vec![false; remotes.len()];
    let mut partner: Vec<Option<usize>> = vec![None; locals.len()];
    for (local, partner) in locals.iter().zip(&mut partner) {
        let near = |n: &usize| !taken[*n] && ip(&remotes[*n]).is_some_and(|ip| local.holds(ip));
        *partner = (0..remotes.len()).find(near);
        if let Some(n) = *partner {
            taken[n] = true;
        }
    }
    for partner in partner.iter_mut().filter(|p| p.is_none()) {
        *partner = taken.iter().position(|taken| !taken);
        if let Some(n) = *partner {
            taken[n] = true;
        }
    }
    let mut paths: Vec<Path> = Vec::new();
    for (local, n) in locals.iter().zip(partner).filter_map(|(local, n)| Some((local, n?))) {
        let alike =
            paths.iter().filter(|p| p.local.as_ref().is_some_and(|l| l.device == local.device)).count();
        let name = if alike == 0 { local.device.clone() } else { format!("{}-{alike}", local.device) };
        paths.push(Path { name, local: Some(local.clone()), remote: remotes[n].clone() });
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(address: &str, prefix: u8, device: &str) -> Local {
        Local { address: address.parse().unwrap(), prefix, device: device.into() }
    }

    fn ends(paths: &[Path]) -> Vec<(&str, &str)> {
        paths.iter().map(|p| (p.name.as_str(), p.remote.as_str())).collect()
    }

    #[test]
    fn ends_are_paired_by_subnet_whatever_the_order() {
        let locals = [local("10.77.0.1", 24, "a"), local("10.77.1.1", 24, "b")];
        let crossed = ["10.77.1.2:8003".to_owned(), "10.77.0.2:8003".to_owned()];
        assert_eq!(ends(&pair(&locals, &crossed)), [("a", "10.77.0.2:8003"), ("b", "10.77.1.2:8003")]);
        let v6 = [local("fe80::1", 64, "a"), local("fd00::1", 64, "b")];
        let far = ["[fd00::2]:1".to_owned(), "[fe80::2]:1".to_owned()];
        assert_eq!(ends(&pair(&v6, &far)), [("a", "[fe80::2]:1"), ("b", "[fd00::2]:1")]);
    }

    #[test]
    fn what_no_subnet_decides_goes_by_order_and_no_end_is_used_twice() {
        let locals = [local("10.0.0.1", 8, "a"), local("10.0.0.2", 8, "b"), local("192.168.1.1", 24, "c")];
        let remotes = ["10.0.0.3:1".to_owned(), "10.0.0.4:1".to_owned()];
        assert_eq!(ends(&pair(&locals, &remotes)), [("a", "10.0.0.3:1"), ("b", "10.0.0.4:1")]);
        let others = ["172.16.0.1:1".to_owned(), "10.9.9.9:1".to_owned(), "box:1".to_owned()];
        let paired = pair(&locals, &others);
        assert_eq!(ends(&paired), [("a", "10.9.9.9:1"), ("b", "172.16.0.1:1"), ("c", "box:1")]);
    }

    #[test]
    fn without_ends_of_its_own_every_address_is_a_path() {
        let paired = pair(&[], &["one:1".to_owned(), "two:1".to_owned()]);
        assert_eq!(ends(&paired), [("rail0", "one:1"), ("rail1", "two:1")]);
        assert!(paired.iter().all(|path| path.local.is_none()));
    }

    #[test]
    fn devices_are_found_by_address_and_two_on_one_are_named_apart() {
        let two = ["127.0.0.1".parse().unwrap(), "127.0.0.2".parse().unwrap()];
        let found = Local::find(&two).unwrap();
        assert_eq!(found[0].prefix, 8);
        assert_eq!(found[0].device, found[1].device);
        let paths = pair(&found, &["127.0.0.3:1".to_owned(), "127.0.0.4:1".to_owned()]);
        assert_ne!(paths[0].name, paths[1].name);
        let error = Local::find(&["192.0.2.77".parse().unwrap()]).unwrap_err();
        assert!(error.to_string().contains("192.0.2.77"), "{error}");
    }
}
