//! `spark-kv guard`: stands between the keeper and one engine, so that no process and no shared memory of the engine
//! outlives either.
//!
//! The guard is small, holds no state worth keeping, and is the parent of everything the engine forks, also of what
//! leaves the process group (it is their subreaper). It ends them all when the keeper asks, when the keeper is gone
//! (end of its input), when it gets TERM, INT or HUP, and when the engine's own first process ends: vLLM's other
//! processes do not watch their parent. What it knows is in a record file, because it may be killed itself: the
//! engine's first process then dies with it (parent-death signal), and the keeper, or the next one, ends the rest
//! by the record ([`sweep`]).
//!
//! ```text
//! guard --record FILE --grace-ms N -- command…     stands guard
//! guard --tether SIGNAL -- command…                becomes `command`, which gets SIGNAL when its parent ends
//! input: `t` or end: TERM, grace, KILL · `k`: KILL now
//! ```

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, kill, killpg};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::own::shown_name;
use super::process::{self, Identity};

/// Exit codes beside the command's own, as shells and `timeout` have them.
const USAGE: i32 = 64;
const CANNOT_START: i32 = 127;
/// Processes that even KILL did not end: they hang in the kernel.
const UNKILLABLE: i32 = 125;

/// Environment by which a tethered command knows whose child it should be.
const PARENT: &str = "SPARK_KV_GUARD_PARENT";

/// How often what the engine has forked and mapped is noted: often while it starts, seldom later.
const NOTE_EARLY: Duration = Duration::from_millis(500);
const NOTE_LATE: Duration = Duration::from_secs(5);
const EARLY: Duration = Duration::from_secs(180);

/// Between two rounds of KILL, and how long they go on.
const KILL_PAUSE: Duration = Duration::from_millis(50);
const KILL_LIMIT: Duration = Duration::from_secs(30);

/// Grace for what is left when the engine's first process has ended by itself.
const ORPHAN_GRACE: Duration = Duration::from_secs(3);

/// The kernel stamps files with the time of its last tick.
const CLOCK_TICK: Duration = Duration::from_millis(20);

/// Bounds of the record: an engine has tens of processes and shared files.
const RECORD_MAX: u64 = 1 << 20;
const NOTED_MAX: usize = 1024;

/// What a guard knows, for whoever has to finish its work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Numbers of processes mean nothing after a reboot.
    boot: String,
    pub guard: Identity,
    /// Process group of the engine; its first process has this number.
    pub group: u32,
    processes: Vec<Identity>,
    shm: BTreeSet<PathBuf>,
}

impl Record {
    pub fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&process::read_bounded(path, RECORD_MAX).ok()?).ok()
    }

    fn write(&self, path: &Path) {
        let bytes = serde_json::to_vec(self).expect("plain fields");
        if let Err(error) = process::write_whole(path, &bytes, 0o600) {
            say(&format!("failed to write {}: {error}", path.display()));
        }
    }
}

/// The subcommand. `args` are the words after `guard`; the result is the exit code.
pub fn run(args: &[OsString]) -> i32 {
    match Order::parse(args) {
        Some(Order::Tether { signal, command }) => tether(signal, command),
        Some(Order::Guard { record, grace, command }) => match Guard::start(record, grace, command) {
            Ok(guard) => guard.stand(),
            Err(error) => {
                say(&format!("failed to start {}: {error}", command[0].display()));
                CANNOT_START
            }
        },
        None => {
            say("usage: guard --record FILE --grace-ms N -- COMMAND…  |  guard --tether SIGNAL -- COMMAND…");
            USAGE
        }
    }
}

/// The words with which a guard is called for `command`. `own` is the program itself.
pub(super) fn words(own: &super::Own, record: &Path, grace: Duration, command: &[OsString]) -> Vec<OsString> {
    let mut words = own.words("guard");
    words.extend(["--record".into(), record.into()]);
    words.extend(["--grace-ms".into(), grace.as_millis().to_string().into(), "--".into()]);
    words.extend(tethered(own, Signal::SIGKILL, command));
    words
}

/// The words with which `command` is started so that it gets `signal` when its parent ends.
pub fn tethered(own: &super::Own, signal: Signal, command: &[OsString]) -> Vec<OsString> {
    let mut words = own.words("guard");
    words.extend(["--tether".into(), (signal as i32).to_string().into(), "--".into()]);
    words.extend_from_slice(command);
    words
}

/// A command of these words in a process group of its own, which knows whose child it is.
pub fn command_of(words: &[OsString]) -> Command {
    let mut command = Command::new(&words[0]);
    command.arg0(shown_name(&words[0])).args(&words[1..]).process_group(0);
    command.env(PARENT, std::process::id().to_string());
    command
}

