//! Random schedules: messages of all sizes in both directions, futures that are dropped at any time, messages that are kept,
//! and ends of all kinds, while packets are lost, repeated, reordered and delayed. Each message arrives once and in order, or
//! its sender learns that the connection has ended.
//!
//! The checker of soft0 watches that no memory is used while the device may use it, and that no packet ever finds the receive queue
//! empty.
//!
//! `RDMA_MSG_SCHEDULES` is the number of schedules, and `RDMA_MSG_FIRST_SCHEDULE` the first seed. `cargo xtask soak` runs a
//! thousand.

#[path = "../../rdma-async/tests/support/mod.rs"]
mod support;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use rdma_async::Driver;
use rdma_msg::{Channel, Connector, Error, Listener, Message, SharedReceives};
use rdma_safe::soft::check::{Kind, Options, Session};
use rdma_safe::soft::{self, Faults};

use support::random::Random;
use support::{soon, until};

/// Messages that each end sends.
const MESSAGES: u64 = 60;

/// Messages that were written to memory that their receiver had offered.
static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// How an end leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ending {
    Close,
    /// Drops the channel after it has flushed and seen the end of the peer.
    Drop,
    /// Drops the channel without looking.
    Vanish,
    Abort,
}

/// What one end has sent.
#[derive(Default)]
struct Log {
    /// Messages that were sent and are not received yet.
    sent: RefCell<VecDeque<(u64, usize)>>,
}

fn message(number: u64, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len as u64).map(|index| (number.wrapping_mul(7) + index) as u8).collect();
    bytes.splice(0..0, number.to_be_bytes());
    bytes
}

