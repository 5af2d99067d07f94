//! Where facts about a machine are read: its own `/sys`, `/proc` and `/dev`, a folder laid out in the same way, or a
//! file in which such reads were recorded.
//!
//! All three answer alike, so that what a Spark showed can be looked at on any machine. What does not exist, cannot be
//! read or is no text is `None`: files of `/sys` come and go with the hardware, and a reader asks again next time.
//! A recording holds exactly what was asked for, one line each:
//!
//! ```text
//! # comment
//! like healthy.tree                                   first take everything of that file, beside this one
//! drop sys/class/net/enP2p1s0f1np1                    then forget this and what is below
//! sys/class/net/enp1s0f1np1/mtu = 9000
//! sys/class/net/enp1s0f1np1/device = 0000:01:00.1     a link: the name it leads to
//! proc/meminfo#CmaFree = 9961472 kB                   one line of a file
//! dev/infiniband/uverbs0 = opens                      or missing, denied, forbidden
//! addresses/enp1s0f1np1 = 192.168.100.10/24
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// What one file of a tree is read of. `/proc/meminfo` is 2 KiB; nothing here is longer than a few.
const TEXT_MAX: u64 = 64 << 10;

/// Size of a recording. A Spark's has some 300 lines.
const RECORDING_MAX: u64 = 4 << 20;

/// Recordings that may build on each other.
const LIKE_DEPTH: u32 = 4;

/// Why a recording could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}:{line}: {what}")]
    Line { path: PathBuf, line: usize, what: &'static str },
}

/// Whether a device file opens for reading and writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    Opens,
    /// No such file, or no such device behind it.
    Missing,
    /// EACCES: the file's owner and mode forbid it.
    Denied,
    /// EPERM: a device cgroup forbids it, whoever asks.
    Forbidden,
    /// Anything else.
    Fails,
}

impl Access {
    const ALL: [(Self, &'static str); 5] = [
        (Self::Opens, "opens"),
        (Self::Missing, "missing"),
        (Self::Denied, "denied"),
        (Self::Forbidden, "forbidden"),
        (Self::Fails, "fails"),
    ];

    fn of(opened: io::Result<fs::File>) -> Self {
        match opened.map_err(|error| error.raw_os_error()) {
            Ok(_) => Self::Opens,
            Err(Some(nix::libc::ENOENT | nix::libc::ENXIO | nix::libc::ENODEV)) => Self::Missing,
            Err(Some(nix::libc::EACCES)) => Self::Denied,
            Err(Some(nix::libc::EPERM)) => Self::Forbidden,
            Err(_) => Self::Fails,
        }
    }

    fn word(self) -> &'static str {
        Self::ALL.iter().find(|(access, _)| *access == self).map_or("fails", |(_, word)| word)
    }
}

/// A machine, or what was recorded of one.
#[derive(Debug)]
pub struct Tree {
    from: Place,
    /// What was read, by path, when it is to be written down. Guards nothing else.
    seen: Option<Mutex<BTreeMap<String, String>>>,
}

#[derive(Debug)]
enum Place {
    /// The machine's own root, or a folder that looks like one.
    Folder(PathBuf),
    Recording(BTreeMap<String, String>),
}

impl Tree {
    /// This machine.
    pub fn machine() -> Self {
        Self { from: Place::Folder("/".into()), seen: None }
    }

    /// A folder laid out like a machine's root, or a file with a recording.
    pub fn at(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Read { path: path.to_owned(), source };
        let from = if fs::metadata(path).map_err(failed)?.is_dir() {
            Place::Folder(path.to_owned())
        } else {
            Place::Recording(recording(path, LIKE_DEPTH)?)
        };
        Ok(Self { from, seen: None })
    }

    /// Keeps what is read from now on, for [`Tree::recorded`].
    #[must_use]
    pub fn recording(self) -> Self {
        Self { seen: Some(Mutex::default()), ..self }
    }

    /// Everything that was read since [`Tree::recording`], as a recording.
    pub fn recorded(&self) -> String {
        let mut text = String::new();
        for (path, value) in self.seen.iter().flat_map(|seen| seen.lock().clone()) {
            let _ = writeln!(text, "{path} = {value}");
        }
        text
    }

