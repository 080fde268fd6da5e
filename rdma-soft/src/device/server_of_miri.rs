//! The server thread under Miri, which wants all threads to end before the program: it runs while a context is open.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{JoinHandle, spawn};

use super::lock::Device;
use super::server::serve;

/// The number of open contexts, and the thread.
static SERVER: Mutex<(usize, Option<JoinHandle<()>>)> = Mutex::new((0, None));

static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// Whether the thread has to end.
pub(super) fn is_ending() -> bool {
    IS_ENDING.load(Ordering::Relaxed)
}

/// Starts the thread if this is the only open context.
pub(crate) fn opened(device: &'static Device) {
    let mut server = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    server.0 += 1;
    if server.1.is_none() {
        server.1 = Some(spawn(|| serve(device)));
    }
}

/// Ends the thread if this was the only open context.
pub(crate) fn closed(device: &'static Device) {
    let mut server = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    server.0 -= 1;
    if server.0 > 0 {
        return;
    }
    if let Some(thread) = server.1.take() {
        IS_ENDING.store(true, Ordering::Relaxed);
        device.server.interrupt();
        // An error means that the thread panicked. Then the work of the test does not complete, and the test fails.
        _ = thread.join();
        IS_ENDING.store(false, Ordering::Relaxed);
    }
}
