//! Printing, and the table of exit codes.
//!
//! Stdout carries data, stderr talk. A reader that closes the pipe early has what it wanted: that is success. Colour
//! only repeats what a word says already.

use std::io::{self, IsTerminal, Write};

/// How a command ended. Scripts rely on the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Done,
    Failed,
    /// No running node, or one that is not well.
    NotFound,
    /// Wrong arguments or settings: trying again changes nothing.
    Usage,
    /// A node that could not start, for its keeper.
    CannotStart,
    /// What a program that `guard` ran ended with.
    Child(u8),
}

impl Exit {
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::NotFound => 2,
            Self::Usage => 64,
            Self::CannotStart => crate::keeper::CANNOT_START,
            Self::Child(code) => code,
        }
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// A failure whose exit code is not [`Exit::Failed`].
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub(super) struct Told {
    pub exit: Exit,
    pub what: String,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Tint {
    Good,
    Warn,
    Bad,
    Dim,
    Bold,
}

/// Stdout, with or without colours.
pub(super) struct Out {
    to: io::StdoutLock<'static>,
    colour: bool,
}

impl Out {
    pub fn new() -> Self {
        let colour = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        Self { to: io::stdout().lock(), colour }
    }

    pub fn line(&mut self, text: &str) -> io::Result<()> {
        writeln!(self.to, "{text}")
    }

    pub fn tint(&self, tint: Tint, text: &str) -> String {
        if !self.colour {
            return text.to_owned();
        }
        let code = match tint {
            Tint::Good => 32,
            Tint::Warn => 33,
            Tint::Bad => 31,
            Tint::Dim => 2,
            Tint::Bold => 1,
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }

    pub fn done(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// One line of talk. Nobody listening is no reason to fail.
pub(super) fn say(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// An error and its causes, without those that the ones before have named.
pub(super) fn whole(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

/// Says what failed and gives the exit code.
pub(super) fn finish(outcome: anyhow::Result<Exit>) -> Exit {
    let error = match outcome {
        Ok(exit) => return exit,
        Err(error) => error,
    };
    if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe) {
        return Exit::Done;
    }
    if let Some(problems) = error.downcast_ref::<crate::settings::Error>() {
        for problem in &problems.0 {
            say(&format!("error: {problem}"));
        }
        return Exit::Usage;
    }
    say(&format!("error: {}", whole(&error)));
    error.downcast_ref::<Told>().map_or(Exit::Failed, |told| told.exit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_pipe_is_success_and_other_failures_are_not() {
        let failed = |kind| finish(Err(io::Error::from(kind).into()));
        assert_eq!(failed(io::ErrorKind::BrokenPipe), Exit::Done);
        assert_eq!(failed(io::ErrorKind::StorageFull), Exit::Failed);
        // A cause that is in the words already is not said again; one that is not, is.
        let source = || io::Error::other("no room");
        let error = crate::node::Error::Listen { address: "[::1]:1".into(), source: source() };
        assert_eq!(whole(&error.into()), "failed to listen on [::1]:1: no room");
        let folder = std::path::PathBuf::from("/f");
        let error = crate::node::Error::Store(crate::store::Error::Folder { folder, source: source() });
        assert_eq!(whole(&error.into()), "the store: failed to use the store's folder /f: no room");
        let told = Told { exit: Exit::NotFound, what: "no node".into() };
        assert_eq!(finish(Err(anyhow::Error::new(told).context("looking"))), Exit::NotFound);
    }

    #[test]
    fn a_cause_is_said_once() {
        let full = || io::Error::other("no space left");
        let twice =
            anyhow::Error::from(full()).context("failed to write x: no space left").context("copying");
        assert_eq!(whole(&twice), "copying: failed to write x: no space left");
        assert_eq!(
            whole(&anyhow::Error::from(full()).context("failed to write x")),
            "failed to write x: no space left"
        );
    }
}