    /// Whether this is the machine that runs this process.
    pub fn is_this_machine(&self) -> bool {
        matches!(&self.from, Place::Folder(root) if root == Path::new("/"))
    }

    /// The first line of a file.
    pub fn text(&self, path: &str) -> Option<String> {
        let text = match &self.from {
            Place::Folder(root) => first_line(&read(&root.join(path))?)?,
            Place::Recording(lines) => lines.get(path)?.clone(),
        };
        self.see(path, &text);
        Some(text)
    }

    /// A number in a file, in base ten.
    pub fn number<N: std::str::FromStr>(&self, path: &str) -> Option<N> {
        self.text(path)?.parse().ok()
    }

    /// What follows `name` in the line of a file that begins with it.
    pub fn field(&self, path: &str, name: &str) -> Option<String> {
        let key = format!("{path}#{name}");
        let text = match &self.from {
            Place::Folder(root) => {
                let whole = read(&root.join(path))?;
                let rest = whole.lines().find_map(|line| line.strip_prefix(name))?;
                rest.trim_start_matches(':').trim().to_owned()
            }
            Place::Recording(lines) => lines.get(&key)?.clone(),
        };
        self.see(&key, &text);
        Some(text)
    }

    /// All lines of a file.
    pub fn lines(&self, path: &str) -> Vec<String> {
        match &self.from {
            Place::Folder(root) => {
                let lines: Vec<String> =
                    read(&root.join(path)).iter().flat_map(|text| text.lines()).map(str::to_owned).collect();
                for (n, line) in lines.iter().enumerate() {
                    self.see(&format!("{path}/{n:04}"), line);
                }
                lines
            }
            Place::Recording(_) => {
                self.list(path).iter().filter_map(|n| self.text(&format!("{path}/{n}"))).collect()
            }
        }
    }

    /// Names in a folder, in their order.
    pub fn list(&self, path: &str) -> Vec<String> {
        match &self.from {
            Place::Folder(root) => {
                let entries = fs::read_dir(root.join(path)).into_iter().flatten().flatten();
                let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
                names.collect::<BTreeSet<_>>().into_iter().collect()
            }
            Place::Recording(lines) => {
                let below = format!("{path}/");
                let names = lines.range(below.clone()..).map_while(|(key, _)| key.strip_prefix(&below));
                let names = names.filter_map(|rest| rest.split(['/', '#']).next().map(str::to_owned));
                names.collect::<BTreeSet<_>>().into_iter().collect()
            }
        }
    }

    /// The name of what a link leads to.
    pub fn link(&self, path: &str) -> Option<String> {
        let name = match &self.from {
            Place::Folder(root) => {
                let to = fs::read_link(root.join(path)).ok()?;
                to.file_name()?.to_str()?.to_owned()
            }
            Place::Recording(lines) => lines.get(path)?.clone(),
        };
        self.see(path, &name);
        Some(name)
    }

    /// Whether a device file opens. Opening alone changes nothing.
    pub fn access(&self, path: &str) -> Access {
        let access = match &self.from {
            Place::Folder(root) => {
                Access::of(fs::OpenOptions::new().read(true).write(true).open(root.join(path)))
            }
            Place::Recording(lines) => {
                let word = lines.get(path).map_or("missing", String::as_str);
                Access::ALL.iter().find(|(_, w)| *w == word).map_or(Access::Fails, |(access, _)| *access)
            }
        };
        self.see(path, access.word());
        access
    }

    /// Addresses by device, with the length of their prefix.
    pub fn addresses(&self) -> BTreeMap<String, Vec<Net>> {
        let addresses = if self.is_this_machine() {
            own_addresses()
        } else {
            let of = |device: String| {
                let nets = self.text(&format!("addresses/{device}")).unwrap_or_default();
                (device, nets.split_whitespace().filter_map(Net::parse).collect())
            };
            self.list("addresses").into_iter().map(of).collect()
        };
        for (device, nets) in &addresses {
            let words: Vec<String> = nets.iter().map(Net::to_string).collect();
            self.see(&format!("addresses/{device}"), &words.join(" "));
        }
        addresses
    }

