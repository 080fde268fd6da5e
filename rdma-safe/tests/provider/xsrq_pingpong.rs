//! The example `xsrq_pingpong`, with both ends in this process.

#[path = "../../../examples/xsrq_pingpong/address.rs"]
mod address;
#[path = "../../../examples/xsrq_pingpong/end.rs"]
mod end;

use std::time::Duration;

use rdma_safe::Mtu;

use crate::fake::{Config, Fake};
use crate::support::DEADLINE;
use address::Address;
use end::{End, Settings};

const SETTINGS: Settings = Settings {
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

/// A server with this number of clients, and the clients, which share an XRC domain.
fn connected_ends(fake: &Fake, settings: Settings, clients: u32) -> (End, Vec<End>) {
    let (ours, theirs) = (fake.open(), fake.open());
    let shared = theirs.open_xrcd().unwrap();
    let mut server = End::new(&ours, &ours.open_xrcd().unwrap(), Settings { clients, ..settings }).unwrap();
    let mut others: Vec<End> = (0..clients).map(|_| End::new(&theirs, &shared, settings).unwrap()).collect();
    for (index, client) in others.iter_mut().enumerate() {
        let over_the_wire = |address: Address| Address::decode(&address.encode()).unwrap();
        client.connect(0, over_the_wire(server.local(index).unwrap()), true).unwrap();
        server.connect(index, over_the_wire(client.local(0).unwrap()), true).unwrap();
    }
    (server, others)
}

#[test]
#[cfg_attr(miri, ignore = "sleeps in poll(2)")]
fn every_message_is_answered() {
    for events in [false, true] {
        let fake = Fake::new(Config::default());
        let (mut server, mut clients) = connected_ends(&fake, Settings { events, ..SETTINGS }, 1);
        server.start().unwrap();
        std::thread::scope(|scope| {
            let server_thread = scope.spawn(|| server.run().map_err(|error| error.to_string()));
            clients[0].run().unwrap();
            server_thread.join().unwrap().unwrap();
        });
    }
}

#[test]
fn clients_of_one_host_are_reached_by_each_others_connections() {
    let fake = Fake::new(Config::default());
    let (mut server, clients) = connected_ends(&fake, SETTINGS, 3);
    fake.take_posted();
    server.start().unwrap();
    // No end is dropped before all are done, since messages to one client use the connection of another.
    let spawn = |mut end: End| {
        std::thread::spawn(move || {
            let result = end.run().map_err(|error| error.to_string());
            (result, end)
        })
    };
    let threads: Vec<_> = clients.into_iter().chain([server]).map(spawn).collect();
    let ends: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert!(ends.iter().all(|(result, _)| result.is_ok()), "{:?}", ends.iter().map(|end| &end.0).collect::<Vec<_>>());
    // Five messages in each direction for each client.
    assert_eq!(fake.take_posted().len(), 30);
}

#[test]
fn a_stopped_peer_is_a_timeout_and_a_missing_gid_an_error() {
    let fake = Fake::new(Config::default());
    let (mut server, mut clients) =
        connected_ends(&fake, Settings { timeout: Duration::from_millis(20), ..SETTINGS }, 1);
    server.start().unwrap();
    let error = server.run().unwrap_err().to_string();
    assert!(error.contains("no message within"), "{error}");
    let gid = rdma_safe::Gid::ZERO;
    let without = Address { gid, ..server.local(0).unwrap() };
    let error = clients[0].connect(0, without, true).unwrap_err().to_string();
    assert!(error.contains("-g"), "{error}");
    drop((server, clients));
}
