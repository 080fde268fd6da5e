//! The endpoints of a set, found by their keys and by the numbers of their queue pairs.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use super::EndpointKey;
use super::backlog::{Backlog, Backlogs};
use crate::endpoint::completion::{Completion, Operation};
use crate::endpoint::poll::{Outcome, Shown, note, take_usual};
use crate::endpoint::{Live, Poster};
use crate::srq::{self, Slab};
use crate::{Buffer, PollError, QpId, WcFlags, WcStatus, WorkCompletion};

#[derive(Default)]
pub(super) struct Members {
    places: Vec<Place>,
    vacant: Vec<u32>,
    numbers: HashMap<u32, Home, BuildHasherDefault<Spread>>,
    /// Places whose endpoints have work to hand out, each once; it has room for all.
    ready: VecDeque<u32>,
    /// Receives of pools that completed while an endpoint was removed.
    put_off: VecDeque<(EndpointKey, Completion)>,
    leaving: Option<Leaving>,
    /// Endpoints take turns: all messages pass through `backlogs`.
    in_turn: bool,
    backlogs: Backlogs,
    /// An endpoint that has exceeded its share and is not in error yet.
    exceeding: Option<u32>,
    /// Whose completion was noted last.
    last: Option<u32>,
}

struct Place {
    poster: Option<Box<Poster>>,
    /// Of its queue pair.
    id: QpId,
    /// It is in `ready`.
    is_ready: bool,
    backlog: Backlog,
    /// It has exceeded its share.
    has_exceeded: bool,
}

impl Place {
    /// Whether there is a completion to hand out. Messages are held back while there is no room for their answers.
    fn has_work(&self) -> bool {
        let Some(poster) = &self.poster else { return false };
        poster.has_completed() || !self.backlog.is_empty() && !holds_back(poster)
    }
}

/// Whether messages are held back until there is room for their answers.
///
/// Not those of a failed endpoint, which takes no answers.
fn holds_back(poster: &Poster) -> bool {
    !poster.poisoned && poster.live.sends.refuses()
}

/// Whose the number of a queue pair is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Home {
    Place(u32),
    /// Of one that was removed, or is just being.
    Gone,
}

/// An endpoint that is being removed.
struct Leaving {
    number: u32,
    pool: Option<Arc<srq::Shared>>,
    buffers: Vec<Buffer>,
}

impl Members {
    pub(super) fn insert(&mut self, poster: Poster) -> EndpointKey {
        let (number, id) = (poster.live.qp.number(), poster.live.qp.id());
        self.in_turn |= poster.live.pool.is_some() && poster.settings.receive_share.is_some();
        let poster = Some(Box::new(poster));
        let place = Place { poster, id, is_ready: false, backlog: Backlog::default(), has_exceeded: false };
        let index = match self.vacant.pop() {
            Some(index) => {
                self.places[index as usize] = place;
                index
            }
            None => {
                self.places.push(place);
                // No device has more queue pairs than numbers of 24 bits.
                (self.places.len() - 1) as u32
            }
        };
        self.ready.reserve(self.places.len() - self.ready.len());
        self.numbers.insert(number, Home::Place(index));
        EndpointKey { index, id }
    }

    #[inline]
    pub(super) fn find(&mut self, key: EndpointKey) -> Option<&mut Poster> {
        let place = self.places.get_mut(key.index as usize)?;
        if place.id == key.id { place.poster.as_deref_mut() } else { None }
    }

    /// Whether endpoints take turns. Then all completions in the queue have to be noted before one is handed out.
    #[inline(always)]
    pub(super) fn is_in_turn(&self) -> bool {
        self.in_turn
    }

    /// Allocates room for `messages` in the backlogs, if endpoints take turns.
    pub(super) fn reserve(&mut self, messages: u32) {
        if self.in_turn {
            self.backlogs.reserve(messages);
        }
    }

    /// Number of messages in an endpoint's backlog.
    pub(super) fn backlog(&self, key: EndpointKey) -> Option<u32> {
        let place = self.places.get(key.index as usize)?;
        if place.id == key.id && place.poster.is_some() { Some(place.backlog.len()) } else { None }
    }

