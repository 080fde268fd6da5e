//! Memory of work in flight.

use std::ptr::null_mut;

use rdma_soft::abi::*;
use rdma_soft::check::{Kind, Options};
use rdma_sys::*;

use crate::world::{ALL, World};

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_send_buffer_that_changes_is_reported() {
    let mut world = World::with("suppress=receiver-not-ready".parse().unwrap(), 16);
    let (from, to) = (world.memory(100), world.memory(100));
    // Without a receive, the message stays in flight.
    world.send(7, from.sge());
    from.write(42, 1);
    world.receive(8, to.sge());
    assert_eq!((world.sent(), world.received()), (IBV_WC_SUCCESS, IBV_WC_SUCCESS));
    let report = world.report(Kind::SendChanged);
    assert_eq!((report.qp, report.wr_id, report.memory), (world.qp(0), Some(7), Some((from.address + 42, 58))));
    assert_eq!(report.region.map(|region| (region.key, region.address)), Some((from.key, from.address)));
    assert_eq!(report.backtrace, None);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_backtrace_names_the_function_that_has_posted() {
    let mut world = World::with("backtrace,suppress=receiver-not-ready".parse().unwrap(), 16);
    let from = world.memory(8);
    post_for_backtrace(&world, from.sge());
    from.write(0, 1);
    world.receive(8, ibv_sge { addr: from.address, length: 0, lkey: 0 });
    _ = world.sent();
    let reports = world.reports();
    let report = reports.iter().find(|report| report.kind == Kind::SendChanged).unwrap();
    let backtrace = report.backtrace.as_deref().unwrap();
    assert!(backtrace.contains("post_for_backtrace"), "{backtrace}");
}

#[inline(never)]
fn post_for_backtrace(world: &World, sge: ibv_sge) {
    world.send(7, sge);
    std::hint::black_box(world);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_receive_buffer_that_the_program_writes_is_reported() {
    let mut world = World::new();
    let (from, to) = (world.memory(50), world.memory(100));
    // The byte that the message overwrites, and one after it.
    for at in [10, 70] {
        world.receive(8, to.sge());
        to.write(at, 9);
        world.send(7, from.sge());
        assert_eq!((world.sent(), world.received()), (IBV_WC_SUCCESS, IBV_WC_SUCCESS));
        let report = world.report(Kind::ReceiveWritten);
        let expected = (to.address + at as u64, 100 - at as u64);
        assert_eq!((report.qp, report.wr_id, report.memory), (world.qp(1), Some(8), Some(expected)));
    }
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn work_in_flight_that_overlaps_is_reported() {
    let mut world = World::new();
    let to = world.memory(100);
    let part = |from: u64, length| ibv_sge { addr: to.address + from, length, lkey: to.key };
    world.receive(8, part(0, 50));
    world.receive(9, part(50, 50));
    assert_eq!(world.reports(), []);
    world.receive(10, part(40, 20));
    let report = world.report(Kind::Overlap);
    assert_eq!((report.qp, report.wr_id, report.memory), (world.qp(1), Some(10), Some((to.address + 40, 10))));
    assert!(report.text.contains("wr_id 0x8"), "{report}");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn sends_may_share_memory() {
    let mut world = World::with("suppress=receiver-not-ready".parse().unwrap(), 16);
    let from = world.memory(100);
    (0..4).for_each(|wr_id| world.send(wr_id, from.sge()));
    assert_eq!(world.reports(), []);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_region_that_is_deregistered_while_in_use_is_reported() {
    let mut world = World::new();
    let to = world.memory(100);
    world.receive(8, to.sge());
    // SAFETY: the region exists and is not used again.
    assert_eq!(unsafe { ibv_dereg_mr(to.mr) }, 0);
    let report = world.report(Kind::Deregistered);
    assert_eq!((report.qp, report.wr_id, report.memory), (world.qp(1), Some(8), Some((to.address, 100))));
    assert_eq!(report.region.map(|region| region.key), Some(to.key));
}

/// Maps a page.
fn map() -> u64 {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping overlaps no memory that is in use.
    let at = unsafe { libc::mmap(null_mut(), 4096, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    at as u64
}

/// Replaces a page by one that is not accessible. If it were only unmapped, another thread could map it again.
fn unmap(address: u64) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: the test has mapped the page, and has no reference to it.
    let at = unsafe { libc::mmap(address as *mut _, 4096, libc::PROT_NONE, flags, -1, 0) };
    assert_eq!(at as u64, address);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_receive_whose_memory_is_unmapped_is_reported_and_fails() {
    let mut world = World::new();
    let (from, page) = (world.memory(100), map());
    // SAFETY: the page is mapped.
    let to = unsafe { world.register(world.pd, page, 4096, ALL) };
    world.receive(8, to.sge());
    unmap(page);
    world.send(7, from.sge());
    assert_eq!(world.received(), IBV_WC_LOC_PROT_ERR);
    let report = world.report(Kind::Unmapped);
    assert_eq!((report.qp, report.wr_id, report.memory), (world.qp(1), Some(8), Some((page, 100))));
    assert_eq!(report.region.map(|region| region.key), Some(to.key));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_send_whose_memory_is_unmapped_is_reported_and_fails() {
    let world = World::new();
    let page = map();
    // SAFETY: the page is mapped.
    let from = unsafe { world.register(world.pd, page, 4096, ALL) };
    unmap(page);
    world.send(7, from.sge());
    assert_eq!(world.sent(), IBV_WC_LOC_PROT_ERR);
    let report = world.report(Kind::Unmapped);
    assert_eq!(
        (report.qp, report.wr_id, report.memory.map(|(address, _)| address)),
        (world.qp(0), Some(7), Some(page))
    );
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_write_of_the_peer_to_unmapped_memory_is_reported_and_fails() {
    let mut world = World::new();
    let (from, page) = (world.memory(100), map());
    // SAFETY: the page is mapped.
    let to = unsafe { world.register(world.pd, page, 4096, ALL) };
    unmap(page);
    world.post(7, from.sge(), IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, (page, to.key));
    assert_eq!(world.sent(), IBV_WC_REM_ACCESS_ERR);
    let report = world.report(Kind::Unmapped);
    assert_eq!((report.qp, report.memory), (world.qp(1), Some((page, 100))));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn more_registered_memory_than_the_limit_is_reported() {
    let options: Options = "memlock=16384".parse().unwrap();
    let mut world = World::with(options, 16);
    let first = world.memory(4096);
    assert_eq!(world.reports(), []);
    let second = world.memory(16384);
    let report = world.report(Kind::Memlock);
    assert_eq!(report.memory, Some((second.address, 16384)));
    // SAFETY: the regions exist and are not used again.
    assert_eq!(unsafe { (ibv_dereg_mr(first.mr), ibv_dereg_mr(second.mr)) }, (0, 0));
}