/// Polls a future as often as `polls` allows. `None` if it is not ready then.
async fn at_most<F: Future>(polls: u64, future: F) -> Option<F::Output> {
    let (mut future, mut left) = (pin!(future), polls);
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending if left == 0 => Poll::Ready(None),
        Poll::Pending => {
            left -= 1;
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

fn len(random: &mut Random) -> usize {
    match random.below(6) {
        0 => 0,
        1..=3 => random.index(300),
        4 => random.index(9000),
        _ => random.index(60_000),
    }
}

/// Sends messages, of which some futures are dropped.
async fn send(channel: &Channel, log: &Log, mut random: Random, pauses: bool) -> Result<(), Error> {
    for number in 0..MESSAGES {
        if pauses && random.below(MESSAGES) == 0 {
            // Long enough to be idle.
            tokio::time::sleep(Duration::from_millis(120)).await;
        }
        let len = len(&mut random);
        // It is in the log before the peer can receive it.
        log.sent.borrow_mut().push_back((number, len));
        let bytes = message(number, len);
        let sent = match random.below(4) {
            0 => at_most(random.below(3), channel.send(&bytes)).await,
            1 => Some(channel.send(&bytes).await),
            2 => {
                let bytes = bytes::Bytes::from(bytes);
                let at = random.index(bytes.len() + 1);
                Some(channel.send(vec![bytes.slice(..at), bytes.slice(at..)]).await)
            }
            // The peer may read it where it is.
            _ => Some(channel.send(bytes).await),
        };
        match sent {
            Some(Ok(())) => {}
            unsent => {
                let _ = log.sent.borrow_mut().pop_back();
                unsent.unwrap_or(Ok(()))?;
            }
        }
        if random.below(8) == 0 {
            channel.flush().await?;
        }
        if random.below(3) == 0 {
            tokio::task::yield_now().await;
        }
    }
    channel.finish().await
}

/// Receives messages, of which it keeps some. Returns how the peer ended.
async fn receive(channel: &Channel, log: &Log, mut random: Random, most: u64) -> Result<(), Error> {
    let mut kept: Vec<(Message, Vec<u8>)> = Vec::new();
    // `None` once this end sends no more.
    let mut spare = Some(vec![0; 40_000]);
    let result = loop {
        if random.below(4) == 0 {
            if let Some(memory) = spare.take() {
                let polls = random.below(3);
                match at_most(polls, channel.offer(memory)).await {
                    Some(Err(Error::Closed)) => {}
                    Some(Err(error)) => break Err(error),
                    Some(Ok(_)) | None => spare = Some(vec![0; random.index(60_000) + 1]),
                }
            }
        }
        if random.below(5) == 0 {
            match at_most(random.below(3), channel.receive_many()).await.transpose() {
                Ok(None) => {}
                Ok(Some(None)) => break Ok(()),
                Err(error) => break Err(error),
                Ok(Some(Some(several))) => {
                    for found in &several {
                        let (number, len) = log.sent.borrow_mut().pop_front().expect("the peer has sent it");
                        assert!(
                            *found == *message(number, len),
                            "message {number} of {len} bytes, found {}",
                            found.len()
                        );
                    }
                }
            }
            continue;
        }
        let received = match random.below(4) {
            0 => at_most(random.below(3), channel.receive()).await.transpose(),
            _ => Some(channel.receive().await).transpose(),
        };
        match received {
            Ok(None) => {}
            Ok(Some(None)) => break Ok(()),
            Err(error) => break Err(error),
            Ok(Some(Some(found))) => {
                let (number, len) = log.sent.borrow_mut().pop_front().expect("the peer has sent it");
                let expected = message(number, len);
                assert!(*found == *expected, "message {number} of {len} bytes, found {}", found.len());
                kept.push((found, expected));
            }
        }
        // Fewer than the window, so the peer can go on.
        while kept.len() as u64 >= most || (!kept.is_empty() && random.below(2) == 0) {
            let (message, expected) = kept.swap_remove(random.index(kept.len()));
            assert!(*message == *expected, "a kept message changed");
            if let Ok(memory) = message.into_offered() {
                WRITTEN.fetch_add(1, Ordering::Relaxed);
                if spare.is_some() {
                    spare = Some(memory);
                }
            }
        }
    };
    assert!(kept.iter().all(|(message, expected)| **message == **expected));
    result
}

/// One end, until it leaves. Returns how, and whether it has seen an orderly end of the peer.
async fn run(
    channel: Channel,
    [own, peer]: [Rc<Log>; 2],
    mut random: Random,
    window: u32,
    pauses: bool,
) -> (Ending, Result<(), Error>) {
    let ending = match random.below(8) {
        0 => Ending::Vanish,
        1 => Ending::Abort,
        2..=4 => Ending::Drop,
        _ => Ending::Close,
    };
    let (sending, receiving) = (Random::new(random.below(1 << 40)), Random::new(random.below(1 << 40)));
    let steps = random.below(200);
    let both = async {
        let send = send(&channel, &own, sending, pauses);
        let (sent, received) = tokio::join!(send, receive(&channel, &peer, receiving, u64::from(window)));
        sent.and(received)
    };
    let done = match ending {
        Ending::Vanish | Ending::Abort => at_most(steps, both).await.unwrap_or(Ok(())),
        Ending::Close | Ending::Drop => both.await,
    };
    match ending {
        Ending::Abort => channel.abort(7, "the schedule says so"),
        Ending::Close => return (ending, done.and(channel.close().await)),
        Ending::Drop => return (ending, done.and(channel.flush().await)),
        Ending::Vanish => {}
    }
    (ending, Err(Error::Closed))
}

/// Returns whether both ends have ended in order.
async fn schedule(seed: u64) -> bool {
    let mut random = Random::new(seed);
    let has_faults = random.below(2) == 0;
    if has_faults {
        let faults = Faults::default().with_seed(seed);
        let drop = random.below(30) as f64 / 1000.0;
        soft::set_faults(faults.with_drop(drop).with_dup(drop / 2.0).with_reorder(drop)).unwrap();
    }
    let windows = [random.below(4) as u32 + 1, random.below(4) as u32 + 1];
    let sizes = [512 << random.below(5), 512 << random.below(5)];
    let listener = Listener::builder().window(windows[1]).packet_size(sizes[1]).sends(random.below(4) as u32 + 1);
    let mut listener = listener.rendezvous_threshold(random.index(20_000));
    let mut connector = Connector::new().unwrap().window(windows[0]).packet_size(sizes[0]);
    // One or both ends share receives, which may not suffice for the windows of both.
    let shared = SharedReceives::new(12 + random.below(12) as u32, sizes[1]);
    let (listener_shares, connector_shares) = (random.below(3) == 0, random.below(3) == 0);
    if listener_shares {
        listener = listener.shared_receives(&shared).window(8);
    }
    if connector_shares {
        connector = connector.shared_receives(&shared).window(8);
    }
    let listener = listener.copy_budget(random.index(40_000));
    let connector = connector.copy_budget(random.index(40_000));
    let pauses = listener_shares || connector_shares;
    let listener = listener.bind("127.0.0.1:0").await.unwrap();
    let connector = connector.sends(random.below(4) as u32 + 1).rendezvous_threshold(random.index(20_000));
    let (client, server) =
        soon(async { tokio::join!(connector.connect(listener.local_address()), listener.accept()) }).await;
    let logs = [(); 2].map(|()| Rc::new(Log::default()));
    let [one, other] = logs.clone();
    // A window that is shared may never grow.
    let keeps = if connector_shares { 1 } else { windows[0] };
    let server_keeps = if listener_shares { 1 } else { windows[1] };
    let (client, server) = (client.unwrap(), server.unwrap());
    let client = run(client, [one.clone(), other.clone()], Random::new(random.below(1 << 40)), keeps, pauses);
    let server = run(server, [other, one], Random::new(random.below(1 << 40)), server_keeps, pauses);
    let ends = <[_; 2]>::from(soon(async { tokio::join!(client, server) }).await);
    let in_order = ends.iter().all(|(_, result)| result.is_ok());
    if in_order {
        assert!(logs.iter().all(|log| log.sent.borrow().is_empty()), "seed {seed}: messages are missing");
    }
    // If the last acknowledgement is lost, the end of the peer comes first, and a flush cannot know.
    let expects_order = !has_faults && ends.iter().all(|(ending, _)| matches!(ending, Ending::Close | Ending::Drop));
    assert!(in_order || !expects_order, "seed {seed}: {ends:?}");
    soft::set_faults(Faults::default()).unwrap();
    let driver = Driver::current().unwrap();
    until("connections and operations end", move || {
        let now = driver.statistics();
        (now.connections, now.operations) == (0, 0)
    })
    .await;
    until("shared receives are free", || shared.reserved() == 0).await;
    in_order
}

#[test]
fn messages_arrive_once_and_in_order_whatever_happens() {
    let session = Session::start(Options::default()).unwrap();
    let _soft = support::soft0();
    let number = |name: &str, default| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    let first = number("RDMA_MSG_FIRST_SCHEDULE", 1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let schedules = number("RDMA_MSG_SCHEDULES", 60);
    for seed in first..first + schedules {
        let in_order = runtime.block_on(schedule(seed));
        let mut reports = session.take_reports();
        // An end that gives up frees the memory that it has offered, also while the peer reads it.
        reports.retain(|report| in_order || report.kind != Kind::StaleKey);
        assert!(reports.is_empty(), "seed {seed}: {reports:?}");
    }
    assert!(schedules < 60 || WRITTEN.load(Ordering::Relaxed) != 0);
}
