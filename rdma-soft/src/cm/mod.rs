//! Connection management without sockets, clocks or queue pairs: chapter 12 of the InfiniBand Architecture Specification.
//!
//! A [`Manager`] holds the connections of a device. Its owner passes in MADs, calls of the program and the time, and takes MADs to
//! send ([`Manager::poll_transmit`]), events for the program ([`Manager::poll_event`]) and the next timer ([`Manager::wake_at`]).
//!
//! The active side sends REQ, receives REP and sends RTU. The passive side receives REQ, sends REP and waits for RTU or for the
//! first packet of data. Either side ends the connection with DREQ, and the other confirms with DREP. A datagram service is
//! looked up with SIDR_REQ and SIDR_REP. Requests are retransmitted with exponential backoff until they are answered. Each
//! failed or ended connection stays in timewait, where it answers duplicates, and where neither its ids nor its queue pair
//! number are used again.
//!
//! The behaviour follows Linux (`drivers/infiniband/core/cm.c`), with these differences. Most of them keep the two sides from
//! disagreeing about a connection:
//!
//! - A connection that the program has released still retransmits its DREQ. Linux sends one, and if it is lost, the peer does not
//!   learn that the connection has ended.
//! - A duplicate of a rejected REQ or REP gets the same REJ again. A REP for a connection that has failed or is unknown gets a REJ,
//!   and an RTU gets a REJ or DREQ. Linux ignores some of them, and the peer retransmits until its retries are exhausted.
//! - A DREQ or REJ ends a request although the REP, which it has overtaken, has not arrived. Otherwise the late REP would establish
//!   a connection that the peer has forgotten.
//! - A queue pair number belongs to one connection of an address, whatever the GUID. If a REQ or REP names the number of another
//!   connection, the peer was restarted, or its DREQs were lost. The message is rejected as stale, and the old connection ends.
//! - A passive side that gives up its REP sends a REJ, and then DREQs until the peer confirms one. The peer may have established
//!   the connection.
//! - An MRA raises the number of retransmissions but does not delay them, since the RTU that ends the wait may be lost.
//! - If the requests of a flood fill a backlog, requests from other addresses take the place of some of them, and so do
//!   retransmissions. If accepted requests of a flood fill the manager, it gives up the connection that has waited longest for an
//!   RTU.
//!
//! tests/cm_explorer explores the states of two managers and shows that both sides reach the same verdict, and that no queue pair
//! number is reused while the peer still uses it. This holds if at least one transmission of each message arrives, and if timewait
//! is longer than a packet and its answer stay in the network. A peer that loses its state while a connection is established is
//! noticed by the layer above, which then releases the connection, or by a message for that connection.

mod active;
mod backlog;
mod backoff;
mod connection;
mod consistency;
mod dropped;
mod end;
mod events;
mod gone;
mod listeners;
mod lookup;
mod manager;
mod mra;
mod passive;
mod timers;

pub use backoff::Backoff;
pub use connection::{Ended, Negotiated, Phase};
pub use events::{Event, Failure, Transmit};
pub use listeners::{ListenAddress, ListenerId};
pub use manager::{Config, Manager};
pub(crate) use timers::Timers;

use std::net::IpAddr;

/// Queue pair number of the destination and the source of MADs.
pub const MAD_QP: u32 = 1;

/// Q_Key of MADs: `IB_QP1_QKEY` of Linux.
pub const MAD_QKEY: u32 = 0x8001_0000;

/// Local id of a connection, random and unique within the manager.
pub type ConnectionId = u32;

/// The address of a peer, and the link of this device that reaches it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Peer {
    /// Index of the link.
    pub link: usize,
    /// Address of the peer's device.
    pub address: IpAddr,
    /// Whether the peer is on this host.
    pub is_local: bool,
}

/// Why a call of the program is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CallError {
    /// The connection is not in a state for this call, or does not exist any more.
    #[error("the connection is not in a state for this call")]
    State,
    /// The manager has as many connections as it can hold.
    #[error("too many connections")]
    Full,
}