    fn see(&self, path: &str, value: &str) {
        if let Some(seen) = &self.seen {
            seen.lock().insert(path.to_owned(), value.to_owned());
        }
    }
}

/// An address with the length of its network's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Net {
    pub ip: IpAddr,
    pub prefix: u8,
}

impl Net {
    /// `192.168.100.10/24`.
    pub fn parse(text: &str) -> Option<Self> {
        let (ip, prefix) = text.split_once('/')?;
        let (ip, prefix): (IpAddr, u8) = (ip.parse().ok()?, prefix.parse().ok()?);
        let bits = if ip.is_ipv4() { 32 } else { 128 };
        (prefix <= bits).then_some(Self { ip, prefix })
    }

    /// Whether `other` lies in this network.
    pub fn holds(&self, other: IpAddr) -> bool {
        match (self.ip, other) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0);
                u32::from(a) & mask == u32::from(b) & mask
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix)).unwrap_or(0);
                u128::from(a) & mask == u128::from(b) & mask
            }
            _ => false,
        }
    }

    /// Whether both are the same network, or one contains the other.
    pub fn overlaps(&self, other: &Self) -> bool {
        if self.prefix <= other.prefix { self.holds(other.ip) } else { other.holds(self.ip) }
    }

    /// An address that only means something on its own link, or on this machine.
    pub fn is_local(&self) -> bool {
        match self.ip {
            IpAddr::V4(ip) => ip.is_loopback(),
            IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local(),
        }
    }
}

impl std::fmt::Display for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix)
    }
}

impl From<Net> for String {
    fn from(net: Net) -> Self {
        net.to_string()
    }
}

impl TryFrom<String> for Net {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::parse(&text).ok_or("not an address with a prefix, such as 192.168.100.10/24")
    }
}

