//! Sizes and counts that must not be mixed up, how a person writes them and how we print them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number of bytes. Written by people as `64MiB`, `1.5GB`, `4096`; kept and printed exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Bytes {
    pub const KIB: u64 = 1 << 10;
    pub const MIB: u64 = 1 << 20;
    pub const GIB: u64 = 1 << 30;

    pub const fn kib(n: u64) -> Self {
        Self(n * Self::KIB)
    }
    pub const fn mib(n: u64) -> Self {
        Self(n * Self::MIB)
    }
    pub const fn gib(n: u64) -> Self {
        Self(n * Self::GIB)
    }
}

const SUFFIXES: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// Why a text is not a size.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "`{0}` is not a size: write a number with one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB, such as `64GiB`"
)]
pub struct NotBytes(String);

impl FromStr for Bytes {
    type Err = NotBytes;

    fn from_str(text: &str) -> Result<Self, NotBytes> {
        let wrong = || NotBytes(text.to_owned());
        let trimmed = text.trim();
        let (number, factor) = SUFFIXES
            .iter()
            .find_map(|&(suffix, factor)| Some((trimmed.strip_suffix(suffix)?, factor)))
            .unwrap_or_else(|| (trimmed.strip_suffix('B').unwrap_or(trimmed), 1));
        let number = number.trim();
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(factor).map(Self).ok_or_else(wrong);
        }
        let part: f64 = number.parse().map_err(|_| wrong())?;
        let bytes = part * factor as f64;
        if !part.is_finite() || part < 0.0 || bytes >= u64::MAX as f64 {
            return Err(wrong());
        }
        Ok(Self(bytes as u64))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = [("TiB", 1_u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)]
            .into_iter()
            .find(|&(_, unit)| self.0 >= unit && self.0.is_multiple_of(unit));
        match exact {
            Some((suffix, unit)) => write!(f, "{}{suffix}", self.0 / unit),
            None => write!(f, "{}B", self.0),
        }
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl serde::de::Visitor<'_> for Reader {
            type Value = Bytes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as `64GiB` or a number of bytes")
            }
            fn visit_u64<E: serde::de::Error>(self, v: u64) -> Result<Bytes, E> {
                Ok(Bytes(v))
            }
            fn visit_i64<E: serde::de::Error>(self, v: i64) -> Result<Bytes, E> {
                u64::try_from(v).map(Bytes).map_err(|_| E::custom("a size cannot be negative"))
            }
            fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<Bytes, E> {
                v.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Reader)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_write_sizes_in_many_ways() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("1 KiB", 1024),
            ("1.5GiB", 1_610_612_736),
            ("2TB", 2_000_000_000_000),
            ("7B", 7),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in ["", "GiB", "-1", "1e400", "12 parsecs", "NaN", "99999999TiB"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn printed_sizes_read_back_exactly() {
        for bytes in [0, 1, 1023, 1024, 3 << 20, (1 << 30) + 1, u64::MAX] {
            assert_eq!(Bytes(bytes).to_string().parse(), Ok(Bytes(bytes)));
        }
    }
}
