//! The end that the file goes to.

use std::path::{Path, PathBuf};
use std::time::Instant;

use rdma_safe::cm::Request;
use rdma_safe::{Access, Endpoint, Pages};

use crate::Result;
use crate::link::{self, Arrival, Link};
use crate::message::{HELLO, PIECE, PLACES, ToReceiver, ToSender, offset, place};
use crate::progress::{Heartbeat, Progress, Summary};
use crate::store::Store;

/// Where files go, and whether they may replace others.
#[derive(Clone, Debug)]
pub(crate) struct Into {
    pub(crate) directory: PathBuf,
    pub(crate) overwrite: bool,
}

/// Receives a file from who asks.
pub(crate) fn receive(request: Request, into: &Into, progress: &Progress) -> Result<Summary> {
    if !request.private_data().starts_with(HELLO) {
        request.reject(HELLO)?;
        return Err("somebody who does not speak this language has asked, and was refused".into());
    }
    let pd = request.pd()?;
    // Before the peer may write, and for as long as it may.
    let memory = pd.expose(Pages::new(offset(PLACES) as usize)?, Access::REMOTE_WRITE)?;
    let mut prepared = request.prepare(link::endpoint(Endpoint::builder(&pd)))?;
    link::post_receives(&mut prepared)?;
    let mut link = Link::new(prepared.accept(HELLO)?)?;

    let ToReceiver::Offer { name, size } = link.message()? else {
        return Err("a transfer begins with an offer".into());
    };
    let mut transfer = Transfer { link: &mut link, memory, piece: vec![0; PIECE as usize], progress };
    let received = transfer.run(&into.directory, &name, size, into.overwrite);
    let last = match &received {
        Ok(_) => ToSender::Stored,
        Err(error) => ToSender::Refused { reason: error.to_string().chars().take(150).collect() },
    };
    // Either way the connection ends before the memory goes that the sender may be writing to.
    match link.send(&last) {
        Ok(()) => link.await_hang_up(),
        // Where the connection is what has failed, nobody is there to be told.
        Err(_) => drop(link),
    }
    received.map_err(|error| format!("{name:?}: {error}").into())
}

struct Transfer<'a> {
    link: &'a mut Link,
    memory: rdma_safe::ExposedRegion,
    /// A piece that was copied out of its place, where the sender can change it no more.
    piece: Vec<u8>,
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
                Arrival::Piece { place: at, len } if at == place(number) => {
                    self.take(&mut store, at, len, size)?;
                    number += 1;
                    bar.set_position(store.at());
                }
                Arrival::Message(message) => match link::parse(&message)? {
                    ToReceiver::Done { checksum } if store.at() == size => break checksum,
                    other => return Err(out_of_turn(&other)),
                },
                Arrival::Piece { .. } | Arrival::Written(_) => {
                    return Err("a piece of the file came out of turn".into());
                }
            }
        };
        store.finish(&checksum)?;
        bar.finish_and_clear();
        Ok(Summary { name: name.to_owned(), size, resumed_at, took: started.elapsed(), checksum })
    }

    /// Moves a piece to the file, and says that its place is free.
    fn take(&mut self, store: &mut Store, place: u32, len: u32, size: u64) -> Result<()> {
        let piece = self.piece.get_mut(..len as usize).ok_or("a piece that is larger than its place")?;
        if len == 0 {
            return Err("a piece of nothing, of which there could be any number".into());
        }
        if store.at() + u64::from(len) > size {
            return Err("more came than was offered".into());
        }
        self.memory.read(offset(place) as usize, piece)?;
        store.write(piece)?;
        self.link.send(&ToSender::Taken)
    }
}

fn out_of_turn(message: &ToReceiver) -> crate::Failure {
    format!("the sender says {message:?} out of turn").into()
}
