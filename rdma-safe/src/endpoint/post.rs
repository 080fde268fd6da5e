//! Posting to an endpoint.

use super::gates::Gates;
use super::pending::WorkParts;
use super::ring::Kind;
use super::work::{Transfer, Verb};
use super::{Batch, Peer, Poster, Rejected, Work, WorkId};
use crate::interface::Interface;
use crate::post::{BufferPayload, SendOps};
use crate::{Buffer, PostError, WorkRequest};

impl<I: Interface> Poster<I> {
    /// These functions implement those of [`Endpoint`](crate::Endpoint) with the same names.
    #[inline(always)]
    pub(super) fn receive(&mut self, buffer: Buffer) -> Result<WorkId, Rejected> {
        if !self.gates.receive(&buffer) || self.live.receives.is_full() {
            let id = self.receive_slowly(buffer);
            return self.slow_post_result(id);
        }
        let id = self.live.receives.next_sequence();
        // SAFETY: the memory belongs to the buffer alone. The buffer moves into the ring before anything else happens,
        // unless the provider surely has not taken the work. It stays there until the work has completed or the queue
        // pair is destroyed: entries leave the ring by a completion, or in `close` and `drop` after the destruction.
        match unsafe { self.live.qp.recv_state().post_one(id, buffer.short_whole_sge()) } {
            Ok(()) => {
                self.live.receives.push_same_kind(buffer);
                Ok(WorkId(id))
            }
            Err(error) => {
                let id = self.receive_failed(buffer, error);
                self.slow_post_result(id)
            }
        }
    }

    /// The slow path of [`Poster::receive`], which finds out why the gate is shut.
    #[cold]
    #[inline(never)]
    fn receive_slowly(&mut self, buffer: Buffer) -> u64 {
        let error = if self.poisoned {
            PostError::EndpointFailed
        } else if self.live.pool.is_some() {
            PostError::SharedReceives
        } else if !buffer.is_of(&self.pd) {
            PostError::ForeignBuffer
        } else if self.live.receives.is_full() {
            PostError::QueueFull { posted: 0 }
        } else {
            self.abort_batch();
            let (id, sge) = (self.live.receives.next_sequence(), buffer.whole_sge(self.settings.max_message));
            // SAFETY: as in `receive`. The header's memory also stays until the queue pair is destroyed.
            let posted = unsafe {
                match &mut self.live.datagrams {
                    None => self.live.qp.receive(id, sge),
                    Some(datagrams) => self.live.qp.receive_list(id, &[datagrams.header(id), sge]),
                }
            };
            match posted {
                Ok(()) => {
                    self.live.receives.push_same_kind(buffer);
                    return id;
                }
                Err(error) => error,
            }
        };
        self.receive_failed(buffer, error)
    }

    /// Handles a receive that was not posted, or that the provider may have taken.
    #[cold]
    #[inline(never)]
    fn receive_failed(&mut self, buffer: Buffer, error: PostError) -> u64 {
        let buffer = if error.surely_not_posted() {
            Some(buffer)
        } else {
            self.live.receives.push_same_kind(buffer);
            self.poison();
            None
        };
        self.slow.rejected = Some(Rejected { error, buffer, list: None });
        0
    }

    #[inline]
    pub(super) fn post(&mut self, work: Work<'_>) -> Result<WorkId, Rejected> {
        let mut batch = match self.batch() {
            Ok(batch) => batch,
            Err(error) => return Err(work.reject(error)),
        };
        let parts = WorkParts::of(&work);
        let id = match batch.add(work) {
            Ok(id) => id,
            Err(rejected) => {
                drop(batch);
                return self.queue_pending(parts, rejected);
            }
        };
        match batch.post() {
            Ok(()) => Ok(id),
            Err(unposted) => Err(unposted.single()),
        }
    }

    #[inline]
    pub(super) fn send_inline(&mut self, bytes: &[u8]) -> Result<WorkId, PostError> {
        self.post(Work::send_inline(bytes)).map_err(|rejected| rejected.error)
    }

