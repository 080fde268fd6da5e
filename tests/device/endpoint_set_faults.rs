//! Sets of endpoints over a device that reports wrong completions, fails to be polled, or has timestamps.

use rdma_safe::sys::{IBV_WC_RECV, Zeroed, ibv_wc};
use rdma_safe::{EndpointSet, PollError, PostError, ReceivePool, WcFields};

use crate::endpoint_sets::Group;
use crate::support::interposer::rig::{builder, cq_of, on_each_mode};
use crate::support::interposer::{Config, interposed_with};
use crate::support::lab::Mode;
use crate::support::{filled, within_deadline};

#[test]
fn an_unexpected_completion_is_an_error_of_its_endpoint_only() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut group = Group::new(soft, &pd, mode, 2, None);
        (0..2).for_each(|index| group.receive(index));
        let key = group.keys[0];
        let endpoint = group.set.endpoint(key).unwrap();
        let (cq, number) = (cq_of(endpoint.queue_pair()), endpoint.queue_pair().number());
        let truth = ibv_wc { opcode: IBV_WC_RECV, byte_len: 4, ..ibv_wc::zeroed() };
        // A completion of a queue pair that is not in the set.
        soft.inject(cq, ibv_wc { wr_id: 1 << 63 | 1, qp_num: 0xff_ffff, ..truth });
        assert!(matches!(group.set.poll(), Err(PollError::NotInFlight { .. })));
        // A completion of an endpoint of the set, for a receive that was not posted.
        soft.inject(cq, ibv_wc { wr_id: 1 << 63 | 2, qp_num: number, ..truth });
        assert!(matches!(group.set.poll(), Err(PollError::NotInFlight { wr_id }) if wr_id == 1 << 63 | 2));
        let refused = group.set.endpoint(key).unwrap().send(filled(&pd, b"doubtful")).unwrap_err();
        assert_eq!((refused.error, refused.buffer.is_some()), (PostError::EndpointFailed, true));
        group.send(1, b"others");
        assert_eq!(group.next_text(), (1, b"others".to_vec()));
        assert_eq!(group.set.remove(key).unwrap().len(), 1);
    });
}

#[test]
fn a_set_can_be_polled_again_after_a_failed_poll() {
    on_each_mode(|soft, mode| {
        let pd = soft.pd();
        let mut group = Group::new(soft, &pd, mode, 1, None);
        group.receive(0);
        let verb = mode.poll_verb();
        soft.fail(verb, libc::EIO);
        assert!(matches!(group.set.poll(), Err(PollError::Provider(_))));
        soft.heal(verb);
        group.send(0, b"later");
        assert_eq!(group.next_text(), (0, b"later".to_vec()));
    });
}

#[test]
fn completions_have_timestamps_if_the_set_requests_them() {
    let further_fields = WcFields::COMPLETION_TIMESTAMP.bits();
    let Some(soft) = interposed_with(Config { further_fields, ..Config::default() }) else { return };
    let pd = soft.pd();
    let mut pool = ReceivePool::new(&pd, 1).unwrap();
    let mut set = EndpointSet::builder(pd.context(), 20).timestamps(true).build().unwrap();
    // The option of the endpoint is ignored.
    let builder = builder(&soft, &pd, Mode::EXTENDED);
    let key = builder.clone().receive_pool(&pool).timestamps(false).build_in(&mut set).unwrap();
    let mut peer = builder.build().unwrap();
    let mut endpoint = set.endpoint(key).unwrap();
    endpoint.connect(&peer.address()).unwrap();
    peer.connect(&endpoint.address()).unwrap();
    let id = pool.receive(pd.allocate(16).unwrap()).unwrap();
    peer.send_inline(b"now").unwrap();
    let (whose, message) = within_deadline("a message", || set.poll().unwrap());
    assert_eq!((whose, message.id), (key, id));
    assert!(message.timestamp.is_some());
}
