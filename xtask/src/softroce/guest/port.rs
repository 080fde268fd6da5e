//! The virtio serial port to the host.

use std::fs::{self, File, OpenOptions};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};

use super::DEADLINE;
use crate::softroce::frame::{Frame, PORT};
use crate::wait;

/// Sends frames to the host, from any thread.
#[derive(Clone, Debug)]
pub(super) struct Port(Arc<Mutex<File>>);

impl Port {
    /// Waits until the port exists and opens it.
    pub(super) fn open() -> Result<Self> {
        // The device node appears shortly after the entry in sysfs.
        let opened = wait::until(DEADLINE, || OpenOptions::new().write(true).open(find()?).ok());
        let file = opened.with_context(|| format!("no virtio serial port named {PORT}"))?;
        Ok(Self(Arc::new(Mutex::new(file))))
    }

    /// Sends `frame` after all earlier frames.
    pub(super) fn send(&self, frame: &Frame) -> Result<()> {
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(frame.write_to(&mut *file)?)
    }
}

fn find() -> Option<PathBuf> {
    for entry in fs::read_dir("/sys/class/virtio-ports").ok()?.flatten() {
        let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim_end() == PORT {
            return Some(PathBuf::from("/dev").join(entry.file_name()));
        }
    }
    None
}