    /// Takes an endpoint out. What completes of it from now on is kept for [`Members::end_removal`], as far as it is a buffer of a
    /// pool, and forgotten otherwise.
    pub(super) fn begin_removal(&mut self, key: EndpointKey) -> Option<Box<Poster>> {
        self.find(key)?;
        let place = self.places.get_mut(key.index as usize)?;
        place.is_ready = false;
        let mut poster = place.poster.take()?;
        self.vacant.push(key.index);
        self.ready.retain(|ready| *ready != key.index);
        let mut buffers = Vec::new();
        while let Some(message) = self.backlogs.pop(&mut place.backlog) {
            buffers.extend(message.buffer);
        }
        self.put_off.retain_mut(|(whose, completion)| {
            let stays = *whose != key;
            if !stays {
                buffers.extend(completion.buffer.take());
            }
            stays
        });
        buffers.extend(poster.rare.completion.take().and_then(|completion| completion.buffer));
        let number = poster.live.qp.number();
        self.numbers.insert(number, Home::Gone);
        self.leaving = Some(Leaving { number, pool: poster.live.pool.clone(), buffers });
        Some(poster)
    }

    /// What was kept.
    pub(super) fn end_removal(&mut self) -> Vec<Buffer> {
        self.leaving.take().map_or_else(Vec::new, |leaving| leaving.buffers)
    }

    /// Of a queue pair that was destroyed, and none of whose completions is left.
    pub(super) fn forget(&mut self, number: u32) {
        self.numbers.remove(&number);
    }

    /// Whether the number was that of an endpoint that was removed, and of which completions may be left.
    pub(super) fn is_gone(&self, number: u32) -> bool {
        self.numbers.get(&number) == Some(&Home::Gone)
    }

    /// Ends what the user of an endpoint has forgotten.
    #[inline]
    pub(super) fn settle(&mut self, index: u32) {
        let Some(place) = self.places.get_mut(index as usize) else { return };
        let Some(poster) = place.poster.as_deref_mut() else { return };
        // A batch shuts it, and so do other things, with which this does no harm.
        if !poster.gates.poll {
            poster.open_gates();
            if poster.has_completed() && !std::mem::replace(&mut place.is_ready, true) {
                self.ready.push_back(index);
            }
        }
    }

    /// Whether there is nothing to hand out but what is in the queue.
    #[inline(always)]
    pub(super) fn is_idle(&self) -> bool {
        self.ready.is_empty() && self.put_off.is_empty()
    }

    /// What completes most often, at once: the oldest work of its queue, or a receive of a pool, with nothing to be said about it.
    /// Any other is given back, and nothing has changed. Nothing may be left to hand out.
    #[inline(always)]
    pub(super) fn take_usual<S: Shown>(&mut self, shown: S) -> Result<(EndpointKey, Completion), S> {
        let found = shown.completion();
        let Some(Home::Place(index)) = found.qp_num().and_then(|number| self.numbers.get(&number).copied()) else {
            return Err(shown);
        };
        let Some(Place { poster: Some(poster), id, .. }) = self.places.get_mut(index as usize) else {
            return Err(shown);
        };
        if !poster.gates.poll {
            return Err(shown);
        }
        let key = EndpointKey { index, id: *id };
        let Live { sends, receives, pool, .. } = &mut poster.live;
        let ticket = found.wr_id();
        let Some(slab) = pool.as_ref().and_then(|pool| pool.slab()).filter(|_| Slab::is_ticket(ticket)) else {
            return match take_usual(sends, receives, shown, |completion| completion) {
                Ok(completion) => Ok((key, completion)),
                Err((shown, _)) => Err(shown),
            };
        };
        // A write that takes a receive has immediate data, so that others need not be asked what they are.
        if found.status() != WcStatus::SUCCESS || found.flags().intersects(WcFlags::WITH_IMM | WcFlags::WITH_INV) {
            return Err(shown);
        }
        let byte_len = found.byte_len().unwrap_or(0);
        let Some(mut buffer) = slab.take(ticket) else { return Err(shown) };
        drop(shown);
        buffer.set_len_within(byte_len);
        let outcome = Outcome { byte_len: buffer.len() as u32, ..Outcome::DONE };
        Ok((key, Completion::new(ticket, Operation::Receive, Some(buffer), outcome)))
    }

    /// Notes a completion at its endpoint. An error when there is none, or no such work of it, which then takes no more.
    #[cold]
    #[inline(never)]
    pub(super) fn note(&mut self, found: WorkCompletion<'_>) -> Result<(), PollError> {
        self.last = None;
        let wr_id = found.wr_id();
        let home = found.qp_num().and_then(|number| self.numbers.get(&number).copied());
        let index = match home {
            None => return Err(PollError::Unexpected { wr_id }),
            Some(Home::Gone) => {
                self.note_leaving(&found);
                return Ok(());
            }
            Some(Home::Place(index)) => index,
        };
        let Some(place) = self.places.get_mut(index as usize) else { return Err(PollError::Unexpected { wr_id }) };
        let Some(poster) = place.poster.as_deref_mut() else { return Err(PollError::Unexpected { wr_id }) };
        note(&mut poster.live, &mut poster.rare, found).inspect_err(|_| poster.doubt())?;
        self.last = Some(index);
        if self.in_turn {
            if let Some(message) = poster.rare.completion.take() {
                self.wait_in_turn(index, message);
                return Ok(());
            }
        }
        if poster.has_completed() {
            poster.gates.poll = false;
            if !std::mem::replace(&mut place.is_ready, true) {
                self.ready.push_back(index);
            }
        }
        Ok(())
    }

