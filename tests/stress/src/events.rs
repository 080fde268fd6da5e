//! Threads that sleep until an event arrives.

use rdma_safe::Endpoint;

use crate::{connected, domain, wait};

#[test]
fn two_sleepers_play_ping_pong() {
    let pd = domain();
    let (a, b) = connected(&Endpoint::builder(&pd).events(true));
    std::thread::scope(|scope| {
        for (mut endpoint, begins) in [(a, true), (b, false)] {
            let (mut inbox, mut outbox) = pd.allocate(128).unwrap().into_split(64).unwrap();
            scope.spawn(move || {
                for round in 0..200_u8 {
                    endpoint.receive(inbox).unwrap();
                    outbox.fill(round);
                    if begins {
                        endpoint.send(outbox).unwrap();
                        let (came, left) = both(&mut endpoint);
                        (inbox, outbox) = (came, left);
                    } else {
                        let came = wait(&mut endpoint);
                        assert!(came.id.is_receive());
                        inbox = came.buffer.unwrap();
                        endpoint.send(outbox).unwrap();
                        outbox = wait(&mut endpoint).buffer.unwrap();
                    }
                    assert!(inbox.iter().all(|byte| *byte == round));
                }
            });
        }
    });
}

/// The buffers of a receive and of a send, whichever ends first.
fn both(endpoint: &mut Endpoint) -> (rdma_safe::Buffer, rdma_safe::Buffer) {
    let (first, second) = (wait(endpoint), wait(endpoint));
    let is_receive = first.id.is_receive();
    let (first, second) = (first.buffer.unwrap(), second.buffer.unwrap());
    if is_receive { (first, second) } else { (second, first) }
}
