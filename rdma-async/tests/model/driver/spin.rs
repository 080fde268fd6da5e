//! A driver that never spins.

/// What a driver does while there are no completions.
pub(crate) struct Idle;

#[derive(Debug)]
pub(super) struct Spin;

impl Spin {
    pub(super) fn new(_: Idle) -> Self {
        Spin
    }

    pub(super) fn worked(&mut self) {}

    pub(super) fn spins(&mut self) -> bool {
        false
    }

    pub(super) fn sleeps(&mut self) {}
}
