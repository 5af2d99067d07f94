//! Drives the machine: starts engines, probes them, ends them, and writes the view at each change.

use std::future::pending;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::base::clock::{Clock, unix_seconds};
use crate::settings::{EngineKind, Places, Ports, Settings};
use crate::tasks::{Kind, Tasks};

use super::child::{Child, Launch};
use super::log::Log;
use super::machine::{Act, Event, Limits, Machine};
use super::probe::Probe;
use super::view::{Phase, View};
use super::{Identity, Own, command, generation};

/// Between two probes. A second is what a page shows and what a router can wait.
const PROBE_PAUSE: Duration = Duration::from_secs(1);

/// What one node's engine is made of.
#[derive(Clone, Debug)]
pub struct Plan {
    pub own: Own,
    pub settings: Settings,
    pub places: Places,
    /// Virtual environment with vLLM, for that kind of engine.
    pub venv: PathBuf,
    /// Folder of the model, absolute.
    pub model: PathBuf,
    pub served_name: String,
    /// Text of the plugin.
    pub plugin: &'static str,
}

/// How the keeper asks for an end.
#[derive(Clone, Debug, Default)]
pub struct Ends {
    /// TERM, grace, KILL.
    pub stop: CancellationToken,
    /// KILL now.
    pub kill: CancellationToken,
}

/// Until `ends` asks for the end and nothing of the engine is left. `told` hears each view. Call it on the main
/// thread ([`Child::spawn`] says why).
pub async fn supervise(
    plan: Plan,
    log: Log,
    ends: Ends,
    clock: Clock,
    tasks: Tasks,
    mut told: impl FnMut(&View),
) {
    let limits = Limits {
        ready: Duration::from_secs(plan.settings.engine.ready_timeout_s.into()),
        grace: Duration::from_secs(plan.settings.engine.stop_grace_s.into()),
    };
    let mut engine = Supervised {
        machine: Machine::new(limits),
        view: View {
            url: plan.url(),
            served_name: plan.served_name.clone(),
            model: plan.model.clone(),
            keeper: Some(Identity::own()),
            ..View::default()
        },
        running: None,
        plan,
        log,
        limits,
        tasks,
    };
    engine.clean();
    engine.apply(Event::Start, &clock).await;
    let (mut stopped, mut killed) = (false, false);
    loop {
        if engine.publish() {
            told(&engine.view);
        }
        if (stopped || killed) && engine.machine.rests() {
            return;
        }
        let wake = engine.machine.wake_at().map(|at| at.since(clock.now()));
        let event = tokio::select! {
            // Each arm may be dropped: `ended` and `next` lose nothing, the others hold nothing.
            event = engine.next() => event,
            () = ends.stop.cancelled(), if !stopped => { stopped = true; Event::Stop }
            () = ends.kill.cancelled(), if !killed => { killed = true; Event::Kill }
            () = sleep(wake) => Event::Tick,
        };
        engine.apply(event, &clock).await;
    }
}

async fn sleep(span: Option<Duration>) {
    match span {
        Some(span) => tokio::time::sleep(span).await,
        None => pending().await,
    }
}

struct Supervised {
    plan: Plan,
    machine: Machine,
    running: Option<Running>,
    view: View,
    log: Log,
    limits: Limits,
    tasks: Tasks,
}

/// One engine and what its probe says.
struct Running {
    child: Option<Child>,
    answers: mpsc::Receiver<Result<(), String>>,
}

impl Supervised {
    async fn next(&mut self) -> Event {
        let Some(running) = &mut self.running else { return pending().await };
        tokio::select! {
            how = ended(&mut running.child) => Event::Ended(how),
            Some(answer) = running.answers.recv() => match answer {
                Ok(()) => Event::Answered,
                Err(why) => Event::Silent(why),
            },
        }
    }

    async fn apply(&mut self, event: Event, clock: &Clock) {
        let event = self.explain(event);
        let act = self.machine.on(event, clock.now());
        match act {
            Some(Act::Spawn) => self.spawn(clock),
            Some(Act::Term) => self.end(false, clock).await,
            Some(Act::Kill) => self.end(true, clock).await,
            None => {}
        }
    }

    /// Adds what the engine itself said to what was seen from outside.
    fn explain(&mut self, event: Event) -> Event {
        match event {
            Event::Silent(why) if self.machine.phase() == Phase::Starting => {
                Event::Silent(self.log.last().unwrap_or(why))
            }
            Event::Ended(how) => {
                self.running = None;
                self.clean();
                self.log.note(&format!("the engine {how}"));
                let tail = self.log.tail(60);
                let error = tail.iter().rev().find(|line| line.contains("Error"));
                let said = error.map(|line| format!(" ({})", line.trim())).unwrap_or_default();
                tracing::warn!(how, "engine ended");
                Event::Ended(format!("{how}{said}"))
            }
            event => event,
        }
    }

