//! What a job does: rows to the drive, rows from the drive and from the other node.
//!
//! Every function returns only when nothing can touch the rows any more, because store and cluster promise the
//! same. The order is that of the prompt, the answer that of the job.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::promise::{Circumstances, Reason};
use crate::base::block::RowItem;
use crate::base::clock::{Clock, Micros};
use crate::base::frame::Outcome;
use crate::base::mutant::{self, Mutant};
use crate::base::rows::Rows;
use crate::cluster::{Cluster, MemberState};
use crate::store::Store;

/// Everything that moves rows for one engine.
#[derive(Clone, Debug)]
pub(super) struct Mover {
    pub(super) store: Store,
    pub(super) cluster: Option<Cluster>,
    pub(super) rows: Arc<Rows>,
    pub(super) clock: Clock,
}

/// How long a broken build waits before it writes where it must not.
const LATE: Duration = Duration::from_millis(30);

impl Mover {
    /// Rows whose owner is not clear must not be sealed under anybody's key: they are answered as if they were not
    /// worth keeping, so that nobody offers them again.
    pub(super) async fn store(&self, owner: Option<Arc<str>>, items: &[RowItem]) -> Vec<Outcome> {
        if owner.is_none() && self.store.encrypts() {
            return vec![Outcome::Held; items.len()];
        }
        let order = in_prefix_order(items);
        let owner = owner.unwrap_or_else(|| "".into());
        let done = self.store.put_of(owner, &self.rows, pick(items, &order)).await;
        let mut outcomes = vec![Outcome::Failed; items.len()];
        settle(&mut outcomes, &order, done);
        outcomes
    }

    /// Which of the items the own drive holds.
    pub(super) fn held(&self, items: &[RowItem]) -> Vec<bool> {
        items.iter().map(|item| self.store.holds(self.rows.space, &item.key)).collect()
    }

    /// Drive and other node at the same time; then what the drive failed, from the other node. `held` says which items
    /// the drive has.
    pub(super) async fn load(
        &self,
        items: &[RowItem],
        held: &[bool],
        deadline: Option<Micros>,
    ) -> Vec<Outcome> {
        let mut outcomes = vec![Outcome::Failed; items.len()];
        if self.too_late(deadline) {
            return outcomes;
        }
        let (own, others): (Vec<usize>, Vec<usize>) =
            in_prefix_order(items).into_iter().partition(|&n| held[n]);
        let (drive, peer) =
            tokio::join!(self.read_drive(items, &own, deadline), self.fetch_peer(items, &others, deadline));
        settle(&mut outcomes, &own, drive);
        settle(&mut outcomes, &others, peer);
        let failed: Vec<usize> = own.into_iter().filter(|&n| !outcomes[n].is_ok()).collect();
        if !failed.is_empty() && !self.too_late(deadline) {
            let again = self.fetch_peer(items, &failed, deadline).await;
            settle(&mut outcomes, &failed, again);
        }
        outcomes
    }

    /// Why each row that was promised did not come. `held` is what was true when the load began.
    pub(super) fn broken(
        &self,
        items: &[RowItem],
        held: &[bool],
        outcomes: &[Outcome],
        deadline: Option<Micros>,
    ) -> Vec<Reason> {
        let failed = || (0..items.len()).filter(|&n| !outcomes[n].is_ok());
        if failed().next().is_none() {
            return Vec::new();
        }
        let damaged: HashSet<String> = self.store.damages().into_iter().map(|damage| damage.key).collect();
        let members = self.cluster.as_ref().map(Cluster::members).unwrap_or_default();
        let rest = Circumstances {
            late: self.too_late(deadline),
            peer: members.iter().any(|member| member.state == MemberState::Connected),
            has_peer: !members.is_empty(),
            ..Circumstances::default()
        };
        let reason = |n: usize| {
            let key = &items[n].key;
            let is_held = self.store.holds(self.rows.space, key);
            let damaged = !is_held && damaged.contains(&hex::encode(key.to_bytes()));
            Circumstances { was_held: held[n], is_held, damaged, ..rest }.reason()
        };
        failed().map(reason).collect()
    }

    async fn read_drive(&self, items: &[RowItem], which: &[usize], deadline: Option<Micros>) -> Vec<Outcome> {
        if which.is_empty() {
            return Vec::new();
        }
        self.store.get(&self.rows, pick(items, which), deadline).await
    }

    async fn fetch_peer(&self, items: &[RowItem], which: &[usize], deadline: Option<Micros>) -> Vec<Outcome> {
        match &self.cluster {
            Some(cluster) if !which.is_empty() => {
                cluster.fetch(&self.rows, pick(items, which), deadline).await
            }
            _ => Vec::new(),
        }
    }

    fn too_late(&self, deadline: Option<Micros>) -> bool {
        deadline.is_some_and(|deadline| self.clock.now() >= deadline)
    }

    /// The load of [`Mutant::EarlyDone`]: says what should come, and lets it come later.
    pub(super) fn promise(&self, items: &[RowItem]) -> Option<Vec<Outcome>> {
        let holds = |item: &RowItem| self.store.holds(self.rows.space, &item.key);
        let from = |item| if holds(item) { Outcome::FromDrive } else { Outcome::FromPeer };
        mutant::on(Mutant::EarlyDone).then(|| items.iter().map(from).collect())
    }

    /// The load of [`Mutant::LateWrite`]: which item is reported failed and written after.
    pub(super) fn betray(&self, items: &[RowItem]) -> Option<usize> {
        if mutant::on(Mutant::LateWrite) { items.len().checked_sub(1) } else { None }
    }

    /// Writes rows whose job was answered already. Only broken builds come here.
    pub(super) async fn load_late(&self, items: &[RowItem]) {
        tokio::time::sleep(LATE).await;
        self.load(items, &self.held(items), None).await;
    }
}

/// Numbers of the items, by position in the prompt; equal positions keep their order.
fn in_prefix_order(items: &[RowItem]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|&n| items[n].position);
    order
}

fn pick(items: &[RowItem], which: &[usize]) -> Vec<RowItem> {
    which.iter().map(|&n| items[n]).collect()
}

/// Puts what became of `which` into its places. What was not answered stays failed.
fn settle(outcomes: &mut [Outcome], which: &[usize], done: Vec<Outcome>) {
    for (&n, outcome) in which.iter().zip(done) {
        outcomes[n] = outcome;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::block::{BlockHash, GroupId, RowKey};

    #[test]
    fn rows_move_in_the_order_of_the_prompt_and_are_answered_in_that_of_the_job() {
        let item = |position, row| RowItem {
            key: RowKey { hash: BlockHash([0; 32]), group: GroupId(0) },
            position,
            row,
        };
        let items = [item(48, 0), item(16, 1), item(32, 2), item(16, 3)];
        let order = in_prefix_order(&items);
        assert_eq!(order, [1, 3, 2, 0]);
        assert_eq!(pick(&items, &order).iter().map(|i| i.row).collect::<Vec<_>>(), [1, 3, 2, 0]);
        let mut outcomes = vec![Outcome::Failed; 4];
        settle(&mut outcomes, &order, vec![Outcome::FromDrive, Outcome::Failed, Outcome::FromPeer]);
        assert_eq!(outcomes, [Outcome::Failed, Outcome::FromDrive, Outcome::FromPeer, Outcome::Failed]);
    }
}
