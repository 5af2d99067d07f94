//! The keys that rows are sealed under: one file each, beside the store's folder, so that forgetting one is certain to
//! leave the others alone and rows are gone without a segment being touched.
//!
//! A key belongs to an owner (the name of an API key; none for requests without one) and to a namespace. It is durable
//! before the first row is sealed under it. Nonces are random, so a key may seal 2^32 rows before two of them meet with
//! a chance of one in 2^33 (NIST SP 800-38D §8.3 allows as many); uses are counted ahead in steps of [`STEP`], and a
//! new key takes over at [`USES`], sixteen times earlier. Keys stay while rows need them. Once the last
//! row under one has left and no engine of its namespace is here, it goes too ([`Keys::retire`]): rows first, then the
//! key, so that a cut between the two leaves a key too many, which a later start finds, and never a row without its key.
//! A row whose room could not be given back yet may be found again by a start; without its key it is passed over.
//!
//! ```text
//! folder/<number of the key, 8 hex digits>.key, never moved or rewritten but for its end:
//!   magic 8 | version 2 | number 4 | namespace 32 | made 8 (seconds since 1970) | key 32 | owner text | crc64 8
//!   | uses that may have happened 8 | crc64 of these 8
//! ```
//!
//! A file that cannot be read costs the rows under its key, which are computed again. What forgetting does is overwrite
//! the file, make that durable, and remove it; a drive's wear levelling, a file system that never writes in place, and
//! backups may keep the old bytes all the same.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use ring::aead::{AES_256_GCM, LessSafeKey, UnboundKey};

use super::folder::UNFINISHED;
use super::format::{Bad, begun};
use crate::base::block::Namespace;
use crate::base::checksum::crc64;
use crate::base::clock::unix_seconds;
use crate::base::codec::{Reader, Writer};

/// Uses after which a new key takes over.
const USES: u64 = 1 << 28;

/// Uses that are written down ahead. Each start costs one step at most.
const STEP: u64 = 1 << 20;

/// Longest name of an owner, in bytes. Then the file fits into one sector of a drive, which is written whole or not.
pub const OWNER_MAX: usize = 256;

const MAGIC: &[u8; 8] = b"SPARKKVK";
const VERSION: u16 = 1;

/// Bytes of the file's end, which alone is written again.
const END: usize = 16;

/// Largest file.
const FILE_MAX: usize = 8 + 2 + 4 + 32 + 8 + 32 + 2 + OWNER_MAX + 8 + END;

const SUFFIX: &str = ".key";

/// One key.
#[derive(Debug)]
pub struct Key {
    pub number: u32,
    pub owner: Arc<str>,
    pub namespace: Namespace,
    made: u64,
    pub cipher: LessSafeKey,
    /// Uses that are written down, and how many of them are left.
    reserved: AtomicU64,
    left: AtomicU64,
}

impl Key {
    /// Counts one use, if one is left.
    fn take(&self) -> bool {
        let take = |left: u64| left.checked_sub(1);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }
}

#[derive(Debug, Default)]
struct Table {
    keys: HashMap<u32, Arc<Key>>,
    /// The newest of each owner and namespace.
    newest: HashMap<(Arc<str>, Namespace), Arc<Key>>,
    /// Whose keys are gone from here and on the drive still: it failed, or has not been told yet.
    doomed: HashMap<u32, Arc<str>>,
}

impl Table {
    fn add(&mut self, key: Arc<Key>) {
        let newest = self.newest.entry((key.owner.clone(), key.namespace)).or_insert_with(|| key.clone());
        if (key.made, key.number) > (newest.made, newest.number) {
            *newest = key.clone();
        }
        self.keys.insert(key.number, key);
    }

    /// Nothing is sealed or opened under these keys any more. Gives their numbers.
    fn doom(&mut self, which: impl Fn(&Key) -> bool) -> Vec<u32> {
        let gone: Vec<_> = self.keys.extract_if(|_, key| which(key)).collect();
        self.newest.retain(|_, key| !which(key));
        self.doomed.extend(gone.iter().map(|(number, key)| (*number, key.owner.clone())));
        gone.into_iter().map(|(number, _)| number).collect()
    }
}

/// All keys of one store.
#[derive(Debug)]
pub struct Keys {
    folder: PathBuf,
    /// Guards: which keys there are. Never held during I/O.
    table: RwLock<Table>,
    /// Guards: the folder. Keys come and go one at a time.
    files: Mutex<()>,
}

