//! Endpoints of a set, found by their keys and by their queue pair numbers.

use std::collections::VecDeque;
use std::sync::Arc;

use super::backlog::{Backlog, Backlogs};
use super::leftovers::Leftovers;
use super::qp_numbers::{Owner, QpNumbers};
use super::{CompletionSink, EndpointKey};
use crate::endpoint::completion::{Completion, Operation, Succeeded, WorkId};
use crate::endpoint::datagram::DatagramSender;
use crate::endpoint::keepalive::{Check, Keepalive};
use crate::endpoint::poll::{CurrentCompletion, record, take_fast};
use crate::endpoint::poll_each::{Taken, take_received, take_sent};
use crate::endpoint::{Live, Poster};
use crate::qp::QpId;
use crate::srq::Slab;
use crate::{Buffer, PollError, WcFlags, WcStatus, WorkCompletion, srq};

#[derive(Default)]
pub(super) struct Members {
    slots: Vec<Slot>,
    free: Vec<u32>,
    by_qp_num: QpNumbers,
    /// Slots whose endpoints have work to hand out, each once. Has capacity for all slots.
    ready: VecDeque<u32>,
    /// Receives of pools after which another completion was recorded, and messages beyond a share.
    deferred: VecDeque<(EndpointKey, Completion)>,
    removal: Option<Removal>,
    pub(super) leftovers: Leftovers,
    /// Whether endpoints take turns: all messages pass through `backlogs`.
    takes_turns: bool,
    backlogs: Backlogs,
    /// An endpoint that has exceeded its share and is not in error yet.
    over_share: Option<u32>,
    /// Slot of the endpoint whose completion was recorded last.
    last_recorded: Option<u32>,
}

struct Slot {
    poster: Option<Box<Poster>>,
    /// Identifier of its queue pair.
    id: QpId,
    /// Whether it is in `ready`.
    is_ready: bool,
    backlog: Backlog,
    /// Whether it has exceeded its share.
    exceeded_share: bool,
}

impl Slot {
    /// Whether there is a completion to hand out.
    ///
    /// Messages are held back while there is no room for their replies.
    fn has_work(&self) -> bool {
        let Some(poster) = &self.poster else { return false };
        poster.has_completed() || !self.backlog.is_empty() && !lacks_reply_room(poster)
    }
}

/// Whether messages are held back until there is room for their replies.
///
/// False for a failed endpoint, which sends no replies.
fn lacks_reply_room(poster: &Poster) -> bool {
    !poster.poisoned && poster.live.sends.would_refuse()
}

/// An endpoint that is being removed.
struct Removal {
    number: u32,
    pool: Option<Arc<srq::Shared>>,
    buffers: Vec<Buffer>,
}

impl Members {
    pub(super) fn insert(&mut self, poster: Poster) -> EndpointKey {
        let (number, id) = (poster.live.qp.number(), poster.live.qp.id());
        self.takes_turns |= poster.live.pool.is_some() && poster.settings.receive_share.is_some();
        let poster = Some(Box::new(poster));
        let slot = Slot { poster, id, is_ready: false, backlog: Backlog::default(), exceeded_share: false };
        let index = match self.free.pop() {
            Some(index) => {
                self.slots[index as usize] = slot;
                index
            }
            None => {
                self.slots.push(slot);
                // Queue pair numbers have 24 bits, so a device has fewer queue pairs than that.
                (self.slots.len() - 1) as u32
            }
        };
        self.ready.reserve(self.slots.len() - self.ready.len());
        self.by_qp_num.insert(number, Owner::Slot(index));
        EndpointKey { index, id }
    }

    #[inline(always)]
    pub(super) fn find(&mut self, key: EndpointKey) -> Option<&mut Poster> {
        let slot = self.slots.get_mut(key.index as usize)?;
        if slot.id == key.id { slot.poster.as_deref_mut() } else { None }
    }

    /// The sender of a datagram that was just handed out.
    pub(super) fn sender(&self, key: EndpointKey, received: &Completion) -> Option<DatagramSender> {
        let poster = self.slots.get(key.index as usize)?.poster.as_deref()?;
        poster.live.datagrams.as_deref()?.sender_of(received)
    }

    /// Whether endpoints take turns. If so, all completions in the queue are recorded before one is handed out.
    #[inline(always)]
    pub(super) fn takes_turns(&self) -> bool {
        self.takes_turns
    }

    /// Allocates room for `messages` in the backlogs, if endpoints take turns.
    pub(super) fn reserve(&mut self, messages: u32) {
        if self.takes_turns {
            self.backlogs.reserve(messages);
        }
    }

