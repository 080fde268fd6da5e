//! Sending many buffers with one doorbell and one completion queue entry.

use std::mem::ManuallyDrop;

use super::batch::sort_staged;
use super::ring::Kind;
use super::{BatchError, Operation, Poster, Work};
use crate::interface::Interface;
use crate::post::{BufferPayload, SendOps};
use crate::{Buffer, PostError, SendFlags, WorkRequest};

/// A buffer, and the number that its completion returns.
type Item = (Buffer, u32);

impl<I: Interface> Poster<I> {
    /// Implements [`Endpoint::send_many`](crate::Endpoint::send_many).
    ///
    /// The buffers move into the ring before a batch is opened. So the last one is known, and the iterator, which is code of the user,
    /// does not run while the provider may hold a lock.
    #[inline(always)]
    pub(super) fn send_many(&mut self, buffers: impl IntoIterator<Item = Item>) -> Result<usize, BatchError> {
        let mut buffers = buffers.into_iter();
        let room = self.live.sends.room();
        let gate = self.gates.send;
        let mut staging = self.live.sends.stage_many();
        // The first buffer that does not take the fast path.
        let mut other = None;
        for _ in 0..room {
            let Some((buffer, user_data)) = buffers.next() else { break };
            if buffer.gate() != gate {
                other = Some((buffer, user_data));
                break;
            }
            staging.push(buffer, Kind { signaled: false, user_data, ..Kind::signaled(Operation::Send) });
        }
        let count = staging.len() as usize;
        if count == 0 {
            staging.commit();
            return self.send_slowly(0, other, buffers);
        }
        // SAFETY: as in `transfer`. The gate is open, because a buffer has passed it. The batch is completed below.
        let mut batch = unsafe { self.live.qp.send_state().start::<I>(Some(SendOps::SEND)) };
        staging.signal_runs(self.settings.max_unsignaled, |sequence, buffer, signaled| {
            let flags = if signaled { SendFlags::SIGNALED } else { SendFlags::empty() };
            // SAFETY: as in `transfer`. The buffer is in the ring already.
            let added = unsafe { batch.send(WorkRequest::new(sequence).with_flags(flags), BufferPayload(buffer)) };
            debug_assert!(added.is_ok(), "sends are enabled, and the ring is no longer than a batch: {added:?}");
        });
        // SAFETY: it is neither used nor dropped afterwards.
        if let Err(error) = unsafe { ManuallyDrop::new(batch).complete_some() } {
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
        let mut batch = match self.batch() {
            Ok(batch) => batch,
            Err(error) => {
                let buffers = first.into_iter().map(|(buffer, _)| buffer).collect();
                return Err(BatchError { error, posted: before, buffers, lists: Vec::new() });
            }
        };
        let mut rejected = None;
        let room = batch.room() as usize;
        let more = room.saturating_sub(usize::from(first.is_some()));
        for (buffer, user_data) in first.into_iter().chain(rest.take(more)) {
            if let Err(error) = batch.add(Work::send(buffer).user_data(user_data)) {
                rejected = Some(error);
                break;
            }
        }
        let added = batch.len();
        match (batch.post(), rejected) {
            (Ok(()), None) => Ok(before + added),
            (Ok(()), Some(rejected)) => {
                let buffers = rejected.buffer.into_iter().collect();
                Err(BatchError { error: rejected.error, posted: before + added, buffers, lists: Vec::new() })
            }
            (Err(mut failed), rejected) => {
                failed.posted += before;
                failed.buffers.extend(rejected.and_then(|rejected| rejected.buffer));
                Err(failed)
            }
        }
    }

    /// Handles staged sends that the provider took only in part, or not at all. `other` comes after them.
    #[cold]
    #[inline(never)]
    fn many_failed(&mut self, error: PostError, staged: usize, other: Option<Item>) -> BatchError {
        let (mut failed, is_poisoned) = sort_staged(&mut self.live.sends, error, staged);
        if is_poisoned {
            self.poison();
        }
        failed.buffers.extend(other.map(|(buffer, _)| buffer));
        failed
    }
}
