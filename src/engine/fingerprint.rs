//! The namespace: a fingerprint of everything that must be equal for two engines' rows to be interchangeable.
//!
//! Model config, names, sizes and headers of the weight files, 64 samples of the weights themselves, and what the
//! engine announced (dtype, layout, groups, row size, hashes, versions). No times and no paths: two boxes that hold
//! the same model must agree. The weights are sampled, not hashed whole, and past the page cache: on a box whose
//! GPU shares its memory, reading a model through the cache can push it over the edge.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::fcntl::{OFlag, PosixFadviseAdvice, posix_fadvise};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use crate::base::block::Namespace;
use crate::base::geometry::{Group, GroupKind, Hello};

/// Samples over all weights of a model, and the size of each.
const SAMPLES: u64 = 64;
const SAMPLE: u64 = 64 << 10;

/// Alignment of direct reads: no drive asks for more.
const ALIGN: u64 = 4096;

/// Longest JSON file and safetensors header that is read. The index of a model of 500 shards is about 10 MB.
const JSON_MAX: u64 = 64 << 20;
const HEADER_MAX: u64 = 256 << 20;

/// Most weight files of one model; the largest known models have fewer than 500.
const FILES_MAX: usize = 4096;

/// What the cache remembers: models of one node, of which there is one at a time.
const REMEMBERED: usize = 4;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{0} holds no config.json: it is no model folder")]
    NoConfig(PathBuf),
    #[error("{0} holds no weight files (*.safetensors, *.bin, *.pt, *.gguf)")]
    NoWeights(PathBuf),
    #[error("{path} claims a header of {length} bytes in a file of {size}")]
    Header { path: PathBuf, length: u64, size: u64 },
    #[error("{0} holds more than 4096 weight files")]
    TooMany(PathBuf),
}

/// Fingerprint of the rows that the engine which said `hello` reads and writes with the model in folder `model`,
/// and the facts it was made of, so that a difference between two boxes can be named. Blocking work: some hundred
/// megabytes of reads at most.
pub fn fingerprint(model: &Path, hello: &Hello) -> Result<(Namespace, BTreeMap<String, String>), Error> {
    let mut facts = announced(hello);
    facts.extend(remembered(model)?.iter().map(|(name, value)| (name.clone(), value.clone())));
    Ok((namespace(&facts), facts))
}

/// Names on which two boxes differ, with both values, in order.
pub fn differences(ours: &BTreeMap<String, String>, theirs: &BTreeMap<String, String>) -> Vec<String> {
    let names: std::collections::BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    let value = |facts: &BTreeMap<String, String>, name: &String| {
        facts.get(name).cloned().unwrap_or_else(|| "nothing".into())
    };
    names
        .into_iter()
        .filter(|name| ours.get(*name) != theirs.get(*name))
        .map(|name| format!("{name}: {} here, {} there", value(ours, name), value(theirs, name)))
        .collect()
}

fn namespace(facts: &BTreeMap<String, String>) -> Namespace {
    let mut hash = Sha256::new();
    hash.update(b"spark-kv namespace 1\n");
    for text in facts.iter().flat_map(|(name, value)| [name, value]) {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    Namespace(hash.finalize().into())
}

/// Facts that the engine announced.
fn announced(hello: &Hello) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::from([
        ("hash.algorithm".to_owned(), hello.hash_algorithm.clone()),
        ("hash.seed".to_owned(), hello.hash_seed.clone()),
        ("hash.unit".to_owned(), hello.hash_unit.to_string()),
        ("rows.bytes".to_owned(), hello.row_bytes.to_string()),
        ("version.plugin".to_owned(), hello.plugin.clone()),
        ("version.vllm".to_owned(), hello.vllm.clone()),
    ]);
    for (number, group) in hello.groups.iter().enumerate() {
        facts.insert(format!("group.{number:02}"), describe(group));
    }
    for (name, value) in &hello.interchange {
        facts.insert(format!("engine.{name}"), value.clone());
    }
    facts
}

fn describe(group: &Group) -> String {
    let kind = match &group.kind {
        GroupKind::FullAttention => "full_attention",
        GroupKind::MlaAttention => "mla_attention",
        GroupKind::SlidingWindow => "sliding_window",
        GroupKind::Mamba => "mamba",
        GroupKind::Other(name) => name,
    };
    let covered: Vec<String> = group.covered.iter().map(|(at, length)| format!("{at}+{length}")).collect();
    format!("{kind}, {} tokens a row, bytes {}", group.tokens_per_row, covered.join(" "))
}

type Facts = Arc<BTreeMap<String, String>>;

/// Which bytes a path led to when they were read.
#[derive(Clone, PartialEq, Eq)]
struct FileId {
    name: String,
    /// Device, inode, size, and the times of the last change of content and of the inode.
    numbers: [u64; 7],
}

