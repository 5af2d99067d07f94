//! The process behind `spark-kv up`: keeps a node and an engine running side by side.
//!
//! Each of the two is started again alone when it ends; neither's end touches the other. The keeper itself holds
//! nothing that could break: no data, no connections. When it ends by a signal everything it started ends with it,
//! in order; when it is killed, the kernel ends the node (parent-death signal) and the guard ends the engine.
//!
//! It runs on one thread. That is not thrift: the kernel sends parent-death signals when the *thread* that forked
//! ends, so all children are forked by the one thread that lives as long as the process.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::base::clock::Clock;
use crate::engine::log::{FILE_MAX, Log};
use crate::engine::provision::{self, Maker, Provisions};
use crate::engine::supervise::{Ends, Plan, supervise};
use crate::engine::{Own, Phase, View, guard};
use crate::settings::{Places, Settings};
use crate::tasks::{Kind, Tasks};

/// Pauses before a node that ended is started again. It must be back fast: the engine computes everything anew
/// meanwhile.
const NODE_PAUSE_MIN: Duration = Duration::from_millis(200);
const NODE_PAUSE_MAX: Duration = Duration::from_secs(5);

/// A node that ran this long begins with the short pause again: no more starts a minute than with the longest pause.
const NODE_HEALTHY: Duration = NODE_PAUSE_MAX;

/// Exit code of a node that could not even start: its port is taken, a file is missing, the token is none.
pub const CANNOT_START: u8 = 78;

/// So often in a row before the first node has run: then it is nothing that passes, and a person must look. Two
/// seconds and a half in all, which an earlier node needs to leave the port.
const STARTS: u32 = 5;

/// From TERM to KILL: the node answers what is in flight and closes its segments.
const NODE_GRACE: Duration = Duration::from_secs(15);

/// How often an engine that starts is spoken of.
const SAY: Duration = Duration::from_secs(10);

/// What the node is started with, after `spark-kv node`. Secrets go by the environment only.
#[derive(Clone, Debug, Default)]
pub struct NodeCommand {
    pub words: Vec<OsString>,
    pub env: Vec<(String, String)>,
}

pub struct Options {
    pub settings: Settings,
    pub places: Places,
    pub node: NodeCommand,
    pub own: Own,
    /// Where environments and models are made ([`provision::cache_folder`]).
    pub cache: PathBuf,
    /// Lines for the person who typed `up`.
    pub say: Arc<dyn Fn(&str) + Send + Sync>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("another spark-kv (process {pid}) runs in {folder}: stop it, or take another --root")]
    Taken { pid: String, folder: PathBuf },
    #[error("failed to {what} {path}: {source}")]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("failed to end what an earlier spark-kv left: {0}")]
    Leftovers(io::Error),
    #[error(transparent)]
    Provision(#[from] provision::Error),
    #[error("failed to start: {0}")]
    Runtime(io::Error),
    #[error("the node could not start {STARTS} times in a row: the lines above say why")]
    Node,
}

/// Until a signal ends it. The result is the exit code. Starts a runtime of its own: not to be called within one.
pub fn run(options: Options) -> Result<i32, Error> {
    let lock = Keep::lock(&options.places)?;
    let runtime = runtime()?;
    let outcome = runtime.block_on(Keep { options, tasks: Tasks::new() }.run());
    runtime.shutdown_timeout(Duration::from_secs(1));
    drop(lock);
    outcome
}

/// Only makes what is missing: the vLLM environment and the tiny model. As [`run`] in the rest.
pub fn provide(options: &Options) -> Result<Provisions, Error> {
    let tasks = Tasks::new();
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        let (ends, _) = watch_signals(&tasks, &options.say)?;
        provide_with(options, &tasks, &ends.stop).await
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

async fn provide_with(
    options: &Options,
    tasks: &Tasks,
    stop: &CancellationToken,
) -> Result<Provisions, Error> {
    let Options { settings, own, cache, say, .. } = options;
    let maker = Maker { own, cache, stop, tasks, say: say.clone() };
    Ok(maker.provide(&settings.engine).await?)
}

fn runtime() -> Result<tokio::runtime::Runtime, Error> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Runtime)
}

fn make_folders(places: &Places) -> Result<(), Error> {
    for path in [&places.state, &places.run, &places.log] {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|source| Error::Io {
            what: "make the folder",
            path: path.clone(),
            source,
        })?;
    }
    Ok(())
}

struct Keep {
    options: Options,
    tasks: Tasks,
}

