//! Bytes with one descriptor over a Unix socket, and frames out of a stream of bytes.
//!
//! The engine hands its row area to the node and the node its lookup table to the engine (see [`super::frame`]).
//! A descriptor arrives with the first byte of the bytes it was sent with. Whoever sends several, or more than the
//! kernel would deliver, is refused: all of them are closed and nothing is leaked.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use super::codec::Malformed;
use super::frame::frame_length;

/// Descriptors that one receive makes room for: one is wanted, the rest are seen in order to be refused.
const ROOM: usize = 4;

/// Sends the beginning of `bytes`, and `fd` with its first byte. Returns how many bytes went.
pub fn send_with(socket: impl AsFd, bytes: &[u8], fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("no room for one descriptor"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?)
}

/// Receives what is there, at most `buffer`, and the descriptor that came with it. No bytes means the end.
///
/// # Errors
/// `WouldBlock` when nothing is there; `InvalidData` when more than one descriptor came.
pub fn receive_with(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ROOM))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    let mut fds = Vec::with_capacity(ROOM);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if fds.len() > 1 || got.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "more than one descriptor in one message"));
    }
    Ok((got.bytes, fds.pop()))
}

/// Collects bytes and gives whole frames. Holds at most one frame and what one read added to it.
#[derive(Debug, Default)]
pub struct Inbox {
    bytes: Vec<u8>,
    /// Bytes at the front that were given out already.
    taken: usize,
}

impl Inbox {
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.taken > 0 {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Kind and body of the next frame, when all of it is here.
    pub fn frame(&mut self) -> Result<Option<&[u8]>, Malformed> {
        let Some((head, rest)) = self.bytes[self.taken..].split_first_chunk::<4>() else { return Ok(None) };
        let length = frame_length(*head)?;
        if rest.len() < length {
            return Ok(None);
        }
        let from = self.taken + 4;
        self.taken = from + length;
        Ok(Some(&self.bytes[from..self.taken]))
    }

    /// Whether a frame has begun that is not whole.
    pub fn in_the_middle(&self) -> bool {
        self.bytes.len() > self.taken
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::super::shm::Mapping;
    use super::*;

    #[test]
    fn a_descriptor_arrives_with_its_bytes_and_is_the_same_memory() {
        let (here, there) = UnixStream::pair().unwrap();
        let (map, fd) = Mapping::anonymous("test", 4096).unwrap();
        assert_eq!(send_with(&here, b"hello", fd.as_fd()).unwrap(), 5);
        let mut buffer = [0; 16];
        let (n, got) = receive_with(&there, &mut buffer).unwrap();
        assert_eq!(&buffer[..n], b"hello");
        map.store(1, 42);
        assert_eq!(Mapping::of(&got.unwrap(), 4096).unwrap().load(1), 42);
    }

    #[test]
    fn nothing_is_awaited_and_the_end_is_no_bytes() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut buffer = [0; 16];
        assert_eq!(receive_with(&there, &mut buffer).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(here);
        assert_eq!(receive_with(&there, &mut buffer).unwrap().0, 0);
    }

    #[test]
    fn several_descriptors_are_refused() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [here.as_fd(), there.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        rustix::net::sendmsg(&here, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
        let mut buffer = [0; 16];
        assert_eq!(receive_with(&there, &mut buffer).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn frames_come_out_whole_however_the_bytes_arrive() {
        let stream: Vec<u8> = [&[3, 0, 0, 0, 9, 8, 7][..], &[1, 0, 0, 0, 5], &[2, 0, 0, 0, 1, 2]].concat();
        for step in 1..stream.len() {
            let mut inbox = Inbox::default();
            let mut frames = Vec::new();
            for piece in stream.chunks(step) {
                inbox.feed(piece);
                while let Some(frame) = inbox.frame().unwrap() {
                    frames.push(frame.to_vec());
                }
            }
            assert_eq!(frames, [vec![9, 8, 7], vec![5], vec![1, 2]]);
            assert!(!inbox.in_the_middle());
        }
    }

    #[test]
    fn a_length_without_bound_ends_it() {
        let mut inbox = Inbox::default();
        inbox.feed(&[0xff; 8]);
        assert!(inbox.frame().is_err());
    }
}
