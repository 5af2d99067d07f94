//! The drive's ring: one thread owns io_uring, and every buffer that the kernel may touch, until it says so.
//!
//! Operations come over a channel and a pipe; a read of the pipe is armed in the ring itself, so the thread sleeps in
//! one place and costs nothing while nothing happens. A record is one vectored operation: its header page from our
//! own memory, its payload from or to the shared row. The operation owns both (the row area by a clone of its `Arc`),
//! so the mapping outlives the kernel's use of it whatever happens to those who asked.
//!
//! Operations begin in the order in which they came, as many as fit into [`BYTES`]; the others wait here. Those that
//! lie side by side on the drive and wait together go as one ([`JOINED`]): rows of a prompt are written and read in the
//! order of their positions, so small rows become large transfers without anybody's doing. Rows are not registered with the kernel: a registered vectored operation wants both of its parts in one registered buffer, and
//! a header page is not part of the row area. A header of its own operation would double them. What registering would
//! save is what the kernel takes to find a row's pages: 0.02 to 0.05 CPU seconds per GB where it was measured.
//!
//! Short reads and writes go on where they stopped; moving nothing is an error; "again" is tried again, with a limit.

#![expect(unsafe_code, reason = "the kernel is given addresses, which has no safe form")]

use std::collections::VecDeque;
use std::io::{self, Error, ErrorKind, PipeReader, PipeWriter, Write};
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

use io_uring::{IoUring, opcode, squeue, types};
use nix::libc::iovec;

use super::disk::{Body, Done, Handle, OnDone, Op, TRIES, Verb, is_transient, progress};
use super::hands::thread;

/// Number of the armed read of the pipe; operations are numbered from 0.
const WAKE: u64 = u64::MAX;

/// Bytes that the kernel has at one time. More does not make a drive faster; it makes every row late, and all of them
/// at once, so that no checksum is made beside a transfer. Measured with `spark-kv bench store` on a virtio drive of
/// 1.3 GB/s and two cores that others used too, as parts of the raw path's speed:
///
/// | rows | way | no limit | 32 MiB | 8 MiB |
/// | --- | --- | --- | --- | --- |
/// | 1 MiB | read | 0.75 | 1.01 | 0.81 |
/// | 1 MiB | write | 0.83 | 0.90 | 0.86 |
/// | 6.5 MB | read | 0.57 | 0.96 | 0.96 |
/// | 17.3 MB | read | 0.76 | 0.83 | 0.84 |
/// | 17.3 MB | write | 0.30 | 0.58 | 0.72 |
const BYTES: usize = 32 << 20;

/// Operations that the kernel may have whatever their size.
const FEWEST: usize = 2;

/// Bytes up to which neighbours are joined. A drive reaches its speed with pieces of 1 MiB; with more, a row would wait
/// for its neighbours for nothing.
const JOINED: usize = 1 << 20;

/// The side that hands operations in. The thread ends, after what is in flight, when this is dropped.
#[derive(Debug)]
pub struct Ring {
    queue: Option<mpsc::Sender<Op>>,
    wake: Arc<Wake>,
    thread: Option<JoinHandle<()>>,
}

/// Wakes the thread, at most once per time it sleeps.
#[derive(Debug)]
struct Wake {
    pipe: PipeWriter,
    rung: AtomicBool,
}

impl Wake {
    fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            // Fails only when the thread has ended already, which it does while this side is being dropped.
            let _ = (&self.pipe).write_all(&[1]);
        }
    }
}

