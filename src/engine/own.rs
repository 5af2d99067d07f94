//! How this program calls itself again, for children that are another part of it.

use std::ffi::OsString;
use std::path::PathBuf;

/// Program and the arguments that stand before a subcommand.
#[derive(Clone, Debug)]
pub struct Own {
    pub program: PathBuf,
    pub before: Vec<OsString>,
}

impl Own {
    /// This very program, also after its file was replaced by a newer one: parts of two versions never meet.
    pub fn this() -> Self {
        Self { program: "/proc/self/exe".into(), before: Vec::new() }
    }

    /// Program and arguments of `subcommand`, in one row.
    pub fn words(&self, subcommand: &str) -> Vec<OsString> {
        let mut words = vec![self.program.clone().into_os_string()];
        words.extend(self.before.iter().cloned());
        words.push(subcommand.into());
        words
    }
}

/// The name under which a program is shown in process lists.
pub(super) fn shown_name(program: &std::ffi::OsStr) -> OsString {
    if program == "/proc/self/exe" { "spark-kv".into() } else { program.to_owned() }
}