/// The facts of the models that were asked for last. In memory only: a fingerprint that outlives the process would
/// have to trust times.
static MODELS: Mutex<Vec<(PathBuf, Vec<FileId>, Facts)>> = Mutex::new(Vec::new());

fn remembered(model: &Path) -> Result<Facts, Error> {
    let files = Files::of(model)?;
    let ids = files.ids();
    let known = MODELS.lock().iter().find(|(path, i, _)| path == model && *i == ids).map(|(.., f)| f.clone());
    if let Some(facts) = known {
        return Ok(facts);
    }
    let facts = Arc::new(files.facts()?);
    let mut models = MODELS.lock();
    models.retain(|(path, ..)| path != model);
    models.truncate(REMEMBERED - 1);
    models.insert(0, (model.to_owned(), ids, facts.clone()));
    Ok(facts)
}

/// The files of a model folder that matter, sorted by name.
struct Files {
    configs: Vec<Entry>,
    weights: Vec<Entry>,
}

struct Entry {
    name: String,
    path: PathBuf,
    meta: std::fs::Metadata,
}

impl Files {
    fn of(model: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Read { path: model.to_owned(), source };
        let (mut configs, mut weights) = (Vec::new(), Vec::new());
        for entry in std::fs::read_dir(model).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let Some(name) = path.file_name().and_then(|n| n.to_str()).map(str::to_owned) else { continue };
            let into = match path.extension().and_then(|e| e.to_str()) {
                Some("json") if !is_tokenizer(&name) => &mut configs,
                Some("safetensors" | "bin" | "pt" | "pth" | "gguf") => &mut weights,
                _ => continue,
            };
            // Follows links: model hubs keep their files elsewhere under names of their own.
            let meta =
                std::fs::metadata(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
            if meta.is_file() {
                into.push(Entry { name, path, meta });
            }
        }
        configs.sort_by(|a, b| a.name.cmp(&b.name));
        weights.sort_by(|a, b| a.name.cmp(&b.name));
        if !configs.iter().any(|e| e.name == "config.json") {
            return Err(Error::NoConfig(model.to_owned()));
        }
        match weights.len() {
            0 => Err(Error::NoWeights(model.to_owned())),
            n if n > FILES_MAX => Err(Error::TooMany(model.to_owned())),
            _ => Ok(Self { configs, weights }),
        }
    }

    fn ids(&self) -> Vec<FileId> {
        let number = |m: &std::fs::Metadata| {
            [
                m.dev(),
                m.ino(),
                m.len(),
                m.mtime().cast_unsigned(),
                m.mtime_nsec().cast_unsigned(),
                m.ctime().cast_unsigned(),
                m.ctime_nsec().cast_unsigned(),
            ]
        };
        let id = |e: &Entry| FileId { name: e.name.clone(), numbers: number(&e.meta) };
        self.configs.iter().chain(&self.weights).map(id).collect()
    }

    fn facts(&self) -> Result<BTreeMap<String, String>, Error> {
        let mut facts = BTreeMap::new();
        for config in &self.configs {
            let bytes = super::process::read_bounded(&config.path, JSON_MAX)
                .map_err(|source| Error::Read { path: config.path.clone(), source })?;
            facts.insert(format!("model.{}", config.name), short(Sha256::digest(bytes)));
        }
        let sizes: Vec<u64> = self.weights.iter().map(|w| w.meta.len()).collect();
        let plan = plan(&sizes);
        for (number, weights) in self.weights.iter().enumerate() {
            let spots: Vec<u64> = plan.iter().filter(|s| s.file == number).map(|s| s.offset).collect();
            let value = weights
                .describe(&spots)
                .map_err(|source| Error::Read { path: weights.path.clone(), source })??;
            facts.insert(format!("model.{}", weights.name), value);
        }
        Ok(facts)
    }
}

/// The tokenizer turns text into tokens; rows belong to tokens.
fn is_tokenizer(name: &str) -> bool {
    name.starts_with("tokenizer")
        || matches!(name, "vocab.json" | "added_tokens.json" | "special_tokens_map.json")
        || name.starts_with("chat_template")
}

fn short(digest: impl AsRef<[u8]>) -> String {
    hex::encode(&digest.as_ref()[..16])
}

impl Entry {
    /// Size, header and samples of one weight file in a line.
    fn describe(&self, spots: &[u64]) -> io::Result<Result<String, Error>> {
        let size = self.meta.len();
        let header = match self.header()? {
            Ok(header) => header,
            Err(wrong) => return Ok(Err(wrong)),
        };
        let mut hash = Sha256::new();
        if !spots.is_empty() {
            let mut reader = Sampler::open(&self.path)?;
            for &offset in spots {
                hash.update(offset.to_le_bytes());
                hash.update(reader.read(offset)?);
            }
        }
        Ok(Ok(format!("{size} bytes, header {header}, {} samples {}", spots.len(), short(hash.finalize()))))
    }

