//! Peers that lie or die.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

use std::time::Duration;

use rdma_async::Connection;
use rdma_msg::{Channel, Error, Listener, Violation};
use support::peer::{self, Peer};
use support::{soft0, soon};

/// The private data of a peer with these receives and packets of 4 KiB.
fn hello(window: u32) -> Vec<u8> {
    let mut hello = b"RMSG\x01\x01\0\0".to_vec();
    hello.extend([window, 4096].map(u32::to_be_bytes).concat());
    hello.extend(1_000_000_u64.to_be_bytes());
    // The window never changes, and any time will do to hear from the peer.
    hello.extend([window, 0].map(u32::to_be_bytes).concat());
    hello
}

/// Receives of a liar.
const WINDOW: u8 = 8;

/// A packet with these credits.
fn packet(class: u8, [data, control]: [u32; 2], frames: &[u8]) -> Vec<u8> {
    let mut packet = vec![class, 0, 0, WINDOW];
    packet.extend([data, control, 0].map(u32::to_be_bytes).concat());
    packet.extend(frames);
    packet
}

fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes().to_vec();
    frame.extend([kind, 0, 0, 0]);
    frame.extend(payload);
    frame.resize(frame.len().next_multiple_of(8), 0);
    frame
}

/// An offer of memory at address 4096.
fn offer(len: u64, rkey: u32) -> Vec<u8> {
    frame(3, &[&[len, 4096].map(u64::to_be_bytes).concat()[..], &rkey.to_be_bytes()].concat())
}

/// The announcement of a message that was written.
fn written(number: u32, len: u64) -> Vec<u8> {
    frame(7, &[&number.to_be_bytes()[..], &len.to_be_bytes()].concat())
}

/// The credits of a peer with 8 receives that has received nothing.
const HONEST: [u32; 2] = [8, 3];

/// A peer of which the test decides what it sends, and a channel to it.
async fn liar(listener: &Listener) -> (Connection, Channel) {
    let connector = rdma_async::Connector::new().unwrap().private_data(hello(WINDOW.into())).message_size(1 << 16);
    let (liar, channel) =
        soon(async { tokio::join!(connector.connect(listener.local_address()), listener.accept()) }).await;
    (liar.unwrap(), channel.unwrap())
}

async fn send(liar: &Connection, packet: Vec<u8>) {
    let buffer = liar.buffer_of(&packet).await.unwrap();
    // Its connection may end meanwhile.
    let _ = liar.send(buffer).await;
}

