//! What runs in the next step: vLLM's scheduler, in virtual time. Pure.
//!
//! A step has a budget of tokens. Those that decode come first with one each, then prompts that were begun, then what
//! waits, in order, while there is budget left, a place, and blocks. A prompt is computed in chunks. When blocks run
//! out, the request that was begun last gives its own back and waits at the front, to be computed again. What a step
//! computes can be hit from the moment it is scheduled. With states, chunks end where a state is kept: at the prompt's
//! checkpoint, at the grid the engine keeps, and where prompts parted. Source: vLLM 0.32 `v1/core/sched/scheduler.py`,
//! `v1/core/kv_cache_manager.py`.
//!
//! Whoever drives it calls [`Scheduler::step`], waits as long as the step takes, and calls [`Scheduler::finish`].

use std::collections::VecDeque;
use std::sync::Arc;

use super::hits::{Grid, Kind};
use super::pace::Pace;
use super::pool::{Pool, Slot, Stored};
use crate::base::block::{BlockHash, GroupId};

/// Number of a request, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(pub u64);

/// How much runs at once.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Requests that run.
    pub requests: usize,
    /// Tokens of a step.
    pub tokens: usize,
    /// Prompts that are begun and not done. 0: as many as there are places.
    pub prefills: usize,
    /// Longest chunk of one prompt while there are other requests. 0: the budget.
    pub chunk: usize,
}

/// A request as the scheduler sees it: the words that it will say are known, because the model is none.
#[derive(Clone, Debug)]
pub struct Request {
    pub id: Id,
    /// Prompt and words, without the last word, which nobody reads.
    pub tokens: Arc<[u32]>,
    pub prompt: usize,
    pub words: usize,
    /// Of the whole units of `tokens`.
    pub hashes: Arc<[BlockHash]>,
    /// Where states are kept, beside the prompt's checkpoint and what the scheduler finds.
    pub snapshots: Vec<usize>,
    /// Tokens that were brought from elsewhere, or found while they were: then nothing is looked up.
    pub given: Option<usize>,
}

/// What a request hears, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// It runs, and so many of its tokens need not be computed.
    Begun {
        cached: usize,
    },
    /// Its prompt is computed, and its first word is there if it has one.
    Prefilled,
    Word,
    End,
}

#[derive(Debug)]
struct Running {
    request: Request,
    /// Tokens that have their rows, or get them in this step.
    computed: usize,
    /// Words that were said.
    said: usize,
    /// Blocks of each group; none where there was no room for a request that runs alone.
    blocks: Vec<Vec<Option<Slot>>>,
    /// Blocks that have their keys.
    named: usize,
    began: bool,
    prefilled: bool,
}

/// One step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// Request, first token, number of tokens.
    pub chunks: Vec<(Id, usize, usize)>,
    /// Requests that decode.
    pub decoding: usize,
    pub seconds: f64,
}

/// What the scheduler counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub preempted: u64,
    /// Tokens that were looked up, and found.
    pub asked: u64,
    pub hit: u64,
    /// Blocks that a request did without.
    pub roomless: u64,
    pub steps: u64,
}

/// The scheduler and the blocks it gives away.
#[derive(Debug)]
pub struct Scheduler {
    grid: Grid,
    limits: Limits,
    pace: Pace,
    pub pool: Pool,
    pub tally: Tally,
    waiting: VecDeque<Running>,
    running: Vec<Running>,
    /// Longest chunk of this step.
    longest: usize,
    /// Said at the next [`Scheduler::finish`].
    begun: Vec<(Id, Told)>,
}

impl Running {
    /// Tokens that are known: prompt and words that were said.
    fn known(&self) -> usize {
        self.request.prompt + self.said
    }

    fn left(&self) -> usize {
        self.known() - self.computed
    }

    fn decodes(&self) -> bool {
        self.prefilled && self.left() <= 1
    }
}

