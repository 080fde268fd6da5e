//! The server thread, which serves peers and timers while no thread polls.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::core::{Core, Sources};
use super::lock::Device;
use super::observe;
use super::poll_detector::PollDetector;
use super::schedule;
use super::signal::Signal;
use crate::check;
use crate::net::Readable;
use crate::transport::Time;

/// Time between two looks for completions that nobody takes, if the checker is active.
const WATCH: Duration = Duration::from_millis(250);

/// The first and the last nap after a packet that raised no event. Each nap is twice as long as the one before.
///
/// The program may spin on its memory. If its peer shares the processor, the peer runs only when the program's time slice ends,
/// after some milliseconds. A nap shortens that: this thread preempts the program when it wakes up. When it sleeps again, the
/// scheduler picks the peer, which has run less. Under Miri there are no naps: no other process shares the processor.
const NAPS: (Duration, Duration) =
    (Duration::from_micros(if cfg!(miri) { 3200 } else { 100 }), Duration::from_micros(3200));

/// Wakes the server thread.
#[derive(Debug)]
pub(crate) struct Wake {
    signal: Signal,
    /// Whether the thread is idle because the program polls.
    is_idle: AtomicBool,
    /// How often the program was about to wait for a completion event, and the number of its polls at the last time.
    waits: AtomicU32,
    polls_at_wait: AtomicU32,
    /// Deadline of the thread's wait in nanoseconds. It is 0 while the thread is awake, which then checks the device before it
    /// waits again.
    until: AtomicU64,
    /// Blocked links whose sockets the thread waits for: a mask like [`Core::blocked`](super::core::Core::blocked).
    watched: AtomicU64,
}

impl Wake {
    pub(crate) fn new() -> io::Result<Wake> {
        Ok(Wake {
            signal: Signal::new()?,
            is_idle: AtomicBool::new(false),
            waits: AtomicU32::new(0),
            polls_at_wait: AtomicU32::new(0),
            until: AtomicU64::new(0),
            watched: AtomicU64::new(0),
        })
    }

    /// Whether the thread is idle, and leaves the device to a program that polls.
    pub(crate) fn is_idle(&self) -> bool {
        self.is_idle.load(Ordering::Relaxed)
    }

    /// Marks the thread as idle. Returns `false` if the program was about to wait since [`Wake::waits`] returned `waits`.
    pub(super) fn begin_idle(&self, waits: u32) -> bool {
        self.is_idle.store(true, Ordering::SeqCst);
        // Either this load sees the wait, or `begin_wait` sees the store: both are sequentially consistent.
        let begins = self.waits() == waits;
        if !begins {
            self.leave_idle();
        }
        begins
    }

    pub(super) fn leave_idle(&self) {
        self.is_idle.store(false, Ordering::SeqCst);
    }

    /// How often the program was about to wait for a completion event.
    pub(super) fn waits(&self) -> u32 {
        self.waits.load(Ordering::SeqCst)
    }

    /// Number of polls when the program was about to wait the last time.
    pub(super) fn polls_at_wait(&self) -> u32 {
        self.polls_at_wait.load(Ordering::Relaxed)
    }

    /// The program is about to wait for a completion event, after this number of polls.
    pub(super) fn begin_wait(&self, polls: u32) {
        self.polls_at_wait.store(polls, Ordering::Relaxed);
        self.waits.fetch_add(1, Ordering::SeqCst);
        self.end_idle();
    }

    /// Ends idling.
    pub(crate) fn end_idle(&self) {
        if self.is_idle.load(Ordering::SeqCst) && self.is_idle.swap(false, Ordering::SeqCst) {
            self.signal.raise();
        }
    }

    /// Ends the wait of the thread.
    #[cfg(miri)]
    pub(super) fn interrupt(&self) {
        self.signal.raise();
    }

    /// Wakes the thread, unless its deadline is at `at` or earlier.
    pub(crate) fn wake_before(&self, at: Time) {
        if at.0 < self.until.load(Ordering::SeqCst) {
            self.until.store(0, Ordering::SeqCst);
            self.signal.raise();
        }
    }

