//! Small truths about processes and files that the guard, the keeper and the view share.
//!
//! A pid alone names nobody: numbers come back. Together with the start time from `/proc` it does.

use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// One process, told apart from later ones with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub pid: u32,
    /// Clock ticks from boot to its start.
    pub started: u64,
}

impl Identity {
    pub fn own() -> Self {
        Self::of(std::process::id()).unwrap_or(Self { pid: std::process::id(), started: 0 })
    }

    /// The process that has this number now.
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self { pid, started: stat(pid)?.started })
    }

    /// Whether exactly this process still runs. A zombie does not.
    pub fn lives(self) -> bool {
        stat(self.pid).is_some_and(|s| s.started == self.started && s.state != 'Z' && s.state != 'X')
    }
}

/// The fields of `/proc/<pid>/stat` that are used here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stat {
    pub pid: u32,
    pub state: char,
    pub parent: u32,
    pub group: u32,
    pub started: u64,
}

pub(super) fn stat(pid: u32) -> Option<Stat> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse_stat(pid, &String::from_utf8_lossy(&text))
}

/// The program's name stands in brackets and may hold anything, brackets too: the fields begin after the last one.
fn parse_stat(pid: u32, text: &str) -> Option<Stat> {
    let fields: Vec<&str> = text[text.rfind(')')? + 1..].split_ascii_whitespace().collect();
    Some(Stat {
        pid,
        state: fields.first()?.chars().next()?,
        parent: fields.get(1)?.parse().ok()?,
        group: fields.get(2)?.parse().ok()?,
        started: fields.get(19)?.parse().ok()?,
    })
}

/// All processes that can be seen.
pub(super) fn everybody() -> Vec<Stat> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|e| stat(e.file_name().to_str()?.parse().ok()?)).collect()
}

/// Children of `root`, their children, and so on.
pub(super) fn descendants(root: u32) -> Vec<Stat> {
    let all = everybody();
    let mut found: Vec<Stat> = Vec::new();
    let mut parents = vec![root];
    while let Some(parent) = parents.pop() {
        for &child in all.iter().filter(|s| s.parent == parent) {
            if !found.iter().any(|s| s.pid == child.pid) {
                found.push(child);
                parents.push(child.pid);
            }
        }
    }
    found
}

/// Writes a file that is either the old or the new one, never half of it.
pub(crate) fn write_whole(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let beside = beside(path);
    let _ = std::fs::remove_file(&beside);
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&beside)?;
    file.write_all(bytes)?;
    drop(file);
    std::fs::rename(&beside, path)
}

/// As [`write_whole`], and on the drive when it returns.
pub(crate) fn write_durable(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let beside = beside(path);
    let _ = std::fs::remove_file(&beside);
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&beside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&beside, path)?;
    match path.parent() {
        Some(folder) => std::fs::File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    path.with_file_name(name)
}

/// Reads at most `max` bytes; a longer file is an error.
pub(crate) fn read_bounded(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{} is longer than {max} bytes", path.display()),
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_named_like_a_bracket_does_not_confuse_the_fields() {
        let tail = "S 7 42 42 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 98765 0 0";
        let stat = parse_stat(9, &format!("9 (a) R (b)) {tail}")).unwrap();
        assert_eq!((stat.state, stat.parent, stat.group, stat.started), ('S', 7, 42, 98765));
        assert!(parse_stat(9, "9 (a").is_none());
        assert!(parse_stat(9, "9 (a) S 1").is_none());
    }

    #[test]
    fn this_process_lives_and_a_later_one_with_its_number_is_another() {
        let own = Identity::own();
        assert!(own.lives());
        assert!(!Identity { started: own.started + 1, ..own }.lives());
    }

    #[test]
    fn a_file_over_the_bound_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        write_whole(&path, &[1; 10], 0o600).unwrap();
        assert_eq!(read_bounded(&path, 10).unwrap().len(), 10);
        assert!(read_bounded(&path, 9).is_err());
    }
}
