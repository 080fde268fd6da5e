//! Posting work with several pieces of memory.

use super::batch::Batch;
use super::ring::{Kind, Signal};
use super::work::Verb;
use super::{Endpoint, EndpointMut, Operation, Poster, Rejected, UnsignaledRun, Work, WorkId};
use crate::interface::Interface;
use crate::mr::Gather;
use crate::{PostError, RemoteMemory, SendBatch, SendFlags, Sge, WorkRequest};

impl<I: Interface> Poster<I> {
    /// Implements [`Endpoint::receive_list`].
    #[inline(never)]
    pub(super) fn receive_list(&mut self, mut list: Gather) -> Result<WorkId, Rejected> {
        self.live.receives.reserve_lists();
        let posted = self.try_receive_list(&mut list);
        let kind = Kind::signaled(Operation::Receive);
        match posted {
            Ok(()) => Ok(WorkId(self.live.receives.push_list(list, kind))),
            Err(error) if error.surely_not_posted() => Err(Rejected { error, buffer: None, list: Some(list) }),
            Err(error) => {
                self.live.receives.push_list(list, kind);
                self.poison();
                Err(Rejected { error, buffer: None, list: None })
            }
        }
    }

    /// Posts a receive with the number of the next entry, which the caller then adds.
    fn try_receive_list(&mut self, list: &mut Gather) -> Result<(), PostError> {
        if self.poisoned {
            return Err(PostError::EndpointFailed);
        }
        if self.live.pool.is_some() {
            return Err(PostError::SharedReceives);
        }
        if !list.is_of(&self.pd) {
            return Err(PostError::ForeignBuffer);
        }
        if !list.is_writable() {
            return Err(PostError::ReadOnly);
        }
        if self.live.receives.is_full() {
            return Err(PostError::QueueFull { posted: 0 });
        }
        self.abort_batch();
        let id = self.live.receives.next_sequence();
        let header = self.live.datagrams.as_mut().map(|datagrams| datagrams.header(id));
        let sges = list.receive_sges(header, self.settings.max_message);
        // SAFETY: as in `Poster::receive`. Buffers have no other owner, and exposed memory is never borrowed. The list moves into
        // the ring unless the provider surely has not taken the work.
        unsafe {
            match sges {
                [] => self.live.qp.receive(id, Sge::EMPTY),
                [one] => self.live.qp.receive(id, *one),
                list => self.live.qp.receive_list(id, list).map_err(|error| match error {
                    // The device takes longer lists than were requested, but there is no storage for them.
                    PostError::BatchFull { .. } => PostError::TooManySges { count: list.len(), max: 1 },
                    error => error,
                }),
            }
        }
    }
}

impl Batch<'_> {
    /// Implements [`Batch::add`] for a list.
    #[inline(never)]
    pub(super) fn add_list(
        &mut self,
        verb: Verb,
        mut list: Gather,
        imm: Option<u32>,
        flags: SendFlags,
        user_data: u32,
    ) -> Result<WorkId, Rejected> {
        self.sends.reserve_lists();
        match self.try_add_list(&verb, &mut list, imm, flags) {
            Ok(()) => Ok(self.stage_list(list, &verb, flags, user_data)),
            Err(error) => Err(Rejected { error, buffer: None, list: Some(list) }),
        }
    }

    /// Adds work to the work requests. The caller then stages its list.
    fn try_add_list(
        &mut self,
        verb: &Verb,
        list: &mut Gather,
        imm: Option<u32>,
        flags: SendFlags,
    ) -> Result<(), PostError> {
        let len = list.byte_len();
        let wr = self.prepare(verb, len, len, self.max_message, flags)?;
        self.check_list(verb, list)?;
        // SAFETY: as in `try_add_buffer`. Shared memory is only read, since `check_list` has passed. Buffers have no other owner,
        // and exposed memory is never borrowed.
        unsafe { add_list(&mut self.raw, wr, verb, imm, list.sges()) }
    }

    /// Checks that the work may access the memory.
    pub(super) fn check_list(&self, verb: &Verb, list: &Gather) -> Result<(), PostError> {
        if !list.is_of(self.pd) {
            return Err(PostError::ForeignBuffer);
        }
        match verb {
            Verb::Read(_) if !list.is_writable() => Err(PostError::ReadOnly),
            _ => Ok(()),
        }
    }

    /// Stages the work that was just added.
    pub(super) fn stage_list(&mut self, list: Gather, verb: &Verb, flags: SendFlags, user_data: u32) -> WorkId {
        let signaled = self.is_signaled(flags);
        let kind = Kind {
            operation: verb.operation(),
            signal: Signal::of(signaled),
            silent: false,
            has_outcome: false,
            user_data,
        };
        let sequence = self.sends.stage_list(list, kind);
        self.run = UnsignaledRun { len: if signaled { 0 } else { self.run.len + 1 }, end: sequence + 1 };
        WorkId(sequence)
    }
}

