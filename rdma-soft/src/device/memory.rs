//! Reaching the memory of the program that the device is in.
//!
//! Whoever registers memory promises, as to any verbs library, that it stays until it is deregistered; all that happens here is
//! within registered memory ([`Keys`](super::keys::Keys) has looked), and while the device is locked, so that none is deregistered
//! meanwhile. The program may access exposed memory at the same time: then both sides do so atomically ([`rdma_sys::dma`]).

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::transport::Place;

/// Registered memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Memory {
    pub(crate) place: Place,
    /// Peers may access the memory, and the program may at any time. Other memory the program leaves alone while work is in flight.
    pub(crate) is_exposed: bool,
}

impl Memory {
    /// The memory `offset` bytes further on.
    pub(crate) fn at(self, offset: u64) -> Memory {
        Memory { place: Place(self.place.0 + offset), ..self }
    }

    /// Copies `data` to it, atomically if it is exposed.
    pub(crate) fn write(self, data: &[u8]) {
        let to = self.place.0 as usize as *mut u8;
        // SAFETY: as the module says. The data is part of a packet, in private memory of the device.
        unsafe {
            if self.is_exposed {
                rdma_sys::dma::write(to, data.as_ptr(), data.len());
            } else {
                to.copy_from_nonoverlapping(data.as_ptr(), data.len());
            }
        }
    }
}

/// Replaces an aligned word of registered memory; what it was. Atomic also to the program.
pub(crate) fn update(at: Place, change: &dyn Fn(u64) -> u64) -> u64 {
    let at = at.0 as usize as *mut u64;
    // SAFETY: as the module says; it is aligned, as `Keys::remote` has made sure.
    let word = unsafe { AtomicU64::from_ptr(at) };
    let changed = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |old| Some(change(old)));
    changed.unwrap_or_else(|old| old)
}

/// Whether the pages of that range are there, to be read and, if so wished, written; they are brought in, as a device that pins
/// them would. Linux before 5.14 cannot say, and is trusted.
pub(crate) fn is_mapped(address: u64, len: u64, is_written: bool) -> bool {
    let page = page_size();
    let start = address & !(page - 1);
    let Some(end) = address.checked_add(len).and_then(|end| end.checked_next_multiple_of(page)) else { return false };
    let advice = if is_written { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    // SAFETY: populating pages changes no content, and is an error where nothing is mapped.
    let failed = unsafe { libc::madvise(start as usize as *mut libc::c_void, (end - start) as usize, advice) } != 0;
    !failed || std::io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) && !knows_populate()
}

fn knows_populate() -> bool {
    let (byte, page) = (0_u8, page_size());
    let start = (&raw const byte).addr() & !(page as usize - 1);
    // SAFETY: reading in a page, of the stack, changes nothing.
    unsafe { libc::madvise(start as *mut libc::c_void, page as usize, libc::MADV_POPULATE_READ) == 0 }
}

/// Bytes of a page of this machine, a power of two.
fn page_size() -> u64 {
    // SAFETY: it takes a number and gives one.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
}