#[tokio::test]
async fn a_lying_peer_ends_its_own_channel_only() {
    let _soft = soft0();
    let listener = Listener::builder().window(4).packet_size(4096).max_message(5000).bind("127.0.0.1:0").await.unwrap();
    let (client, server) =
        soon(async { tokio::join!(rdma_msg::connect(listener.local_address()), listener.accept()) }).await;
    let (client, server) = (client.unwrap(), server.unwrap());
    let long = |len: u64| frame(1, &len.to_be_bytes());
    for (expected, packets) in [
        (Violation::Truncated, vec![vec![0; 15]]),
        (Violation::Truncated, vec![vec![]]),
        (Violation::UnknownKind, vec![packet(7, HONEST, &[])]),
        (Violation::Truncated, vec![packet(6, HONEST, &[0; 19])]),
        (Violation::Truncated, vec![packet(0, HONEST, &frame(7, &[0; 11]))]),
        (Violation::NotOffered, vec![packet(0, HONEST, &written(0, 10))]),
        (Violation::Truncated, vec![packet(5, HONEST, &[])]),
        (Violation::UnknownKind, vec![packet(5, HONEST, &frame(0, b"data in an abort"))]),
        (Violation::Truncated, vec![packet(3, HONEST, &[0; 3])]),
        (Violation::ImpossibleWaiver, vec![packet(3, HONEST, &1_u32.to_be_bytes())]),
        (Violation::ImpossibleWaiver, vec![packet(3, HONEST, &u32::MAX.to_be_bytes())]),
        (Violation::ImpossibleAnswer, vec![packet(2, HONEST, &[])]),
        (Violation::ImpossibleCredit, vec![packet(0, [9, 3], &[])]),
        (Violation::ImpossibleCredit, vec![packet(1, [u32::MAX, 3], &[])]),
        (Violation::ImpossibleCredit, vec![packet(1, [8, 4], &[])]),
        (Violation::ImpossibleCredit, vec![packet(1, [7, 3], &[])]),
        (Violation::UnknownKind, vec![packet(1, HONEST, &frame(0, b"data in a control packet"))]),
        (Violation::ControlBeyondCredit, vec![packet(1, HONEST, &[]); 4]),
        (Violation::DataBeyondCredit, vec![packet(0, HONEST, &frame(0, b"more than the window")); 5]),
        (Violation::Truncated, vec![packet(0, HONEST, &[0, 0, 1, 0, 0, 0, 0, 0])]),
        (Violation::UnknownKind, vec![packet(0, HONEST, &frame(77, b"?"))]),
        (Violation::UnknownKind, vec![packet(0, HONEST, &frame(2, b"a part of nothing"))]),
        (Violation::TooLong, vec![packet(0, HONEST, &long(5001))]),
        (Violation::TooLong, vec![packet(0, HONEST, &[long(10), frame(2, &[0; 11])].concat())]),
        (Violation::TooLong, vec![packet(0, HONEST, &offer(5001, 0))]),
        (Violation::TooLong, vec![packet(0, HONEST, &offer(0, 0))]),
        (Violation::AfterEnd, vec![packet(0, HONEST, &[frame(5, b""), frame(0, b"late")].concat())]),
    ] {
        let (liar, channel) = liar(&listener).await;
        let all = async {
            for packet in packets {
                send(&liar, packet).await;
            }
        };
        // A liar that sends more than the window waits for receives until the channel ends.
        let found = async {
            // Nobody looks until the window is full.
            if expected == Violation::DataBeyondCredit {
                support::until("the window is full", || channel.statistics().packets_received == 4).await;
            }
            loop {
                match channel.receive().await {
                    Ok(Some(_)) => {}
                    Ok(None) => assert_eq!(expected, Violation::AfterEnd),
                    Err(error) => break error,
                }
            }
        };
        let ((), error) = soon(async { tokio::join!(all, found) }).await;
        assert!(matches!(error, Error::Protocol(found) if found == expected), "{expected:?}: {error}");
        assert!(channel.send("anything").await.is_err());
        client.send("others go on").await.unwrap();
        assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), *b"others go on");
    }
}

#[tokio::test]
async fn messages_before_a_lie_are_received_however_many_at_once() {
    let _soft = soft0();
    let listener = Listener::builder().packet_size(4096).max_message(100).bind("127.0.0.1:0").await.unwrap();
    let honest: Vec<_> = (0..5).map(|number| vec![number; 20]).collect();
    let late = || frame(0, b"late").repeat(2);
    for (expected, lie) in [
        (Violation::Truncated, frame(0, &[0; 50])[..48].to_vec()),
        (Violation::Truncated, [u32::MAX.to_be_bytes(), [0; 4]].concat()),
        (Violation::TooLong, [frame(0, &[0; 101]), late()].concat()),
        (Violation::UnknownKind, [frame(77, b"?"), late()].concat()),
    ] {
        let (liar, channel) = liar(&listener).await;
        let frames: Vec<_> = honest.iter().map(|message| frame(0, message)).chain([lie]).collect();
        send(&liar, packet(0, HONEST, &frames.concat())).await;
        let (mut received, mut most) = (Vec::new(), 0);
        let error = loop {
            match soon(channel.receive_many()).await {
                Ok(messages) => {
                    let messages = messages.expect("the peer has not finished");
                    most = most.max(messages.len());
                    received.extend(messages.iter().map(<[u8]>::to_vec));
                }
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::Protocol(found) if found == expected), "{expected:?}: {error}");
        assert!(received == honest && most > 1, "{expected:?}: {most} at once, {received:?}");
    }
}

