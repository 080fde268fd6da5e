//! The end that counts.

use std::fmt;
use std::net::TcpStream;
use std::time::Duration;

use rdma_safe::{Buffer, Context, Endpoint, RemoteMemory, Work};

use crate::wire::Peer;
use crate::{Options, Result, Stop, endpoint};

/// What a client has counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Counted {
    added: u64,
    swapped: u64,
    /// Swaps that found another number than expected.
    lost: u64,
}

impl Counted {
    pub(crate) fn total(&self) -> u64 {
        self.added + self.swapped
    }
}

impl fmt::Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counted { added, swapped, lost } = self;
        write!(
            f,
            "counted {added} by fetch-and-add and {swapped} by compare-and-swap, which others forestalled {lost} times"
        )
    }
}

/// Counts as the options say, and tells the server.
pub(crate) fn run(context: &Context, stream: TcpStream, options: &Options, stop: &Stop) -> Result<Counted> {
    let mut peer = Peer::new(stream, options.timeout, stop)?;
    let pd = context.alloc_pd()?;
    let mut endpoint = endpoint(&pd, options).build()?;
    peer.say_hello(&endpoint.address())?;
    let (address, counter) = peer.hear_welcome(options.timeout)?;
    endpoint.connect(&address)?;
    let buffer = pd.allocate(size_of::<u64>())?;
    let mut counter = Counter { endpoint, counter, buffer: Some(buffer), timeout: options.timeout };
    let counted = counter.count(options, stop)?;
    peer.report(&counted)?;
    Ok(counted)
}

/// The number in the server's memory.
struct Counter {
    endpoint: Endpoint,
    counter: RemoteMemory,
    /// Where the former number comes to. In flight between posting and completion.
    buffer: Option<Buffer>,
    timeout: Duration,
}

impl Counter {
    fn count(&mut self, options: &Options, stop: &Stop) -> Result<Counted> {
        let mut counted = Counted::default();
        let mut seen = None;
        while counted.added < options.adds {
            stop.check()?;
            let before = self.swap_in(|buffer, counter| Work::fetch_add(buffer, counter, 1))?;
            if seen.is_some_and(|seen| before <= seen) {
                return Err(format!("the number went from {seen:?} to {before}: an addition was lost").into());
            }
            seen = Some(before);
            counted.added += 1;
        }
        // A guess that is wrong is corrected by the first swap.
        let mut expected = seen.map_or(0, |seen| seen + 1);
        while counted.swapped < options.swaps {
            stop.check()?;
            let found = self.swap_in(|buffer, counter| Work::compare_swap(buffer, counter, expected, expected + 1))?;
            if found == expected {
                counted.swapped += 1;
                expected += 1;
            } else {
                counted.lost += 1;
                expected = found;
            }
        }
        Ok(counted)
    }

    /// Does one operation; what the number was before.
    fn swap_in(&mut self, work: impl FnOnce(Buffer, RemoteMemory) -> Work<'static>) -> Result<u64> {
        let buffer = self.buffer.take().ok_or("no buffer")?;
        self.endpoint.post(work(buffer, self.counter))?;
        let done = self.endpoint.wait(self.timeout)?.ok()?;
        let buffer = done.buffer.ok_or("an operation without its buffer")?;
        let before = buffer.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes)).ok_or("a number without 8 bytes")?;
        self.buffer = Some(buffer);
        Ok(before)
    }
}
