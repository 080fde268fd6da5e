//! Many connections by address between two processes: thousands in all, a thousand at once.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Instant;

use rdma_safe::cm::{CmId, ConnectParameters, Event, EventChannel, EventKind, Id, PortSpace};
use rdma_safe::{CompletionQueue, ProtectionDomain, QueuePair, QueuePairState, soft};

use crate::allocation::live;
use crate::cm::{RESOLVE, address, peer_parameters, transition};
use crate::cm_connections::kernel_objects;
use crate::support::child::{allocated, open_files};
use crate::support::lab::{self, Data, Memory, Op, Wr};
use crate::support::peer::{self, Peer};
use crate::support::{DEADLINE, Rdma, device, within_deadline};

/// Bytes of each message.
const LEN: usize = 8;
/// Backlog of the listener, `max_backlog` of Linux.
const BACKLOG: u32 = 1024;

/// Number of batches, and of connections in each.
fn batches(rdma: &Rdma) -> (usize, usize) {
    match rdma.is_soft() {
        // The full number runs over shared memory without losses.
        true if rdma.loses_cm_messages() => (6, 250),
        true if rdma.uses_udp() => (4, 250),
        true => (10, 1000),
        // Not more queue pairs than the device has. The device may be in an emulated guest.
        false => (4, 100),
    }
}

/// What a process has while it has no connections.
#[derive(Debug)]
struct Footprint {
    files: usize,
    /// Sockets of soft0 in the abstract namespace that belong to the listener, in all processes.
    sockets: usize,
    /// Mappings of the memory that soft0 shares with peers.
    shared_mappings: usize,
    /// Queue pairs and ids in the kernel, of all processes.
    kernel_objects: Option<[usize; 2]>,
    soft_objects: soft::Objects,
    /// Bytes of the heap.
    heap: usize,
}

impl Footprint {
    /// Measures this process, once the ended connections of soft0 have left timewait.
    fn new(rdma: &Rdma, listener: SocketAddr) -> Footprint {
        let mut soft_objects = soft::Objects::default();
        if rdma.is_soft() {
            within_deadline("the end of timewait", || (soft::objects().connections == 0).then_some(()));
            soft_objects = soft::objects();
        }
        let lines = |file: &str, has: &dyn Fn(&str) -> bool| {
            let text = std::fs::read_to_string(file).expect("procfs is mounted");
            text.lines().filter(|line| has(line)).count()
        };
        let port = format!("/{}/", listener.port());
        Footprint {
            files: open_files(),
            sockets: lines("/proc/net/unix", &|line| line.contains("@rdma-soft/cm/") && line.contains(&port)),
            shared_mappings: lines("/proc/self/maps", &|line| line.contains("memfd:rdma-soft")),
            kernel_objects: kernel_objects(),
            soft_objects,
            // The C library counts memory that a thread of soft0 has freed as allocated, until that thread uses it again.
            heap: if rdma.is_soft() { live() } else { allocated() },
        }
    }

    /// Whether `later` is not larger. The heap may have grown by less than `heap` bytes, or by any number.
    fn has_not_grown(&self, later: &Footprint, heap: Option<usize>) -> bool {
        later.files <= self.files
            && later.sockets <= self.sockets
            && later.shared_mappings <= self.shared_mappings
            && later.kernel_objects <= self.kernel_objects
            && later.soft_objects == self.soft_objects
            && heap.is_none_or(|heap| later.heap < self.heap + heap)
    }
}

/// An id with its queue pair.
struct End {
    id: Id,
    qp: QueuePair,
    /// Number of the connection, which the client chooses.
    number: usize,
}

/// The ends of all connections of a batch, with one channel and one completion queue.
struct Ends {
    // The queue pairs are destroyed before the memory is freed.
    ends: HashMap<CmId, End>,
    channel: EventChannel,
    memory: Memory,
    cq: CompletionQueue,
    pd: ProtectionDomain,
    count: usize,
}

impl Ends {
    fn new(rdma: &Rdma, count: usize) -> Ends {
        let pd = rdma.pd();
        let cq = rdma.completion_queue(2 * count as u32).build().unwrap();
        let (channel, memory) = (EventChannel::new().unwrap(), Memory::new(&pd, 2 * count * LEN));
        Ends { ends: HashMap::new(), channel, memory, cq, pd, count }
    }

    fn event(&self) -> Event {
        self.channel.wait(DEADLINE).unwrap().expect("an event in time")
    }