impl Keys {
    /// Reads every key of a folder, which need not exist. Also tells what could not be read: the rows under such keys
    /// are lost, the others are not.
    pub fn open(folder: &Path) -> (Self, Vec<String>) {
        let mut table = Table::default();
        let mut told = Vec::new();
        match fs::read_dir(folder) {
            Ok(entries) => {
                for entry in entries.flatten() {
                    let name = entry.file_name().to_string_lossy().into_owned();
                    let path = entry.path();
                    if name.ends_with(UNFINISHED) {
                        // No row was ever sealed under it.
                        let _ = destroy(&path);
                    } else if let Some(number) = number_of(&name) {
                        match read(&path, number) {
                            Ok(key) => table.add(Arc::new(key)),
                            Err(why) => told.push(format!("key {name}: {why}; rows under it are not used")),
                        }
                    }
                }
            }
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => told.push(format!("{}: {e}; sealed rows are not used", folder.display())),
        }
        told.sort();
        let keys = Self { folder: folder.to_owned(), table: RwLock::new(table), files: Mutex::new(()) };
        (keys, told)
    }

    pub fn get(&self, number: u32) -> Option<Arc<Key>> {
        self.table.read().keys.get(&number).cloned()
    }

    /// Whose keys there are.
    pub fn owners(&self) -> BTreeSet<String> {
        let table = self.table.read();
        let of_keys = table.keys.values().map(|key| &key.owner);
        of_keys.chain(table.doomed.values()).map(|owner| owner.to_string()).collect()
    }

    /// The key to seal one row under. Makes one when there is none, or when the last one has sealed enough. Blocks on
    /// the folder then.
    ///
    /// # Errors
    /// When a key cannot be made durable: the row must not be sealed, and not be kept in the clear either.
    pub fn for_writing(&self, owner: &Arc<str>, namespace: Namespace) -> io::Result<Arc<Key>> {
        if let Some(key) = self.newest(owner, namespace).filter(|key| key.take()) {
            return Ok(key);
        }
        let _files = self.files.lock();
        let newest = self.newest(owner, namespace);
        // Somebody else may have been here before.
        if let Some(key) = newest.as_ref().filter(|key| key.take()) {
            return Ok(key.clone());
        }
        let key = match newest.filter(|key| key.reserved.load(Ordering::Relaxed) < USES) {
            Some(key) => {
                self.reserve(&key)?;
                key
            }
            None => {
                let key = Arc::new(self.make(owner, namespace)?);
                self.table.write().add(key.clone());
                key
            }
        };
        key.take();
        Ok(key)
    }

    fn newest(&self, owner: &Arc<str>, namespace: Namespace) -> Option<Arc<Key>> {
        self.table.read().newest.get(&(owner.clone(), namespace)).cloned()
    }

    /// Writes further uses down.
    fn reserve(&self, key: &Key) -> io::Result<()> {
        let reserved = key.reserved.load(Ordering::Relaxed) + STEP;
        let file = OpenOptions::new().write(true).open(self.path(key.number))?;
        let end = end(reserved);
        let at = file.metadata()?.len().checked_sub(END as u64);
        file.write_all_at(&end, at.ok_or_else(|| io::Error::other("the key's file was cut short"))?)?;
        file.sync_all()?;
        key.reserved.store(reserved, Ordering::Relaxed);
        key.left.fetch_add(STEP, Ordering::Relaxed);
        Ok(())
    }

