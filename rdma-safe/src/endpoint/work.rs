//! Work requests of an endpoint.

use super::{Operation, Rejected};
use crate::mr::Gather;
use crate::{Buffer, PostError, RemoteMemory, SendFlags, SendOps};

/// Size of the operand of an atomic operation in bytes.
pub(super) const ATOMIC: usize = 8;

/// A piece of work for [`Endpoint::post`](crate::Endpoint::post): the operation, its data and its flags.
///
/// ```no_run
/// # fn example(endpoint: &mut rdma_safe::Endpoint, buffer: rdma_safe::Buffer, remote: rdma_safe::RemoteMemory)
/// #     -> Result<(), rdma_safe::endpoint::Rejected> {
/// use rdma_safe::Work;
/// endpoint.post(Work::write(buffer, remote).imm(7).unsignaled())?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "work does nothing until it is posted"]
pub struct Work<'a> {
    pub(super) verb: Verb,
    pub(super) data: Data<'a>,
    pub(super) imm: Option<u32>,
    pub(super) flags: SendFlags,
    pub(super) user_data: u32,
}

/// A send, write or read of one buffer, for [`Endpoint::transfer`](crate::Endpoint::transfer).
///
/// Pass a literal. Everything down to the provider is inlined, so the compiler then removes the branches of the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Transfer {
    /// [`Endpoint::send`](crate::Endpoint::send).
    Send,
    /// [`Endpoint::write`](crate::Endpoint::write).
    Write(RemoteMemory),
    /// [`Endpoint::read`](crate::Endpoint::read).
    Read(RemoteMemory),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Verb {
    Send,
    SendInvalidate(u32),
    Write(RemoteMemory),
    Read(RemoteMemory),
    CompareSwap { remote: RemoteMemory, compare: u64, swap: u64 },
    FetchAdd { remote: RemoteMemory, add: u64 },
}

#[derive(Debug)]
pub(super) enum Data<'a> {
    Buffer(Buffer),
    Inline(&'a [u8]),
    List(Gather),
}

impl<'a> Work<'a> {
    #[inline(always)]
    fn new(verb: Verb, data: Data<'a>) -> Self {
        Work { verb, data, imm: None, flags: SendFlags::SIGNALED, user_data: 0 }
    }

    /// Sends the bytes of `buffer` up to its length.
    #[inline(always)]
    pub fn send(buffer: Buffer) -> Self {
        Work::new(Verb::Send, Data::Buffer(buffer))
    }

    /// Sends the bytes of several pieces of memory as one message.
    ///
    /// [`EndpointBuilder::send_sges`](crate::EndpointBuilder::send_sges) is the maximum number of elements.
    #[inline(always)]
    pub fn send_list(list: impl Into<Gather>) -> Self {
        Work::new(Verb::Send, Data::List(list.into()))
    }

    /// Writes the bytes of several pieces of memory, one after another, to the start of `remote`.
    #[inline(always)]
    pub fn write_list(list: impl Into<Gather>, remote: RemoteMemory) -> Self {
        Work::new(Verb::Write(remote), Data::List(list.into()))
    }

    /// Reads from the start of `remote` into several pieces of memory. The sum of their lengths is the number of bytes.
    #[inline(always)]
    pub fn read_list(list: impl Into<Gather>, remote: RemoteMemory) -> Self {
        Work::new(Verb::Read(remote), Data::List(list.into()))
    }

    /// Sends bytes that are copied during posting; see
    /// [`EndpointBuilder::inline_data`](crate::EndpointBuilder::inline_data).
    #[inline(always)]
    pub fn send_inline(bytes: &'a [u8]) -> Self {
        Work::new(Verb::Send, Data::Inline(bytes))
    }

    /// Sends the bytes of `buffer` and invalidates `rkey` at the peer. Immediate data is not supported and is ignored.
    #[inline(always)]
    pub fn send_invalidate(buffer: Buffer, rkey: u32) -> Self {
        Work::new(Verb::SendInvalidate(rkey), Data::Buffer(buffer))
    }

    /// Writes the bytes of `buffer` up to its length to the start of `remote`.
    #[inline(always)]
    pub fn write(buffer: Buffer, remote: RemoteMemory) -> Self {
        Work::new(Verb::Write(remote), Data::Buffer(buffer))
    }

    /// Writes bytes that are copied during posting to the start of `remote`.
    #[inline(always)]
    pub fn write_inline(bytes: &'a [u8], remote: RemoteMemory) -> Self {
        Work::new(Verb::Write(remote), Data::Inline(bytes))
    }

    /// Reads from the start of `remote` into `buffer`. The length of `buffer` is the number of bytes.
    #[inline(always)]
    pub fn read(buffer: Buffer, remote: RemoteMemory) -> Self {
        Work::new(Verb::Read(remote), Data::Buffer(buffer))
    }

    /// Replaces the 64-bit word at `remote` by `swap` if it equals `compare`.
    ///
    /// The old value is returned in the first eight bytes of `buffer`, in host byte order.
    #[inline(always)]
    pub fn compare_swap(buffer: Buffer, remote: RemoteMemory, compare: u64, swap: u64) -> Self {
        Work::new(Verb::CompareSwap { remote, compare, swap }, Data::Buffer(buffer))
    }

