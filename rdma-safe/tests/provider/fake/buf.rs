//! Memory that the provider allocates.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{c_int, c_void};

use rdma_sys::*;

use super::state::{Alloc, Ptr, State, enter, null, own, set_errno};

pub(super) struct Buf {
    alloc: Alloc,
    pub(super) pd: usize,
    pub(super) is_dmabuf: bool,
    memory: Ptr<u8>,
    layout: Layout,
}

/// Allocates uninitialized memory, so Miri reports reads of it. Without Miri the memory is filled with a value that is not 0.
pub(super) unsafe extern "C" fn alloc_buf(pd: *mut ibv_pd, len: usize, buf: *mut *mut ibv_buf) -> *mut c_void {
    enter(pd, "ibv_alloc_buf", |state, device| {
        if let Some(errno) = state.fault("ibv_alloc_buf") {
            return null(errno);
        }
        if state.pd(pd.addr(), "ibv_alloc_buf").is_none() || len == 0 {
            return null(libc::EINVAL);
        }
        if len > 1 << 30 {
            return null(libc::ENOMEM);
        }
        let layout = Layout::from_size_align(len, 4096).unwrap();
        let memory = unsafe { alloc(layout) };
        if !cfg!(miri) {
            unsafe { memory.write_bytes(0xd5, len) };
        }
        // The contents of `ibv_buf` are private to the library.
        let (alloc, raw) = Alloc::new(0_u64);
        own(raw, device);
        let is_dmabuf = state.config.confidential && state.is_unprotected(pd.addr());
        state.bufs.insert(raw.addr(), Buf { alloc, pd: pd.addr(), is_dmabuf, memory: Ptr(memory), layout });
        unsafe { *buf = raw.cast() };
        memory.cast()
    })
}

pub(super) unsafe extern "C" fn free_buf(raw: *mut ibv_buf) {
    enter(raw, "ibv_free_buf", |state, _| {
        let Some(buf) = state.buf(raw.addr(), "ibv_free_buf") else { return };
        let pd = buf.pd;
        if state.mrs.values().any(|mr| mr.buf == Some(raw.addr())) {
            state.violation("ibv_free_buf of memory that is registered");
            return;
        }
        // The library takes the context from the domain.
        if state.pd(pd, "ibv_free_buf").is_none() {
            return;
        }
        let buf = state.bufs.remove(&raw.addr()).unwrap();
        unsafe { dealloc(buf.memory.0, buf.layout) };
        state.retire(buf.alloc);
    });
}

/// Returns some descriptor of this process; the tests do not use the descriptor as a DMA-BUF.
pub(super) unsafe extern "C" fn export_buf_dmabuf_fd(raw: *mut ibv_buf) -> c_int {
    enter(raw, "ibv_export_buf_dmabuf_fd", |state, _| {
        let errno = match state.fault("ibv_export_buf_dmabuf_fd") {
            Some(errno) => errno,
            None => match state.buf(raw.addr(), "ibv_export_buf_dmabuf_fd") {
                Some(buf) if buf.is_dmabuf => return unsafe { libc::dup(0) },
                Some(_) => libc::ENODATA,
                None => libc::EINVAL,
            },
        };
        set_errno(errno);
        -1
    })
}

impl State {
    /// Applies the library's checks before it registers provider memory; returns whether the memory is a DMA-BUF.
    pub(super) fn check_buf(
        &mut self,
        raw: *mut ibv_buf,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        len: usize,
    ) -> Result<bool, c_int> {
        let buf = self.buf(raw.addr(), "registration").ok_or(libc::EINVAL)?;
        let offset = addr.addr().checked_sub(buf.memory.0.addr()).ok_or(libc::EINVAL)?;
        match buf.pd == pd.addr() && offset <= buf.layout.size() && len <= buf.layout.size() - offset {
            true => Ok(buf.is_dmabuf),
            false => Err(libc::EINVAL),
        }
    }
}
