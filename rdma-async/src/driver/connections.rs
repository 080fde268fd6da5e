//! The connections of a queue and their operations, and what completions do to them.

use rdma_safe::endpoint::{CompletionSink, DatagramSender, Succeeded};
use rdma_safe::{Completion, EndpointKey, WcStatus};

use super::member::{Ended, Member};
use super::state::Done;
use crate::Sharing;
use crate::core::{Slot, Slots};
use crate::effects::Effects;
use crate::receive::Arrived;

/// The connections of a queue and their operations.
pub(super) struct Connections<S: Sharing> {
    /// Indexed by the number of the endpoint in the set.
    pub(super) members: Vec<Option<Box<Member<S>>>>,
    /// Operations in flight.
    pub(super) slots: Slots<Done>,
    pub(super) counts: Counts,
}

/// Counts of a queue since it was created.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) posted: u64,
    pub(crate) completed: u64,
    /// Operations that their tasks have found completed at once. They are in neither `posted` nor `completed`.
    pub(crate) found: u64,
    pub(crate) failed: u64,
    pub(crate) received: u64,
    /// Messages beyond the receives that their connections had reserved.
    pub(crate) exceeded: u64,
    pub(crate) waited: u64,
    pub(crate) starved: u64,
}

/// The connection of this key, unless it was removed.
#[inline(always)]
pub(super) fn find<S: Sharing>(members: &mut [Option<Box<Member<S>>>], key: EndpointKey) -> Option<&mut Member<S>> {
    members.get_mut(key.index())?.as_deref_mut().filter(|member| member.key.qp_id() == key.qp_id())
}

/// Like [`find`], for a key that the set has just passed. The queue forgets a connection under the same lock in which the
/// set removes its endpoint, so the number belongs to no other connection.
#[inline(always)]
fn find_current<S: Sharing>(members: &mut [Option<Box<Member<S>>>], key: EndpointKey) -> Option<&mut Member<S>> {
    let member = members.get_mut(key.index())?.as_deref_mut()?;
    debug_assert_eq!(member.key, key);
    Some(member)
}

impl<S: Sharing> Connections<S> {
    #[inline(always)]
    pub(super) fn find(&mut self, key: EndpointKey) -> Option<&mut Member<S>> {
        find(&mut self.members, key)
    }
}

/// Hands completions to the tasks that wait for them.
pub(super) struct Delivery<'a, S: Sharing> {
    pub(super) connections: &'a mut Connections<S>,
    pub(super) effects: &'a mut Effects,
}

impl<S: Sharing> CompletionSink for Delivery<'_, S> {
    #[inline(always)]
    fn sent(&mut self, key: EndpointKey, work: Succeeded) {
        // All work that a sweep takes has the number of a slot, or [`Slot::NONE`].
        self.succeeded(key, Slot::of(work.user_data), Done::Buffer(work.buffer));
    }

    #[inline(always)]
    fn received(&mut self, key: EndpointKey, work: Succeeded) {
        self.arrived(key, Arrived::plain(work.buffer), None);
    }

    #[inline(never)]
    fn completed(&mut self, key: EndpointKey, completion: Completion, sender: Option<DatagramSender>) {
        match completion.status {
            WcStatus::SUCCESS if completion.id.is_receive() => self.arrived(key, completion.into(), sender),
            WcStatus::SUCCESS => self.succeeded(key, Slot::of(completion.user_data), Done::of(completion)),
            _ => self.failed(key, completion),
        }
    }
}

impl<S: Sharing> Delivery<'_, S> {
    /// An operation has succeeded.
    #[inline(always)]
    fn succeeded(&mut self, key: EndpointKey, slot: Slot, done: Done) {
        let Some(member) = find_current(&mut self.connections.members, key) else {
            return self.effects.drop_done(done);
        };
        if !member.room.completed() {
            return self.effects.drop_done(done);
        }
        self.connections.counts.completed += 1;
        finish(&mut self.connections.slots, slot, done, self.effects);
        if let Some(waker) = member.room.notify() {
            self.effects.wake(waker);
        }
    }

    /// A message has arrived.
    #[inline(always)]
    fn arrived(&mut self, key: EndpointKey, message: Arrived, sender: Option<DatagramSender>) {
        let Some(member) = find_current(&mut self.connections.members, key) else {
            return self.effects.drop_buffers(message.buffer);
        };
        if member.is_at_limit() {
            self.connections.counts.exceeded += 1;
            return member.exceed(message.buffer, self.effects);
        }
        self.connections.counts.received += 1;
        member.inbox.push_back(message);
        if let Some(sender) = sender {
            member.senders.push_back(sender);
        }
        if let Some(waker) = member.readers.notify() {
            self.effects.wake(waker);
        }
    }

    #[cold]
    #[inline(never)]
    fn failed(&mut self, key: EndpointKey, completion: Completion) {
        let slot = Slot::of(completion.user_data);
        let Some(member) = find_current(&mut self.connections.members, key) else {
            return self.effects.drop_completion(completion);
        };
        self.connections.counts.failed += 1;
        let is_operation = !completion.id.is_receive() && completion.operation != rdma_safe::Operation::Keepalive;
        let Err(failed) = completion.ok() else { return };
        if member.ended.is_none() {
            let ended = Ended::of(&failed);
            member.end(&ended, self.effects);
        }
        if !is_operation {
            let mut failed = failed;
            failed.0.buffer = failed.0.buffer.take().and_then(|buffer| member.receives.post_shared(buffer));
            return self.effects.drop_done(Done::Failed(failed));
        }
        let slot = if member.room.completed() { slot } else { Slot::NONE };
        finish(&mut self.connections.slots, slot, Done::Failed(failed), self.effects);
    }
}

/// Stores the result of an operation, and wakes its task.
#[inline(always)]
pub(super) fn finish(slots: &mut Slots<Done>, slot: Slot, done: Done, effects: &mut Effects) {
    match slots.complete(slot, done) {
        Ok(waker) => effects.wake(waker),
        Err(done) => effects.drop_done(done),
    }
}

/// Tells the tasks of all operations in flight that no completion of theirs will be taken.
pub(super) fn fail_operations<S: Sharing>(member: &mut Member<S>, slots: &mut Slots<Done>, effects: &mut Effects) {
    if member.room.give_up() {
        for slot in slots.in_flight_of(member.key.index() as u32) {
            finish(slots, slot, Done::Removed, effects);
        }
    }
}