/// Takes what is ours out of the environment that a foreign program gets: settings that came this way hold secrets.
/// The tests' faults stay, they are meant for the plugin too.
pub(super) fn hide(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let shown = name.to_string_lossy();
        if shown.starts_with("SPARK_KV_") && shown != "SPARK_KV_MUTANT" {
            command.env_remove(name);
        }
    }
}

enum Order<'a> {
    Guard { record: &'a Path, grace: Duration, command: &'a [OsString] },
    Tether { signal: Signal, command: &'a [OsString] },
}

impl<'a> Order<'a> {
    fn parse(args: &'a [OsString]) -> Option<Self> {
        let end = args.iter().position(|word| word == "--")?;
        let (options, command) = (&args[..end], &args[end + 1..]);
        command.first()?;
        let value = |name: &str| {
            let at = options.iter().position(|word| word == name)?;
            options.get(at + 1).map(OsString::as_os_str)
        };
        let number = |name: &str| value(name).and_then(OsStr::to_str).and_then(|n| n.parse::<u64>().ok());
        if let Some(signal) = number("--tether") {
            let signal = Signal::try_from(i32::try_from(signal).ok()?).ok()?;
            return Some(Self::Tether { signal, command });
        }
        let grace = Duration::from_millis(number("--grace-ms")?);
        Some(Self::Guard { record: Path::new(value("--record")?), grace, command })
    }
}

/// Asks the kernel for `signal` at the parent's end, then becomes `command`. The order survives exec, not fork.
fn tether(signal: Signal, command: &[OsString]) -> i32 {
    let expected = std::env::var(PARENT).ok().and_then(|pid| pid.parse::<i32>().ok());
    if let Err(error) = prctl::set_pdeathsig(signal) {
        say(&format!("failed to ask for a parent-death signal: {error}"));
        return CANNOT_START;
    }
    // The parent may have ended before the order was given: nothing would ever come then.
    if expected.is_some_and(|pid| nix::unistd::getppid().as_raw() != pid) {
        return 128 + signal as i32;
    }
    let _ = SigSet::empty().thread_set_mask();
    let error =
        Command::new(&command[0]).arg0(shown_name(&command[0])).args(&command[1..]).env_remove(PARENT).exec();
    say(&format!("failed to start {}: {error}", command[0].display()));
    CANNOT_START
}

/// Where the guard is with its engine.
enum Stage {
    Running,
    /// TERM was sent; KILL follows at this time.
    Ending(Instant),
    /// KILL was sent; given up at this time.
    Killing(Instant),
}

struct Guard {
    path: PathBuf,
    grace: Duration,
    began: (Instant, SystemTime),
    record: Record,
    first: Pid,
    /// How the first process ended.
    ended: Option<i32>,
    stage: Stage,
    noted: Option<Instant>,
    signals: SignalFd,
}

