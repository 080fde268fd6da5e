//! Posting.

use super::gates::Gates;
use super::pending::Shape;
use super::ring::Kind;
use super::work::Verb;
use super::{Batch, Poster, Rejected, Unposted, Work, WorkId};
use crate::interface::{Classic, Extended, Interface, Known};
use crate::post::{SendOps, Short};
use crate::{Buffer, PostError, RemoteMemory, SendBatch, WorkRequest};

impl<I: Interface> Poster<I> {
    /// The functions of [`Endpoint`](crate::Endpoint) that have the same names.
    #[inline(always)]
    pub(super) fn receive(&mut self, buffer: Buffer) -> Result<WorkId, Rejected> {
        if !self.gates.receive(&buffer) || self.live.receives.is_full() {
            let id = self.receive_slowly(buffer);
            return self.posted_rarely(id);
        }
        let id = self.live.receives.next_sequence();
        // SAFETY: the memory belongs to the buffer alone, which goes into the ring before anything else happens, unless the
        // provider surely has not taken it. It stays there until the work has completed or the queue pair was destroyed:
        // entries leave the ring by a completion, or in `close` and `drop` after the destruction.
        match unsafe { self.live.qp.recv_state().post_one(id, buffer.short_whole_sge()) } {
            Ok(()) => {
                self.live.receives.push_alike(buffer);
                Ok(WorkId(id))
            }
            Err(error) => {
                let id = self.receive_failed(buffer, error);
                self.posted_rarely(id)
            }
        }
    }

    /// As [`Poster::receive`], finding out what keeps the gate shut.
    #[cold]
    #[inline(never)]
    fn receive_slowly(&mut self, buffer: Buffer) -> u64 {
        let error = if self.poisoned {
            PostError::Poisoned
        } else if self.live.pool.is_some() {
            PostError::SharedReceives
        } else if !buffer.is_of(&self.pd) {
            PostError::ForeignBuffer
        } else if self.live.receives.is_full() {
            PostError::QueueFull { posted: 0 }
        } else {
            self.abandon();
            let (id, sge) = (self.live.receives.next_sequence(), buffer.whole_sge(self.settings.max_message));
            // SAFETY: as in `receive`; the header stays until the queue pair is destroyed.
            let posted = unsafe {
                match &mut self.live.datagrams {
                    None => self.live.qp.receive(id, sge),
                    Some(datagrams) => self.live.qp.receive_list(id, &[datagrams.header(id), sge]),
                }
            };
            match posted {
                Ok(()) => {
                    self.live.receives.push_alike(buffer);
                    return id;
                }
                Err(error) => error,
            }
        };
        self.receive_failed(buffer, error)
    }

    /// It was not taken, or the provider does not say.
    #[cold]
    #[inline(never)]
    fn receive_failed(&mut self, buffer: Buffer, error: PostError) -> u64 {
        let buffer = if error.surely_not_posted() {
            Some(buffer)
        } else {
            self.live.receives.push_alike(buffer);
            self.poison();
            None
        };
        self.rare.rejected = Some(Rejected { error, buffer });
        0
    }

    #[inline]
    pub(super) fn post(&mut self, work: Work<'_>) -> Result<WorkId, Rejected> {
        let mut batch = match self.batch() {
            Ok(batch) => batch,
            Err(error) => return Err(Rejected { error, buffer: work.into_buffer() }),
        };
        let shape = Shape::of(&work);
        let id = match batch.add(work) {
            Ok(id) => id,
            Err(rejected) => {
                drop(batch);
                return self.post_later(shape, rejected);
            }
        };
        match batch.post() {
            Ok(()) => Ok(id),
            Err(Unposted { error, mut buffers }) => Err(Rejected { error, buffer: buffers.pop() }),
        }
    }

    #[inline(always)]
    pub(super) fn send(&mut self, buffer: Buffer) -> Result<WorkId, Rejected> {
        self.post_buffer(Send, buffer, u64::MAX)
    }

    #[inline]
    pub(super) fn send_inline(&mut self, bytes: &[u8]) -> Result<WorkId, PostError> {
        self.post(Work::send_inline(bytes)).map_err(|rejected| rejected.error)
    }

    #[inline(always)]
    pub(super) fn write(&mut self, buffer: Buffer, remote: RemoteMemory) -> Result<WorkId, Rejected> {
        self.post_buffer(Write(remote), buffer, remote.len)
    }

    #[inline(always)]
    pub(super) fn read(&mut self, buffer: Buffer, remote: RemoteMemory) -> Result<WorkId, Rejected> {
        self.post_buffer(Read(remote), buffer, remote.len)
    }