/// # Safety
///
/// The contract of [`SendBatch`].
pub(super) unsafe fn add_list(
    raw: &mut SendBatch<'_>,
    wr: WorkRequest,
    verb: &Verb,
    imm: Option<u32>,
    sges: &[Sge],
) -> Result<(), PostError> {
    // SAFETY: the caller's contract.
    unsafe {
        match (verb, imm) {
            (Verb::Send, None) => raw.send(wr, sges),
            (Verb::Send, Some(imm)) => raw.send_imm(wr, imm, sges),
            (Verb::SendInvalidate(rkey), _) => raw.send_invalidate(wr, *rkey, sges),
            (Verb::Write(remote), None) => raw.write(wr, *remote, sges),
            (Verb::Write(remote), Some(imm)) => raw.write_imm(wr, *remote, imm, sges),
            (Verb::Read(remote), _) => raw.read(wr, *remote, sges),
            // `Work` makes no atomic operation with a list.
            _ => Err(PostError::AtomicOperand),
        }
    }
}

impl<I: Interface> Endpoint<I> {
    /// Posts a receive into several buffers, or into a part of an exposed region: the next message of the peer fills them in order.
    ///
    /// [`EndpointBuilder::recv_sges`](crate::EndpointBuilder::recv_sges) is the maximum number of elements.
    ///
    /// # Errors
    /// [`Rejected`] returns the list; [`PostError::TooManySges`]; [`PostError::ReadOnly`] if it contains shared bytes.
    pub fn receive_list(&mut self, list: impl Into<Gather>) -> Result<WorkId, Rejected> {
        self.poster.receive_list(list.into())
    }

    /// Sends the bytes of several pieces of memory as one message: shorthand for [`Work::send_list`].
    ///
    /// [`EndpointBuilder::send_sges`](crate::EndpointBuilder::send_sges) is the maximum number of elements.
    ///
    /// # Errors
    /// Like [`post`](Self::post); [`PostError::TooManySges`].
    pub fn send_list(&mut self, list: impl Into<Gather>) -> Result<WorkId, Rejected> {
        self.poster.post(Work::send_list(list))
    }

    /// Writes the bytes of several pieces of memory to the start of `remote`: shorthand for [`Work::write_list`].
    ///
    /// # Errors
    /// Like [`send_list`](Self::send_list); [`PostError::RemoteTooShort`].
    pub fn write_list(&mut self, list: impl Into<Gather>, remote: RemoteMemory) -> Result<WorkId, Rejected> {
        self.poster.post(Work::write_list(list, remote))
    }

    /// Reads from the start of `remote` into several pieces of memory: shorthand for [`Work::read_list`].
    ///
    /// # Errors
    /// Like [`write_list`](Self::write_list); [`PostError::ReadOnly`] if the list contains shared bytes.
    pub fn read_list(&mut self, list: impl Into<Gather>, remote: RemoteMemory) -> Result<WorkId, Rejected> {
        self.poster.post(Work::read_list(list, remote))
    }
}

impl EndpointMut<'_> {
    /// Posts a receive into several buffers: [`Endpoint::receive_list`](crate::Endpoint::receive_list).
    ///
    /// # Errors
    /// Those of [`Endpoint::receive_list`](crate::Endpoint::receive_list).
    pub fn receive_list(&mut self, list: impl Into<Gather>) -> Result<WorkId, Rejected> {
        self.with_poster(|poster| poster.receive_list(list.into()))
    }

    /// Sends the bytes of several pieces of memory as one message: [`Endpoint::send_list`](crate::Endpoint::send_list).
    ///
    /// # Errors
    /// Those of [`Endpoint::send_list`](crate::Endpoint::send_list).
    pub fn send_list(&mut self, list: impl Into<Gather>) -> Result<WorkId, Rejected> {
        self.with_poster(|poster| poster.post(Work::send_list(list)))
    }

    /// Writes the bytes of several pieces of memory: [`Endpoint::write_list`](crate::Endpoint::write_list).
    ///
    /// # Errors
    /// Those of [`Endpoint::write_list`](crate::Endpoint::write_list).
    pub fn write_list(&mut self, list: impl Into<Gather>, remote: RemoteMemory) -> Result<WorkId, Rejected> {
        self.with_poster(|poster| poster.post(Work::write_list(list, remote)))
    }

    /// Reads into several pieces of memory: [`Endpoint::read_list`](crate::Endpoint::read_list).
    ///
    /// # Errors
    /// Those of [`Endpoint::read_list`](crate::Endpoint::read_list).
    pub fn read_list(&mut self, list: impl Into<Gather>, remote: RemoteMemory) -> Result<WorkId, Rejected> {
        self.with_poster(|poster| poster.post(Work::read_list(list, remote)))
    }
}