impl Ring {
    /// A ring that gives the kernel at most `depth` operations at a time. More of them may be handed in: what waits can
    /// be joined.
    ///
    /// # Errors
    /// When the kernel refuses a ring, or the operations that are needed.
    pub fn start(depth: u32, on_done: OnDone) -> io::Result<Self> {
        let uring = quiet_ring((depth + 2).next_power_of_two())?;
        let mut probe = io_uring::Probe::new();
        uring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Read::CODE, opcode::Readv::CODE, opcode::Writev::CODE, opcode::Fsync::CODE];
        if !needed.iter().all(|&code| probe.is_supported(code)) {
            return Err(Error::new(ErrorKind::Unsupported, "this kernel's io_uring lacks an operation"));
        }
        let (bell, pipe) = io::pipe()?;
        let wake = Arc::new(Wake { pipe, rung: AtomicBool::new(false) });
        let (queue, incoming) = mpsc::channel();
        let flights = Flights(ManuallyDrop::new(Vec::new()));
        let loop_wake = wake.clone();
        let thread = thread("store-ring", move || {
            let wake_buffer = ManuallyDrop::new(Box::new([0_u8; 64]));
            let owner = Owner {
                uring,
                incoming,
                bell,
                wake: loop_wake,
                wake_buffer,
                flights,
                depth: depth as usize,
                free: Vec::new(),
                waiting: VecDeque::new(),
                bytes: 0,
                on_done,
            };
            owner.run();
        })?;
        Ok(Self { queue: Some(queue), wake, thread: Some(thread) })
    }

    pub fn submit(&self, op: Op) {
        let queue = self.queue.as_ref().expect("open until drop");
        queue.send(op).expect("the thread lives as long as this");
        self.wake.ring();
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.queue = None;
        self.wake.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A ring that only its own thread uses, and whose completions are looked at when that thread asks for them: no other
/// thread is interrupted for one. It is off until that thread turns it on. Kernels before 6.1 give an ordinary one.
fn quiet_ring(entries: u32) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_r_disabled().setup_single_issuer().setup_defer_taskrun();
    match builder.build(entries) {
        Err(e) if e.kind() == ErrorKind::InvalidInput => IoUring::builder().setup_r_disabled().build(entries),
        built => built,
    }
}

/// What the kernel has as one operation: one of ours, or some that lie side by side.
struct Flight {
    ops: Vec<Op>,
    /// What is left of heads and bodies. The kernel reads it, so it must not move: it is set before the kernel gets it,
    /// and not touched until it has ended.
    parts: Vec<iovec>,
    len: usize,
    moved: usize,
    tries: u32,
}

/// Operations in flight by number. Never dropped by unwinding: a leak is better than memory that the drive still
/// writes to.
struct Flights(ManuallyDrop<Vec<Option<Flight>>>);

/// Everything the thread owns.
struct Owner {
    uring: IoUring,
    incoming: mpsc::Receiver<Op>,
    bell: PipeReader,
    wake: Arc<Wake>,
    wake_buffer: ManuallyDrop<Box<[u8; 64]>>,
    flights: Flights,
    depth: usize,
    free: Vec<usize>,
    /// Operations that the kernel does not have yet, in the order in which they came.
    waiting: VecDeque<Op>,
    /// Bytes that the kernel has.
    bytes: usize,
    on_done: OnDone,
}

// SAFETY: raw pointers stand only in `parts`, which point into the operation beside them; the owner moves to its
// thread once, with no flight in it.
unsafe impl Send for Flights {}

impl Owner {
    /// Select, apply: until nobody hands in operations any more and none is in flight.
    fn run(mut self) {
        self.uring.submitter().register_enable_rings().expect("it was made turned off");
        self.arm_bell();
        let mut open = true;
        while open || self.in_flight() > 0 || !self.waiting.is_empty() {
            self.sleep();
            let ended: Vec<(u64, i32)> =
                self.uring.completion().map(|c| (c.user_data(), c.result())).collect();
            for (number, result) in ended {
                if number == WAKE {
                    // Cleared before the channel is looked at: whoever comes later rings again.
                    self.wake.rung.store(false, Ordering::Release);
                    self.arm_bell();
                } else {
                    self.apply(number, result);
                }
            }
            loop {
                match self.incoming.try_recv() {
                    Ok(op) => self.waiting.push_back(op),
                    Err(mpsc::TryRecvError::Empty) => break,
                    Err(mpsc::TryRecvError::Disconnected) => {
                        open = false;
                        break;
                    }
                }
            }
            self.begin_waiting();
        }
        // What is still armed reads the pipe into `wake_buffer`, which is leaked with its 64 bytes for that reason.
    }

    fn in_flight(&self) -> usize {
        self.flights.0.len() - self.free.len()
    }

    /// Hands over what is queued and waits for one completion.
    fn sleep(&mut self) {
        match self.uring.submit_and_wait(1) {
            Ok(_) => {}
            // Interrupted, or the completion queue is full: what is there is taken first, then it is tried again.
            Err(e) if is_transient(&e) || e.kind() == ErrorKind::ResourceBusy => {}
            Err(e) => panic!("io_uring_enter: {e}"),
        }
    }

    fn arm_bell(&mut self) {
        let at = self.wake_buffer.as_mut_ptr();
        let length = u32::try_from(self.wake_buffer.len()).expect("64");
        let read = opcode::Read::new(types::Fd(self.bell.as_raw_fd()), at, length).offset(u64::MAX);
        self.push(&read.build().user_data(WAKE));
    }

