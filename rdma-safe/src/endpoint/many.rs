//! Sending many buffers with one doorbell and few completion queue entries.

use std::mem::ManuallyDrop;

use super::batch::take_back_staged;
use super::ring::Kind;
use super::{BatchError, Operation, Poster, Work};
use crate::interface::Interface;
use crate::post::{BufferPayload, SendOps};
use crate::{Buffer, Errno, PostError, SendFlags, WorkRequest};

/// A buffer, and the number that its completion returns.
type Item = (Buffer, u32);

impl<I: Interface> Poster<I> {
    /// Implements [`Endpoint::send_many`](crate::Endpoint::send_many).
    ///
    /// The buffers move into the ring before the batch is opened. So the last one is known, and the iterator, which is code of the
    /// user, does not run while the provider may hold a lock.
    #[inline(always)]
    pub(super) fn send_many(&mut self, buffers: impl IntoIterator<Item = Item>) -> Result<usize, BatchError> {
        let mut buffers = buffers.into_iter();
        let gate = self.gates.send;
        // An open gate implies that nothing is staged or pending.
        let room = if self.gates.allow_sends() {
            self.live.sends.room_if_open().min(self.live.qp.send_state().max_batch::<I>())
        } else {
            self.live.sends.room()
        };
        let mut staging = self.live.sends.stage_many();
        // The first buffer that does not take the fast path.
        let mut other = None;
        for _ in 0..room {
            let Some((buffer, user_data)) = buffers.next() else { break };
            if buffer.gate() != gate {
                other = Some((buffer, user_data));
                break;
            }
            staging.push(buffer, Kind::unsignaled(Operation::Send).with_user_data(user_data));
        }
        let count = staging.len() as usize;
        if count == 0 {
            staging.commit();
            return if room != 0 && other.is_none() { Ok(0) } else { self.send_slowly(0, other, buffers) };
        }
        // SAFETY: as in `transfer`. The gate is open, because a buffer has passed it. The batch is completed below.
        let mut batch = unsafe { self.live.qp.send_state().start::<I>(Some(SendOps::SEND)) };
        staging.signal_every(self.settings.max_unsignaled, |sequence, buffer, signaled| {
            let flags = if signaled { SendFlags::SIGNALED } else { SendFlags::empty() };
            // SAFETY: as in `transfer`. The buffer is in the ring, which keeps it until the work has completed or the queue pair is
            // destroyed. If the batch is not posted, the buffer leaves the ring after that is known.
            let added = unsafe { batch.send(WorkRequest::new(sequence).with_flags(flags), BufferPayload(buffer)) };
            debug_assert!(added.is_ok(), "sends are enabled, and a batch has room: {added:?}");
        });
        // SAFETY: it is neither used nor dropped afterwards.
        if let Err(error) = unsafe { ManuallyDrop::new(batch).complete_nonempty() } {
            staging.stage();
            return Err(self.many_failed(error, count, other));
        }
        staging.commit();
        if other.is_some() { self.send_slowly(count, other, buffers) } else { Ok(count) }
    }

    /// Sends `first` and the buffers after it in a batch of their own, after `before` others.
    #[cold]
    #[inline(never)]
    fn send_slowly(
        &mut self,
        before: usize,
        first: Option<Item>,
        rest: impl Iterator<Item = Item>,
    ) -> Result<usize, BatchError> {
        // Ends a forgotten batch, which may take room.
        self.open_gates();
        let room = (self.live.sends.room() as usize).saturating_sub(usize::from(first.is_some()));
        // Taken before the batch is opened, as above.
        let items: Vec<Item> = first.into_iter().chain(rest.take(room)).collect();
        let mut items = items.into_iter();
        let rest_of = |items: std::vec::IntoIter<Item>| items.map(|(buffer, _)| buffer);
        let mut batch = match self.batch() {
            Ok(batch) => batch,
            Err(error) => {
                return Err(BatchError { error, posted: before, buffers: rest_of(items).collect(), lists: Vec::new() });
            }
        };
        let mut rejected = None;
        for (buffer, user_data) in &mut items {
            if let Err(error) = batch.add(Work::send(buffer).user_data(user_data)) {
                rejected = Some(error);
                break;
            }
        }
        let added = batch.len();
        let mut failed = match (batch.post(), &rejected) {
            (Ok(()), None) => return Ok(before + added),
            (Ok(()), Some(rejected)) => {
                BatchError { error: rejected.error, posted: added, buffers: Vec::new(), lists: Vec::new() }
            }
            (Err(failed), _) => failed,
        };
        failed.posted += before;
        failed.buffers.extend(rejected.and_then(|rejected| rejected.buffer).into_iter().chain(rest_of(items)));
        Err(failed)
    }

    /// Handles staged sends that the provider took only in part, or not at all. `other` comes after them.
    #[cold]
    #[inline(never)]
    fn many_failed(&mut self, error: PostError, staged: usize, other: Option<Item>) -> BatchError {
        let mut failed = take_back_staged(&mut self.live.sends, error, staged);
        if failed.posted != 0 {
            self.poison();
            // The last posted send is probably unsignaled. Then no completion reports it.
            failed.error = match error {
                PostError::QueueFull { .. } => PostError::MaybePosted { errno: Errno(libc::ENOMEM) },
                PostError::Refused { errno, .. } => PostError::MaybePosted { errno },
                error => error,
            };
        }
        failed.buffers.extend(other.map(|(buffer, _)| buffer));
        failed
    }
}