impl Keep {
    /// Folders, and the lock that makes this the only keeper in them.
    fn lock(places: &Places) -> Result<Flock<File>, Error> {
        make_folders(places)?;
        let path = places.run.join("keeper.lock");
        let failed = |source| Error::Io { what: "lock", path: path.clone(), source };
        let file =
            File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        match Flock::lock(file.map_err(failed)?, FlockArg::LockExclusiveNonblock) {
            Ok(mut lock) => {
                let written = lock.set_len(0).and_then(|()| lock.rewind());
                written.and_then(|()| writeln!(lock, "{}", std::process::id())).map_err(failed)?;
                Ok(lock)
            }
            Err((file, nix::errno::Errno::EWOULDBLOCK)) => {
                let mut pid = String::new();
                let _ = file.take(32).read_to_string(&mut pid);
                let folder = places.run.parent().unwrap_or(&places.run).to_owned();
                Err(Error::Taken { pid: pid.trim().to_owned(), folder })
            }
            Err((_, errno)) => Err(failed(errno.into())),
        }
    }

    async fn run(self) -> Result<i32, Error> {
        // What the engine leaves behind when its guard is killed becomes a child of this process.
        let _ = nix::sys::prctl::set_child_subreaper(true);
        self.sweep()?;
        let (ends, node_ends) = watch_signals(&self.tasks, &self.options.say)?;
        let (tell, views) = watch::channel(View::default());
        let node = self.keep_node(&node_ends);
        let engine = async {
            let outcome = self.keep_engine(&ends, tell).await;
            // The node outlives the engine, whose last stores it may still take.
            node_ends.stop.cancel();
            outcome
        };
        let node = async {
            let outcome = node.await;
            // Without a node there is nobody whom the engine could serve.
            ends.stop.cancel();
            outcome
        };
        let (engine, node, ()) = tokio::join!(engine, node, self.announce(views, &node_ends.stop));
        self.tasks.stop(Duration::from_secs(2)).await;
        let _ = std::fs::remove_file(self.options.places.run.join("invite"));
        node.and(engine).map(|()| 0)
    }

    /// Ends what an earlier keeper left that was killed.
    fn sweep(&self) -> Result<(), Error> {
        let run = &self.options.places.run;
        guard::sweep(&run.join("engine.record")).map_err(Error::Leftovers)?;
        for stale in ["invite", "engine.json"] {
            let _ = std::fs::remove_file(run.join(stale));
        }
        Ok(())
    }

    async fn keep_engine(&self, ends: &Ends, tell: watch::Sender<View>) -> Result<(), Error> {
        let Options { settings, places, own, say, .. } = &self.options;
        let made = match provide_with(&self.options, &self.tasks, &ends.stop).await {
            Ok(made) => made,
            Err(Error::Provision(provision::Error::Stopped)) => return Ok(()),
            Err(error) => return Err(error),
        };
        let path = places.engine_log();
        let log = Log::open(&path, FILE_MAX, None).map_err(|source| Error::Io {
            what: "open",
            path: path.clone(),
            source,
        })?;
        say(&format!("engine starts; its log is {}", path.display()));
        let Provisions { venv, model, served_name } = made;
        let plan = Plan {
            own: own.clone(),
            settings: settings.clone(),
            places: places.clone(),
            venv,
            model,
            served_name,
            plugin: provision::PLUGIN,
        };
        let told = move |view: &View| {
            tell.send_replace(view.clone());
        };
        supervise(plan, log, ends.clone(), Clock::real(), self.tasks.clone(), told).await;
        Ok(())
    }

    /// Starts the node again and again until it is asked to end.
    async fn keep_node(&self, ends: &Ends) -> Result<(), Error> {
        let mut pause = NODE_PAUSE_MIN;
        let mut futile = Some(0);
        while !ends.stop.is_cancelled() && !ends.kill.is_cancelled() {
            let begin = tokio::time::Instant::now();
            let ended = match self.start_node() {
                Ok(node) => stand_by(node, ends).await,
                Err(error) => Err(error),
            };
            if ends.stop.is_cancelled() || ends.kill.is_cancelled() {
                return Ok(());
            }
            let cannot = ended.as_ref().is_ok_and(|status| status.code() == Some(CANNOT_START.into()));
            futile = futile.filter(|_| cannot).map(|times| times + 1);
            if futile == Some(STARTS) {
                return Err(Error::Node);
            }
            let how = match ended {
                Ok(_) if cannot => "could not start".into(),
                Ok(status) => guard::describe(status),
                Err(error) => format!("could not be started: {error}"),
            };
            if begin.elapsed() >= NODE_HEALTHY {
                pause = NODE_PAUSE_MIN;
            }
            (self.options.say)(&format!("the node {how}; it is started again in {} ms", pause.as_millis()));
            let _ = ends.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
            pause = (pause * 2).min(NODE_PAUSE_MAX);
        }
        Ok(())
    }

    fn start_node(&self) -> io::Result<tokio::process::Child> {
        let Options { node, own, .. } = &self.options;
        let mut command = own.words("node");
        command.extend(node.words.iter().cloned());
        let words = guard::tethered(own, Signal::SIGKILL, &command);
        let mut child = guard::command_of(&words);
        child.envs(node.env.iter().map(|(name, value)| (name, value)));
        tokio::process::Command::from(child).stdin(std::process::Stdio::null()).spawn()
    }