    /// Whether the thread checks the device by `at` without being woken.
    ///
    /// Call it with the device locked. The thread sets its deadline with the device locked, too. It clears the deadline when it
    /// wakes up, before it locks the device. So a thread that is awake will still see the work that the caller leaves.
    pub(super) fn wakes_before(&self, at: Time) -> bool {
        self.until.load(Ordering::SeqCst) <= at.0
    }

    /// Blocked links whose sockets the thread waits for.
    pub(super) fn watched(&self) -> u64 {
        self.watched.load(Ordering::SeqCst)
    }

    /// Sets the deadline before the thread waits. The caller has locked the device, so no work goes unnoticed before the wait.
    pub(super) fn waits_until(&self, deadline: Option<Time>) {
        self.until.store(deadline.map_or(u64::MAX, |at| at.0), Ordering::SeqCst);
    }

    /// Whether the thread has been woken since its last wait.
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

/// Starts the thread with the first call.
pub(crate) fn start(device: &'static Device) {
    if cfg!(miri) {
        return;
    }
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        // SAFETY: the function only stores a value, which is allowed right after `fork`. It exists as long as this library.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        // SAFETY: the function takes no arguments, does not unwind, and exists as long as this library.
        unsafe { libc::atexit(at_exit) };
        let thread = std::thread::Builder::new().name("rdma-soft".to_owned());
        if let Err(error) = thread.spawn(move || run(device)) {
            eprintln!(
                "rdma-soft: cannot start the server thread, so peers are served only while the program polls: {error}"
            );
        }
    });
}

/// Whether this process was forked after the device was created.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// Whether this process was forked after the device was created.
pub(crate) fn was_forked() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// Like [`was_forked`]. The first call in a child reports it on standard error.
///
/// A child shares the sockets and memory of its parent. Threads that exist only in the parent may hold the locks.
pub(crate) fn is_child() -> bool {
    static IS_REPORTED: AtomicBool = AtomicBool::new(false);
    if !was_forked() {
        return false;
    }
    if !IS_REPORTED.swap(true, Ordering::Relaxed) {
        const REASON: &str = "rdma-soft: this process was forked after soft0 was opened, and only the parent can use it: \
                              open it after the fork, or execute a program in the child\n";
        // The lock of the standard library may be held forever, so this writes directly.
        // SAFETY: the pointer and the length describe the text.
        unsafe { libc::write(libc::STDERR_FILENO, REASON.as_ptr().cast(), REASON.len()) };
        check::used_after_fork();
    }
    true
}

/// Sends pending ACKs and posts when the program ends. A forked child does not, since its sockets are the parent's.
extern "C" fn at_exit() {
    if let Some(device) = super::lock::existing().filter(|_| !was_forked()) {
        device.flush();
    }
}

/// Blocks all signals, which are for the program's threads, and serves the device.
fn run(device: &Device) {
    // SAFETY: all bytes of the set may be zero, and it is filled before it is used. The old set is not requested.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
    schedule::prefer_latency();
    serve(device);
}

/// Cause of a wake-up of the thread.
pub(super) enum Woken {
    Program,
    Peer,
    Timeout,
}

/// Descriptors that the thread waits for.
pub(super) struct WaitSet {
    /// The first is for wake-ups by the program. The next two are for lookups of listeners and for the ends of peer processes.
    fds: Vec<libc::pollfd>,
    /// Index of the first descriptor of each link.
    links: Vec<usize>,
    /// Readable parts of each link after a wait.
    readable: Vec<Readable>,
}

impl WaitSet {
    pub(super) fn new() -> WaitSet {
        WaitSet { fds: Vec::new(), links: Vec::new(), readable: Vec::new() }
    }

    /// Collects the descriptors for packets, for room in blocked sockets, and for wake-ups.
    fn fill(&mut self, core: &Core, wake: &Wake) {
        self.links.clear();
        self.fill_common(core, wake);
        for (index, link) in core.links.iter().enumerate() {
            self.links.push(self.fds.len());
            let blocked = if core.is_blocked(index) { libc::POLLOUT } else { 0 };
            // Packets wake the program if its channel is direct.
            let (packets, shm) = if core.direct.is_some() { (0, None) } else { (libc::POLLIN, link.socket.shm_fd()) };
            self.fds.push(pollfd(link.socket.fd().as_raw_fd(), packets | blocked));
            // `ppoll` skips negative descriptors.
            self.fds.push(pollfd(shm.map_or(-1, |fd| fd.as_raw_fd()), libc::POLLIN));
            self.fds.extend(link.groups.iter().map(|(_, group)| pollfd(group.fd().as_raw_fd(), libc::POLLIN)));
        }
    }

