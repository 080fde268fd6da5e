//! Memory that two processes share, through which one sends messages to the other.
//!
//! The memory is of the sender, which hands it over as a descriptor and cannot make it smaller any more, so that to touch it is
//! no fault. (Holes it can make, which the system fills when they are touched, and ends a process for only where it has no
//! memory left.) Neither believes what the other writes: each keeps its own place by itself, and whoever finds the other at a
//! place where it cannot be has done with it. The pages of the messages are mapped twice, one time behind the other, so that
//! every message is in one piece.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::{io, ptr};

use super::socket::counted;

/// Bytes of messages, and of what is before each.
const ROOM: usize = 512 << 10;

/// Bytes before them, of which [`Control`] takes a few: a whole page wherever Linux runs.
const CONTROL: usize = 64 << 10;

/// Bytes before a message, which say how long it is.
const LENGTH: usize = 4;

/// What each tells the other, in cache lines of their own.
#[repr(C)]
struct Control {
    /// Bytes that were ever added, of the sender.
    tail: Line<AtomicU64>,
    /// Bytes that were ever taken, of the receiver.
    head: Line<AtomicU64>,
    /// The receiver waits until it is woken, or has not come to look yet.
    is_asleep: Line<AtomicU32>,
    /// The receiver has taken the memory up,
    is_open: AtomicU32,
    /// and takes no more.
    is_closed: AtomicU32,
}

/// Processors fetch two lines at a time.
#[repr(C, align(128))]
struct Line<T>(T);

/// There is no room for a message, or the other end is not what it should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Refused {
    /// Until some are taken.
    Full,
    /// For ever.
    Broken,
}

/// The memory, mapped.
struct Mapping {
    base: *mut u8,
}

// SAFETY: the memory is of the whole process; what is shared of it, `Control`, is atomic.
unsafe impl Send for Mapping {}

impl Mapping {
    const LEN: usize = CONTROL + 2 * ROOM;

    /// # Safety
    /// The memory is of [`CONTROL`] and [`ROOM`] bytes, and does not get smaller.
    unsafe fn new(memory: BorrowedFd<'_>) -> io::Result<Mapping> {
        let map = |at: *mut u8, len, protection, flags, fd, offset: usize| {
            // SAFETY: the arguments below are a place of the kernel's choice, or within the one that it chose for this mapping.
            let mapped = unsafe { libc::mmap(at.cast(), len, protection, flags, fd, offset as libc::off_t) };
            if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(mapped.cast::<u8>()) }
        };
        let (both, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        let none = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let mapping = Mapping { base: map(ptr::null_mut(), Self::LEN, libc::PROT_NONE, none, -1, 0)? };
        let second = mapping.base.wrapping_add(CONTROL + ROOM);
        map(mapping.base, CONTROL + ROOM, both, shared, memory.as_raw_fd(), 0)?;
        map(second, ROOM, both, shared, memory.as_raw_fd(), CONTROL)?;
        // A child of this process is no end of it.
        // SAFETY: all of it was mapped here.
        unsafe { libc::madvise(mapping.base.cast(), Self::LEN, libc::MADV_DONTFORK) };
        Ok(mapping)
    }

    fn control(&self) -> &Control {
        // SAFETY: it is at the beginning of the mapping, which is aligned to a page and stays as long as this; any bytes are
        // values of it, all of which are atomic, so that the other end may write to it.
        unsafe { &*self.base.cast::<Control>() }
    }

    /// From where the byte of that number is, [`ROOM`] bytes are in one piece.
    fn place(&self, number: u64) -> *mut u8 {
        self.base.wrapping_add(CONTROL + (number % ROOM as u64) as usize)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped by `new`, is of that length, and nothing borrows from it any more.
        unsafe { libc::munmap(self.base.cast(), Self::LEN) };
    }
}

/// Bytes that a message takes, with what is before it. Each begins at a multiple of 8.
const fn taken(len: usize) -> u64 {
    (LENGTH + len).next_multiple_of(8) as u64
}

/// The end that adds messages.
pub(super) struct Sender {
    mapping: Mapping,
    tail: u64,
    /// As it was seen last.
    head: u64,
}