    /// Says what a person wants to know: where it serves, how a second node joins, and what the engine does.
    async fn announce(&self, mut views: watch::Receiver<View>, stop: &CancellationToken) {
        let Options { settings, say, .. } = &self.options;
        let listen = &settings.listen;
        let (mut phase, mut since) = (Phase::Stopped, tokio::time::Instant::now());
        loop {
            let changed = stop.run_until_cancelled(tokio::time::timeout(SAY, views.changed())).await;
            let view = views.borrow_and_update().clone();
            match changed {
                None | Some(Ok(Err(_))) => return,
                Some(Err(_)) if view.phase == Phase::Starting => {
                    let last = view.reason.map(|r| format!(": {r}")).unwrap_or_default();
                    say(&format!("engine starts ({} s){last}", since.elapsed().as_secs()));
                    continue;
                }
                Some(Err(_) | Ok(Ok(()))) => {}
            }
            if view.phase == phase {
                continue;
            }
            (phase, since) = (view.phase, tokio::time::Instant::now());
            match (view.phase, view.reason) {
                (Phase::Ready, _) => {
                    let (name, address, port) = (&view.served_name, &listen.address, listen.port);
                    say(&format!(
                        "engine up: http://{address}:{port}/v1 serves `{name}` once its cache is checked, some seconds from now; the page is http://{address}:{port}/"
                    ));
                    self.invite();
                }
                (Phase::Failed, Some(why)) => {
                    say(&format!("engine given up: {why}"));
                    say(&format!("  next: {}", crate::base::fault::Code::EngineCrashLoop.next_step()));
                }
                (Phase::Stopped, Some(why)) => say(&why),
                (Phase::Stopping, Some(why)) => say(&format!("ending the engine: it {why}")),
                (Phase::Starting | Phase::Stopping | Phase::Stopped | Phase::Failed, _) => {}
            }
        }
    }

    fn invite(&self) {
        let Ok(token) = std::fs::read_to_string(self.options.places.run.join("invite")) else { return };
        let token: String = token.trim().chars().take(1000).collect();
        if token.is_empty() {
            return;
        }
        // The token goes by the environment: arguments can be read by everybody on a machine.
        let alone =
            self.options.settings.cluster.address.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
        let (where_, how) = match alone {
            true => ("on this machine ", "--root OTHER --name OTHER --port-base PORT"),
            false => ("", "--set cluster.address=ITS-ADDRESS"),
        };
        let say = &self.options.say;
        say(&format!(
            "a second node {where_}joins within the hour with: SPARK_KV_JOIN={token} spark-kv up {how} (and the profile and settings of this one)"
        ));
        if alone {
            say(
                "  for one on another box, start this one with --set cluster.address=ITS-ADDRESS-ON-THE-CABLE",
            );
        }
    }
}

/// Waits for the node's end, and brings it about when asked.
async fn stand_by(mut node: tokio::process::Child, ends: &Ends) -> io::Result<std::process::ExitStatus> {
    let (mut asked, mut killed) = (false, false);
    let mut limit = None;
    loop {
        tokio::select! {
            status = node.wait() => return status,
            () = ends.stop.cancelled(), if !asked => {
                asked = true;
                limit = Some(tokio::time::Instant::now() + NODE_GRACE);
                send(&node, Signal::SIGTERM);
            }
            () = ends.kill.cancelled(), if !killed => {
                (asked, killed) = (true, true);
                send(&node, Signal::SIGKILL);
            }
            () = until(limit), if !killed => {
                killed = true;
                send(&node, Signal::SIGKILL);
            }
        }
    }
}

async fn until(limit: Option<tokio::time::Instant>) {
    match limit {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn send(node: &tokio::process::Child, signal: Signal) {
    // A number is there until the end was waited for, so it cannot belong to somebody else.
    if let Some(pid) = node.id() {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), signal);
    }
}

/// The first INT, TERM or HUP asks for the end, the second does not ask.
fn watch_signals(tasks: &Tasks, say: &Arc<dyn Fn(&str) + Send + Sync>) -> Result<(Ends, Ends), Error> {
    let listen = |kind| signal(kind).map_err(Error::Runtime);
    let mut term = listen(SignalKind::terminate())?;
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut hang_up = listen(SignalKind::hangup())?;
    let (engine, node) = (Ends::default(), Ends::default());
    let (ends, all, say) = (engine.clone(), node.clone(), say.clone());
    tasks.spawn(Kind::Chore, "signals", async move {
        let mut count = 0;
        loop {
            tokio::select! {
                _ = term.recv() => {}
                _ = interrupt.recv() => {}
                _ = hang_up.recv() => {}
            }
            count += 1;
            if count == 1 {
                say("stopping; a second signal ends everything at once");
                ends.stop.cancel();
            } else {
                ends.kill.cancel();
                all.kill.cancel();
            }
        }
    });
    Ok((engine, node))
}
