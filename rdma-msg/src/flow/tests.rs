//! All orders of events of two ends, explored.

use std::collections::HashSet;
use std::hash::{BuildHasher, BuildHasherDefault, Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// A packet on its way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Packet {
    counts: Counts,
    class: Class,
    /// Number of the message, if it is data.
    number: u8,
    /// Whether it offers memory.
    is_offer: bool,
    /// Data packets that it waives.
    waived: u8,
}

/// A short queue that is copied with its state.
#[derive(Clone, Copy, Debug)]
struct Queue<T> {
    items: [T; 8],
    len: u8,
}

impl<T: Copy> Queue<T> {
    fn new(unused: T) -> Self {
        Queue { items: [unused; 8], len: 0 }
    }

    fn push(&mut self, item: T) {
        // Credit bounds the packets on their way.
        self.items[usize::from(self.len)] = item;
        self.len += 1;
    }

    fn pop(&mut self) -> Option<T> {
        self.len = self.len.checked_sub(1)?;
        let first = self.items[0];
        self.items.copy_within(1.., 0);
        Some(first)
    }

    fn items(&self) -> &[T] {
        &self.items[..usize::from(self.len)]
    }
}

impl<T: Copy + Hash> Hash for Queue<T> {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.items().hash(hasher);
    }
}

/// A hash of 64 bits by multiplications of 128 bits, which is ten times as fast as the one of the standard library here.
#[derive(Default)]
struct Fold(u64);

impl Hasher for Fold {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u8(&mut self, number: u8) {
        self.write_u64(u64::from(number));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_isize(&mut self, number: isize) {
        self.write_u64(number as u64);
    }

    fn write_u64(&mut self, number: u64) {
        let product = u128::from(self.0 ^ number ^ 0x9e37_79b9_7f4a_7c15) * 0xa076_1d64_78bd_642f;
        self.0 = (product as u64) ^ (product >> 64) as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

fn packet(counts: Counts, class: Class) -> Packet {
    Packet { counts, class, number: 0, is_offer: false, waived: 0 }
}

/// One end with its program, and the packets that it has sent.
#[derive(Clone, Copy, Hash, Debug)]
struct End {
    flow: Flow,
    /// Messages that the program has sent.
    sent: u8,
    /// The count of data packets up to each of them.
    positions: [u32; 8],
    /// Packets that the peer's device has not received.
    wire: Queue<Packet>,
    /// Packets that this device has received, and this end has not seen.
    arrived: Queue<Packet>,
    /// Sends that the peer's device has acknowledged, and this end has not seen.
    acknowledged: Queue<Class>,
    /// Messages of which this end knows that they were received.
    known: u8,
    /// Receives posted.
    posted: u32,
    /// Messages that the program keeps.
    kept: u8,
    /// Messages that the program has seen.
    seen: u8,
    /// Offers of the peer that this end has still to read.
    to_read: u8,
    /// Heartbeats that this end may still send.
    heartbeats: u8,
    /// Offers of memory for messages that this end may still send.
    spaces: u8,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    windows: [u32; 2],
    /// The most receives for data.
    max_windows: [u32; 2],
    messages: [u8; 2],
    sends: u32,
    /// Messages that a program keeps as long as others are to come.
    hold: u8,
    /// The value at which all counts start.
    start: u32,
    /// Whether all messages are offers.
    offers: bool,
    /// Heartbeats that each end sends.
    heartbeats: u8,
    /// Offers of memory for messages that each end may send before its last message.
    spaces: u8,
}

type State = [End; 2];

/// An event at one of the ends.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The program sends a message.
    Send,
    /// This end sends an update.
    Update,
    /// The peer's device receives a packet and acknowledges it.
    Deliver,
    /// This end sees the completion of a send.
    Complete,
    /// This end sees a packet.
    See,
    /// This end sees a data packet and grows its window.
    SeeAndGrow,
    /// This end waives credit.
    Waive,
    /// The program returns a message.
    Return,
    /// This end has read the memory of an offer.
    Read,
    /// This end sends an answer.
    Answer,
    /// This end sends a heartbeat.
    Heartbeat,
    /// This end offers memory for a message.
    Space,
}

const EVENTS: [Event; 12] = [
    Event::Send,
    Event::Update,
    Event::Deliver,
    Event::Complete,
    Event::See,
    Event::SeeAndGrow,
    Event::Waive,
    Event::Return,
    Event::Read,
    Event::Answer,
    Event::Heartbeat,
    Event::Space,
];

impl Case {
    fn initial(&self) -> State {
        [0, 1].map(|side| {
            let [window, peer_window] = [self.windows[side], self.windows[1 - side]];
            let [max_window, peer_max_window] = [self.max_windows[side], self.max_windows[1 - side]];
            let limits = Limits {
                window,
                max_window,
                peer_window,
                peer_max_window,
                sends: self.sends,
                offers: OFFERS,
                is_active: side == 0,
            };
            let none =
                packet(Counts { window: 0, data: 0, control: 0, answered: 0, is_out_of_credit: false }, Class::Data);
            End {
                flow: Flow::starting_at(limits, self.start),
                sent: 0,
                positions: [0; 8],
                wire: Queue::new(none),
                arrived: Queue::new(none),
                acknowledged: Queue::new(Class::Data),
                known: 0,
                posted: window + CONTROL + OFFERS + HEARTBEATS,
                kept: 0,
                seen: 0,
                to_read: 0,
                heartbeats: self.heartbeats,
                spaces: self.spaces,
            }
        })
    }

