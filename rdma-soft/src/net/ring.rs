//! A ring of messages in memory that two processes share. One process sends, the other receives.
//!
//! The sender creates the memory as a sealed `memfd` and passes the descriptor to the receiver. The seals prevent the sender from
//! shrinking the memory, so accesses do not fault. They do not prevent it from punching holes. The kernel fills a hole on access,
//! which fails only when the system is out of memory.
//!
//! Neither side trusts the other. Each side keeps a private copy of its position. It stops using the ring if it finds an impossible
//! position of the other side. The pages of the messages are mapped twice in a row, so that every message is contiguous.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::{io, ptr};

use super::MAX_MESSAGE;
use super::socket::check_neg;
use crate::wire::Data;

/// Bytes of the ring, for messages with their length words.
const CAPACITY: usize = 512 << 10;

/// Bytes before the ring. [`Control`] uses a few of them. The rest aligns the ring to any page size of Linux.
const CONTROL_BYTES: usize = 64 << 10;

/// Free bytes at which a sender resumes after the ring was full. So the two sides alternate less often.
const RESUME: u64 = CAPACITY as u64 / 4;

/// Free bytes at which the receiver wakes a sender that sleeps.
const WAKE: u64 = CAPACITY as u64 / 2;

// The receiver takes messages between the request and the wake-up: see `Sender::arm`.
const _: () = assert!(RESUME + entry_bytes(MAX_MESSAGE) < WAKE);

/// Bytes of the length before each message.
const LENGTH_BYTES: usize = 4;

/// State shared by both sides, in separate cache lines.
#[repr(C)]
struct Control {
    /// Total bytes added by the sender.
    tail: Line<AtomicU64>,
    head: Line<Head>,
    /// The receiver wants to be woken for the next message. Initially set.
    needs_wakeup: Line<AtomicU32>,
    /// The receiver has mapped the memory.
    is_opened: AtomicU32,
    /// The receiver takes no more messages.
    is_closed: AtomicU32,
}

/// The receiver's cache line.
#[repr(C)]
struct Head {
    /// Total bytes taken by the receiver.
    position: AtomicU64,
    /// The sender wants to be woken when [`WAKE`] bytes are free.
    needs_wakeup: AtomicU32,
}

/// Avoids false sharing. Processors prefetch pairs of 64-byte cache lines.
#[repr(C, align(128))]
struct Line<T>(T);

/// Why a message was not added or taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RingError {
    /// There is no room until the receiver takes messages.
    Full,
    /// The other side has written an invalid position or length.
    Broken,
}

/// A mapping of the shared memory.
struct Mapping {
    base: *mut u8,
}

// SAFETY: the mapping belongs to the whole process. `Control`, its shared part, is atomic.
unsafe impl Send for Mapping {}

impl Mapping {
    const LEN: usize = CONTROL_BYTES + 2 * CAPACITY;

    /// # Safety
    /// The memory has [`CONTROL_BYTES`] + [`CAPACITY`] bytes and does not shrink.
    unsafe fn new(memory: BorrowedFd<'_>) -> io::Result<Mapping> {
        let map = |at: *mut u8, len, protection, flags, fd, offset: usize| {
            // SAFETY: the calls below pass an address that the kernel chooses, or one within the mapping that it has chosen.
            let mapped = unsafe { libc::mmap(at.cast(), len, protection, flags, fd, offset as libc::off_t) };
            if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(mapped.cast::<u8>()) }
        };
        let (both, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        let none = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let mapping = Mapping { base: map(ptr::null_mut(), Self::LEN, libc::PROT_NONE, none, -1, 0)? };
        let second = mapping.base.wrapping_add(CONTROL_BYTES + CAPACITY);
        map(mapping.base, CONTROL_BYTES + CAPACITY, both, shared, memory.as_raw_fd(), 0)?;
        map(second, CAPACITY, both, shared, memory.as_raw_fd(), CONTROL_BYTES)?;
        // A child process must not use the ring.
        // SAFETY: the range is the mapping that was made above.
        unsafe { libc::madvise(mapping.base.cast(), Self::LEN, libc::MADV_DONTFORK) };
        Ok(mapping)
    }