    fn spawn(&mut self, clock: &Clock) {
        let (say, answers) = mpsc::channel(1);
        match self.start() {
            Ok(child) => {
                let probe = Probe::new(&self.view.url, &self.view.served_name);
                self.tasks.spawn(Kind::Chore, "engine probe", ask(probe, say));
                self.running = Some(Running { child, answers });
            }
            Err(error) => {
                let event = self.explain(Event::Ended(format!("could not be started: {error}")));
                self.machine.on(event, clock.now());
            }
        }
    }

    /// None: somebody else runs it.
    fn start(&mut self) -> std::io::Result<Option<Child>> {
        let Self { plan, view, limits, .. } = self;
        if plan.settings.engine.kind == EngineKind::Attached {
            return Ok(None);
        }
        let number = generation::next(&plan.places.state.join("engine-generation"))?;
        view.engine_id = command::engine_id(&plan.settings.node.name, &plan.places.state, number);
        let launch = plan.launch(&view.engine_id)?;
        self.log.note(&format!("{} {} {}", view.engine_id, launch.program.display(), launch.args.join(" ")));
        tracing::info!(engine_id = view.engine_id, "engine starts");
        let record = plan.places.run.join("engine.record");
        Child::spawn(&plan.own, &launch, record, limits.grace, &self.log, &self.tasks).map(Some)
    }

    async fn end(&mut self, now: bool, clock: &Clock) {
        let Some(running) = &mut self.running else { return };
        match &mut running.child {
            Some(child) if now => child.kill().await,
            Some(child) => child.term().await,
            // Not ours to end: it is only looked at no more.
            None => {
                self.running = None;
                self.machine.on(Event::Ended("was let go".into()), clock.now());
            }
        }
    }

    /// What only an engine that runs may have. Nobody else uses these names: the keeper holds the lock.
    fn clean(&self) {
        let Plan { settings, places, .. } = &self.plan;
        generation::sweep_shm(&settings.node.name, &places.state);
        let _ = std::fs::remove_file(places.engine_events());
        let _ = std::fs::remove_file(places.engine_replay());
    }

    /// Writes the view when it changed.
    fn publish(&mut self) -> bool {
        let mut view = self.view.clone();
        view.phase = self.machine.phase();
        view.restarts = self.machine.restarts();
        view.reason = self.machine.reason().map(str::to_owned);
        view.pid = match (&self.running, self.view.pid) {
            (None, _) => None,
            (Some(_), Some(pid))
                if view.engine_id == self.view.engine_id && view.phase == self.view.phase =>
            {
                Some(pid)
            }
            (Some(running), _) => running.child.as_ref().and_then(Child::group),
        };
        if view == self.view && view.since_unix != 0 {
            return false;
        }
        if view.phase != self.view.phase || view.since_unix == 0 {
            view.since_unix = unix_seconds();
        }
        if let Err(error) = view.write(&self.plan.places.engine_view()) {
            tracing::error!(%error, "failed to write the view of the engine");
        }
        self.view = view;
        true
    }
}

async fn ended(child: &mut Option<Child>) -> String {
    match child {
        Some(child) => child.ended().await,
        None => pending().await,
    }
}

/// Asks once a second: for readiness first, for life from then on.
async fn ask(probe: Probe, say: mpsc::Sender<Result<(), String>>) {
    let mut ready = false;
    loop {
        let answer = if ready { probe.alive().await } else { probe.ready().await };
        ready |= answer.is_ok();
        if say.send(answer).await.is_err() {
            return;
        }
        tokio::time::sleep(PROBE_PAUSE).await;
    }
}

impl Plan {
    fn url(&self) -> String {
        match self.settings.engine.kind {
            EngineKind::Attached => self.settings.engine.url.trim_end_matches('/').to_owned(),
            EngineKind::Vllm | EngineKind::Mock => {
                format!("http://127.0.0.1:{}", Ports::of(&self.settings.listen).engine)
            }
        }
    }

    /// Lays the plugin down and makes the command line.
    fn launch(&self, engine_id: &str) -> std::io::Result<Launch> {
        let plugin = self.places.run.join("plugin");
        std::fs::create_dir_all(&plugin)?;
        let file = plugin.join(format!("{}.py", command::PLUGIN_MODULE));
        super::process::write_whole(&file, self.plugin.as_bytes(), 0o600)?;
        let path = std::env::var("PATH").unwrap_or_else(|_| "/usr/bin:/bin".into());
        let facts = command::Facts {
            engine: &self.settings.engine,
            own: &self.own,
            venv: &self.venv,
            model: &self.model,
            served_name: &self.served_name,
            engine_id,
            port: Ports::of(&self.settings.listen).engine,
            socket: &self.places.engine_socket(),
            events: &self.places.engine_events(),
            replay: &self.places.engine_replay(),
            plugin: &plugin,
            folder: &self.places.run,
            path: &path,
        };
        command::launch(&facts).ok_or_else(|| std::io::Error::other("an attached engine is not started here"))
    }
}