#[tokio::test]
async fn a_peer_cannot_offer_too_much_memory_or_announce_what_it_was_not_offered() {
    let _soft = soft0();
    let listener = Listener::builder().window(32).bind("127.0.0.1:0").await.unwrap();
    let (offering, channel) = liar(&listener).await;
    for _ in 0..17 {
        send(&offering, packet(6, HONEST, &[1; 20])).await;
    }
    let error = soon(channel.receive()).await.unwrap_err();
    assert!(matches!(error, Error::Protocol(Violation::OffersBeyondLimit)), "{error}");
    for (len, is_honest, expected) in [(10, true, Violation::NotOffered), (11, false, Violation::TooLong)] {
        let (liar, channel) = liar(&listener).await;
        soon(channel.offer(vec![7; 10])).await.unwrap();
        for _ in 0..2 {
            send(&liar, packet(0, HONEST, &written(0, len))).await;
        }
        if is_honest {
            assert_eq!(*soon(channel.receive()).await.unwrap().unwrap(), [7; 10]);
        }
        let error = soon(channel.receive()).await.unwrap_err();
        assert!(matches!(error, Error::Protocol(found) if found == expected), "{expected:?}: {error}");
    }
}

#[tokio::test]
async fn an_offer_of_memory_that_was_not_exposed_ends_the_channel_only() {
    let _soft = soft0();
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let after = frame(0, b"after a message that is lost");
    for frames in [&[offer(100, 0x1234), after.clone()][..], &[frame(0, b"first"), offer(100, 0x1234), after]] {
        let (liar, channel) = liar(&listener).await;
        send(&liar, packet(0, HONEST, &frames.concat())).await;
        if frames.len() == 3 {
            // The next message is read at the same time.
            assert_eq!(*soon(channel.receive()).await.unwrap().unwrap(), *b"first");
        }
        let error = soon(channel.receive()).await.unwrap_err();
        assert!(soon(channel.receive()).await.is_err(), "no message comes after a lost one");
        assert!(matches!(error, Error::Connection(_) | Error::Disconnected), "{error}");
        assert!(soon(channel.send("anything")).await.is_err());
    }
    let listener = Listener::builder().max_message(5000).bind("127.0.0.1:0").await.unwrap();
    let (liar, channel) = liar(&listener).await;
    send(&liar, packet(0, HONEST, &[frame(0, b"first"), offer(5001, 0)].concat())).await;
    assert_eq!(*soon(channel.receive()).await.unwrap().unwrap(), *b"first");
    let error = soon(channel.receive()).await.unwrap_err();
    assert!(matches!(error, Error::Protocol(Violation::TooLong)), "{error}");
}

#[tokio::test]
async fn a_peer_that_grants_no_credit_holds_back_its_channel_only() {
    let _soft = soft0();
    let listener = Listener::bind("127.0.0.1:0").await.unwrap();
    let (silent, channel) = liar(&listener).await;
    let (client, server) =
        soon(async { tokio::join!(rdma_msg::connect(listener.local_address()), listener.accept()) }).await;
    let (client, server) = (client.unwrap(), server.unwrap());
    let sender = tokio::spawn({
        let channel = channel.clone();
        async move { while channel.send(&[0; 3000]).await.is_ok() {} }
    });
    let sent = || channel.statistics().packets_sent;
    support::until("the window is used up", || sent() == 8).await;
    client.send("others go on").await.unwrap();
    assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), *b"others go on");
    assert_eq!(sent(), 8, "as many as the peer has receives");
    drop(silent);
    let error = soon(channel.flush()).await.unwrap_err();
    assert!(matches!(error, Error::Disconnected), "{error}");
    soon(sender).await.unwrap();
}

/// Accepts a channel, tells its parent, and never receives.
async fn never_receive() -> ! {
    let listener = Listener::builder().keepalive(KEEPALIVE).bind("127.0.0.1:0").await.unwrap();
    peer::report(listener.local_address());
    let _channel = listener.accept().await.unwrap();
    peer::report("accepted");
    tokio::task::block_in_place(|| peer::wait_to_be_killed())
}

/// Time to notice a silent peer.
const KEEPALIVE: Duration = Duration::from_secs(2);

