//! Channels that share receives. Idle ones need few, and busy ones get more. Credit never exceeds the posted receives.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

use rdma_async::Driver;
use rdma_msg::{Channel, Connector, Listener, SharedReceives};

use support::{soft0, soon, until};
use tokio::task::JoinHandle;

/// Receives that an idle channel keeps.
const IDLE: u32 = 6;

async fn pair(connector: &Connector, listener: &Listener) -> (Channel, Channel) {
    let (client, server) = tokio::join!(connector.connect(listener.local_address()), listener.accept());
    (client.unwrap(), server.unwrap())
}

/// Sends `messages` of 100 bytes and receives them.
async fn exchange(from: &Channel, to: &Channel, messages: u32) {
    let send = async {
        for number in 0..messages {
            let mut message = number.to_be_bytes().to_vec();
            message.resize(100, 7);
            from.send(&message).await.unwrap();
        }
    };
    let receive = async {
        for number in 0..messages {
            let message = to.receive().await.unwrap().unwrap();
            assert_eq!((&message[..4], message.len()), (&number.to_be_bytes()[..], 100));
        }
    };
    soon(async { tokio::join!(send, receive) }).await;
}

async fn listener(packets: u32, size: usize) -> (SharedReceives, Listener) {
    let shared = SharedReceives::new(packets, size);
    let listener = Listener::builder().shared_receives(&shared).window(WINDOW);
    let listener = listener.bind("127.0.0.1:0").await.unwrap();
    (shared, listener)
}

/// The largest window of both ends.
const WINDOW: u32 = 16;

/// Messages that fill the window of a server, and more. Each fills a packet of 512 bytes.
const MANY: u32 = 40;

/// Sends [`MANY`] messages until the window of the server has grown as far as it can. It stays so until the server receives.
async fn fill(client: &Channel, server: &Channel) -> JoinHandle<()> {
    let (sender, full) = (client.clone(), client.statistics().packets_sent + u64::from(WINDOW));
    let sending = tokio::spawn(async move {
        for number in 0..MANY {
            sender.send(&[number as u8; 488]).await.unwrap();
        }
    });
    until("the window is full", || server.statistics().window == WINDOW && client.statistics().packets_sent == full)
        .await;
    sending
}

/// Receives the messages of [`fill`].
async fn empty(server: &Channel, sending: JoinHandle<()>) {
    for number in 0..MANY {
        assert_eq!(*soon(server.receive()).await.unwrap().unwrap(), [number as u8; 488]);
    }
    soon(sending).await.unwrap();
}

#[tokio::test]
async fn a_busy_channel_gets_more_receives_and_an_idle_one_gives_them_back() {
    let _watchdog = soft0();
    let (shared, listener) = listener(27, 512).await;
    let connector = Connector::new().unwrap().window(WINDOW);
    let (client, server) = soon(pair(&connector, &listener)).await;
    let (other_client, other_server) = soon(pair(&connector, &listener)).await;
    assert_eq!((server.statistics().window, shared.reserved()), (1, 2 * IDLE));
    for _ in 0..3 {
        let sending = fill(&client, &server).await;
        assert_eq!(shared.reserved(), 27);
        // There are none left for this one, which does with one.
        exchange(&other_client, &other_server, 500).await;
        assert_eq!(other_server.statistics().window, 1);
        exchange(&server, &client, 500).await;
        assert_eq!(client.statistics().window, WINDOW, "it has its own receives");
        empty(&server, sending).await;
        until("the receives come back", || shared.reserved() == 2 * IDLE).await;
        assert_eq!(server.statistics().window, 1);
        let sending = fill(&other_client, &other_server).await;
        empty(&other_server, sending).await;
        until("the receives come back", || shared.reserved() == 2 * IDLE).await;
    }
    soon(async { tokio::join!(client.close(), server.close()) }).await.0.unwrap();
    drop((client, server));
    until("the channel is gone", || shared.reserved() == IDLE).await;
    exchange(&other_client, &other_server, 10).await;
}

#[tokio::test]
async fn a_message_that_is_kept_keeps_its_receive_also_after_the_end() {
    let _watchdog = soft0();
    let (shared, listener) = listener(2 * IDLE, 512).await;
    let connector = Connector::new().unwrap();
    let (client, server) = soon(pair(&connector, &listener)).await;
    soon(client.send("kept")).await.unwrap();
    let kept = soon(server.receive()).await.unwrap().unwrap();
    soon(async { tokio::join!(client.close(), server.close()) }).await.0.unwrap();
    drop((client, server));
    until("the channel is gone", || shared.reserved() == 1).await;
    assert_eq!(&*kept, b"kept");
    drop(kept);
    assert_eq!(shared.reserved(), 0);
    let _ends = [soon(pair(&connector, &listener)).await, soon(pair(&connector, &listener)).await];
    let error = tokio::select! {
        refused = soon(connector.connect(listener.local_address())) => refused.unwrap_err(),
        _ = listener.accept() => panic!("it was accepted"),
    };
    assert!(error.to_string().contains("has refused"), "{error}");
}

/// The most channels that a process can have with its limit of descriptors, up to a thousand. Two ends need five.
fn channels() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls get a valid limit.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = limit.rlim_max;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
    1000.min(limit.rlim_cur as usize / 5)
}

#[tokio::test]
async fn a_thousand_idle_channels_share_receives_with_the_busy_ones() {
    let _watchdog = soft0();
    let channels = channels();
    let idle = IDLE * channels as u32;
    let (driver, runner) = Driver::builder().completions(1 << 16).memory(64 << 20).build().unwrap();
    tokio::spawn(runner.run_tokio());
    // Each channel has 3 KiB, and the busy ones share 64 more packets. The clients have receives of their own.
    let shared = SharedReceives::new(idle + 64, 512);
    let listener = Listener::builder().driver(&driver).shared_receives(&shared).window(WINDOW).sends(1);
    let listener = listener.bind("127.0.0.1:0").await.unwrap();
    let of_clients = SharedReceives::new(idle, 512);
    let connector = Connector::with_driver(&driver).shared_receives(&of_clients).sends(1);
    let mut ends = Vec::new();
    for _ in 0..channels {
        ends.push(soon(pair(&connector, &listener)).await);
    }
    assert_eq!(shared.reserved(), idle);
    // Four at a time use all the others.
    for busy in ends.chunks(4).step_by(100) {
        let mut sending = Vec::new();
        for (client, server) in busy {
            sending.push(fill(client, server).await);
        }
        assert_eq!(shared.reserved(), idle + 15 * busy.len() as u32);
        for ((_, server), sending) in busy.iter().zip(sending) {
            empty(server, sending).await;
        }
        until("the receives come back", || shared.reserved() == idle).await;
    }
    for (client, server) in &ends {
        exchange(client, server, 1).await;
    }
    drop(ends);
    until("all receives are free", || shared.reserved() + of_clients.reserved() == 0).await;
}
