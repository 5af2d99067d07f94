//! A drive in memory, for tests and simulation: deterministic, fails where it is told to, can lose power anywhere.
//!
//! Each file has a live image (what reads see) and a durable one (what a power cut leaves for certain); names have
//! both too. Every operation that changes something counts. [`Mem::cut_at`] stops the world at one of them: it is
//! done to the live image, reported as failed, and so is everything after it. [`Mem::after_cut`] then gives the drive
//! that the next start would find.

use std::collections::BTreeMap;
use std::io::{self, Error, ErrorKind};
use std::sync::Arc;

use nix::errno::Errno;
use parking_lot::Mutex;

use super::disk::{Buffer, Found, Handle, Op, Verb};
use super::folder::UNFINISHED;
use super::format::PAGE;

/// What a cut leaves of what was written but not made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Nothing.
    All,
    /// Everything.
    None,
    /// Each page by the toss of a coin, from this seed.
    Torn(u64),
}

/// How an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// EIO.
    Broken,
    /// ENOSPC.
    Full,
    /// Half of the bytes, then an error.
    Short,
}

#[derive(Clone, Debug, Default)]
struct Image {
    live: Vec<u8>,
    durable: Vec<u8>,
}

#[derive(Debug, Default)]
struct State {
    files: BTreeMap<String, Image>,
    /// Names that a cut leaves, and the images they had when they were removed.
    durable_names: BTreeMap<String, Image>,
    ops: u64,
    cut_at: Option<u64>,
    /// Operations `from..to` fail.
    faults: Vec<(u64, u64, Failure)>,
    /// Syncs of files report success and do nothing.
    lies: bool,
    open: bool,
}

/// The drive. Clones are the same drive.
#[derive(Clone, Debug, Default)]
pub struct Mem(Arc<Mutex<State>>);

impl State {
    /// Counts one change. `Err` when it is to fail; the bool says whether it is done all the same.
    fn count(&mut self) -> Result<(), (Error, bool, Failure)> {
        let number = self.ops;
        self.ops += 1;
        if let Some(cut) = self.cut_at.filter(|&cut| number >= cut) {
            return Err((Errno::EIO.into(), number == cut, Failure::Broken));
        }
        match self.faults.iter().find(|(from, to, _)| (*from..*to).contains(&number)) {
            Some((.., Failure::Full)) => Err((Errno::ENOSPC.into(), false, Failure::Full)),
            Some((.., failure)) => Err((Errno::EIO.into(), false, *failure)),
            None => Ok(()),
        }
    }

    fn file(&mut self, name: &str) -> io::Result<&mut Image> {
        self.files.get_mut(name).ok_or_else(|| Error::from(ErrorKind::NotFound))
    }

    /// Does a change that counts.
    fn change(&mut self, change: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        match self.count() {
            Ok(()) => change(self),
            Err((error, done, _)) => {
                if done {
                    change(self)?;
                }
                Err(error)
            }
        }
    }

    fn sync_names(&mut self) -> io::Result<()> {
        self.durable_names = self.files.clone();
        Ok(())
    }

    fn sync_file(&mut self, name: &str) -> io::Result<()> {
        let lies = self.lies;
        let image = self.file(name)?;
        if lies {
            return Ok(());
        }
        image.durable = image.live.clone();
        let image = image.clone();
        if let Some(durable) = self.durable_names.get_mut(name) {
            *durable = image;
        }
        Ok(())
    }
}

impl Mem {
    pub fn new() -> Self {
        Self::default()
    }

    /// Changes so far.
    pub fn ops(&self) -> u64 {
        self.0.lock().ops
    }

    /// Power goes at this operation, counted from 0.
    pub fn cut_at(&self, op: u64) {
        self.0.lock().cut_at = Some(op);
    }

    /// The next `count` changes fail, after `skip` that do not.
    pub fn fail(&self, skip: u64, count: u64, failure: Failure) {
        let mut state = self.0.lock();
        let from = state.ops + skip;
        state.faults.push((from, from.saturating_add(count), failure));
    }

    /// From now on files are not made durable when they are said to be, as some drives do.
    pub fn lie(&self) {
        self.0.lock().lies = true;
    }

    /// Nothing fails any more.
    pub fn mend(&self) {
        self.0.lock().faults.clear();
    }

    /// The drive as the next start finds it.
    pub fn after_cut(&self, loss: Loss) -> Self {
        let state = self.0.lock();
        let mut dice = match loss {
            Loss::Torn(seed) => seed | 1,
            _ => 1,
        };
        let mut toss = || {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            dice & 1 == 0
        };
        let mut files = BTreeMap::new();
        let keep_names = loss == Loss::None || matches!(loss, Loss::Torn(_)) && toss();
        let names = if keep_names { &state.files } else { &state.durable_names };
        for (name, image) in names {
            // A file whose name was durable may have been written since.
            let image = state.files.get(name).unwrap_or(image);
            let mut left = image.durable.clone();
            left.resize(image.live.len(), 0);
            for (page, live) in left.chunks_mut(PAGE).zip(image.live.chunks(PAGE)) {
                if loss == Loss::None || matches!(loss, Loss::Torn(_)) && page != live && toss() {
                    page.copy_from_slice(live);
                }
            }
            files.insert(name.clone(), Image { live: left.clone(), durable: left });
        }
        Self(Arc::new(Mutex::new(State { durable_names: files.clone(), files, ..State::default() })))
    }

