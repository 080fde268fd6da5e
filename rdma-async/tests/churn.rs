//! Connections that come and go: opened, used, dropped and closed at random on both sides. Nothing is left of them.
//!
//! `RDMA_ASYNC_CONNECTIONS` is their number. `cargo xtask soak` opens ten thousand.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rdma_async::{Connection, Connector, Listener};
use tokio::task::JoinSet;
use tokio::time::timeout;

use support::child::{epoll_sets, in_own_process, open_files};
use support::random::Random;
use support::{everything_returns, pair, soft0, soon, until};

/// Tasks that open connections at the same time.
const CLIENTS: u64 = 8;

/// A time that is shorter than a handshake or longer.
fn some_time(random: &mut Random) -> Duration {
    Duration::from_micros(random.below(3000))
}

/// Opens a connection, uses it, and ends it in some way. Any operation may fail, since the peer does the same.
async fn come_and_go(connector: Connector, peer: rdma_safe::cm::Address, mut random: Random) {
    let connecting = connector.connect(peer);
    let connection = match random.below(8) {
        0 => match timeout(some_time(&mut random), connecting).await {
            Ok(connected) => connected.unwrap(),
            // The handshake is dropped.
            Err(_) => return,
        },
        _ => connecting.await.unwrap(),
    };
    use_and_end(connection, random).await;
}

async fn use_and_end(connection: Connection, mut random: Random) {
    let mut tasks = JoinSet::new();
    for number in 0..random.below(100) {
        let (connection, time) = (connection.clone(), some_time(&mut random));
        let is_cut = random.below(4) == 0;
        let operation = async move {
            if number % 2 == 0 {
                let Ok(buffer) = connection.buffer(number as usize).await else { return };
                drop(connection.send(buffer).await);
            } else if let Ok(Some(message)) = connection.receive().await {
                // A message is kept for longer than its connection, by chance.
                tokio::time::sleep(time).await;
                drop(message);
            }
        };
        match is_cut {
            true => drop(tasks.spawn(async move { drop(timeout(time, operation).await) })),
            false => drop(tasks.spawn(operation)),
        }
    }
    tokio::time::sleep(some_time(&mut random)).await;
    match random.below(3) {
        // All at once.
        0 => tasks.abort_all(),
        1 => connection.close().await,
        // The tasks end when the peer ends the connection, or at this time.
        _ => drop(timeout(10 * some_time(&mut random), tasks.join_next()).await),
    }
}

#[test]
fn nothing_is_left_of_connections() {
    in_own_process("nothing_is_left_of_connections", || {
        let _watchdog = soft0();
        let variable = std::env::var("RDMA_ASYNC_CONNECTIONS").ok();
        let connections: u64 = variable.map_or(200, |number| number.parse().unwrap());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(churn(connections));
    });
}

async fn churn(connections: u64) {
    let listener = Listener::builder().sends(8).receives(8).bind("127.0.0.1:0").await.unwrap();
    let connector = Connector::new().unwrap().sends(8).receives(8);
    let (driver, address) = (connector.driver().clone(), listener.local_address());
    // The first connection opens the device.
    let (client, server) = pair(&connector, &listener).await;
    let pool = client.pool().clone();
    drop((client, server));
    everything_returns(&driver, &pool).await;
    let others = || open_files() - epoll_sets();
    let (before, sets_before) = (others(), epoll_sets());

    let accepting = tokio::spawn(async move {
        let mut servers = JoinSet::new();
        for number in 0.. {
            tokio::select! {
                connection = listener.accept() => {
                    drop(servers.spawn(use_and_end(connection.unwrap(), Random::new(u64::MAX - number))));
                }
                Some(ended) = servers.join_next() => ended.unwrap(),
            }
        }
    });
    let next = Arc::new(AtomicU64::new(0));
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let (connector, next) = (connector.clone(), next.clone());
        clients.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= connections {
                    return;
                }
                soon(come_and_go(connector.clone(), address, Random::new(number))).await;
            }
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
    }
    everything_returns(&driver, &pool).await;
    until("descriptors return", || others() == before).await;
    // soft0 adds one set of all its sockets when a thread first takes packets itself, and keeps it.
    until("epoll sets return", || [sets_before, sets_before + 1].contains(&epoll_sets())).await;
    assert!(driver.statistics().received > connections, "{driver:?}");

    // The listener still works.
    let connection = connector.connect(address).await.unwrap();
    drop(connection);
    accepting.abort();
}
