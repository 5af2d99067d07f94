//! Rows for peers: large ones are read in portions, which leave while the rest is being read.
//!
//! Portions are summed one behind the other and then handed on, the last one only when the sum of all is the row's: so
//! a row that is damaged is never handed on whole, and whoever gets it checks it again. A sealed row cannot
//! be opened in parts; it is read, opened and handed on whole.

use std::collections::HashMap;

use super::super::disk::{Body, Buffer, Op, Verb};
use super::super::format::{Bad, PAGE, PAGE64, Record};
use super::super::index::Place;
use super::{Event, Flight, Read, Reader, Work, verify, whole_pages};
use crate::base::checksum::crc64_on;
use crate::base::landing::{About, Landing};
use crate::base::mutant::{self, Mutant};

/// Bytes of a portion: a drive reaches its speed with reads of this size, and it is what a rail takes at a time.
pub const PORTION: usize = 1 << 20;

/// Large rows being read in portions.
#[derive(Default)]
pub struct Peers {
    rows: HashMap<u64, Serving>,
    next: u64,
}

/// One of them.
struct Serving {
    read: Read,
    place: Place,
    record: Option<Record>,
    /// By number: read, not summed yet.
    waiting: HashMap<usize, Buffer>,
    /// Number of the next one to be summed, of how many, and the sum of those before it.
    next: usize,
    of: usize,
    sum: u64,
    /// Of the first one.
    head: Option<Buffer>,
    /// Portions that the drive has, and whether a hand has one.
    with_drive: usize,
    with_hand: bool,
    /// The last portion: it leaves when the row was counted.
    last: Option<Buffer>,
    broken: Option<Broken>,
}

/// Why the rest of a row does not come.
enum Broken {
    /// Nobody waits for it any more.
    GivenUp,
    Io(String),
    Bad(Bad),
}

/// A portion that was looked at.
pub struct Summed {
    row: u64,
    portion: Buffer,
    /// Of all up to its end.
    sum: u64,
    /// Of the first one, whether the row is the one that was asked for.
    record: Option<Result<Record, Bad>>,
}

impl Peers {
    /// Where a row lies that is being read.
    pub fn place(&self, row: u64) -> Option<Place> {
        self.rows.get(&row).map(|serving| serving.place)
    }
}

impl Work {
    /// Whether a row is read in portions.
    pub(super) fn is_in_portions(read: &Read, place: &Place) -> bool {
        matches!(read.reader, Reader::Peer { .. }) && place.seal == 0 && place.length as usize > PORTION
    }

    /// Starts to read all portions of a row.
    pub(super) fn start_portions(&mut self, read: Read, place: Place) {
        let Reader::Peer { into, .. } = &read.reader else { unreachable!("looked at before") };
        let length = whole_pages(&place);
        let of = length.div_ceil(PORTION);
        let bodies: Vec<Buffer> = (0..of).map(|n| into.buffer(PORTION.min(length - n * PORTION))).collect();
        self.peers.next += 1;
        let (row, sequence) = (self.peers.next, place.sequence);
        let serving = Serving {
            read,
            place,
            record: None,
            waiting: HashMap::new(),
            next: 0,
            of,
            sum: 0,
            head: None,
            with_drive: of,
            with_hand: false,
            last: None,
            broken: None,
        };
        self.peers.rows.insert(row, serving);
        self.parts.log.reading(sequence);
        let mut offset = place.offset();
        for (number, body) in bodies.into_iter().enumerate() {
            // The row's header goes with the first one.
            let head = Buffer::zeroed(if number == 0 { PAGE } else { 0 });
            let len = (head.len() + body.len()) as u64;
            self.submit(Verb::Read, sequence, offset, head, Body::Own(body), Flight::Portion(row, number));
            offset += len;
        }
        debug_assert!(offset.is_multiple_of(PAGE64), "portions end at pages");
    }