    /// Keeps a message until its endpoint's turn. A message beyond the share of the endpoint is handed out next, as failed.
    fn wait_in_turn(&mut self, index: u32, message: Completion) {
        let Some(place) = self.places.get_mut(index as usize) else { return };
        let Some(poster) = place.poster.as_deref() else { return };
        let arrived = message.status == WcStatus::SUCCESS && !place.has_exceeded;
        match poster.settings.receive_share {
            Some(share) if arrived && place.backlog.len() >= share => {
                place.has_exceeded = true;
                self.exceeding = Some(index);
                self.put_off.push_back((EndpointKey { index, id: place.id }, message.exceeding(share)));
            }
            _ => self.backlogs.push(&mut place.backlog, message),
        }
        if place.has_work() && !std::mem::replace(&mut place.is_ready, true) {
            self.ready.push_back(index);
        }
    }

    /// Brings an endpoint that has exceeded its share into error, so that it takes no more receives.
    ///
    /// The completion queue must not be being polled: some providers take its lock for this.
    #[inline]
    pub(super) fn end_exceeding(&mut self) {
        let Some(index) = self.exceeding.take() else { return };
        let place = self.places.get_mut(index as usize);
        if let Some(poster) = place.and_then(|place| place.poster.as_deref_mut()) {
            poster.live.qp.fail();
        }
    }

    /// Buffers of a pool would be lost to it; the others go with the rings.
    fn note_leaving(&mut self, found: &WorkCompletion<'_>) {
        let Some(leaving) = self.leaving.as_mut().filter(|leaving| Some(leaving.number) == found.qp_num()) else {
            return;
        };
        let slab = leaving.pool.as_ref().and_then(|pool| pool.slab()).filter(|_| Slab::is_ticket(found.wr_id()));
        if let Some(mut buffer) = slab.and_then(|slab| slab.take(found.wr_id())) {
            let arrived = found.status() == WcStatus::SUCCESS;
            buffer.set_len_within(found.byte_len().filter(|_| arrived).unwrap_or(0));
            leaving.buffers.push(buffer);
        }
    }

    /// Keeps the receive of a pool that was noted last, if it was one: an endpoint has room for one of them only.
    pub(super) fn put_off(&mut self) {
        let Some(index) = self.last.take() else { return };
        let Some(place) = self.places.get_mut(index as usize) else { return };
        let Some(poster) = place.poster.as_deref_mut() else { return };
        if let Some(completion) = poster.rare.completion.take() {
            self.put_off.push_back((EndpointKey { index, id: place.id }, completion));
        }
    }

    /// Hands out work that is done.
    pub(super) fn pop(&mut self) -> Option<(EndpointKey, Completion)> {
        if let Some(first) = self.put_off.pop_front() {
            return Some(first);
        }
        while let Some(index) = self.ready.pop_front() {
            let Some(place) = self.places.get_mut(index as usize) else { continue };
            let Some(poster) = place.poster.as_deref_mut() else { continue };
            let mut completion = poster.pop();
            if completion.is_none() && !holds_back(poster) {
                completion = self.backlogs.pop(&mut place.backlog);
            }
            if !poster.has_completed() || poster.live.sends.pending() != 0 {
                // This may flush pending sends, which are work to hand out.
                poster.open_gates();
            }
            place.is_ready = place.has_work();
            if place.is_ready {
                // Behind the others: each has its turn.
                self.ready.push_back(index);
            }
            if let Some(completion) = completion {
                return Some((EndpointKey { index, id: place.id }, completion));
            }
        }
        None
    }

    /// Lets nothing more arrive at those that take from pools, and says whether there are any.
    pub(super) fn poison_those_of_pools(&mut self) -> bool {
        let of_pools = self.places.iter_mut().filter_map(|place| place.poster.as_deref_mut());
        of_pools.filter(|poster| poster.live.pool.is_some()).map(Poster::poison).count() > 0
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = EndpointKey> + '_ {
        let keys = self.places.iter().zip(0..).filter(|(place, _)| place.poster.is_some());
        keys.map(|(place, index)| EndpointKey { index, id: place.id })
    }
}

/// A hash of numbers that a device hands out, one after the other mostly.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    #[inline]
    fn write_u32(&mut self, number: u32) {
        // 2^64 divided by the golden ratio.
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32((*byte).into()));
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}
