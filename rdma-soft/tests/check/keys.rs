//! Keys that do not allow the access.

use rdma_soft::abi::*;
use rdma_soft::check::Kind;
use rdma_sys::*;

use crate::world::World;

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn the_key_of_a_deregistered_region_is_reported_with_the_region() {
    let mut world = World::new();
    let from = world.memory(100);
    // SAFETY: the region exists. Only its key is used again.
    assert_eq!(unsafe { ibv_dereg_mr(from.mr) }, 0);
    world.send(7, from.sge());
    assert_eq!(world.sent(), IBV_WC_LOC_PROT_ERR);
    let report = world.report(Kind::StaleKey);
    assert_eq!((report.qp, report.wr_id, report.memory), (world.qp(0), Some(7), Some((from.address, 100))));
    let region = report.region.unwrap();
    assert_eq!((region.key, region.address, region.is_deregistered), (from.key, from.address, true));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_wrong_key_is_reported_with_the_nearest_region() {
    let mut world = World::new();
    let from = world.memory(100);
    world.send(7, ibv_sge { lkey: from.key ^ 1, ..from.sge() });
    assert_eq!(world.sent(), IBV_WC_LOC_PROT_ERR);
    let report = world.report(Kind::UnknownKey);
    assert_eq!((report.qp, report.wr_id), (world.qp(0), Some(7)));
    assert_eq!(report.region.map(|region| region.key), Some(from.key));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_range_that_is_one_byte_too_long_is_reported() {
    let mut world = World::new();
    let from = world.memory(100);
    world.send(7, ibv_sge { addr: from.address + 1, ..from.sge() });
    assert_eq!(world.sent(), IBV_WC_LOC_PROT_ERR);
    let report = world.report(Kind::KeyRange);
    assert_eq!((report.wr_id, report.memory), (Some(7), Some((from.address + 1, 100))));
    assert!(report.text.contains("ends 1 bytes after"), "{report}");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_region_of_another_domain_is_reported() {
    let mut world = World::new();
    // SAFETY: the context is open.
    let other = unsafe { ibv_alloc_pd(world.context) };
    let from = world.memory_in(other, 100, 0);
    world.send(7, from.sge());
    assert_eq!(world.sent(), IBV_WC_LOC_PROT_ERR);
    let report = world.report(Kind::KeyDomain);
    assert_eq!((report.wr_id, report.region.map(|region| region.key)), (Some(7), Some(from.key)));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_receive_into_a_region_without_local_write_is_reported() {
    let mut world = World::new();
    let (from, to) = (world.memory(100), world.memory_in(world.pd, 100, 0));
    world.receive(8, to.sge());
    world.send(7, from.sge());
    assert_eq!(world.received(), IBV_WC_LOC_PROT_ERR);
    let report = world.report(Kind::KeyAccess);
    assert_eq!((report.qp, report.wr_id), (world.qp(1), Some(8)));
    assert!(report.text.contains("lacks the access flags 0x1"), "{report}");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn an_access_of_the_peer_outside_the_region_is_reported() {
    let mut world = World::new();
    let (from, to) = (world.memory(100), world.memory(100));
    world.post(7, from.sge(), IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, (to.address - 3, to.key));
    assert_eq!(world.sent(), IBV_WC_REM_ACCESS_ERR);
    let report = world.report(Kind::KeyRange);
    assert_eq!((report.qp, report.wr_id, report.memory), (world.qp(1), None, Some((to.address - 3, 100))));
    assert_eq!(report.text, "write by the peer: it starts 3 bytes before the region of its key");
}