    /// Digest of a safetensors header: names, shapes and types of all tensors.
    fn header(&self) -> io::Result<Result<String, Error>> {
        if self.path.extension().is_none_or(|e| e != "safetensors") {
            return Ok(Ok("none".into()));
        }
        let (file, size) = (File::open(&self.path)?, self.meta.len());
        let mut length = [0; 8];
        let wrong = |length| Error::Header { path: self.path.clone(), length, size };
        if size < 8 {
            return Ok(Err(wrong(0)));
        }
        file.read_exact_at(&mut length, 0)?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_MAX || length > size - 8 {
            return Ok(Err(wrong(length)));
        }
        let mut header = vec![0; usize::try_from(length).expect("at most 256 MiB")];
        file.read_exact_at(&mut header, 8)?;
        let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        Ok(Ok(short(Sha256::digest(header))))
    }
}

/// One place that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Spot {
    file: usize,
    offset: u64,
}

/// Where to sample files of these sizes: one place in each of 64 equal parts of all bytes, the same on every box.
/// A model of 4 MiB or less is read whole.
fn plan(sizes: &[u64]) -> Vec<Spot> {
    let total: u64 = sizes.iter().sum();
    if total <= SAMPLES * SAMPLE {
        let whole = |(file, size): (usize, &u64)| {
            (0..size.div_ceil(SAMPLE)).map(move |n| Spot { file, offset: n * SAMPLE })
        };
        return sizes.iter().enumerate().flat_map(whole).collect();
    }
    let mut spots: Vec<Spot> = (0..SAMPLES)
        .map(|part| {
            let (begin, end) = (part_begin(total, part), part_begin(total, part + 1));
            let digest = Sha256::digest([part.to_le_bytes(), total.to_le_bytes()].concat());
            let random = u64::from_le_bytes(digest[..8].try_into().expect("8 of 32 bytes"));
            place(sizes, begin + random % (end - begin).saturating_sub(SAMPLE).max(1))
        })
        .collect();
    spots.dedup();
    spots
}

fn part_begin(total: u64, part: u64) -> u64 {
    u64::try_from(u128::from(total) * u128::from(part) / u128::from(SAMPLES)).expect("at most `total`")
}

/// Turns a place in the row of all bytes into a file and an aligned offset in it.
fn place(sizes: &[u64], mut at: u64) -> Spot {
    for (file, &size) in sizes.iter().enumerate() {
        if at < size {
            return Spot { file, offset: at / ALIGN * ALIGN };
        }
        at -= size;
    }
    Spot { file: sizes.len() - 1, offset: 0 }
}

/// Reads samples past the page cache where the file system can, and drops them from it where it cannot.
struct Sampler {
    file: File,
    path: PathBuf,
    direct: bool,
    buffer: Vec<u8>,
}

impl Sampler {
    fn open(path: &Path) -> io::Result<Self> {
        let direct = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(OFlag::O_DIRECT.bits())
            .open(path)
            .map(|file| (file, true));
        let (file, direct) = direct.or_else(|_| File::open(path).map(|file| (file, false)))?;
        let room = usize::try_from(SAMPLE + ALIGN).expect("small");
        Ok(Self { file, path: path.to_owned(), direct, buffer: vec![0; room] })
    }

