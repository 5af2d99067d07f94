//! Looks into a store's folder from outside: which rows lie where. For tests that damage rows on purpose, and for
//! whoever wants to know what a drive holds. Reads only; a running node is not disturbed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::folder;
use super::format::{Bad, Head, PAGE, PAGE64, Record, parse_segment_name, record_bytes};
use crate::base::block::{RowKey, Space};

/// One row on the drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    pub file: PathBuf,
    pub space: Space,
    pub key: RowKey,
    /// Tokens of the prompt up to the end of the row.
    pub position: u32,
    /// First byte of the payload in `file`.
    pub payload_offset: u64,
    pub payload_length: u32,
}

/// Every row whose header is whole, in the order in which they were written. Payloads are not verified.
pub fn inspect(folder: &Path) -> io::Result<Vec<Located>> {
    let mut segments: Vec<_> = std::fs::read_dir(folder)?
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            Some((parse_segment_name(path.file_name()?.to_str()?)?, path))
        })
        .collect();
    segments.sort();
    let mut rows = Vec::new();
    for (_, path) in segments {
        rows_of(&path, &mut rows)?;
    }
    Ok(rows)
}

fn rows_of(path: &Path, rows: &mut Vec<Located>) -> io::Result<()> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let holes = folder::holes(&file, size);
    let mut page = vec![0; PAGE];
    let mut offset = 0;
    let mut head = None;
    while offset + PAGE64 <= size {
        file.read_exact_at(&mut page, offset)?;
        match &head {
            None => match Head::decode(&page) {
                Ok(found) => (head, offset) = (Some(found), offset + PAGE64),
                Err(_) => return Ok(()),
            },
            Some(head) => {
                let record = match Record::decode(&page, head.store, head.sequence) {
                    Ok(record) => record,
                    // A row was released, or nothing was written yet.
                    Err(Bad::Released) => {
                        let past =
                            holes.iter().find(|hole| hole.contains(&offset)).map_or(0, |hole| hole.end);
                        offset = (past - past % PAGE64).max(offset + PAGE64);
                        continue;
                    }
                    // The first other page that is no record of this segment is its foot.
                    Err(_) => return Ok(()),
                };
                rows.push(Located {
                    file: path.to_owned(),
                    space: record.space,
                    key: record.key,
                    position: record.position,
                    payload_offset: offset + PAGE64,
                    payload_length: record.length,
                });
                offset += record_bytes(record.length);
            }
        }
    }
    Ok(())
}
