//! Two threads on one queue pair, endpoints that move, and objects that are shared.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::mpsc;

use rdma_safe::cm::EventChannel;
use rdma_safe::counters::{CompletionCounter, Counters};
use rdma_safe::dm::{DeviceMemory, DeviceRegion};
use rdma_safe::flow::{Flow, FlowAction};
use rdma_safe::mr::Pages;
use rdma_safe::mw::{MemoryWindow, Type1, Type2};
use rdma_safe::pd::ThreadDomain;
use rdma_safe::post::{RecvQueue, SendQueue};
use rdma_safe::wq::{IndirectionTable, RssQueuePair, WorkQueue};
use rdma_safe::xrc::{XrcDomain, XrcTarget};
use rdma_safe::{
    AddressHandle, AsyncEvents, Buffer, CompletionChannel, CompletionQueue, Context, DatagramEndpoint, Device,
    Endpoint, ExposedRegion, Inline, Peer, ProtectionDomain, QueuePair, RawMemoryRegion, ReceivePool, RecvBatch,
    SharedReceiveQueue, WcFields, WorkRequest,
};

use crate::fake::{Config, Fake};
use crate::support::{done, endpoints, on_each_interface, raw_with, to_rts};

#[test]
fn types_are_send_and_sync_as_documented() {
    fn is_send<T: Send>() {}
    fn is_shared<T: Send + Sync>() {}
    is_shared::<Device>();
    is_shared::<Context>();
    is_shared::<ProtectionDomain>();
    is_shared::<CompletionChannel>();
    is_shared::<AsyncEvents>();
    is_shared::<ThreadDomain>();
    is_shared::<XrcDomain>();
    is_shared::<IndirectionTable>();
    is_shared::<Counters>();
    is_shared::<FlowAction>();
    is_shared::<CompletionCounter>();
    is_shared::<AddressHandle>();
    is_shared::<Peer>();
    is_shared::<Buffer>();
    is_shared::<ExposedRegion>();
    is_shared::<RawMemoryRegion>();
    is_shared::<DeviceMemory>();
    is_shared::<DeviceRegion>();
    is_shared::<MemoryWindow<Type1>>();
    is_shared::<MemoryWindow<Type2>>();
    is_shared::<CompletionQueue>();
    is_shared::<QueuePair>();
    is_shared::<XrcTarget>();
    is_shared::<RssQueuePair>();
    is_shared::<SharedReceiveQueue>();
    is_shared::<ReceivePool>();
    is_shared::<WorkQueue>();
    is_shared::<Flow>();
    is_shared::<Endpoint>();
    is_shared::<DatagramEndpoint>();
    is_send::<SendQueue<'_>>();
    is_send::<RecvQueue<'_>>();
    is_send::<RecvBatch<'_>>();
    is_send::<RecvBatch<'_, SharedReceiveQueue>>();
}

/// tokio's `AsyncFd` takes any `AsRawFd`.
#[test]
fn types_with_a_descriptor_can_be_registered_with_a_reactor() {
    fn takes<T: AsRawFd + AsFd + Send + Sync + 'static>(_: Option<&T>) {}
    takes::<AsyncEvents>(None);
    takes::<EventChannel>(None);
    let fake = Fake::new(Config::default());
    let channel = fake.open().create_channel().unwrap();
    takes(Some(&channel));
    assert_eq!(channel.as_raw_fd(), channel.as_fd().as_raw_fd());
}