    /// Number of messages in an endpoint's backlog.
    pub(super) fn backlog(&self, key: EndpointKey) -> Option<u32> {
        let slot = self.slots.get(key.index as usize)?;
        if slot.id == key.id && slot.poster.is_some() { Some(slot.backlog.len()) } else { None }
    }

    /// Removes an endpoint.
    ///
    /// Until [`Members::end_removal`], its further completions are dropped, except for buffers of a pool, which are
    /// collected.
    pub(super) fn begin_removal(&mut self, key: EndpointKey) -> Option<Box<Poster>> {
        self.find(key)?;
        let Members { slots, free, ready, leftovers, backlogs, deferred, .. } = self;
        let slot = slots.get_mut(key.index as usize)?;
        slot.is_ready = false;
        let mut poster = slot.poster.take()?;
        free.push(key.index);
        ready.retain(|ready| *ready != key.index);
        let mut buffers = Vec::new();
        let mut collect = |completion: &mut Completion| {
            buffers.extend(completion.buffer.take());
            leftovers.sort(completion.list.take(), &mut buffers);
        };
        while let Some(mut message) = backlogs.pop(&mut slot.backlog) {
            collect(&mut message);
        }
        deferred.retain_mut(|(whose, completion)| {
            let stays = *whose != key;
            if !stays {
                collect(completion);
            }
            stays
        });
        poster.slow.completion.take().iter_mut().for_each(collect);
        let number = poster.live.qp.number();
        self.by_qp_num.insert(number, Owner::Removed);
        self.removal = Some(Removal { number, pool: poster.live.pool.clone(), buffers });
        Some(poster)
    }

    /// Returns the buffers that were collected.
    pub(super) fn end_removal(&mut self) -> Vec<Buffer> {
        self.removal.take().map_or_else(Vec::new, |removal| removal.buffers)
    }

    /// Takes the memory of a removed endpoint whose queue pair is destroyed.
    pub(super) fn take_memory(&mut self, live: &mut Live, buffers: &mut Vec<Buffer>) {
        buffers.extend(live.take_single_buffers());
        self.leftovers.sort(live.take_lists(), buffers);
    }

    /// Forgets the number of a destroyed queue pair, all of whose completions have been polled.
    pub(super) fn forget_qp(&mut self, number: u32) {
        self.by_qp_num.remove(number);
    }

    /// Whether the number belonged to a removed endpoint whose completions may still be in the queue.
    pub(super) fn was_removed(&self, number: u32) -> bool {
        self.by_qp_num.owner(number) == Some(Owner::Removed)
    }

    /// Ends a batch that the user of an endpoint has forgotten.
    pub(super) fn end_forgotten_batch(&mut self, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let Some(poster) = slot.poster.as_deref_mut() else { return };
        // An open batch shuts the gate. If the gate is shut for another reason, this call is harmless.
        if !poster.gates.poll {
            self.open_gates(index);
        }
    }

    #[cold]
    #[inline(never)]
    fn open_gates(&mut self, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let Some(poster) = slot.poster.as_deref_mut() else { return };
        poster.open_gates();
        if poster.has_completed() && !std::mem::replace(&mut slot.is_ready, true) {
            self.ready.push_back(index);
        }
    }

    /// Whether there is nothing to hand out, apart from the completion queue.
    #[inline(always)]
    pub(super) fn is_idle(&self) -> bool {
        self.ready.is_empty() && self.deferred.is_empty()
    }

    /// The fast path of a poll of several: the oldest work of its ring or a receive of a pool has succeeded, and has no immediate
    /// data. Returns whether it has taken the completion.
    ///
    /// Any other completion changes nothing. Nothing may be left to hand out.
    #[inline(always)]
    pub(super) fn take_plain(&mut self, found: &WorkCompletion<'_>, sink: &mut impl CompletionSink) -> bool {
        let Some(index) = found.qp_num().and_then(|number| self.by_qp_num.slot(number)) else { return false };
        let Some(Slot { poster: Some(poster), id, .. }) = self.slots.get_mut(index as usize) else { return false };
        if !poster.gates.poll {
            return false;
        }
        let Live { sends, receives, pool, .. } = &mut poster.live;
        if found.wr_id() == sends.oldest() {
            let Some(sent) = take_sent(sends, found) else { return false };
            sink.sent(EndpointKey { index, id: *id }, sent);
            return true;
        }
        let received =
            if pool.is_some() { take_shared(&mut poster.live, found) } else { take_received(receives, found) };
        let Some(received) = received else { return false };
        sink.received(EndpointKey { index, id: *id }, received);
        true
    }

