//! Random schedules: operations of all kinds are started, polled when they are woken, and dropped at any time, while packets are
//! lost and connections end. Nothing leaks, no message is lost or repeated, and no task that could go on is left asleep.
//!
//! The checker of soft0 watches that no memory is used while the device may use it.
//!
//! `RDMA_ASYNC_SCHEDULES` is the number of schedules, and `RDMA_ASYNC_FIRST_SCHEDULE` the first seed. `cargo xtask soak` runs a
//! thousand.

mod support;

use std::cell::{Cell, RefCell};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use rdma_async::{Connection, Connector, Datagrams, Driver, Group, Listener, Local, Message, Peer, Runner, Turn};
use rdma_safe::soft::check::{Kind, Options, Session};
use rdma_safe::soft::{self, Faults};
use rdma_safe::{Access, ExposedRegion};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use support::random::Random;

const STEPS: u64 = 150;
const PAIRS: usize = 2;
/// Size of the queues, small enough that operations wait for room.
const DEPTH: u32 = 4;
/// Time after which a task counts as lost.
const SOON: Duration = Duration::from_secs(30);

/// A socket for datagrams.
#[derive(Default)]
struct Socket {
    datagrams: RefCell<Option<Datagrams<Local>>>,
    /// Peers and groups of this socket that were found.
    peers: RefCell<Vec<Peer>>,
    groups: RefCell<Vec<Group<Local>>>,
    kept: RefCell<Vec<Message<Local>>>,
}

impl Socket {
    /// Takes the handle, with all that was made by it.
    fn take(&self) -> Option<Datagrams<Local>> {
        drop((self.peers.take(), self.groups.take(), self.kept.take()));
        self.datagrams.take()
    }

    fn keep(&self, message: Message<Local>) {
        assert!(
            message.len() == 8 && message.iter().all(|byte| *byte == message[0]),
            "the bytes of a datagram changed"
        );
        self.kept.borrow_mut().push(message);
        if self.kept.borrow().len() > 3 {
            self.kept.borrow_mut().clear();
        }
    }
}

/// A task and whether it was woken since its last poll.
struct Task {
    future: Pin<Box<dyn Future<Output = ()>>>,
    woken: Arc<Woken>,
    /// Whether it waits for a peer, and so may never end.
    is_handshake: bool,
    /// The end whose connection it uses, and the number of that connection.
    uses: Option<(Rc<End>, u64)>,
}

impl Task {
    /// Whether both ends of the connection may only have handles that wait for each other.
    fn uses_dropped(&self) -> bool {
        let is_dropped =
            |(end, number): &(Rc<End>, u64)| end.connection.borrow().is_none() || end.number.get() != *number;
        self.uses.as_ref().is_some_and(is_dropped)
    }
}

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// One end of a pair.
#[derive(Default)]
struct End {
    connection: RefCell<Option<Connection<Local>>>,
    /// Number of this connection.
    number: Cell<u64>,
    /// The regions that this end has exposed. The peer may still use those of earlier connections.
    regions: RefCell<Vec<ExposedRegion>>,
    /// Number of the next message to send.
    next: Cell<u64>,
    /// Number of the last message received, plus one.
    received: Cell<u64>,
    kept: RefCell<Vec<Message<Local>>>,
}

struct Schedule {
    random: Random,
    driver: Option<Driver<Local>>,
    runner: Option<Runner<Local>>,
    listener: Option<Rc<Listener<Local>>>,
    connector: Connector<Local>,
    /// Both ends of each pair: the first connects, the second accepts.
    ends: Vec<[Rc<End>; 2]>,
    sockets: [Rc<Socket>; 2],
    tasks: Vec<Task>,
}

