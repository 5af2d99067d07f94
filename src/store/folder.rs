//! The store's folder on a real drive: one lock, names, whole files. Everything here blocks and nothing here is hot.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Error, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, Flock, FlockArg, fallocate};
use nix::libc::O_DIRECT;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::futimens;
use nix::sys::time::TimeSpec;
use nix::unistd::{Whence, lseek};

use super::disk::{Buffer, Found, Handle};
use super::format::PAGE;

/// Name of the lock's file. It is empty.
pub const LOCK: &str = "lock";
/// Files that are being made end in this. A start removes what a cut left of them.
pub const UNFINISHED: &str = ".unfinished";

/// Descriptors that a store wants to be allowed. Each segment stays open, and a terabyte is four thousand segments of
/// 256 MiB; a process begins with 1024.
const DESCRIPTORS: u64 = 1 << 17;

/// A folder that is ours alone as long as this lives.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// Whether its files can be read and written past the page cache.
    pub direct: bool,
    /// Whether parts of its files can be given back.
    pub punches: bool,
    _lock: Flock<File>,
}

impl Folder {
    /// Makes the folder when it is missing, locks it, and finds out whether it can do direct I/O.
    ///
    /// # Errors
    /// `WouldBlock` when another store has it open.
    pub fn lock(path: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        let file =
            OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path.join(LOCK))?;
        let lock =
            Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| Error::from(errno))?;
        allow_many_files();
        let mut folder = Self { path: path.to_owned(), direct: true, punches: true, _lock: lock };
        (folder.direct, folder.punches) = folder.try_out()?;
        Ok(folder)
    }

    /// Writes and reads one page past the page cache, and punches it. Whether each works.
    fn try_out(&self) -> io::Result<(bool, bool)> {
        // A folder may be in the way of the name.
        let names = (0..16).map(|n| format!("probe-{n}{UNFINISHED}"));
        let Some(name) = names.into_iter().find(|name| !self.path.join(name).is_dir()) else {
            return Ok((true, true));
        };
        let path = self.path.join(&name);
        let mut punches = true;
        let mut attempt = |options: &mut OpenOptions| -> io::Result<()> {
            let file = options.create(true).truncate(true).mode(0o600).open(&path)?;
            let part = 0..PAGE as u64;
            punches = !matches!(punch(&file, std::slice::from_ref(&part)), Err(e) if is_unsupported(&e));
            let mut page = Buffer::zeroed(PAGE);
            file.write_all_at(&page, 0)?;
            file.read_exact_at(&mut page, 0)
        };
        let outcome = attempt(&mut self.options());
        if outcome.is_err() {
            // Where direct I/O is missing the file may not even have been opened.
            let _ = attempt(OpenOptions::new().read(true).write(true));
        }
        self.remove(&name)?;
        match outcome {
            Ok(()) => Ok((true, punches)),
            // A full drive can still serve what it holds; the first write will say that it is full.
            Err(e) if e.kind() == ErrorKind::StorageFull => Ok((true, punches)),
            Err(e) if e.raw_os_error() == Some(Errno::EINVAL as i32) => Ok((false, punches)),
            Err(e) => Err(e),
        }
    }

    fn options(&self) -> OpenOptions {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        if self.direct {
            options.custom_flags(O_DIRECT);
        }
        options
    }

    pub fn list(&self) -> io::Result<Vec<Found>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let about = match entry.metadata() {
                // Somebody else's, gone meanwhile.
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                about => about?,
            };
            all.push(Found {
                name: entry.file_name().to_string_lossy().into_owned(),
                len: about.len(),
                taken: taken(&about),
                is_file: about.is_file(),
                modified: u32::try_from(about.mtime()).unwrap_or(0),
            });
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    pub fn open(&self, name: &str) -> io::Result<Handle> {
        Ok(Handle::Real(Arc::new(self.options().open(self.path.join(name))?)))
    }

    pub fn create(&self, name: &str, size: u64, head: &[u8]) -> io::Result<(Handle, u64)> {
        let unfinished = format!("{name}{UNFINISHED}");
        let was_there = fs::exists(self.path.join(name))?;
        let made = self.create_as(&unfinished, size, head).and_then(|file| {
            fs::rename(self.path.join(&unfinished), self.path.join(name))?;
            self.sync()?;
            let taken = size.max(taken(&file.metadata()?));
            Ok((Handle::Real(Arc::new(file)), taken))
        });
        if made.is_err() {
            // The room must not stay taken, by whichever name; what was there before stays. What went wrong is told
            // by `made`.
            let _ = self.remove(&unfinished);
            if !was_there {
                let _ = self.remove(name);
            }
        }
        made
    }

    /// Puts a file in the place of one that may be there: after a failure that one is still whole.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let unfinished = format!("{name}{UNFINISHED}");
        let made = self.create_as(&unfinished, bytes.len() as u64, bytes).and_then(|_| {
            fs::rename(self.path.join(&unfinished), self.path.join(name))?;
            self.sync()
        });
        if made.is_err() {
            // What went wrong is told by `made`.
            let _ = self.remove(&unfinished);
        }
        made
    }

    fn create_as(&self, name: &str, size: u64, head: &[u8]) -> io::Result<File> {
        let file = self.options().create(true).truncate(true).mode(0o600).open(self.path.join(name))?;
        let length = i64::try_from(size).map_err(Error::other)?;
        match fallocate(&file, FallocateFlags::empty(), 0, length) {
            // Some file systems cannot allot ahead. The cap holds all the same: it counts whole segments.
            Err(Errno::EOPNOTSUPP) => file.set_len(size)?,
            done => done?,
        }
        file.write_all_at(&Buffer::of(head), 0)?;
        file.sync_all()?;
        Ok(file)
    }

    pub fn remove(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.path.join(name)) {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    pub fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}

