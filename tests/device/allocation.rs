//! The data path of both APIs does not allocate memory, on any interface.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use rdma_safe::mr::Pages;
use rdma_safe::{Access, Buffer, Endpoint, EndpointBuilder, ExposedRegion, Operation, ProtectionDomain, Work};

use crate::owned::wait;
use crate::support::lab::{Data, Lab, Mode, Op, Side, Wr};
use crate::support::link::connected;
use crate::support::{device_without_checker, pattern};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Bytes that are allocated in Rust.
static LIVE: AtomicUsize = AtomicUsize::new(0);

/// Bytes that this process has allocated in Rust.
pub(crate) fn live() -> usize {
    LIVE.load(Ordering::Relaxed)
}

/// The system allocator, with a count of allocations per thread and of live bytes.
pub(crate) struct Counting;

fn count() {
    // Fails in a thread that is exiting.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call is passed to the system allocator, and counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        LIVE.fetch_add(size.wrapping_sub(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller's contract is the same.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Allocations of this thread while `body` runs.
fn allocations(body: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    body();
    ALLOCATIONS.get() - before
}

#[test]
fn an_allocation_is_counted() {
    assert_eq!(allocations(|| drop(std::hint::black_box(Box::new(1)))), 1);
    assert_eq!(allocations(|| {}), 0);
}

fn completions(side: &mut Side, count: usize) {
    let mut taken = 0;
    while taken < count {
        let mut poll = side.cq.poll();
        while let Some(completion) = poll.next().unwrap() {
            completion.ok().unwrap();
            std::hint::black_box((completion.wr_id(), completion.byte_len(), completion.imm()));
            taken += 1;
        }
    }
}

/// Executes each operation once.
fn raw_round(lab: &mut Lab, list: bool) {
    for id in 0..3 {
        lab.b.receive(id, 0..1000).unwrap();
    }
    let (a, b) = (&lab.a.memory, &lab.b.memory);
    let sges = [a.sge(0..64), a.sge(100..164)];
    let payload = if list { Data::List(&sges) } else { Data::One(sges[0]) };
    let remote = |offset| b.remote(offset);
    let pieces: [&[u8]; 2] = [b"in", b"line"];
    let wrs = [
        Wr::new(1, Op::Send, payload),
        Wr::new(2, Op::SendImm(7), Data::Inline(b"inline")),
        Wr::new(3, Op::Write(remote(2000)), payload),
        Wr::new(4, Op::WriteImm(remote(2000), 9), Data::InlineList(&pieces)),
        Wr::new(5, Op::Read(remote(2000)), Data::One(sges[0])),
        Wr::new(6, Op::FetchAdd(remote(4096), 1), Data::One(a.sge(200..208))),
        Wr::new(7, Op::CompareSwap(remote(4096), 0, 1), Data::One(a.sge(200..208))),
    ];
    lab.a.post(&wrs).unwrap();
    completions(&mut lab.a, wrs.len());
    completions(&mut lab.b, 3);
}

#[test]
#[cfg_attr(miri, ignore = "packets in memory are allocated")]
fn the_raw_api_does_not_allocate() {
    let Some(rdma) = device_without_checker("delayed packets are stored in memory") else { return };
    for mode in Mode::each() {
        for list in [false, true] {
            let mut lab = Lab::builder(&rdma, mode).sges(if list { 2 } else { 1 }).inline(64).build();
            raw_round(&mut lab, list);
            let count = allocations(|| (0..20).for_each(|_| raw_round(&mut lab, list)));
            assert_eq!(count, 0, "{mode}, lists {list}");
            let idle = allocations(|| (0..100).for_each(|_| assert!(lab.a.cq.poll().next().unwrap().is_none())));
            assert_eq!(idle, 0, "{mode}: an empty poll");
        }
    }
}

/// Two endpoints, and buffers that are reused in each round.
struct Exchange {
    a: Endpoint,
    b: Endpoint,
    outbox: Option<Buffer>,
    word: Option<Buffer>,
    region: ExposedRegion,
}

impl Exchange {
    fn new(builder: EndpointBuilder<'_>, pd: &ProtectionDomain) -> Self {
        let (a, mut b) = connected(builder.inline_data(16).peer_access(Access::REMOTE));
        for buffer in pd.allocate(4 * 512).unwrap().into_chunks(512).unwrap() {
            b.receive(buffer).unwrap();
        }
        let region = pd.expose(Pages::new(4096).unwrap(), Access::REMOTE).unwrap();
        Exchange { a, b, outbox: pd.allocate(256).ok(), word: pd.allocate(8).ok(), region }
    }

    fn round(&mut self, bytes: &[u8]) {
        let remote = self.region.remote();
        let mut outbox = self.outbox.take().unwrap();
        outbox.fill_from(bytes).unwrap();
        let mut batch = self.a.batch().unwrap();
        batch.add(Work::send(outbox).imm(5)).unwrap();
        batch.add(Work::fetch_add(self.word.take().unwrap(), remote, 1)).unwrap();
        batch.add(Work::write_inline(b"unsignaled", remote.slice(64, 16).unwrap()).unsignaled()).unwrap();
        batch.post().unwrap();
        self.a.send_inline(b"inline").unwrap();
        for _ in 0..3 {
            let done = wait(&mut self.a);
            match done.operation {
                Operation::Atomic => self.word = done.buffer,
                _ if done.buffer.is_some() => self.outbox = done.buffer,
                _ => {}
            }
        }
        for len in [bytes.len(), 6] {
            let done = wait(&mut self.b);
            assert_eq!(done.byte_len as usize, len);
            self.b.receive(done.buffer.unwrap()).unwrap();
        }
        assert!(self.a.poll().unwrap().is_none());
    }
}

#[test]
#[cfg_attr(miri, ignore = "packets in memory are allocated")]
fn the_owned_api_does_not_allocate() {
    let Some(rdma) = device_without_checker("delayed packets are stored in memory") else { return };
    let bytes = pattern(1, 200);
    for mode in Mode::each() {
        for events in [false, true] {
            let pd = rdma.pd();
            let builder = rdma.endpoint(&pd).events(events);
            let builder = builder.classic_post(mode.classic_qp).classic_poll(mode.classic_cq);
            let mut exchange = Exchange::new(builder, &pd);
            exchange.round(&bytes);
            let count = allocations(|| (0..20).for_each(|_| exchange.round(&bytes)));
            assert_eq!(count, 0, "{mode}, events {events}");
        }
    }
}