impl Schedule {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let (driver, mut runner) = Driver::builder().completions(64).build::<Local>().unwrap();
        let (keepalive, timeout) = (Duration::from_millis(200), Duration::from_millis(500));
        let listener = Listener::builder().driver(&driver).sends(DEPTH).receives(DEPTH);
        let listener = listener.keepalive(keepalive).timeout(timeout);
        let listener = Rc::new(runner.block_on(listener.bind("127.0.0.1:0")).unwrap());
        let connector = Connector::with_driver(&driver).sends(DEPTH).receives(DEPTH);
        let connector = connector.keepalive(keepalive).timeout(timeout);
        if random.below(2) == 0 {
            let drop = random.below(30) as f64 / 1000.0;
            soft::set_faults(Faults::default().with_seed(seed).with_drop(drop)).unwrap();
        }
        let ends = (0..PAIRS).map(|_| <[Rc<End>; 2]>::default()).collect();
        Schedule {
            random,
            driver: Some(driver),
            runner: Some(runner),
            listener: Some(listener),
            connector,
            ends,
            sockets: <[Rc<Socket>; 2]>::default(),
            tasks: Vec::new(),
        }
    }

    fn spawn(&mut self, future: impl Future<Output = ()> + 'static) {
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        self.tasks.push(Task { future: Box::pin(future), woken, is_handshake: false, uses: None });
    }

    fn spawn_handshake(&mut self, future: impl Future<Output = ()> + 'static) {
        self.spawn(future);
        self.tasks.last_mut().unwrap().is_handshake = true;
    }

    /// Polls a task that was woken. Returns whether it is still there.
    fn poll(&mut self, index: usize) -> bool {
        let task = &mut self.tasks[index];
        if !task.woken.0.swap(false, Ordering::SeqCst) {
            return true;
        }
        let waker = Waker::from(task.woken.clone());
        let is_pending = task.future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending();
        if !is_pending {
            drop(self.tasks.swap_remove(index));
        }
        is_pending
    }

    fn turn(&mut self) -> Option<Turn> {
        self.runner.as_mut().map(Runner::turn)
    }

    fn end(&mut self) -> (Rc<End>, Rc<End>) {
        let pair = self.random.below(PAIRS as u64) as usize;
        let side = self.random.below(2) as usize;
        (self.ends[pair][side].clone(), self.ends[pair][1 - side].clone())
    }

    fn connect(&mut self) {
        let pair = self.random.below(PAIRS as u64) as usize;
        let [client, server] = self.ends[pair].clone();
        if client.connection.borrow().is_some() || server.connection.borrow().is_some() {
            return;
        }
        let Some(listener) = self.listener.clone() else { return };
        let (connector, address) = (self.connector.clone(), listener.local_address());
        self.spawn_handshake(async move {
            if let Ok(connection) = connector.connect(address).await {
                client.connected(connection);
            }
        });
        self.spawn_handshake(async move {
            if let Ok(connection) = listener.accept().await {
                server.connected(connection);
            }
        });
    }

    fn operate(&mut self) {
        let (end, peer) = self.end();
        let Some(connection) = end.connection.borrow().clone() else { return };
        let remote = peer.regions.borrow().last().map(ExposedRegion::remote);
        let uses = Some((end.clone(), end.number.get()));
        let (kind, number) = (self.random.below(9), self.random.below(u64::MAX >> 33));
        self.spawn(async move {
            let word = async || Some(connection.buffer_of(&number.to_be_bytes()).await.ok()?);
            match (kind, remote) {
                (0 | 1, _) => {
                    let Ok(buffer) = connection.buffer(8).await else { return };
                    // Numbers are given in the order of posting, which is the order of the first polls unless some wait.
                    let _ = connection.send(end.numbered(buffer)).await;
                }
                (2, _) => {
                    let Ok(buffer) = connection.buffer(8).await else { return };
                    let _ = connection.send(end.numbered(buffer)).posted().await;
                }
                (3 | 4, _) => match connection.receive().await {
                    Ok(Some(message)) => end.received(message),
                    Ok(None) | Err(_) => drop(end.connection.take()),
                },
                (5, Some(remote)) => drop(connection.write(word().await.unwrap(), remote).await),
                (6, Some(remote)) => drop(connection.read(word().await.unwrap(), remote).await),
                (7, Some(remote)) => drop(connection.fetch_add(remote, 1).await),
                // More than the queue takes at once.
                (8, Some(remote)) => {
                    let mut batch = connection.batch();
                    for _ in 0..number % (2 * u64::from(DEPTH)) {
                        batch = match number % 3 {
                            0 => batch.read(word().await.unwrap(), remote),
                            _ => batch.write(word().await.unwrap(), remote),
                        };
                    }
                    match number % 5 {
                        0 => drop(batch.posted().await),
                        _ => drop(batch.await),
                    }
                }
                _ => {}
            }
        });
        self.tasks.last_mut().unwrap().uses = uses;
    }

    fn exchange_datagrams(&mut self) {
        let side = self.random.below(2) as usize;
        let [socket, other] = [self.sockets[side].clone(), self.sockets[1 - side].clone()];
        let Some(driver) = self.driver.clone() else { return };
        let Some(datagrams) = socket.datagrams.borrow().clone() else {
            self.spawn(async move {
                let builder = Datagrams::builder().driver(&driver).sends(DEPTH).receives(DEPTH);
                if let Ok(bound) = builder.timeout(Duration::from_millis(500)).bind("127.0.0.1:0").await {
                    // Another task may have bound one before.
                    let _ = socket.datagrams.borrow_mut().get_or_insert(bound);
                }
            });
            return;
        };
        let (kind, byte) = (self.random.below(8), self.random.below(256) as u8);
        let address = other.datagrams.borrow().as_ref().map(Datagrams::local_address);
        if matches!(kind, 2 | 3) {
            // Nobody may ever send to it.
            return self.spawn_handshake(async move {
                if let Ok((message, sender)) = datagrams.receive_from().await {
                    socket.keep(message);
                    socket.peers.borrow_mut().push(sender);
                }
            });
        }
        let peers = socket.peers.borrow();
        let peer = peers.get(self.random.below(peers.len().max(1) as u64) as usize).cloned();
        drop(peers);
        self.spawn(async move {
            match (kind, address, peer) {
                (0, Some(address), _) => {
                    if let Ok(peer) = datagrams.peer(address).await {
                        socket.peers.borrow_mut().push(peer);
                    }
                }
                (1, ..) => {
                    if let Ok(group) = datagrams.join([239, 12, 0, byte % 4]).await {
                        socket.groups.borrow_mut().push(group);
                    }
                }
                (4..=6, _, Some(peer)) => {
                    let Ok(buffer) = datagrams.buffer_of(&[byte; 8]).await else { return };
                    match kind {
                        4 => drop(datagrams.send_to(buffer, &peer).posted().await),
                        _ => drop(datagrams.send_to(buffer, &peer).await),
                    }
                }
                (7, ..) => {
                    let taken = socket.groups.borrow_mut().pop();
                    let Some(group) = taken else { return };
                    let Ok(buffer) = datagrams.buffer_of(&[byte; 8]).await else { return };
                    drop(datagrams.send_to(buffer, &group).await);
                }
                _ => {}
            }
        });
    }

    fn step(&mut self) {
        match self.random.below(24) {
            0 => self.connect(),
            1..=8 => self.operate(),
            20..=22 => self.exchange_datagrams(),
            23 if self.random.below(6) == 0 => {
                let socket = self.sockets[self.random.below(2) as usize].take();
                if let Some(datagrams) = socket.filter(|_| self.random.below(2) == 0) {
                    self.spawn(async move { datagrams.close().await });
                }
            }
            9 => {
                let (end, _) = self.end();
                let taken = end.kept.borrow_mut().pop();
                drop(taken);
            }
            10 | 11 if !self.tasks.is_empty() => {
                let index = self.random.below(self.tasks.len() as u64) as usize;
                drop(self.tasks.swap_remove(index));
            }
            12 => {
                let (end, _) = self.end();
                match self.random.below(4) {
                    0 => drop(end.connection.take()),
                    1 => {
                        if let Some(connection) = end.connection.take() {
                            self.spawn(async move { connection.close().await });
                        }
                    }
                    _ => {}
                }
            }
            _ => {}
        }
        for _ in 0..self.random.below(4) {
            let _ = self.turn();
        }
        for _ in 0..self.random.below(4) {
            if !self.tasks.is_empty() {
                let index = self.random.below(self.tasks.len() as u64) as usize;
                self.poll(index);
            }
        }
    }

    /// Runs until no task is left. All connections have ended, so each task has to end.
    fn drain(&mut self, seed: u64) {
        let start = Instant::now();
        loop {
            let mut index = 0;
            while index < self.tasks.len() {
                if self.poll(index) {
                    index += 1;
                }
            }
            // Tasks may have bound a socket or received a datagram just now.
            self.sockets.iter().for_each(|socket| drop(socket.take()));
            let connections = self.driver.as_ref().map_or(0, |driver| driver.statistics().connections);
            let is_stopped = self.runner.is_none();
            if self.tasks.is_empty() && (connections == 0 || is_stopped) {
                return;
            }
            assert!(start.elapsed() < SOON, "seed {seed}: {} tasks sleep, {connections} connections", self.tasks.len());
            if self.turn().is_none_or(|turn| turn == Turn::Sleep) {
                let Some(runner) = &self.runner else { continue };
                let mut fds = [PollFd::from_borrowed_fd(runner.as_fd(), PollFlags::IN)];
                poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 })).unwrap();
            }
        }
    }

    fn finish(mut self, seed: u64) {
        self.tasks.retain(|task| !task.uses_dropped());
        let black_hole = Faults::default().with_seed(seed).with_drop(1.0);
        let mut pools = Vec::new();
        let all: Vec<_> = self.ends.iter().flatten().cloned().collect();
        pools.extend(all.iter().filter_map(|end| end.connection.borrow().as_ref().map(|open| open.pool().clone())));
        let sockets = self.sockets.clone();
        let bound =
            sockets.iter().filter_map(|socket| socket.datagrams.borrow().as_ref().map(|own| own.pool().clone()));
        pools.extend(bound);
        let ending = self.random.below(4);
        match ending {
            // The driver stops, with work in flight.
            0 => drop(self.runner.take()),
            // No packet arrives any more.
            1 => soft::set_faults(black_hole).unwrap(),
            // All futures are dropped. Otherwise two of them could wait for messages of each other.
            3 => self.tasks.clear(),
            _ => {}
        }
        for end in &all {
            drop(end.kept.take());
            let Some(connection) = end.connection.take() else { continue };
            if ending == 2 {
                self.spawn(async move { connection.close().await });
            }
        }
        for socket in &sockets {
            if let Some(datagrams) = socket.take() {
                self.spawn(async move { datagrams.close().await });
            }
        }
        // Tasks in `accept`, `connect` and `receive_from` wait for peers that may never come. Some have an effect meanwhile.
        self.tasks.retain(|task| !task.is_handshake);
        self.listener = None;
        for end in self.ends.iter().flatten() {
            end.connection.take();
        }
        self.drain(seed);
        soft::set_faults(Faults::default()).unwrap();
        for end in &all {
            drop((end.kept.take(), end.regions.take()));
        }
        if let Some(driver) = &self.driver {
            assert_eq!(driver.statistics().operations, 0, "seed {seed}");
        }
        for pool in pools {
            assert_eq!(pool.statistics().used(), 0, "seed {seed}, ending {ending}");
        }
    }
}

