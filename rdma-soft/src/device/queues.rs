//! Send queues and receive queues: work that was posted and has not completed.

use std::collections::VecDeque;

use rdma_sys::*;

use super::keys::Binding;
use super::net_address::Destination;
use crate::transport::{ReceiveId, Request};

/// A send work request.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) wr_id: u64,
    pub(crate) is_signaled: bool,
    pub(crate) is_fenced: bool,
    pub(crate) is_solicited: bool,
    pub(crate) task: Task,
    /// Bytes of data.
    pub(crate) len: u32,
    pub(crate) sges: Vec<ibv_sge>,
    /// Inline data.
    pub(crate) inline: Vec<u8>,
    pub(crate) is_inline: bool,
}

impl Job {
    /// Allocates memory for a work request.
    pub(crate) fn with_capacity(max_sge: u32, max_inline: u32) -> Self {
        Job {
            wr_id: 0,
            is_signaled: false,
            is_fenced: false,
            is_solicited: false,
            task: Task::Invalidate(0),
            len: 0,
            sges: Vec::with_capacity(preallocated(max_sge)),
            inline: Vec::with_capacity(preallocated(max_inline)),
            is_inline: false,
        }
    }

    /// Starts a new work request without data. `flags` are `ibv_send_flags`.
    pub(crate) fn reset(&mut self, wr_id: u64, task: Task, flags: u32, is_all_signaled: bool) {
        let has = |flag: ibv_send_flags| flags & flag.0 != 0;
        self.wr_id = wr_id;
        self.task = task;
        self.is_signaled = is_all_signaled || has(IBV_SEND_SIGNALED);
        self.is_fenced = has(IBV_SEND_FENCE);
        self.is_solicited = has(IBV_SEND_SOLICITED);
        self.len = 0;
        self.is_inline = false;
        self.sges.clear();
        self.inline.clear();
    }
}

/// The operation of a work request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    /// A request to the peer of a connection.
    Request(Request),
    /// A datagram.
    Datagram { to: Destination, qp: u32, qkey: u32, imm: Option<u32> },
    /// Binds a window of type 1 or 2.
    Bind(u8, Binding),
    /// Invalidates a key.
    Invalidate(u32),
}

impl Task {
    /// Opcode of the completion.
    pub(crate) fn opcode(&self) -> ibv_wc_opcode {
        match self {
            Task::Request(Request::Send(_)) | Task::Datagram { .. } => IBV_WC_SEND,
            Task::Request(Request::Write { .. }) => IBV_WC_RDMA_WRITE,
            Task::Request(Request::Read { .. }) => IBV_WC_RDMA_READ,
            Task::Request(Request::CompareSwap(_)) => IBV_WC_COMP_SWAP,
            Task::Request(Request::FetchAdd(_)) => IBV_WC_FETCH_ADD,
            Task::Bind(..) => IBV_WC_BIND_MW,
            Task::Invalidate(_) => IBV_WC_LOCAL_INV,
        }
    }
}

/// A ring of send work requests, in the order of posting and numbered from 0. Entries are reused.
#[derive(Debug)]
pub(crate) struct SendQueue {
    ring: Vec<Job>,
    /// Number of the oldest outstanding request.
    head: u64,
    /// Number of the next request to hand to the state machine.
    staged: u64,
    /// Number of the next request to be posted.
    tail: u64,
}

impl SendQueue {
    /// Allocates all memory, so that posting allocates none.
    pub(crate) fn new(capacity: u32, max_sge: u32, max_inline: u32) -> Self {
        SendQueue {
            ring: (0..capacity).map(|_| Job::with_capacity(max_sge, max_inline)).collect(),
            head: 0,
            staged: 0,
            tail: 0,
        }
    }

    fn slot(&self, number: u64) -> usize {
        (number % self.ring.len().max(1) as u64) as usize
    }

    pub(crate) fn room(&self) -> usize {
        self.ring.len() - (self.tail - self.head) as usize
    }

    /// The number of the oldest outstanding request.
    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Adds a request. `fill` overwrites an old entry.
    pub(crate) fn push(&mut self, fill: impl FnOnce(&mut Job)) {
        let slot = self.slot(self.tail);
        fill(&mut self.ring[slot]);
        self.tail += 1;
    }

    /// The number of the next request to be posted.
    pub(crate) fn tail(&self) -> u64 {
        self.tail
    }

