//! Bounded little-endian reading and writing. What comes from a drive, a wire or another process is parsed with
//! this: every length is checked against what is there before anything is taken.

/// Why bytes could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("{wanted} bytes wanted, {left} left")]
    Short { wanted: usize, left: usize },
    #[error("{0} unread bytes at the end")]
    Trailing(usize),
    #[error("{what} is {value}, the limit is {limit}")]
    TooMany { what: &'static str, value: u64, limit: u64 },
    #[error("{what} has the unknown value {value}")]
    Unknown { what: &'static str, value: u64 },
    #[error("{0} is not valid text")]
    Text(&'static str),
}

/// Reads from a slice, front to back.
#[derive(Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let Some((head, tail)) = self.0.split_at_checked(count) else {
            return Err(Malformed::Short { wanted: count, left: self.0.len() });
        };
        self.0 = tail;
        Ok(head)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        Ok(self.bytes(N)?.try_into().expect("bytes() gave N"))
    }

    pub fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.array::<1>()?[0])
    }
    pub fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array()?))
    }
    pub fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array()?))
    }
    pub fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A u32 count of things of `size` bytes each that must all be there.
    pub fn count(&mut self, what: &'static str, size: usize, limit: u32) -> Result<usize, Malformed> {
        let value = self.u32()?;
        if value > limit {
            return Err(Malformed::TooMany { what, value: value.into(), limit: limit.into() });
        }
        let wanted = value as usize * size;
        if wanted > self.0.len() {
            return Err(Malformed::Short { wanted, left: self.0.len() });
        }
        Ok(value as usize)
    }

    /// A text with a u16 length before it.
    pub fn text(&mut self, what: &'static str) -> Result<&'a str, Malformed> {
        let length = self.u16()?.into();
        std::str::from_utf8(self.bytes(length)?).map_err(|_| Malformed::Text(what))
    }

    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    /// Nothing may be left.
    pub fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed::Trailing(self.0.len())) }
    }
}

/// Writes to a vector; the counterpart of [`Reader`].
#[derive(Debug, Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }
    pub fn u8(&mut self, v: u8) -> &mut Self {
        self.bytes(&[v])
    }
    pub fn u16(&mut self, v: u16) -> &mut Self {
        self.bytes(&v.to_le_bytes())
    }
    pub fn u32(&mut self, v: u32) -> &mut Self {
        self.bytes(&v.to_le_bytes())
    }
    pub fn u64(&mut self, v: u64) -> &mut Self {
        self.bytes(&v.to_le_bytes())
    }
    /// A text with a u16 length before it; cut at a character when it is longer than that can tell.
    pub fn text(&mut self, text: &str) -> &mut Self {
        let cut = text.floor_char_boundary(usize::from(u16::MAX));
        self.u16(u16::try_from(cut).expect("cut to a u16")).bytes(&text.as_bytes()[..cut])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_checked_before_anything_is_taken() {
        let mut w = Writer::default();
        w.u32(3).bytes(&[0; 8]);
        assert_eq!(Reader::new(&w.0).count("rows", 4, 10), Err(Malformed::Short { wanted: 12, left: 8 }));
        assert_eq!(
            Reader::new(&w.0).count("rows", 1, 2),
            Err(Malformed::TooMany { what: "rows", value: 3, limit: 2 })
        );
        assert_eq!(Reader::new(&w.0).count("rows", 2, 3), Ok(3));
    }

    #[test]
    fn what_is_left_over_is_an_error() {
        let mut r = Reader::new(&[1, 2]);
        assert_eq!(r.u8(), Ok(1));
        assert_eq!(r.end(), Err(Malformed::Trailing(1)));
    }
}
