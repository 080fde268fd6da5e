//! The client, which increments the number.

use std::fmt;
use std::net::TcpStream;
use std::time::Duration;

use common::Result;
use rdma_safe::{Buffer, Context, Endpoint, RemoteMemory, Work};

use crate::wire::Peer;
use crate::{Options, Stop, endpoint};

/// Successful increments of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Counted {
    added: u64,
    swapped: u64,
    /// Swaps that found another number than expected.
    failed: u64,
}

impl Counted {
    pub(crate) fn total(&self) -> u64 {
        self.added + self.swapped
    }
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counted { added, swapped, failed } = self;
        write!(f, "counted {added} by fetch-and-add and {swapped} by compare-and-swap, with {failed} failed swaps")
    }
}

/// Increments the number as the options say, and reports to the server.
pub(crate) fn run(context: &Context, stream: TcpStream, options: &Options, stop: &Stop) -> Result<Counted> {
    let mut peer = Peer::new(stream, options.timeout, stop)?;
    let pd = context.alloc_pd()?;
    let mut endpoint = endpoint(&pd, options).build()?;
    peer.send_hello(&endpoint.address())?;
    let (address, counter) = peer.receive_welcome(options.timeout)?;
    endpoint.connect(&address)?;
    let buffer = pd.allocate(size_of::<u64>())?;
    let mut counter = Counter { endpoint, counter, buffer: Some(buffer), timeout: options.timeout };
    let counted = counter.count(options, stop)?;
    peer.send_report(&counted)?;
    Ok(counted)
}

/// The number in the server's memory.
struct Counter {
    endpoint: Endpoint,
    counter: RemoteMemory,
    /// Buffer for the previous number. `None` while an operation is in flight.
    buffer: Option<Buffer>,
    timeout: Duration,
}

impl Counter {
    fn count(&mut self, options: &Options, stop: &Stop) -> Result<Counted> {
        let mut counted = Counted::default();
        let mut seen = None;
        while counted.added < options.adds {
            stop.check()?;
            let before = self.operate(|buffer, counter| Work::fetch_add(buffer, counter, 1))?;
            if let Some(seen) = seen.filter(|seen| before <= *seen) {
                return Err(format!("the number went from {seen} to {before}: an increment was lost").into());
            }
            seen = Some(before);
            counted.added += 1;
        }
        // An estimate. If it is wrong, the first swap fails and returns the current number.
        let mut expected = seen.map_or(0, |seen| seen + 1);
        while counted.swapped < options.swaps {
            stop.check()?;
            let found = self.operate(|buffer, counter| Work::compare_swap(buffer, counter, expected, expected + 1))?;
            if found == expected {
                counted.swapped += 1;
                expected += 1;
            } else {
                counted.failed += 1;
                expected = found;
            }
        }
        Ok(counted)
    }

    /// Does one atomic operation. Returns the previous number.
    fn operate(&mut self, work: impl FnOnce(Buffer, RemoteMemory) -> Work<'static>) -> Result<u64> {
        let buffer = self.buffer.take().ok_or("no buffer")?;
        self.endpoint.post(work(buffer, self.counter))?;
        let done = self.endpoint.wait(self.timeout)?.ok()?;
        let buffer = done.buffer.ok_or("the operation returned no buffer")?;
        let before = buffer
            .first_chunk()
            .map(|bytes| u64::from_ne_bytes(*bytes))
            .ok_or("the buffer is shorter than a number")?;
        self.buffer = Some(buffer);
        Ok(before)
    }
}
