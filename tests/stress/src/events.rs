//! Threads that sleep until a completion event arrives.

use rdma_safe::Endpoint;

use crate::{connected, domain, wait};

#[test]
fn two_sleeping_threads_exchange_messages() {
    let pd = domain();
    let (a, b) = connected(&Endpoint::builder(&pd).events(true));
    std::thread::scope(|scope| {
        for (mut endpoint, sends_first) in [(a, true), (b, false)] {
            let (mut inbox, mut outbox) = pd.allocate(128).unwrap().into_split(64).unwrap();
            scope.spawn(move || {
                for round in 0..200_u8 {
                    endpoint.receive(inbox).unwrap();
                    outbox.fill(round);
                    if sends_first {
                        endpoint.send(outbox).unwrap();
                        let (received, sent) = wait_for_both(&mut endpoint);
                        (inbox, outbox) = (received, sent);
                    } else {
                        let received = wait(&mut endpoint);
                        assert!(received.id.is_receive());
                        inbox = received.buffer.unwrap();
                        endpoint.send(outbox).unwrap();
                        outbox = wait(&mut endpoint).buffer.unwrap();
                    }
                    assert!(inbox.iter().all(|byte| *byte == round));
                }
            });
        }
    });
}

/// Waits for a receive and a send, in either order, and returns their buffers.
fn wait_for_both(endpoint: &mut Endpoint) -> (rdma_safe::Buffer, rdma_safe::Buffer) {
    let (first, second) = (wait(endpoint), wait(endpoint));
    let is_receive = first.id.is_receive();
    let (first, second) = (first.buffer.unwrap(), second.buffer.unwrap());
    if is_receive { (first, second) } else { (second, first) }
}
