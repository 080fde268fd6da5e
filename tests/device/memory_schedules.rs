//! Random schedules of memory in the safe API: registered, cut, sent, dropped in flight, taken back, unmapped, and inherited by a
//! child. Each message has the bytes that its memory had when it was sent.
//!
//! `RDMA_MEMORY_SCHEDULES` is the number of schedules, and `RDMA_MEMORY_FIRST_SCHEDULE` the first seed. `cargo xtask soak` runs
//! ten thousand under the checker of soft0.

use std::collections::VecDeque;

use memmap2::{Mmap, MmapMut};
use rdma_pool::{Budget, Pool};
use rdma_safe::mr::{Piece, ReclaimError, ReclaimReason, SharedBuffer};
use rdma_safe::{Buffer, Completion, Endpoint, ProtectionDomain};

use crate::forks::in_a_fork;
use crate::support::child::in_own_process;
use crate::support::link::connected;
use crate::support::random::Random;
use crate::support::{DEADLINE, Rdma, device, pattern};

const STEPS: u64 = 40;
const SOURCES: usize = 3;
/// Largest message in bytes.
const LEN: u64 = 3000;
/// Bytes of the memory for receives, from which a part is cut for each message.
const RECEIVES: usize = 40_000;
/// Messages in flight.
const DEPTH: usize = 8;

/// Memory of the program.
enum Memory {
    Vec(Vec<u8>),
    /// Dropping it unmaps it.
    Map(Mmap),
}

impl Memory {
    fn new(is_mapped: bool, bytes: &[u8]) -> Memory {
        if is_mapped {
            let mut map = MmapMut::map_anon(bytes.len()).unwrap();
            map.copy_from_slice(bytes);
            Memory::Map(map.make_read_only().unwrap())
        } else {
            Memory::Vec(bytes.to_vec())
        }
    }

    fn share(self, pd: &ProtectionDomain) -> SharedBuffer {
        match self {
            Memory::Vec(vec) => pd.share(vec).unwrap(),
            Memory::Map(map) => pd.share(map).unwrap(),
        }
    }

    /// Takes memory back, which is a mapping or not.
    fn take(part: SharedBuffer, is_mapped: bool) -> Result<Memory, ReclaimError<SharedBuffer>> {
        match is_mapped {
            true => part.into_memory().map(Memory::Map),
            false => part.into_memory().map(Memory::Vec),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Memory::Vec(vec) => vec,
            Memory::Map(map) => map,
        }
    }
}

/// Memory that is registered while it has parts or is in flight.
struct Source {
    bytes: Vec<u8>,
    is_mapped: bool,
    parts: Vec<SharedBuffer>,
    in_flight: usize,
}

struct Schedule {
    pd: ProtectionDomain,
    pool: Pool,
    ends: (Endpoint, Endpoint),
    sources: Vec<Source>,
    /// Cut from one registered `Vec`.
    receives: Vec<Buffer>,
    /// The source, if it is one, and the bytes of each message in flight.
    sent: VecDeque<(Option<usize>, Vec<u8>)>,
    random: Random,
    next_pattern: u64,
    context: String,
}

impl Schedule {
    fn new(rdma: &Rdma) -> Schedule {
        let pd = rdma.pd();
        let ends = connected(rdma.endpoint(&pd).send_depth(DEPTH as u32).recv_depth(DEPTH as u32));
        let source = || Source { bytes: Vec::new(), is_mapped: false, parts: Vec::new(), in_flight: 0 };
        Schedule {
            pool: Pool::builder(&pd).common(1 << 16).step(1 << 16).huge_pages(false).build().unwrap(),
            receives: vec![pd.register(vec![0; RECEIVES]).unwrap()],
            sources: std::iter::repeat_with(source).take(SOURCES).collect(),
            sent: VecDeque::new(),
            random: Random::new(0),
            next_pattern: 0,
            context: String::new(),
            pd,
            ends,
        }
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random.below(limit as u64) as usize
    }

    fn new_bytes(&mut self) -> Vec<u8> {
        self.next_pattern += 1;
        let len = 1 + self.random.below(LEN) as usize;
        pattern(self.next_pattern, len)
    }

    /// A part of a source, if it has any.
    fn part(&mut self, source: usize) -> Option<SharedBuffer> {
        let count = self.sources[source].parts.len();
        let index = (count > 0).then(|| self.below(count))?;
        Some(self.sources[source].parts.swap_remove(index))
    }

    /// Registers new memory, or takes another reference.
    fn register(&mut self, source: usize) {
        let Source { parts, in_flight, .. } = &self.sources[source];
        if parts.is_empty() && *in_flight == 0 {
            let (bytes, is_mapped) = (self.new_bytes(), self.random.below(2) == 0);
            let part = Memory::new(is_mapped, &bytes).share(&self.pd);
            self.sources[source] = Source { bytes, is_mapped, parts: vec![part], in_flight: 0 };
        } else if let Some(part) = self.part(source) {
            self.sources[source].parts.extend([part.clone(), part]);
        }
    }

    fn slice(&mut self, source: usize) {
        let Some(part) = self.part(source) else { return };
        let start = self.below(part.len() + 1);
        let end = start + self.below(part.len() - start + 1);
        let slice = part.slice(start..end).unwrap();
        assert!(*slice == part[start..end], "{}", self.context);
        self.sources[source].parts.extend([part, slice]);
    }

