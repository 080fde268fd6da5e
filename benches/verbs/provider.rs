//! Sets up the device and the objects to measure.

use std::error::Error;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion};
use rdma_safe::mr::Pages;
use rdma_safe::{
    Access, Buffer, CompletionQueue, ConnectOptions, Device, Endpoint, ExposedRegion, InitOptions, ProtectionDomain,
    QueuePair, Remote, Sge, WorkRequest,
};

pub(crate) type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// Work requests in a batch.
pub(crate) const BATCH: u32 = 16;

/// Bytes of a message.
const LEN: usize = 64;

/// The stub, or the device that `RDMA_DEVICE` names.
pub(crate) struct Provider {
    pub(crate) pd: ProtectionDomain,
    port: u8,
    gid_index: Option<u32>,
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl Provider {
    pub(crate) fn new() -> Result<Self> {
        let device = match variable("RDMA_DEVICE") {
            Some(name) => {
                // Installs soft0 if that is the name.
                _ = rdma_safe::soft::install_by_default();
                Device::by_name(&name)?
            }
            None => {
                rdma_stub::install()?;
                Device::first()?
            }
        };
        let port = variable("RDMA_PORT").map_or(Ok(1), |port| port.parse())?;
        let gid_index = variable("RDMA_GID_INDEX").map(|index| index.parse()).transpose()?;
        Ok(Provider { pd: device.open()?.alloc_pd()?, port, gid_index })
    }

    /// A group of benchmarks whose names begin with the device and `what`.
    pub(crate) fn group<'c>(&self, criterion: &'c mut Criterion, what: &str) -> BenchmarkGroup<'c, WallTime> {
        criterion.benchmark_group(format!("{}/{what}", self.pd.context().device_name()))
    }

    fn endpoint(&self, classic: bool) -> Result<Endpoint> {
        let builder = Endpoint::builder(&self.pd).port(self.port).send_depth(64).recv_depth(64);
        let builder = builder.classic_post(classic).classic_poll(classic);
        Ok(match self.gid_index {
            Some(index) => builder.gid_index(index).build()?,
            None => builder.build()?,
        })
    }

    /// Two endpoints that are connected to each other.
    pub(crate) fn pair(&self, classic: bool) -> Result<(Endpoint, Endpoint)> {
        let (mut a, mut b) = (self.endpoint(classic)?, self.endpoint(classic)?);
        a.connect(&b.address())?;
        b.connect(&a.address())?;
        Ok((a, b))
    }

    pub(crate) fn owned(&self, classic: bool) -> Result<Owned> {
        let (a, mut b) = self.pair(classic)?;
        for buffer in self.pd.allocate(LEN * 64)?.into_chunks(LEN)? {
            b.receive(buffer)?;
        }
        Ok(Owned { a, b, buffer: Some(self.pd.allocate(LEN)?) })
    }

    pub(crate) fn raw(&self, classic: bool) -> Result<Raw> {
        let mut init = InitOptions::default().port(self.port).peer_access(Access::REMOTE);
        if let Some(index) = self.gid_index {
            init = init.gid_index(index);
        }
        let end = || -> Result<_> {
            let cq = self.pd.context().completion_queue(64).classic(classic).build()?;
            let qp = self.pd.queue_pair(&cq, &cq).send_depth(64).recv_depth(1).max_batch(BATCH).classic(classic);
            let mut qp = qp.build()?;
            let address = qp.init(&init)?;
            Ok((qp, cq, address))
        };
        let (mut qp, cq, address) = end()?;
        let (mut peer, _, peer_address) = end()?;
        qp.connect(&peer_address, &ConnectOptions::default())?;
        peer.connect(&address, &ConnectOptions::default())?;
        let source = self.pd.allocate(LEN)?;
        let target = self.pd.expose(Pages::new(LEN)?, Access::REMOTE)?;
        let remote = Remote { address: target.remote().address, rkey: target.remote().rkey };
        Ok(Raw { qp, cq, sge: source.sge(), remote, _peer: peer, _source: source, _target: target })
    }
}

/// Objects of the raw API. Fields are dropped in order, so queue pairs are dropped before the memory that they access.
pub(crate) struct Raw {
    qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    sge: Sge,
    remote: Remote,
    _peer: QueuePair,
    _source: Buffer,
    _target: ExposedRegion,
}

impl Raw {
    /// Posts `count` writes with one doorbell and polls for their completions.
    pub(crate) fn write(&mut self, count: u32) -> Result<u64> {
        let mut batch = self.qp.send_batch()?;
        for id in 0..u64::from(count) {
            // SAFETY: both regions outlive the queue pairs, and the program does not access their bytes.
            unsafe { batch.write(WorkRequest::new(id).signaled(), self.remote, self.sge)? }
        }
        batch.post()?;
        let (mut taken, mut sum) = (0, 0);
        while taken < count {
            let mut poll = self.cq.poll();
            while let Some(completion) = poll.next()? {
                completion.ok()?;
                sum += completion.wr_id();
                taken += 1;
            }
        }
        Ok(sum)
    }
}

/// Objects of the owned API.
pub(crate) struct Owned {
    pub(crate) a: Endpoint,
    b: Endpoint,
    buffer: Option<Buffer>,
}

impl Owned {
    /// Sends a buffer and waits for its completion, and reposts completed receives at the other end.
    pub(crate) fn send(&mut self) -> Result<()> {
        let buffer = self.buffer.take().ok_or("the previous send did not complete")?;
        self.a.send(buffer)?;
        while self.buffer.is_none() {
            if let Some(done) = self.a.poll()? {
                self.buffer = done.ok()?.buffer;
            }
        }
        while let Some(done) = self.b.poll()? {
            self.b.receive(done.ok()?.buffer.ok_or("the receive has no buffer")?)?;
        }
        Ok(())
    }
}