    /// Like [`Members::take_plain`], for a completion that returns several sends of one endpoint. Takes at most `max` pieces in
    /// all, and counts them in `taken`.
    pub(super) fn take_run(
        &mut self,
        found: &WorkCompletion<'_>,
        max: usize,
        taken: &mut usize,
        sink: &mut dyn CompletionSink,
    ) -> Taken {
        let Some(index) = found.qp_num().and_then(|number| self.by_qp_num.slot(number)) else { return Taken::None };
        let Some(Slot { poster: Some(poster), id, is_ready, .. }) = self.slots.get_mut(index as usize) else {
            return Taken::None;
        };
        if !poster.gates.poll || !poster.live.sends.is_in_flight(found.wr_id()) {
            return Taken::None;
        }
        // In advance, in case the sink panics.
        *is_ready = true;
        self.ready.push_back(index);
        let key = EndpointKey { index, id: *id };
        let end = poster.take_run(found, max, taken, |sent| sink.sent(key, sent));
        if !matches!(end, Taken::Part) {
            *is_ready = false;
            self.ready.pop_back();
        }
        end
    }

    /// The fast path: the oldest work of its ring or a receive of a pool has succeeded.
    ///
    /// Any other completion is returned, with nothing changed. Nothing may be left to hand out.
    #[inline(always)]
    pub(super) fn take_fast<S: CurrentCompletion>(&mut self, current: S) -> Result<(EndpointKey, Completion), S> {
        let found = current.completion();
        let Some(index) = found.qp_num().and_then(|number| self.by_qp_num.slot(number)) else {
            return Err(current);
        };
        let Some(Slot { poster: Some(poster), id, .. }) = self.slots.get_mut(index as usize) else {
            return Err(current);
        };
        if !poster.gates.poll {
            return Err(current);
        }
        let key = EndpointKey { index, id: *id };
        let Live { sends, receives, pool, .. } = &mut poster.live;
        if pool.is_some() && Slab::is_ticket(found.wr_id()) {
            return match take_shared(&mut poster.live, &found) {
                Some(received) => Ok((key, received.into())),
                None => Err(current),
            };
        }
        let taken = take_fast(sends, receives, current, |completion| (key, completion));
        taken.map_err(|(current, _)| current)
    }

    /// Records a completion at its endpoint.
    ///
    /// Returns an error if there is no such endpoint, or no such work in flight. In the latter case the endpoint takes
    /// no more work.
    #[cold]
    #[inline(never)]
    pub(super) fn record(&mut self, found: WorkCompletion<'_>) -> Result<(), PollError> {
        self.last_recorded = None;
        let wr_id = found.wr_id();
        let owner = found.qp_num().and_then(|number| self.by_qp_num.owner(number));
        let index = match owner {
            None => return Err(PollError::NotInFlight { wr_id }),
            Some(Owner::Removed) => {
                self.record_removed(&found);
                return Ok(());
            }
            Some(Owner::Slot(index)) => index,
        };
        let Some(slot) = self.slots.get_mut(index as usize) else { return Err(PollError::NotInFlight { wr_id }) };
        let Some(poster) = slot.poster.as_deref_mut() else { return Err(PollError::NotInFlight { wr_id }) };
        record(&mut poster.live, &mut poster.slow, found).inspect_err(|_| poster.mark_poisoned())?;
        self.last_recorded = Some(index);
        if self.takes_turns {
            if let Some(message) = poster.slow.completion.take() {
                self.add_to_backlog(index, message);
                return Ok(());
            }
        }
        if poster.has_completed() {
            poster.gates.poll = false;
            if !std::mem::replace(&mut slot.is_ready, true) {
                self.ready.push_back(index);
            }
        }
        Ok(())
    }