    /// The drive is through with a portion.
    pub(super) fn have_portion(&mut self, row: u64, number: usize, op: Op, result: std::io::Result<()>) {
        let serving = self.peers.rows.get_mut(&row).expect("a row stays until its portions have ended");
        serving.with_drive -= 1;
        if serving.with_drive == 0 {
            self.parts.log.read(serving.place.sequence);
        }
        if let Err(error) = result {
            serving.broken.get_or_insert(Broken::Io(error.to_string()));
        } else if !serving.is_wanted() {
            serving.broken.get_or_insert(Broken::GivenUp);
        }
        let Op { head, body: Body::Own(mut portion), .. } = op else {
            unreachable!("a peer's row is read into own memory")
        };
        if serving.broken.is_none() {
            portion.truncate(serving.place.length as usize - number * PORTION);
            serving.waiting.insert(number, portion);
            if number == 0 {
                serving.head = Some(head);
            }
        }
        self.sum_next(row);
    }

    /// Gives the next portion to a hand, or ends the row when there is none and none will come.
    fn sum_next(&mut self, row: u64) {
        let serving = self.peers.rows.get_mut(&row).expect("a row stays until its portions have ended");
        if serving.with_hand {
            return;
        }
        if serving.broken.is_some() {
            serving.waiting.clear();
        }
        let Some(portion) = serving.waiting.remove(&serving.next) else {
            if serving.with_drive == 0 {
                self.end_serving(row);
            }
            return;
        };
        serving.with_hand = true;
        self.with_hands += 1;
        let (space, store, place, before) =
            (serving.read.space, self.parts.store, serving.place, serving.sum);
        let (key, head) = (serving.read.asked.expect("set when the read began").0, serving.head.take());
        self.sum(false, move || {
            let look = |head: Buffer| {
                Record::decode(&head, store, place.sequence)
                    .and_then(|record| verify(record, &space, &key, &place))
            };
            let (record, sum) = (head.map(look), crc64_on(before, &portion));
            Event::Summed(Box::new(Summed { row, portion, sum, record }))
        });
    }

    /// A portion was summed: it goes on, and the next one is summed.
    pub(super) fn summed(&mut self, summed: Summed) {
        let Summed { row, portion, sum, record } = summed;
        let serving = self.peers.rows.get_mut(&row).expect("a row stays until its portions have ended");
        serving.with_hand = false;
        match record {
            Some(Ok(record)) => serving.begin(record),
            Some(Err(bad)) => drop(serving.broken.get_or_insert(Broken::Bad(bad))),
            None => {}
        }
        if serving.broken.is_none() {
            serving.hand_on(portion, sum);
        }
        self.sum_next(row);
    }

    /// Nothing of a row is with the drive or a hand any more.
    fn end_serving(&mut self, row: u64) {
        let mut serving = self.peers.rows.remove(&row).expect("it ends once");
        if let (Some(last), Some(record)) = (serving.last.take(), serving.record) {
            self.count_read(&serving.read, &record);
            self.count_served();
            return serving.landing().add(bytes::Bytes::from_owner(last));
        }
        let Serving { read, broken, .. } = serving;
        match broken {
            Some(Broken::Io(error)) => {
                tracing::warn!(%error, "failed to read a row; it is dropped");
                self.damaged(read, "io", &error);
            }
            Some(Broken::Bad(bad)) => self.bad(read, &bad),
            Some(Broken::GivenUp) | None => self.read_failed(read, "given_up"),
        }
    }

    /// A row was handed on whole.
    pub(super) fn count_served(&self) {
        self.parts.shared.metrics.served.inc();
        self.parts.shared.facts.lock().served += 1;
    }
}

impl Serving {
    fn landing(&mut self) -> &mut dyn Landing {
        let Reader::Peer { into, .. } = &mut self.read.reader else { unreachable!("only peers' rows") };
        &mut **into
    }

    fn is_wanted(&mut self) -> bool {
        self.landing().is_wanted()
    }

    fn begin(&mut self, record: Record) {
        self.record = Some(record);
        self.landing().begin(about(&record));
    }

    /// Hands on what was summed, the last portion only of a sound row.
    fn hand_on(&mut self, portion: Buffer, sum: u64) {
        let Some(record) = self.record else { return };
        (self.sum, self.next) = (sum, self.next + 1);
        if self.next < self.of {
            self.landing().add(bytes::Bytes::from_owner(portion));
        } else if sum == record.checksum || mutant::on(Mutant::SkipChecksum) {
            self.last = Some(portion);
        } else {
            self.broken = Some(Broken::Bad(Bad::Checksum));
        }
    }
}

/// What a peer is told of a row.
pub fn about(record: &Record) -> About {
    let &Record { position, checksum, length, .. } = record;
    About { position, checksum, length }
}
