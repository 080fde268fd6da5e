//! A program that is killed while it has connections in all states.

use std::net::SocketAddr;

use rdma_safe::cm::{EventChannel, Id};

use super::connections;
use super::pair::Pair;
use super::steps::{
    Listening, expect_disconnected, expect_established, expect_rejected, expect_withdrawn, listen, parameters, reply,
    resolved,
};

/// What a program writes before it is killed.
pub(super) const READY: &str = "ready to be killed";

type End = (EventChannel, Id);

/// How far a handshake gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Until {
    /// The request has arrived, and the program has not read it.
    Arrived,
    /// The program has read the request.
    Read,
    /// The peer has read the reply.
    Replied,
    Established,
}

const ALL: [Until; 4] = [Until::Arrived, Until::Read, Until::Replied, Until::Established];

/// Listens at a port that depends on the role.
fn listen_at(pair: &Pair, is_victim: bool) -> (Listening, SocketAddr) {
    let [mut own, mut peer] = [pair.own, pair.peer];
    own.set_port(21_000 + u16::from(is_victim));
    peer.set_port(21_000 + u16::from(!is_victim));
    (listen(pair, own), peer)
}

fn connect_until(until: Until, to: SocketAddr) -> End {
    let (channel, mut id) = resolved(to);
    id.connect(&parameters()).unwrap();
    if until == Until::Replied || until == Until::Established {
        reply(&channel, &id);
    }
    if until == Until::Established {
        id.establish().unwrap();
    }
    (channel, id)
}

/// Returns the id of the request if the program has read it.
fn serve_until(until: Until, listening: &Listening) -> Option<End> {
    if until == Until::Arrived {
        listening.wait_for_request();
        return None;
    }
    let (channel, mut id, _) = listening.request();
    if until == Until::Replied || until == Until::Established {
        id.accept(&parameters()).unwrap();
    }
    if until == Until::Established {
        expect_established(&channel, &id);
    }
    Some((channel, id))
}

/// Makes connections in all states in both directions, and waits to be killed.
pub(super) fn die(pair: &mut Pair) {
    let (listening, peer) = listen_at(pair, true);
    pair.meet();
    let mut ends = Vec::new();
    for until in ALL.into_iter().rev() {
        ends.push(connect_until(until, peer));
        pair.meet();
        ends.extend(serve_until(until, &listening));
        pair.meet();
    }
    println!("\n{READY}");
    pair.wait_for_end();
}

/// The other end of [`die`]. The kernel tells the peers of a program that is killed. A killed program with soft0 cannot.
pub(super) fn observe(pair: &mut Pair) {
    let (listening, peer) = listen_at(pair, false);
    pair.meet();
    let mut ends = Vec::new();
    for until in ALL.into_iter().rev() {
        let served = serve_until(until, &listening);
        pair.meet();
        ends.push((until, served, connect_until(until, peer)));
        pair.meet();
    }
    pair.wait_for_end();
    for (until, served, (channel, id)) in ends.iter().filter(|_| !pair.has_rxe()) {
        match until {
            Until::Established => expect_disconnected(channel, id),
            _ => expect_rejected(channel, id),
        }
        match (until, served) {
            (Until::Established, Some((channel, id))) => expect_disconnected(channel, id),
            (Until::Replied, Some((channel, id))) => expect_rejected(channel, id),
            (_, Some((_, id))) => expect_withdrawn(id),
            (_, None) => drop(listening.request()),
        }
        println!("the other end has ended {until:?}");
    }
    drop((ends, listening));
    connect_again(&mut Pair::new());
}

/// Makes a connection in each direction with the program that has taken the place of the other end.
pub(super) fn connect_again(pair: &mut Pair) {
    connections::connections_in_a_row(pair);
}