    /// Waits until another connection is disconnected. Earlier ones may leave timewait at the same time.
    fn disconnected(&self) -> CmId {
        loop {
            let event = self.event();
            match event.kind {
                EventKind::Disconnected => return event.id,
                EventKind::TimewaitExit => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn end(&mut self, id: CmId) -> &mut End {
        self.ends.get_mut(&id).expect("an event of an end")
    }

    /// Creates the queue pair of an id, and posts the receive of a message.
    fn prepare(&mut self, id: &Id, number: usize) -> QueuePair {
        let mut qp = self.pd.queue_pair(&self.cq, &self.cq).send_depth(1).recv_depth(1).build().unwrap();
        transition(id, &mut qp, QueuePairState::INIT);
        let inbox = self.memory.sge(self.at(number, true)..self.at(number, true) + LEN);
        // SAFETY: a `Memory` tolerates any access, and it is freed after the queue pairs.
        unsafe { qp.receive(number as u64, inbox) }.unwrap();
        qp
    }

    /// Offset of the message that a connection receives or sends.
    fn at(&self, number: usize, is_received: bool) -> usize {
        assert!(number < self.count);
        (2 * number + usize::from(is_received)) * LEN
    }

    fn send(&mut self, id: CmId, message: u64) {
        let number = self.end(id).number;
        let at = self.at(number, false);
        self.memory.put_u64(at, message);
        let outbox = self.memory.sge(at..at + LEN);
        let wr = Wr::new((self.count + number) as u64, Op::Send, Data::One(outbox));
        lab::post(self.end(id).qp.send_batch(), &[wr]).unwrap();
    }

    /// Waits for the send and the receive of each connection. `on_message` gets the number of each connection and its message.
    fn complete_all(&mut self, mut on_message: impl FnMut(&mut Ends, usize, u64)) {
        let mut received = vec![false; self.count];
        for _ in 0..2 * self.count {
            let wc = lab::next(&mut self.cq);
            assert_eq!(wc.status, rdma_safe::WcStatus::SUCCESS, "{wc:?}");
            let number = wc.wr_id as usize;
            if number < self.count {
                assert!(!std::mem::replace(&mut received[number], true));
                let message = self.memory.get_u64(self.at(number, true));
                on_message(self, number, message);
            }
        }
        assert!(received.into_iter().all(|was_received| was_received));
    }
}

fn parameters(end: &QueuePair) -> ConnectParameters {
    ConnectParameters::new(end.number())
}

/// Accepts the connections of a batch, answers their messages, and disconnects.
fn serve(rdma: &Rdma, listener: &mut Id, batch: usize, count: usize) {
    let mut server = Ends::new(rdma, count);
    listener.migrate(&server.channel).unwrap();
    let mut by_number = HashMap::new();
    let mut established = 0;
    while established < count {
        let event = server.event();
        match event.kind {
            EventKind::ConnectRequest(mut id, from) => {
                let private = &peer_parameters(&from).private_data[..LEN];
                let number = u64::from_ne_bytes(private.try_into().unwrap()) as usize;
                let mut qp = server.prepare(&id, number);
                transition(&id, &mut qp, QueuePairState::RTR);
                transition(&id, &mut qp, QueuePairState::RTS);
                id.accept(&parameters(&qp)).unwrap();
                assert_eq!(by_number.insert(number, id.id()), None);
                server.ends.insert(id.id(), End { id, qp, number });
            }
            EventKind::Established(_) => established += 1,
            other => panic!("{other:?}"),
        }
    }
    // The requests of the next batch may arrive before all connections of this one have ended.
    let own = EventChannel::new().unwrap();
    listener.migrate(&own).unwrap();
    server.complete_all(|server, number, message| {
        assert_eq!(message, (batch * count + number) as u64);
        server.send(by_number[&number], !message);
    });
    // The server disconnects, because its sends were the last ones: a client that left first could not acknowledge a repeated one.
    server.ends.values_mut().for_each(|end| end.id.disconnect().unwrap());
    for _ in 0..count {
        server.disconnected();
    }
}

/// Makes the connections of a batch at the same time, sends a message over each, and waits until the server has answered
/// and disconnected.
fn connect(rdma: &Rdma, server: SocketAddr, batch: usize, count: usize) {
    let mut client = Ends::new(rdma, count);
    let files = open_files();
    for number in 0..count {
        let mut id = Id::new(&client.channel, PortSpace::TCP).unwrap();
        id.resolve_address(None, server, RESOLVE).unwrap();
        assert!(matches!(client.event().kind, EventKind::AddressResolved));
        id.resolve_route(RESOLVE).unwrap();
        assert!(matches!(client.event().kind, EventKind::RouteResolved));
        let qp = client.prepare(&id, number);
        client.ends.insert(id.id(), End { id, qp, number });
    }
    for End { id, qp, number } in client.ends.values_mut() {
        let private = (*number as u64).to_ne_bytes();
        id.connect(&parameters(qp).private_data(&private).unwrap()).unwrap();
    }
    for _ in 0..count {
        let event = client.event();
        assert!(matches!(event.kind, EventKind::ConnectResponse(_)), "{:?}", event.kind);
        let End { id, qp, .. } = client.end(event.id);
        transition(id, qp, QueuePairState::RTR);
        transition(id, qp, QueuePairState::RTS);
        id.establish().unwrap();
    }
    // The process has a few for each peer that it has connections with.
    assert!(open_files() < files + count / 10, "connections take no descriptors");
    if rdma.is_soft() {
        let objects = soft::objects();
        assert_eq!((objects.cm_ids, objects.queue_pairs), (count, count));
    }
    let ids: Vec<CmId> = client.ends.keys().copied().collect();
    for id in &ids {
        let message = (batch * count + client.end(*id).number) as u64;
        client.send(*id, message);
    }
    client.complete_all(|_, number, message| assert_eq!(message, !((batch * count + number) as u64)));
    for _ in &ids {
        let id = client.disconnected();
        client.end(id).id.disconnect().unwrap();
    }
}

#[test]
fn a_listener_holds_a_thousand_connections_and_ten_thousand_leak_nothing() {
    const NAME: &str = "cm_many::a_listener_holds_a_thousand_connections_and_ten_thousand_leak_nothing";
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (batches, count) = batches(&rdma);
    // Batches after which both processes measure.
    let measurements = if rdma.loses_cm_messages() { batches } else { 1 };
    let measured = |server: SocketAddr, run: &mut dyn FnMut(usize)| {
        // The first line allocates the buffer of standard input.
        peer::wait_for("start");
        let mut before = None;
        let mut heaps = Vec::with_capacity(batches);
        for batch in 0..batches {
            run(batch);
            if batch < measurements {
                let footprint = Footprint::new(&rdma, server);
                heaps.push(footprint.heap);
                before.get_or_insert(footprint);
                // The next requests would be connections of a server that has not measured yet.
                peer::report("measured");
                peer::wait_for("go on");
            }
        }
        let before = before.expect("a batch");
        // A leak of the smallest allocation is 32 bytes for each connection, and tables that grow take less.
        let heap = match heaps.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).min() {
            None => Some((batches - 1) * count * 16),
            // How many messages wait for a retransmission at once depends on the machine's load, and so do the sizes of tables. A
            // table seldom grows, and a leak grows in each batch.
            Some(least) => {
                assert!(least < count * 16, "the heap has grown in each batch: {heaps:?}");
                None
            }
        };
        let start = Instant::now();
        // The other process may still have connections, and descriptors for them.
        loop {
            let after = Footprint::new(&rdma, server);
            if before.has_not_grown(&after, heap) {
                return println!("{before:?}\n{after:?}");
            }
            assert!(start.elapsed() < DEADLINE, "{before:?}\n{after:?}");
            std::thread::yield_now();
        }
    };
    match peer::role() {
        None => {
            // Otherwise the C library counts the freed memory in its caches as allocated.
            let uncached = [("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")];
            let mut server = Peer::start_with(NAME, "server", &uncached);
            let mut client = Peer::start_with(NAME, server.next_report(), &uncached);
            let mut both = [&mut server, &mut client];
            both.iter_mut().for_each(|peer| peer.tell("start"));
            for _ in 0..measurements {
                both.iter_mut().for_each(|peer| assert_eq!(peer.next_report(), "measured"));
                both.iter_mut().for_each(|peer| peer.tell("go on"));
            }
            client.expect_success();
            server.expect_success();
        }
        Some(role) if role == "server" => {
            let own = EventChannel::new().unwrap();
            let mut listener = Id::new(&own, PortSpace::TCP).unwrap();
            listener.bind((address, 0)).unwrap();
            listener.listen(BACKLOG).unwrap();
            let local = listener.local_address().unwrap().ip().unwrap();
            peer::report(local);
            measured(local, &mut |batch| serve(&rdma, &mut listener, batch, count));
        }
        Some(server) => {
            let server = server.parse().unwrap();
            measured(server, &mut |batch| connect(&rdma, server, batch, count));
        }
    }
}