fn own_addresses() -> BTreeMap<String, Vec<Net>> {
    let mut by_device: BTreeMap<String, Vec<Net>> = BTreeMap::new();
    for entry in nix::ifaddrs::getifaddrs().into_iter().flatten() {
        let ip = |of: Option<&nix::sys::socket::SockaddrStorage>| {
            let of = of?;
            let v4 = of.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
            v4.or_else(|| of.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
        };
        let (Some(ip), Some(mask)) = (ip(entry.address.as_ref()), ip(entry.netmask.as_ref())) else {
            continue;
        };
        let ones = match mask {
            IpAddr::V4(mask) => u32::from(mask).leading_ones(),
            IpAddr::V6(mask) => u128::from(mask).leading_ones(),
        };
        let prefix = u8::try_from(ones).unwrap_or(128);
        by_device.entry(entry.interface_name).or_default().push(Net { ip, prefix });
    }
    by_device
}

fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    fs::File::open(path).ok()?.take(TEXT_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

fn first_line(text: &str) -> Option<String> {
    let line = text.lines().next()?.trim();
    (!line.is_empty()).then(|| line.to_owned())
}

fn recording(path: &Path, depth: u32) -> Result<BTreeMap<String, String>, Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    let mut text = String::new();
    fs::File::open(path)
        .and_then(|file| file.take(RECORDING_MAX).read_to_string(&mut text))
        .map_err(failed)?;
    let mut lines = BTreeMap::new();
    for (n, line) in text.lines().enumerate() {
        let wrong = |what| Error::Line { path: path.to_owned(), line: n + 1, what };
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix("like ") {
            let depth =
                depth.checked_sub(1).ok_or_else(|| wrong("recordings build on each other too deep"))?;
            lines.extend(recording(&path.with_file_name(name.trim()), depth)?);
        } else if let Some(gone) = line.strip_prefix("drop ") {
            let (gone, below) = (gone.trim(), format!("{}/", gone.trim()));
            lines.retain(|key: &String, _| key != gone && !key.starts_with(&below));
        } else {
            let (key, value) = line
                .split_once(" = ")
                .ok_or_else(|| wrong("not `PATH = VALUE`, `like FILE` or `drop PATH`"))?;
            lines.insert(key.trim().to_owned(), value.trim().to_owned());
        }
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_says_what_the_machine_said() {
        let dir = tempfile::tempdir().unwrap();
        let net = dir.path().join("sys/class/net/rail0");
        fs::create_dir_all(&net).unwrap();
        fs::write(net.join("mtu"), "9000\n").unwrap();
        std::os::unix::fs::symlink("../../../0000:01:00.0", net.join("device")).unwrap();
        fs::create_dir_all(dir.path().join("proc")).unwrap();
        fs::write(dir.path().join("proc/meminfo"), "MemTotal: 1 kB\nCmaFree:   12 kB\n").unwrap();
        fs::create_dir_all(dir.path().join("addresses")).unwrap();
        fs::write(dir.path().join("addresses/rail0"), "10.0.0.1/24 fe80::1/64\n").unwrap();
        let ask = |tree: &Tree| {
            let device = tree.link("sys/class/net/rail0/device");
            let mtu: Option<u32> = tree.number("sys/class/net/rail0/mtu");
            let cma = tree.field("proc/meminfo", "CmaFree");
            let access = tree.access("dev/infiniband/uverbs0");
            let lines = tree.lines("proc/meminfo");
            (tree.list("sys/class/net"), device, mtu, cma, access, lines, tree.addresses())
        };
        let folder = Tree::at(dir.path()).unwrap().recording();
        let said = ask(&folder);
        assert_eq!(said.0, ["rail0"]);
        assert_eq!(said.1.as_deref(), Some("0000:01:00.0"));
        assert_eq!((said.2, said.3.as_deref(), said.4), (Some(9000), Some("12 kB"), Access::Missing));
        assert_eq!(said.5.len(), 2);
        assert_eq!(said.6["rail0"], ["10.0.0.1/24", "fe80::1/64"].map(|n| Net::parse(n).unwrap()));
        let file = dir.path().join("a.tree");
        fs::write(&file, folder.recorded()).unwrap();
        assert_eq!(ask(&Tree::at(&file).unwrap()), said);
    }

    #[test]
    fn a_recording_builds_on_another_and_a_wrong_line_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("base"), "a/b = 1\na/bc = 2\na/b/c = 3\n").unwrap();
        fs::write(path("case"), "# a case\nlike base\ndrop a/b\na/d = 4 = four\n").unwrap();
        let tree = Tree::at(&path("case")).unwrap();
        assert_eq!(tree.list("a"), ["bc", "d"]);
        assert_eq!(tree.text("a/d").as_deref(), Some("4 = four"));
        fs::write(path("bad"), "a = 1\nb\n").unwrap();
        let said = Tree::at(&path("bad")).unwrap_err().to_string();
        assert!(said.contains("bad:2: not `PATH = VALUE`"), "{said}");
        fs::write(path("round"), "like round\n").unwrap();
        let said = Tree::at(&path("round")).unwrap_err().to_string();
        assert!(said.contains("too deep"), "{said}");
        assert!(Tree::at(&path("none")).unwrap_err().to_string().contains("none: No such file"));
    }

    #[test]
    fn networks_are_compared_by_their_prefix() {
        let net = |text| Net::parse(text).unwrap();
        assert!(net("192.168.100.10/24").overlaps(&net("192.168.100.11/24")));
        assert!(!net("192.168.100.10/24").overlaps(&net("192.168.101.10/24")));
        assert!(net("192.168.0.1/16").overlaps(&net("192.168.101.10/24")));
        assert!(net("10.0.0.1/0").holds("1.2.3.4".parse().unwrap()));
        assert!(!net("fd00::1/64").holds("10.0.0.1".parse().unwrap()));
        for text in ["10.0.0.1", "10.0.0.1/33", "x/24", "10.0.0.1/-1"] {
            assert_eq!(Net::parse(text), None, "{text}");
        }
    }

    #[test]
    fn this_machine_has_a_loopback_address() {
        let addresses = Tree::machine().addresses();
        assert!(addresses.values().flatten().any(|net| net.ip.is_loopback()), "{addresses:?}");
    }
}
