//! Memory of removed endpoints that is not returned.

use crate::Buffer;
use crate::mr::{Gather, Piece};

/// Memory of removed endpoints: parts of lists that are not buffers, and buffers of removals that have failed.
#[derive(Default)]
pub(super) struct Leftovers {
    /// `None` if they are dropped at once.
    kept: Option<Vec<Piece>>,
}

impl Leftovers {
    /// From now on, they are kept until they are taken.
    pub(super) fn keep(&mut self) {
        self.kept = Some(Vec::new());
    }

    pub(super) fn take(&mut self) -> Vec<Piece> {
        self.kept.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Keeps or drops buffers.
    pub(super) fn discard(&mut self, buffers: Vec<Buffer>) {
        if let Some(kept) = &mut self.kept {
            kept.extend(buffers.into_iter().map(Piece::Buffer));
        }
    }

    /// Adds the buffers of lists to `buffers`, and keeps or drops everything else in them.
    pub(super) fn sort(&mut self, lists: impl IntoIterator<Item = Gather>, buffers: &mut Vec<Buffer>) {
        for piece in lists.into_iter().flatten() {
            match (piece, &mut self.kept) {
                (Piece::Buffer(buffer), _) => buffers.push(buffer),
                (shared, Some(kept)) => kept.push(shared),
                (_, None) => {}
            }
        }
    }
}
