//! Connected endpoints and queue pairs on an interposed device.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rdma_safe::mr::{Backing, Pages};
use rdma_safe::sys::ibv_cq;
use rdma_safe::{Access, Buffer, Completion, Endpoint, EndpointBuilder, ProtectionDomain, QueuePair};

use super::{Bad, Interposed, PostFault, interposed};
use crate::support::lab::{Lab, LabBuilder, Mode};
use crate::support::link::connected;
use crate::support::{Rdma, within_deadline};

/// Runs a test with each interface for polling and for posting, each time with another device.
pub(crate) fn on_each_mode(test: impl Fn(&Interposed, Mode)) {
    for mode in Mode::each() {
        let Some(device) = interposed() else { return };
        // Shown when the test fails.
        println!("{mode}");
        test(&device, mode);
    }
}

/// An endpoint with eight sends, eight receives and 64 inline bytes, and with all rights for its peer.
pub(crate) fn builder<'a>(rdma: &Rdma, pd: &'a ProtectionDomain, mode: Mode) -> EndpointBuilder<'a> {
    rdma.endpoint(pd)
        .send_depth(8)
        .recv_depth(8)
        .inline_data(64)
        .peer_access(Access::REMOTE)
        .classic_poll(mode.classic_cq)
        .classic_post(mode.classic_qp)
}

/// Two endpoints made by [`builder`], connected to each other.
pub(crate) fn endpoints(rdma: &Rdma, pd: &ProtectionDomain, mode: Mode) -> (Endpoint, Endpoint) {
    connected(builder(rdma, pd, mode))
}

/// A [`Lab`] with queues of eight, four elements and 64 inline bytes.
pub(crate) fn lab(rdma: &Rdma, mode: Mode) -> LabBuilder<'_> {
    Lab::builder(rdma, mode).depth(8).entries(64).sges(4).inline(64)
}

/// Waits for the next completion, which must be successful.
#[track_caller]
pub(crate) fn done(endpoint: &mut Endpoint) -> Completion {
    next(endpoint).ok().expect("success")
}

/// Waits for the next completion.
#[track_caller]
pub(crate) fn next(endpoint: &mut Endpoint) -> Completion {
    within_deadline("a completion", || endpoint.poll().expect("the queue can be polled"))
}

#[track_caller]
pub(crate) fn nothing(endpoint: &mut Endpoint) {
    assert!(endpoint.poll().expect("the queue can be polled").is_none(), "an unexpected completion");
}

impl Interposed {
    /// Makes the next posting of a send fail. The device does not execute it, and the library can tell.
    pub(crate) fn refuse_send(&self, mode: Mode) {
        match mode.classic_qp {
            true => self.fail_post_send(PostFault { errno: libc::ENOMEM, taken: 0, bad: Bad::FirstNotTaken }),
            false => self.fail_wr_complete(libc::ENOMEM, false),
        }
    }

    /// Makes the next posting of a send fail with an unknown result. `taken` tells whether the device executes the work.
    pub(crate) fn doubt_send(&self, mode: Mode, taken: bool) {
        match mode.classic_qp {
            true => self.fail_post_send(PostFault { errno: libc::EIO, taken: usize::from(taken), bad: Bad::Null }),
            false => self.fail_wr_complete(libc::EIO, taken),
        }
    }
}

/// The completion queue of an endpoint, which the endpoint does not expose.
pub(crate) fn cq_of(qp: &QueuePair) -> *mut ibv_cq {
    // SAFETY: the queue pair is valid while it is borrowed.
    unsafe { (*qp.as_raw()).send_cq }
}

/// Memory that counts how often it is freed.
#[derive(Debug)]
pub(crate) struct CountedMemory {
    pages: Pages,
    freed: Arc<AtomicUsize>,
}

// SAFETY: `Pages` keeps the contract.
unsafe impl Backing for CountedMemory {
    fn address(&self) -> NonNull<u8> {
        self.pages.address()
    }

    fn len(&self) -> usize {
        self.pages.len()
    }
}

impl Drop for CountedMemory {
    fn drop(&mut self) {
        self.freed.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts the freed buffers that were created with it.
#[derive(Default)]
pub(crate) struct Count(Arc<AtomicUsize>);

impl Count {
    pub(crate) fn memory(&self) -> CountedMemory {
        CountedMemory { pages: Pages::new(64).expect("memory"), freed: Arc::clone(&self.0) }
    }

    pub(crate) fn buffer(&self, pd: &ProtectionDomain) -> Buffer {
        pd.register(self.memory()).expect("a buffer")
    }

    pub(crate) fn freed(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}
