//! Channels and streams of rdma-msg, which its own tests use on soft0 only.

use std::net::Ipv4Addr;
use std::time::Duration;

use rdma_msg::{Channel, Connector, Error, Listener, SharedReceives};
use rdma_pool::Budget;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::cm::address;
use crate::support::peer::{self, Peer};
use crate::support::program::{Program, free_port};
use crate::support::{DEADLINE, device};

/// Runs a future with tokio, for a limited time.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { timeout(DEADLINE, future).await.unwrap() })
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index % 251) as u8).collect()
}

/// Lengths of messages: in packets alone, in parts, and long enough to be read by the peer.
const SIZES: [usize; 8] = [0, 1, 100, 20_000, 50_000, 70_000, 300_000, 5_000_000];

/// Two ends of a channel.
async fn channel(address: Ipv4Addr) -> [Channel; 2] {
    let listener = Listener::bind((address, 0)).await.unwrap();
    let connector = Connector::new().unwrap();
    let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
    [client.unwrap(), server.unwrap()]
}

/// Sends each message back.
async fn echo(channel: Channel) {
    while let Some(message) = channel.receive().await.unwrap() {
        channel.send(message).await.unwrap();
    }
    channel.close().await.unwrap();
}

#[test]
fn channels_echo_messages_of_all_sizes() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    block_on(async {
        let [client, server] = channel(address).await;
        let server = tokio::spawn(echo(server));
        for len in SIZES {
            client.send(&pattern(len)[..]).await.unwrap();
            assert!(*client.receive().await.unwrap().unwrap() == *pattern(len), "{len} bytes");
            client.send(pattern(len)).await.unwrap();
            assert!(*client.receive().await.unwrap().unwrap() == *pattern(len), "{len} bytes in owned memory");
        }
        for number in 0..500_u32 {
            client.send(&number.to_be_bytes()).await.unwrap();
            if number >= 100 {
                assert_eq!(*client.receive().await.unwrap().unwrap(), (number - 100).to_be_bytes());
            }
        }
        client.finish().await.unwrap();
        for number in 400..500_u32 {
            assert_eq!(*client.receive().await.unwrap().unwrap(), number.to_be_bytes());
        }
        assert!(client.receive().await.unwrap().is_none());
        client.close().await.unwrap();
        server.await.unwrap();
        let sent = client.statistics();
        assert_eq!((sent.messages_sent, sent.messages_acknowledged), (516, 516), "{sent:?}");
    });
}

