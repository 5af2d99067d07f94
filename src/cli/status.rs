//! `status`: asks the running node over its public port and shows the answer on one screen.

use super::Status;
use super::out::Exit;

pub(super) fn show(_status: &Status) -> anyhow::Result<Exit> {
    anyhow::bail!("`status` is not built yet")
}