    /// Adds `add` to the 64-bit word at `remote`.
    ///
    /// The old value is returned in the first eight bytes of `buffer`, in host byte order.
    #[inline(always)]
    pub fn fetch_add(buffer: Buffer, remote: RemoteMemory, add: u64) -> Self {
        Work::new(Verb::FetchAdd { remote, add }, Data::Buffer(buffer))
    }

    /// Adds immediate data to a send or a write, in host byte order. Other work ignores it.
    ///
    /// A write with immediate consumes a receive of the peer, which completes there as
    /// [`Operation::ReceiveWrite`](crate::Operation::ReceiveWrite). Without immediate data the peer is not notified of
    /// a write. While the peer has no receive posted, the write is retried:
    /// [`ConnectOptions::rnr_retry`](crate::ConnectOptions::rnr_retry).
    #[inline(always)]
    pub fn imm(mut self, imm: u32) -> Self {
        self.imm = Some(imm);
        self
    }

    /// Requests no completion for this work.
    ///
    /// Its buffer is returned after the completion of later work. Work without a buffer is reported only if it fails.
    #[inline(always)]
    pub fn unsignaled(mut self) -> Self {
        self.flags.remove(SendFlags::SIGNALED);
        self
    }

    /// Starts only after earlier reads and atomics have completed.
    #[inline(always)]
    pub fn fenced(mut self) -> Self {
        self.flags |= SendFlags::FENCE;
        self
    }

    /// Raises a solicited event at the peer.
    #[inline(always)]
    pub fn solicited(mut self) -> Self {
        self.flags |= SendFlags::SOLICITED;
        self
    }

    /// Sets a number that the completion returns in [`Completion::user_data`](crate::Completion::user_data). The default is 0.
    ///
    /// With it, a program finds its own data of the work without a table of [`WorkId`](crate::endpoint::WorkId)s.
    #[inline(always)]
    pub fn user_data(mut self, user_data: u32) -> Self {
        self.user_data = user_data;
        self
    }

    #[inline(always)]
    pub(super) fn of_buffer(verb: Verb, buffer: Buffer) -> Self {
        Work::new(verb, Data::Buffer(buffer))
    }

    /// Returns the buffer or the list of work that is not to be posted.
    #[must_use]
    #[inline]
    pub fn into_memory(self) -> (Option<Buffer>, Option<Gather>) {
        match self.data {
            Data::Buffer(buffer) => (Some(buffer), None),
            Data::Inline(_) => (None, None),
            Data::List(list) => (None, Some(list)),
        }
    }

    /// Returns the memory of work that is not posted.
    #[inline(always)]
    pub(super) fn reject(self, error: PostError) -> Rejected {
        match self.data {
            Data::Buffer(buffer) => Rejected { error, buffer: Some(buffer), list: None },
            Data::Inline(_) => Rejected { error, buffer: None, list: None },
            Data::List(list) => Rejected { error, buffer: None, list: Some(list) },
        }
    }
}

impl Verb {
    #[inline(always)]
    pub(super) fn operation(&self) -> Operation {
        match self {
            Verb::Send | Verb::SendInvalidate(_) => Operation::Send,
            Verb::Write(_) => Operation::Write,
            Verb::Read(_) => Operation::Read,
            Verb::CompareSwap { .. } | Verb::FetchAdd { .. } => Operation::Atomic,
        }
    }

    /// The operation as a flag of a queue pair.
    pub(super) fn operations(&self) -> SendOps {
        match self {
            Verb::Send => SendOps::SEND,
            Verb::SendInvalidate(_) => SendOps::SEND_WITH_INV,
            Verb::Write(_) => SendOps::RDMA_WRITE,
            Verb::Read(_) => SendOps::RDMA_READ,
            Verb::CompareSwap { .. } => SendOps::ATOMIC_CMP_AND_SWP,
            Verb::FetchAdd { .. } => SendOps::ATOMIC_FETCH_AND_ADD,
        }
    }

    #[inline(always)]
    pub(super) fn is_atomic(&self) -> bool {
        matches!(self, Verb::CompareSwap { .. } | Verb::FetchAdd { .. })
    }

    /// Checks the length of the data against `capacity`, the maximum message size and the peer's memory.
    #[inline(always)]
    pub(super) fn check(&self, len: usize, capacity: usize, max_message: u32) -> Result<(), PostError> {
        let remote = match self {
            Verb::Send | Verb::SendInvalidate(_) => None,
            Verb::Write(remote) | Verb::Read(remote) => Some(remote.len),
            Verb::CompareSwap { remote, .. } | Verb::FetchAdd { remote, .. } => Some(remote.len),
        };
        if self.is_atomic() && capacity < ATOMIC {
            return Err(PostError::AtomicOperand);
        }
        let len = if self.is_atomic() { ATOMIC } else { len };
        if len > max_message as usize {
            return Err(PostError::MessageTooLong { len, max: max_message });
        }
        match remote {
            Some(remote) if remote < len as u64 => Err(PostError::RemoteTooShort { len, remote }),
            _ => Ok(()),
        }
    }
}
