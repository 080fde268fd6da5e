//! The steps of a handshake through `Id`, without queue pairs: parameters, options, delays, and ends in each state.

use std::cell::Cell;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rdma_safe::QueuePairState;
use rdma_safe::cm::{
    ConnectParameters, EventChannel, EventKind, Id, Parameters, PeerParameters, PortSpace, RejectReason,
};
use rdma_safe::qp::Ece;

use super::counters::Counter;
use super::pair::{Pair, next, pattern};
use crate::lab::{LIMIT, wait_until};

/// Time limit for resolving addresses and routes.
const RESOLVE: Duration = Duration::from_secs(20);

/// An id that listens.
pub(super) struct Listening {
    channel: EventChannel,
    id: Id,
    /// Queue pair number of the latest request.
    latest: Cell<Option<u32>>,
}

pub(super) fn listen(_: &Pair, at: SocketAddr) -> Listening {
    let channel = EventChannel::new().unwrap();
    let mut id = Id::new(&channel, PortSpace::TCP).unwrap();
    id.bind(at).unwrap();
    id.listen(8).unwrap();
    Listening { channel, id, latest: Cell::new(None) }
}

impl Listening {
    /// The id of the next request, with a separate channel.
    ///
    /// Linux reports a retransmission of a rejected request as another one. It is rejected again.
    pub(super) fn request(&self) -> (EventChannel, Id, PeerParameters) {
        loop {
            match next(&self.channel, self.id.id()) {
                EventKind::ConnectRequest(mut id, Parameters::Connected(peer)) => {
                    if self.latest.replace(Some(peer.qp_num)) == Some(peer.qp_num) {
                        continue;
                    }
                    let channel = EventChannel::new().unwrap();
                    id.migrate(&channel).unwrap();
                    return (channel, id, peer);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Waits until a request has arrived, and does not read it.
    pub(super) fn wait_for_request(&self) {
        let mut fd = libc::pollfd { fd: self.channel.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the descriptor is open, and the pointer is valid for one entry.
        let ready = unsafe { libc::poll(&mut fd, 1, LIMIT.as_millis() as i32) };
        assert_eq!((ready, fd.revents), (1, libc::POLLIN));
    }
}

/// An id that has resolved the address and the route.
pub(super) fn resolved(to: SocketAddr) -> (EventChannel, Id) {
    let channel = EventChannel::new().unwrap();
    let mut id = Id::new(&channel, PortSpace::TCP).unwrap();
    id.resolve_address(None, to, RESOLVE).unwrap();
    let event = next(&channel, id.id());
    assert!(matches!(event, EventKind::AddressResolved), "{event:?}");
    id.resolve_route(RESOLVE).unwrap();
    let event = next(&channel, id.id());
    assert!(matches!(event, EventKind::RouteResolved), "{event:?}");
    (channel, id)
}

/// Parameters with a number without a queue pair. The numbers differ, because a repeated number is a stale connection.
pub(super) fn parameters() -> ConnectParameters {
    static NEXT: AtomicU32 = AtomicU32::new(0x5000);
    ConnectParameters::new(NEXT.fetch_add(1, Ordering::Relaxed)).responder_resources(4).initiator_depth(4)
}

pub(super) fn reply(channel: &EventChannel, id: &Id) -> PeerParameters {
    match next(channel, id.id()) {
        EventKind::ConnectResponse(Parameters::Connected(peer)) => peer,
        other => panic!("{other:?}"),
    }
}

pub(super) fn expect_established(channel: &EventChannel, id: &Id) {
    let event = next(channel, id.id());
    assert!(matches!(event, EventKind::Established(_)), "{event:?}");
}

pub(super) fn expect_disconnected(channel: &EventChannel, id: &Id) {
    let event = next(channel, id.id());
    assert!(matches!(event, EventKind::Disconnected), "{event:?}");
}

pub(super) fn expect_rejected(channel: &EventChannel, id: &Id) {
    let event = next(channel, id.id());
    assert!(matches!(event, EventKind::Rejected(RejectReason::CONSUMER_DEFINED, _)), "{event:?}");
}

/// Each side sees the parameters of the other one.
pub(super) fn parameters_of_both_sides(pair: &mut Pair) {
    pair.in_both_roles(
        "parameters",
        listen,
        |_, listening| {
            let (channel, mut id, peer) = listening.request();
            assert_eq!((peer.responder_resources, peer.initiator_depth), (5, 3));
            assert_eq!((peer.retry_count, peer.rnr_retry_count), (6, 5));
            assert_eq!((peer.qp_num, peer.srq, peer.flow_control), (0x0065_4321, true, false));
            let own = ConnectParameters::new(0x0012_3456).responder_resources(2).initiator_depth(1);
            id.accept(&own.rnr_retry_count(4).flow_control(true)).unwrap();
            expect_established(&channel, &id);
            expect_disconnected(&channel, &id);
        },
        |_, to| {
            let (channel, mut id) = resolved(to);
            let own = ConnectParameters::new(0x0065_4321).responder_resources(3).initiator_depth(5).srq(true);
            id.connect(&own.retry_count(6).rnr_retry_count(5).flow_control(false)).unwrap();
            let peer = reply(&channel, &id);
            assert_eq!((peer.responder_resources, peer.initiator_depth), (1, 2));
            assert_eq!((peer.qp_num, peer.rnr_retry_count), (0x0012_3456, 4));
            assert!(!peer.srq && peer.flow_control);
            id.establish().unwrap();
        },
    );
}

/// Options of enhanced connection establishment are offered, granted, and refused.
pub(super) fn vendor_options(pair: &mut Pair) {
    let (offered, granted) = (Ece::new(0x0012_3456, 0xcafe_0005), Ece::new(0x0065_4321, 0x8000_0004));
    pair.in_both_roles(
        "vendor options",
        listen,
        |_, listening| {
            let (channel, mut id, _) = listening.request();
            assert_eq!(id.remote_ece().unwrap(), offered);
            id.set_local_ece(granted).unwrap();
            id.accept(&parameters()).unwrap();
            expect_established(&channel, &id);
            let (_, mut id, _) = listening.request();
            assert_eq!(id.remote_ece().unwrap(), offered);
            id.reject_ece(&pattern::<148>(1)).unwrap();
        },
        |_, to| {
            let [(channel, mut id), (other_channel, mut other)] = [resolved(to), resolved(to)];
            id.set_local_ece(offered).unwrap();
            id.connect(&parameters()).unwrap();
            reply(&channel, &id);
            // librdmacm replies with the vendor of the request.
            assert_eq!(id.remote_ece().unwrap(), Ece::new(offered.vendor_id, granted.options));
            id.establish().unwrap();
            other.set_local_ece(offered).unwrap();
            other.connect(&parameters()).unwrap();
            match next(&other_channel, other.id()) {
                EventKind::Rejected(RejectReason::UNSUPPORTED_OPTIONS, peer) => {
                    assert_eq!(peer.private_data(), pattern::<148>(1));
                }
                other => panic!("{other:?}"),
            }
        },
    );
}

/// Number of MRAs that the kernel has sent and received.
struct Delays(Option<[Counter; 2]>);

impl Delays {
    fn new(pair: &Pair) -> Delays {
        Delays(pair.has_rxe().then(|| [Counter::sent("mra"), Counter::received("mra")]))
    }

    /// Waits at both ends until this end has sent an MRA, or has received one.
    fn wait(&self, pair: &mut Pair, is_sender: bool) {
        if let Some(counters) = &self.0 {
            let counter = &counters[usize::from(!is_sender)];
            wait_until("an MRA", || (counter.grown() > 0).then_some(()));
        }
        pair.meet();
    }
}

/// A program accepts after its peer has repeated the request, and establishes after its peer has repeated the reply.
///
/// Both are answered with MRA.
pub(super) fn slow_programs(pair: &mut Pair) {
    pair.in_both_roles(
        "slow programs",
        |pair, at| (Delays::new(pair), listen(pair, at)),
        |pair, (delays, listening)| {
            let (channel, mut id, _) = listening.request();
            delays.wait(pair, true);
            id.accept(&parameters()).unwrap();
            delays.wait(pair, false);
            expect_established(&channel, &id);
            expect_disconnected(&channel, &id);
        },
        |pair, to| {
            let (channel, mut id) = resolved(to);
            let delays = Delays::new(pair);
            id.connect(&parameters()).unwrap();
            delays.wait(pair, false);
            reply(&channel, &id);
            delays.wait(pair, true);
            id.establish().unwrap();
        },
    );
}

/// Either side ends the handshake or the connection in each state by destroying its id, as the kernel does for a process that dies.
pub(super) fn ends_in_each_state(pair: &mut Pair) {
    pair.in_both_roles("the active side ends in each state", listen, serve_ending_peer, |pair, to| {
        // Before the reply.
        let (channel, mut id) = resolved(to);
        id.connect(&parameters()).unwrap();
        pair.meet();
        drop((id, channel));
        pair.meet();
        // Before it establishes the connection.
        let (channel, mut id) = resolved(to);
        id.connect(&parameters()).unwrap();
        reply(&channel, &id);
        drop((id, channel));
        // After that.
        let (channel, mut id) = resolved(to);
        id.connect(&parameters()).unwrap();
        reply(&channel, &id);
        id.establish().unwrap();
        pair.meet();
        drop((id, channel));
    });
    pair.in_both_roles(
        "the passive side ends in each state",
        listen,
        |pair, listening| {
            // Before it answers.
            drop(listening.request());
            // Before the peer establishes the connection.
            let (channel, mut id, _) = listening.request();
            id.accept(&parameters()).unwrap();
            pair.meet();
            drop((id, channel));
            // After that.
            let (channel, mut id, _) = listening.request();
            id.accept(&parameters()).unwrap();
            expect_established(&channel, &id);
            drop((id, channel));
            // A listener with a request that was not read.
            listening.wait_for_request();
        },
        |pair, to| {
            let (channel, mut id) = resolved(to);
            id.connect(&parameters()).unwrap();
            expect_rejected(&channel, &id);

            let (channel, mut id) = resolved(to);
            id.connect(&parameters()).unwrap();
            reply(&channel, &id);
            pair.meet();
            expect_rejected(&channel, &id);

            let (channel, mut id) = resolved(to);
            id.connect(&parameters()).unwrap();
            reply(&channel, &id);
            id.establish().unwrap();
            expect_disconnected(&channel, &id);

            let (channel, mut id) = resolved(to);
            id.connect(&parameters()).unwrap();
            expect_rejected(&channel, &id);
        },
    );
}

/// Waits until the peer has withdrawn a request. The request gets no event, but it has no attributes any more.
pub(super) fn expect_withdrawn(id: &Id) {
    wait_until("the end of a request", || id.attributes(QueuePairState::INIT).is_err().then_some(()));
}

fn serve_ending_peer(pair: &mut Pair, listening: Listening) {
    let (_channel, id, _) = listening.request();
    assert!(id.attributes(QueuePairState::INIT).is_ok());
    pair.meet();
    pair.meet();
    expect_withdrawn(&id);
    let (channel, mut id, _) = listening.request();
    id.accept(&parameters()).unwrap();
    expect_rejected(&channel, &id);
    let (channel, mut id, _) = listening.request();
    id.accept(&parameters()).unwrap();
    expect_established(&channel, &id);
    pair.meet();
    expect_disconnected(&channel, &id);
}
