//! The thread that serves peers and timers while nobody polls.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::ack_delay::ACK_DELAY;
use super::core::{Core, Device, Look};
use super::schedule;
use super::signal::Signal;
use crate::net::Readable;
use crate::transport::Time;

/// Time between two checks whether the program still polls. A program that has not polled for this long has stopped.
const IDLE: Duration = Duration::from_micros(400);

/// Shortest time over which polls are counted, since every packet wakes the thread.
const WATCHED: Duration = Duration::from_micros(200);

/// Longest average time between polls of a program that polls all the time.
const PACE: Duration = Duration::from_micros(6);

/// How long polls do not count after a program has stopped polling without arming: the first time, and the longest. It doubles.
const DOUBT: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(64));

/// The first and the last nap after something has arrived that raised no event: each is twice as long as the one before.
///
/// The program may spin on its memory. If its peer shares the processor, the peer runs only when the program's time slice is
/// over, after some milliseconds. A nap of this thread shortens that: the thread preempts the program when it wakes up, and
/// when it sleeps again, the scheduler picks the peer, which has run less.
const NAPS: (Duration, Duration) = (Duration::from_micros(100), Duration::from_micros(3200));

/// Wakes the thread while it waits.
#[derive(Debug)]
pub(crate) struct Wake {
    signal: Signal,
    /// The thread is idle, because the program polls.
    is_idle: AtomicBool,
    /// Until when the thread waits, in nanoseconds; 0 while it does not wait, and looks at the device before it does.
    until: AtomicU64,
    /// The links of which it waits until they take more: [`Core::blocked`](super::core::Core::blocked).
    watched: AtomicU64,
}

impl Wake {
    pub(crate) fn new() -> io::Result<Wake> {
        Ok(Wake {
            signal: Signal::new()?,
            is_idle: AtomicBool::new(false),
            until: AtomicU64::new(0),
            watched: AtomicU64::new(0),
        })
    }

    /// Whether the device is left to a program that polls it.
    pub(crate) fn is_idle(&self) -> bool {
        self.is_idle.load(Ordering::Relaxed)
    }

    /// A program stops polling.
    pub(crate) fn take_over(&self) {
        // Most of the time the server is not idle. A load then leaves the cache line shared.
        if self.is_idle.load(Ordering::SeqCst) && self.is_idle.swap(false, Ordering::SeqCst) {
            self.signal.raise();
        }
    }

    /// Something is to be done by then.
    pub(crate) fn wake_before(&self, at: Time) {
        if at.0 < self.until.load(Ordering::SeqCst) {
            self.until.store(0, Ordering::SeqCst);
            self.signal.raise();
        }
    }

    /// Whether the thread looks at the device by `at` without being woken.
    ///
    /// Call it with the device locked. The thread sets its deadline with the device locked, too, and clears it after waking up
    /// and before locking the device. So a thread that is awake has yet to see what the caller leaves.
    pub(super) fn wakes_before(&self, at: Time) -> bool {
        self.until.load(Ordering::SeqCst) <= at.0
    }

    /// Blocked links that need not be told of.
    pub(super) fn watched(&self) -> u64 {
        self.watched.load(Ordering::SeqCst)
    }

    /// It is about to wait. For the device it is said with the device locked, so that nothing is put off between.
    pub(super) fn waits_until(&self, deadline: Option<Time>) {
        self.until.store(deadline.map_or(u64::MAX, |at| at.0), Ordering::SeqCst);
    }

    /// Whether it was woken and has not waited since.
    #[cfg(test)]
    pub(super) fn was_woken(&self) -> bool {
        let mut fds = [pollfd(self.fd(), libc::POLLIN)];
        wait(&mut fds, Some(Time(0)), Time(0));
        fds[0].revents != 0
    }

    fn fd(&self) -> libc::c_int {
        self.signal.fd()
    }
}

/// Starts the thread, once.
pub(crate) fn start(device: &'static Device) {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        // SAFETY: the function does what a child may do right after `fork`: it stores a number. It is there as the other below.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        // SAFETY: the function takes nothing, does not unwind, and is there as long as the library that it is in.
        unsafe { libc::atexit(at_exit) };
        let thread = std::thread::Builder::new().name("rdma-soft".to_owned());
        if let Err(error) = thread.spawn(move || without_signals(device)) {
            eprintln!("rdma-soft: no thread of its own, so that peers are served only while somebody polls: {error}");
        }
    });
}

