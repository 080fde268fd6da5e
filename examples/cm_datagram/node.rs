//! A queue pair for datagrams, and its peer.

use common::Result;
use rdma_safe::{DatagramEndpoint, Peer, Work};

use crate::{Options, TIMEOUT};

pub(crate) struct Node {
    endpoint: DatagramEndpoint,
    peer: Option<Peer>,
    count: u32,
    /// Datagrams received.
    received: u32,
    size: usize,
}

impl Node {
    /// Posts a receive for each datagram of the peer.
    pub(crate) fn new(mut endpoint: DatagramEndpoint, options: &Options) -> Result<Self> {
        let (count, size, max) = (options.count(), options.size, endpoint.max_datagram());
        if count > 0 && size > max {
            return Err(format!("-S {size} is more than the active MTU, {max}").into());
        }
        let size = size as usize;
        if count > 0 {
            for inbox in endpoint.pd().allocate(size * count as usize)?.into_chunks(size)? {
                endpoint.receive(inbox)?;
            }
        }
        Ok(Node { endpoint, peer: None, count, received: 0, size })
    }

    pub(crate) fn endpoint(&self) -> &DatagramEndpoint {
        &self.endpoint
    }

    pub(crate) fn set_peer(&mut self, peer: Peer) {
        self.peer = Some(peer);
    }

    /// Receives all datagrams of the peer.
    pub(crate) fn receive_all(&mut self) -> Result<()> {
        while self.received < self.count {
            self.wait().map_err(|error| format!("{} of {} datagrams: {error}", self.received, self.count))?;
        }
        Ok(())
    }

    /// Waits for one completion. A server learns its peer from the first datagram, whose immediate data is the queue pair number.
    fn wait(&mut self) -> Result<()> {
        let done = self.endpoint.wait(TIMEOUT)?.ok()?;
        let Some(sender) = &done.sender else { return Ok(()) };
        self.received += 1;
        if self.peer.is_none() {
            let number = done.work.imm().unwrap_or(sender.qp_num());
            self.peer = Some(self.endpoint.peer_of(sender)?.with_qp_num(number));
        }
        Ok(())
    }

    /// Sends all datagrams to the peer, and waits for the sends to complete.
    pub(crate) fn send_all(&mut self) -> Result<()> {
        let peer = self.peer.as_ref().ok_or("no peer is known")?;
        let number = self.endpoint.queue_pair().number();
        let pd = self.endpoint.pd().clone();
        for mut outbox in pd.allocate(self.size * self.count as usize)?.into_chunks(self.size)? {
            outbox.set_len(self.size)?;
            self.endpoint.post(Work::send(outbox).imm(number), peer)?;
        }
        // Answers of the peer may arrive in between.
        while self.endpoint.sends_in_flight() > 0 {
            self.wait()?;
        }
        Ok(())
    }
}