#[test]
fn two_threads_use_one_queue_each() {
    const MESSAGES: u64 = if cfg!(miri) { 6 } else { 500 };
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let inboxes = pd.allocate(8 * 16).unwrap().into_chunks(16).unwrap();
        let make = || raw_with(&pd, interfaces, WcFields::STANDARD, |qp| qp.send_depth(1024).recv_depth(1024));
        // A queue pair that is its own peer: one thread sends what the other receives.
        let crate::support::Raw { mut qp, mut cq } = make();
        let number = qp.number();
        to_rts(&mut qp, number);
        let (received, freed) = mpsc::channel::<u64>();
        let sges: Vec<_> = inboxes.iter().map(Buffer::sge).collect();
        let (mut send, mut recv) = qp.split();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for wr_id in 0..MESSAGES {
                    loop {
                        let mut batch = send.batch().unwrap();
                        // SAFETY: inline data needs no memory after the call.
                        unsafe {
                            batch.send(WorkRequest::new(wr_id).signaled(), Inline(&wr_id.to_ne_bytes())).unwrap()
                        };
                        match batch.post() {
                            Ok(()) => break,
                            Err(_) => std::thread::yield_now(),
                        }
                    }
                }
            });
            scope.spawn(move || {
                for slot in (0..8).chain(freed).take(MESSAGES as usize) {
                    // SAFETY: the memory is read after all work has completed.
                    unsafe { recv.receive(1000 + slot, sges[slot as usize]).unwrap() };
                }
            });
            let (mut sent, mut arrived) = (0, 0);
            while sent < MESSAGES || arrived < MESSAGES {
                let mut poll = cq.poll();
                let Some(wc) = poll.next().unwrap() else {
                    drop(poll);
                    std::thread::yield_now();
                    continue;
                };
                assert_eq!(wc.ok(), Ok(()));
                if wc.wr_id() < 1000 {
                    assert_eq!(wc.wr_id(), sent, "in order");
                    sent += 1;
                } else {
                    assert_eq!((wc.wr_id() - 1000, wc.byte_len()), (arrived % 8, Some(8)));
                    arrived += 1;
                    let _ = received.send(wc.wr_id() - 1000);
                }
            }
            drop(received);
        });
        // The last message in each slot.
        for (slot, inbox) in (0..MESSAGES.min(8)).zip(&inboxes) {
            let last = (0..MESSAGES).rev().find(|message| message % 8 == slot).unwrap();
            assert_eq!(inbox[..8], last.to_ne_bytes());
        }
        drop(qp);
    });
}

#[test]
fn an_endpoint_goes_from_thread_to_thread() {
    const ROUNDS: usize = if cfg!(miri) { 3 } else { 50 };
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (a, mut b) = endpoints(&pd, interfaces);
        let mut travelling = Some(a);
        for round in 1..=ROUNDS {
            b.receive(pd.allocate(ROUNDS).unwrap()).unwrap();
            let mut endpoint = travelling.take().unwrap();
            let pd = pd.clone();
            travelling = Some(
                std::thread::spawn(move || {
                    endpoint.send(pd.allocate(round).unwrap()).unwrap();
                    if round % 2 == 0 {
                        // This thread takes the completions of work that another thread posted.
                        assert_eq!(done(&mut endpoint).buffer.unwrap().len(), round - 1);
                        assert_eq!(done(&mut endpoint).buffer.unwrap().len(), round);
                    }
                    endpoint
                })
                .join()
                .unwrap(),
            );
            assert_eq!(done(&mut b).byte_len, round as u32);
        }
    });
}

#[test]
fn a_domain_is_shared_by_threads() {
    let fake = Fake::new(Config::default());
    let pd = fake.pd();
    std::thread::scope(|scope| {
        for thread in 1..=4_u8 {
            let pd = pd.clone();
            scope.spawn(move || {
                for _ in 0..if cfg!(miri) { 2 } else { 50 } {
                    let mut buffer = pd.allocate(64).unwrap();
                    buffer.fill(thread);
                    let mut exposed = pd.expose(Pages::new(64).unwrap(), rdma_safe::Access::REMOTE).unwrap();
                    exposed.write(0, &buffer).unwrap();
                    let cq = pd.context().completion_queue(4).build().unwrap();
                    drop(pd.queue_pair(&cq, &cq).build().unwrap());
                    let mut bytes = [0; 64];
                    exposed.read(0, &mut bytes).unwrap();
                    assert_eq!(bytes, [thread; 64]);
                }
            });
        }
    });
    assert_eq!((fake.live().mrs, fake.live().qps), (0, 0));
}
