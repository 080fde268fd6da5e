//! Allocations and copies for each message. One test, since a task of another test could run on its thread.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

mod pairs;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use pairs::connect;
use rdma_msg::{Channel, Connector, Listener, Payload};
use support::{soft0, soon};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system allocator, with a count of the allocations of each thread.
struct Counting;

// SAFETY: every call is passed to the system allocator, and counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Fails in a thread that is exiting.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// What messages of one kind cost, both ends together.
#[derive(PartialEq, Eq, Debug)]
struct Cost {
    /// Allocations for a hundred messages, rounded down to a multiple of a hundred. Queues grow at times.
    allocations: u64,
    /// Bytes that were copied for each message.
    copied: u64,
}

const COUNT: u64 = 100;

/// Exchanges messages one at a time, and counts.
async fn cost<'p, P: Into<Payload<'p>>>([client, server]: &'p [Channel; 2], message: impl Fn() -> P) -> Cost {
    let exchange = async || {
        for _ in 0..COUNT {
            let (sent, received) = tokio::join!(client.send(message()), server.receive());
            sent.unwrap();
            received.unwrap().unwrap();
        }
        client.flush().await.unwrap();
    };
    // The first messages fill caches and queues.
    soon(exchange()).await;
    let copied = || [client, server].map(Channel::statistics).iter().map(|of| of.bytes_copied).sum::<u64>();
    // Making the message is not part of the cost.
    let before = ALLOCATIONS.get();
    drop((0..COUNT).map(|_| message().into()).collect::<Vec<Payload<'p>>>());
    let own = ALLOCATIONS.get() - before - 1;
    let (before, copied_before) = (ALLOCATIONS.get(), copied());
    soon(exchange()).await;
    let allocations = ALLOCATIONS.get() - before - own;
    Cost { allocations: allocations / COUNT * COUNT, copied: (copied() - copied_before) / COUNT }
}

#[tokio::test]
async fn short_messages_allocate_nothing_and_vectors_are_not_copied() {
    let _soft = soft0();
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let connector = Connector::new().unwrap();
    let channels = connect(&connector, &listener).await;
    let bytes = vec![7; 100_000];
    for len in [0, 64, 4096] {
        // Into a packet. The receiver reads it there.
        let expected = Cost { allocations: 0, copied: len as u64 };
        assert_eq!(cost(&channels, || &bytes[..len]).await, expected, "{len}");
    }
    // Into packets, and out of them.
    let long = cost(&channels, || &bytes[..]).await;
    assert!(long.allocations <= 2 * COUNT && long.copied == 2 * 100_000, "{long:?}");
    // Several at once: the packets that messages share are counted by references.
    let [client, server] = &channels;
    let exchange = async || {
        let (sent, received) = tokio::join!(client.send_many((0..10_000).map(|_| &bytes[..64])), async {
            let mut count = 0;
            while count < 10_000 {
                count += server.receive_many().await.unwrap().unwrap().len();
            }
            count
        });
        sent.unwrap();
        assert_eq!(received, 10_000);
    };
    soon(exchange()).await;
    let (before, packets) = (ALLOCATIONS.get(), client.statistics().packets_sent);
    soon(exchange()).await;
    let (allocations, packets) = (ALLOCATIONS.get() - before, client.statistics().packets_sent - packets);
    assert!(allocations <= packets + 5, "{allocations} allocations for {packets} packets");
    assert!(packets < 1000, "{packets} packets");
    // The peer reads it where it is.
    let in_place = cost(&channels, || vec![7; 100_000]).await;
    assert!(in_place.allocations <= 8 * COUNT && in_place.copied == 0, "{in_place:?}");
}