impl Scheduler {
    pub fn new(grid: Grid, limits: Limits, pace: Pace, blocks: usize) -> Self {
        assert!(grid.unit > 0 && grid.block.is_multiple_of(grid.unit), "a block has whole units");
        assert!(limits.requests > 0 && limits.tokens > 0, "something runs");
        Self {
            grid,
            limits,
            pace,
            pool: Pool::new(blocks),
            tally: Tally::default(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            longest: 0,
            begun: Vec::new(),
        }
    }

    pub fn grid(&self) -> &Grid {
        &self.grid
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Tokens of prompts that are still to be computed, of what runs and what waits.
    pub fn prefill_left(&self) -> usize {
        let running = self.running.iter().filter(|r| !r.decodes()).map(Running::left);
        running.chain(self.waiting.iter().map(Running::left)).sum()
    }

    /// How much of a prompt is there now. Touches nothing.
    pub fn peek(&self, hashes: &[BlockHash], prompt: usize) -> usize {
        self.grid.hit(hashes, prompt, |key| self.pool.has(key))
    }

    pub fn submit(&mut self, mut request: Request) {
        let checkpoint = self.grid.checkpoint(request.prompt);
        if checkpoint > 0 {
            request.snapshots.push(checkpoint);
        }
        request.snapshots.sort_unstable();
        request.snapshots.dedup();
        let blocks = vec![Vec::new(); self.grid.groups.len()];
        let fresh =
            Running { request, computed: 0, said: 0, blocks, named: 0, began: false, prefilled: false };
        self.waiting.push_back(fresh);
    }

    /// Takes a request out, wherever it is. Whether it was there.
    pub fn abort(&mut self, id: Id) -> bool {
        if let Some(at) = self.waiting.iter().position(|r| r.request.id == id) {
            return self.waiting.remove(at).is_some();
        }
        let Some(at) = self.find(id) else { return false };
        let mut gone = self.running.remove(at);
        give_back(&mut self.pool, &mut gone);
        true
    }

    /// Plans the next step. None when nothing is to be done.
    pub fn step(&mut self) -> Option<Step> {
        let mut budget = self.limits.tokens;
        let mut step = Step::default();
        // Alone there is nobody to starve.
        let capped = self.limits.chunk > 0 && self.running.len() + self.waiting.len() > 1;
        self.longest = if capped { self.limits.chunk } else { usize::MAX };
        let preempted = self.tally.preempted;
        let order: Vec<Id> = self.ordered();
        for id in order {
            if budget == 0 {
                break;
            }
            // It may have been preempted for one before it.
            let Some(count) = self.find(id).map(|at| self.chunk(&self.running[at], budget)) else { continue };
            if count > 0 && self.make_room(id, count, &step) {
                budget -= count;
                self.schedule(id, count, &mut step);
            }
        }
        // Who was just preempted would be begun again with the blocks that it gave back.
        while budget > 0 && preempted == self.tally.preempted {
            match self.admit(budget) {
                Some((id, count)) => {
                    budget -= count;
                    self.schedule(id, count, &mut step);
                }
                None => break,
            }
        }
        if step.chunks.is_empty() {
            return None;
        }
        step.seconds += self.pace.words_s(step.decoding);
        self.tally.steps += 1;
        Some(step)
    }

    /// The step's time is over: what each of its requests hears. Requests that were aborted meanwhile hear nothing.
    pub fn finish(&mut self, step: &Step) -> Vec<(Id, Told)> {
        let mut told = std::mem::take(&mut self.begun);
        for &(id, _, _) in &step.chunks {
            let Some(at) = self.find(id) else { continue };
            let running = &mut self.running[at];
            if running.left() > 0 {
                continue;
            }
            if !std::mem::replace(&mut running.prefilled, true) {
                told.push((id, Told::Prefilled));
            }
            if running.said < running.request.words {
                running.said += 1;
                told.push((id, Told::Word));
            }
            if running.said >= running.request.words {
                let mut done = self.running.remove(at);
                give_back(&mut self.pool, &mut done);
                told.push((id, Told::End));
            }
        }
        told
    }

    /// Requests that run: those that decode first, each kind in the order in which it was begun.
    fn ordered(&self) -> Vec<Id> {
        let (decode, rest): (Vec<&Running>, Vec<&Running>) = self.running.iter().partition(|r| r.decodes());
        decode.into_iter().chain(rest).map(|r| r.request.id).collect()
    }

    fn find(&self, id: Id) -> Option<usize> {
        self.running.iter().position(|r| r.request.id == id)
    }

    /// Tokens that a request gets of `budget`. 0 when it cannot go on with so few.
    fn chunk(&self, running: &Running, budget: usize) -> usize {
        let most = budget.min(self.longest);
        let (from, left) = (running.computed, running.left());
        let mut end = from + left.min(most);
        if !self.grid.groups.contains(&Kind::State) {
            return end - from;
        }
        if end < from + left {
            // Not below a block: a budget that is shorter than one is used as it is.
            let whole = end / self.grid.block * self.grid.block;
            end = if whole > from { whole } else { end };
        }
        let stop = running.request.snapshots.iter().find(|at| **at > from && **at < end);
        stop.map_or(end, |at| *at) - from
    }

    /// Blocks for `count` more tokens of a request that runs, taken from those that were begun last and are not part of
    /// the step yet. False when it had to give its own back.
    fn make_room(&mut self, id: Id, count: usize, step: &Step) -> bool {
        let planned = |r: &Running| step.chunks.iter().any(|(id, _, _)| *id == r.request.id);
        loop {
            let Some(at) = self.find(id) else { return false };
            if self.running.len() == 1 || self.missing(&self.running[at], count) <= self.pool.free() {
                return true;
            }
            let victim = self.running.iter().rposition(|r| !planned(r)).expect("this one is not");
            let mut last = self.running.remove(victim);
            give_back(&mut self.pool, &mut last);
            self.tally.preempted += 1;
            last.request.given = None;
            self.waiting.push_front(last);
        }
    }

    /// Blocks that a request has not and needs for `count` more tokens.
    fn missing(&self, running: &Running, count: usize) -> usize {
        let due = (running.computed + count).div_ceil(self.grid.block);
        let of = |(kind, blocks): (&Kind, &Vec<Option<Slot>>)| match kind {
            Kind::State => 1_usize.saturating_sub(blocks.len()),
            Kind::Full | Kind::Sliding(_) => due.saturating_sub(blocks.len()),
        };
        self.grid.groups.iter().zip(&running.blocks).map(of).sum()
    }

    /// Begins the request that has waited longest, if it can be: its number and how many tokens of it.
    fn admit(&mut self, budget: usize) -> Option<(Id, usize)> {
        let prefills = self.running.iter().filter(|r| !r.decodes()).count();
        let full = self.running.len() >= self.limits.requests
            || self.limits.prefills > 0 && prefills >= self.limits.prefills;
        let first = self.waiting.front().filter(|_| !full)?;
        let Request { hashes, .. } = &first.request;
        let (hashes, known) = (Arc::clone(hashes), first.known());
        let has = |key: &crate::base::block::RowKey| self.pool.has(key);
        let found = self.grid.hit(&hashes, known, has);
        let cached = first.request.given.unwrap_or(found).min(known.saturating_sub(1));
        let junction = self.grid.junction(&hashes, known, has).filter(|at| *at > cached);
        let mut running = self.waiting.pop_front()?;
        running.computed = cached;
        if let Some(at) = junction
            && let Err(place) = running.request.snapshots.binary_search(&at)
        {
            running.request.snapshots.insert(place, at);
        }
        let count = self.chunk(&running, budget);
        let before = self.pool.free();
        self.hold(&mut running, cached);
        let alone = self.running.is_empty();
        if count == 0 || !alone && self.missing(&running, count) > self.pool.free() {
            give_back(&mut self.pool, &mut running);
            debug_assert_eq!(before, self.pool.free(), "what was held is given back");
            self.waiting.push_front(running);
            return None;
        }
        if !std::mem::replace(&mut running.began, true) {
            self.tally.asked += known as u64;
            self.tally.hit += cached as u64;
            self.begun.push((running.request.id, Told::Begun { cached }));
        }
        let id = running.request.id;
        let brought = running.request.given.is_some().then_some(cached).filter(|at| *at > 0);
        self.running.push(running);
        if let Some(end) = brought {
            let states = (0..self.grid.groups.len()).filter(|g| self.grid.groups[*g] == Kind::State);
            states
                .collect::<Vec<_>>()
                .into_iter()
                .for_each(|group| self.keep(self.running.len() - 1, group, end));
        }
        Some((id, count))
    }

    /// Takes the blocks of a hit that are on the device. Those that came from elsewhere, or went meanwhile, are
    /// allocated with the first chunk.
    fn hold(&mut self, running: &mut Running, cached: usize) {
        let block = self.grid.block;
        for (group, kind) in self.grid.groups.iter().enumerate() {
            let from = match kind {
                Kind::State => continue,
                Kind::Full => 0,
                Kind::Sliding(window) => cached.saturating_sub(window.saturating_sub(1)) / block,
            };
            let mut slots = vec![None; from];
            for at in from..cached / block {
                let Some(slot) =
                    self.pool.take(&self.grid.key(&running.request.hashes, (at + 1) * block, group))
                else {
                    break;
                };
                slots.push(Some(slot));
            }
            running.blocks[group] = slots;
        }
        let rows = running.blocks.iter().zip(&self.grid.groups).filter(|(_, kind)| **kind != Kind::State);
        running.named = rows.map(|(blocks, _)| blocks.len()).min().unwrap_or(cached / block);
        // What a hit ends with was used now, though nobody keeps it.
        if cached > 0 {
            for group in 0..self.grid.groups.len() {
                let tail = !cached.is_multiple_of(block);
                if (tail || self.grid.groups[group] == Kind::State)
                    && let Some(slot) = self.pool.take(&self.grid.key(&running.request.hashes, cached, group))
                {
                    self.pool.release(slot);
                }
            }
        }
    }

    /// Gives a request its blocks for `count` tokens and makes what will be in them known.
    fn schedule(&mut self, id: Id, count: usize, step: &mut Step) {
        let Some(at) = self.find(id) else { return };
        let decodes = self.running[at].decodes();
        let running = &mut self.running[at];
        let from = running.computed;
        running.computed += count;
        step.chunks.push((id, from, count));
        if decodes {
            step.decoding += 1;
        } else {
            step.seconds += self.pace.chunk_s(from, count);
        }
        let due = running.computed.div_ceil(self.grid.block);
        for (kind, blocks) in self.grid.groups.iter().zip(&mut running.blocks) {
            let due = if *kind == Kind::State { 1 } else { due };
            while blocks.len() < due {
                let slot = self.pool.allocate();
                self.tally.roomless += u64::from(slot.is_none());
                blocks.push(slot);
            }
        }
        self.name_blocks(at);
        self.keep_states(at, from);
        self.leave_windows(at);
    }

    /// Whole blocks get their keys.
    fn name_blocks(&mut self, at: usize) {
        let running = &mut self.running[at];
        let block = self.grid.block;
        let whole = running.computed.min(running.request.tokens.len()) / block;
        let rows = self.grid.groups.iter().enumerate().filter(|(_, kind)| **kind != Kind::State);
        for (group, _) in rows {
            let mut run: Vec<usize> = Vec::new();
            for n in running.named..whole {
                let key = self.grid.key(&running.request.hashes, (n + 1) * block, group);
                let named = running.blocks[group][n].is_some_and(|slot| self.pool.name(slot, key));
                if named {
                    run.push(n);
                }
                if (!named || n + 1 == whole) && !run.is_empty() {
                    tell(&mut self.pool, &self.grid, &running.request, group, &run);
                    run.clear();
                }
            }
        }
        running.named = running.named.max(whole);
    }

    /// Snapshots, and the tail of the prompt where tails are kept: each in a block of its own, which is free at once.
    fn keep_states(&mut self, at: usize, from: usize) {
        let running = &self.running[at];
        let (computed, grid) = (running.computed, &self.grid);
        let checkpoint = grid.checkpoint(running.request.prompt);
        let passed = |place: usize| place > from && place <= computed;
        let tail =
            Some(checkpoint).filter(|c| grid.has_tails() && !c.is_multiple_of(grid.block) && passed(*c));
        let mut places: Vec<(usize, usize)> = Vec::new();
        for (group, kind) in grid.groups.iter().enumerate() {
            match kind {
                Kind::State => {
                    let kept = running.request.snapshots.iter().copied();
                    // A state is there only where a chunk ends.
                    places.extend(
                        kept.filter(|p| *p == computed && p.is_multiple_of(grid.unit)).map(|p| (group, p)),
                    );
                }
                Kind::Full => places.extend(tail.map(|place| (group, place))),
                Kind::Sliding(_) => {}
            }
        }
        places.into_iter().for_each(|(group, end)| self.keep(at, group, end));
    }

    /// What ends after `end` tokens, in a block that nobody uses: a state, or the tail of a prompt.
    fn keep(&mut self, at: usize, group: usize, end: usize) {
        let request = &self.running[at].request;
        let key = self.grid.key(&request.hashes, end, group);
        if self.pool.has(&key) {
            return;
        }
        let Some(slot) = self.pool.allocate() else { return };
        self.pool.name(slot, key);
        let begin = (end - 1) / self.grid.block * self.grid.block;
        self.pool.tell(Stored {
            group: GroupId(u32::try_from(group).unwrap_or(u32::MAX)),
            hashes: vec![key.hash],
            parent: (begin > 0).then(|| request.hashes[begin / self.grid.unit - 1]),
            span: begin..end,
            tokens: request.tokens[begin..end].to_vec(),
            block_size: end - begin,
        });
        self.pool.release(slot);
    }

    /// Blocks that no window reaches any more are given back.
    fn leave_windows(&mut self, at: usize) {
        let running = &mut self.running[at];
        for (kind, blocks) in self.grid.groups.iter().zip(&mut running.blocks) {
            let Kind::Sliding(window) = kind else { continue };
            let gone = running.computed.saturating_sub(window.saturating_sub(1)) / self.grid.block;
            let count = gone.min(blocks.len());
            blocks[..count].iter_mut().filter_map(Option::take).for_each(|slot| self.pool.release(slot));
        }
    }
}

fn tell(pool: &mut Pool, grid: &Grid, request: &Request, group: usize, run: &[usize]) {
    let (first, block) = (run[0], grid.block);
    let span = first * block..(run[run.len() - 1] + 1) * block;
    pool.tell(Stored {
        group: GroupId(u32::try_from(group).unwrap_or(u32::MAX)),
        hashes: run.iter().map(|n| grid.key(&request.hashes, (n + 1) * block, group).hash).collect(),
        parent: (first > 0).then(|| grid.key(&request.hashes, first * block, group).hash),
        tokens: request.tokens[span.clone()].to_vec(),
        span,
        block_size: block,
    });
}

/// Last blocks first: they are needed least by others.
fn give_back(pool: &mut Pool, running: &mut Running) {
    for blocks in &mut running.blocks {
        std::mem::take(blocks).into_iter().rev().flatten().for_each(|slot| pool.release(slot));
    }
    running.computed = 0;
    running.named = 0;
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
