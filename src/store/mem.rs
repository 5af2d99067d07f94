//! A drive in memory, for tests and simulation: deterministic, fails where it is told to, can lose power anywhere.
//!
//! Each file has a live image (what reads see) and a durable one (what a power cut leaves for certain); names have
//! both too. Every operation that changes something counts. [`Mem::cut_at`] stops the world at one of them: it is
//! done to the live image, reported as failed, and so is everything after it. [`Mem::after_cut`] then gives the drive
//! that the next start would find. Reads are counted apart, because only [`Mem::break_at`] fails them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, Error, ErrorKind};
use std::ops::Range;
use std::sync::Arc;

use nix::errno::Errno;
use parking_lot::Mutex;

use super::disk::{Buffer, Done, Found, Handle, OnDone, Op, Verb};
use super::folder::UNFINISHED;
use super::format::PAGE;
use super::hands::Job;

/// What a cut leaves of what was written but not made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Nothing.
    All,
    /// Everything.
    None,
    /// Each page by the toss of a coin, from this seed.
    Torn(u64),
    /// Each operation whole or not at all, by the toss of a coin and in any order, from this seed: between two syncs
    /// a drive owes no order to anybody. Names come and go one by one.
    Reordered(u64),
}

/// A coin that falls the same way in every run with one seed.
struct Coin(u64);

impl Coin {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn toss(&mut self) -> bool {
        self.next() & 1 == 0
    }
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

/// A file's bytes. Pages that are holes are zeros and take no room.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Content {
    bytes: Vec<u8>,
    holes: BTreeSet<usize>,
}

impl Content {
    fn write(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        for page in at / PAGE..(at + bytes.len()).div_ceil(PAGE) {
            self.holes.remove(&page);
        }
    }

    /// Of whole pages.
    fn punch(&mut self, part: Range<usize>) {
        self.bytes[part.clone()].fill(0);
        self.holes.extend(part.start / PAGE..part.end / PAGE);
    }

    fn page(&self, page: usize) -> (&[u8], bool) {
        let end = self.bytes.len().min((page + 1) * PAGE);
        (&self.bytes[page * PAGE..end], self.holes.contains(&page))
    }

    fn taken(&self) -> u64 {
        (self.bytes.len() - self.holes.len() * PAGE) as u64
    }
}

#[derive(Clone, Debug)]
enum Change {
    Write(usize, Vec<u8>),
    Punch(Range<usize>),
}

impl Change {
    fn apply(&self, content: &mut Content) {
        match self {
            Self::Write(at, bytes) => content.write(*at, bytes),
            Self::Punch(part) => content.punch(part.clone()),
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Image {
    live: Content,
    durable: Content,
    /// What was changed since the last sync, in order.
    unsynced: Vec<Change>,
}

impl Image {
    /// A file that is all durable.
    fn whole(content: Content) -> Self {
        Self { durable: content.clone(), live: content, unsynced: Vec::new() }
    }

    fn of(bytes: Vec<u8>) -> Self {
        Self::whole(Content { bytes, holes: BTreeSet::new() })
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.live);
        self.unsynced.push(change);
    }

    /// What a cut leaves of this file.
    fn after_cut(&self, loss: Loss, coin: &mut Coin) -> Content {
        let mut left = self.durable.clone();
        left.bytes.resize(self.live.bytes.len(), 0);
        match loss {
            Loss::All => {}
            Loss::None => left.clone_from(&self.live),
            Loss::Torn(_) => {
                for page in 0..self.live.bytes.len().div_ceil(PAGE) {
                    let (bytes, is_hole) = self.live.page(page);
                    if left.page(page) != (bytes, is_hole) && coin.toss() {
                        left.write(page * PAGE, bytes);
                        if is_hole {
                            left.holes.insert(page);
                        }
                    }
                }
            }
            Loss::Reordered(_) => {
                let mut order: Vec<_> = self.unsynced.iter().collect();
                for n in (1..order.len()).rev() {
                    order.swap(n, usize::try_from(coin.next() % (n as u64 + 1)).unwrap_or(n));
                }
                for change in order {
                    if coin.toss() {
                        change.apply(&mut left);
                    }
                }
            }
        }
        left
    }
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
    /// Changes and reads.
    touches: u64,
    /// From this touch on everything fails.
    broken: Option<(u64, Failure)>,
    /// Syncs of files report success and do nothing.
    lies: bool,
    /// It has no holes.
    solid: bool,
    open: bool,
    held: Held,
}

/// What waits for a test's word, in the order in which it came.
#[derive(Default)]
struct Held {
    /// Whether operations, and jobs, are held up.
    ops: bool,
    jobs: bool,
    waiting: VecDeque<(Op, OnDone)>,
    jobs_waiting: VecDeque<Job>,
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Held({}, {})", self.waiting.len(), self.jobs_waiting.len())
    }
}

/// The drive. Clones are the same drive.
#[derive(Clone, Debug, Default)]
pub struct Mem(Arc<Mutex<State>>);

fn errno(failure: Failure) -> Error {
    match failure {
        Failure::Full => Errno::ENOSPC.into(),
        Failure::Broken | Failure::Short => Errno::EIO.into(),
    }
}

impl State {
    /// A file that was written under another name is made durable and takes its own.
    fn publish(&mut self, unfinished: &str, name: &str) -> io::Result<()> {
        self.change(|s| s.sync_file(unfinished))?;
        self.change(|s| {
            let image = s.files.remove(unfinished).expect("just made");
            s.files.insert(name.to_owned(), image);
            Ok(())
        })?;
        self.change(State::sync_names)
    }

