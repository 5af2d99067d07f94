//! Rows over NVIDIA's real NIXL, between two network namespaces with two cables, over TCP: no card is needed.
//!
//! The library is what `install/nixl.sh` gets; namespaces need root. Where either is missing that is said, and in CI
//! (`SPARK_KV_NIXL`) a missing library is a failure.

#![expect(clippy::print_stderr, reason = "a skipped test says so")]

mod cables;

use std::path::PathBuf;

use cables::{BOTH, Boxes, alone, speeds};

/// Of each cable, in megabits a second: far below what NIXL carries over TCP here.
const MBIT: u32 = 400;

/// Bytes of a row.
const ROW: u32 = 17_301_504;

/// Boxes that read each other's rows, the second cable of so many megabits a second.
fn up(name: &str, second: u32) -> Option<Boxes> {
    let library = library()?;
    Some(Boxes::up(name, MBIT, second)?.with_nixl(library))
}

fn library() -> Option<PathBuf> {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/spark-kv");
    let cache = std::env::var_os("SPARK_KV_CACHE").map_or_else(home, PathBuf::from);
    let found = cache.join("nixl/lib/python3/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so");
    if found.is_file() {
        return Some(found);
    }
    assert!(std::env::var_os("SPARK_KV_NIXL").is_none(), "install/nixl.sh was run and left no library");
    eprintln!("skipped: no NIXL here; install/nixl.sh gets it");
    None
}

#[test]
fn two_cables_carry_nearly_twice_what_one_does_and_each_agent_stays_on_its_own() {
    let _alone = alone();
    let Some(mut boxes) = up("ne", MBIT) else { return };
    boxes.serve(128, ROW);
    boxes.carry_twice(4, 0.42..0.58);
}

#[test]
fn a_cable_of_a_quarter_still_helps() {
    let _alone = alone();
    let Some(mut boxes) = up("nq", MBIT / 4) else { return };
    boxes.serve(128, ROW);
    let (one, _) = boxes.measured(&BOTH[..1], 3);
    let (both, carried) = boxes.measured(&BOTH, 4);
    assert!(both >= 1.2 * one, "{both} MB/s over both, {one} over the faster one: {carried:?}");
}

/// Both ways a cable can go: nothing is said, or the link is gone.
#[test]
fn a_cable_that_is_cut_in_mid_fetch_costs_nothing_but_time() {
    let _alone = alone();
    for how in ["cut", "unplug"] {
        let Some(mut boxes) = up(&format!("n{}", &how[..1]), MBIT) else { return };
        boxes.serve(256, ROW);
        let begin = boxes.received('b')[1];
        let fetch = boxes.fetch(&BOTH, 2).spawn().unwrap();
        boxes.until("the transfer to begin", || boxes.received('b')[1] >= begin + 90_000_000);
        boxes.cable(how, 1, None);
        let said = boxes.said(&fetch.wait_with_output().unwrap());
        assert_eq!(speeds(&said).len(), 2, "both rounds ended in the same process: {said}");
        let cut = said.lines().find(|line| line.starts_with("rail rail1")).unwrap();
        assert!(!cut.contains(" 0 errors"), "the cut was noticed: {cut}");
    }
}
