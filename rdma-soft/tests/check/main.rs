//! The checker: a misuse of each kind is reported with its place, and correct use is not.

mod keys;
mod memory;
mod queues;
mod schedule;
mod world;

use rdma_sys::*;

use world::World;

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn correct_programs_get_no_report() {
    let mut world = World::new();
    let (from, to) = (world.memory(5000), world.memory(5000));
    for round in 0..20_u8 {
        from.write(7, round);
        world.receive(1, to.sge());
        world.send(2, from.sge());
        assert_eq!((world.sent(), world.received()), (IBV_WC_SUCCESS, IBV_WC_SUCCESS));
        to.write(8, round);
        let remote = (to.address, to.key);
        for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
            world.post(3, from.sge(), opcode, IBV_SEND_SIGNALED, remote);
            assert_eq!(world.sent(), IBV_WC_SUCCESS);
        }
    }
    assert_eq!(world.reports(), []);
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn inline_data_may_change_at_once() {
    let mut world = World::new();
    let (from, to) = (world.memory(8), world.memory(8));
    let flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
    world.receive(1, to.sge());
    world.receive(2, ibv_sge { addr: 0, length: 0, lkey: 0 });
    world.post(3, from.sge(), IBV_WR_SEND, flags, (0, 0));
    from.write(0, 1);
    assert_eq!((world.sent(), world.received()), (IBV_WC_SUCCESS, IBV_WC_SUCCESS));
    assert_eq!(world.reports(), []);
}