    /// The state after an event. `None` if the event cannot happen.
    fn after(&self, state: &State, side: usize, event: Event) -> Option<State> {
        let mut next = *state;
        let (left, right) = next.split_at_mut(1);
        let [own, peer] = if side == 0 { [&mut left[0], &mut right[0]] } else { [&mut right[0], &mut left[0]] };
        match event {
            Event::Send => {
                if own.sent == self.messages[side] || (self.offers && !own.flow.can_offer()) {
                    return None;
                }
                let counts = own.flow.send()?;
                if self.offers {
                    own.flow.offer();
                }
                own.wire.push(Packet { number: own.sent, is_offer: self.offers, ..packet(counts, Class::Data) });
                own.positions[usize::from(own.sent)] = own.flow.sent();
                own.sent += 1;
            }
            Event::Space => {
                if own.sent == self.messages[side] {
                    return None;
                }
                own.spaces = own.spaces.checked_sub(1)?;
                let counts = own.flow.send()?;
                own.wire.push(packet(counts, Class::Space));
            }
            Event::Update => {
                let counts = own.flow.update()?;
                own.wire.push(packet(counts, Class::Control));
            }
            Event::Deliver => {
                let packet = own.wire.pop()?;
                own.acknowledged.push(packet.class);
                assert_ne!(peer.posted, 0, "RNR");
                peer.posted -= 1;
                peer.arrived.push(packet);
            }
            Event::Complete => {
                let class = own.acknowledged.pop()?;
                own.flow.completed(class);
                own.known += u8::from(class == Class::Data);
            }
            Event::Waive => {
                let count = own.flow.waivable()?;
                let counts = own.flow.waive(count);
                own.wire.push(Packet { waived: count as u8, ..packet(counts, Class::Waiver) });
            }
            Event::See | Event::SeeAndGrow => {
                let Packet { counts, class, number, is_offer, waived } = own.arrived.pop()?;
                if matches!(event, Event::SeeAndGrow) {
                    let mut seen = own.flow;
                    if !matches!(class, Class::Data | Class::Space)
                        || seen.received(counts).is_err()
                        || seen.growth() == 0
                    {
                        return None;
                    }
                }
                match class {
                    Class::Data => {
                        own.flow.received(counts).expect("the peer keeps to the protocol");
                        assert_eq!(number, own.seen, "each message once and in order");
                        own.kept += 1;
                        own.seen += 1;
                        if own.seen == self.messages[1 - side] {
                            own.flow.peer_finished();
                        }
                        if is_offer {
                            own.flow.offer_received().expect("the peer keeps to the protocol");
                            own.to_read += 1;
                        }
                    }
                    Class::Waiver => {
                        own.flow.waived(counts, waived.into()).expect("the peer keeps to the protocol");
                        // The receive of this packet is posted again, and others are taken away.
                        own.posted = (own.posted + 1).checked_sub(waived.into()).expect("they are posted");
                    }
                    Class::Space => {
                        own.posted += 1;
                        own.flow.received(counts).expect("the peer keeps to the protocol");
                        own.flow.returned();
                    }
                    Class::Abort => unreachable!("no end aborts"),
                    Class::Heartbeat => {
                        own.posted += 1;
                        own.flow.heartbeat_received(counts).expect("the peer keeps to the protocol");
                    }
                    Class::Answer => {
                        own.posted += 1;
                        own.flow.answered(counts).expect("the peer keeps to the protocol");
                    }
                    Class::Control => {
                        own.posted += 1;
                        own.flow.updated(counts).expect("the peer keeps to the protocol");
                    }
                }
                if matches!(event, Event::SeeAndGrow) {
                    let receives = own.flow.growth();
                    own.posted += receives;
                    own.flow.grow(receives);
                }
            }
            Event::Return => {
                let is_last = own.seen == self.messages[1 - side];
                if own.kept == 0 || (own.kept <= self.hold && !is_last) {
                    return None;
                }
                own.kept -= 1;
                own.posted += 1;
                let until_update = own.flow.returns_until_update();
                own.flow.returned();
                // An engine that does not look before then misses no update.
                assert!(until_update == 1 || own.flow.clone().update().is_none());
                assert!(own.flow.returns_until_update() >= until_update - 1);
            }
            Event::Read => {
                own.to_read = own.to_read.checked_sub(1)?;
                own.flow.offer_done();
            }
            Event::Heartbeat => {
                own.heartbeats = own.heartbeats.checked_sub(1)?;
                let counts = own.flow.heartbeat()?;
                own.wire.push(packet(counts, Class::Heartbeat));
            }
            Event::Answer => {
                let counts = own.flow.answer()?;
                own.wire.push(packet(counts, Class::Answer));
            }
        }
        Some(next)
    }