    fn make(&self, owner: &Arc<str>, namespace: Namespace) -> io::Result<Key> {
        if owner.len() > OWNER_MAX {
            return Err(io::Error::other(format!("a name of more than {OWNER_MAX} bytes")));
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
        let number = loop {
            let number: u32 = rand::random();
            // Also not one whose file is there and cannot be read.
            if number != 0 && self.get(number).is_none() && !self.path(number).exists() {
                break number;
            }
        };
        // After the last one, whatever the clock says meanwhile.
        let last = self.newest(owner, namespace).map_or(0, |key| key.made + 1);
        let made = unix_seconds().max(last);
        let mut secret: [u8; 32] = rand::random();
        let mut bytes = encode(number, namespace, made, &secret, owner);
        let written = self.write(number, &bytes);
        let cipher = cipher(&secret);
        wipe(&mut secret);
        wipe(&mut bytes);
        written?;
        let (reserved, left) = (AtomicU64::new(STEP), AtomicU64::new(STEP));
        Ok(Key { number, owner: owner.clone(), namespace, made, cipher, reserved, left })
    }

    fn write(&self, number: u32, bytes: &[u8]) -> io::Result<()> {
        let unfinished = self.folder.join(format!("{number:08x}{SUFFIX}{UNFINISHED}"));
        let file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(&unfinished)?;
        let path = self.path(number);
        let made = (|| {
            file.write_all_at(bytes, 0)?;
            file.sync_all()?;
            fs::rename(&unfinished, &path)?;
            File::open(&self.folder)?.sync_all()
        })();
        if made.is_err() {
            // What went wrong is told by `made`.
            let _ = (destroy(&unfinished), destroy(&path));
        }
        made
    }

    fn path(&self, number: u32) -> PathBuf {
        self.folder.join(format!("{number:08x}{SUFFIX}"))
    }

    /// Takes every key of an owner out of memory and off the drive. Gives their numbers, also when the drive failed:
    /// from here on nothing can be read under them in this process. Blocks.
    pub fn forget(&self, owner: &str) -> (Vec<u32>, io::Result<()>) {
        let _files = self.files.lock();
        let numbers: Vec<u32> = {
            let mut table = self.table.write();
            table.doom(|key| &*key.owner == owner);
            table.doomed.iter().filter(|(_, name)| &***name == owner).map(|(&number, _)| number).collect()
        };
        let outcome = self.destroy(&numbers);
        (numbers, outcome)
    }

    /// Numbers of all keys.
    pub fn numbers(&self) -> Vec<u32> {
        self.table.read().keys.keys().copied().collect()
    }

    /// Takes those of `numbers` out of memory that are of no namespace in use. [`Self::destroy_retired`] does the rest.
    pub fn retire(&self, numbers: &BTreeSet<u32>, in_use: impl Fn(&Namespace) -> bool) -> Vec<u32> {
        self.table.write().doom(|key| numbers.contains(&key.number) && !in_use(&key.namespace))
    }

    /// Takes every key off the drive that is out of memory. Blocks.
    pub fn destroy_retired(&self) -> io::Result<()> {
        let _files = self.files.lock();
        let numbers: Vec<u32> = self.table.read().doomed.keys().copied().collect();
        self.destroy(&numbers)
    }

    /// Destroys these files and makes that durable. Goes on after a failure, and tells the first.
    fn destroy(&self, numbers: &[u32]) -> io::Result<()> {
        let mut outcome = Ok(());
        for &number in numbers {
            match destroy(&self.path(number)) {
                Ok(()) => drop(self.table.write().doomed.remove(&number)),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        if !numbers.is_empty() {
            outcome = outcome.and_then(|()| File::open(&self.folder)?.sync_all());
        }
        outcome
    }
}

/// Overwrites a file, makes that durable, and removes it. One that is gone already is fine.
fn destroy(path: &Path) -> io::Result<()> {
    let file = match OpenOptions::new().write(true).open(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let length = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX).min(1 << 20);
    let noise: Vec<u8> = (0..length).map(|_| rand::random()).collect();
    file.write_all_at(&noise, 0)?;
    file.sync_all()?;
    fs::remove_file(path)
}

fn number_of(name: &str) -> Option<u32> {
    let digits = name.strip_suffix(SUFFIX).filter(|digits| digits.len() == 8)?;
    u32::from_str_radix(digits, 16).ok()
}

fn cipher(secret: &[u8; 32]) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, secret).expect("32 bytes are a key"))
}

fn end(reserved: u64) -> [u8; END] {
    let mut end = [0; END];
    let count = reserved.to_le_bytes();
    end[..8].copy_from_slice(&count);
    end[8..].copy_from_slice(&crc64(&[&count]).to_le_bytes());
    end
}

fn encode(number: u32, namespace: Namespace, made: u64, secret: &[u8; 32], owner: &str) -> Vec<u8> {
    // At once in its size: growing would leave copies of the secret behind.
    let mut w = Writer(Vec::with_capacity(FILE_MAX));
    w.bytes(MAGIC).u16(VERSION).u32(number).bytes(&namespace.0).u64(made).bytes(secret).text(owner);
    let sum = crc64(&[&w.0]);
    w.u64(sum).bytes(&end(STEP));
    w.0
}

