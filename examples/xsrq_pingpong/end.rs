//! One end: messages bounce between shared receive queues.

use std::error::Error;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use rdma_safe::xrc::{XrcDomain, XrcTarget};
use rdma_safe::{
    Buffer, CompletionChannel, CompletionQueue, ConnectOptions, Context, Gid, InitOptions, Mtu, QueuePair,
    QueuePairAddress, QueuePairType, Sge, SharedReceiveQueue, WorkRequest,
};

use super::address::Address;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Settings of an end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) clients: u32,
    /// Messages to and from each client.
    pub(crate) tests: u32,
    pub(crate) size: u32,
    pub(crate) mtu: Mtu,
    pub(crate) sl: u8,
    pub(crate) port: u8,
    pub(crate) gid_index: Option<u32>,
    /// Sleep instead of polling.
    pub(crate) events: bool,
    /// Longest wait for the next message.
    pub(crate) timeout: Duration,
}

/// One end: a shared receive queue, and for each peer a queue pair that sends and a target that receives.
pub(crate) struct End {
    connections: ManuallyDrop<Vec<Connection>>,
    srq: ManuallyDrop<SharedReceiveQueue>,
    /// A slot for each receive, and one for all sends. It is freed after the queues, or leaked.
    memory: ManuallyDrop<Buffer>,
    recv_cq: CompletionQueue,
    send_cq: CompletionQueue,
    channel: Option<CompletionChannel>,
    settings: Settings,
}

struct Connection {
    sender: QueuePair,
    target: XrcTarget,
    local: Address,
    remote: Option<Address>,
    /// Messages sent to this peer, over any connection.
    sent: u32,
}

impl End {
    /// Creates the queues in `domain`, and posts a receive for each peer.
    pub(crate) fn new(context: &Context, domain: &XrcDomain, settings: Settings) -> Result<Self> {
        let Settings { clients, tests, .. } = settings;
        let pd = context.alloc_pd()?;
        let channel = if settings.events { Some(context.create_channel()?) } else { None };
        let mut recv_cq = context.completion_queue(clients).classic(true);
        if let Some(channel) = &channel {
            recv_cq = recv_cq.channel(channel);
        }
        let mut recv_cq = recv_cq.build()?;
        if settings.events {
            recv_cq.arm(false)?;
        }
        let send_cq = context.completion_queue(clients).classic(true).build()?;
        let srq = domain.shared_receive_queue(&pd, &recv_cq, clients).build()?;
        let number = srq.xrc_number().ok_or("the shared receive queue has no number")?;
        let depth = clients.checked_mul(tests).ok_or("too many messages: give smaller --clients or --num_tests")?;
        let mut connections = Vec::new();
        for _ in 0..clients {
            let builder = pd.queue_pair(&send_cq, &recv_cq).qp_type(QueuePairType::XRC_SEND).classic(true);
            let mut sender = builder.send_depth(depth).max_batch(1).build()?;
            let mut target = domain.create_target()?;
            let mut how = InitOptions::default().port(settings.port);
            if let Some(index) = settings.gid_index {
                how = how.gid_index(index);
            }
            let QueuePairAddress { lid, psn, gid, qp_num: recv_qp, .. } = target.init(&how)?;
            let send_qp = sender.init(&how.psn(psn))?.qp_num;
            let local = Address { lid, recv_qp, send_qp, psn, srq: number, gid };
            connections.push(Connection { sender, target, local, remote: None, sent: 0 });
        }
        let len =
            (clients as usize + 1).checked_mul(stride(&settings)).ok_or("too much memory: give a smaller --size")?;
        let memory = pd.allocate(len)?;
        let mut end = End {
            connections: ManuallyDrop::new(connections),
            srq: ManuallyDrop::new(srq),
            memory: ManuallyDrop::new(memory),
            recv_cq,
            send_cq,
            channel,
            settings,
        };
        (0..clients).try_for_each(|slot| end.receive(slot.into()))?;
        Ok(end)
    }

    /// Address of this end for peer `index`.
    pub(crate) fn local(&self, index: usize) -> Result<Address> {
        Ok(self.connections.get(index).ok_or(NO_SUCH_PEER)?.local)
    }

    /// Connects the target to the peer's sender, and the sender to the peer's target.
    pub(crate) fn connect(&mut self, index: usize, remote: Address, is_ethernet: bool) -> Result<()> {
        if is_ethernet && remote.gid == Gid::ZERO {
            return Err("the peer sent no GID, which RoCE needs: start the peer with -g".into());
        }
        let Settings { mtu, sl, .. } = self.settings;
        let connection = self.connections.get_mut(index).ok_or(NO_SUCH_PEER)?;
        let how = ConnectOptions::default().mtu(mtu).service_level(sl);
        let Address { lid, psn, gid, recv_qp, send_qp, .. } = remote;
        let at = |qp_num| QueuePairAddress::new(qp_num, psn, gid, mtu).with_lid(lid).with_rd_atomic(0);
        connection.target.connect(&at(send_qp), &how)?;
        connection.sender.connect(&at(recv_qp), &how)?;
        connection.remote = Some(remote);
        Ok(())
    }

