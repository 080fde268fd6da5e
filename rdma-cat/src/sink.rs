//! Where received bytes go.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rdma_msg::Message;
use tokio::sync::{mpsc, oneshot};

use crate::failure::{Failure, Result};

/// Messages that wait for the thread that writes. Each occupies a receive of the stream.
const WAITING: usize = 16;

/// Writes messages in a thread, so that a slow output does not block the runtime.
#[derive(Debug)]
pub(crate) struct Sink {
    name: String,
    messages: mpsc::Sender<Message>,
    /// The result of the thread.
    written: oneshot::Receiver<io::Result<()>>,
    /// Removes an incomplete file on drop.
    partial: Option<Partial>,
}

impl Sink {
    /// A file under a temporary name, or standard output.
    pub(crate) fn open(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else {
            // Without the buffer and the lock of the standard library.
            let file = io::stdout().as_fd().try_clone_to_owned().map(File::from);
            let file = file.map_err(|error| Failure::local("cannot open standard output", error))?;
            return Sink::start(file, "standard output".to_owned(), None);
        };
        let (partial, file) = Partial::create(path)?;
        Sink::start(file, path.display().to_string(), Some(partial))
    }

    fn start(mut file: File, name: String, partial: Option<Partial>) -> Result<Self> {
        let (messages, mut waiting) = mpsc::channel::<Message>(WAITING);
        let (report, written) = oneshot::channel();
        let is_file = partial.is_some();
        let write = move || {
            let mut write = || {
                while let Some(message) = waiting.blocking_recv() {
                    file.write_all(&message)?;
                }
                // A file must not get its name before its bytes are stored.
                if is_file { file.sync_all() } else { Ok(()) }
            };
            // Fails if the session has ended.
            let _ = report.send(write());
        };
        let thread = std::thread::Builder::new().name("output".to_owned()).spawn(write);
        thread.map_err(|error| Failure::local("cannot start a thread", error))?;
        Ok(Sink { name, messages, written, partial })
    }

    /// Passes a message to the thread. Returns whether the thread still writes.
    pub(crate) async fn push(&self, message: Message) -> bool {
        self.messages.send(message).await.is_ok()
    }

    /// Waits until everything is written. Returns the file, which is still to be [kept](Partial::keep).
    pub(crate) async fn finish(self) -> Result<Option<Partial>> {
        let Sink { name, messages, written, partial } = self;
        drop(messages);
        match written.await {
            Ok(Ok(())) => Ok(partial),
            Ok(Err(error)) => Err(Failure::local(format!("cannot write to {name}"), error)),
            Err(_) => Err(Failure::Local(format!("cannot write to {name}: its thread has stopped"))),
        }
    }
}

/// A file under a temporary name, which is removed on drop.
#[derive(Debug)]
pub(crate) struct Partial {
    path: PathBuf,
    target: PathBuf,
}

impl Partial {
    /// Creates a file beside `path`.
    pub(crate) fn create(path: &Path) -> Result<(Self, File)> {
        let failed = |error: io::Error| Failure::local(format!("cannot create {}", path.display()), error);
        // Follows a symbolic link, so that its file is replaced and not the link.
        let target = match fs::metadata(path) {
            Ok(metadata) if metadata.is_file() => path.canonicalize().map_err(failed)?,
            Ok(_) => {
                let message = format!("cannot replace {}: it is not a regular file", path.display());
                return Err(Failure::Local(message));
            }
            Err(_) => path.to_owned(),
        };
        let Some(name) = target.file_name() else {
            return Err(Failure::Local(format!("{} is not the name of a file", path.display())));
        };
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{}.partial", std::process::id()));
        let temporary = target.with_file_name(temporary);
        let file = OpenOptions::new().write(true).create_new(true).open(&temporary).map_err(failed)?;
        Ok((Partial { path: temporary, target }, file))
    }

    /// Gives the file its name.
    pub(crate) fn keep(self) -> Result<()> {
        let Partial { path, target } = &self;
        let renamed = fs::rename(path, target);
        // The drop finds no file to remove.
        renamed.map_err(|error| Failure::local(format!("cannot rename the file to {}", target.display()), error))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // Fails if the file was renamed.
        let _ = fs::remove_file(&self.path);
    }
}