fn read(path: &Path, number: u32) -> Result<Key, String> {
    let mut bytes = Vec::with_capacity(FILE_MAX + 1);
    let file = File::open(path).map_err(|e| e.to_string())?;
    file.take(FILE_MAX as u64 + 1).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    let key = decode(&bytes, number).map_err(|bad| bad.to_string());
    wipe(&mut bytes);
    key
}

fn decode(bytes: &[u8], number: u32) -> Result<Key, Bad> {
    let mut r = begun(bytes, MAGIC, VERSION)?;
    let (found, namespace, made) = (r.u32()?, Namespace(r.array()?), r.u64()?);
    let mut secret: [u8; 32] = r.array()?;
    let owner: Arc<str> = r.text("owner")?.into();
    let covered = bytes.len() - r.rest().len();
    let mut r = Reader::new(&bytes[covered..]);
    let sum = r.u64()?;
    if sum != crc64(&[&bytes[..covered]]) {
        return Err(Bad::Checksum);
    }
    if found != number || number == 0 {
        return Err(Bad::OtherKey);
    }
    let reserved = r.u64()?;
    // Without its end it opens rows all the same; new ones get another key.
    let is_told = r.u64().is_ok_and(|sum| sum == crc64(&[&reserved.to_le_bytes()]));
    let reserved = if is_told { reserved } else { USES };
    let cipher = cipher(&secret);
    wipe(&mut secret);
    let (reserved, left) = (AtomicU64::new(reserved), AtomicU64::new(0));
    Ok(Key { number, owner, namespace, made, cipher, reserved, left })
}