    /// Sends the first message to each peer, as the server does.
    pub(crate) fn start(&mut self) -> Result<()> {
        (0..self.connections.len()).try_for_each(|index| self.send(index))
    }

    /// Runs until all messages are received and sent.
    pub(crate) fn run(&mut self) -> Result<()> {
        let total = u64::from(self.settings.clients) * u64::from(self.settings.tests);
        let (mut received, mut since) = (0, Instant::now());
        while received < total {
            match self.step()? {
                0 => {
                    let left = self.settings.timeout.saturating_sub(since.elapsed());
                    self.wait(left)?;
                }
                count => (received, since) = (received + count, Instant::now()),
            }
        }
        // The last send to each peer is signaled.
        let mut sent = 0;
        while sent < self.settings.clients {
            if let Some(completion) = self.send_cq.poll().next()? {
                completion.ok()?;
                sent += 1;
                continue;
            }
            if since.elapsed() > self.settings.timeout {
                return Err(self.timed_out());
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Answers the messages that have arrived, and returns their number.
    fn step(&mut self) -> Result<u64> {
        let mut count = 0;
        loop {
            let mut poll = self.recv_cq.poll();
            let Some(completion) = poll.next()? else { return Ok(count) };
            completion.ok()?;
            let (slot, by) = (completion.wr_id(), completion.qp_num());
            drop(poll);
            count += 1;
            self.receive(slot)?;
            let found = match self.connections.len() {
                // Several clients share a domain, so any of their targets can receive the message.
                1 => Some(0),
                _ => self.connections.iter().position(|connection| Some(connection.target.number()) == by),
            };
            let index = found.ok_or("a message arrived at an unknown target")?;
            if self.connections.get(index).is_some_and(|connection| connection.sent < self.settings.tests) {
                self.send(index)?;
            }
        }
    }

    fn wait(&mut self, left: Duration) -> Result<()> {
        if left.is_zero() {
            return Err(self.timed_out());
        }
        match &self.channel {
            Some(channel) => {
                // The next poll finds work that completes before the queue is armed again.
                if channel.wait(left)?.is_some() {
                    self.recv_cq.arm(false)?;
                }
            }
            None => std::hint::spin_loop(),
        }
        Ok(())
    }

    /// Sends to the shared receive queue of peer `index`.
    ///
    /// Uses each connection in turn, like the C program. This works because the clients share an XRC domain: a target of any client
    /// can receive for the shared receive queue of every client.
    fn send(&mut self, index: usize) -> Result<()> {
        let (clients, tests) = (self.connections.len(), self.settings.tests);
        let connection = self.connections.get_mut(index).ok_or(NO_SUCH_PEER)?;
        let to = connection.remote.ok_or("the peer is not connected")?.srq;
        let by = (index + connection.sent as usize) % clients;
        connection.sent += 1;
        let wr = WorkRequest::new(index as u64);
        let wr = if connection.sent >= tests { wr.signaled() } else { wr };
        let message = self.slot(clients as u64);
        let sender = &mut self.connections.get_mut(by).ok_or(NO_SUCH_PEER)?.sender;
        let mut batch = sender.send_batch()?;
        // SAFETY: the last slot is only sent, and nothing writes to it. The memory is freed after the queue pair, or leaked.
        unsafe { batch.to_srq(to).send(wr, message) }?;
        Ok(batch.post()?)
    }

    fn receive(&mut self, slot: u64) -> Result<()> {
        let sge = self.slot(slot);
        // SAFETY: one receive at a time uses the slot, and nothing else reads it. The memory is freed after the queue, or leaked.
        Ok(unsafe { self.srq.receive(slot, sge) }?)
    }

    fn slot(&self, slot: u64) -> Sge {
        let address = self.memory.address() + slot * stride(&self.settings) as u64;
        Sge { address, len: self.settings.size, lkey: self.memory.lkey() }
    }

    #[cold]
    fn timed_out(&self) -> Box<dyn Error + Send + Sync> {
        let seconds = self.settings.timeout.as_secs();
        format!("no message within {seconds} s: a peer has stopped, or has another --num_tests").into()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // SAFETY: both are taken only here, and not used afterwards.
        let (connections, srq) =
            unsafe { (ManuallyDrop::take(&mut self.connections), ManuallyDrop::take(&mut self.srq)) };
        let are_destroyed = connections.into_iter().fold(true, |before, Connection { sender, target, .. }| {
            let (sender, target) = (sender.destroy().is_ok(), target.destroy().is_ok());
            before && sender && target
        });
        if srq.destroy().is_ok() && are_destroyed {
            // SAFETY: dropped only here. All queues are destroyed, so the device no longer uses the memory.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}

const NO_SUCH_PEER: &str = "there is no such peer";

/// Distance of two slots. No two messages share a cache line.
fn stride(settings: &Settings) -> usize {
    (settings.size as usize).next_multiple_of(64)
}
