//! Whether packets of full size reach the other box: sent to a port where nobody listens, with the flag that forbids
//! cutting them.
//!
//! The other kernel answers a packet for a closed port with a refusal, so one that arrived is known to have arrived,
//! without a program of ours at the other end and without privileges here. A cable whose other end has a smaller MTU
//! drops large packets without a word, and everything small works: that is what this tells apart.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use rustix::net::sockopt::{Ipv4PathMtuDiscovery, set_ip_mtu_discover};

use super::inventory::Inventory;
use super::measured::{Answer, Probe};

/// A port for which nothing is registered, as traceroute begins with.
const PORT: u16 = 33_434;

/// Headers of IPv4 and UDP.
const HEADERS: u32 = 28;

/// Kernels bound how many refusals they send to one address: six at once, then one a second
/// (net/ipv4/icmp.c). Three tries of each of two packets stay below.
const TRIES: u32 = 3;
const WAIT: Duration = Duration::from_millis(300);

/// Sends a small and a full packet from each rail to the addresses of its peer that lie in its network. Blocks for at
/// most two seconds a rail.
pub fn probe(here: &Inventory, peers: &[IpAddr]) -> Vec<Probe> {
    let mut probes = Vec::new();
    for rail in &here.rails {
        let Some(own) = rail.ipv4() else { continue };
        for peer in peers.iter().filter(|peer| own.holds(**peer) && **peer != own.ip) {
            let to = SocketAddr::new(*peer, PORT);
            let ask = |bytes| {
                send(&rail.device, own.ip, to, bytes).unwrap_or_else(|e| Answer::Unsent(e.to_string()))
            };
            let large = ask(rail.mtu.saturating_sub(HEADERS) as usize);
            probes.push(Probe { rail: rail.device.clone(), to: *peer, mtu: rail.mtu, small: ask(1), large });
        }
    }
    probes
}

fn send(device: &str, from: IpAddr, to: SocketAddr, bytes: usize) -> io::Result<Answer> {
    let socket = UdpSocket::bind(SocketAddr::new(from, 0))?;
    // Without the privilege on an old kernel the address alone decides, as it does for a rail's connections.
    let _ = setsockopt(&socket, sockopt::BindToDevice, &device.into());
    set_ip_mtu_discover(socket.as_fd(), Ipv4PathMtuDiscovery::PROBE)?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(WAIT))?;
    let packet = vec![0; bytes];
    for _ in 0..TRIES {
        match socket.send(&packet) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Ok(Answer::Arrived),
            Err(error) if error.raw_os_error() == Some(nix::libc::EMSGSIZE) => return Ok(too_large(&socket)),
            Err(error) => return Err(error),
        }
        match socket.recv(&mut [0; 16]) {
            Ok(_) => return Ok(Answer::Arrived),
            Err(error) => match error.kind() {
                ErrorKind::ConnectionRefused => return Ok(Answer::Arrived),
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                _ if error.raw_os_error() == Some(nix::libc::EMSGSIZE) => return Ok(too_large(&socket)),
                _ => return Err(error),
            },
        }
    }
    Ok(Answer::Silent)
}

fn too_large(socket: &UdpSocket) -> Answer {
    let takes = getsockopt(socket, sockopt::IpMtu).ok();
    Answer::TooLarge(takes.and_then(|mtu| u32::try_from(mtu).ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_takes_what_fits_and_refuses_what_does_not() {
        let own: IpAddr = "127.0.0.1".parse().unwrap();
        let to = SocketAddr::new("127.0.0.2".parse().unwrap(), PORT);
        assert_eq!(send("lo", own, to, 1).unwrap(), Answer::Arrived);
        // The loopback's MTU is 65536, and no packet of UDP is longer than 65507.
        assert!(matches!(send("lo", own, to, 65_508).unwrap(), Answer::TooLarge(_)));
        let away = SocketAddr::new("192.0.2.1".parse().unwrap(), PORT);
        assert!(send("lo", own, away, 1).is_err() || send("lo", own, away, 1).unwrap() == Answer::Silent);
    }
}
