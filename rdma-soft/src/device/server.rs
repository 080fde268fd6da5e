//! The thread that serves peers and timers while nobody polls.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::core::Device;
use super::events::Signal;
use crate::transport::Time;

/// How long a device is left alone that somebody polls all the time.
const LEFT_ALONE: Duration = Duration::from_micros(900);

/// For how long nobody polls who has stopped.
const STOPPED: Duration = Duration::from_micros(100);

/// Whether somebody polls all the time is seen over so long at least: the thread itself is woken by every packet.
const WATCHED: Duration = Duration::from_micros(200);

/// Whoever polls all the time does so at least once in so long.
const PACE: Duration = Duration::from_micros(6);

/// How long, after somebody has stopped without a word, nobody is believed to poll all the time: it doubles.
const DOUBT: (Duration, Duration) = (Duration::from_millis(8), Duration::from_secs(1));

/// Wakes the thread while it waits.
#[derive(Debug)]
pub(crate) struct Wake {
    signal: Signal,
    /// It leaves the device alone, since somebody polls.
    is_aside: AtomicBool,
    /// Until when it waits, in nanoseconds; 0 while it does not, and looks at the device before it does.
    until: AtomicU64,
    /// The links of which it waits until they take more: [`Core::blocked`](super::core::Core::blocked).
    watched: AtomicU64,
}

impl Wake {
    pub(crate) fn new() -> io::Result<Wake> {
        Ok(Wake {
            signal: Signal::new()?,
            is_aside: AtomicBool::new(false),
            until: AtomicU64::new(0),
            watched: AtomicU64::new(0),
        })
    }

    /// Whether the device is left to those who poll it.
    pub(crate) fn is_aside(&self) -> bool {
        self.is_aside.load(Ordering::Relaxed)
    }

    /// Somebody stops polling.
    pub(crate) fn take_over(&self) {
        if self.is_aside.swap(false, Ordering::SeqCst) {
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

    /// Blocked links that need not be told of.
    pub(super) fn watched(&self) -> u64 {
        self.watched.load(Ordering::SeqCst)
    }

    /// It is about to wait. For the device it is said with the device locked, so that nothing is put off between.
    fn waits_until(&self, deadline: Option<Time>) {
        self.until.store(deadline.map_or(u64::MAX, |at| at.0), Ordering::SeqCst);
    }

    /// Whether it was woken and has not waited since.
    #[cfg(test)]
    fn was_woken(&self) -> bool {
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

/// Whether the device is that of a parent: its sockets are, its memory is shared with others, and its locks may be held by threads
/// that a child does not have. It is said once.
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

/// The program ends: peers hear that what they have sent has come. A child that was forked would send from the socket of its parent
/// what is its parent's to send.
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
    serve(device);
}

/// Who polls, as the thread sees it.
struct Watch {
    polls: u32,
    since: Time,
    /// Programs that wait for memory to change poll now and then, but do not see to the device while they wait.
    doubt: Duration,
    believes_from: Time,
}

impl Watch {
    /// Whether somebody polls all the time.
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

    /// Leaves the device alone as long as somebody polls it, who sees to everything meanwhile.
    fn stand_aside(&mut self, device: &Device) {
        let wake = &device.server;
        let start = device.now();
        wake.is_aside.store(true, Ordering::SeqCst);
        let was_woken = loop {
            if stand_by(device, LEFT_ALONE) {
                break true;
            }
            let before = device.polls();
            if stand_by(device, STOPPED) {
                break true;
            }
            if device.polls() == before {
                break false;
            }
        };
        wake.is_aside.store(false, Ordering::SeqCst);
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

fn serve(device: &Device) {
    let wake = &device.server;
    let mut watch = Watch { polls: device.polls(), since: device.now(), doubt: DOUBT.0, believes_from: Time(0) };
    let mut fds = Vec::new();
    loop {
        if watch.is_polled(device) {
            watch.stand_aside(device);
        }
        // In turns, so that others get at the device.
        let mut core = device.lock_in_turn();
        if core.progress(device.now()) || core.is_busy() || !core.sleep() {
            continue;
        }
        fds.clear();
        fds.push(pollfd(wake.fd(), libc::POLLIN));
        for (index, link) in core.links.iter().enumerate() {
            let blocked = if core.is_blocked(index) { libc::POLLOUT } else { 0 };
            fds.push(pollfd(link.socket.fd().as_raw_fd(), libc::POLLIN | blocked));
            fds.extend(link.groups.iter().map(|(_, group)| pollfd(group.fd().as_raw_fd(), libc::POLLIN)));
            fds.extend(link.socket.near_fd().map(|fd| pollfd(fd.as_raw_fd(), libc::POLLIN)));
        }
        let deadline = core.wake_at();
        // Who has the device next compares with that, though this thread may not be asleep by then.
        wake.waits_until(deadline);
        wake.watched.store(core.blocked(), Ordering::SeqCst);
        drop(core);
        sleep(device, &mut fds, deadline);
    }
}

/// Waits so long, or until it is woken, and says whether it was.
fn stand_by(device: &Device, so_long: Duration) -> bool {
    let deadline = device.now() + so_long;
    device.server.waits_until(Some(deadline));
    sleep(device, &mut [pollfd(device.server.fd(), libc::POLLIN)], Some(deadline))
}

/// Waits for any of them, of which the first is what it is woken with; whether it was.
fn sleep(device: &Device, fds: &mut [libc::pollfd], deadline: Option<Time>) -> bool {
    let wake = &device.server;
    wait(fds, deadline, device.now());
    wake.until.store(0, Ordering::SeqCst);
    let was_woken = fds[0].revents != 0;
    if was_woken {
        wake.signal.lower();
    }
    was_woken
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
    use crate::faults::Faults;
    use crate::net::To;

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
}