    /// Explores all states. Returns their number.
    fn explore(&self) -> usize {
        // Two different states with the same 64 bits would hide one of them: less likely than 1 in a million for a million states.
        let hasher = BuildHasherDefault::<Fold>::default();
        let initial = self.initial();
        let mut seen = HashSet::from([hasher.hash_one(initial)]);
        let mut open = vec![initial];
        while let Some(state) = open.pop() {
            let mut is_stuck = true;
            for side in [0, 1] {
                self.check(&state, side);
                for event in EVENTS {
                    let Some(next) = self.after(&state, side, event) else { continue };
                    is_stuck = false;
                    if seen.insert(hasher.hash_one(next)) {
                        open.push(next);
                    }
                }
            }
            assert!(!is_stuck || self.is_done(&state), "nobody can go on: {self:?} {state:#?}");
        }
        seen.len()
    }

    /// Whether all messages were seen and returned, and nothing is on its way.
    fn is_done(&self, state: &State) -> bool {
        [0, 1].into_iter().all(|side| {
            let End { flow, sent, wire, arrived, acknowledged, known, kept, seen, to_read, .. } = &state[side];
            let is_idle = (wire.len, arrived.len, acknowledged.len) == (0, 0, 0);
            let all = self.messages[side];
            let is_answered = *to_read == 0 && flow.offers_open() == 0;
            // The peer has told that it has taken everything.
            let is_taken = all == 0 || flow.has_taken(state[side].positions[usize::from(all) - 1]);
            is_idle
                && is_answered
                && is_taken
                && (*sent, *known, *kept, *seen) == (all, all, 0, self.messages[1 - side])
        })
    }

