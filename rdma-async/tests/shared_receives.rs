//! Connections that share their receives.

mod support;

use rdma_async::{Connection, Connector, Error, Listener, SharedReceives};

use rdma_safe::cm::{Cause, CmError};

use support::{pair, soft0, soon, until};

async fn send(connection: &Connection, bytes: &[u8]) {
    soon(connection.send(connection.buffer_of(bytes).await.unwrap())).await.unwrap();
}

/// The reason that the peer gave for a rejection.
fn reason(error: &Error) -> String {
    let Error::Rdma(error) = error else { panic!("{error}") };
    let rdma_safe::Error::Cm(CmError::Connect(error)) = &**error else { panic!("{error}") };
    let Cause::Rejected { private_data, .. } = &error.cause else { panic!("{error}") };
    String::from_utf8_lossy(private_data).into_owned()
}

async fn shared(messages: u32, each: u32) -> (SharedReceives, Listener) {
    let shared = SharedReceives::new(messages, 64);
    let listener = Listener::builder().receives(each).shared_receives(&shared).bind("127.0.0.1:0").await.unwrap();
    (shared, listener)
}

#[tokio::test]
async fn many_connections_need_receives_only_for_what_arrives() {
    let _watchdog = soft0();
    let (shared, listener) = shared(60, 1).await;
    let connector = Connector::new().unwrap();
    let mut ends = Vec::new();
    for _ in 0..50 {
        ends.push(soon(pair(&connector, &listener)).await);
    }
    assert_eq!(shared.reserved(), 50);
    for round in 0..3u8 {
        for (client, _) in &ends {
            send(client, &[round]).await;
        }
        for (_, server) in &ends {
            let message = soon(server.receive()).await.unwrap().unwrap();
            assert_eq!(&*message, [round]);
        }
    }
    // One of them receives ten at once, while the others are idle.
    let (client, server) = &ends[7];
    assert!(server.reserve_receives(9));
    assert!(!server.reserve_receives(2), "there is only one");
    for number in 0..10 {
        send(client, &[number]).await;
    }
    let mut messages = Vec::new();
    for number in 0..10 {
        messages.push(soon(server.receive()).await.unwrap().unwrap());
        assert_eq!(**messages.last().unwrap(), [number]);
    }
    assert_eq!(server.messages_kept(), 10);
    drop(messages);
    server.release_receives(9);
    assert_eq!(shared.reserved(), 50);
    drop(ends);
    until("all receives are free", || shared.reserved() == 0).await;
}

#[tokio::test]
async fn a_connection_without_receives_is_rejected_with_the_reason() {
    let _watchdog = soft0();
    let (shared, listener) = shared(5, 2).await;
    let connector = Connector::new().unwrap();
    let first = soon(pair(&connector, &listener)).await;
    let _second = soon(pair(&connector, &listener)).await;
    let refused = tokio::select! {
        refused = soon(connector.connect(listener.local_address())) => refused.unwrap_err(),
        _ = listener.accept() => panic!("it was accepted"),
    };
    assert!(reason(&refused).starts_with("2 receives are needed, but fewer of the 5"), "{refused}");
    assert_eq!(listener.failed(), 1);
    let here = Connector::new().unwrap().receives(3).shared_receives(&shared);
    let refused = soon(here.connect(listener.local_address())).await.unwrap_err();
    assert!(matches!(refused, Error::NoReceives { wanted: 3, messages: 5 }), "{refused}");
    drop(first);
    until("its receives are free", || shared.reserved() == 2).await;
    soon(pair(&connector, &listener)).await;
}

#[tokio::test]
async fn a_peer_that_sends_more_than_is_reserved_loses_its_connection_alone() {
    let _watchdog = soft0();
    let (shared, listener) = shared(20, 4).await;
    let connector = Connector::new().unwrap();
    let (flooding, flooded) = soon(pair(&connector, &listener)).await;
    let (client, server) = soon(pair(&connector, &listener)).await;
    // The queue pair of its peer answers no more once it has sent too much, although the connection is not closed yet.
    let flood = async {
        for number in 0..=u8::MAX {
            if flooding.send(flooding.buffer_of(&[number]).await.unwrap()).await.is_err() {
                return number;
            }
        }
        panic!("it is not stopped");
    };
    assert!(soon(flood).await >= 4);
    for number in 0..4 {
        assert_eq!(*soon(flooded.receive()).await.unwrap().unwrap(), [number]);
    }
    let error = soon(flooded.receive()).await.unwrap_err();
    assert!(matches!(error, Error::ReceivesExceeded), "{error}");
    assert!(flooded.driver().statistics().exceeded > 0);
    send(&client, b"unharmed").await;
    assert_eq!(&*soon(server.receive()).await.unwrap().unwrap(), b"unharmed");
    soon(flooded.close()).await;
    assert_eq!(shared.reserved(), 4);
    // All receives are there.
    assert!(server.reserve_receives(16));
    for _ in 0..20 {
        send(&client, b"again").await;
    }
    for _ in 0..20 {
        assert_eq!(&*soon(server.receive()).await.unwrap().unwrap(), b"again");
    }
}

#[tokio::test]
async fn a_message_that_outlives_its_connection_keeps_its_receive() {
    let _watchdog = soft0();
    let (shared, listener) = shared(4, 2).await;
    let connector = Connector::new().unwrap();
    let (client, server) = soon(pair(&connector, &listener)).await;
    for text in [b"kept", b"lost"] {
        send(&client, text).await;
    }
    let kept = soon(server.receive()).await.unwrap().unwrap();
    until("the other one arrives", || server.driver().statistics().received == 2).await;
    soon(server.close()).await;
    drop(server);
    assert_eq!(shared.reserved(), 1);
    assert_eq!(&*kept, b"kept");
    let (client, server) = soon(pair(&connector, &listener)).await;
    drop(kept);
    assert_eq!(shared.reserved(), 2);
    assert!(server.reserve_receives(2));
    for number in 0..4 {
        send(&client, &[number]).await;
    }
    for number in 0..4 {
        assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), [number]);
    }
}