    /// Adds a message to the backlog. A message beyond the endpoint's share is handed out next, as failed.
    fn add_to_backlog(&mut self, index: u32, message: Completion) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let Some(poster) = slot.poster.as_deref() else { return };
        let arrived = message.status == WcStatus::SUCCESS && !slot.exceeded_share;
        match poster.settings.receive_share {
            Some(share) if arrived && slot.backlog.len() >= share => {
                slot.exceeded_share = true;
                self.over_share = Some(index);
                self.deferred.push_back((EndpointKey { index, id: slot.id }, message.with_exceeded_share(share)));
            }
            _ => self.backlogs.push(&mut slot.backlog, message),
        }
        if slot.has_work() && !std::mem::replace(&mut slot.is_ready, true) {
            self.ready.push_back(index);
        }
    }

    /// Brings an endpoint that has exceeded its share into error, so that it takes no more receives.
    ///
    /// No poll of the completion queue may be open, because some providers take its lock here.
    #[inline]
    pub(super) fn fail_over_share(&mut self) {
        let Some(index) = self.over_share.take() else { return };
        let slot = self.slots.get_mut(index as usize);
        if let Some(poster) = slot.and_then(|slot| slot.poster.as_deref_mut()) {
            poster.live.end_keepalive();
            poster.live.qp.fail();
        }
    }

    /// Whether the endpoint is in the set.
    pub(super) fn contains(&self, key: EndpointKey) -> bool {
        self.slots.get(key.index as usize).is_some_and(|slot| slot.id == key.id && slot.poster.is_some())
    }

    /// Checks the peer of an endpoint. `None` if the endpoint was removed.
    pub(super) fn check_peer(&mut self, key: EndpointKey) -> Option<Check> {
        self.find(key).map(Poster::check_peer)
    }

    /// Ends the connection of an endpoint, unless one of its completions was recorded since its last check.
    ///
    /// No poll of the completion queue may be open, because some providers take its lock here.
    pub(super) fn lose_peer(&mut self, key: EndpointKey) {
        let Some(poster) = self.find(key) else { return };
        if !poster.is_still_silent() {
            return;
        }
        poster.lose_peer();
        let Some(slot) = self.slots.get_mut(key.index as usize) else { return };
        if !std::mem::replace(&mut slot.is_ready, true) {
            self.ready.push_back(key.index);
        }
    }

    /// Collects the buffer of a pool for an endpoint that is being removed. Other buffers are in its rings.
    fn record_removed(&mut self, found: &WorkCompletion<'_>) {
        let Some(removal) = self.removal.as_mut().filter(|removal| Some(removal.number) == found.qp_num()) else {
            return;
        };
        let slab = removal.pool.as_ref().and_then(|pool| pool.slab()).filter(|_| Slab::is_ticket(found.wr_id()));
        if let Some(mut buffer) = slab.and_then(|slab| slab.take(found.wr_id())) {
            let arrived = found.status() == WcStatus::SUCCESS;
            buffer.set_len_within(found.byte_len().filter(|_| arrived).unwrap_or(0));
            removal.buffers.push(buffer);
        }
    }

    /// Defers the receive of a pool that was recorded last, if it was one. An endpoint can hold only one of them.
    pub(super) fn defer_last(&mut self) {
        let Some(index) = self.last_recorded.take() else { return };
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let Some(poster) = slot.poster.as_deref_mut() else { return };
        if let Some(completion) = poster.slow.completion.take() {
            self.deferred.push_back((EndpointKey { index, id: slot.id }, completion));
        }
    }

    /// Hands out completed work.
    pub(super) fn pop(&mut self) -> Option<(EndpointKey, Completion)> {
        if let Some(first) = self.deferred.pop_front() {
            return Some(first);
        }
        while let Some(index) = self.ready.pop_front() {
            let Some(slot) = self.slots.get_mut(index as usize) else { continue };
            let Some(poster) = slot.poster.as_deref_mut() else { continue };
            let mut completion = poster.pop();
            if completion.is_none() && !lacks_reply_room(poster) {
                completion = self.backlogs.pop(&mut slot.backlog);
            }
            if !poster.has_completed() || poster.live.sends.pending() != 0 {
                // This may flush pending sends, which are then work to hand out.
                poster.open_gates();
            }
            slot.is_ready = slot.has_work();
            if slot.is_ready {
                // At the end, so that endpoints take turns.
                self.ready.push_back(index);
            }
            if let Some(completion) = completion {
                return Some((EndpointKey { index, id: slot.id }, completion));
            }
        }
        None
    }

    /// Brings endpoints that use pools into error, and returns whether there are any.
    pub(super) fn poison_pool_users(&mut self) -> bool {
        let posters = self.slots.iter_mut().filter_map(|slot| slot.poster.as_deref_mut());
        posters.filter(|poster| poster.live.pool.is_some()).map(Poster::poison).count() > 0
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = EndpointKey> + '_ {
        let keys = self.slots.iter().zip(0..).filter(|(slot, _)| slot.poster.is_some());
        keys.map(|(slot, index)| EndpointKey { index, id: slot.id })
    }
}

/// Takes a receive of a pool that has succeeded, without immediate data and without an invalidated key.
#[inline]
fn take_shared(live: &mut Live, found: &WorkCompletion<'_>) -> Option<Succeeded> {
    let slab = live.pool.as_ref().and_then(|pool| pool.slab()).filter(|_| Slab::is_ticket(found.wr_id()))?;
    // A write that consumes a receive carries immediate data, so receives without it need no check of their opcode.
    if found.status() != WcStatus::SUCCESS || found.flags().intersects(WcFlags::WITH_IMM | WcFlags::WITH_INV) {
        return None;
    }
    let byte_len = found.byte_len().unwrap_or(0);
    let mut buffer = slab.take(found.wr_id())?;
    Keepalive::count(&mut live.keepalive);
    buffer.set_len_within(byte_len);
    Some(Succeeded { id: WorkId(found.wr_id()), operation: Operation::Receive, user_data: 0, buffer })
}