fn is_unsupported(error: &Error) -> bool {
    matches!(error.raw_os_error(), Some(code) if code == Errno::EOPNOTSUPP as i32 || code == Errno::ENOSYS as i32)
}

/// Bytes that the drive has given a file.
pub fn taken(about: &fs::Metadata) -> u64 {
    about.blocks() * 512
}

/// Gives parts of a file back. When it was written is what a start knows about the age of its rows, so that stays.
pub fn punch(file: &File, parts: &[Range<u64>]) -> io::Result<()> {
    let about = file.metadata()?;
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    for part in parts {
        let offset = i64::try_from(part.start).map_err(Error::other)?;
        let length = i64::try_from(part.end - part.start).map_err(Error::other)?;
        while let Err(errno) = fallocate(file, flags, offset, length) {
            if errno != Errno::EINTR {
                return Err(errno.into());
            }
        }
    }
    let time = |seconds, nanos| TimeSpec::new(seconds, nanos);
    let (used, written) = (time(about.atime(), about.atime_nsec()), time(about.mtime(), about.mtime_nsec()));
    // Without it rows only look younger than they are.
    let _ = futimens(file, &used, &written);
    Ok(())
}

/// Parts of a file for which the drive keeps nothing. A file system that does not know them says that there are none.
pub fn holes(file: &File, len: u64) -> Vec<Range<u64>> {
    let seek = |from: u64, whence| {
        let at = lseek(file, i64::try_from(from).map_err(|_| Errno::EINVAL)?, whence)?;
        u64::try_from(at).map_err(|_| Errno::EINVAL)
    };
    let (mut holes, mut at) = (Vec::new(), 0);
    while let Ok(hole) = seek(at, Whence::SeekHole)
        && hole < len
    {
        // Behind the last data there is no next one.
        at = seek(hole, Whence::SeekData).unwrap_or(len).clamp(hole, len);
        if at == hole {
            break;
        }
        holes.push(hole..at);
    }
    holes
}

/// As many descriptors as are allowed without asking anybody. Where they do not suffice, opening says so.
fn allow_many_files() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < DESCRIPTORS.min(hard)
    {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, DESCRIPTORS.min(hard), hard);
    }
}
