//! What one end has, and does: messages that go back and forth between shared receive queues.

use std::error::Error;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use rdma_safe::{
    Buffer, CompletionChannel, CompletionQueue, ConnectOptions, Context, Gid, InitOptions, Mtu, QueuePair,
    QueuePairAddress, QueuePairType, Sge, SharedReceiveQueue, WorkRequest, XrcDomain, XrcTarget,
};

use super::address::Address;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How to play.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
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
    /// For the next message.
    pub(crate) timeout: Duration,
}

/// One end: a shared receive queue, and for each peer a queue pair that sends and a target that receives.
pub(crate) struct End {
    connections: ManuallyDrop<Vec<Connection>>,
    srq: ManuallyDrop<SharedReceiveQueue>,
    /// A place for each receive, and one that is sent. It goes when nothing can use it any more, or not at all.
    memory: ManuallyDrop<Buffer>,
    recv_cq: CompletionQueue,
    send_cq: CompletionQueue,
    channel: Option<CompletionChannel>,
    rules: Rules,
}

struct Connection {
    sender: QueuePair,
    target: XrcTarget,
    local: Address,
    remote: Option<Address>,
    /// Messages that have gone to this peer, by whichever connection.
    sent: u32,
}

impl End {
    /// Makes all of it in `domain`, and posts a receive for each peer.
    pub(crate) fn new(context: &Context, domain: &XrcDomain, rules: Rules) -> Result<Self> {
        let Rules { clients, tests, .. } = rules;
        let pd = context.alloc_pd()?;
        let channel = if rules.events { Some(context.create_channel()?) } else { None };
        let mut recv_cq = context.completion_queue(clients).classic(true);
        if let Some(channel) = &channel {
            recv_cq = recv_cq.channel(channel);
        }
        let mut recv_cq = recv_cq.build()?;
        if rules.events {
            recv_cq.arm(false)?;
        }
        let send_cq = context.completion_queue(clients).classic(true).build()?;
        let srq = domain.shared_receive_queue(&pd, &recv_cq, clients).build()?;
        let number = srq.xrc_number().ok_or("a shared receive queue without a number")?;
        let depth = clients.checked_mul(tests).ok_or("too many messages: give smaller --clients or --num-tests")?;
        let mut connections = Vec::new();
        for _ in 0..clients {
            let builder = pd.queue_pair(&send_cq, &recv_cq).qp_type(QueuePairType::XRC_SEND).classic(true);
            let mut sender = builder.send_depth(depth).max_batch(1).build()?;
            let mut target = domain.create_target()?;
            let mut how = InitOptions::default().port(rules.port);
            if let Some(index) = rules.gid_index {
                how = how.gid_index(index);
            }
            let QueuePairAddress { lid, psn, gid, qp_num: recv_qp, .. } = target.init(&how)?;
            let send_qp = sender.init(&how.psn(psn))?.qp_num;
            let local = Address { lid, recv_qp, send_qp, psn, srq: number, gid };
            connections.push(Connection { sender, target, local, remote: None, sent: 0 });
        }
        let len = (clients as usize + 1).checked_mul(stride(&rules)).ok_or("too much memory: give a smaller --size")?;
        let memory = pd.allocate(len)?;
        let mut end = End {
            connections: ManuallyDrop::new(connections),
            srq: ManuallyDrop::new(srq),
            memory: ManuallyDrop::new(memory),
            recv_cq,
            send_cq,
            channel,
            rules,
        };
        (0..clients).try_for_each(|slot| end.receive(slot.into()))?;
        Ok(end)
    }

    /// Where peer `index` finds this end.
    pub(crate) fn local(&self, index: usize) -> Result<Address> {
        Ok(self.connections.get(index).ok_or(NO_SUCH_PEER)?.local)
    }

    /// Connects to peer `index`: what it sends goes to our target, and what we send to its.
    pub(crate) fn connect(&mut self, index: usize, remote: Address, is_ethernet: bool) -> Result<()> {
        if is_ethernet && remote.gid == Gid::ZERO {
            return Err("the peer sent no GID, which RoCE cannot do without: give the peer one with -g".into());
        }
        let Rules { mtu, sl, .. } = self.rules;
        let connection = self.connections.get_mut(index).ok_or(NO_SUCH_PEER)?;
        let how = ConnectOptions::default().mtu(mtu).service_level(sl);
        let Address { lid, psn, gid, recv_qp, send_qp, .. } = remote;
        let at = |qp_num| QueuePairAddress { qp_num, psn, lid, gid, mtu, rd_atomic: 0 };
        connection.target.connect(&at(send_qp), &how)?;
        connection.sender.connect(&at(recv_qp), &how)?;
        connection.remote = Some(remote);
        Ok(())
    }