    /// Up to 64 KiB from `offset`; fewer only at the file's end.
    fn read(&mut self, offset: u64) -> io::Result<&[u8]> {
        let skip = self.buffer.as_ptr().align_offset(usize::try_from(ALIGN).expect("small"));
        let end = skip + usize::try_from(SAMPLE).expect("small");
        let mut got = self.fill(offset, skip, end);
        if self.direct && got.is_err() {
            (self.file, self.direct) = (File::open(&self.path)?, false);
            got = self.fill(offset, skip, end);
        }
        if !self.direct {
            let (at, length) = (offset.cast_signed(), SAMPLE.cast_signed());
            let _ = posix_fadvise(&self.file, at, length, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        }
        Ok(&self.buffer[skip..skip + got?])
    }

    fn fill(&mut self, offset: u64, skip: usize, end: usize) -> io::Result<usize> {
        let mut at = skip;
        while at < end {
            match self.file.read_at(&mut self.buffer[at..end], offset + (at - skip) as u64) {
                Ok(0) => break,
                Ok(n) => {
                    at += n;
                    // A direct read that ends off the grid has met the file's end; reading on would be refused.
                    if self.direct && !n.is_multiple_of(usize::try_from(ALIGN).expect("small")) {
                        break;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(at - skip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        let all = Group { kind: GroupKind::FullAttention, tokens_per_row: 128, covered: vec![(0, 8192)] };
        Hello {
            plugin: "1".into(),
            vllm: "0.32.0".into(),
            interchange: BTreeMap::from([("dtype".into(), "bfloat16".into())]),
            ..Hello::of_rows(8, 8192, vec![all])
        }
    }

    /// A model folder with one weights file of `size` bytes behind a header.
    fn model(size: usize) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let header = br#"{"w":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}"#;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend((0..size).map(|n| (n % 251) as u8));
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        std::fs::write(dir.path().join("config.json"), r#"{"hidden_size":64}"#).unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        dir
    }

    fn of(dir: &Path) -> (Namespace, BTreeMap<String, String>) {
        fingerprint(dir, &hello()).unwrap()
    }

    fn flip(path: &Path, offset: u64) {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
    }

    #[test]
    fn a_copy_elsewhere_is_the_same_model() {
        let (one, two) = (model(300_000), model(300_000));
        assert_eq!(of(one.path()), of(two.path()));
    }

    #[test]
    fn a_changed_byte_in_a_sampled_place_is_another_model_and_is_named() {
        let (one, two) = (model(20 << 20), model(20 << 20));
        let weights = two.path().join("model.safetensors");
        let size = std::fs::metadata(&weights).unwrap().len();
        let spots = plan(&[size]);
        assert_eq!(spots.len(), 64);
        flip(&weights, spots[40].offset + SAMPLE - 1);
        let (ours, theirs) = (of(one.path()), of(two.path()));
        assert_ne!(ours.0, theirs.0);
        let named = differences(&ours.1, &theirs.1);
        assert_eq!(named.len(), 1);
        assert!(named[0].starts_with("model.model.safetensors: "), "{named:?}");
    }

    #[test]
    fn a_small_model_is_read_whole() {
        let (one, two) = (model(300_001), model(300_001));
        let weights = two.path().join("model.safetensors");
        let size = std::fs::metadata(&weights).unwrap().len();
        for offset in [64, 65_536, 150_000, size - 1] {
            flip(&weights, offset);
            assert_ne!(of(one.path()).0, of(two.path()).0, "byte {offset}");
            flip(&weights, offset);
        }
        assert_eq!(of(one.path()).0, of(two.path()).0);
    }

    #[test]
    fn config_groups_seed_and_versions_tell_models_apart_and_the_tokenizer_does_not() {
        let dir = model(1000);
        let base = of(dir.path()).0;
        type Change = fn(&mut Hello);
        let changes: [Change; 7] = [
            |h| h.groups[0].tokens_per_row = 64,
            |h| h.groups[0].covered = vec![(0, 4096)],
            |h| h.groups.push(h.groups[0].clone()),
            |h| h.hash_seed = "1".into(),
            |h| h.row_bytes = 16384,
            |h| h.vllm = "0.33.0".into(),
            |h| drop(h.interchange.insert("dtype".into(), "float16".into())),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut changed = hello();
            change(&mut changed);
            assert_ne!(fingerprint(dir.path(), &changed).unwrap().0, base, "change {number}");
        }
        let mut same = hello();
        (same.pid, same.rows, same.engine_id, same.model) = (9, 99, "spark-b-4".into(), "/elsewhere".into());
        assert_eq!(fingerprint(dir.path(), &same).unwrap().0, base);
        std::fs::write(dir.path().join("tokenizer.json"), "{ }").unwrap();
        assert_eq!(of(dir.path()).0, base);
        std::fs::write(dir.path().join("config.json"), r#"{"hidden_size":65}"#).unwrap();
        assert_ne!(of(dir.path()).0, base);
    }

    #[test]
    fn what_is_no_model_is_refused() {
        let dir = model(100);
        let weights = dir.path().join("model.safetensors");
        std::fs::write(&weights, u64::MAX.to_le_bytes()).unwrap();
        assert!(matches!(fingerprint(dir.path(), &hello()), Err(Error::Header { .. })));
        std::fs::remove_file(&weights).unwrap();
        assert!(matches!(fingerprint(dir.path(), &hello()), Err(Error::NoWeights(_))));
        std::fs::remove_file(dir.path().join("config.json")).unwrap();
        assert!(matches!(fingerprint(dir.path(), &hello()), Err(Error::NoConfig(_))));
    }

    proptest::proptest! {
        #[test]
        fn samples_lie_in_their_files_and_on_the_grid(
            sizes in proptest::collection::vec(1_u64..1 << 36, 1..20)
        ) {
            let spots = plan(&sizes);
            proptest::prop_assert!(!spots.is_empty() && spots.len() <= 64 + sizes.len());
            for spot in spots {
                proptest::prop_assert!(spot.offset < sizes[spot.file] && spot.offset % ALIGN == 0);
            }
        }
    }
}
