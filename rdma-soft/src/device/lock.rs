//! The device of a process, and its lock.

use std::io::Write;
use std::net::IpAddr;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rdma_sys::ibv_mtu;

use super::acknowledged::Acknowledged;
use super::core::Core;
use super::direct::Frequency;
use super::link::Link;
use super::polling::Polling;
use super::qp::mtu_code;
use super::server;
use super::setup::{SetupError, sockets};
use super::wakeups::Wakeups;
use crate::check;
use crate::faults::Faults;
use crate::transport::Time;

/// The device of a process.
pub(crate) struct Device {
    core: Mutex<Core>,
    /// Acknowledged events, with a separate lock. A thread that has waited for one then queues for the device's lock.
    acknowledged: Acknowledged,
    pub(crate) server: server::Wake,
    pub(super) frequency: Frequency,
    pub(super) polling: Polling,
    /// Held by the thread that gets the device's lock next.
    turn: Mutex<()>,
    /// Whether a thread holds `turn` and waits for the lock.
    pub(super) has_waiter: AtomicBool,
    start: Instant,
}

/// The locked device. Dropping it unlocks the device and then wakes threads for the events raised meanwhile.
pub(crate) struct Locked<'a> {
    // Dropped before `wakeups`, so the device is unlocked when threads are woken.
    core: MutexGuard<'a, Core>,
    wakeups: Wakeups,
}

impl<'a> Locked<'a> {
    fn new(core: MutexGuard<'a, Core>) -> Locked<'a> {
        Locked { core, wakeups: Wakeups::default() }
    }
}

impl Deref for Locked<'_> {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.core
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let events = &mut self.core.state.shared.events;
        if events.has_wakeups() {
            self.wakeups = events.take_wakeups();
        }
    }
}

/// How long the end of the program waits for the device.
const FLUSH: Duration = Duration::from_millis(10);

/// The device of this process, or the reason why there is none.
static DEVICE: OnceLock<Result<Device, Unavailable>> = OnceLock::new();

/// Why the device could not be created.
struct Unavailable {
    reason: String,
    /// The error of `ibv_open_device(3)`.
    errno: i32,
}

/// Returns the device of this process, and creates it the first time.
///
/// Returns `None` if it cannot be created, or belongs to the parent process. The reason is on standard error.
pub(crate) fn device() -> Option<&'static Device> {
    if server::is_child() {
        return None;
    }
    let made = DEVICE.get_or_init(|| {
        Device::new().map_err(|error| {
            let (reason, errno) = (error.to_string(), error.errno());
            // A program may have closed standard error.
            _ = writeln!(std::io::stderr(), "rdma-soft: {reason}");
            Unavailable { reason, errno }
        })
    });
    let device = made.as_ref().ok()?;
    server::start(device);
    Some(device)
}

/// Returns the device of this process if it was created.
pub(crate) fn existing() -> Option<&'static Device> {
    DEVICE.get()?.as_ref().ok()
}

/// Why the device could not be created.
pub(crate) fn setup_error() -> Option<&'static str> {
    DEVICE.get()?.as_ref().err().map(|unavailable| unavailable.reason.as_str())
}

/// The error of opening the device after [`device`] has returned `None`.
pub(crate) fn open_errno() -> i32 {
    match DEVICE.get() {
        Some(Err(unavailable)) => unavailable.errno,
        // It belongs to the parent process.
        _ => libc::ENODEV,
    }
}

impl Device {
    pub(super) fn new() -> Result<Device, SetupError> {
        check::start_from_environment()?;
        let faults: Faults = std::env::var("RDMA_SOFT_FAULTS").unwrap_or_default().parse()?;
        let links: Vec<Link> = sockets()?.into_iter().map(|socket| Link::new(socket, faults)).collect();
        Ok(Device {
            core: Mutex::new(Core::new(links)),
            acknowledged: Acknowledged::default(),
            server: server::Wake::new()?,
            frequency: Frequency::new(),
            polling: Polling::default(),
            turn: Mutex::new(()),
            has_waiter: AtomicBool::new(false),
            start: Instant::now(),
        })
    }

