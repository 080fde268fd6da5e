//! A queue pair for datagrams, and the one that it talks to.

use rdma_safe::cm::{ConnectParameters, Id, UdParameters};
use rdma_safe::{DatagramEndpoint, Device, Endpoint, Peer, ProtectionDomain, Work};

use crate::{PATIENCE, Result};

/// What all have that are found by address: `RDMA_UDP_QKEY` of librdmacm.
const QKEY: u32 = 0x0123_4567;

/// A domain for each device.
#[derive(Default)]
pub(crate) struct Domains(Vec<ProtectionDomain>);

impl Domains {
    fn of(&mut self, id: &Id) -> Result<ProtectionDomain> {
        let name = id.device_name().ok_or("no device leads to the peer")?;
        if let Some(pd) = self.0.iter().find(|pd| pd.context().device_name() == name) {
            return Ok(pd.clone());
        }
        let pd = Device::by_name(&name)?.open()?.alloc_pd()?;
        self.0.push(pd.clone());
        Ok(pd)
    }
}

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
    pub(crate) fn new(domains: &mut Domains, id: &Id, count: u32, size: u32) -> Result<Self> {
        let pd = domains.of(id)?;
        let depth = count.max(1);
        let mut endpoint = Endpoint::builder(&pd)
            .port(id.port().unwrap_or(1))
            .send_depth(depth)
            .recv_depth(depth)
            .events(true)
            .build_datagrams(QKEY)?;
        if count > 0 && size > endpoint.max_datagram() {
            let max = endpoint.max_datagram();
            return Err(format!("-S {size} is more than the active MTU, {max}").into());
        }
        let size = size as usize;
        if count > 0 {
            for inbox in pd.allocate(size * count as usize)?.into_chunks(size)? {
                endpoint.receive(inbox)?;
            }
        }
        Ok(Node { endpoint, peer: None, count, arrived: 0, size })
    }

    pub(crate) fn parameters(&self) -> ConnectParameters {
        ConnectParameters::new(self.endpoint.queue_pair().number())
    }

    /// Whom to send to.
    pub(crate) fn know(&mut self, found: &UdParameters) -> Result<()> {
        self.peer = Some(self.endpoint.peer_at(&found.address, found.qp_num)?.with_qkey(found.qkey));
        Ok(())
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