/// This process was forked from the one that the device belongs to.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// Whether this process was forked after the device was opened. It then shares the parent's sockets and memory, and threads that
/// exist only in the parent may hold the locks. The first call says so on standard error.
pub(super) fn is_child() -> bool {
    static IS_SAID: AtomicBool = AtomicBool::new(false);
    if !IS_CHILD.load(Ordering::Relaxed) {
        return false;
    }
    if !IS_SAID.swap(true, Ordering::Relaxed) {
        const REASON: &str = "rdma-soft: this process was forked from one that had opened soft0, which stays that of the parent: \
                              open it after the fork, as a daemon does, or execute a program in the child\n";
        // Not by the lock of the standard library, which may be held for ever.
        // SAFETY: the text is there, and so long.
        unsafe { libc::write(libc::STDERR_FILENO, REASON.as_ptr().cast(), REASON.len()) };
    }
    true
}

/// Sends the ACKs that wait when the program ends. A forked child does not: its sockets are the parent's.
extern "C" fn at_exit() {
    if let Some(device) = super::core::existing().filter(|_| !IS_CHILD.load(Ordering::Relaxed)) {
        device.send_the_rest();
    }
}

/// Signals are for the threads of the program.
fn without_signals(device: &Device) {
    // SAFETY: zero is a value of a set, which is filled before it is used; no old one is asked for.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
    schedule::prefer_latency();
    serve(device);
}

/// Whether a program polls, as the thread sees it.
struct Watch {
    polls: u32,
    since: Time,
    /// Programs that wait for memory to change poll now and then, but do not see to the device while they wait.
    doubt: Duration,
    believes_from: Time,
}

impl Watch {
    /// Whether a program polls all the time.
    fn is_polled(&mut self, device: &Device) -> bool {
        let (polls, now) = (device.polls(), device.now());
        let elapsed = Duration::from_nanos(now.0.saturating_sub(self.since.0));
        if elapsed < WATCHED {
            return false;
        }
        let more = polls.wrapping_sub(self.polls);
        (self.polls, self.since) = (polls, now);
        PACE * more >= elapsed && now >= self.believes_from
    }

    /// Stays idle as long as a program polls the device, which makes progress meanwhile.
    fn stand_by(&mut self, device: &Device, waits: &mut Waits) {
        let wake = &device.server;
        let start = device.now();
        {
            let mut core = device.lock_in_turn();
            if core.direct.is_some() {
                return;
            }
            // From here on packets do not wake the thread. Peers without an answer do: `Lane::kick`.
            core.wake_up();
            waits.fill_idle(&core, wake);
            wake.is_idle.store(true, Ordering::SeqCst);
        }
        let mut polls = device.polls();
        let was_woken = loop {
            match waits.nap(device, IDLE) {
                Woken::Program => break true,
                Woken::Peer => {
                    let mut core = device.lock_in_turn();
                    core.progress_there(device.now(), Look::Everywhere);
                    if !core.direct.is_some() {
                        core.wake_up();
                    }
                }
                Woken::Timeout if device.polls() == polls => break false,
                Woken::Timeout => polls = device.polls(),
            }
        };
        wake.is_idle.store(false, Ordering::SeqCst);
        let now = device.now();
        (self.polls, self.since) = (device.polls(), now);
        if now >= start + self.doubt {
            self.doubt = DOUBT.0;
        }
        if !was_woken {
            self.believes_from = now + self.doubt;
            self.doubt = (2 * self.doubt).min(DOUBT.1);
        }
    }
}

/// Who woke the thread.
enum Woken {
    Program,
    Peer,
    Timeout,
}

/// The descriptors that the thread waits for.
struct Waits {
    fds: Vec<libc::pollfd>,
    /// Index of the first descriptor of each link.
    links: Vec<usize>,
    /// Readable parts of each link, when the thread was woken.
    readable: Vec<Readable>,
}

impl Waits {
    /// Collects descriptors to wait for packets, for room in sockets, and for wake-ups.
    fn fill(&mut self, core: &Core, wake: &Wake) {
        self.fds.clear();
        self.links.clear();
        self.fds.push(pollfd(wake.fd(), libc::POLLIN));
        for (index, link) in core.links.iter().enumerate() {
            self.links.push(self.fds.len());
            let blocked = if core.is_blocked(index) { libc::POLLOUT } else { 0 };
            // Packets wake the program if its channel is direct.
            let (packets, near) = if core.direct.is_some() { (0, None) } else { (libc::POLLIN, link.socket.near_fd()) };
            self.fds.push(pollfd(link.socket.fd().as_raw_fd(), packets | blocked));
            // A negative descriptor is skipped.
            self.fds.push(pollfd(near.map_or(-1, |fd| fd.as_raw_fd()), libc::POLLIN));
            self.fds.extend(link.groups.iter().map(|(_, group)| pollfd(group.fd().as_raw_fd(), libc::POLLIN)));
        }
    }