    /// Locks the device, unless another thread has locked it.
    ///
    /// A poisoned lock is used. Only a bug in this library panics with the lock held, and some work may then be missing.
    pub(super) fn try_lock(&self) -> Option<Locked<'_>> {
        match self.core.try_lock() {
            Ok(core) => Some(Locked::new(core)),
            Err(TryLockError::Poisoned(poisoned)) => Some(Locked::new(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Locks the device for a short time.
    ///
    /// It takes a free lock even if another thread was woken to take it. So a program that posts all the time does not wait each
    /// time.
    pub(crate) fn lock(&self) -> Locked<'_> {
        self.try_lock().unwrap_or_else(|| self.lock_in_turn())
    }

    /// Locks the device after the threads that already wait.
    ///
    /// A free lock goes to a thread that is awake. So a thread that locks again and again, for long each time, would otherwise
    /// starve threads that have to be woken.
    pub(super) fn lock_in_turn(&self) -> Locked<'_> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_waiter.store(true, Ordering::Relaxed);
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_waiter.store(false, Ordering::Relaxed);
        Locked::new(core)
    }

    pub(crate) fn now(&self) -> Time {
        Time(self.start.elapsed().as_nanos() as u64)
    }

    /// The index of an address of the device among its GIDs.
    pub(crate) fn index_of(&self, address: IpAddr) -> Option<usize> {
        self.lock().links.iter().position(|link| link.socket.address() == address)
    }

    /// The largest MTU of all addresses.
    pub(crate) fn active_mtu(&self) -> ibv_mtu {
        let most = self.lock().links.iter().map(|link| link.socket.mtu()).max().unwrap_or(1024);
        mtu_code(most)
    }

    /// Unlocks the device after a post or a poll. Wakes the server if work is left for it.
    pub(crate) fn unlock(&self, core: Locked<'_>) {
        // A program that polls all the time sends the remaining packets itself. The server would compete with it for the lock.
        let is_busy = core.is_busy() && !self.server.is_idle();
        let is_left = is_busy || core.blocked() & !self.server.watched() != 0;
        let at = match is_left {
            true => Some(Time(0)),
            // While the program polls, its polls expire timers. The server checks them when the program stops.
            false if self.server.is_idle() => None,
            false => core.wake_at(),
        };
        drop(core);
        if let Some(at) = at {
            self.server.wake_before(at);
        }
    }

    /// Sends pending packets, unless other threads keep the device locked for long.
    pub(super) fn flush(&self) {
        let start = self.now();
        loop {
            match self.try_lock() {
                Some(mut core) => return core.send_windows(self.now()),
                // A signal handler of the thread that holds the lock may end the program.
                None if self.now() > start + FLUSH => return,
                None => std::thread::yield_now(),
            }
        }
    }

    /// Counts an acknowledged event, with the device locked.
    pub(crate) fn acknowledge(&self) {
        self.acknowledged.add();
    }

    /// Unlocks the device, waits until an event is acknowledged, at most for `limit`, and locks the device again.
    pub(crate) fn wait_for_acknowledgement<'a>(&'a self, core: Locked<'a>, limit: Duration) -> Locked<'a> {
        self.acknowledged.wait(limit, || drop(core));
        self.lock_in_turn()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "it opens sockets")]
    fn a_waiting_thread_gets_the_lock_before_a_thread_that_locks_again() {
        let device = Device::new().unwrap();
        for _ in 0..100 {
            let had = AtomicBool::new(false);
            let core = device.lock();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let _core = device.lock();
                    had.store(true, Ordering::SeqCst);
                });
                while !device.has_waiter.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                drop(core);
                let _core = device.lock_in_turn();
                assert!(had.load(Ordering::SeqCst));
            });
        }
    }
}
