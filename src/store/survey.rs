//! What a store holds, summed up for people: by space, group and position, and by segment. Pure.
//!
//! Made in one pass over the rows, either of a running store's index or of a folder that nobody has open. Tokens are
//! not written on the drive; how many one row spans follows from where rows end: in one group all ends are multiples
//! of it. A group that keeps only some of its blocks (states of hybrid models) spans as much as its ends have in
//! common, which is the least that it can be.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::format::{Sequence, segment_name};
use super::index::Place;
use crate::base::block::{RowKey, Space};

/// First token behind each band of positions but the last, which is open.
const BANDS: [u32; 4] = [4 << 10, 16 << 10, 64 << 10, 256 << 10];

/// Everything a store holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Survey {
    pub rows: u64,
    /// Payload bytes.
    pub bytes: u64,
    pub spaces: Vec<SpaceUse>,
    /// In the order in which they were begun.
    pub segments: Vec<SegmentUse>,
}

/// Rows of one space: of one model, layout and version.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpaceUse {
    pub namespace: String,
    pub rank: u16,
    pub ranks: u16,
    /// An engine of this space is attached.
    pub attached: bool,
    pub rows: u64,
    pub bytes: u64,
    pub groups: Vec<GroupUse>,
}

/// Rows of one cache group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GroupUse {
    pub group: u32,
    pub rows: u64,
    pub bytes: u64,
    /// Tokens that one row spans, as its ends show.
    pub tokens_per_row: u32,
    pub bytes_per_token: f64,
    /// The largest position of a row.
    pub deepest: u32,
    pub bands: Vec<BandUse>,
}

/// Rows that end in one part of their prompts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BandUse {
    /// Positions above this …
    pub above: u32,
    /// … up to this; none: to the end.
    pub up_to: Option<u32>,
    pub rows: u64,
    pub bytes: u64,
}

/// Rows that can be found in one segment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SegmentUse {
    pub file: String,
    pub rows: u64,
    pub bytes: u64,
    /// When all of its rows were read back last.
    pub verified_unix: Option<u64>,
}

#[derive(Clone, Debug, Default)]
struct Group {
    rows: u64,
    bytes: u64,
    step: u32,
    deepest: u32,
    bands: [(u64, u64); BANDS.len() + 1],
}

/// A survey in the making.
#[derive(Debug, Default)]
pub struct Surveyor {
    groups: BTreeMap<(Space, u32), Group>,
    segments: BTreeMap<Sequence, (u64, u64)>,
}

impl Surveyor {
    pub fn see(&mut self, space: &Space, key: &RowKey, place: &Place) {
        let length = u64::from(place.length);
        let segment = self.segments.entry(place.sequence).or_default();
        *segment = (segment.0 + 1, segment.1 + length);
        let group = self.groups.entry((*space, key.group.0)).or_default();
        group.rows += 1;
        group.bytes += length;
        group.step = gcd(group.step, place.position);
        group.deepest = group.deepest.max(place.position);
        let band = BANDS.iter().position(|end| place.position <= *end).unwrap_or(BANDS.len());
        group.bands[band].0 += 1;
        group.bands[band].1 += length;
    }

    /// Also lists a segment of which no row was seen.
    pub fn see_segment(&mut self, sequence: Sequence) {
        self.segments.entry(sequence).or_default();
    }

    pub fn finish(self, verified: &BTreeMap<Sequence, u64>, attached: impl Fn(&Space) -> bool) -> Survey {
        let mut survey = Survey::default();
        let mut last = None;
        for ((space, number), group) in &self.groups {
            if last != Some(*space) {
                survey.spaces.push(SpaceUse {
                    namespace: space.namespace.to_string(),
                    rank: space.rank.index,
                    ranks: space.rank.of,
                    attached: attached(space),
                    ..SpaceUse::default()
                });
                last = Some(*space);
            }
            let of = survey.spaces.last_mut().expect("pushed when the space began");
            of.rows += group.rows;
            of.bytes += group.bytes;
            survey.rows += group.rows;
            survey.bytes += group.bytes;
            of.groups.push(group.finish(*number));
        }
        let segment = |(sequence, (rows, bytes)): (Sequence, (u64, u64))| SegmentUse {
            file: segment_name(sequence),
            rows,
            bytes,
            verified_unix: verified.get(&sequence).copied(),
        };
        survey.segments = self.segments.into_iter().map(segment).collect();
        survey
    }
}

