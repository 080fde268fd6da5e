//! Datagrams and multicast groups over soft0 in this process.

mod support;

use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::Duration;

use rdma_async::{Datagrams, Driver, Error, Listener, Local, Peer, Sharing, Threads};
use rdma_safe::cm::{Cause, CmError};
use rdma_safe::{PostError, soft};
use support::child::in_own_process;
use support::{SOON, begin, everything_returns, soft0, soon, until};

async fn bind() -> Datagrams {
    Datagrams::bind("127.0.0.1:0").await.unwrap()
}

async fn send<S: Sharing>(datagrams: &Datagrams<S>, bytes: &[u8], to: &impl AsRef<Peer>) {
    let buffer = datagrams.buffer_of(bytes).await.unwrap();
    assert_eq!(*soon(datagrams.send_to(buffer, to)).await.unwrap(), *bytes);
}

/// Answers each datagram with its bytes, until the socket is closed.
async fn echo<S: Sharing>(datagrams: Datagrams<S>) {
    loop {
        match datagrams.receive_from().await {
            Ok((message, sender)) => send(&datagrams, &message, &sender).await,
            Err(error) => return assert!(matches!(error, Error::Closed), "{error}"),
        }
    }
}

async fn ask<S: Sharing>(datagrams: &Datagrams<S>, number: u32, peer: &Peer) {
    send(datagrams, &number.to_be_bytes(), peer).await;
    let (answer, from) = soon(datagrams.receive_from()).await.unwrap();
    assert_eq!((&*answer, &from), (&number.to_be_bytes()[..], peer));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_peers_are_answered() {
    let _watchdog = soft0();
    let server = bind().await;
    let (driver, pool) = (server.driver().clone(), server.pool().clone());
    let serving = tokio::spawn(echo(server.clone()));
    let mut clients = Vec::new();
    for client in 0..20 {
        let address = server.local_address();
        clients.push(tokio::spawn(async move {
            let datagrams = bind().await;
            let peer = soon(datagrams.peer(address)).await.unwrap();
            for number in 0..50 {
                ask(&datagrams, client * 1000 + number, &peer).await;
            }
            soon(datagrams.close()).await;
        }));
    }
    for client in clients {
        client.await.unwrap();
    }
    soon(server.close()).await;
    serving.await.unwrap();
    drop(server);
    everything_returns(&driver, &pool).await;
}

#[test]
fn one_thread_without_locks() {
    let _watchdog = soft0();
    let (driver, mut runner) = Driver::builder().build::<Local>().unwrap();
    runner.block_on(async {
        let server = Datagrams::builder().driver(&driver).bind("127.0.0.1:0").await.unwrap();
        let client = Datagrams::builder().driver(&driver).bind("0.0.0.0:0").await.unwrap();
        let peer = client.peer(server.local_address()).await.unwrap();
        let serving = async {
            let (message, sender) = server.receive_from().await.unwrap();
            server.send_to(server.buffer_of(&message).await.unwrap(), &sender).posted().await.unwrap();
        };
        tokio::join!(serving, async {
            client.send_to(client.buffer_of(b"one").await.unwrap(), &peer).await.unwrap();
            assert_eq!(*client.receive_from().await.unwrap().0, *b"one");
        });
    });
}

#[test]
fn many_lookups_at_the_same_time_are_answered() {
    let _watchdog = soft0();
    let (driver, mut runner) = Driver::builder().build::<Local>().unwrap();
    runner.block_on(async {
        let builder = || Datagrams::builder().driver(&driver).timeout(SOON);
        let server = builder().backlog(300).bind("127.0.0.1:0").await.unwrap();
        let client = builder().bind("127.0.0.1:0").await.unwrap();
        // The driver does not run while these tasks are polled, so most lookups arrive together.
        let mut lookups: Vec<_> = (0..300).map(|_| Box::pin(client.peer(server.local_address()))).collect();
        poll_fn(|context| {
            lookups.retain_mut(|lookup| match lookup.as_mut().poll(context) {
                Poll::Pending => true,
                Poll::Ready(found) => found.map(|_| false).unwrap(),
            });
            if lookups.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    });
}

#[tokio::test]
async fn a_datagram_has_at_most_the_size_of_a_packet() {
    let _watchdog = soft0();
    let (server, client) = (bind().await, bind().await);
    let peer = soon(client.peer(server.local_address())).await.unwrap();
    let longest = vec![7; client.max_datagram()];
    let too_long = client.buffer_of(&[&longest[..], b"!"].concat()).await.unwrap();
    let failed = client.send_to(too_long, &peer).await.unwrap_err();
    let Error::Rdma(error) = &failed.error else { panic!("{failed}") };
    let is_typed = matches!(**error, rdma_safe::Error::Post(PostError::DatagramTooLong { len: 4097, max: 4096 }));
    assert!(is_typed && failed.buffer.is_some_and(|buffer| buffer.len() == 4097), "{error:?}");
    send(&client, &longest, &peer).await;
    assert_eq!(*soon(server.receive_from()).await.unwrap().0, *longest);
    // An empty one is a datagram, too.
    let empty = client.send_to_with_immediate(client.buffer(0).await.unwrap(), 12, &peer);
    soon(empty).await.unwrap();
    let (message, _) = soon(server.receive_from()).await.unwrap();
    assert_eq!((message.len(), message.immediate()), (0, Some(12)));
}

/// The next datagram, which must have these bytes.
async fn expect(datagrams: &Datagrams, bytes: &[u8]) -> Peer {
    let (message, sender) = soon(datagrams.receive_from()).await.unwrap();
    assert_eq!(*message, *bytes);
    sender
}

#[tokio::test]
async fn a_group_reaches_its_members_until_they_leave() {
    let _watchdog = soft0();
    let (members, sender) = ([bind().await, bind().await], bind().await);
    let [address, other] = [[239, 12, 0, 1], [239, 12, 0, 2]];
    let [first, second] =
        [soon(members[0].join(address)).await.unwrap(), soon(members[1].join(address)).await.unwrap()];
    let _other = soon(members[0].join(other)).await.unwrap();
    assert_eq!(first.address().ip().map(|address| address.ip()), Some(address.into()));
    let [all, others] = [soon(sender.join(address)).await.unwrap(), soon(sender.join(other)).await.unwrap()];
    send(&sender, b"all", &all).await;
    let from = expect(&members[0], b"all").await;
    assert_eq!(expect(&members[1], b"all").await, from);
    assert!(first.is_member().unwrap());
    // Members answer the sender, and not the group.
    send(&members[1], b"answer", &from).await;
    let own = expect(&sender, b"all").await;
    assert_eq!(own, from);
    expect(&sender, b"answer").await;

    // A group that was joined twice is left with the last membership.
    let again = soon(members[0].join(address)).await.unwrap();
    drop(first);
    send(&sender, b"again", &all).await;
    expect(&members[0], b"again").await;
    expect(&members[1], b"again").await;
    drop(again);
    send(&sender, b"those who stay", &all).await;
    send(&sender, b"other", &others).await;
    expect(&members[1], b"those who stay").await;
    expect(&members[0], b"other").await;
    drop(second);
    assert!(soon(sender.join([10, 1, 2, 3])).await.is_err(), "this is no group");
}

#[tokio::test]
async fn sockets_and_connections_on_a_device_share_memory_and_peers() {
    let _watchdog = soft0();
    let (server, first, second) = (bind().await, bind().await, Datagrams::bind("0.0.0.0:0").await.unwrap());
    let peer = soon(first.peer(server.local_address())).await.unwrap();
    let buffer = first.buffer_of(b"found by another").await.unwrap();
    soon(second.send_to(buffer, &peer)).await.unwrap();
    let sender = expect(&server, b"found by another").await;
    let group = soon(first.join([239, 12, 0, 3])).await.unwrap();
    let _member = soon(server.join([239, 12, 0, 3])).await.unwrap();
    send(&second, b"group of another", &group).await;
    assert_eq!(expect(&server, b"group of another").await, sender);
    expect(&first, b"group of another").await;
    send(&first, b"sender of another", &sender).await;
    expect(&second, b"sender of another").await;

    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let (client, accepted) = tokio::join!(rdma_async::connect(listener.local_address()), listener.accept());
    let domains = [client.unwrap().pd().clone(), accepted.unwrap().pd().clone(), second.pd().clone()];
    assert!(domains.iter().all(|pd| pd.is_same(first.pd())));
}

#[tokio::test]
async fn datagrams_that_find_no_receive_are_dropped() {
    let _watchdog = soft0();
    let (server, client) = (Datagrams::builder().receives(2).bind("127.0.0.1:0").await.unwrap(), bind().await);
    let peer = soon(client.peer(server.local_address())).await.unwrap();
    for number in 0..5 {
        send(&client, &[number], &peer).await;
    }
    let kept = [soon(server.receive_from()).await.unwrap().0, soon(server.receive_from()).await.unwrap().0];
    assert_eq!(kept.each_ref().map(|message| message[0]), [0, 1]);
    assert_eq!(server.messages_kept(), 2);
    let mut next = Box::pin(server.receive_from());
    begin(next.as_mut()).await;
    drop(kept);
    send(&client, &[5], &peer).await;
    let (message, _) = soon(next).await.unwrap();
    assert_eq!(*message, [5], "those in between are lost");
}

#[tokio::test]
async fn dropped_futures_lose_neither_datagrams_nor_memory() {
    let _watchdog = soft0();
    let (server, client) = (bind().await, Datagrams::builder().sends(1).bind("127.0.0.1:0").await.unwrap());
    let (drivers, pools) =
        ([server.driver().clone(), client.driver().clone()], [server.pool().clone(), client.pool().clone()]);
    let mut lookup = Box::pin(client.peer(server.local_address()));
    begin(lookup.as_mut()).await;
    drop(lookup);
    let peer = soon(client.peer(server.local_address())).await.unwrap();
    {
        let (mut first, mut second) = (Box::pin(server.receive_from()), Box::pin(server.receive_from()));
        begin(first.as_mut()).await;
        begin(second.as_mut()).await;
        // The second send waits for room and is never posted.
        let [one, other] =
            [client.buffer_of(b"in flight").await.unwrap(), client.buffer_of(b"not posted").await.unwrap()];
        let (mut posted, mut waiting) = (Box::pin(client.send_to(one, &peer)), Box::pin(client.send_to(other, &peer)));
        begin(posted.as_mut()).await;
        begin(waiting.as_mut()).await;
        drop((waiting, posted));
        let received = server.driver().clone();
        until("the datagram arrives", move || received.statistics().received == 1).await;
        // It was notified, and passes the datagram on.
        drop(first);
        assert_eq!(*soon(second).await.unwrap().0, *b"in flight");
    }
    soon(server.close()).await;
    soon(client.close()).await;
    drop((server, client, peer));
    for (driver, pool) in drivers.iter().zip(&pools) {
        everything_returns(driver, pool).await;
    }
}

#[tokio::test]
async fn lookups_that_cannot_succeed_fail() {
    let _watchdog = soft0();
    let client = Datagrams::builder().timeout(Duration::from_millis(200)).bind("127.0.0.1:0").await.unwrap();
    let cause = |error: Error| match error {
        Error::Rdma(error) => match &*error {
            rdma_safe::Error::Cm(CmError::Connect(failed)) => failed.cause,
            _ => panic!("{error}"),
        },
        error => panic!("{error}"),
    };
    // This listener never answers.
    let silent = rdma_safe::cm::DatagramListener::bind("127.0.0.1:0").unwrap();
    let error = soon(client.peer(silent.local_address())).await.unwrap_err();
    assert!(matches!(cause(error), Cause::Timeout { .. }));
    let nobody = silent.local_address();
    drop(silent);
    let error = soon(client.peer(nobody)).await.unwrap_err();
    assert!(matches!(cause(error), Cause::Refused { .. }));
    let error = soon(client.peer("nowhere.invalid:7471")).await.unwrap_err();
    assert!(matches!(error, Error::Name(_)), "{error}");
    let taken = Datagrams::bind(client.local_address()).await.unwrap_err();
    assert!(matches!(taken, Error::Rdma(_)), "{taken}");
}

/// Lookups of this socket end by no deadline.
async fn bind_patient(driver: &Driver) -> Datagrams {
    let patient = Datagrams::builder().driver(driver).timeout(Duration::from_secs(3600));
    patient.bind("127.0.0.1:0").await.unwrap()
}

/// Starts one future of each kind, and then calls `then`, after which all end with such an error.
async fn all_end(socket: &Datagrams, then: impl AsyncFnOnce(), is_expected: impl Fn(&Error) -> bool) {
    let other = bind().await;
    let peer = soon(socket.peer(other.local_address())).await.unwrap();
    let group = soon(socket.join([239, 12, 0, 3])).await.unwrap();
    let silent = rdma_safe::cm::DatagramListener::bind("127.0.0.1:0").unwrap();
    let mut receive = Box::pin(socket.receive_from());
    let mut lookup = Box::pin(socket.peer(silent.local_address()));
    begin(receive.as_mut()).await;
    begin(lookup.as_mut()).await;
    let buffer = socket.buffer_of(b"late").await.unwrap();
    then().await;
    let error = soon(receive).await.unwrap_err();
    assert!(is_expected(&error), "{error}");
    let failed = soon(socket.send_to(buffer, &peer)).await.unwrap_err();
    assert!(is_expected(&failed.error) && failed.buffer.is_some(), "{failed}");
    let error = soon(lookup).await.unwrap_err();
    // The connection manager may report the removal of the device first.
    assert!(is_expected(&error) || matches!(error, Error::Rdma(_)), "{error}");
    let error = soon(socket.peer(silent.local_address())).await.unwrap_err();
    assert!(is_expected(&error), "{error}");
    let error = soon(socket.join([239, 12, 0, 4])).await.unwrap_err();
    assert!(is_expected(&error), "{error}");
    drop(group);
}

#[tokio::test]
async fn closing_ends_all_futures() {
    let _watchdog = soft0();
    let socket = bind_patient(&Driver::current().unwrap()).await;
    let closed = socket.clone();
    all_end(&socket, async move || closed.close().await, |error| matches!(error, Error::Closed)).await;
    drop(Datagrams::bind(socket.local_address()).await.expect("the port is free"));
}

#[tokio::test]
async fn a_driver_that_stops_ends_all_futures() {
    let _watchdog = soft0();
    let (driver, runner) = Driver::builder().build::<Threads>().unwrap();
    let (stop, stopped) = std::sync::mpsc::channel();
    let running = std::thread::spawn(move || {
        let mut runner = runner;
        while stopped.try_recv().is_err() && runner.turn() != rdma_async::Turn::Stopped {
            std::thread::yield_now();
        }
    });
    let socket = bind_patient(&driver).await;
    let then = async move || {
        stop.send(()).unwrap();
        running.join().unwrap();
    };
    all_end(&socket, then, |error| matches!(error, Error::DriverStopped)).await;
    let error = Datagrams::builder().driver(&driver).bind("127.0.0.1:0").await.unwrap_err();
    assert!(matches!(error, Error::DriverStopped), "{error}");
}

#[test]
fn a_removed_device_ends_all_futures() {
    in_own_process("a_removed_device_ends_all_futures", || {
        let _watchdog = soft0();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let socket = bind_patient(&Driver::current().unwrap()).await;
            let (driver, pool) = (socket.driver().clone(), socket.pool().clone());
            all_end(&socket, async || soft::remove(), |error| matches!(error, Error::Failed(_))).await;
            soon(socket.close()).await;
            drop(socket);
            everything_returns(&driver, &pool).await;
        });
    });
}
