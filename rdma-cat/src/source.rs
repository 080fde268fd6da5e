//! What this end sends.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Read};
use std::ops::Deref;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::mpsc as blocking;

use tokio::sync::mpsc;

use crate::failure::{Failure, Result};
use crate::options::Options;

/// Longest piece in bytes.
const PIECE: usize = 1 << 20;

/// Pieces that a thread reads ahead.
const AHEAD: usize = 3;

/// Reads a file in a thread, so that a slow one does not block the runtime.
#[derive(Debug)]
pub(crate) struct Source {
    name: String,
    /// Length of a regular file.
    pub(crate) len: Option<u64>,
    pieces: mpsc::Receiver<io::Result<Piece>>,
    free: blocking::Sender<Box<[u8]>>,
}

/// Bytes that were read.
#[derive(Debug)]
pub(crate) struct Piece {
    buffer: Box<[u8]>,
    len: usize,
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

impl Source {
    /// The file or standard input, as the options say.
    pub(crate) fn open(options: &Options) -> Result<Self> {
        if let Some(path) = &options.send {
            let len = check(path)?;
            let path = path.clone();
            // Opening a FIFO waits for its writer.
            return Source::start(path.display().to_string(), len, move || File::open(path));
        }
        let name = "standard input".to_owned();
        let input = io::stdin();
        if options.receive.is_some() && input.is_terminal() {
            return Source::start(name, None, || Ok(io::empty()));
        }
        // Without the buffer and the lock of the standard library.
        Source::start(name, None, move || input.as_fd().try_clone_to_owned().map(File::from))
    }

    fn start<R: Read>(
        name: String,
        len: Option<u64>,
        open: impl FnOnce() -> io::Result<R> + Send + 'static,
    ) -> Result<Self> {
        let (filled, pieces) = mpsc::channel(AHEAD);
        let (free, buffers) = blocking::channel();
        for _ in 0..AHEAD {
            // The other end exists.
            let _ = free.send(vec![0; PIECE].into_boxed_slice());
        }
        let read = move || {
            let result = open().and_then(|file| read_ahead(file, &buffers, &filled));
            if let Err(error) = result {
                // Fails if the session has ended.
                let _ = filled.blocking_send(Err(error));
            }
        };
        let thread = std::thread::Builder::new().name("input".to_owned()).spawn(read);
        thread.map_err(|error| Failure::local("cannot start a thread", error))?;
        Ok(Source { name, len, pieces, free })
    }

    /// The next piece; `None` at the end. Dropping the future loses no piece.
    pub(crate) async fn next(&mut self) -> Result<Option<Piece>> {
        let piece = self.pieces.recv().await.transpose();
        piece.map_err(|error| Failure::local(format!("cannot read {}", self.name), error))
    }

    /// Returns the memory of a piece, to read further ones.
    pub(crate) fn recycle(&self, piece: Piece) {
        // Fails at the end of the file, which needs no memory.
        let _ = self.free.send(piece.buffer);
    }
}

/// Checks that a file can be read. Returns the length of a regular one.
pub(crate) fn check(path: &Path) -> Result<Option<u64>> {
    let failed = |error| Failure::local(format!("cannot read {}", path.display()), error);
    let metadata = path.metadata().map_err(failed)?;
    if metadata.is_dir() {
        return Err(failed(ErrorKind::IsADirectory.into()));
    }
    if metadata.is_file() {
        File::open(path).map_err(failed)?;
    }
    Ok(metadata.is_file().then_some(metadata.len()))
}

/// Reads into free buffers, until the end of the file or of the session.
fn read_ahead(
    mut file: impl Read,
    free: &blocking::Receiver<Box<[u8]>>,
    filled: &mpsc::Sender<io::Result<Piece>>,
) -> io::Result<()> {
    while let Ok(mut buffer) = free.recv() {
        let len = loop {
            match file.read(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        if len == 0 || filled.blocking_send(Ok(Piece { buffer, len })).is_err() {
            break;
        }
    }
    Ok(())
}