    /// Posts work with a completion of its own, of a buffer of which at most `room` bytes fit where it goes.
    #[inline(always)]
    fn post_buffer(&mut self, verb: impl AtOnce, buffer: Buffer, room: u64) -> Result<WorkId, Rejected> {
        let id = if buffer.gate() != verb.gate(&self.gates) || self.live.sends.is_full() || buffer.len() as u64 > room {
            self.post_slowly(verb.verb(), buffer)
        } else {
            let (id, kind) = (self.live.sends.next_sequence(), Kind::signaled(verb.verb().operation()));
            // Each way returns by itself: the compiler then knows what comes of it.
            if I::EXTENDED.unwrap_or_else(|| self.live.qp.is_extended()) {
                // SAFETY: the gate is open, and so it is asked.
                match unsafe { self.post_at_once::<Extended, _>(verb, id, &buffer) } {
                    Ok(()) => {
                        self.live.sends.push(Some(buffer), kind);
                        return Ok(WorkId(id));
                    }
                    Err(error) => self.send_failed(buffer, kind, error),
                }
            } else {
                // SAFETY: as above.
                match unsafe { self.post_at_once::<Classic, _>(verb, id, &buffer) } {
                    Ok(()) => {
                        self.live.sends.push(Some(buffer), kind);
                        return Ok(WorkId(id));
                    }
                    Err(error) => self.send_failed(buffer, kind, error),
                }
            }
        };
        self.posted_rarely(id)
    }

    /// # Safety
    /// The gate must be open for `buffer`, and the queue pair be of the interface `J`. The buffer has to go into the ring before
    /// anything else happens, unless the provider has surely not taken it.
    #[inline(always)]
    unsafe fn post_at_once<J: Known, V: AtOnce>(&mut self, verb: V, id: u64, buffer: &Buffer) -> Result<(), PostError> {
        let wr = WorkRequest::new(id).signaled();
        let queue = self.live.qp.send_state();
        // SAFETY: where the gate is open no batch is begun, the operation is enabled, and the interface is `J`.
        unsafe {
            queue.post::<J>(V::OPS, |batch| {
                // SAFETY: the memory belongs to the buffer alone, which stays in the ring until the work has completed or the
                // queue pair was destroyed. As to the peer's memory, see `Batch::try_add_buffer`.
                verb.add(batch, wr, buffer)
            })
        }
    }

    /// As [`Poster::post`]: finds out what keeps the gate shut, or does what has to be done.
    #[cold]
    #[inline(never)]
    fn post_slowly(&mut self, verb: Verb, buffer: Buffer) -> u64 {
        match self.post(Work::of_buffer(verb, buffer)) {
            Ok(id) => id.0,
            Err(error) => {
                self.rare.rejected = Some(error);
                0
            }
        }
    }

    /// The provider has not taken it, or does not say.
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
        self.rare.rejected = Some(Rejected { error, buffer });
        0
    }

    /// The result of a rare call, which has returned the number of what it has posted, or 0.
    #[inline(always)]
    fn posted_rarely(&mut self, id: u64) -> Result<WorkId, Rejected> {
        match self.rare.rejected.take() {
            Some(rejected) if id == 0 => Err(rejected),
            _ => Ok(WorkId(id)),
        }
    }

    /// The provider may have work that it did not accept: only destroying the queue pair ends that.
    #[cold]
    #[inline(never)]
    pub(super) fn poison(&mut self) {
        self.poisoned = true;
        self.gates = Gates::SHUT;
        self.live.qp.fail();
    }

    /// Takes back what a batch that was forgotten has left: the work from the provider, then the buffers.
    #[inline]
    pub(super) fn abandon(&mut self) {
        // Also where nothing was added: some providers lock both queues as long as a batch is open.
        self.live.qp.abort_sends();
        self.live.sends.roll_back();
    }

    #[inline]
    pub(super) fn batch(&mut self) -> Result<Batch<'_>, PostError> {
        Batch::new(self)
    }
}

/// What is posted at once, each a type, so that it is compiled for it alone.
trait AtOnce: Copy {
    /// The operation, without which its gate stays shut.
    const OPS: SendOps;

    fn verb(self) -> Verb;

    /// Of which domain a buffer has to be: its length has 32 bits then.
    fn gate(self, gates: &Gates) -> usize;

    /// Adds it, with the bytes of `buffer` up to its length, which has 32 bits.
    ///
    /// # Safety
    /// The contract of [`SendBatch`].
    unsafe fn add<I: Known>(self, to: &mut SendBatch<'_, I>, wr: WorkRequest, buffer: &Buffer)
    -> Result<(), PostError>;
}

#[derive(Clone, Copy)]
struct Send;

#[derive(Clone, Copy)]
struct Write(RemoteMemory);

#[derive(Clone, Copy)]
struct Read(RemoteMemory);

macro_rules! at_once {
    ($($name:ident $(($remote:ident))? = $method:ident, $gate:ident, $op:ident;)+) => {$(
        impl AtOnce for $name {
            const OPS: SendOps = SendOps::$op;

            #[inline(always)]
            fn verb(self) -> Verb {
                let $name $(($remote))? = self;
                Verb::$name $(($remote))?
            }

            #[inline(always)]
            fn gate(self, gates: &Gates) -> usize {
                gates.$gate
            }

            #[inline(always)]
            unsafe fn add<I: Known>(
                self,
                to: &mut SendBatch<'_, I>,
                wr: WorkRequest,
                buffer: &Buffer,
            ) -> Result<(), PostError> {
                let $name $(($remote))? = self;
                // SAFETY: the caller's contract.
                unsafe { to.$method(wr, $($remote,)? Short(buffer)) }
            }
        }
    )+};
}

at_once! {
    Send = send, send, SEND;
    Write(remote) = write, send, RDMA_WRITE;
    Read(remote) = read, read, RDMA_READ;
}
