//! A queue pair for datagrams, and the one that it talks to.

use rdma_safe::{DatagramEndpoint, Peer, Work};

use crate::{Options, PATIENCE, Result};

pub(crate) struct Node {
    endpoint: DatagramEndpoint,
    peer: Option<Peer>,
    count: u32,
    /// Datagrams that have come.
    arrived: u32,
    size: usize,
}

impl Node {
    /// With a receive for each datagram of the peer.
    pub(crate) fn new(mut endpoint: DatagramEndpoint, options: &Options) -> Result<Self> {
        let (count, size, max) = (options.count, options.size, endpoint.max_datagram());
        if count > 0 && size > max {
            return Err(format!("-S {size} is more than the active MTU, {max}").into());
        }
        let size = size as usize;
        if count > 0 {
            for inbox in endpoint.pd().allocate(size * count as usize)?.into_chunks(size)? {
                endpoint.receive(inbox)?;
            }
        }
        Ok(Node { endpoint, peer: None, count, arrived: 0, size })
    }

    pub(crate) fn endpoint(&self) -> &DatagramEndpoint {
        &self.endpoint
    }

    /// Whom to send to.
    pub(crate) fn know(&mut self, peer: Peer) {
        self.peer = Some(peer);
    }

    /// Waits until as many have come as are to come.
    pub(crate) fn receive_all(&mut self) -> Result<()> {
        while self.arrived < self.count {
            self.take().map_err(|error| format!("{} of {} datagrams: {error}", self.arrived, self.count))?;
        }
        Ok(())
    }

    /// One completion. The first datagram says whom to answer, unless that is known: by the number that comes with it.
    fn take(&mut self) -> Result<()> {
        let done = self.endpoint.wait(PATIENCE)?.ok()?;
        let Some(sender) = &done.sender else { return Ok(()) };
        self.arrived += 1;
        if self.peer.is_none() {
            let number = done.work.imm().unwrap_or(sender.qp_num());
            self.peer = Some(self.endpoint.peer_of(sender)?.with_qp_num(number));
        }
        Ok(())
    }

    /// As many to the peer, and waits until they have left.
    pub(crate) fn send_all(&mut self) -> Result<()> {
        let peer = self.peer.as_ref().ok_or("nobody is known to send to")?;
        let number = self.endpoint.queue_pair().number();
        let pd = self.endpoint.pd().clone();
        for mut outbox in pd.allocate(self.size * self.count as usize)?.into_chunks(self.size)? {
            outbox.set_len(self.size)?;
            self.endpoint.post(Work::send(outbox).imm(number), peer)?;
        }
        // What the peer answers may come meanwhile.
        while self.endpoint.sends_in_flight() > 0 {
            self.take()?;
        }
        Ok(())
    }
}
