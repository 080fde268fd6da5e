//! The game of the example `xsrq_pingpong`, both ends of which are in this process.

#[path = "../../../examples/xsrq_pingpong/address.rs"]
mod address;
#[path = "../../../examples/xsrq_pingpong/game.rs"]
mod game;

use std::time::Duration;

use rdma_safe::Mtu;

use crate::fake::{Config, Fake};
use crate::support::DEADLINE;
use address::Address;
use game::{End, Rules};

const RULES: Rules = Rules {
    clients: 1,
    tests: 5,
    size: 100,
    mtu: Mtu::MTU_1024,
    sl: 0,
    port: 1,
    gid_index: None,
    events: false,
    timeout: DEADLINE,
};

/// A server with so many clients, and the clients, which share a domain.
fn game(fake: &Fake, rules: Rules, clients: u32) -> (End, Vec<End>) {
    let (ours, theirs) = (fake.open(), fake.open());
    let shared = theirs.open_xrcd().unwrap();
    let mut server = End::new(&ours, &ours.open_xrcd().unwrap(), Rules { clients, ..rules }).unwrap();
    let mut others: Vec<End> = (0..clients).map(|_| End::new(&theirs, &shared, rules).unwrap()).collect();
    for (index, client) in others.iter_mut().enumerate() {
        let over_the_wire = |address: Address| Address::decode(&address.encode()).unwrap();
        client.connect(0, over_the_wire(server.local(index).unwrap()), true).unwrap();
        server.connect(index, over_the_wire(client.local(0).unwrap()), true).unwrap();
    }
    (server, others)
}

#[test]
#[cfg_attr(miri, ignore = "sleeps in poll(2)")]
fn every_message_comes_and_goes() {
    for events in [false, true] {
        let fake = Fake::new(Config::default());
        let (mut server, mut clients) = game(&fake, Rules { events, ..RULES }, 1);
        server.begin().unwrap();
        std::thread::scope(|scope| {
            let played = scope.spawn(|| server.play().map_err(|error| error.to_string()));
            clients[0].play().unwrap();
            played.join().unwrap().unwrap();
        });
    }
}

#[test]
fn clients_of_one_host_are_reached_by_each_others_connections() {
    let fake = Fake::new(Config::default());
    let (mut server, clients) = game(&fake, RULES, 3);
    fake.take_posted();
    server.begin().unwrap();
    // Nobody goes before all are done: what is sent to one comes by the connection of another.
    let play = |mut end: End| {
        std::thread::spawn(move || {
            let played = end.play().map_err(|error| error.to_string());
            (played, end)
        })
    };
    let playing: Vec<_> = clients.into_iter().chain([server]).map(play).collect();
    let ends: Vec<_> = playing.into_iter().map(|played| played.join().unwrap()).collect();
    assert!(ends.iter().all(|(played, _)| played.is_ok()), "{:?}", ends.iter().map(|end| &end.0).collect::<Vec<_>>());
    // Five each way for each client.
    assert_eq!(fake.take_posted().len(), 30);
}

#[test]
fn a_peer_that_stops_is_an_error_in_time_and_one_without_a_gid_at_once() {
    let fake = Fake::new(Config::default());
    let (mut server, mut clients) = game(&fake, Rules { timeout: Duration::from_millis(20), ..RULES }, 1);
    server.begin().unwrap();
    let error = server.play().unwrap_err().to_string();
    assert!(error.contains("no message within"), "{error}");
    let gid = rdma_safe::Gid::ZERO;
    let without = Address { gid, ..server.local(0).unwrap() };
    let error = clients[0].connect(0, without, true).unwrap_err().to_string();
    assert!(error.contains("-g"), "{error}");
    drop((server, clients));
}
