//! The receiver of a file.

use std::path::{Path, PathBuf};
use std::time::Instant;

use common::Result;
use rdma_safe::cm::Request;
use rdma_safe::mr::Pages;
use rdma_safe::{Access, Endpoint};

use crate::link::{self, Arrival, Link};
use crate::message::{CHUNK, HELLO, SLOTS, ToReceiver, ToSender, offset, slot};
use crate::progress::{Heartbeat, Progress, Summary};
use crate::store::Store;

/// Directory of the received files.
#[derive(Clone, Debug)]
pub(crate) struct Destination {
    pub(crate) directory: PathBuf,
    /// Replace existing files of the same name.
    pub(crate) overwrite: bool,
}

/// Accepts a connection request and receives a file.
pub(crate) fn receive(request: Request, destination: &Destination, progress: &Progress) -> Result<Summary> {
    if !request.private_data().starts_with(HELLO) {
        request.reject(HELLO)?;
        return Err("a peer that is another program was rejected".into());
    }
    let pd = request.pd()?;
    // Lives as long as the connection, over which the peer writes.
    let memory = pd.expose(Pages::new(offset(SLOTS) as usize)?, Access::REMOTE_WRITE)?;
    let mut prepared = request.prepare(link::endpoint(Endpoint::builder(&pd)))?;
    link::post_receives(&mut prepared)?;
    let mut link = Link::new(prepared.accept(HELLO)?)?;

    let ToReceiver::Offer { name, size } = link.message()? else {
        return Err("a transfer begins with an offer".into());
    };
    let mut transfer = Transfer { link: &mut link, memory, chunk: vec![0; CHUNK as usize], progress };
    let received = transfer.run(&destination.directory, &name, size, destination.overwrite);
    let last = match &received {
        Ok(_) => ToSender::Stored,
        Err(error) => ToSender::Refused { reason: error.to_string().chars().take(150).collect() },
    };
    // Close the connection before freeing the memory: the sender may still be writing to it.
    match link.send(&last) {
        Ok(()) => link.await_close(),
        // The connection has failed.
        Err(_) => drop(link),
    }
    received.map_err(|error| format!("{name:?}: {error}").into())
}

struct Transfer<'a> {
    link: &'a mut Link,
    memory: rdma_safe::ExposedRegion,
    /// Copy of a chunk, which the sender cannot change.
    chunk: Vec<u8>,
    progress: &'a Progress,
}

impl Transfer<'_> {
    fn run(&mut self, directory: &Path, name: &str, size: u64, overwrite: bool) -> Result<Summary> {
        let mut store = Store::open(directory, name, overwrite)?;
        let mut heart = Heartbeat::new();
        let (stored, checksum) = store.read(|_| heart.beat(|| self.link.send(&ToSender::Reading)))?;
        self.link.send(&ToSender::Ready { stored, checksum, memory: self.memory.remote() })?;
        let resumed_at = loop {
            match self.link.message()? {
                ToReceiver::Comparing => {}
                ToReceiver::Start { at } => break at,
                other => return Err(out_of_turn(&other)),
            }
        };
        store.start(resumed_at)?;

        let started = Instant::now();
        let bar = self.progress.bar(name, size, resumed_at);
        let mut number = 0;
        let checksum = loop {
            match self.link.next()? {
                Arrival::Chunk { slot: at, len } if at == slot(number) => {
                    self.store_chunk(&mut store, at, len, size)?;
                    number += 1;
                    bar.set_position(store.at());
                }
                Arrival::Message(message) => match link::parse(&message)? {
                    ToReceiver::Done { checksum } if store.at() == size => break checksum,
                    other => return Err(out_of_turn(&other)),
                },
                Arrival::Chunk { .. } | Arrival::Written(_) => {
                    return Err("a chunk of the file arrived out of turn".into());
                }
            }
        };
        store.finish(&checksum)?;
        bar.finish_and_clear();
        Ok(Summary { name: name.to_owned(), size, resumed_at, elapsed: started.elapsed(), checksum })
    }

    /// Appends a chunk to the file, and reports its slot as free.
    fn store_chunk(&mut self, store: &mut Store, slot: u32, len: u32, size: u64) -> Result<()> {
        let chunk = self.chunk.get_mut(..len as usize).ok_or("a chunk is longer than its slot")?;
        if len == 0 {
            return Err("a chunk is empty".into());
        }
        if store.at() + u64::from(len) > size {
            return Err("the file is longer than its offer".into());
        }
        self.memory.read(offset(slot) as usize, chunk)?;
        store.write(chunk)?;
        self.link.send(&ToSender::Taken)
    }
}

fn out_of_turn(message: &ToReceiver) -> crate::Failure {
    format!("the sender sent {message:?} out of turn").into()
}