    /// Lets a test look at or damage a file.
    pub fn with_file<T>(&self, name: &str, look: impl FnOnce(&mut Vec<u8>) -> T) -> Option<T> {
        let mut state = self.0.lock();
        let image = state.files.get_mut(name)?;
        let seen = look(&mut image.live);
        image.durable = image.live.clone();
        let image = image.clone();
        state.durable_names.insert(name.to_owned(), image);
        Some(seen)
    }

    /// Puts a file there, whole and durable.
    pub fn put_file(&self, name: &str, bytes: Vec<u8>) {
        let image = Image { live: bytes.clone(), durable: bytes };
        let mut state = self.0.lock();
        state.durable_names.insert(name.to_owned(), image.clone());
        state.files.insert(name.to_owned(), image);
    }

    /// Like the folder's lock. False when it is taken.
    pub fn lock(&self) -> bool {
        !std::mem::replace(&mut self.0.lock().open, true)
    }

    pub fn unlock(&self) {
        self.0.lock().open = false;
    }

    pub fn list(&self) -> Vec<Found> {
        let found = |(name, image): (&String, &Image)| {
            let len = image.live.len() as u64;
            Found { name: name.clone(), len, taken: len, is_file: true }
        };
        self.0.lock().files.iter().map(found).collect()
    }

    pub fn open(&self, name: &str) -> io::Result<Handle> {
        self.0.lock().file(name)?;
        Ok(Handle::Mem(name.into()))
    }

    pub fn create(&self, name: &str, size: u64, head: &[u8]) -> io::Result<(Handle, u64)> {
        let unfinished = format!("{name}{UNFINISHED}");
        let mut state = self.0.lock();
        let made = state
            .change(|s| {
                let mut image = Image::default();
                image.live.resize(usize::try_from(size).map_err(Error::other)?, 0);
                image.live[..head.len()].copy_from_slice(head);
                s.files.insert(unfinished.clone(), image);
                Ok(())
            })
            .and_then(|()| state.change(|s| s.sync_file(&unfinished)))
            .and_then(|()| {
                state.change(|s| {
                    let image = s.files.remove(&unfinished).expect("just made");
                    s.files.insert(name.to_owned(), image);
                    Ok(())
                })
            });
        let made = made.and_then(|()| state.change(State::sync_names));
        if made.is_err() && state.cut_at.is_none() {
            state.files.remove(&unfinished);
            state.files.remove(name);
        }
        made?;
        Ok((Handle::Mem(name.into()), size))
    }

    pub fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let unfinished = format!("{name}{UNFINISHED}");
        let mut state = self.0.lock();
        let made = state
            .change(|s| {
                s.files.insert(unfinished.clone(), Image { live: bytes.to_vec(), durable: Vec::new() });
                Ok(())
            })
            .and_then(|()| state.change(|s| s.sync_file(&unfinished)))
            .and_then(|()| {
                state.change(|s| {
                    let image = s.files.remove(&unfinished).expect("just made");
                    s.files.insert(name.to_owned(), image);
                    Ok(())
                })
            })
            .and_then(|()| state.change(State::sync_names));
        if made.is_err() && state.cut_at.is_none() {
            state.files.remove(&unfinished);
        }
        made
    }

    pub fn remove(&self, name: &str) -> io::Result<()> {
        self.0.lock().change(|s| {
            s.files.remove(name);
            Ok(())
        })
    }

    pub fn sync_names(&self) -> io::Result<()> {
        self.0.lock().change(State::sync_names)
    }

    pub fn sync_file(&self, name: &str) -> io::Result<()> {
        self.0.lock().change(|s| s.sync_file(name))
    }

    pub fn read(&self, name: &str, offset: u64, buffer: &mut Buffer) -> io::Result<usize> {
        let mut state = self.0.lock();
        let live = &state.file(name)?.live;
        let start = usize::try_from(offset).map_err(Error::other)?.min(live.len());
        let len = buffer.len().min(live.len() - start);
        buffer[..len].copy_from_slice(&live[start..start + len]);
        Ok(len)
    }

    /// Does one operation of a disk. Reads do not count: they change nothing.
    pub fn perform(&self, op: &mut Op) -> io::Result<()> {
        let Handle::Mem(name) = op.file.clone() else { unreachable!("a memory disk has memory files") };
        match op.verb {
            Verb::Sync => self.sync_file(&name),
            Verb::Read => self.read_op(&name, op),
            Verb::Write => self.write_op(&name, op),
        }
    }

    fn read_op(&self, name: &str, op: &mut Op) -> io::Result<()> {
        let mut state = self.0.lock();
        let live = &state.file(name)?.live;
        let start = usize::try_from(op.offset).map_err(Error::other)?;
        let Some(bytes) = live.get(start..start + op.len()) else {
            return Err(ErrorKind::UnexpectedEof.into());
        };
        let (head, body) = bytes.split_at(op.head.len());
        op.head.copy_from_slice(head);
        op.body.with(|b| b.copy_from_slice(body));
        Ok(())
    }

    fn write_op(&self, name: &str, op: &mut Op) -> io::Result<()> {
        let mut bytes = op.head.to_vec();
        op.body.with(|body| bytes.extend_from_slice(body));
        let start = usize::try_from(op.offset).map_err(Error::other)?;
        let mut state = self.0.lock();
        let outcome = state.count();
        let share = match &outcome {
            Ok(()) | Err((_, true, _)) => bytes.len(),
            Err((_, false, Failure::Short)) => bytes.len() / 2 / PAGE * PAGE,
            Err(_) => 0,
        };
        let Some(room) = state.file(name)?.live.get_mut(start..start + bytes.len()) else {
            return Err(ErrorKind::WriteZero.into());
        };
        room[..share].copy_from_slice(&bytes[..share]);
        outcome.map_err(|(error, ..)| error)
    }
}
