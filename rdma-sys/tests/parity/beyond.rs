//! Cases where C would crash or be undefined, and the shims return an error. Needs no C side.

use rdma_sys::*;

use crate::recorder;
use crate::world::{Provider, World};

#[test]
fn closing_an_xrc_domain_without_the_operation_is_refused() {
    let world = World::new();
    let offset = std::mem::offset_of!(verbs_context, close_xrcd);
    for provider in [Provider::Lacks, Provider::Predates, Provider::Plain, Provider::LowBits] {
        world.reset(provider, offset);
        recorder::start(&world, 0);
        assert_eq!(unsafe { ibv_close_xrcd(world.xrcd) }, libc::EOPNOTSUPP, "{provider:?}");
        assert!(recorder::log().is_empty());
    }
}

#[test]
fn freeing_a_memory_window_without_the_operation_is_refused() {
    let world = World::new();
    world.reset(Provider::Has, 0);
    recorder::start(&world, 0);
    unsafe {
        (*world.context()).ops.dealloc_mw = None;
        assert_eq!(ibv_dealloc_mw(world.mw), libc::EOPNOTSUPP);
    }
    assert!(recorder::log().is_empty());
}

#[test]
fn queue_pair_types_without_a_bit_are_not_supported() {
    assert_eq!(ibv_is_qpt_supported(u32::MAX, IBV_QPT_DRIVER), 0);
    assert_eq!(ibv_is_qpt_supported(u32::MAX, ibv_qp_type(32)), 0);
    assert_eq!(ibv_is_qpt_supported(1 << 2, IBV_QPT_RC), 1);
    assert_eq!(ibv_is_qpt_supported(1 << 2, IBV_QPT_UC), 0);
}