    /// Collects the descriptors for wake-ups by the program and by peers on this host.
    pub(super) fn fill_idle(&mut self, core: &Core, wake: &Wake) {
        self.links.clear();
        self.fill_common(core, wake);
        self.fds.extend(
            core.links.iter().filter_map(|link| link.socket.shm_fd()).map(|fd| pollfd(fd.as_raw_fd(), libc::POLLIN)),
        );
    }

    /// Collects the descriptors that the thread always waits for.
    fn fill_common(&mut self, core: &Core, wake: &Wake) {
        self.fds.clear();
        self.fds.push(pollfd(wake.fd(), libc::POLLIN));
        // `ppoll` skips negative descriptors.
        let host = core.state.cma.host_fds();
        self.fds.extend(host.map(|fd| pollfd(fd.map_or(-1, |fd| fd.as_raw_fd()), libc::POLLIN)));
    }

    /// Whether a process of this host caused an event in the last wait.
    pub(super) fn has_host_event(&self) -> bool {
        self.fds.get(1..3).is_some_and(|fds| fds.iter().any(|fd| fd.revents != 0))
    }

    /// Waits for at most `most`.
    pub(super) fn nap(&mut self, device: &Device, most: Duration) -> Woken {
        let deadline = device.now() + most;
        device.server.waits_until(Some(deadline));
        self.sleep(device, Some(deadline))
    }

    /// Waits until a descriptor is ready or the deadline has passed.
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

    /// Where to scan for packets after a wait.
    fn sources(&mut self) -> Sources<'_> {
        self.readable.clear();
        let mut expected = 0;
        for at in &self.links {
            let [udp, shm] = [*at, at + 1].map(|at| self.fds[at].revents);
            let readable = Readable { udp: udp & libc::POLLIN != 0, shm: shm != 0 };
            expected += usize::from(readable.udp && udp == libc::POLLIN) + usize::from(readable.shm);
            self.readable.push(readable);
        }
        // Scan all sources after a deadline, a wake-up by the program, an error, or a multicast packet.
        let has_others = self.fds.iter().filter(|fd| fd.revents != 0).count() != expected;
        if expected == 0 || has_others { Sources::All } else { Sources::Readable(&self.readable) }
    }
}

pub(super) fn serve(device: &Device) {
    let wake = &device.server;
    let mut detector = PollDetector::new(device);
    let mut wait_set = WaitSet::new();
    let mut nap = NAPS.1;
    let mut is_first = true;
    let mut scan_interval = None;
    let mut watch_at = Time(0);
    loop {
        #[cfg(miri)]
        if super::server_of_miri::is_ending() {
            return;
        }
        let is_polled = detector.is_polled(device);
        if is_polled {
            detector.idle(device, &mut wait_set);
        }
        // Let waiting threads lock the device first.
        let mut core = device.lock_in_turn();
        let now = device.now();
        // A timer expires only after all sources were scanned.
        let is_due = core.wake_at().is_some_and(|at| at <= now);
        let is_known = std::mem::take(&mut is_first) && !is_polled && !is_due && scan_interval.is_none();
        if wait_set.has_host_event() {
            core.handle_host_events(now);
        }
        let sources = if is_known { wait_set.sources() } else { Sources::All };
        let completion_events = core.state.shared.events.completion_events();
        let has_found = core.progress_from(now, sources);
        scan_interval = device.review_direct(&mut core, has_found, now);
        if has_found {
            // A program that gets an event sleeps, so its peer needs no naps.
            nap = if core.state.shared.events.completion_events() == completion_events { NAPS.0 } else { NAPS.1 };
        }
        // A packet that has arrived since is in a ring, which `arm_wakeups` checks, or makes a socket readable.
        if core.is_busy() || !core.arm_wakeups() {
            continue;
        }
        wait_set.fill(&core, wake);
        let mut deadline = core.wake_at();
        if check::is_active() {
            if now >= watch_at {
                observe::watch_stalls(&core.state.shared, now);
                watch_at = now + WATCH;
            }
            deadline = deadline.into_iter().chain([watch_at]).min();
        }
        if nap < NAPS.1 {
            deadline = deadline.into_iter().chain([now + nap]).min();
            nap *= 2;
        }
        if let Some(interval) = scan_interval {
            deadline = deadline.into_iter().chain([now + interval]).min();
        }
        // The next thread that locks the device compares with this deadline, even if this thread is not asleep yet.
        wake.waits_until(deadline);
        wake.watched.store(core.blocked(), Ordering::SeqCst);
        drop(core);
        wait_set.sleep(device, deadline);
        is_first = true;
    }
}