    /// Begins what waits, as far as there is room for its bytes. Nothing overtakes.
    fn begin_waiting(&mut self) {
        while let Some(op) = self.waiting.front()
            && self.in_flight() < self.depth
            && (self.in_flight() < FEWEST || self.bytes + op.len() <= BYTES)
        {
            let mut ops = vec![self.waiting.pop_front().expect("looked at just now")];
            let mut len = ops[0].len();
            while let Some(next) = self.waiting.front()
                && len + next.len() <= JOINED
                && is_neighbour(&ops[ops.len() - 1], next)
            {
                len += next.len();
                ops.extend(self.waiting.pop_front());
            }
            self.begin(ops);
        }
    }

    fn begin(&mut self, ops: Vec<Op>) {
        let len = ops.iter().map(Op::len).sum();
        self.bytes += len;
        let flight = Flight { parts: Vec::with_capacity(2 * ops.len()), ops, len, moved: 0, tries: 0 };
        let number = self.free.pop().unwrap_or_else(|| {
            self.flights.0.push(None);
            self.flights.0.len() - 1
        });
        self.flights.0[number] = Some(flight);
        self.submit(number);
    }

    /// Queues what is left of a flight.
    fn submit(&mut self, number: usize) {
        let flight = self.flights.0[number].as_mut().expect("a number in use");
        flight.point();
        let Handle::Real(file) = &flight.ops[0].file else { unreachable!("real disks have real files") };
        let fd = types::Fd(file.as_raw_fd());
        let offset = flight.ops[0].offset + flight.moved as u64;
        let (first, count) =
            (flight.parts.as_ptr(), u32::try_from(flight.parts.len()).expect("a few hundred"));
        let entry = match flight.ops[0].verb {
            Verb::Read => opcode::Readv::new(fd, first, count).offset(offset).build(),
            Verb::Write => opcode::Writev::new(fd, first, count).offset(offset).build(),
            Verb::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        };
        self.push(&entry.user_data(number as u64));
    }

    fn push(&mut self, entry: &squeue::Entry) {
        loop {
            // SAFETY: what the entry points to is owned by `flights` (header buffer, row area, boxed parts) or is
            // `wake_buffer`; both stay where they are until the completion is seen, and are leaked, not freed, when
            // this thread unwinds.
            if unsafe { self.uring.submission().push(entry) }.is_ok() {
                return;
            }
            if let Err(e) = self.uring.submit()
                && !is_transient(&e)
                && e.kind() != ErrorKind::ResourceBusy
            {
                panic!("io_uring_enter: {e}");
            }
        }
    }

    /// The kernel is through with what it was given of a flight.
    fn apply(&mut self, number: u64, result: i32) {
        let number = usize::try_from(number).expect("a number of ours");
        let flight = self.flights.0[number].as_mut().expect("a number in use");
        let Some(result) = flight.advance(result) else {
            self.submit(number);
            return;
        };
        let Flight { ops, len, .. } = self.flights.0[number].take().expect("looked at above");
        self.free.push(number);
        self.bytes -= len;
        if ops.len() > 1 && result.is_err() {
            // Nobody says which of them it was: each has its own try.
            return ops.into_iter().for_each(|op| self.begin(vec![op]));
        }
        let mut result = Some(result);
        for op in ops {
            (self.on_done)(Done { op, result: result.take().unwrap_or(Ok(())) });
        }
    }
}

/// Whether `next` goes on where `op` ends.
fn is_neighbour(op: &Op, next: &Op) -> bool {
    let (Handle::Real(a), Handle::Real(b)) = (&op.file, &next.file) else { return false };
    let goes_on = next.offset == op.offset + op.len() as u64 && op.len() > 0 && next.len() > 0;
    op.verb == next.verb && op.verb != Verb::Sync && goes_on && Arc::ptr_eq(a, b)
}

impl Flight {
    /// Points `parts` at what is left: no empty ones, as the kernel wants them.
    fn point(&mut self) {
        self.parts.clear();
        let mut skip = self.moved;
        for op in &mut self.ops {
            let body = match &mut op.body {
                Body::None => (std::ptr::null_mut(), 0),
                Body::Row { rows, row, len } => (rows.address(*row), *len),
                Body::Own(buffer) => (buffer.as_mut_ptr(), buffer.len()),
            };
            for (at, len) in [(op.head.as_mut_ptr(), op.head.len()), body] {
                let skipped = skip.min(len);
                skip -= skipped;
                if skipped < len {
                    let iov_base = at.wrapping_add(skipped).cast();
                    self.parts.push(iovec { iov_base, iov_len: len - skipped });
                }
            }
        }
    }

