//! The number of an engine start, which never comes back, and the shared memory of earlier ones.

use std::io;
use std::path::Path;

use super::process;

const SHM: &str = "/dev/shm";

/// The next number, on the drive before it is used. A damaged file is followed by a number that no counter reached:
/// the seconds since 1970.
pub fn next(file: &Path) -> io::Result<u64> {
    let next = match process::read_bounded(file, 64) {
        Ok(bytes) => match String::from_utf8_lossy(&bytes).trim().parse::<u64>() {
            Ok(last) if last < u64::MAX => last + 1,
            Ok(_) | Err(_) => crate::base::clock::unix_seconds(),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => 1,
        Err(error) => return Err(error),
    };
    process::write_durable(file, format!("{next}\n").as_bytes(), 0o600)?;
    Ok(next)
}

/// Unlinks the row areas of this node's earlier engines. Call it only while none runs: the caller holds the lock.
pub fn sweep_shm(node: &str, state: &Path) -> usize {
    sweep_folder(Path::new(SHM), &super::command::engine_id_prefix(node, state))
}

fn sweep_folder(folder: &Path, prefix: &str) -> usize {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let ours = |name: &str| {
        let rest = name.strip_prefix("vllm_offload_").and_then(|n| n.strip_prefix(prefix));
        rest.is_some_and(|r| r.starts_with(|c: char| c.is_ascii_digit()))
    };
    entries
        .flatten()
        .filter(|e| e.file_name().to_str().is_some_and(ours))
        .filter(|e| std::fs::remove_file(e.path()).is_ok())
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_grow_over_restarts_and_damage() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("engine-generation");
        assert_eq!(next(&file).unwrap(), 1);
        assert_eq!(next(&file).unwrap(), 2);
        std::fs::write(&file, "tw").unwrap();
        let after = next(&file).unwrap();
        assert!(after > 1_700_000_000);
        assert_eq!(next(&file).unwrap(), after + 1);
    }

    #[test]
    fn only_this_nodes_row_areas_are_unlinked() {
        let dir = tempfile::tempdir().unwrap();
        let others = [
            "vllm_offload_spark-a-123456-x.mmap",
            "vllm_offload_spark-a-1234567-1.mmap",
            "vllm_offload_spark-a-b-123456-1.mmap",
            "vllm_offload_other.mmap",
            "psm_1",
        ];
        for name in others
            .iter()
            .chain(&["vllm_offload_spark-a-123456-1.mmap", "vllm_offload_spark-a-123456-22.mmap"])
        {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(sweep_folder(dir.path(), "spark-a-123456-"), 2);
        for name in others {
            assert!(dir.path().join(name).exists(), "{name}");
        }
    }
}