    /// Counts one change. `Err` when it is to fail; the bool says whether it is done all the same.
    fn count(&mut self) -> Result<(), (Error, bool, Failure)> {
        let number = self.ops;
        self.ops += 1;
        if let Err(failure) = self.touch() {
            return Err((errno(failure), false, failure));
        }
        if let Some(cut) = self.cut_at.filter(|&cut| number >= cut) {
            return Err((Errno::EIO.into(), number == cut, Failure::Broken));
        }
        match self.faults.iter().find(|(from, to, _)| (*from..*to).contains(&number)) {
            Some((.., failure)) => Err((errno(*failure), false, *failure)),
            None => Ok(()),
        }
    }

    /// Counts a change or a read.
    fn touch(&mut self) -> Result<(), Failure> {
        let number = self.touches;
        self.touches += 1;
        match self.broken {
            Some((from, failure)) if number >= from => Err(failure),
            _ => Ok(()),
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
        image.unsynced.clear();
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

    /// Changes and reads so far.
    pub fn touches(&self) -> u64 {
        self.0.lock().touches
    }

    /// Everything fails from this change or read on, counted from 0, until [`Mem::mend`].
    pub fn break_at(&self, touch: u64, failure: Failure) {
        self.0.lock().broken = Some((touch, failure));
    }

    /// Whether the power has gone.
    pub fn is_cut(&self) -> bool {
        let state = self.0.lock();
        state.cut_at.is_some_and(|cut| state.ops > cut)
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

    /// From now on it is a drive that cannot give parts of a file back, nor tell its holes.
    pub fn without_holes(&self) {
        self.0.lock().solid = true;
    }

    pub fn can_punch(&self) -> bool {
        !self.0.lock().solid
    }

    /// Each part is a change of its own.
    pub fn punch(&self, name: &str, parts: &[Range<u64>]) -> io::Result<()> {
        let mut state = self.0.lock();
        if state.solid {
            return Err(Errno::EOPNOTSUPP.into());
        }
        for part in parts {
            let at = |offset: u64| usize::try_from(offset).map_err(Error::other);
            let part = at(part.start)?..at(part.end)?;
            state.change(|s| {
                let image = s.file(name)?;
                if part.end > image.live.bytes.len() || part.start % PAGE + part.end % PAGE > 0 {
                    return Err(ErrorKind::InvalidInput.into());
                }
                image.change(Change::Punch(part));
                Ok(())
            })?;
        }
        Ok(())
    }

    pub fn taken(&self, name: &str) -> io::Result<u64> {
        Ok(self.0.lock().file(name)?.live.taken())
    }

    /// Parts that were punched, ascending.
    pub fn holes(&self, name: &str) -> Vec<Range<u64>> {
        let mut holes: Vec<Range<u64>> = Vec::new();
        let state = self.0.lock();
        let pages = state.files.get(name).filter(|_| !state.solid).map(|image| &image.live.holes);
        for &page in pages.into_iter().flatten() {
            let at = (page * PAGE) as u64;
            match holes.last_mut() {
                Some(last) if last.end == at => last.end += PAGE as u64,
                _ => holes.push(at..at + PAGE as u64),
            }
        }
        holes
    }

    /// Nothing fails any more.
    pub fn mend(&self) {
        let mut state = self.0.lock();
        state.faults.clear();
        state.broken = None;
    }

    /// The drive as the next start finds it.
    pub fn after_cut(&self, loss: Loss) -> Self {
        let state = self.0.lock();
        let mut coin = match loss {
            Loss::Torn(seed) | Loss::Reordered(seed) => Coin(seed | 1),
            Loss::All | Loss::None => Coin(1),
        };
        let all_names = match loss {
            Loss::All => false,
            Loss::None => true,
            Loss::Torn(_) | Loss::Reordered(_) => coin.toss(),
        };
        // A file whose name was durable may have been written since.
        let mut names = state.durable_names.clone();
        names.extend(state.files.iter().map(|(name, image)| (name.clone(), image.clone())));
        let mut files = BTreeMap::new();
        for (name, image) in names {
            let (before, after) = (state.durable_names.contains_key(&name), state.files.contains_key(&name));
            let kept = match loss {
                Loss::Reordered(_) if before != after => coin.toss(),
                _ => {
                    if all_names {
                        after
                    } else {
                        before
                    }
                }
            };
            if kept {
                files.insert(name, Image::whole(image.after_cut(loss, &mut coin)));
            }
        }
        let solid = state.solid;
        Self(Arc::new(Mutex::new(State { durable_names: files.clone(), files, solid, ..State::default() })))
    }

    /// Flips bits of a byte wherever it is kept, durable or not, as rot does. False when the file has no such byte.
    pub fn flip(&self, name: &str, at: usize, bits: u8) -> bool {
        let mut state = self.0.lock();
        let state = &mut *state;
        let images = [state.files.get_mut(name), state.durable_names.get_mut(name)];
        let mut flipped = false;
        for image in images.into_iter().flatten() {
            let unsynced = image.unsynced.iter_mut().filter_map(|change| match change {
                Change::Write(from, bytes) => bytes.get_mut(at.checked_sub(*from)?),
                Change::Punch(_) => None,
            });
            let (live, durable) = (image.live.bytes.get_mut(at), image.durable.bytes.get_mut(at));
            for byte in live.into_iter().chain(durable).chain(unsynced) {
                *byte ^= bits;
                flipped = true;
            }
        }
        flipped
    }

    /// Lets a test look at or damage a file.
    pub fn with_file<T>(&self, name: &str, look: impl FnOnce(&mut Vec<u8>) -> T) -> Option<T> {
        let mut state = self.0.lock();
        let image = state.files.get_mut(name)?;
        let mut live = std::mem::take(&mut image.live);
        let seen = look(&mut live.bytes);
        let still = |page: &usize| {
            live.bytes.get(page * PAGE..(page + 1) * PAGE).is_some_and(|page| page.iter().all(|b| *b == 0))
        };
        live.holes.retain(still);
        *image = Image::whole(live);
        let image = image.clone();
        state.durable_names.insert(name.to_owned(), image);
        Some(seen)
    }

    /// Lets a test look at a file as it is read.
    pub fn with_bytes<T>(&self, name: &str, look: impl FnOnce(&[u8]) -> T) -> Option<T> {
        self.0.lock().files.get(name).map(|image| look(&image.live.bytes))
    }

    /// Puts a file there, whole and durable.
    pub fn put_file(&self, name: &str, bytes: Vec<u8>) {
        let image = Image::of(bytes);
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
            let (len, taken) = (image.live.bytes.len() as u64, image.live.taken());
            Found { name: name.clone(), len, taken, is_file: true, modified: 0 }
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
        let was_there = state.files.contains_key(name);
        let made = state
            .change(|s| {
                let mut image = Image::default();
                image.live.bytes.resize(usize::try_from(size).map_err(Error::other)?, 0);
                image.change(Change::Write(0, head.to_vec()));
                s.files.insert(unfinished.clone(), image);
                Ok(())
            })
            .and_then(|()| state.publish(&unfinished, name));
        if made.is_err() && state.cut_at.is_none() {
            state.files.remove(&unfinished);
            if !was_there {
                state.files.remove(name);
            }
        }
        made?;
        Ok((Handle::Mem(name.into()), size))
    }

    pub fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let unfinished = format!("{name}{UNFINISHED}");
        let mut state = self.0.lock();
        let made = state
            .change(|s| {
                let mut image = Image::default();
                image.live.bytes.resize(bytes.len(), 0);
                image.change(Change::Write(0, bytes.to_vec()));
                s.files.insert(unfinished.clone(), image);
                Ok(())
            })
            .and_then(|()| state.publish(&unfinished, name));
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
        state.touch().map_err(errno)?;
        let live = &state.file(name)?.live.bytes;
        let start = usize::try_from(offset).map_err(Error::other)?.min(live.len());
        let len = buffer.len().min(live.len() - start);
        buffer[..len].copy_from_slice(&live[start..start + len]);
        Ok(len)
    }

    /// From now on operations wait until they are let go, as those of a slow drive do.
    pub fn hold_ops(&self) {
        self.0.lock().held.ops = true;
    }

    /// From now on what threads would do beside the loop waits until it is let go.
    pub fn hold_jobs(&self) {
        self.0.lock().held.jobs = true;
    }

    /// What the operations that wait are, and where they begin, in the order in which they were begun.
    pub fn held_ops(&self) -> Vec<(Verb, u64)> {
        self.0.lock().held.waiting.iter().map(|(op, _)| (op.verb, op.offset)).collect()
    }

    pub fn held_jobs(&self) -> usize {
        self.0.lock().held.jobs_waiting.len()
    }

    /// Does the first `count` operations that wait.
    pub fn let_ops_go(&self, count: usize) {
        for _ in 0..count {
            let next = self.0.lock().held.waiting.pop_front();
            let Some((mut op, on_done)) = next else { return };
            let result = self.perform(&mut op);
            on_done(Done { op, result });
        }
    }

    /// Does the first `count` jobs that wait.
    pub fn let_jobs_go(&self, count: usize) {
        for _ in 0..count {
            let next = self.0.lock().held.jobs_waiting.pop_front();
            let Some(job) = next else { return };
            job();
        }
    }

    /// Holds nothing up any more, and does what waits.
    pub fn let_go(&self) {
        let waiting = {
            let held = &mut self.0.lock().held;
            (held.ops, held.jobs) = (false, false);
            (held.waiting.len(), held.jobs_waiting.len())
        };
        self.let_ops_go(waiting.0);
        self.let_jobs_go(waiting.1);
    }

    /// Takes an operation that has to wait; gives it back when it has not.
    pub fn hold_up(&self, op: Op, on_done: &OnDone) -> Option<Op> {
        let held = &mut self.0.lock().held;
        if !held.ops {
            return Some(op);
        }
        held.waiting.push_back((op, on_done.clone()));
        None
    }

    /// Does a job, or holds it up.
    pub fn do_job(&self, job: Job) {
        {
            let held = &mut self.0.lock().held;
            if held.jobs {
                held.jobs_waiting.push_back(job);
                return;
            }
        }
        job();
    }

    /// Does one operation of a disk.
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
        let touched = state.touch();
        let live = &state.file(name)?.live.bytes;
        let start = usize::try_from(op.offset).map_err(Error::other)?;
        if let Err(failure) = touched {
            if failure == Failure::Short
                && let Some(bytes) = live.get(start + op.head.len()..start + op.len())
            {
                op.body.with(|b| b[..bytes.len() / 2].copy_from_slice(&bytes[..bytes.len() / 2]));
            }
            return Err(errno(failure));
        }
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
        let image = state.file(name)?;
        if start + bytes.len() > image.live.bytes.len() {
            return Err(ErrorKind::WriteZero.into());
        }
        bytes.truncate(share);
        image.change(Change::Write(start, bytes));
        outcome.map_err(|(error, ..)| error)
    }
}
