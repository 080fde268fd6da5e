//! Access to the memory of the program.
//!
//! Like any verbs library, the device relies on the program to keep registered memory mapped until it is deregistered. All accesses
//! are within registered memory, which [`Keys`](super::keys::Keys) checks, and with the device locked, so the memory is not
//! deregistered meanwhile. The program may access exposed memory at the same time, so both sides access it atomically
//! ([`rdma_sys::dma`]).

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::transport::Place;
use crate::wire::Data;

/// Registered memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Memory {
    pub(crate) place: Place,
    /// Whether peers may access the memory, and so the program at any time. A program does not touch other memory while work is in
    /// flight.
    pub(crate) is_exposed: bool,
}

impl Memory {
    /// The memory that starts `offset` bytes later.
    pub(crate) fn at(self, offset: u64) -> Memory {
        Memory { place: Place(self.place.0 + offset), ..self }
    }

    /// Copies `data` to the memory, atomically if it is exposed.
    pub(crate) fn write(self, data: Data<'_>) {
        let to = self.place.0 as usize as *mut u8;
        // SAFETY: the memory is registered and the device is locked, as the module says. `data` is valid for reads. If a peer
        // writes it meanwhile, the copy mixes old and new bytes. The peer could have sent either.
        unsafe {
            if self.is_exposed {
                rdma_sys::dma::write(to, data.as_ptr(), data.len());
            } else {
                to.copy_from_nonoverlapping(data.as_ptr(), data.len());
            }
        }
    }
}

/// Updates an aligned word of registered memory atomically, and returns the old value.
pub(crate) fn update(at: Place, change: &dyn Fn(u64) -> u64) -> u64 {
    let at = at.0 as usize as *mut u64;
    // SAFETY: the memory is registered and the device is locked, as the module says. `Keys::remote` has checked the alignment.
    let word = unsafe { AtomicU64::from_ptr(at) };
    let changed = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |old| Some(change(old)));
    changed.unwrap_or_else(|old| old)
}