/// What a sender and a reader learn after `then`, while the sender waits for room.
async fn ends_after<T>(test: &str, then: impl FnOnce(Peer) -> T) -> ([Error; 2], T) {
    let mut peer = Peer::start(test, "server");
    let address = peer.next_report();
    let connector = rdma_msg::Connector::new().unwrap().keepalive(KEEPALIVE);
    let channel = soon(connector.connect(address.as_str())).await.unwrap();
    assert_eq!(peer.next_report(), "accepted");
    let reader = tokio::spawn({
        let channel = channel.clone();
        async move { channel.receive().await.unwrap_err() }
    });
    let sender = tokio::spawn({
        let channel = channel.clone();
        async move {
            loop {
                if let Err(error) = channel.send(&[0; 10_000]).await {
                    break error;
                }
            }
        }
    });
    // Both ends have the default window.
    let window = u64::from(channel.statistics().window);
    support::until("the sender waits", || channel.statistics().packets_sent == window).await;
    let kept = then(peer);
    ([soon(sender).await.unwrap(), soon(reader).await.unwrap()], kept)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_peer_ends_all_waits() {
    let _soft = soft0();
    if peer::role().is_some() {
        never_receive().await;
    }
    // The kernel of a killed process ends its connections, and soft0 does the same.
    let (errors, ()) = ends_after("a_killed_peer_ends_all_waits", Peer::kill).await;
    assert!(errors.iter().all(|error| matches!(error, Error::Disconnected)), "{errors:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_peer_ends_all_waits() {
    let _soft = soft0();
    if peer::role().is_some() {
        never_receive().await;
    }
    let stop = |peer: Peer| {
        peer.stop();
        peer
    };
    let (errors, _peer) = ends_after("a_stopped_peer_ends_all_waits", stop).await;
    // Its device has stopped, too.
    let is_failed = |error: &Error| {
        matches!(error, Error::Connection(rdma_async::Error::Failed(_)) | Error::Unresponsive(KEEPALIVE))
    };
    assert!(errors.iter().all(is_failed), "{errors:?}");
}

#[tokio::test]
async fn a_peer_whose_runtime_is_blocked_ends_all_waits() {
    let _soft = soft0();
    if peer::role().is_some() {
        // Blocks the only thread of this runtime, while the device goes on.
        let listener = Listener::builder().keepalive(None).bind("127.0.0.1:0").await.unwrap();
        peer::report(listener.local_address());
        let _channel = listener.accept().await.unwrap();
        peer::report("accepted");
        peer::wait_to_be_killed();
    }
    let (errors, _peer) = ends_after("a_peer_whose_runtime_is_blocked_ends_all_waits", |peer| peer).await;
    assert!(errors.iter().all(|error| matches!(error, Error::Unresponsive(KEEPALIVE))), "{errors:?}");
}

/// A keepalive that must not report a living peer.
const SHORT: Duration = Duration::from_secs(1);

#[tokio::test]
async fn silent_channels_live_on_whichever_end_wants_to_know() {
    let _soft = soft0();
    let live_on = async |of_connector: Option<Duration>, of_listener: Option<Duration>| {
        let listener = Listener::builder().keepalive(of_listener).bind("127.0.0.1:0").await.unwrap();
        let connector = rdma_msg::Connector::new().unwrap().keepalive(of_connector);
        let (client, server) =
            soon(async { tokio::join!(connector.connect(listener.local_address()), listener.accept()) }).await;
        let (client, server) = (client.unwrap(), server.unwrap());
        tokio::time::sleep(3 * SHORT).await;
        // One direction is in use, and the other one is silent.
        for _ in 0..5 {
            server.send("a word").await.unwrap();
            assert_eq!(&*soon(client.receive()).await.unwrap().unwrap(), b"a word");
            tokio::time::sleep(SHORT / 2).await;
        }
        client.send("an answer").await.unwrap();
        assert_eq!(&*soon(server.receive()).await.unwrap().unwrap(), b"an answer");
    };
    let (one, both) = (Some(SHORT), Some(2 * SHORT));
    tokio::join!(live_on(one, None), live_on(None, one), live_on(one, both));
}

#[tokio::test]
async fn a_channel_that_is_not_accepted_yet_lives_on() {
    let _soft = soft0();
    let listener = Listener::builder().keepalive(SHORT).bind("127.0.0.1:0").await.unwrap();
    let connector = rdma_msg::Connector::new().unwrap().keepalive(SHORT);
    let connect = || connector.connect(listener.local_address());
    // The handshakes of both are done while the first one is awaited.
    let (one, other, first) = soon(async { tokio::join!(connect(), connect(), listener.accept()) }).await;
    let (one, other, first) = (one.unwrap(), other.unwrap(), first.unwrap());
    tokio::time::sleep(3 * SHORT).await;
    let second = soon(listener.accept()).await.unwrap();
    for client in [&one, &other] {
        client.send("a word").await.unwrap();
    }
    for server in [&first, &second] {
        assert_eq!(&*soon(server.receive()).await.unwrap().unwrap(), b"a word");
    }
}
