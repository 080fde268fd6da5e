//! Counters of the messages of the kernel's connection manager.

use std::fs;

/// A counter, since its creation.
pub(super) struct Counter {
    file: String,
    before: u64,
}

impl Counter {
    /// Messages that were sent: `req`, `mra`, `rej`, `rep`, `rtu`, `dreq`, `drep`, `sidr_req` or `sidr_rep`.
    pub(super) fn sent(message: &str) -> Counter {
        Counter::new("cm_tx_msgs", message)
    }

    /// Messages that were received.
    pub(super) fn received(message: &str) -> Counter {
        Counter::new("cm_rx_msgs", message)
    }

    fn new(group: &str, message: &str) -> Counter {
        let file = format!("/sys/class/infiniband/rxe0/ports/1/{group}/{message}");
        let before = read(&file);
        Counter { file, before }
    }

    /// Number of messages since the counter was created.
    pub(super) fn grown(&self) -> u64 {
        read(&self.file) - self.before
    }
}

fn read(file: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file}: {error}"));
    text.trim().parse().unwrap_or_else(|_| panic!("{file}: {text}"))
}