    /// Collects descriptors to wait for wake-ups by the program and by peers on this host.
    fn fill_idle(&mut self, core: &Core, wake: &Wake) {
        self.links.clear();
        self.fds.clear();
        self.fds.push(pollfd(wake.fd(), libc::POLLIN));
        self.fds.extend(
            core.links.iter().filter_map(|link| link.socket.near_fd()).map(|fd| pollfd(fd.as_raw_fd(), libc::POLLIN)),
        );
    }

    /// Waits for at most `most`.
    fn nap(&mut self, device: &Device, most: Duration) -> Woken {
        let deadline = device.now() + most;
        device.server.waits_until(Some(deadline));
        self.sleep(device, Some(deadline))
    }

    /// Waits until something is ready.
    fn sleep(&mut self, device: &Device, deadline: Option<Time>) -> Woken {
        let wake = &device.server;
        wait(&mut self.fds, deadline, device.now());
        wake.until.store(0, Ordering::SeqCst);
        if self.fds[0].revents != 0 {
            wake.signal.lower();
            return Woken::Program;
        }
        if self.fds.iter().any(|fd| fd.revents != 0) { Woken::Peer } else { Woken::Timeout }
    }

    /// Where to look for packets after a wait.
    fn look(&mut self) -> Look<'_> {
        self.readable.clear();
        let mut expected = 0;
        for at in &self.links {
            let [wire, near] = [*at, at + 1].map(|at| self.fds[at].revents);
            let readable = Readable { wire: wire & libc::POLLIN != 0, near: near != 0 };
            expected += usize::from(readable.wire && wire == libc::POLLIN) + usize::from(readable.near);
            self.readable.push(readable);
        }
        // Look everywhere after a deadline, a wake-up by the program, an error, or a packet for a group.
        let is_more = self.fds.iter().filter(|fd| fd.revents != 0).count() != expected;
        if expected == 0 || is_more { Look::Everywhere } else { Look::Readable(&self.readable) }
    }
}

fn serve(device: &Device) {
    let wake = &device.server;
    let mut watch = Watch { polls: device.polls(), since: device.now(), doubt: DOUBT.0, believes_from: Time(0) };
    let mut waits = Waits { fds: Vec::new(), links: Vec::new(), readable: Vec::new() };
    let mut nap = NAPS.1;
    let mut is_first = true;
    let mut is_direct = false;
    loop {
        let is_polled = !is_direct && watch.is_polled(device);
        if is_polled {
            watch.stand_by(device, &mut waits);
        }
        // In turns, so that others get at the device.
        let mut core = device.lock_in_turn();
        let now = device.now();
        // A timer expires only if nothing was left anywhere.
        let is_due = core.wake_at().is_some_and(|at| at <= now);
        let is_known = std::mem::take(&mut is_first) && !is_polled && !is_due && !is_direct;
        let look = if is_known { waits.look() } else { Look::Everywhere };
        let notices = core.state.shared.events.notices();
        let has_found = core.progress_there(now, look);
        is_direct = device.review_direct(&mut core, has_found, now);
        if has_found {
            // A program that gets an event sleeps, and needs no naps.
            nap = if core.state.shared.events.notices() == notices { NAPS.0 } else { NAPS.1 };
        }
        // A packet that has arrived since is in a ring, which `sleep` checks, or makes a socket readable.
        if core.is_busy() || !core.sleep() {
            continue;
        }
        waits.fill(&core, wake);
        let mut deadline = core.wake_at();
        if nap < NAPS.1 {
            deadline = deadline.into_iter().chain([now + nap]).min();
            nap *= 2;
        }
        if is_direct {
            deadline = deadline.into_iter().chain([now + ACK_DELAY]).min();
        }
        // The next thread that locks the device compares with this deadline, even if this thread is not asleep yet.
        wake.waits_until(deadline);
        wake.watched.store(core.blocked(), Ordering::SeqCst);
        drop(core);
        waits.sleep(device, deadline);
        is_first = true;
    }
}

const fn pollfd(fd: libc::c_int, events: libc::c_short) -> libc::pollfd {
    libc::pollfd { fd, events, revents: 0 }
}

