//! Endpoints for datagrams in a set, beside connections.

use rdma_safe::endpoint::DatagramSender;
use rdma_safe::{Completion, EndpointKey, EndpointSet, Error, PostError, ReceivePool, RemoteMemory, WcStatus, Work};

use crate::support::lab::Mode;
use crate::support::{Rdma, error_of, filled, lossless_device, pattern, within_deadline};

const QKEY: u32 = 0x1122_3344;
const RECEIVES: u32 = 4;

type Taken = (EndpointKey, Completion, Option<DatagramSender>);

/// The next completion.
fn next(set: &mut EndpointSet) -> Taken {
    within_deadline("a completion", || {
        let mut taken = None;
        set.poll_each_from(1, |key, done, sender| taken = Some((key, done, sender))).unwrap();
        taken
    })
}

/// The next datagram, with its receiver.
fn arrival(set: &mut EndpointSet) -> Taken {
    loop {
        let (key, done, sender) = next(set);
        assert_eq!(done.status, WcStatus::SUCCESS);
        if done.id.is_receive() {
            return (key, done, sender);
        }
        assert!(sender.is_none(), "a send has no sender");
    }
}

fn on_every_interface(body: impl Fn(&Rdma, EndpointSet)) {
    let Some(rdma) = lossless_device() else { return };
    for mode in Mode::each() {
        println!("{mode}");
        body(&rdma, EndpointSet::builder(&rdma, 128).classic_poll(mode.classic_cq).build().unwrap());
    }
}

#[test]
fn datagrams_are_answered_beside_a_connection() {
    on_every_interface(|rdma, mut set| {
        let pd = rdma.pd();
        let builder = rdma.endpoint(&pd).send_depth(8).recv_depth(RECEIVES);
        let [one, other] = [(); 2].map(|()| builder.clone().build_datagrams_in(&mut set, QKEY).unwrap());
        let [client, server] = [(); 2].map(|()| builder.clone().build_in(&mut set).unwrap());
        let addresses = [one, other, client, server].map(|key| set.endpoint(key).unwrap().address());
        let [one_names, other_names, none, _] =
            [one, other, client, server].map(|key| set.endpoint(key).unwrap().datagram_identity());
        let (one_names, other_names) = (one_names.unwrap(), other_names.unwrap());
        assert!(none.is_none(), "a connection");
        assert_eq!((one_names.qp_num(), one_names.qkey(), one_names.port()), (addresses[0].qp_num, QKEY, rdma.port));
        set.endpoint(client).unwrap().connect(&addresses[3]).unwrap();
        set.endpoint(server).unwrap().connect(&addresses[2]).unwrap();
        for key in [one, other, server] {
            for _ in 0..RECEIVES {
                set.endpoint(key).unwrap().receive(pd.allocate(4096).unwrap()).unwrap();
            }
        }
        let outgoing = rdma_safe::ConnectOptions::default();
        let to_other = set.endpoint(one).unwrap().queue_pair().address_of(&addresses[1], &outgoing).unwrap();
        let to_other = one_names.peer_at(&to_other, addresses[1].qp_num).unwrap();
        for round in 0..3 * u64::from(RECEIVES) {
            let (question, answer) = (pattern(round, 300), pattern(round + 100, 200));
            set.endpoint(one).unwrap().send_to(filled(&pd, &question), &to_other).unwrap();
            let (key, done, sender) = arrival(&mut set);
            assert_eq!((key, done.buffer.as_deref()), (other, Some(&question[..])));
            let sender = sender.expect("a sender");
            assert_eq!((sender.qp_num(), sender.gid()), (addresses[0].qp_num, Some(addresses[0].gid)));
            // The connection uses the same queue in between, and its messages have no sender.
            set.endpoint(client).unwrap().send(filled(&pd, &answer)).unwrap();
            let (key, message, nobody) = arrival(&mut set);
            assert_eq!((key, message.buffer.as_deref(), nobody), (server, Some(&answer[..]), None));
            set.endpoint(server).unwrap().receive(message.buffer.unwrap()).unwrap();

            set.endpoint(other).unwrap().receive(done.buffer.unwrap()).unwrap();
            let work = Work::send(filled(&pd, &answer)).imm(7);
            set.endpoint(other).unwrap().post_to(work, &other_names.peer_of(&sender).unwrap()).unwrap();
            let (key, done, sender) = arrival(&mut set);
            assert_eq!((key, done.imm(), done.buffer.as_deref()), (one, Some(7), Some(&answer[..])));
            assert_eq!(sender.map(|sender| sender.qp_num()), Some(to_other.qp_num()));
            set.endpoint(one).unwrap().receive(done.buffer.unwrap()).unwrap();
        }
        // Answers may still be in flight, and come back all the same.
        assert!(set.remove(one).unwrap().len() >= RECEIVES as usize);
        assert!(set.endpoint(one).is_none());
        assert!(set.remove(other).unwrap().len() >= RECEIVES as usize);
    });
}

#[test]
fn each_kind_of_endpoint_refuses_the_work_of_the_other() {
    on_every_interface(|rdma, mut set| {
        let pd = rdma.pd();
        let builder = rdma.endpoint(&pd).send_depth(8).recv_depth(RECEIVES);
        let datagrams = builder.clone().build_datagrams_in(&mut set, QKEY).unwrap();
        let connection = builder.clone().build_in(&mut set).unwrap();
        let own = set.endpoint(connection).unwrap().address();
        set.endpoint(connection).unwrap().connect(&own).unwrap();
        let mut endpoint = set.endpoint(datagrams).unwrap();
        let address = endpoint.queue_pair().address_of(&own, &rdma_safe::ConnectOptions::default()).unwrap();
        let peer = endpoint.datagram_identity().unwrap().peer_at(&address, own.qp_num).unwrap();
        assert_eq!(error_of(endpoint.send(filled(&pd, b"to whom?"))).error, PostError::NoDestination);
        assert_eq!(error_of(endpoint.post(Work::send(filled(&pd, b"to whom?")))).error, PostError::NoDestination);
        let remote = RemoteMemory { address: 0, rkey: 1, len: 8 };
        assert!(matches!(
            error_of(endpoint.write(filled(&pd, b"to whom?"), remote)).error,
            PostError::NotEnabled { .. }
        ));
        assert!(matches!(error_of(endpoint.connect(&own)), Error::WrongType { .. }));
        let mut endpoint = set.endpoint(connection).unwrap();
        let rejected = error_of(endpoint.send_to(filled(&pd, b"to whom?"), &peer));
        assert!(rejected.error == PostError::NotDatagram && rejected.buffer.is_some(), "{rejected:?}");
        assert!(matches!(error_of(endpoint.attach_mcast(own.gid, 0)), Error::WrongType { .. }));

        let pool = ReceivePool::new(&pd, 4).unwrap();
        let pooled = builder.clone().receive_pool(&pool).build_datagrams_in(&mut set, QKEY);
        assert!(matches!(error_of(pooled), Error::WrongType { .. }));
        let full = builder.send_depth(1000).build_datagrams_in(&mut set, QKEY);
        assert!(matches!(error_of(full), Error::EndpointSetFull { .. }));
        assert_eq!(set.len(), 2);
    });
}