    fn control(&self) -> &Control {
        // SAFETY: the structure is at the start of the mapping, which is page-aligned and lives as long as `self`. All fields
        // are atomic and any bytes are valid, so the other process may write to it.
        unsafe { &*self.base.cast::<Control>() }
    }

    /// Returns a pointer to a position in the ring. The next [`CAPACITY`] bytes are contiguous.
    fn ptr_at(&self, position: u64) -> *mut u8 {
        self.base.wrapping_add(CONTROL_BYTES + (position % CAPACITY as u64) as usize)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` has mapped this range, and no reference into it remains.
        unsafe { libc::munmap(self.base.cast(), Self::LEN) };
    }
}

/// Bytes that a message takes, including its length. Each starts at a multiple of 8.
const fn entry_bytes(len: usize) -> u64 {
    (LENGTH_BYTES + len).next_multiple_of(8) as u64
}

/// The side that adds messages.
pub(super) struct Sender {
    mapping: Mapping,
    tail: u64,
    /// Last valid value of the receiver's position.
    head: u64,
    /// Length of the message for which there is room.
    reserved: usize,
    /// Whether the last message found the ring full.
    was_full: bool,
    has_moved: bool,
}

impl Sender {
    /// Creates a ring, and the descriptor to pass to the receiver.
    ///
    /// # Errors
    /// The system refuses the memory.
    pub(super) fn new() -> io::Result<(Sender, OwnedFd)> {
        let len = (CONTROL_BYTES + CAPACITY) as libc::off_t;
        if !is_within_file_limit(len) {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        // SAFETY: the name is a C string, and the other arguments are numbers. The memory is new, gets its size here and keeps
        // it.
        let (mapping, memory) = unsafe {
            let fd = libc::memfd_create(c"rdma-soft".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            check_neg(fd)?;
            let memory = OwnedFd::from_raw_fd(fd);
            // Allocate all pages now. Accessing memory that the system does not have would kill the process.
            check_neg(libc::fallocate(fd, 0, 0, len))?;
            check_neg(libc::fcntl(fd, libc::F_ADD_SEALS, SEALS | libc::F_SEAL_SEAL))?;
            (Mapping::new(memory.as_fd())?, memory)
        };
        // The receiver may already sleep when it maps the ring.
        mapping.control().needs_wakeup.0.store(1, Ordering::Relaxed);
        Ok((Sender { mapping, tail: 0, head: 0, reserved: 0, was_full: false, has_moved: false }, memory))
    }

    /// Adds a message.
    pub(super) fn add(&mut self, message: &[u8]) -> Result<(), RingError> {
        let to = self.reserve(message.len())?;
        // SAFETY: the memory is valid for writes of this length. It is never borrowed, so it does not overlap the message.
        unsafe { to.copy_from_nonoverlapping(message.as_ptr(), message.len()) };
        self.commit(message.len());
        Ok(())
    }

    /// Makes room for the next message, or for more of it, and returns its memory. [`commit`](Sender::commit) adds it.
    ///
    /// Until then, `len` bytes may be written there. Bytes that were written before stay. The memory exists as long as this value.
    /// After a full ring, a message has room only when [`RESUME`] bytes are free.
    pub(super) fn reserve(&mut self, len: usize) -> Result<*mut u8, RingError> {
        let needed = if self.was_full { entry_bytes(len).max(RESUME) } else { entry_bytes(len) };
        if !self.has_room(needed) {
            self.update_head()?;
            self.was_full = !self.has_room(needed);
            if self.was_full {
                return Err(RingError::Full);
            }
        }
        self.reserved = self.reserved.max(len);
        // The message fits in the free part of the ring, which is contiguous. The receiver has released these bytes. It may read
        // or write them nevertheless: they are bytes of messages for itself, and this side never reads them.
        Ok(self.mapping.ptr_at(self.tail).wrapping_add(LENGTH_BYTES))
    }

    fn has_room(&self, needed: u64) -> bool {
        self.tail - self.head + needed <= CAPACITY as u64
    }

    /// Reads the position of the receiver.
    fn update_head(&mut self) -> Result<(), RingError> {
        let head = self.mapping.control().head.0.position.load(Ordering::Acquire);
        let is_possible = self.tail.checked_sub(head).is_some_and(|used| used <= CAPACITY as u64);
        if !is_possible {
            return Err(RingError::Broken);
        }
        self.has_moved |= head != self.head;
        self.head = head;
        Ok(())
    }

    /// Whether the receiver has taken a message since the last call, as far as this side has looked.
    pub(super) fn take_moved(&mut self) -> bool {
        std::mem::take(&mut self.has_moved)
    }

    /// Asks the receiver to wake this side when [`WAKE`] bytes are free. Returns `false` if a full ring has room again.
    ///
    /// The receiver writes its position and reads the request without a fence, which each message would pay for. So it may miss a
    /// request that is made at the same time. Less than [`RESUME`] is free then. So it takes further messages before [`WAKE`] is
    /// free, and reads the request after each.
    pub(super) fn arm(&mut self) -> bool {
        self.mapping.control().head.0.needs_wakeup.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // The next message finds that a ring is broken.
        let is_full = self.update_head().is_ok() && !self.has_room(RESUME);
        if !is_full {
            self.mapping.control().head.0.needs_wakeup.store(0, Ordering::Relaxed);
        }
        is_full
    }

    /// Adds the message of `len` bytes whose memory was [reserved](Sender::reserve).
    ///
    /// # Panics
    /// Fewer bytes are reserved.
    pub(super) fn commit(&mut self, len: usize) {
        assert!(len <= self.reserved, "{len} bytes are to be added, and {} are reserved", self.reserved);
        // SAFETY: the entry is within the mapping, aligned to 8 bytes, and reserved.
        unsafe { self.mapping.ptr_at(self.tail).cast::<u32>().write_volatile(len as u32) };
        self.tail += entry_bytes(len);
        self.reserved = 0;
        self.mapping.control().tail.0.store(self.tail, Ordering::Release);
    }

    /// Whether the receiver has taken all messages. `false` if its position is invalid.
    pub(super) fn is_empty(&self) -> bool {
        self.mapping.control().head.0.position.load(Ordering::Acquire) == self.tail
    }

    /// Whether the receiver must be woken for the added messages. Clears the request.
    pub(super) fn take_wakeup(&self) -> bool {
        let Line(needs_wakeup) = &self.mapping.control().needs_wakeup;
        // Pairs with the fence in `Receiver::arm`: either the receiver sees the message, or this side sees the request.
        fence(Ordering::SeqCst);
        needs_wakeup.load(Ordering::Relaxed) != 0 && needs_wakeup.swap(0, Ordering::Relaxed) != 0
    }

    /// Whether the receiver has ever mapped the ring.
    pub(super) fn was_opened(&self) -> bool {
        self.mapping.control().is_opened.load(Ordering::Relaxed) != 0
    }

    /// Whether the receiver takes no more messages.
    pub(super) fn is_closed(&self) -> bool {
        self.mapping.control().is_closed.load(Ordering::Relaxed) != 0
    }
}

/// Whether `RLIMIT_FSIZE` permits a file of this size. Exceeding it raises `SIGXFSZ` (`setrlimit(2)`).
fn is_within_file_limit(len: libc::off_t) -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for writes.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    result == 0 && limit.rlim_cur >= len as libc::rlim_t
}

/// The side that takes messages.
pub(super) struct Receiver {
    mapping: Mapping,
    head: u64,
    /// Whether this side has asked to be woken.
    needs_wakeup: bool,
}

/// Seals of the memory: its size is fixed.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

impl Receiver {
    /// Maps the memory of a sender.
    ///
    /// # Errors
    /// The memory is not as [`Sender::new`] creates it.
    pub(super) fn new(memory: BorrowedFd<'_>) -> io::Result<Receiver> {
        let fd = memory.as_raw_fd();
        // Check the seals first, because only memory has them. `fstat` of another kind of file could block.
        // SAFETY: the arguments are numbers.
        let seals = unsafe { libc::fcntl(fd, libc::F_GET_SEALS) };
        if seals < 0 || seals & SEALS != SEALS {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: all fields may be zero.
        let mut stat = unsafe { std::mem::zeroed::<libc::stat>() };
        // SAFETY: `stat` is valid for writes.
        check_neg(unsafe { libc::fstat(fd, &raw mut stat) })?;
        if !usize::try_from(stat.st_size).is_ok_and(|size| size == CONTROL_BYTES + CAPACITY) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: the size was checked above, and the seals keep it.
        let mapping = unsafe { Mapping::new(memory)? };
        mapping.control().is_opened.store(1, Ordering::Relaxed);
        Ok(Receiver { mapping, head: 0, needs_wakeup: true })
    }

    /// Passes the next message to `handle`, and then frees its room. Returns `None` if there is no message.
    ///
    /// The sender may write to the message meanwhile.
    #[inline]
    pub(super) fn take<R>(&mut self, handle: impl FnOnce(Data<'_>) -> R) -> Result<Option<R>, RingError> {
        let control = self.mapping.control();
        let available = control.tail.0.load(Ordering::Acquire).wrapping_sub(self.head);
        if available == 0 {
            return Ok(None);
        }
        let entry = self.mapping.ptr_at(self.head);
        // SAFETY: the address is mapped and aligned to 8 bytes. The value is read only once, because the sender may change it.
        let len = unsafe { entry.cast::<u32>().read_volatile() } as usize;
        let start = NonNull::new(entry.wrapping_add(LENGTH_BYTES)).ok_or(RingError::Broken)?;
        if available > CAPACITY as u64 || len > MAX_MESSAGE || entry_bytes(len) > available {
            return Err(RingError::Broken);
        }
        // In advance, so that a message whose handling panics is not handled again.
        self.head = self.head.wrapping_add(entry_bytes(len));
        // SAFETY: the checks above keep the range within the ring, where it is contiguous. The mapping lives longer than this call,
        // and `handle` cannot keep the data, whose lifetime it does not know. This process writes to a ring only while it holds the
        // lock of the device. The caller holds it, and `handle` writes to no ring.
        let handled = handle(unsafe { Data::from_raw(start, len) });
        control.head.0.position.store(self.head, Ordering::Release);
        Ok(Some(handled))
    }

    /// Whether the sender must be woken, because there is room. Clears its request.
    pub(super) fn take_wakeup(&self) -> bool {
        let control = self.mapping.control();
        let Line(Head { needs_wakeup, .. }) = &control.head;
        // The sender may have added messages while others were handled.
        let used = || control.tail.0.load(Ordering::Relaxed).wrapping_sub(self.head);
        needs_wakeup.load(Ordering::Relaxed) != 0
            && (CAPACITY as u64).saturating_sub(used()) >= WAKE
            && needs_wakeup.swap(0, Ordering::Relaxed) != 0
    }

    /// Bytes of the ring that were taken so far.
    pub(super) fn position(&self) -> u64 {
        self.head
    }

    /// Whether there is a message. Also true if the sender's position is invalid.
    pub(super) fn has_message(&self) -> bool {
        self.mapping.control().tail.0.load(Ordering::Acquire) != self.head
    }

    /// Cancels the request to be woken.
    ///
    /// Returns whether the sender has woken this side since [`arm`](Receiver::arm), or is about to.
    pub(super) fn disarm(&mut self) -> bool {
        std::mem::take(&mut self.needs_wakeup) && self.mapping.control().needs_wakeup.0.swap(0, Ordering::Relaxed) == 0
    }

    /// Whether the sender has woken this side since [`arm`](Receiver::arm), or is about to.
    pub(super) fn was_woken(&self) -> bool {
        self.needs_wakeup && self.mapping.control().needs_wakeup.0.load(Ordering::Relaxed) == 0
    }

    /// Asks the sender to wake this side for the next message. Returns `false` if there is one already.
    ///
    /// Each side writes one word and then reads the other's, with a fence in between. The receiver writes the request and reads
    /// the tail. The sender writes the tail and reads the request. At least one of them sees the other's write, so the receiver
    /// never sleeps while a message is waiting.
    pub(super) fn arm(&mut self) -> bool {
        self.needs_wakeup = true;
        self.mapping.control().needs_wakeup.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        !self.has_message()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.mapping.control().is_closed.store(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Sender, Receiver) {
        let (sender, memory) = Sender::new().unwrap();
        let receiver = Receiver::new(memory.as_fd()).unwrap();
        (sender, receiver)
    }

    fn length_of(message: Data<'_>) -> usize {
        message.len()
    }

    fn message(number: usize) -> Vec<u8> {
        (0..number * 7919 % 60_000).map(|at| (at * 31 + number) as u8).collect()
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps shared memory")]
    fn messages_of_any_length_arrive_whole_and_in_order_between_threads() {
        const COUNT: usize = 3000;
        let (mut sender, mut receiver) = pair();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for number in 0..COUNT {
                    while sender.add(&message(number)) == Err(RingError::Full) {
                        std::thread::yield_now();
                    }
                }
            });
            for number in 0..COUNT {
                while receiver.take(|taken| assert!(taken.to_vec() == message(number), "{number}")) == Ok(None) {
                    std::thread::yield_now();
                }
            }
            assert_eq!(receiver.take(length_of), Ok(None));
        });
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps shared memory")]
    fn a_message_that_is_written_in_parts_arrives_when_it_is_committed() {
        let (mut sender, mut receiver) = pair();
        for round in 0..2_u8 {
            for len in 1..=3 {
                let memory = sender.reserve(len).unwrap();
                // SAFETY: the memory has this length.
                unsafe { memory.add(len - 1).write(round + len as u8) };
                assert_eq!(receiver.take(length_of), Ok(None));
            }
            sender.commit(3);
            assert_eq!(receiver.take(|taken| taken.to_vec()), Ok(Some([1, 2, 3].map(|byte| round + byte).to_vec())));
        }
        assert_eq!(sender.reserve(CAPACITY), Err(RingError::Full));
        sender.reserve(3).unwrap();
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| sender.commit(4))).is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps shared memory")]
    fn a_full_ring_accepts_messages_again_when_a_quarter_is_free() {
        let (mut sender, mut receiver) = pair();
        let long = vec![7; 60_000];
        let count = (0..).take_while(|_| sender.add(&long).is_ok()).count();
        assert_eq!(count, CAPACITY / 60_008);
        let mut free = CAPACITY - count * 60_008;
        while free < CAPACITY / 4 {
            assert_eq!([sender.add(&long), sender.add(&[1])], [Err(RingError::Full); 2]);
            let taken = receiver.take(|message| {
                assert_eq!(sender.add(&long), Err(RingError::Full), "the message is still being handled");
                message.len()
            });
            assert_eq!(taken, Ok(Some(60_000)));
            free += 60_008;
        }
        assert_eq!([sender.add(&long), sender.add(&[1])], [Ok(()); 2]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps shared memory")]
    fn an_armed_receiver_is_woken_once() {
        let (mut sender, mut receiver) = pair();
        assert!(sender.is_empty());
        sender.add(b"a").unwrap();
        assert!(!sender.is_empty());
        assert!(sender.take_wakeup(), "a new ring requests a wake-up");
        assert!(!sender.take_wakeup());
        assert!(!receiver.arm(), "a message is waiting");
        assert!(sender.take_wakeup() && !sender.take_wakeup());
        assert_eq!(receiver.take(length_of), Ok(Some(1)));
        assert!(sender.is_empty() && receiver.arm());
        assert!(!sender.is_closed());
        drop(receiver);
        assert!(sender.is_closed());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps shared memory")]
    fn a_sender_that_sleeps_is_woken_once_when_half_of_the_ring_is_free() {
        let (mut sender, mut receiver) = pair();
        let message = [0; 60_000];
        for is_armed in [true, false] {
            let mut count = 0;
            while sender.add(&message).is_ok() {
                count += 1;
            }
            assert!(!is_armed || sender.arm());
            for left in (0..count).rev() {
                assert_eq!(receiver.take(length_of), Ok(Some(message.len())));
                let is_due = is_armed && left == CAPACITY / 2 / message.len();
                assert_eq!(receiver.take_wakeup(), is_due, "{left} are left");
            }
            assert_eq!(sender.add(&[0]), Ok(()));
            assert_eq!(receiver.take(length_of), Ok(Some(1)));
        }
        assert!(!sender.arm(), "there is room");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps shared memory")]
    fn invalid_positions_and_lengths_are_rejected() {
        let far = [1, 7, CAPACITY as u64 + 8, u64::MAX, 1 << 63];
        for tail in far {
            let (sender, mut receiver) = pair();
            sender.mapping.control().tail.0.store(tail, Ordering::Release);
            assert_eq!(receiver.take(length_of), Err(RingError::Broken), "{tail}");
        }
        for (len, available) in [(0, 8), (4, 8)] {
            let (sender, mut receiver) = pair();
            // SAFETY: the entry is mapped.
            unsafe { sender.mapping.ptr_at(0).cast::<u32>().write_volatile(len) };
            sender.mapping.control().tail.0.store(available, Ordering::Release);
            assert_eq!(receiver.take(length_of), Ok(Some(len as usize)));
        }
        let longest = MAX_MESSAGE as u32;
        for (len, available) in
            [(5, 8), (64, 8), (longest + 1, CAPACITY as u64), (u32::MAX, 8), (u32::MAX - 3, CAPACITY as u64)]
        {
            let (sender, mut receiver) = pair();
            // SAFETY: the entry is mapped.
            unsafe { sender.mapping.ptr_at(0).cast::<u32>().write_volatile(len) };
            sender.mapping.control().tail.0.store(available, Ordering::Release);
            assert_eq!(receiver.take(length_of), Err(RingError::Broken), "{len}");
        }
        // Positions before the tail's ring or after the tail.
        for head in [1, CAPACITY as u64, 1 << 63, (CAPACITY as u64 + 8).wrapping_neg()] {
            let (mut sender, receiver) = pair();
            sender.tail = 4 * CAPACITY as u64;
            receiver.mapping.control().head.0.position.store(sender.tail.wrapping_add(head), Ordering::Release);
            assert_eq!(sender.add(&[0; 4096]), Err(RingError::Broken), "{head}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps shared memory")]
    fn memory_that_can_shrink_is_rejected() {
        let (_, memory) = Sender::new().unwrap();
        // SAFETY: the arguments are numbers.
        let result = unsafe { libc::ftruncate(memory.as_raw_fd(), 0) };
        assert_eq!(result, -1, "the memory is sealed");
        // SAFETY: the name is a C string, and the descriptor is new.
        let unsealed = unsafe {
            let fd = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            assert_eq!(libc::ftruncate(fd, (CONTROL_BYTES + CAPACITY) as libc::off_t), 0);
            OwnedFd::from_raw_fd(fd)
        };
        assert!(Receiver::new(unsealed.as_fd()).is_err());
        // SAFETY: the arguments are numbers.
        assert_eq!(unsafe { libc::fcntl(unsealed.as_raw_fd(), libc::F_ADD_SEALS, SEALS) }, 0);
        assert!(Receiver::new(unsealed.as_fd()).is_ok());
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(Receiver::new(file.as_fd()).is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it starts a process")]
    fn a_file_size_limit_prevents_a_ring() {
        const LIMITED: &str = "RDMA_SOFT_TEST_OF_LIMITED_FILES";
        if std::env::var_os(LIMITED).is_some() {
            assert!(Sender::new().is_err());
            return;
        }
        let mut limited = std::process::Command::new("sh");
        limited.args(["-c", "ulimit -f 100 && exec \"$0\" a_file_size_limit"]);
        limited.arg(std::env::current_exe().unwrap()).env(LIMITED, "1");
        let output = crate::net::tests::output(&mut limited).unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    }
}