impl Guard {
    fn start(path: &Path, grace: Duration, command: &[OsString]) -> io::Result<Self> {
        let mut mask = SigSet::empty();
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD] {
            mask.add(signal);
        }
        mask.thread_block()?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        prctl::set_child_subreaper(true)?;
        let began = (Instant::now(), SystemTime::now());
        let child = command_of(command).stdin(Stdio::null()).spawn()?;
        let record = Record {
            boot: boot(),
            guard: Identity::own(),
            group: child.id(),
            processes: Identity::of(child.id()).into_iter().collect(),
            shm: BTreeSet::new(),
        };
        record.write(path);
        let first = Pid::from_raw(child.id().cast_signed());
        let path = path.to_owned();
        Ok(Self {
            path,
            grace,
            began,
            record,
            first,
            ended: None,
            stage: Stage::Running,
            noted: None,
            signals,
        })
    }

    /// Until nothing of the engine is left.
    fn stand(mut self) -> i32 {
        let mut keeper_listens = true;
        loop {
            let (word, signal) = self.wait(keeper_listens);
            match word {
                Some(Word::Kill) => self.kill(),
                Some(Word::Stop) => self.term(self.grace),
                Some(Word::Gone) => {
                    keeper_listens = false;
                    self.term(self.grace);
                }
                None => {}
            }
            if signal {
                self.term(self.grace);
            }
            if self.reap() {
                break;
            }
            self.note();
            match self.stage {
                Stage::Ending(at) if Instant::now() >= at => self.kill(),
                Stage::Killing(until) if Instant::now() < until => self.kill_all(),
                Stage::Killing(_) => {
                    say("processes of the engine do not end even when killed");
                    return UNKILLABLE;
                }
                Stage::Running | Stage::Ending(_) => {}
            }
        }
        unlink(&self.record.shm);
        let _ = std::fs::remove_file(&self.path);
        self.ended.unwrap_or(CANNOT_START)
    }

    /// Sleeps until something happened: a word of the keeper, a signal to end, a child's end, or time.
    fn wait(&mut self, keeper_listens: bool) -> (Option<Word>, bool) {
        let pause = match self.stage {
            Stage::Running => self.note_pause(),
            Stage::Ending(at) => at.saturating_duration_since(Instant::now()).min(NOTE_EARLY),
            Stage::Killing(_) => KILL_PAUSE,
        };
        let stdin = io::stdin();
        let mut fds = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        if keeper_listens {
            fds.push(PollFd::new(stdin.as_fd(), PollFlags::POLLIN));
        }
        // One more than the rest of a millisecond: a deadline must have passed when the poll ends.
        let timeout = u16::try_from(pause.as_millis() + 1).unwrap_or(u16::MAX);
        let _ = poll(&mut fds, PollTimeout::from(timeout));
        let spoke = fds.get(1).and_then(PollFd::any).unwrap_or(false);
        let word = spoke.then(|| {
            let mut byte = [0];
            match nix::unistd::read(&stdin, &mut byte) {
                Ok(1) if byte == *b"k" => Some(Word::Kill),
                Ok(1) if byte == *b"t" => Some(Word::Stop),
                Ok(1) | Err(Errno::EINTR | Errno::EAGAIN) => None,
                Ok(_) | Err(_) => Some(Word::Gone),
            }
        });
        let mut asked = false;
        while let Ok(Some(signal)) = self.signals.read_signal() {
            asked |= signal.ssi_signo != Signal::SIGCHLD as u32;
        }
        (word.flatten(), asked)
    }

    fn term(&mut self, grace: Duration) {
        if matches!(self.stage, Stage::Running) {
            self.note_now();
            self.stage = Stage::Ending(Instant::now() + grace);
            let _ = killpg(self.first, Signal::SIGTERM);
        }
    }

    fn kill(&mut self) {
        if !matches!(self.stage, Stage::Killing(_)) {
            self.note_now();
            self.stage = Stage::Killing(Instant::now() + KILL_LIMIT);
            self.kill_all();
        }
    }

    fn kill_all(&self) {
        let _ = killpg(self.first, Signal::SIGKILL);
        for process in process::descendants(std::process::id()) {
            let _ = kill(Pid::from_raw(process.pid.cast_signed()), Signal::SIGKILL);
        }
    }

    /// Collects everything that has ended. True when nothing is left.
    fn reap(&mut self) -> bool {
        loop {
            let (pid, code) = match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) => (pid, code),
                Ok(WaitStatus::Signaled(pid, signal, _)) => (pid, 128 + signal as i32),
                Ok(WaitStatus::StillAlive) => return false,
                Ok(_) | Err(Errno::EINTR) => continue,
                Err(_) => return true,
            };
            if pid == self.first {
                self.ended = Some(code);
                self.term(ORPHAN_GRACE.min(self.grace));
            }
        }
    }

    fn note_pause(&self) -> Duration {
        if self.began.0.elapsed() < EARLY { NOTE_EARLY } else { NOTE_LATE }
    }

    fn note(&mut self) {
        if self.noted.is_none_or(|at| at.elapsed() >= self.note_pause()) {
            self.note_now();
        }
    }

    /// Writes down who belongs to the engine and which shared memory they have made.
    fn note_now(&mut self) {
        self.noted = Some(Instant::now());
        let before = self.record.clone();
        let all = process::descendants(std::process::id());
        let known = std::mem::take(&mut self.record.processes);
        self.record.processes = note_of(known, self.record.group, &all);
        self.record.shm.retain(|path| path.exists());
        self.record.shm.extend(mapped_shm(&all, self.began.1));
        while self.record.shm.len() > NOTED_MAX {
            self.record.shm.pop_last();
        }
        if self.record != before {
            self.record.write(&self.path);
        }
    }
}

/// Who is noted from now on: everybody there is, and the group's first process also when it is gone. By its start
/// time it is told whether the group's number belongs to somebody else by then.
fn note_of(known: Vec<Identity>, group: u32, all: &[process::Stat]) -> Vec<Identity> {
    let first = known.into_iter().find(|p| p.pid == group);
    let others = all.iter().filter(|s| first.is_none_or(|f| f.pid != s.pid));
    let others = others.map(|s| Identity { pid: s.pid, started: s.started });
    first.into_iter().chain(others).take(NOTED_MAX).collect()
}

enum Word {
    Stop,
    Kill,
    Gone,
}