    pub(crate) fn get(&self, number: u64) -> Option<&Job> {
        (self.head..self.tail).contains(&number).then(|| &self.ring[self.slot(number)])
    }

    /// The next request to hand to the state machine.
    pub(crate) fn next(&self) -> Option<(u64, &Job)> {
        self.get(self.staged).map(|job| (self.staged, job))
    }

    /// Notes that the next request was handed to the state machine.
    pub(crate) fn stage(&mut self) {
        self.staged += 1;
    }

    /// Removes the oldest request, which has completed.
    pub(crate) fn pop(&mut self) -> Option<&Job> {
        if self.is_empty() {
            return None;
        }
        let slot = self.slot(self.head);
        self.head += 1;
        self.staged = self.staged.max(self.head);
        Some(&self.ring[slot])
    }

    pub(crate) fn clear(&mut self) {
        (self.head, self.staged) = (self.tail, self.tail);
    }
}

/// A receive work request.
#[derive(Debug, Default)]
pub(crate) struct Receive {
    pub(crate) wr_id: u64,
    pub(crate) sges: Vec<ibv_sge>,
    /// Identifier in the [checker](crate::check), or 0.
    pub(crate) check: u64,
}

/// The receives of a queue pair or a shared receive queue.
#[derive(Debug)]
pub(crate) struct ReceiveQueue {
    pub(crate) posted: VecDeque<Receive>,
    pub(crate) capacity: usize,
    pub(crate) max_sge: u32,
    /// Unused receives, whose memory is reused.
    spare: Vec<Receive>,
}

impl ReceiveQueue {
    pub(crate) fn new(capacity: u32, max_sge: u32) -> Self {
        let with_room = || Receive { wr_id: 0, sges: Vec::with_capacity(max_sge as usize), check: 0 };
        ReceiveQueue {
            posted: VecDeque::with_capacity(capacity as usize),
            capacity: capacity as usize,
            max_sge,
            spare: (0..preallocated(capacity)).map(|_| with_room()).collect(),
        }
    }

    /// Adds a receive.
    ///
    /// # Errors
    /// `ENOMEM` if the queue is full, `EINVAL` if there are too many scatter/gather elements.
    pub(crate) fn push(&mut self, wr_id: u64, sges: &[ibv_sge]) -> Result<(), i32> {
        if sges.len() > self.max_sge as usize {
            return Err(libc::EINVAL);
        }
        if self.posted.len() >= self.capacity {
            return Err(libc::ENOMEM);
        }
        let mut receive = self.spare.pop().unwrap_or_default();
        (receive.wr_id, receive.check) = (wr_id, 0);
        receive.sges.clear();
        receive.sges.extend_from_slice(sges);
        self.posted.push_back(receive);
        Ok(())
    }

    pub(crate) fn recycle(&mut self, receive: Receive) {
        if self.spare.len() < self.capacity {
            self.spare.push(receive);
        }
    }
}

/// Number of elements to allocate in advance. Under Miri it is 0, as most of a queue is never used there.
const fn preallocated(capacity: u32) -> usize {
    if cfg!(miri) { 0 } else { capacity as usize }
}

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct Srq {
    pub(crate) queue: ReceiveQueue,
    pub(crate) pd: u32,
    pub(crate) context: u32,
    pub(crate) object: usize,
    /// Threshold of posted receives below which one event is raised. 0 raises none.
    pub(crate) limit: u32,
    pub(crate) users: u32,
}

/// Receives that were taken from the queue and have not completed.
#[derive(Debug)]
pub(crate) struct ActiveReceives {
    receives: Vec<(ReceiveId, Receive)>,
    next: u64,
}

impl ActiveReceives {
    pub(crate) fn new() -> Self {
        // One is being filled, and one may be reserved for the next message.
        ActiveReceives { receives: Vec::with_capacity(2), next: 0 }
    }

    pub(crate) fn add(&mut self, receive: Receive) -> ReceiveId {
        let id = ReceiveId(self.next);
        self.next += 1;
        self.receives.push((id, receive));
        id
    }

    pub(crate) fn get(&self, id: ReceiveId) -> Option<&Receive> {
        self.receives.iter().find(|(of, _)| *of == id).map(|(_, receive)| receive)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Receive> {
        self.receives.iter().map(|(_, receive)| receive)
    }

    pub(crate) fn remove(&mut self, id: ReceiveId) -> Option<Receive> {
        let place = self.receives.iter().position(|(of, _)| *of == id)?;
        Some(self.receives.swap_remove(place).1)
    }
}