const fn pollfd(fd: libc::c_int, events: libc::c_short) -> libc::pollfd {
    libc::pollfd { fd, events, revents: 0 }
}

/// Waits until a descriptor is ready or the deadline has passed.
fn wait(fds: &mut [libc::pollfd], deadline: Option<Time>, now: Time) {
    let timeout = deadline.map(|deadline| {
        let left = deadline.0.saturating_sub(now.0);
        libc::timespec { tv_sec: (left / 1_000_000_000) as _, tv_nsec: (left % 1_000_000_000) as _ }
    });
    let pointer = timeout.as_ref().map_or(std::ptr::null(), |timeout| &raw const *timeout);
    // SAFETY: the pointer and the length describe `fds`, and the timeout is valid or null. The results are read from `fds`.
    unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, pointer, std::ptr::null()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::link::Link;
    use crate::device::polling::{PACKETS, packets_of_thread};
    use crate::faults::Faults;
    use crate::net::{Run, To};

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn an_idle_server_is_woken_by_a_peer_that_waits_for_an_answer() {
        // These devices have no server thread.
        let [device, peer] = [(); 2].map(|()| Device::new().unwrap());
        let mut wait_set = WaitSet::new();
        let address = {
            let mut core = device.lock();
            core.disarm_wakeups();
            wait_set.fill_idle(&core, &device.server);
            core.links[0].socket.address()
        };
        let (mut core, now) = (peer.lock(), peer.now());
        let Link { socket, outbox, .. } = &mut core.links[0];
        // SAFETY: there is no payload.
        unsafe { outbox.push(socket, To { address, class: 0 }, Run::new(&mut [0; 12], &[], 0, 1), now) };
        outbox.flush(socket, now);
        // The first packet announces a new peer. The server accepts it and stays idle.
        device.lock().progress(now);
        device.lock().disarm_wakeups();
        // SAFETY: there is no payload.
        unsafe { outbox.push(socket, To { address, class: 0 }, Run::new(&mut [0; 12], &[], 0, 1), now) };
        outbox.flush(socket, now);
        assert!(matches!(wait_set.nap(&device, Duration::ZERO), Woken::Timeout), "it has not asked to be woken");
        outbox.kick();
        assert!(matches!(wait_set.nap(&device, Duration::from_secs(60)), Woken::Peer));
        device.lock().progress(now);
        device.lock().disarm_wakeups();
        assert!(matches!(wait_set.nap(&device, Duration::ZERO), Woken::Timeout), "once for each kick");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn the_server_reads_only_readable_sockets_unless_the_program_wakes_it() {
        let device = Device::new().unwrap();
        let mut wait_set = WaitSet::new();
        assert!(matches!(wait_set.sources(), Sources::All), "it has not waited yet");
        let address = device.lock().links[0].socket.address();
        let to = std::net::SocketAddr::new(address, crate::wire::UDP_PORT);
        std::net::UdpSocket::bind((address, 0)).unwrap().send_to(&[0; 24], to).unwrap();
        let readable = [Readable { udp: true, shm: false }];
        for is_woken in [false, true] {
            if is_woken {
                device.server.signal.raise();
            }
            wait_set.fill(&device.lock(), &device.server);
            wait_set.sleep(&device, Some(device.now() + Duration::from_secs(60)));
            match wait_set.sources() {
                Sources::Readable(of) => assert!(of == readable && !is_woken),
                _ => assert!(is_woken),
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_poll_wakes_the_server_for_packets_that_it_leaves() {
        // This device has no server thread.
        let device = Device::new().unwrap();
        device.server.waits_until(None);
        device.poll(0);
        assert!(!device.server.was_woken(), "there is nothing to do");
        let (mut core, now) = (device.lock(), device.now());
        core.links[0].set_faults(Faults { delay: Duration::from_secs(1), ..Faults::default() }, now);
        let Link { socket, outbox, .. } = &mut core.links[0];
        // SAFETY: there is no payload.
        unsafe {
            outbox.push(socket, To { address: socket.address(), class: 0 }, Run::new(&mut [0; 12], &[], 0, 1), now)
        };
        drop(core);
        device.poll(0);
        assert!(device.server.was_woken(), "a packet is to go later, and nobody need come back");
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_program_that_polls_all_the_time_sends_its_backlog_itself() {
        // This device has no server thread.
        let device = Device::new().unwrap();
        for is_idle in [true, false] {
            device.server.is_idle.store(is_idle, Ordering::SeqCst);
            device.server.waits_until(None);
            let mut core = device.lock();
            // No queue pair has this number.
            core.state.ready.push_back(1);
            device.unlock(core);
            assert_eq!(device.server.was_woken(), !is_idle);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn many_received_packets_count_as_polls_and_for_the_thread_that_polls() {
        const COUNT: u32 = 20;
        let at_first = packets_of_thread();
        // This device has no server thread.
        let device = Device::new().unwrap();
        let (mut core, now) = (device.lock(), device.now());
        let Link { socket, outbox, .. } = &mut core.links[0];
        for _ in 0..COUNT {
            // SAFETY: there is no payload.
            unsafe {
                outbox.push(socket, To { address: socket.address(), class: 0 }, Run::new(&mut [0; 12], &[], 0, 1), now)
            };
        }
        outbox.flush(socket, now);
        drop(core);
        let received = || device.lock().state.shared.packets;
        let mut expected = 0;
        while received() < COUNT {
            let before = received();
            // A yield would also count as polls. A program that sleeps between its polls does not yield.
            device.begin_wait();
            device.poll(0);
            expected += 1 + (received() - before) / PACKETS;
        }
        assert_eq!(device.polls(), expected);
        assert_eq!(packets_of_thread().wrapping_sub(at_first), COUNT);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn the_server_closes_unused_rings_and_then_has_no_deadline() {
        // These devices have no server thread.
        let [device, peer] = [(); 2].map(|()| Device::new().unwrap());
        assert_eq!(device.lock().wake_at(), None);
        let address = peer.lock().links[0].socket.address();
        device.server.waits_until(None);
        let (mut core, now) = (device.lock(), device.now());
        let Link { socket, outbox, .. } = &mut core.links[0];
        // SAFETY: there is no payload.
        unsafe { outbox.push(socket, To { address, class: 0 }, Run::new(&mut [0; 12], &[], 0, 1), now) };
        outbox.flush(socket, now);
        device.unlock(core);
        assert!(device.server.was_woken());
        device.server.signal.lower();
        let deadline = device.lock().wake_at().unwrap();
        assert!(deadline > now + Duration::from_secs(9), "{deadline:?} after {now:?}");
        device.server.waits_until(Some(deadline));
        device.poll(0);
        assert!(!device.server.was_woken(), "once for all polls");
        peer.lock().progress(now);
        peer.lock().disarm_wakeups();
        let mut wait_set = WaitSet::new();
        wait_set.fill_idle(&peer.lock(), &peer.server);
        assert!(matches!(wait_set.nap(&peer, Duration::ZERO), Woken::Timeout));
        device.lock().progress_from(deadline, Sources::All);
        assert_eq!(device.lock().wake_at(), None);
        assert!(matches!(wait_set.nap(&peer, Duration::from_secs(60)), Woken::Peer), "the peer frees the ring");
        peer.lock().progress(now);
        assert!(matches!(wait_set.nap(&peer, Duration::ZERO), Woken::Timeout));
    }
}
