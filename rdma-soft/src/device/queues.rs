//! What was posted and has not ended: send queues and receive queues.

use std::collections::VecDeque;

use rdma_sys::*;

use super::keys::Binding;
use super::net_address::Destination;
use crate::transport::{ReceiveId, Request};

/// A piece of work of a send queue.
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
    /// The data itself, if it was posted inline.
    pub(crate) inline: Vec<u8>,
    pub(crate) is_inline: bool,
}

impl Job {
    /// To be written over, with room for so many parts, or so many bytes inline.
    pub(crate) fn blank(max_sge: u32, max_inline: u32) -> Self {
        Job {
            wr_id: 0,
            is_signaled: false,
            is_fenced: false,
            is_solicited: false,
            task: Task::Invalidate(0),
            len: 0,
            sges: Vec::with_capacity(max_sge as usize),
            inline: Vec::with_capacity(max_inline as usize),
            is_inline: false,
        }
    }

    /// Begins it anew, without data. `flags` are those of the work request.
    pub(crate) fn begin(&mut self, wr_id: u64, task: Task, flags: u32, is_all_signaled: bool) {
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

/// What a piece of work is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    /// For the peer of a connection.
    Request(Request),
    /// A datagram.
    Datagram { to: Destination, qp: u32, qkey: u32, imm: Option<u32> },
    /// Binds a window, of type 1 or 2.
    Bind(u8, Binding),
    /// Invalidates a key.
    Invalidate(u32),
}

impl Task {
    /// What completes.
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

/// Work in the order in which it was posted, numbered from 0. What has ended is used again.
#[derive(Debug)]
pub(crate) struct SendQueue {
    ring: Vec<Job>,
    /// The number of the earliest that has not ended,
    head: u64,
    /// of the next to begin with,
    staged: u64,
    /// and of the next to be posted.
    tail: u64,
}

impl SendQueue {
    /// For so much work, each of so many parts, or so many bytes inline: nothing is allocated later.
    pub(crate) fn new(capacity: u32, max_sge: u32, max_inline: u32) -> Self {
        SendQueue {
            ring: (0..capacity).map(|_| Job::blank(max_sge, max_inline)).collect(),
            head: 0,
            staged: 0,
            tail: 0,
        }
    }

    fn place(&self, number: u64) -> usize {
        (number % self.ring.len().max(1) as u64) as usize
    }

    pub(crate) fn room(&self) -> usize {
        self.ring.len() - (self.tail - self.head) as usize
    }

    /// The number of the earliest that has not ended.
    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Adds work, which `fill` writes over what was there.
    pub(crate) fn push(&mut self, fill: impl FnOnce(&mut Job)) {
        let place = self.place(self.tail);
        fill(&mut self.ring[place]);
        self.tail += 1;
    }

    pub(crate) fn get(&self, number: u64) -> Option<&Job> {
        (self.head..self.tail).contains(&number).then(|| &self.ring[self.place(number)])
    }

    /// The next to begin with.
    pub(crate) fn next(&self) -> Option<(u64, &Job)> {
        self.get(self.staged).map(|job| (self.staged, job))
    }

    pub(crate) fn stage(&mut self) {
        self.staged += 1;
    }

    /// The earliest has ended.
    pub(crate) fn pop(&mut self) -> Option<&Job> {
        if self.is_empty() {
            return None;
        }
        let place = self.place(self.head);
        self.head += 1;
        self.staged = self.staged.max(self.head);
        Some(&self.ring[place])
    }

    pub(crate) fn clear(&mut self) {
        (self.head, self.staged) = (self.tail, self.tail);
    }
}

/// A receive.
#[derive(Debug, Default)]
pub(crate) struct Receive {
    pub(crate) wr_id: u64,
    pub(crate) sges: Vec<ibv_sge>,
}

/// Receives that wait for messages: of one queue pair, or shared.
#[derive(Debug)]
pub(crate) struct ReceiveQueue {
    pub(crate) waiting: VecDeque<Receive>,
    pub(crate) capacity: usize,
    pub(crate) max_sge: u32,
    /// Used again.
    spare: Vec<Receive>,
}

impl ReceiveQueue {
    pub(crate) fn new(capacity: u32, max_sge: u32) -> Self {
        let with_room = || Receive { wr_id: 0, sges: Vec::with_capacity(max_sge as usize) };
        ReceiveQueue {
            waiting: VecDeque::with_capacity(capacity as usize),
            capacity: capacity as usize,
            max_sge,
            spare: (0..capacity).map(|_| with_room()).collect(),
        }
    }

    /// # Errors
    /// `ENOMEM` when it is full, `EINVAL` for more parts than it was made for.
    pub(crate) fn push(&mut self, wr_id: u64, sges: &[ibv_sge]) -> Result<(), i32> {
        if sges.len() > self.max_sge as usize {
            return Err(libc::EINVAL);
        }
        if self.waiting.len() >= self.capacity {
            return Err(libc::ENOMEM);
        }
        let mut receive = self.spare.pop().unwrap_or_default();
        receive.wr_id = wr_id;
        receive.sges.clear();
        receive.sges.extend_from_slice(sges);
        self.waiting.push_back(receive);
        Ok(())
    }

    pub(crate) fn recycle(&mut self, receive: Receive) {
        if self.spare.len() < self.capacity {
            self.spare.push(receive);
        }
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct Srq {
    pub(crate) queue: ReceiveQueue,
    pub(crate) pd: u32,
    pub(crate) context: u32,
    pub(crate) object: usize,
    /// An event is raised, once, when fewer wait than that.
    pub(crate) limit: u32,
    pub(crate) users: u32,
}

/// Receives that were taken and have not ended.
#[derive(Debug)]
pub(crate) struct Taken {
    receives: Vec<(ReceiveId, Receive)>,
    next: u64,
}

impl Taken {
    pub(crate) fn new() -> Self {
        // One is being filled, and one may be kept for the next message.
        Taken { receives: Vec::with_capacity(2), next: 0 }
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

    pub(crate) fn remove(&mut self, id: ReceiveId) -> Option<Receive> {
        let place = self.receives.iter().position(|(of, _)| *of == id)?;
        Some(self.receives.swap_remove(place).1)
    }
}