/// Named shared memory of this user that one of the processes maps and that is younger than the engine. Found by
/// inode: a semaphore is made under a passing name, which is the one that `maps` shows.
fn mapped_shm(processes: &[process::Stat], began: SystemTime) -> BTreeSet<PathBuf> {
    let mut inodes = BTreeSet::new();
    for process in processes {
        let maps = std::fs::read(format!("/proc/{}/maps", process.pid)).unwrap_or_default();
        let maps = String::from_utf8_lossy(&maps);
        let shared = maps.lines().filter(|line| line.contains(" /dev/shm/"));
        inodes.extend(shared.filter_map(|line| line.split_ascii_whitespace().nth(4)?.parse::<u64>().ok()));
    }
    let own = nix::unistd::geteuid().as_raw();
    // Clocks of files run a tick behind the one asked here.
    let young = |m: &std::fs::Metadata| m.created().is_ok_and(|made| made + CLOCK_TICK >= began);
    let Ok(entries) = std::fs::read_dir("/dev/shm") else { return BTreeSet::new() };
    entries
        .flatten()
        .filter(|e| e.metadata().is_ok_and(|m| m.uid() == own && inodes.contains(&m.ino()) && young(&m)))
        .map(|e| e.path())
        .collect()
}

fn unlink(files: &BTreeSet<PathBuf>) {
    for file in files.iter().filter(|f| f.starts_with("/dev/shm")) {
        let _ = std::fs::remove_file(file);
    }
}

fn boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// Finishes the work of a guard that is gone: ends every process in its record and unlinks their shared memory.
/// Does nothing when there is no record. Waits, for a few seconds at most, until they are gone.
///
/// # Errors
/// When processes are left that do not end.
pub fn sweep(path: &Path) -> io::Result<()> {
    let Some(record) = Record::read(path) else { return Ok(()) };
    if record.boot == boot() {
        let until = Instant::now() + KILL_LIMIT;
        // The guard first: it is either dead or belongs to a keeper that is, and must not be in the way.
        while !end_round(&record) {
            if Instant::now() > until {
                return Err(io::Error::other(format!(
                    "processes of an earlier engine (group {}) do not end even when killed",
                    record.group
                )));
            }
            std::thread::sleep(KILL_PAUSE);
        }
        unlink(&record.shm);
    }
    std::fs::remove_file(path)
}

/// One round of KILL over what the record names. True when nobody is left.
fn end_round(record: &Record) -> bool {
    let first = record.processes.iter().find(|p| p.pid == record.group);
    let all = process::everybody();
    let known = |s: &process::Stat| {
        let same = |i: &Identity| i.pid == s.pid && i.started == s.started;
        // The group's number is taken by somebody else when its first process lives and is not the one we knew.
        let stranger =
            all.iter().any(|o| o.pid == record.group && first.is_some_and(|f| f.started != o.started));
        same(&record.guard) || record.processes.iter().any(same) || (s.group == record.group && !stranger)
    };
    let mut alone = true;
    for left in all.iter().filter(|s| known(s) && s.pid != std::process::id()) {
        let pid = Pid::from_raw(left.pid.cast_signed());
        if left.state != 'Z' {
            alone = false;
            let _ = kill(pid, Signal::SIGKILL);
            continue;
        }
        // A process is a zombie by name while its threads still let go of their memory. One of ours is collected
        // when they have; one of a parent that is still to end becomes ours then; others are not ours to collect.
        alone &= match waitpid(pid, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => false,
            Ok(_) => true,
            Err(_) => !all.iter().any(|s| s.pid == left.parent && known(s)),
        };
    }
    alone
}

/// What a guard's exit status says about the engine.
pub fn describe(status: ExitStatus) -> String {
    let by = |number: i32| Signal::try_from(number).map_or_else(|_| number.to_string(), |s| s.to_string());
    match (status.code(), status.signal()) {
        (Some(CANNOT_START), _) => "could not be started".into(),
        (Some(UNKILLABLE), _) => "left processes behind that hang in the kernel".into(),
        (Some(code), _) if code > 128 => format!("was ended by {}", by(code - 128)),
        (Some(code), _) => format!("ended with code {code}"),
        (None, Some(signal)) => format!("lost its guard to {}", by(signal)),
        (None, None) => "ended".into(),
    }
}

/// Goes to the engine's log: the guard has no other voice.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "spark-kv guard: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of a group whose first process ended may be given to a stranger once the group is empty.
    #[test]
    fn a_process_that_got_the_number_of_a_group_that_is_gone_is_left_alone() {
        let mut stranger = Command::new("sleep").arg("600").process_group(0).spawn().unwrap();
        let now = Identity::of(stranger.id()).unwrap();
        let before = Identity { pid: now.pid, started: now.started - 1 };
        let record = Record {
            boot: boot(),
            guard: Identity { pid: now.pid, started: 0 },
            group: now.pid,
            processes: note_of(vec![before], now.pid, &[]),
            shm: BTreeSet::new(),
        };
        let alone = end_round(&record);
        let lives = now.lives();
        stranger.kill().unwrap();
        stranger.wait().unwrap();
        assert!(alone && lives);
    }
}
