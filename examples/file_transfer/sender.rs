//! The sender of a file.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Instant;

use common::Result;
use rdma_safe::cm::{Cause, Connector, PreparedRoute};
use rdma_safe::{Buffer, Endpoint, Error, ProtectionDomain, RemoteMemory};
use sha2::{Digest, Sha256};

use crate::link::{self, Arrival, Link};
use crate::message::{CHUNK, HELLO, SLOTS, ToReceiver, ToSender, offset, slot};
use crate::progress::{Heartbeat, Progress, Summary};
use crate::store::{feed, hexadecimal};

/// Sends the file at `path` to the receiver, under the name `name`.
pub(crate) fn send(path: &Path, name: &str, host: &str, port: u16, progress: &Progress) -> Result<Summary> {
    let with_path = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut file = File::open(path).map_err(with_path)?;
    let metadata = file.metadata().map_err(with_path)?;
    if !metadata.is_file() {
        return Err(format!("{} is not a regular file", path.display()).into());
    }
    let size = metadata.len();

    let route = Connector::new().resolve_first((host, port))?;
    let pd = route.pd().clone();
    let mut prepared = route.prepare(link::endpoint(Endpoint::builder(&pd)))?;
    link::post_receives(&mut prepared)?;
    let mut link = connect(prepared)?;

    link.send(&ToReceiver::Offer { name: name.to_owned(), size })?;
    let (stored, checksum, memory) = loop {
        match link.message()? {
            ToSender::Reading => {}
            ToSender::Ready { stored, checksum, memory } => break (stored, checksum, memory),
            other => return Err(out_of_turn(other)),
        }
    };
    if memory.len != offset(SLOTS) {
        return Err(format!("the receiver has {} bytes for chunks instead of {}", memory.len, offset(SLOTS)).into());
    }

    // Resume if the bytes that the receiver has stored are the beginning of this file.
    let mut hash = Sha256::new();
    let mut at = 0;
    if stored > 0 && stored <= size {
        let mut heartbeat = Heartbeat::new();
        at = feed(&mut hash, &mut file, stored, |_| heartbeat.beat(|| link.send(&ToReceiver::Comparing)))?;
        if hexadecimal(&hash) != checksum {
            (hash, at) = (Sha256::new(), 0);
        }
    }
    file.seek(SeekFrom::Start(at)).map_err(with_path)?;
    link.send(&ToReceiver::Start { at })?;

    let started = Instant::now();
    let bar = progress.bar(name, size, at);
    let mut chunks = Chunks { link: &mut link, memory, free: buffers(&pd)?, written: 0, taken: 0 };
    let mut sent = at;
    while sent < size || chunks.taken < chunks.written {
        while sent < size && chunks.written - chunks.taken < u64::from(SLOTS) {
            let Some(mut chunk) = chunks.free.pop() else { break };
            let len = usize::try_from(size - sent).unwrap_or(usize::MAX).min(chunk.capacity());
            chunk.set_len(len)?;
            file.read_exact(&mut chunk).map_err(|error| match error.kind() {
                ErrorKind::UnexpectedEof => format!("{} was truncated during the transfer", path.display()),
                _ => with_path(error),
            })?;
            hash.update(&chunk[..]);
            chunks.write(chunk)?;
            sent += len as u64;
        }
        chunks.step()?;
        bar.set_position(size.min(at + chunks.taken * u64::from(CHUNK)));
    }
    let checksum = hexadecimal(&hash);
    link.send(&ToReceiver::Done { checksum: checksum.clone() })?;
    loop {
        match link.next()? {
            Arrival::Written(_) => {}
            Arrival::Message(message) => match link::parse(&message)? {
                ToSender::Stored => break,
                other => return Err(out_of_turn(other)),
            },
            Arrival::Chunk { .. } => return Err("the receiver sends chunks of a file".into()),
        }
    }
    bar.finish_and_clear();
    link.close()?;
    Ok(Summary { name: name.to_owned(), size, resumed_at: at, elapsed: started.elapsed(), checksum })
}

fn connect(prepared: PreparedRoute) -> Result<Link> {
    let connection = prepared.connect(HELLO).map_err(|error| match reason_in(&error) {
        Some(reason) => format!("{error}: {reason}").into(),
        None => crate::Failure::from(error),
    })?;
    if !connection.private_data().starts_with(HELLO) {
        return Err("the listener there is another program, or another version of this one".into());
    }
    Link::new(connection)
}

/// The receiver's reason for rejecting the connection.
fn reason_in(error: &Error) -> Option<String> {
    let Some(Cause::Rejected { private_data, .. }) = error.connect_cause() else { return None };
    let reason: Vec<u8> = private_data.iter().copied().take_while(|byte| *byte != 0).collect();
    String::from_utf8(reason).ok().filter(|reason| !reason.is_empty())
}

fn out_of_turn(message: ToSender) -> crate::Failure {
    match message {
        ToSender::Refused { reason } => format!("the receiver rejects the file: {reason}").into(),
        other => format!("the receiver sent {other:?} out of turn").into(),
    }
}

/// Registered buffers, one for each chunk that can be in flight.
fn buffers(pd: &ProtectionDomain) -> Result<Vec<Buffer>> {
    Ok(pd.allocate(SLOTS as usize * CHUNK as usize)?.into_chunks(CHUNK as usize)?)
}

/// The chunks in flight.
struct Chunks<'a> {
    link: &'a mut Link,
    memory: RemoteMemory,
    free: Vec<Buffer>,
    /// Number of chunks written.
    written: u64,
    /// Number of chunks that the receiver has copied. The others occupy its slots.
    taken: u64,
}

impl Chunks<'_> {
    fn write(&mut self, chunk: Buffer) -> Result<()> {
        let slot = slot(self.written);
        let target = self.memory.slice(offset(slot), chunk.len() as u64)?;
        self.link.write(chunk, target, slot)?;
        self.written += 1;
        Ok(())
    }

    /// Waits for one message or completion.
    fn step(&mut self) -> Result<()> {
        match self.link.next()? {
            Arrival::Written(buffer) => self.free.push(buffer),
            Arrival::Message(message) => match link::parse(&message)? {
                ToSender::Taken if self.taken < self.written => self.taken += 1,
                other => return Err(out_of_turn(other)),
            },
            Arrival::Chunk { .. } => return Err("the receiver sends chunks of a file".into()),
        }
        Ok(())
    }
}
