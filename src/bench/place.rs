//! Folders that a measurement fills and always takes away again.
//!
//! A folder carries the number of the process that made it. It goes when its [`Place`] is dropped: at the end, after
//! an error, after a panic, and after Ctrl-C, which the measurement sees as a wish to stop. What a kill left behind
//! is removed by the next run.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::sys::statvfs::statvfs;
use nix::unistd::{Pid, syncfs};

const PREFIX: &str = "spark-kv-bench-";

/// One folder of ours.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
}

impl Place {
    /// A new folder under `parent`, which must exist.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn under(parent: &Path) -> io::Result<Self> {
        sweep(parent);
        let path = parent.join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Self { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Nobody is left to be told; the next run tries again.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Bytes that an ordinary user can still write under `folder`.
///
/// # Errors
/// When the folder is not there.
pub fn free(folder: &Path) -> io::Result<u64> {
    let about = statvfs(folder)?;
    Ok(about.blocks_available() * about.fragment_size())
}

/// How long a drive is left alone between two measurements.
const REST: Duration = Duration::from_millis(200);

/// Lets the drive come to rest: a file system that discards what was removed does so with its next commit, and
/// whoever measures then would pay for whoever measured before. A pass that makes nothing durable leaves all of that to
/// the next one that does.
///
/// # Errors
/// When the folder is not there, or the drive fails.
pub fn rest(folder: &Path) -> io::Result<()> {
    syncfs(fs::File::open(folder)?)?;
    std::thread::sleep(REST);
    Ok(())
}

/// Removes folders whose process is gone.
fn sweep(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(PREFIX)).and_then(|n| n.parse().ok());
        if let Some(number) = number
            && kill(Pid::from_raw(number), None) == Err(Errno::ESRCH)
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_goes_with_its_owner_and_so_do_those_of_the_dead() {
        let parent = tempfile::tempdir().unwrap();
        // Process numbers end at 2^22.
        let dead = parent.path().join(format!("{PREFIX}99999999"));
        let other = parent.path().join("spark-kv-bench-notes");
        fs::create_dir(&dead).unwrap();
        fs::create_dir(&other).unwrap();
        let place = Place::under(parent.path()).unwrap();
        fs::write(place.path().join("row"), b"x").unwrap();
        assert!(!dead.exists() && other.exists());
        let path = place.path().to_owned();
        drop(place);
        assert!(!path.exists() && other.exists());
        assert!(free(parent.path()).unwrap() > 0);
    }
}