    /// Sends the first message to each peer: what the server does.
    pub(crate) fn begin(&mut self) -> Result<()> {
        (0..self.connections.len()).try_for_each(|index| self.send(index))
    }

    /// Plays until all messages have come and gone.
    pub(crate) fn play(&mut self) -> Result<()> {
        let total = u64::from(self.rules.clients) * u64::from(self.rules.tests);
        let (mut received, mut since) = (0, Instant::now());
        while received < total {
            match self.step()? {
                0 => {
                    let left = self.rules.timeout.saturating_sub(since.elapsed());
                    self.wait(left)?;
                }
                count => (received, since) = (received + count, Instant::now()),
            }
        }
        // The last send to each peer.
        let mut sent = 0;
        while sent < self.rules.clients {
            if let Some(completion) = self.send_cq.poll().next()? {
                completion.ok()?;
                sent += 1;
                continue;
            }
            if since.elapsed() > self.rules.timeout {
                return Err(self.timed_out());
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Answers what has arrived; returns how many messages that is.
    pub(crate) fn step(&mut self) -> Result<u64> {
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
                // Of several clients in one domain: the message may have come by the target of another one.
                1 => Some(0),
                _ => self.connections.iter().position(|connection| Some(connection.target.number()) == by),
            };
            let index = found.ok_or("a message came by a target that is not ours")?;
            if self.connections.get(index).is_some_and(|connection| connection.sent < self.rules.tests) {
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
                // What completes before the queue is armed again is found by the next look at it.
                if channel.wait(left)?.is_some() {
                    self.recv_cq.arm(false)?;
                }
            }
            None => std::hint::spin_loop(),
        }
        Ok(())
    }

    /// Sends to the queue of peer `index`. As C does, by each connection in turn: with several clients, their queues are in one
    /// domain, and any of their targets leads to all of them.
    fn send(&mut self, index: usize) -> Result<()> {
        let (clients, tests) = (self.connections.len(), self.rules.tests);
        let connection = self.connections.get_mut(index).ok_or(NO_SUCH_PEER)?;
        let to = connection.remote.ok_or("the peer is not connected")?.srq;
        let by = (index + connection.sent as usize) % clients;
        connection.sent += 1;
        let wr = WorkRequest::new(index as u64);
        let wr = if connection.sent >= tests { wr.signaled() } else { wr };
        let message = self.place(clients as u64);
        let sender = &mut self.connections.get_mut(by).ok_or(NO_SUCH_PEER)?.sender;
        let mut batch = sender.send_batch()?;
        // SAFETY: the last place is only ever sent: nobody writes to it. The memory goes after the queue pair, or not at all.
        unsafe { batch.to_srq(to).send(wr, message) }?;
        Ok(batch.post()?)
    }

    fn receive(&mut self, slot: u64) -> Result<()> {
        let place = self.place(slot);
        // SAFETY: one receive at a time has the place, which nobody else looks at. The memory goes after the queue, or not at all.
        Ok(unsafe { self.srq.receive(slot, place) }?)
    }

    fn place(&self, slot: u64) -> Sge {
        let address = self.memory.address() + slot * stride(&self.rules) as u64;
        Sge { address, len: self.rules.size, lkey: self.memory.lkey() }
    }

    #[cold]
    fn timed_out(&self) -> Box<dyn Error> {
        let seconds = self.rules.timeout.as_secs();
        format!("no message within {seconds} s: a peer has stopped, or was given another --num-tests").into()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // SAFETY: taken here only, and not used after.
        let (connections, srq) =
            unsafe { (ManuallyDrop::take(&mut self.connections), ManuallyDrop::take(&mut self.srq)) };
        let gone = connections.into_iter().fold(true, |gone, Connection { sender, target, .. }| {
            let (sender, target) = (sender.destroy().is_ok(), target.destroy().is_ok());
            gone && sender && target
        });
        if srq.destroy().is_ok() && gone {
            // SAFETY: dropped here only, and all that the device could use it for has ended.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}

const NO_SUCH_PEER: &str = "there is no such peer";

/// No two messages share a cache line.
fn stride(rules: &Rules) -> usize {
    (rules.size as usize).next_multiple_of(64)
}