impl End {
    fn connected(&self, connection: Connection<Local>) {
        let rights = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        self.regions.borrow_mut().extend(connection.pd().expose(vec![0; 64].into_boxed_slice(), rights));
        self.next.set(0);
        self.received.set(0);
        self.kept.take();
        self.number.set(self.number.get() + 1);
        self.connection.replace(Some(connection));
    }

    fn numbered(&self, mut buffer: rdma_safe::Buffer) -> rdma_safe::Buffer {
        let number = self.next.get();
        self.next.set(number + 1);
        buffer.copy_from_slice(&number.to_be_bytes());
        buffer
    }

    fn received(&self, message: Message<Local>) {
        let number = u64::from_be_bytes(message.first_chunk().copied().expect("a message has a number"));
        assert!(number < 1 << 40, "the bytes of a message changed");
        self.received.set(self.received.get().max(number + 1));
        self.kept.borrow_mut().push(message);
        if self.kept.borrow().len() > 3 {
            self.kept.borrow_mut().clear();
        }
    }
}

#[test]
fn operations_are_dropped_at_any_time() {
    let mut options = Options::default();
    // Tasks keep messages, so the peer may have to wait.
    options.suppressed.push(Kind::ReceiverNotReady);
    let session = Session::start(options).unwrap();
    soft::install().unwrap();
    let number = |name: &str, default| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    let first = number("RDMA_ASYNC_FIRST_SCHEDULE", 1);
    for seed in first..first + number("RDMA_ASYNC_SCHEDULES", 40) {
        let mut schedule = Schedule::new(seed);
        for _ in 0..STEPS {
            schedule.step();
        }
        schedule.finish(seed);
        assert!(session.take_reports().is_empty(), "seed {seed}");
    }
}