    /// Posts signaled work: on the fast path if its gate is open for `buffer` and there is room.
    #[inline(always)]
    pub(super) fn transfer(&mut self, transfer: Transfer, buffer: Buffer, user_data: u32) -> Result<WorkId, Rejected> {
        let is_open = buffer.gate() == transfer.gate(&self.gates);
        if !is_open || self.live.sends.is_full() || buffer.len() as u64 > transfer.room() {
            // Passes the verb, because passing `transfer` would force it into memory in every branch.
            let id = self.post_slowly(transfer.verb(), buffer, user_data);
            return self.slow_post_result(id);
        }
        let kind = Kind::signaled(transfer.verb().operation()).with_user_data(user_data);
        let id = self.live.sends.next_sequence();
        let (wr, short) = (WorkRequest::new(id).signaled(), BufferPayload(&buffer));
        // SAFETY: an open gate implies that the state allows sends, that the operation is enabled and that no batch is
        // open. `Endpoint::with_interface` has checked the interface. The batch is completed or dropped below.
        let mut batch = unsafe { self.live.qp.send_state().start::<I>(Some(transfer.operation())) };
        // SAFETY: the memory belongs to the buffer alone. The buffer moves into the ring before anything else happens,
        // unless the provider surely has not taken the work. It stays there until the work has completed or the queue
        // pair is destroyed. For the peer's memory, see `Batch::try_add_buffer`.
        let added = unsafe {
            match transfer {
                Transfer::Send => batch.send(wr, short),
                Transfer::Write(remote) => batch.write(wr, remote, short),
                Transfer::Read(remote) => batch.read(wr, remote, short),
            }
        };
        let posted = added.and_then(|()| batch.complete());
        match posted {
            Ok(()) => {
                self.live.sends.push(Some(buffer), kind);
                Ok(WorkId(id))
            }
            Err(error) => {
                let id = self.send_failed(buffer, kind, error);
                self.slow_post_result(id)
            }
        }
    }

    /// The slow path of [`Poster::transfer`], which finds out why the gate is shut and handles it.
    #[cold]
    #[inline(never)]
    fn post_slowly(&mut self, verb: Verb, buffer: Buffer, user_data: u32) -> u64 {
        match self.post(Work::of_buffer(verb, buffer).user_data(user_data)) {
            Ok(id) => id.0,
            Err(error) => {
                self.slow.rejected = Some(error);
                0
            }
        }
    }

    /// Handles work that was not posted, or that the provider may have taken.
    #[cold]
    #[inline(never)]
    fn send_failed(&mut self, buffer: Buffer, kind: Kind, error: PostError) -> u64 {
        let buffer = if error.surely_not_posted() {
            Some(buffer)
        } else {
            self.live.sends.push(Some(buffer), kind);
            self.poison();
            None
        };
        self.slow.rejected = Some(Rejected { error, buffer, list: None });
        0
    }

    /// Returns the result of a slow-path call that returned the number of the posted work, or 0.
    #[inline(always)]
    fn slow_post_result(&mut self, id: u64) -> Result<WorkId, Rejected> {
        match self.slow.rejected.take() {
            Some(rejected) if id == 0 => Err(rejected),
            _ => Ok(WorkId(id)),
        }
    }

    /// Brings the queue pair into error, since the provider may have taken work that it did not accept.
    ///
    /// Only destroying the queue pair ends such work.
    #[cold]
    #[inline(never)]
    pub(super) fn poison(&mut self) {
        self.mark_poisoned();
        self.live.qp.fail();
    }

    /// Aborts a forgotten batch: first at the provider, then in the ring.
    #[inline]
    pub(super) fn abort_batch(&mut self) {
        // Needed even for an empty batch: some providers lock both queues while a batch is open.
        self.live.qp.abort_sends();
        self.live.sends.roll_back();
    }

    /// Posts a datagram.
    #[inline]
    pub(super) fn post_to(&mut self, work: Work<'_>, peer: &Peer) -> Result<WorkId, Rejected> {
        let mut batch = match self.batch() {
            Ok(batch) => batch,
            Err(error) => return Err(work.reject(error)),
        };
        let id = batch.add_datagram(work, peer)?;
        match batch.post() {
            Ok(()) => Ok(id),
            Err(unposted) => Err(unposted.single()),
        }
    }

    #[inline]
    pub(super) fn batch(&mut self) -> Result<Batch<'_>, PostError> {
        Batch::new(self)
    }
}

impl Transfer {
    /// The gate of this transfer. A buffer with an equal gate has a length of at most 32 bits.
    #[inline(always)]
    fn gate(self, gates: &Gates) -> usize {
        match self {
            Transfer::Send | Transfer::Write(_) => gates.send,
            Transfer::Read(_) => gates.read,
        }
    }

    /// Number of bytes that may be transferred.
    #[inline(always)]
    fn room(self) -> u64 {
        match self {
            Transfer::Send => u64::MAX,
            Transfer::Write(remote) | Transfer::Read(remote) => remote.len,
        }
    }

    /// The operation as a flag of the queue pair.
    #[inline(always)]
    fn operation(self) -> SendOps {
        match self {
            Transfer::Send => SendOps::SEND,
            Transfer::Write(_) => SendOps::RDMA_WRITE,
            Transfer::Read(_) => SendOps::RDMA_READ,
        }
    }

    #[inline(always)]
    fn verb(self) -> Verb {
        match self {
            Transfer::Send => Verb::Send,
            Transfer::Write(remote) => Verb::Write(remote),
            Transfer::Read(remote) => Verb::Read(remote),
        }
    }
}
