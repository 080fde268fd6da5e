//! Datagrams of rdma-async, which its own tests use on soft0 only.

use std::net::Ipv4Addr;

use rdma_async::{Datagrams, Driver, Error, Idle, Local, Peer, Sharing};
use rdma_safe::{LinkLayer, PostError};
use tokio::time::timeout;

use crate::cm::address;
use crate::support::{DEADLINE, lossless_device};

async fn send<S: Sharing>(datagrams: &Datagrams<S>, bytes: &[u8], to: &impl AsRef<Peer>) {
    let sent = datagrams.send_to(datagrams.buffer_of(bytes).await.unwrap(), to).await;
    assert_eq!(*sent.unwrap(), *bytes);
}

/// The next datagram, which must have these bytes.
async fn expect<S: Sharing>(datagrams: &Datagrams<S>, bytes: &[u8]) -> Peer {
    let (message, sender) = datagrams.receive_from().await.unwrap();
    assert_eq!(*message, *bytes);
    sender
}

/// Two clients ask a server of the same driver, which answers. Then each ends.
async fn ask_and_answer<S: Sharing>(server: Datagrams<S>, clients: [Datagrams<S>; 2]) {
    let mut peers = Vec::new();
    for client in &clients {
        peers.push(client.peer(server.local_address()).await.unwrap());
    }
    for number in 0..50 {
        for (client, peer) in clients.iter().zip(&peers) {
            let question = vec![number as u8; number * 17 % (client.max_datagram() + 1)];
            send(client, &question, peer).await;
            let sender = expect(&server, &question).await;
            send(&server, b"answer", &sender).await;
            assert_eq!(expect(client, b"answer").await, *peer);
        }
    }
    let longest = vec![1; server.max_datagram()];
    send(&clients[0], &longest, &peers[0]).await;
    expect(&server, &longest).await;
    let too_long = clients[0].buffer(longest.len() + 1).await.unwrap();
    let failed = clients[0].send_to(too_long, &peers[0]).await.unwrap_err();
    let Error::Rdma(error) = failed.error else { panic!("{failed}") };
    assert!(matches!(*error, rdma_safe::Error::Post(PostError::DatagramTooLong { .. })), "{error}");
    for datagrams in clients.iter().chain([&server]) {
        datagrams.close().await;
    }
    let error = server.receive_from().await.unwrap_err();
    assert!(matches!(error, Error::Closed), "{error}");
    let now = server.driver().statistics();
    assert_eq!((now.connections, now.operations, now.received), (0, 0, 201));
}

#[test]
fn datagrams_are_answered_on_tokio() {
    let Some(rdma) = lossless_device() else { return };
    let Some(address) = address(&rdma) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let asking = async {
        let bind = async || Datagrams::bind((address, 0)).await.unwrap();
        ask_and_answer(bind().await, [bind().await, bind().await]).await;
    };
    runtime.block_on(async { timeout(DEADLINE, asking).await.unwrap() });
}

#[test]
fn datagrams_are_answered_on_one_thread_that_sleeps() {
    let Some(rdma) = lossless_device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (driver, mut runner) = Driver::builder().idle(Idle::Sleep).build::<Local>().unwrap();
    runner.block_on(async {
        // One domain for all, as a service with a connection and datagrams has it.
        let pd = rdma.pd();
        let bind = async || Datagrams::builder().driver(&driver).pd(&pd).bind((address, 0)).await.unwrap();
        ask_and_answer(bind().await, [bind().await, bind().await]).await;
    });
}

#[test]
fn a_group_reaches_its_members_until_they_leave_it() {
    let Some(rdma) = lossless_device() else { return };
    let Some(address) = address(&rdma) else { return };
    if rdma.query_port(rdma.port).unwrap().link_layer() != LinkLayer::ETHERNET {
        return println!("skipped: the subnet manager creates the groups");
    }
    let (driver, mut runner) = Driver::builder().build::<Local>().unwrap();
    runner.block_on(async {
        let bind = async || Datagrams::builder().driver(&driver).bind((address, 0)).await.unwrap();
        let (one, other, speaker) = (bind().await, bind().await, bind().await);
        let group = Ipv4Addr::new(239, 1, 2, 20);
        let joined = one.join(group).await.unwrap();
        let all = speaker.join(group).await.unwrap();
        let _stays = other.join(group).await.unwrap();
        send(&speaker, b"all", &all).await;
        let sender = expect(&one, b"all").await;
        assert_eq!(expect(&other, b"all").await, sender);
        send(&one, b"answer", &sender).await;
        // Whether a sender gets its own datagrams depends on the device.
        let (mut message, mut from) = speaker.receive_from().await.unwrap();
        if *message == *b"all" {
            (message, from) = speaker.receive_from().await.unwrap();
        }
        assert_eq!(*message, *b"answer");
        assert!(joined.is_member().unwrap());

        drop(joined);
        send(&speaker, b"others", &all).await;
        expect(&other, b"others").await;
        let direct = from;
        send(&speaker, b"you", &direct).await;
        expect(&one, b"you").await;
    });
}
