//! Pairs of channels, and what they exchange.

#![allow(dead_code, reason = "no test needs all of it")]

use rdma_msg::{Channel, Connector, Listener, ListenerBuilder, Message};

use crate::support::soon;

/// Two ends of a channel.
pub(crate) async fn pair(
    connector: impl Fn(Connector) -> Connector,
    listener: impl Fn(ListenerBuilder) -> ListenerBuilder,
) -> [Channel; 2] {
    let listener = listener(Listener::builder()).bind("127.0.0.1:0").await.unwrap();
    let connector = connector(Connector::new().unwrap());
    connect(&connector, &listener).await
}

pub(crate) async fn connect(connector: &Connector, listener: &Listener) -> [Channel; 2] {
    let (client, server) =
        soon(async { tokio::join!(connector.connect(listener.local_address()), listener.accept()) }).await;
    [client.unwrap(), server.unwrap()]
}

/// The next message.
pub(crate) async fn received(channel: &Channel) -> Message {
    soon(channel.receive()).await.unwrap().expect("the peer has sent it")
}

pub(crate) async fn default_pair() -> [Channel; 2] {
    pair(|connector| connector, |listener| listener).await
}

/// The longest message that shares a packet, by default.
pub(crate) const PACKET: usize = (60 << 10) - 16 - 8;

/// The longest message in one packet, by default.
pub(crate) const LONGEST_PACKET: usize = (80 << 10) - 16 - 8;

/// Bytes of which each differs from its neighbours.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index % 251) as u8).collect()
}