impl Group {
    fn finish(&self, group: u32) -> GroupUse {
        let tokens = (self.rows * u64::from(self.step)).max(1);
        let mut above = 0;
        let mut bands = Vec::new();
        for (n, (rows, bytes)) in self.bands.iter().enumerate() {
            let up_to = BANDS.get(n).copied();
            if *rows > 0 {
                bands.push(BandUse { above, up_to, rows: *rows, bytes: *bytes });
            }
            above = up_to.unwrap_or(above);
        }
        GroupUse {
            group,
            rows: self.rows,
            bytes: self.bytes,
            tokens_per_row: self.step,
            bytes_per_token: self.bytes as f64 / tokens as f64,
            deepest: self.deepest,
            bands,
        }
    }
}

fn gcd(mut a: u32, mut b: u32) -> u32 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::block::{BlockHash, GroupId, Namespace, Rank};

    fn space(n: u8) -> Space {
        Space { namespace: Namespace([n; 32]), rank: Rank::ONLY }
    }

    fn key(group: u32) -> RowKey {
        RowKey { hash: BlockHash([7; 32]), group: GroupId(group) }
    }

    fn place(sequence: u64, length: u32, position: u32) -> Place {
        Place { sequence: Sequence(sequence), page: 1, length, position, seal: 0 }
    }

    #[test]
    fn rows_are_summed_by_space_group_band_and_segment() {
        let mut surveyor = Surveyor::default();
        for position in [16, 32, 4096, 4112, 300_000] {
            surveyor.see(&space(1), &key(0), &place(3, 1600, position));
        }
        surveyor.see(&space(1), &key(1), &place(4, 500, 2048));
        surveyor.see(&space(2), &key(0), &place(4, 100, 16));
        surveyor.see_segment(Sequence(5));
        let survey = surveyor.finish(&BTreeMap::from([(Sequence(3), 99)]), |s| *s == space(2));
        assert_eq!((survey.rows, survey.bytes), (7, 8600));
        assert_eq!(
            survey.spaces.iter().map(|s| (s.rows, s.attached)).collect::<Vec<_>>(),
            [(6, false), (1, true)]
        );
        let group = &survey.spaces[0].groups[0];
        assert_eq!((group.tokens_per_row, group.bytes_per_token, group.deepest), (16, 100.0, 300_000));
        let bands: Vec<_> = group.bands.iter().map(|b| (b.above, b.up_to, b.rows, b.bytes)).collect();
        assert_eq!(bands, [(0, Some(4096), 3, 4800), (4096, Some(16384), 1, 1600), (262_144, None, 1, 1600)]);
        let segments: Vec<_> = survey.segments.iter().map(|s| (s.rows, s.bytes, s.verified_unix)).collect();
        assert_eq!(segments, [(5, 8000, Some(99)), (2, 600, None), (0, 0, None)]);
        assert_eq!(survey.segments[0].file, segment_name(Sequence(3)));
    }

    #[test]
    fn an_empty_store_is_no_division_by_zero() {
        let mut surveyor = Surveyor::default();
        surveyor.see(&space(1), &key(0), &place(1, 10, 0));
        let survey = surveyor.finish(&BTreeMap::new(), |_| false);
        assert_eq!(survey.spaces[0].groups[0].bytes_per_token, 10.0);
        assert_eq!(Surveyor::default().finish(&BTreeMap::new(), |_| true), Survey::default());
    }
}