    /// What must hold in each state, also because the connection may be lost in it.
    fn check(&self, state: &State, side: usize) {
        let [own, peer] = [&state[side], &state[1 - side]];
        // Usually, messages that the program keeps do not count as taken. But a waiver tells that all packets before it were
        // received, and the receive of an offer is posted again before those of earlier messages.
        let is_in_order = self.windows == self.max_windows && self.spaces == 0;
        let taken = peer.seen - if is_in_order { peer.kept } else { 0 };
        assert!((taken..own.sent).all(|number| !own.flow.has_taken(own.positions[usize::from(number)])), "{state:#?}");
        // Credit is conserved: each packet that the peer may send, or has sent, has a receive.
        let unseen = |class| {
            own.wire.items().iter().chain(peer.arrived.items()).filter(|packet| packet.class == class).count() as u32
        };
        let waived: u32 =
            own.wire.items().iter().chain(peer.arrived.items()).map(|packet| u32::from(packet.waived)).sum();
        let on_their_way = [Class::Data, Class::Waiver, Class::Space].map(unseen).iter().sum::<u32>();
        let data = own.flow.credit() + on_their_way + waived + u32::from(peer.kept);
        assert!(data <= peer.flow.window(), "{state:#?}");
        assert!((self.windows[side]..=self.max_windows[side]).contains(&own.flow.window()), "{state:#?}");
        let control = own.flow.allowed.control.wrapping_sub(own.flow.sent.control);
        assert!(control + unseen(Class::Control) <= CONTROL, "{state:#?}");
        assert!(own.flow.offers_open() <= OFFERS && unseen(Class::Answer) <= peer.flow.offers_open(), "{state:#?}");
        let [data, control, answers, heartbeats] = own.flow.in_flight;
        assert!(
            data <= self.sends && control <= CONTROL_SENDS && answers <= ANSWER_SENDS && heartbeats <= HEARTBEAT_SENDS,
            "{state:#?}"
        );
        // If the connection is lost now, the peer sees the messages that its device has received and no others. This end knows only
        // of messages among these.
        let arrived: Vec<u8> = peer
            .arrived
            .items()
            .iter()
            .filter(|packet| packet.class == Class::Data)
            .map(|packet| packet.number)
            .collect();
        let received = peer.seen + arrived.len() as u8;
        assert!(arrived.into_iter().eq(peer.seen..received), "{state:#?}");
        assert!(own.known <= received && received <= own.sent, "{state:#?}");
    }
}

/// All cases, except mirrored ones. In some of them, one end has more messages than the window of the other.
fn cases() -> impl Iterator<Item = Case> {
    let pairs = |range: std::ops::RangeInclusive<u8>| {
        range.clone().flat_map(move |one| range.clone().map(move |other| [one, other]))
    };
    pairs(1..=4).filter(|[one, other]| one <= other).flat_map(move |windows| {
        let longer = (4..=7).flat_map(|more| [[more, 0], [0, more]]).chain([[4, 1], [1, 4]]);
        pairs(0..=3).chain(longer).flat_map(move |messages| {
            (0..windows[0]).flat_map(move |hold| {
                let windows = windows.map(u32::from);
                let case = move |sends, start, offers| Case {
                    windows,
                    max_windows: windows,
                    messages,
                    sends,
                    hold,
                    start,
                    offers,
                    heartbeats: 0,
                    spaces: 0,
                };
                // The second start wraps after the first packet.
                let cases = [case(1, 0, false), case(2, u32::MAX, false)];
                // One end makes more offers than may be open, or each end makes one.
                let has_offers = match messages {
                    [3, 0] | [0, 3] => windows[1] <= 3,
                    [1, 1] => windows[1] == 1,
                    _ => false,
                };
                cases.into_iter().chain(has_offers.then_some(case(2, u32::MAX - 1, true)))
            })
        })
    })
}

/// Cases in which the window of one or both ends changes.
fn elastic_cases() -> impl Iterator<Item = Case> {
    let windows = [([1, 1], [2, 1]), ([1, 1], [2, 2]), ([1, 1], [4, 1]), ([2, 1], [3, 1]), ([1, 2], [4, 2])];
    windows.into_iter().flat_map(|(windows, max_windows)| {
        let few = (0..=3).flat_map(|one| (0..=3 - one).map(move |other| [one, other]));
        few.chain([[0, 5]]).flat_map(move |messages| {
            // A program that keeps all receives gets nothing more.
            let hold = windows[0].min(windows[1]) as u8 - 1;
            [(1, 0, 0), (2, u32::MAX - 1, hold)].map(move |(sends, start, hold)| Case {
                windows,
                max_windows,
                messages,
                sends,
                hold,
                start,
                offers: false,
                heartbeats: 0,
                spaces: 0,
            })
        })
    })
}

/// Cases in which the ends exchange heartbeats.
fn heartbeat_cases() -> impl Iterator<Item = Case> {
    let windows = [([1, 1], [1, 1]), ([1, 1], [1, 2]), ([1, 2], [1, 2])];
    windows.into_iter().flat_map(|(windows, max_windows)| {
        [[0, 0], [1, 0], [0, 1], [1, 1], [2, 1], [0, 3]].map(|messages| Case {
            windows,
            max_windows,
            messages,
            sends: 1,
            hold: 0,
            start: u32::MAX,
            offers: false,
            heartbeats: 2,
            spaces: 0,
        })
    })
}

/// Cases in which the ends offer memory for messages.
fn space_cases() -> impl Iterator<Item = Case> {
    let windows = [([1, 1], [1, 1]), ([1, 2], [1, 2]), ([2, 2], [2, 2]), ([1, 1], [2, 1])];
    windows.into_iter().flat_map(|(windows, max_windows)| {
        [[1, 0], [1, 1], [2, 0], [0, 3], [2, 1]].into_iter().flat_map(move |messages| {
            [(1, 0), (2, windows[0].min(windows[1]) as u8 - 1)].map(|(sends, hold)| Case {
                windows,
                max_windows,
                messages,
                sends,
                hold,
                start: u32::MAX,
                offers: false,
                heartbeats: 0,
                spaces: if max_windows == [1, 1] { 2 } else { 1 },
            })
        })
    })
}

#[test]
#[cfg_attr(miri, ignore = "millions of states")]
fn no_order_of_events_leads_to_a_deadlock_or_to_a_lost_credit() {
    let cases: Vec<Case> = cases().chain(elastic_cases()).chain(heartbeat_cases()).chain(space_cases()).collect();
    let next = AtomicUsize::new(0);
    let explore =
        || std::iter::from_fn(|| Some(cases.get(next.fetch_add(1, Ordering::Relaxed))?.explore())).sum::<usize>();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let states: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(explore)).collect();
        threads.into_iter().map(|thread| thread.join().expect("a case fails")).sum::<usize>()
    });
    assert!(states > 1_000_000, "{states} states");
}