    /// Counts what the kernel moved. `None`: it goes on.
    fn advance(&mut self, result: i32) -> Option<io::Result<()>> {
        let left = self.len - self.moved;
        let got = match usize::try_from(result) {
            Err(_) => {
                let error = Error::from_raw_os_error(-result);
                if !is_transient(&error) {
                    return Some(Err(error));
                }
                0
            }
            Ok(_) if self.ops[0].verb == Verb::Sync => return Some(Ok(())),
            Ok(got) => match progress(self.ops[0].verb, left, got, true) {
                Ok(got) => got,
                Err(e) => return Some(Err(e)),
            },
        };
        self.moved += got;
        self.tries = if got == 0 { self.tries + 1 } else { 0 };
        if got == left {
            return Some(Ok(()));
        }
        (self.tries > TRIES).then(|| Err(Error::new(ErrorKind::TimedOut, "the drive does not get on")))
    }
}

#[cfg(test)]
mod tests {
    use super::super::format::PAGE;
    use super::*;
    use parking_lot::Mutex;
    use std::os::unix::fs::FileExt;

    fn page(n: usize) -> Vec<u8> {
        (0..PAGE).map(|at| (at * 7 + n * 31) as u8).collect()
    }

    fn read(tag: usize, file: &Arc<std::fs::File>) -> Op {
        let (head, body) = (super::super::disk::Buffer::zeroed(PAGE), Body::None);
        Op {
            tag: tag as u64,
            verb: Verb::Read,
            file: Handle::Real(file.clone()),
            offset: (tag * PAGE) as u64,
            head,
            body,
        }
    }

    /// With one operation at a time everything behind the first waits, and what lies side by side is joined.
    #[test]
    fn neighbours_that_are_joined_end_each_for_itself() {
        const PAGES: usize = 40;
        let file = tempfile::tempfile().unwrap();
        (0..PAGES).for_each(|n| file.write_all_at(&page(n), (n * PAGE) as u64).unwrap());
        let file = Arc::new(file);
        let (sender, ended) = mpsc::channel();
        let sender = Mutex::new(sender);
        let ring = Ring::start(1, Arc::new(move |done| sender.lock().send(done).unwrap())).unwrap();
        // In order, then backwards, then two behind the end.
        let order: Vec<usize> =
            (0..PAGES).chain((0..PAGES).rev()).chain([PAGES - 1, PAGES, PAGES + 1]).collect();
        order.iter().for_each(|&n| ring.submit(read(n, &file)));
        for &n in &order {
            let Done { op, result } = ended.recv().unwrap();
            assert_eq!(op.tag, n as u64, "they end in the order in which they came");
            if n < PAGES {
                result.unwrap();
                assert!(op.head[..] == page(n), "page {n}");
            } else {
                assert_eq!(result.unwrap_err().kind(), ErrorKind::UnexpectedEof, "page {n}");
            }
        }
    }

    #[test]
    fn only_what_goes_on_where_another_ends_is_its_neighbour() {
        let (file, other) =
            (Arc::new(tempfile::tempfile().unwrap()), Arc::new(tempfile::tempfile().unwrap()));
        assert!(is_neighbour(&read(1, &file), &read(2, &file)));
        assert!(
            !is_neighbour(&read(2, &file), &read(1, &file))
                && !is_neighbour(&read(1, &file), &read(3, &file))
        );
        assert!(!is_neighbour(&read(1, &file), &read(2, &other)));
        assert!(!is_neighbour(&read(1, &file), &Op { verb: Verb::Write, ..read(2, &file) }));
    }

    /// The kernel may stop anywhere, at the border of two operations as well as within one.
    #[test]
    fn what_is_left_of_joined_operations_goes_on_where_the_kernel_stopped() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        for moved in [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1] {
            let ops: Vec<_> = (0..3).map(|n| read(n, &file)).collect();
            let starts: Vec<_> = ops.iter().map(|op| op.head.as_ptr().addr()).collect();
            let mut flight = Flight { ops, parts: Vec::new(), len: 3 * PAGE, moved, tries: 0 };
            flight.point();
            assert_eq!(flight.parts.iter().map(|part| part.iov_len).sum::<usize>(), 3 * PAGE - moved);
            assert_eq!(flight.parts[0].iov_base.addr(), starts[moved / PAGE] + moved % PAGE, "{moved}");
        }
    }
}