impl Sender {
    /// With memory of its own, to be handed to the receiver.
    ///
    /// # Errors
    /// The system refuses memory.
    pub(super) fn new() -> io::Result<(Sender, OwnedFd)> {
        let len = (CONTROL + ROOM) as libc::off_t;
        if !may_be_so_long(len) {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        // SAFETY: the name is a C string; the rest are numbers. The memory, which is new, gets its length here and keeps it.
        let (mapping, memory) = unsafe {
            let fd = libc::memfd_create(c"rdma-soft".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            counted(fd)?;
            let memory = OwnedFd::from_raw_fd(fd);
            // All of it is there from now on: to touch memory that the system turns out not to have would end the process.
            counted(libc::fallocate(fd, 0, 0, len))?;
            counted(libc::fcntl(fd, libc::F_ADD_SEALS, SEALS | libc::F_SEAL_SEAL))?;
            (Mapping::new(memory.as_fd())?, memory)
        };
        // Whoever is there may sleep already when this comes to be.
        mapping.control().is_asleep.0.store(1, Ordering::Relaxed);
        Ok((Sender { mapping, tail: 0, head: 0 }, memory))
    }

    /// Adds a message.
    pub(super) fn add(&mut self, message: &[u8]) -> Result<(), Refused> {
        let (control, takes) = (self.mapping.control(), taken(message.len()));
        if self.tail - self.head + takes > ROOM as u64 {
            let head = control.head.0.load(Ordering::Acquire);
            match self.tail.checked_sub(head) {
                Some(used) if used + takes <= ROOM as u64 => self.head = head,
                Some(used) if used <= ROOM as u64 => return Err(Refused::Full),
                _ => return Err(Refused::Broken),
            }
        }
        let place = self.mapping.place(self.tail);
        // SAFETY: from there so many bytes are mapped, in one piece, as the message takes no more than there is room for; they
        // are of nobody's but this end's, as the receiver has said that it is through with them. Should it read them all the
        // same, it gets bytes of messages that are for it, and nothing here depends on them. The place is a multiple of 8.
        unsafe {
            place.cast::<u32>().write_volatile(message.len() as u32);
            place.wrapping_add(LENGTH).copy_from_nonoverlapping(message.as_ptr(), message.len());
        }
        self.tail += takes;
        control.tail.0.store(self.tail, Ordering::Release);
        Ok(())
    }

    /// Whether the receiver has to be woken for what was added.
    pub(super) fn wakes(&self) -> bool {
        let Line(is_asleep) = &self.mapping.control().is_asleep;
        // Either the receiver sees what was added, in `Receiver::sleep`, or it is seen here that it sleeps.
        fence(Ordering::SeqCst);
        is_asleep.load(Ordering::Relaxed) != 0 && is_asleep.swap(0, Ordering::Relaxed) != 0
    }

    /// The receiver could not be woken: it is to be with the next message.
    pub(super) fn sleeps_on(&self) {
        self.mapping.control().is_asleep.0.store(1, Ordering::Relaxed);
    }

    /// Whether there ever was a receiver.
    pub(super) fn was_open(&self) -> bool {
        self.mapping.control().is_open.load(Ordering::Relaxed) != 0
    }

    /// Whether the receiver takes no more.
    pub(super) fn is_closed(&self) -> bool {
        self.mapping.control().is_closed.load(Ordering::Relaxed) != 0
    }
}

/// Whether a file may, as which this memory counts: to make it longer than that would end the process (`setrlimit(2)`).
fn may_be_so_long(len: libc::off_t) -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: it is there to be written.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    result == 0 && limit.rlim_cur >= len as libc::rlim_t
}

/// The end that takes messages.
pub(super) struct Receiver {
    mapping: Mapping,
    head: u64,
    /// This end has asked to be woken.
    is_asleep: bool,
}

/// What the sender cannot do any more to the memory.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

impl Receiver {
    /// Of memory that a sender has handed over.
    ///
    /// # Errors
    /// It is not as [`Sender::new`] makes it.
    pub(super) fn new(memory: BorrowedFd<'_>) -> io::Result<Receiver> {
        let fd = memory.as_raw_fd();
        // First, as only memory has seals: what else it might be could make others wait for how long it is.
        // SAFETY: numbers.
        let seals = unsafe { libc::fcntl(fd, libc::F_GET_SEALS) };
        if seals < 0 || seals & SEALS != SEALS {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: zero is a value of each field.
        let mut what = unsafe { std::mem::zeroed::<libc::stat>() };
        // SAFETY: it is there to be written.
        counted(unsafe { libc::fstat(fd, &raw mut what) })?;
        if !usize::try_from(what.st_size).is_ok_and(|size| size == CONTROL + ROOM) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: it is so long, and is sealed.
        let mapping = unsafe { Mapping::new(memory)? };
        mapping.control().is_open.store(1, Ordering::Relaxed);
        Ok(Receiver { mapping, head: 0, is_asleep: true })
    }

    /// Copies the next message to there: how long it is. `None` where there is none.
    pub(super) fn take(&mut self, to: &mut [u8]) -> Result<Option<usize>, Refused> {
        let control = self.mapping.control();
        let there = control.tail.0.load(Ordering::Acquire).wrapping_sub(self.head);
        if there == 0 {
            return Ok(None);
        }
        let place = self.mapping.place(self.head);
        // SAFETY: it is mapped, and a multiple of 8. It is read one time, as the sender may change it.
        let len = unsafe { place.cast::<u32>().read_volatile() } as usize;
        if there > ROOM as u64 || len > to.len() || taken(len) > there {
            return Err(Refused::Broken);
        }
        // SAFETY: from there so many bytes are mapped, in one piece, as they are no more than there is room for; there is room
        // for them where they go, which is private. A sender that changes them meanwhile makes them any bytes, which is what
        // they are.
        unsafe { to.as_mut_ptr().copy_from_nonoverlapping(place.wrapping_add(LENGTH), len) };
        self.head = self.head.wrapping_add(taken(len));
        control.head.0.store(self.head, Ordering::Release);
        Ok(Some(len))
    }

    /// Whether there is a message, or what the sender says is wrong.
    pub(super) fn has_some(&self) -> bool {
        self.mapping.control().tail.0.load(Ordering::Acquire) != self.head
    }

    /// Asks the sender not to wake this end any more.
    ///
    /// Returns whether it has done so since [`sleep`](Receiver::sleep), or is about to.
    pub(super) fn wake_up(&mut self) -> bool {
        std::mem::take(&mut self.is_asleep) && self.mapping.control().is_asleep.0.swap(0, Ordering::Relaxed) == 0
    }

    /// Has the sender wake this end for the next message: `false` where there is one already.
    ///
    /// Each end writes one word and then reads the other's, with a fence between. The receiver writes that it sleeps and reads
    /// the tail. The sender writes the tail and reads whether the receiver sleeps. At least one of them sees the other's write,
    /// so the receiver never sleeps while a message waits.
    pub(super) fn sleep(&mut self) -> bool {
        self.is_asleep = true;
        self.mapping.control().is_asleep.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        !self.has_some()
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

    fn message(number: usize) -> Vec<u8> {
        (0..number * 7919 % 60_000).map(|at| (at * 31 + number) as u8).collect()
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps shared memory")]
    fn messages_of_any_length_come_whole_and_in_order_between_threads() {
        const COUNT: usize = 3000;
        let (mut sender, mut receiver) = pair();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for number in 0..COUNT {
                    while sender.add(&message(number)) == Err(Refused::Full) {
                        std::thread::yield_now();
                    }
                }
            });
            let mut to = vec![0; 1 << 16];
            for number in 0..COUNT {
                let len = loop {
                    match receiver.take(&mut to).unwrap() {
                        Some(len) => break len,
                        None => std::thread::yield_now(),
                    }
                };
                assert!(to[..len] == message(number), "{number}");
            }
            assert_eq!(receiver.take(&mut to), Ok(None));
        });
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps shared memory")]
    fn what_is_full_takes_more_when_some_was_taken() {
        let (mut sender, mut receiver) = pair();
        let long = vec![7; 60_000];
        let count = (0..).take_while(|_| sender.add(&long).is_ok()).count();
        assert_eq!(count, ROOM / 60_008);
        assert_eq!(sender.add(&long), Err(Refused::Full));
        assert_eq!(receiver.take(&mut vec![0; 60_000]), Ok(Some(60_000)));
        assert_eq!(sender.add(&long), Ok(()));
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps shared memory")]
    fn who_sleeps_is_woken_once() {
        let (mut sender, mut receiver) = pair();
        sender.add(b"a").unwrap();
        assert!(sender.wakes(), "nobody knows that it is awake");
        assert!(!sender.wakes());
        assert!(!receiver.sleep(), "there is a message");
        assert!(sender.wakes() && !sender.wakes());
        assert_eq!(receiver.take(&mut [0; 8]), Ok(Some(1)));
        assert!(receiver.sleep());
        assert!(!sender.is_closed());
        drop(receiver);
        assert!(sender.is_closed());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps shared memory")]
    fn nothing_that_an_end_writes_leads_the_other_astray() {
        let far = [1, 7, ROOM as u64 + 8, u64::MAX, 1 << 63];
        for tail in far {
            let (sender, mut receiver) = pair();
            sender.mapping.control().tail.0.store(tail, Ordering::Release);
            assert_eq!(receiver.take(&mut [0; 64]), Err(Refused::Broken), "{tail}");
        }
        for (len, there) in [(0, 8), (4, 8)] {
            let (sender, mut receiver) = pair();
            // SAFETY: it is mapped.
            unsafe { sender.mapping.place(0).cast::<u32>().write_volatile(len) };
            sender.mapping.control().tail.0.store(there, Ordering::Release);
            assert_eq!(receiver.take(&mut [0; 64]), Ok(Some(len as usize)));
        }
        for len in [5, 64, 65, u32::MAX, u32::MAX - 3] {
            let (sender, mut receiver) = pair();
            // SAFETY: it is mapped.
            unsafe { sender.mapping.place(0).cast::<u32>().write_volatile(len) };
            sender.mapping.control().tail.0.store(8, Ordering::Release);
            assert_eq!(receiver.take(&mut [0; 64]), Err(Refused::Broken), "{len}");
        }
        // Before or behind all that was ever added, or more than there is room for.
        for head in [1, ROOM as u64, 1 << 63, (ROOM as u64 + 8).wrapping_neg()] {
            let (mut sender, receiver) = pair();
            sender.tail = 4 * ROOM as u64;
            receiver.mapping.control().head.0.store(sender.tail.wrapping_add(head), Ordering::Release);
            assert_eq!(sender.add(&[0; 4096]), Err(Refused::Broken), "{head}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it maps shared memory")]
    fn memory_that_may_get_smaller_is_refused() {
        let (_, memory) = Sender::new().unwrap();
        // SAFETY: a number.
        let result = unsafe { libc::ftruncate(memory.as_raw_fd(), 0) };
        assert_eq!(result, -1, "it is sealed");
        // SAFETY: the name is a C string; a new descriptor.
        let unsealed = unsafe {
            let fd = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            assert_eq!(libc::ftruncate(fd, (CONTROL + ROOM) as libc::off_t), 0);
            OwnedFd::from_raw_fd(fd)
        };
        assert!(Receiver::new(unsealed.as_fd()).is_err());
        // SAFETY: a number.
        assert_eq!(unsafe { libc::fcntl(unsealed.as_raw_fd(), libc::F_ADD_SEALS, SEALS) }, 0);
        assert!(Receiver::new(unsealed.as_fd()).is_ok());
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(Receiver::new(file.as_fd()).is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "it starts a process")]
    fn where_files_may_not_be_so_long_there_is_none() {
        const LIMITED: &str = "RDMA_SOFT_TEST_OF_LIMITED_FILES";
        if std::env::var_os(LIMITED).is_some() {
            assert!(Sender::new().is_err());
            return;
        }
        let mut limited = std::process::Command::new("sh");
        limited.args(["-c", "ulimit -f 100 && exec \"$0\" where_files_may_not_be_so_long"]);
        let output = limited.arg(std::env::current_exe().unwrap()).env(LIMITED, "1").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    }
}
