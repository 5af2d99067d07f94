//! Two to eight nodes on virtual time, in bad weather: the shipped machines of all nodes, driven by one loop.
//!
//! Nothing here waits, sleeps or opens a socket. A seed decides what the weather does (words are lost, doubled, late
//! and out of order, cables are cut in one direction, rails are slow, lossy and dead) and what the nodes do (rows come
//! and go, nodes end and start again as a new generation, engines go and come back as another model, rows are fetched and
//! fetches given up). After every step the invariants of [`World::check`] are looked at, and with every byte of a row
//! those of [`crate::transfer::sim`]; at the end the weather clears, and all nodes must agree with the truth and get
//! what they know of, also over a rail that dies meanwhile. A failing seed says with which command it fails again.
//!
//! The weather is worse than any network that carries TCP: a word that is late may arrive in another session, also in
//! one of a later generation. Only the ticket keeps its place, because it is said once, at the head of a session.
//!
//! | file | what it has |
//! | --- | --- |
//! | [`node`] | one life of a node |
//! | [`world`] | weather, restarts, rows that come and go; one step of everything |
//! | [`control`] | connections, greetings, sessions and their words |
//! | [`fetches`] | rails, and rows that are fetched over them |
//! | [`check`] | what must be so, always and at the end |

mod check;
mod control;
mod fetches;
mod node;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use world::World;

const SILENCE: Duration = Duration::from_secs(3);
const STEP: Duration = Duration::from_millis(50);
/// Steps of bad weather, and steps until all must agree: two silences, a dial and a heartbeat.
const STORM: u32 = 400;
const CALM: u32 = 240;
/// Steps at the end in which nobody may have had to ask again.
const QUIET: u32 = 60;
/// What each node may hold.
const KEYS: u32 = 90;
/// Two connections a pair dial each other at the same time, and one more may be about to be replaced.
const CONNECTIONS: usize = 6;
const SEEDS: u64 = 200;

/// Everything of one seed. The last events when it fails.
fn play(seed: u64) -> Result<(), String> {
    let mut world = World::new(seed);
    let played = catch_unwind(AssertUnwindSafe(|| {
        for _ in 0..STORM {
            world.stir();
            world.step();
        }
        world.clear();
    }));
    let trail = || Vec::from(world.trail.clone()).join("\n");
    played.map_err(|_| format!("{} nodes; what happened last:\n{}", world.nodes.len(), trail()))
}

/// Plays seeds on all cores until one fails.
fn play_all(seeds: std::ops::Range<u64>) -> Option<(u64, String)> {
    let next = AtomicU64::new(seeds.start);
    let player = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return None;
            }
            if let Err(trail) = play(seed) {
                next.store(seeds.end, Ordering::Relaxed);
                return Some((seed, trail));
            }
        }
    };
    let players = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..players).map(|_| scope.spawn(player)).collect();
        all.into_iter().filter_map(|one| one.join().expect("a player catches what fails")).min()
    })
}

#[test]
fn after_any_weather_all_nodes_agree_and_nobody_believes_the_dead() {
    let seeds = match std::env::var("SEED") {
        Ok(seed) => {
            let seed = seed.parse().expect("SEED is a number");
            seed..seed + 1
        }
        Err(_) => 0..SEEDS,
    };
    if let Some((seed, trail)) = play_all(seeds) {
        panic!(
            "seed {seed}, {trail}\nto see it again: SEED={seed} cargo test --lib cluster::sim::after_any_weather"
        );
    }
}

#[test]
fn a_seed_plays_the_same_way_twice() {
    let play = |seed| {
        let mut world = World::new(seed);
        for _ in 0..STORM {
            world.stir();
            world.step();
        }
        (world.serial, world.fetched, Vec::from(world.trail))
    };
    for seed in [3, 4] {
        assert_eq!(play(seed), play(seed));
    }
}

/// Breaks one step of the machines at a time: the same seeds must notice, and say how to see it again.
#[test]
fn what_the_weather_must_not_do_is_noticed_when_a_check_is_missing() {
    if !cfg!(debug_assertions) {
        return;
    }
    for (mutant, noticed) in [
        ("SkipGeneration", "was heard"),
        ("SkipGap", "what it never told"),
        ("KeepDead", "still believes what it held"),
        ("KeepTicket", "a ticket is good although its session is over"),
        ("KeepRails", "a piece lands from a node that is gone"),
        ("NoCredit", "bytes in flight on a rail that never moved more"),
        ("KeepSilent", "a connection that is silent is kept"),
        ("LosePieces", "fetches never end"),
        ("LateFetch", "a fetch goes on after its deadline"),
        ("LateWrite", "a piece lands in a row that was handed back"),
        ("StaleRail", "a piece lands that another rail has taken over"),
        ("SkipReceiveCheck", "a row came that is not the one asked for"),
    ] {
        let program = std::env::current_exe().expect("a test has a program");
        let run = std::process::Command::new(program)
            .env("RUST_BACKTRACE", "0")
            .args(["--exact", "cluster::sim::after_any_weather_all_nodes_agree_and_nobody_believes_the_dead"])
            .env(crate::base::mutant::VARIABLE, mutant)
            .env_remove("SEED")
            .output()
            .expect("it runs");
        let said = [run.stdout, run.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert!(!run.status.success(), "{mutant} goes unnoticed: {said}");
        assert!(said.contains(noticed), "{mutant} is noticed by another check: {said}");
        assert!(said.contains("to see it again: SEED="), "{said}");
    }
}
