//! Processes that do not outlive their parent.

use std::process::Child;

/// Kills the process if it is still running.
pub(crate) struct Ended(pub(crate) Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
