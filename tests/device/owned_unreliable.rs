//! The owned API: unreliable connections, datagrams, and receive pools.

use std::collections::HashMap;

use rdma_safe::async_event::{AsyncEventType, AsyncSource};
use rdma_safe::endpoint::DatagramSender;
use rdma_safe::mr::Pages;
use rdma_safe::{
    Access, DatagramCompletion, DatagramEndpoint, Endpoint, EndpointBuilder, Operation, PostError, ProtectionDomain,
    QueuePairType, ReceivePool, SendOps, Work,
};

use crate::owned::wait;
use crate::support::lab::Mode;
use crate::support::link::connected;
use crate::support::{DEADLINE, Rdma, device, lossless_device, pattern, within_deadline};

const QKEY: u32 = 0x0b0b_1234;

/// Runs `body` on every combination of interfaces, with and without events.
fn on_every_interface(device: fn() -> Option<Rdma>, body: impl Fn(&Rdma, &ProtectionDomain, EndpointBuilder<'_>)) {
    let Some(rdma) = device() else { return };
    for mode in Mode::each() {
        for events in [false, true] {
            println!("{mode}, events {events}");
            let pd = rdma.pd();
            let builder = rdma.endpoint(&pd).classic_post(mode.classic_qp).classic_poll(mode.classic_cq);
            body(&rdma, &pd, builder.events(events).inline_data(64));
        }
    }
}

#[track_caller]
fn next_receive(endpoint: &mut DatagramEndpoint) -> DatagramCompletion {
    loop {
        let done = endpoint.wait(DEADLINE).unwrap().ok().unwrap();
        if done.id.is_receive() {
            return done;
        }
    }
}

#[test]
fn an_unreliable_connection_carries_messages_and_writes() {
    on_every_interface(lossless_device, |_, pd, builder| {
        let (mut a, mut b) = connected(builder.qp_type(QueuePairType::UC).peer_access(Access::REMOTE));
        let region = pd.expose(Pages::new(5000).unwrap(), Access::REMOTE_WRITE).unwrap();
        for len in [1, 64, 5000] {
            b.receive(pd.allocate(5000).unwrap()).unwrap();
            let mut outbox = pd.allocate(5000).unwrap();
            outbox.fill_from(&pattern(7, len)).unwrap();
            a.send(outbox).unwrap();
            let sent = wait(&mut a);
            assert_eq!(sent.operation, Operation::Send);
            assert!(wait(&mut b).buffer.unwrap()[..] == pattern(7, len), "{len} bytes");
            // The data of a write has arrived when the peer sees its immediate data.
            b.receive(pd.allocate(1).unwrap()).unwrap();
            a.post(Work::write(sent.buffer.unwrap(), region.remote()).imm(len as u32)).unwrap();
            let written = wait(&mut b);
            assert_eq!((written.operation, written.imm()), (Operation::ReceiveWrite, Some(len as u32)));
            let mut there = vec![0; len];
            region.read(0, &mut there).unwrap();
            assert!(there == pattern(7, len), "{len} bytes written");
            let _ = wait(&mut a);
        }
        let refused = a.read(pd.allocate(8).unwrap(), region.remote()).unwrap_err();
        assert_eq!(refused.error, PostError::NotEnabled { op: SendOps::RDMA_READ });
    });
}

#[test]
fn datagrams_arrive_without_the_grh_and_are_answered() {
    on_every_interface(lossless_device, |_, pd, builder| {
        let mut service = builder.clone().build_datagrams(QKEY).unwrap();
        let mut clients: Vec<_> = (0..3).map(|_| builder.clone().build_datagrams(QKEY).unwrap()).collect();
        let longest = service.max_datagram() as usize;
        let mut peers: HashMap<DatagramSender, rdma_safe::Peer> = HashMap::new();
        for (round, len) in [1, 100, longest].into_iter().enumerate() {
            for client in &mut clients {
                // The receive is exactly as long as the payload.
                service.receive(pd.allocate(len).unwrap()).unwrap();
                client.receive(pd.allocate(4).unwrap()).unwrap();
                let mut outbox = pd.allocate(len).unwrap();
                let seed = u64::from(client.queue_pair().number());
                outbox.copy_from_slice(&pattern(seed, len));
                let to = client.peer(&service.address()).unwrap();
                client.post(Work::send(outbox).imm(round as u32), &to).unwrap();
            }
            for _ in 0..clients.len() {
                let message = next_receive(&mut service);
                let sender = message.sender.expect("a sender");
                assert_eq!(message.imm(), Some(round as u32));
                assert!(message.buffer.as_ref().unwrap()[..] == pattern(sender.qp_num().into(), len), "{len} bytes");
                let back = peers.entry(sender).or_insert_with(|| service.peer_of(&sender).unwrap());
                service.send_inline(&sender.qp_num().to_ne_bytes(), back).unwrap();
            }
            for client in &mut clients {
                let answer = next_receive(client);
                assert_eq!(answer.sender.unwrap().qp_num(), service.queue_pair().number());
                assert_eq!(answer.buffer.as_ref().unwrap()[..], client.queue_pair().number().to_ne_bytes());
            }
        }
        assert_eq!(peers.len(), clients.len());
        let to = service.peer(&service.address()).unwrap();
        let refused = service.send(pd.allocate(longest + 1).unwrap(), &to).unwrap_err();
        assert_eq!(refused.error, PostError::DatagramTooLong { len: longest as u64 + 1, max: longest as u32 });
    });
}

#[test]
fn endpoints_share_the_receives_of_a_pool() {
    on_every_interface(device, |rdma, pd, builder| {
        let events = pd.context().async_events().unwrap();
        let mut pool = ReceivePool::new(pd, 64).unwrap();
        for buffer in pd.allocate(64 * 512).unwrap().into_chunks(512).unwrap() {
            pool.receive(buffer).unwrap();
        }
        // The limit event comes when fewer than 60 receives are posted.
        pool.set_limit(60).unwrap();
        let mut clients: Vec<Endpoint> = Vec::new();
        let mut peers: Vec<Endpoint> = Vec::new();
        for _ in 0..4 {
            let mut client = builder.clone().receive_pool(&pool).build().unwrap();
            let mut peer = rdma.endpoint(pd).inline_data(64).build().unwrap();
            client.connect(&peer.address()).unwrap();
            peer.connect(&client.address()).unwrap();
            clients.push(client);
            peers.push(peer);
        }
        for round in 0..50_u32 {
            for (index, peer) in peers.iter_mut().enumerate() {
                peer.send_inline(&(round << 8 | index as u32).to_ne_bytes()).unwrap();
            }
            for (index, client) in clients.iter_mut().enumerate() {
                let message = wait(client);
                let buffer = message.buffer.unwrap();
                assert_eq!((buffer[..].as_ptr_range().end.addr() - buffer.as_ptr().addr(), message.byte_len), (4, 4));
                assert_eq!(buffer[..], (round << 8 | index as u32).to_ne_bytes());
                if round % 10 > 0 {
                    pool.receive(buffer).unwrap();
                }
            }
            for peer in &mut peers {
                let _ = wait(peer);
            }
        }
        assert_eq!(pool.receives_in_flight(), 64 - 5 * 4);
        let event = within_deadline("an event", || events.try_event().unwrap());
        assert_eq!(event.event_type, AsyncEventType::SRQ_LIMIT_REACHED);
        assert_eq!(event.source, AsyncSource::Srq(pool.shared_receive_queue().id()));
        drop(clients);
        assert_eq!(pool.close().unwrap().len(), 64 - 5 * 4);
    });
}