/// Zeros what held a secret, as far as a compiler lets us.
fn wipe(bytes: &mut [u8]) {
    bytes.fill(0);
    std::hint::black_box(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const SPACE: Namespace = Namespace([7; 32]);

    fn owner(name: &str) -> Arc<str> {
        name.into()
    }

    fn open(folder: &Path) -> Keys {
        let (keys, told) = Keys::open(folder);
        assert!(told.is_empty(), "{told:?}");
        keys
    }

    /// Whether two keys are the same, by what they seal.
    fn same(a: &Key, b: &Key) -> bool {
        use ring::aead::{Aad, Nonce};
        let seal = |key: &Key| {
            let mut bytes = [1; 16];
            let nonce = Nonce::assume_unique_for_key([0; 12]);
            let tag = key.cipher.seal_in_place_separate_tag(nonce, Aad::empty(), &mut bytes).unwrap();
            (bytes, tag.as_ref().to_vec())
        };
        seal(a) == seal(b)
    }

    #[test]
    fn a_key_is_one_owners_in_one_namespace_and_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("keys");
        let keys = open(&folder);
        let ann = keys.for_writing(&owner("ann"), SPACE).unwrap();
        assert!(same(&ann, &keys.for_writing(&owner("ann"), SPACE).unwrap()));
        let bob = keys.for_writing(&owner("bob"), SPACE).unwrap();
        let other = keys.for_writing(&owner("ann"), Namespace([8; 32])).unwrap();
        assert!(!same(&ann, &bob) && !same(&ann, &other));
        let again = open(&folder);
        for key in [&ann, &bob, &other] {
            let read = again.get(key.number).unwrap();
            assert!(same(key, &read) && read.owner == key.owner && read.namespace == key.namespace);
        }
        assert_eq!(again.for_writing(&owner("ann"), SPACE).unwrap().number, ann.number);
        for entry in fs::read_dir(&folder).unwrap() {
            let entry = entry.unwrap();
            assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600);
            assert!(!entry.file_name().to_string_lossy().contains("ann"));
        }
        assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_forgotten_key_is_gone_and_the_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let keys = open(folder.path());
        let ann = keys.for_writing(&owner("ann"), SPACE).unwrap();
        let bob = keys.for_writing(&owner("bob"), SPACE).unwrap();
        // A second name of the file shows what stays of its bytes.
        let kept = folder.path().join("kept");
        fs::hard_link(keys.path(ann.number), &kept).unwrap();
        let before = fs::read(&kept).unwrap();
        let (numbers, outcome) = keys.forget("ann");
        outcome.unwrap();
        assert_eq!(numbers, [ann.number]);
        let after = fs::read(&kept).unwrap();
        let same = before.iter().zip(&after).filter(|(a, b)| a == b).count();
        assert!(same < before.len() / 8, "{same} of {} bytes are as they were", before.len());
        for keys in [keys, open(folder.path())] {
            assert!(keys.get(ann.number).is_none() && keys.get(bob.number).is_some());
            assert_eq!(keys.owners(), BTreeSet::from(["bob".to_owned()]));
            assert_ne!(keys.for_writing(&owner("ann"), SPACE).unwrap().number, ann.number);
            keys.forget("ann").1.unwrap();
        }
    }

    #[test]
    fn a_key_that_the_drive_keeps_can_be_forgotten_again() {
        let folder = tempfile::tempdir().unwrap();
        let keys = open(folder.path());
        let ann = keys.for_writing(&owner("ann"), SPACE).unwrap();
        let (path, aside) = (keys.path(ann.number), folder.path().join("aside"));
        fs::rename(&path, &aside).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(keys.forget("ann").1.is_err());
        assert!(keys.get(ann.number).is_none() && keys.owners().contains("ann"));
        fs::remove_dir(&path).unwrap();
        fs::rename(&aside, &path).unwrap();
        assert!(keys.forget("ann").1.is_ok());
        assert!(!path.exists() && keys.owners().is_empty());
    }

    #[test]
    fn uses_are_counted_ahead_and_a_new_key_takes_over() {
        let folder = tempfile::tempdir().unwrap();
        let reserved = |keys: &Keys, number| keys.get(number).unwrap().reserved.load(Ordering::Relaxed);
        let keys = open(folder.path());
        let first = keys.for_writing(&owner(""), SPACE).unwrap();
        for start in 1..4 {
            assert_eq!(reserved(&open(folder.path()), first.number), start * STEP);
            open(folder.path()).for_writing(&owner(""), SPACE).unwrap();
        }
        let keys = open(folder.path());
        keys.get(first.number).unwrap().reserved.store(USES, Ordering::Relaxed);
        let second = keys.for_writing(&owner(""), SPACE).unwrap();
        assert_ne!(second.number, first.number);
        assert!(keys.get(first.number).is_some(), "rows need the first one");
        // Both were made in one second.
        assert_eq!(open(folder.path()).for_writing(&owner(""), SPACE).unwrap().number, second.number);
        // With the last use of a step the next one is written down.
        second.left.store(1, Ordering::Relaxed);
        let before = reserved(&keys, second.number);
        keys.for_writing(&owner(""), SPACE).unwrap();
        assert_eq!(reserved(&keys, second.number), before);
        keys.for_writing(&owner(""), SPACE).unwrap();
        assert_eq!(reserved(&keys, second.number), before + STEP);
    }

    #[test]
    fn a_damaged_file_costs_its_own_key_and_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let keys = open(folder.path());
        let (ann, bob) = (
            keys.for_writing(&owner("ann"), SPACE).unwrap(),
            keys.for_writing(&owner("bob"), SPACE).unwrap(),
        );
        let path = keys.path(ann.number);
        let whole = fs::read(&path).unwrap();
        for bit in 0..whole.len() * 8 {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, bytes).unwrap();
            let (keys, told) = Keys::open(folder.path());
            assert!(keys.get(bob.number).is_some());
            if bit / 8 < whole.len() - END {
                assert!(keys.get(ann.number).is_none() && told.len() == 1, "bit {bit}: {told:?}");
            } else {
                // Only how often it was used: it opens rows and seals none.
                assert!(same(&ann, &keys.get(ann.number).unwrap()) && told.is_empty());
                let next = keys.for_writing(&owner("ann"), SPACE).unwrap();
                assert_ne!(next.number, ann.number, "bit {bit}");
                destroy(&keys.path(next.number)).unwrap();
            }
        }
        for bytes in [&whole[..whole.len() - END - 1], &[], &[0; 4096]] {
            fs::write(&path, bytes).unwrap();
            assert_eq!(Keys::open(folder.path()).1.len(), 1);
        }
    }

    #[test]
    fn what_was_not_finished_goes_and_a_folder_that_cannot_be_read_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let unfinished = folder.path().join("00000009.key.unfinished");
        fs::write(&unfinished, b"half").unwrap();
        open(folder.path());
        assert!(!unfinished.exists());
        let file = folder.path().join("file");
        fs::write(&file, b"").unwrap();
        let (keys, told) = Keys::open(&file);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(keys.for_writing(&owner("ann"), SPACE).is_err());
        assert!(keys.for_writing(&"x".repeat(OWNER_MAX + 1).as_str().into(), SPACE).is_err());
    }
}
