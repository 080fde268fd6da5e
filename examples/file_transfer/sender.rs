//! The end that has the file.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Instant;

use rdma_safe::cm::{Cause, Connector, PreparedRoute};
use rdma_safe::{Buffer, Endpoint, Error, ProtectionDomain, RemoteMemory};
use sha2::{Digest, Sha256};

use crate::Result;
use crate::link::{self, Arrival, Link};
use crate::message::{HELLO, PIECE, PLACES, ToReceiver, ToSender, offset, place};
use crate::progress::{Heartbeat, Progress, Summary};
use crate::store::{feed, hexadecimal};

/// Sends the file at `path` under that name to who listens there.
pub(crate) fn send(path: &Path, name: &str, host: &str, port: u16, progress: &Progress) -> Result<Summary> {
    let in_path = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut file = File::open(path).map_err(in_path)?;
    let metadata = file.metadata().map_err(in_path)?;
    if !metadata.is_file() {
        return Err(format!(
            "{} is not a regular file, whose size is known and which can be read again",
            path.display()
        )
        .into());
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
    if memory.len != offset(PLACES) {
        return Err(format!("the receiver has {} bytes for pieces, not {}", memory.len, offset(PLACES)).into());
    }

    // What the receiver has is gone on with if it is the beginning of this file.
    let mut hash = Sha256::new();
    let mut at = 0;
    if stored > 0 && stored <= size {
        let mut heart = Heartbeat::new();
        at = feed(&mut hash, &mut file, stored, |_| heart.beat(|| link.send(&ToReceiver::Comparing)))?;
        if hexadecimal(&hash) != checksum {
            (hash, at) = (Sha256::new(), 0);
        }
    }
    file.seek(SeekFrom::Start(at)).map_err(in_path)?;
    link.send(&ToReceiver::Start { at })?;

    let started = Instant::now();
    let bar = progress.bar(name, size, at);
    let mut pieces = Pieces { link: &mut link, memory, free: places(&pd)?, number: 0, taken: 0 };
    let mut sent = at;
    while sent < size || pieces.taken < pieces.number {
        while sent < size && pieces.number - pieces.taken < u64::from(PLACES) {
            let Some(mut piece) = pieces.free.pop() else { break };
            let len = usize::try_from(size - sent).unwrap_or(usize::MAX).min(piece.capacity());
            piece.set_len(len)?;
            file.read_exact(&mut piece).map_err(|error| match error.kind() {
                ErrorKind::UnexpectedEof => format!("{} has become shorter meanwhile", path.display()),
                _ => in_path(error),
            })?;
            hash.update(&piece[..]);
            pieces.write(piece)?;
            sent += len as u64;
        }
        pieces.step()?;
        bar.set_position(size.min(at + pieces.taken * u64::from(PIECE)));
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
            Arrival::Piece { .. } => return Err("the receiver sends pieces of a file".into()),
        }
    }
    bar.finish_and_clear();
    link.hang_up()?;
    Ok(Summary { name: name.to_owned(), size, resumed_at: at, took: started.elapsed(), checksum })
}

fn connect(prepared: PreparedRoute) -> Result<Link> {
    let connection = prepared.connect(HELLO).map_err(|error| match said_in(&error) {
        Some(words) => format!("{error}: {words}").into(),
        None => crate::Failure::from(error),
    })?;
    if !connection.private_data().starts_with(HELLO) {
        return Err("who listens there is another program, or another version of this one".into());
    }
    Link::new(connection)
}

/// What the receiver has said as it refused.
fn said_in(error: &Error) -> Option<String> {
    let Some(Cause::Rejected { private_data, .. }) = error.connect_cause() else { return None };
    let words: Vec<u8> = private_data.iter().copied().take_while(|byte| *byte != 0).collect();
    String::from_utf8(words).ok().filter(|words| !words.is_empty())
}

fn out_of_turn(message: ToSender) -> crate::Failure {
    match message {
        ToSender::Refused { reason } => format!("the receiver refuses: {reason}").into(),
        other => format!("the receiver says {other:?} out of turn").into(),
    }
}

/// Registered room for as many pieces as can be on their way.
fn places(pd: &ProtectionDomain) -> Result<Vec<Buffer>> {
    Ok(pd.allocate(PLACES as usize * PIECE as usize)?.into_chunks(PIECE as usize)?)
}

/// The pieces that are on their way.
struct Pieces<'a> {
    link: &'a mut Link,
    memory: RemoteMemory,
    free: Vec<Buffer>,
    /// Of the next,
    number: u64,
    /// and of the one that the receiver takes next: what lies between fills its places.
    taken: u64,
}

impl Pieces<'_> {
    fn write(&mut self, piece: Buffer) -> Result<()> {
        let place = place(self.number);
        let target = self.memory.slice(offset(place), piece.len() as u64)?;
        self.link.write(piece, target, place)?;
        self.number += 1;
        Ok(())
    }

    /// Waits for something to happen.
    fn step(&mut self) -> Result<()> {
        match self.link.next()? {
            Arrival::Written(piece) => self.free.push(piece),
            Arrival::Message(message) => match link::parse(&message)? {
                ToSender::Taken if self.taken < self.number => self.taken += 1,
                other => return Err(out_of_turn(other)),
            },
            Arrival::Piece { .. } => return Err("the receiver sends pieces of a file".into()),
        }
        Ok(())
    }
}