#[test]
fn long_messages_are_read_or_written_in_parts_without_a_copy() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    block_on(async {
        let [client, server] = channel(address).await;
        let buffer = |len: usize| {
            let mut buffer = client.pool().try_get(Budget::Sends, len).unwrap();
            buffer.fill_from(&pattern(len)).unwrap();
            buffer
        };
        // Twice read, since no memory is offered, and then twice written.
        for is_written in [false, false, true, true] {
            if is_written {
                server.offer(vec![0; 400_000]).await.unwrap();
                while client.statistics().offers_received != server.statistics().offers_sent {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            let parts = vec![buffer(300_000), buffer(1), buffer(70_001)];
            let expected: Vec<u8> = parts.iter().flat_map(|part| part.to_vec()).collect();
            let (sent, received) = tokio::join!(client.send(parts), server.receive());
            sent.unwrap();
            let message = received.unwrap().unwrap();
            assert!(*message == *expected);
            assert_eq!(message.into_offered().is_ok(), is_written);
        }
        assert_eq!([&client, &server].map(|end| end.statistics().bytes_copied), [0, 0]);
        assert_eq!(client.statistics().messages_written, 2);
        client.close().await.unwrap();
    });
}

#[test]
fn channels_share_receives() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    block_on(async {
        let shared = SharedReceives::new(49, 1024);
        let listener = Listener::builder().shared_receives(&shared).window(16);
        let listener = listener.bind((address, 0)).await.unwrap();
        let connector = Connector::new().unwrap();
        let mut ends = Vec::new();
        for _ in 0..4 {
            let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
            ends.push((client.unwrap(), server.unwrap()));
        }
        assert_eq!(shared.reserved(), 24);
        for _ in 0..2 {
            for (client, server) in &ends {
                let send = async {
                    for len in 0..200 {
                        client.send(&pattern(len * 50)[..]).await.unwrap();
                    }
                };
                let receive = async {
                    // The window grows while nobody receives, and stays so.
                    while server.statistics().window < 16 || shared.reserved() != 24 + 15 {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                    for len in 0..200 {
                        assert!(*server.receive().await.unwrap().unwrap() == *pattern(len * 50));
                    }
                };
                tokio::join!(send, receive);
                // An idle peer gives back what it does not need.
                while shared.reserved() != 24 {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        }
        drop(ends);
        while shared.reserved() != 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
}

#[test]
fn streams_carry_bytes_in_both_directions_at_once() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    block_on(async {
        let listener = Listener::builder().window(3).bind_streams((address, 0)).await.unwrap();
        let connector = Connector::new().unwrap().sends(2);
        let (client, server) = tokio::join!(connector.connect_stream(listener.local_address()), listener.accept());
        let tasks = [client.unwrap(), server.unwrap()].map(|stream| {
            let (mut read, mut write) = stream.into_split();
            let writer = tokio::spawn(async move {
                for chunk in pattern(1_500_000).chunks(7001) {
                    write.write_all(chunk).await.unwrap();
                }
                write.shutdown().await.unwrap();
            });
            let reader = tokio::spawn(async move {
                let mut all = Vec::new();
                read.read_to_end(&mut all).await.unwrap();
                assert!(all == pattern(1_500_000));
            });
            [writer, reader]
        });
        for task in tasks.into_iter().flatten() {
            task.await.unwrap();
        }
    });
}

#[test]
fn an_abort_reaches_the_peer() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    block_on(async {
        let [client, server] = channel(address).await;
        client.abort(7, "no space left");
        let error = server.receive().await.unwrap_err();
        assert!(matches!(&error, Error::Aborted { code: 7, reason } if **reason == *"no space left"), "{error}");
        assert!(!error.is_connection_lost());
    });
}

#[test]
fn the_echo_service_serves_its_clients_and_stops() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let (Some(server), Some(client)) = (Program::example("echo_server"), Program::example("echo_client")) else {
        return;
    };
    let address = format!("{address}:{}", free_port());
    let mut running = server.start_with(&[&address]);
    running.wait_for("listening at");
    for _ in 0..2 {
        let (status, text) = client.start_with(&[&address]).finish();
        assert!(status.success() && text.contains("1000000 bytes: "), "{status}\n{text}");
    }
    // A client that is connected and does not receive.
    block_on(async {
        let channel = rdma_msg::connect(address.as_str()).await.unwrap();
        let sends = async {
            loop {
                if let Err(error) = channel.send(&pattern(10_000)[..]).await {
                    break error;
                }
            }
        };
        let stops = async {
            // Both ends have the default window.
            while channel.statistics().packets_sent < u64::from(channel.statistics().window) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            // SAFETY: the child was not waited for yet, so the process number is its own.
            assert_eq!(unsafe { libc::kill(running.id() as i32, libc::SIGINT) }, 0);
        };
        let (error, ()) = tokio::join!(sends, stops);
        assert!(matches!(error, Error::Aborted { code: 1, .. } | Error::Disconnected), "{error}");
    });
    let (status, text) = running.finish_within(DEADLINE);
    assert!(status.success() && text.contains("stopping: "), "{status}\n{text}");
}

#[test]
fn a_program_that_is_stopped_ends_its_channels() {
    let Some(rdma) = device() else { return };
    let Some(address) = address(&rdma) else { return };
    let within = Duration::from_secs(5);
    block_on(async {
        if peer::role().is_some() {
            let listener = Listener::bind((address, 0)).await.unwrap();
            peer::report(listener.local_address());
            let _channel = listener.accept().await.unwrap();
            peer::report("accepted");
            tokio::task::block_in_place(|| peer::wait_to_be_killed());
        }
        let mut peer = Peer::start("messages::a_program_that_is_stopped_ends_its_channels", "server");
        let connector = Connector::new().unwrap().keepalive(within);
        let channel = connector.connect(peer.next_report().as_str()).await.unwrap();
        assert_eq!(peer.next_report(), "accepted");
        peer.stop();
        let error = channel.receive().await.unwrap_err();
        assert!(error.is_connection_lost(), "{error}");
        // The device of a stopped program answers, unless it is software in its process.
        match error {
            Error::Unresponsive(found) => assert_eq!(found, within),
            error => assert!(rdma.is_soft() && matches!(error, Error::Connection(_)), "{error}"),
        }
    });
}
