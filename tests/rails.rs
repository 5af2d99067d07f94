//! Two boxes in two network namespaces, joined by two shaped cables: real processes of this program on both sides,
//! and the kernel's own counters for what each cable carried.
//!
//! Rates are compared within one run, over links that the kernel shapes to the same rate: the two cores of a small
//! machine carry them with ease, so a ratio says something about this program only. Needs root and network
//! namespaces; without them each test says so and passes.

#![expect(clippy::unwrap_used, reason = "helpers of tests: a test that cannot go on panics")]

mod cables;

use std::io::{BufRead, BufReader};
use std::process::Command;
use std::time::Duration;

use cables::{BOTH, Boxes, PATIENCE, alone};

/// Of each cable, in megabits a second.
const MBIT: u32 = 400;

/// Changes the routes of one side.
fn route(boxes: &Boxes, side: char, words: &[&str]) {
    let box_name = format!("{}-{side}", boxes.name);
    let done = Command::new("ip").args(["-n", &box_name, "route"]).args(words).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Whether side b has a connection along the second cable, as its kernel says.
fn has_second(boxes: &Boxes) -> bool {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &format!("{}-b", boxes.name)]);
    let said = command.args(["ss", "-Htn", "state", "established", "dst", "10.77.1.1"]).output().unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    !said.stdout.is_empty()
}

#[test]
fn two_equal_cables_carry_nearly_twice_what_one_does_and_each_half_of_it() {
    let _alone = alone();
    let Some(mut boxes) = Boxes::up("eq", MBIT, MBIT) else { return };
    // One row of 17 MB and a few more: a row has to use both at once.
    boxes.serve(128, 17_301_504);
    boxes.carry_twice(3, 0.45..0.55);
}

/// Each rail uses its cable whatever the routing table says, on both sides.
#[test]
fn routes_that_lead_everything_over_one_cable_change_nothing() {
    let _alone = alone();
    let Some(mut boxes) = Boxes::up("ro", MBIT, MBIT) else { return };
    route(&boxes, 'a', &["add", "10.77.1.2/32", "dev", "rail0"]);
    route(&boxes, 'b', &["add", "10.77.1.1/32", "dev", "rail0"]);
    boxes.serve(128, 17_301_504);
    let (_, carried) = boxes.measured(&BOTH, 1);
    let half = carried[0] as f64 / (carried[0] + carried[1]) as f64;
    assert!((0.4..0.6).contains(&half), "{carried:?}");
}

#[test]
fn a_cable_of_a_quarter_still_helps() {
    let _alone = alone();
    let Some(mut boxes) = Boxes::up("qu", MBIT, MBIT / 4) else { return };
    boxes.serve(128, 17_301_504);
    let (one, _) = boxes.measured(&BOTH[..1], 3);
    let (both, carried) = boxes.measured(&BOTH, 3);
    assert!(both >= 1.2 * one, "{both} MB/s over both, {one} over the faster one");
    let share = carried[1] as f64 / (carried[0] + carried[1]) as f64;
    assert!((0.12..0.25).contains(&share), "a fifth is its part: {carried:?}");
}

#[test]
fn a_cable_that_slows_to_a_tenth_carries_a_tenth_within_a_second() {
    let _alone = alone();
    let Some(mut boxes) = Boxes::up("sl", MBIT, MBIT) else { return };
    boxes.serve(512, 17_301_504);
    let fetch = boxes.fetch(&BOTH, 1).spawn().unwrap();
    let begin = boxes.received('b');
    boxes.until("the transfer to begin", || boxes.received('b')[1] > begin[1] + 50_000_000);
    boxes.cable("rate", 1, Some(MBIT / 10));
    std::thread::sleep(Duration::from_secs(1));
    let from = boxes.received('b');
    std::thread::sleep(Duration::from_secs(2));
    let to = boxes.received('b');
    let (fast, slow) = ((to[0] - from[0]) as f64, (to[1] - from[1]) as f64);
    let output = fetch.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // In two seconds the fast one could carry 100 MB and the slow one a tenth of it.
    assert!(fast > 80e6, "the fast one waits for the slow one: {fast} {slow}");
    assert!((0.05..0.15).contains(&(slow / fast)), "{fast} {slow}");
    // Nothing was set aside for the slow one: of what was left when it became slow it carried a tenth, too.
    let to = boxes.received('b');
    let all = [to[0] - begin[0], to[1] - begin[1]];
    assert!(all[1] * 3 < all[0], "{all:?}");
}

/// Both ways a cable can go: nothing is said, or the link is gone.
#[test]
fn a_cable_that_is_cut_in_mid_transfer_costs_nothing_but_time_and_is_used_again_when_mended() {
    let _alone = alone();
    for how in ["cut", "unplug"] {
        let Some(mut boxes) = Boxes::up(&how[..1], MBIT, MBIT) else { return };
        boxes.serve(256, 17_301_504);
        let mut fetch = boxes.fetch(&BOTH, 8).spawn().unwrap();
        let said = BufReader::new(fetch.stderr.take().unwrap());
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || said.lines().map_while(Result::ok).for_each(|line| drop(tell.send(line))));
        let begin = boxes.received('b');
        boxes.until("the transfer to begin", || boxes.received('b')[1] > begin[1] + 30_000_000);
        assert!(has_second(&boxes));
        boxes.cable(how, 1, None);
        // The kernel gives a connection up that is silent for four seconds.
        let took = boxes.until("the silent rail to be given up", || !has_second(&boxes));
        assert!(took < Duration::from_secs(3), "{how}: given up only after {took:?}");
        // Every row of the first round was compared with what it has to be before this is said.
        let first = loop {
            let line = told.recv_timeout(PATIENCE).unwrap();
            if line.starts_with("round 1:") {
                break line;
            }
        };
        boxes.cable("mend", 1, Some(MBIT));
        let mended = boxes.received('b')[1];
        let took = boxes.until("the mended cable", || boxes.received('b')[1] > mended + 5_000_000);
        let output = fetch.wait_with_output().unwrap();
        let rest: Vec<String> = told.iter().collect();
        eprintln!("{how}: {first}; used again after {took:?}; {rest:#?}");
        assert!(output.status.success(), "{how}: {rest:?} {}", boxes.log());
        assert!(took < Duration::from_secs(5), "{how}: used again only after {took:?}");
        assert!(rest.iter().any(|line| line.starts_with("round 8:")), "the same process went on: {rest:?}");
        let line = rest.iter().find(|line| line.starts_with("rail rail1")).unwrap();
        assert!(!line.contains(" 0 errors"), "{how}: the cut was noticed: {line}");
    }
}