    /// A buffer for a message of `len` bytes, cut from the free ones.
    fn receive(&mut self, len: usize) -> bool {
        let Some(index) = self.receives.iter().position(|free| free.capacity() >= len) else { return false };
        let mut free = self.receives.swap_remove(index);
        // Not always an exact fit.
        let keep = len + self.below(100);
        if free.capacity() > keep {
            self.receives.push(free.split_off(keep).unwrap());
        }
        self.ends.1.receive(free).unwrap();
        true
    }

    fn send_part(&mut self, source: usize) {
        let Some(part) = self.part(source) else { return };
        if self.sent.len() == DEPTH || !self.receive(part.len().max(1)) {
            self.sources[source].parts.push(part);
            return;
        }
        if self.random.below(2) == 0 {
            self.sources[source].parts.push(part.clone());
        }
        self.sources[source].in_flight += 1;
        self.sent.push_back((Some(source), part.to_vec()));
        self.ends.0.send_list(part).unwrap();
    }

    /// Sends a buffer of the pool, which gets it back.
    fn send_buffer(&mut self) {
        let bytes = self.new_bytes();
        let Ok(mut buffer) = self.pool.try_get(Budget::Sends, bytes.len()) else { return };
        if self.sent.len() < DEPTH && self.receive(bytes.len()) {
            buffer.fill_from(&bytes).unwrap();
            self.sent.push_back((None, bytes));
            self.ends.0.send(buffer).unwrap();
        }
    }

    fn drop_part(&mut self, source: usize) {
        drop(self.part(source));
    }

    /// Completes the oldest message.
    fn complete(&mut self) {
        let Some((source, bytes)) = self.sent.pop_front() else { return };
        let arrived = done(&mut self.ends.1).buffer.unwrap();
        assert!(*arrived == bytes, "{}: the message has other bytes than were sent", self.context);
        self.receives.push(arrived);
        let sent = done(&mut self.ends.0);
        let Some(source) = source else { return drop(sent) };
        let Some(Piece::Shared(part)) = sent.list.and_then(|list| list.into_iter().next()) else { panic!("a part") };
        assert!(*part == *bytes, "{}: the memory in flight has changed", self.context);
        self.sources[source].in_flight -= 1;
        if self.random.below(2) == 0 {
            self.sources[source].parts.push(part);
        }
    }

    /// Takes memory back, which is possible only after its last use, and unmaps or frees it.
    fn take_back(&mut self, source: usize) {
        let Some(part) = self.part(source) else { return };
        let Source { bytes, is_mapped, parts, in_flight } = &mut self.sources[source];
        match Memory::take(part, *is_mapped) {
            Ok(memory) => {
                assert!(parts.is_empty() && *in_flight == 0, "{}: taken back while in use", self.context);
                assert!(memory.bytes() == bytes, "{}: the memory has changed", self.context);
            }
            Err(ReclaimError { part, reason, .. }) => {
                let others = parts.len() + *in_flight;
                assert_eq!(reason, ReclaimReason::InUse { others }, "{}", self.context);
                parts.extend(part);
            }
        }
    }

    /// Joins the free parts of the memory for receives. If none is missing, takes the memory back and registers it again.
    fn join(&mut self) {
        match Buffer::join_all(self.receives.drain(..)) {
            Ok(whole) if whole.capacity() == RECEIVES => {
                let vec: Vec<u8> = whole.into_memory().unwrap();
                self.receives.push(self.pd.register(vec).unwrap());
            }
            Ok(part) => self.receives.push(part),
            Err(error) => self.receives = error.parts,
        }
    }

    /// A child drops all that it has inherited, and the parent goes on.
    fn fork(&mut self) {
        in_a_fork(|| {
            drop(std::mem::take(&mut self.sources));
            drop(std::mem::take(&mut self.receives));
            drop(self.pool.try_get(Budget::Sends, 100));
        });
    }

    fn run(&mut self, seed: u64) {
        self.random = Random::new(seed);
        for step in 0..STEPS {
            self.context = format!("seed {seed}, step {step}");
            let source = self.below(SOURCES);
            match self.random.below(1000) {
                0..180 => self.register(source),
                180..300 => self.slice(source),
                300..500 => self.send_part(source),
                500..580 => self.send_buffer(),
                580..700 => self.drop_part(source),
                700..860 => self.complete(),
                860..950 => self.take_back(source),
                950..999 => self.join(),
                _ => self.fork(),
            }
        }
        self.context = format!("seed {seed}, end");
        while !self.sent.is_empty() {
            self.complete();
        }
        for source in 0..SOURCES {
            self.sources[source].parts.truncate(1);
            self.take_back(source);
            assert!(self.sources[source].parts.is_empty(), "{}: unused memory does not come back", self.context);
        }
        self.join();
        assert_eq!(self.receives.len(), 1, "{}: a part of the memory for receives is lost", self.context);
    }
}

/// The next completion, which is a success.
fn done(endpoint: &mut Endpoint) -> Completion {
    endpoint.wait(DEADLINE).unwrap().ok().unwrap()
}

#[test]
fn each_message_has_the_bytes_that_were_sent() {
    in_own_process("memory_schedules::each_message_has_the_bytes_that_were_sent", || {
        let Some(rdma) = device() else { return };
        let number = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().unwrap());
        let first = number("RDMA_MEMORY_FIRST_SCHEDULE", 1);
        let mut schedule = Schedule::new(&rdma);
        for seed in first..first + number("RDMA_MEMORY_SCHEDULES", 100) {
            schedule.run(seed);
        }
    });
}