/// Waits for any of them. Without a deadline it is until one is ready: there is nothing to be done before.
fn wait(fds: &mut [libc::pollfd], deadline: Option<Time>, now: Time) {
    let timeout = deadline.map(|deadline| {
        let left = deadline.0.saturating_sub(now.0);
        libc::timespec { tv_sec: (left / 1_000_000_000) as _, tv_nsec: (left % 1_000_000_000) as _ }
    });
    let pointer = timeout.as_ref().map_or(std::ptr::null(), |timeout| &raw const *timeout);
    // SAFETY: the entries are there, and the timeout is, or is null. What it returns is looked at in the entries.
    unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, pointer, std::ptr::null()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::core::Link;
    use crate::device::polling::PACKETS;
    use crate::faults::Faults;
    use crate::net::To;

    fn waits() -> Waits {
        Waits { fds: Vec::new(), links: Vec::new(), readable: Vec::new() }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn an_idle_server_is_woken_by_a_peer_that_waits_for_an_answer() {
        // These devices have no server thread.
        let [device, peer] = [(); 2].map(|()| Device::new().unwrap());
        let mut waits = waits();
        let address = {
            let mut core = device.lock();
            core.wake_up();
            waits.fill_idle(&core, &device.server);
            core.links[0].socket.address()
        };
        let (mut core, now) = (peer.lock(), peer.now());
        let Link { socket, outbox, .. } = &mut core.links[0];
        // SAFETY: there is no payload.
        unsafe { outbox.push(socket, To { address, class: 0 }, &[0; 12], &[], now) };
        outbox.flush(socket, now);
        // The first packet announces a new peer. The server accepts it and stays idle.
        device.lock().progress(now);
        device.lock().wake_up();
        // SAFETY: there is no payload.
        unsafe { outbox.push(socket, To { address, class: 0 }, &[0; 12], &[], now) };
        outbox.flush(socket, now);
        assert!(matches!(waits.nap(&device, Duration::ZERO), Woken::Timeout), "it has not asked to be woken");
        outbox.kick();
        assert!(matches!(waits.nap(&device, Duration::from_secs(60)), Woken::Peer));
        device.lock().progress(now);
        device.lock().wake_up();
        assert!(matches!(waits.nap(&device, Duration::ZERO), Woken::Timeout), "once for each kick");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn the_server_looks_only_where_something_can_be_read_unless_it_is_woken_by_another() {
        let device = Device::new().unwrap();
        let mut waits = waits();
        assert!(matches!(waits.look(), Look::Everywhere), "it has not waited yet");
        let address = device.lock().links[0].socket.address();
        let to = std::net::SocketAddr::new(address, crate::wire::UDP_PORT);
        std::net::UdpSocket::bind((address, 0)).unwrap().send_to(&[0; 24], to).unwrap();
        let readable = [Readable { wire: true, near: false }];
        for is_woken in [false, true] {
            if is_woken {
                device.server.signal.raise();
            }
            waits.fill(&device.lock(), &device.server);
            waits.sleep(&device, Some(device.now() + Duration::from_secs(60)));
            match waits.look() {
                Look::Readable(of) => assert!(of == readable && !is_woken),
                _ => assert!(is_woken),
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn what_a_poll_leaves_is_left_to_the_server() {
        // Nobody serves it.
        let device = Device::new().unwrap();
        device.server.waits_until(None);
        device.poll();
        assert!(!device.server.was_woken(), "there is nothing to do");
        let (mut core, now) = (device.lock(), device.now());
        core.links[0].set_faults(Faults { delay: Duration::from_secs(1), ..Faults::default() }, now);
        let Link { socket, outbox, .. } = &mut core.links[0];
        // SAFETY: there is no payload.
        unsafe { outbox.push(socket, To { address: socket.address(), class: 0 }, &[0; 12], &[], now) };
        drop(core);
        device.poll();
        assert!(device.server.was_woken(), "a packet is to go later, and nobody need come back");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_program_that_polls_sends_the_rest_itself() {
        // It has no server thread.
        let device = Device::new().unwrap();
        for is_idle in [true, false] {
            device.server.is_idle.store(is_idle, Ordering::SeqCst);
            device.server.waits_until(None);
            let mut core = device.lock();
            // No queue pair has this number.
            core.state.ready.push_back(1);
            device.leave(core);
            assert_eq!(device.server.was_woken(), !is_idle);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_program_polls_as_long_as_it_receives_many_packets() {
        const COUNT: u32 = 20;
        let device = Device::new().unwrap();
        let (mut core, now) = (device.lock(), device.now());
        let Link { socket, outbox, .. } = &mut core.links[0];
        for _ in 0..COUNT {
            // SAFETY: there is no payload.
            unsafe { outbox.push(socket, To { address: socket.address(), class: 0 }, &[0; 12], &[], now) };
        }
        outbox.flush(socket, now);
        drop(core);
        let mut polls = 0;
        while device.lock().state.shared.packets < COUNT {
            device.poll();
            polls += 1;
        }
        assert_eq!(device.polls(), polls + COUNT / PACKETS);
    }
}
