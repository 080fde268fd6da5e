//! Device memory: bytes that only copies and zero-based regions can access.

use std::ffi::{c_int, c_uint, c_void};

use rdma_sys::*;

use super::memory::{Mr, add, read, write};
use super::state::{Alloc, State, enter, null, own, set_errno};

/// Bytes of device memory of each device.
pub(super) const SIZE: u64 = 4096;

pub(super) struct Dm {
    pub(super) alloc: Alloc,
    pub(super) context: usize,
    handle: u32,
    /// The bytes of this memory, or of the memory that was imported.
    bytes: Bytes,
    imported: bool,
}

#[derive(Clone, Copy)]
struct Bytes {
    memory: super::state::Ptr<u8>,
    len: usize,
}

pub(super) unsafe extern "C" fn alloc_dm(context: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm {
    enter(context, "alloc_dm", |state, device| {
        let attr = unsafe { *attr };
        if let Some(errno) = state.fault("alloc_dm") {
            return null(errno);
        }
        if attr.comp_mask != 0 || attr.log_align_req > 12 {
            return null(libc::EINVAL);
        }
        if attr.length as u64 > SIZE {
            return null(libc::ENOMEM);
        }
        let memory = Box::into_raw(vec![0xd5_u8; attr.length].into_boxed_slice()).cast();
        let handle = state.handle();
        state.add_dm(device, context, handle, Bytes { memory: super::state::Ptr(memory), len: attr.length }, false)
    })
}

pub(super) unsafe extern "C" fn import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm {
    enter(context, "ibv_import_dm", |state, device| {
        if let Some(errno) = state.fault("ibv_import_dm") {
            return null(errno);
        }
        let Some(bytes) = state.dms.values().find(|dm| dm.handle == handle && !dm.imported).map(|dm| dm.bytes) else {
            return null(libc::ENOENT);
        };
        state.add_dm(device, context, handle, bytes, true)
    })
}

pub(super) unsafe extern "C" fn free_dm(raw: *mut ibv_dm) -> c_int {
    enter(raw, "free_dm", |state, _| {
        if let Some(errno) = state.fault("free_dm") {
            return errno;
        }
        state.end_dm(raw, false, "free_dm")
    })
}

pub(super) unsafe extern "C" fn unimport_dm(raw: *mut ibv_dm) {
    enter(raw, "ibv_unimport_dm", |state, _| state.end_dm(raw, true, "ibv_unimport_dm"));
}

unsafe extern "C" fn memcpy_to_dm(raw: *mut ibv_dm, offset: u64, host: *const c_void, len: usize) -> c_int {
    enter(raw, "memcpy_to_dm", |state, _| match state.dm_bytes(raw, offset, len, "memcpy_to_dm") {
        Ok(to) => unsafe {
            write(to, &read(host.cast(), len));
            0
        },
        Err(errno) => errno,
    })
}

unsafe extern "C" fn memcpy_from_dm(host: *mut c_void, raw: *mut ibv_dm, offset: u64, len: usize) -> c_int {
    enter(raw, "memcpy_from_dm", |state, _| match state.dm_bytes(raw, offset, len, "memcpy_from_dm") {
        Ok(from) => unsafe {
            write(host.cast(), &read(from, len));
            0
        },
        Err(errno) => errno,
    })
}

pub(super) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    raw: *mut ibv_dm,
    offset: u64,
    len: usize,
    access: c_uint,
) -> *mut ibv_mr {
    enter(pd, "reg_dm_mr", |state, device| {
        if let Some(errno) = state.fault("reg_dm_mr") {
            return null(errno);
        }
        if state.pd(pd.addr(), "reg_dm_mr").is_none() || access & IBV_ACCESS_ZERO_BASED.0 == 0 {
            return null(libc::EINVAL);
        }
        match state.dm_bytes(raw, offset, len, "reg_dm_mr") {
            Ok(memory) => {
                let mr = add(state, device, pd, memory, len, access, false);
                let of: &mut Mr = state.mrs.get_mut(&mr.addr()).unwrap();
                (of.iova, of.dm) = (0, Some(raw.addr()));
                mr
            }
            Err(errno) => null(errno),
        }
    })
}

/// Returns some descriptor of this process; the tests do not use the descriptor as a DMA-BUF.
pub(super) unsafe extern "C" fn dm_export_dmabuf_fd(raw: *mut ibv_dm) -> c_int {
    enter(raw, "ibv_dm_export_dmabuf_fd", |state, _| {
        if let Some(errno) = state.fault("ibv_dm_export_dmabuf_fd") {
            set_errno(errno);
            return -1;
        }
        if state.dm(raw.addr(), "ibv_dm_export_dmabuf_fd").is_none() {
            set_errno(libc::EINVAL);
            return -1;
        }
        unsafe { libc::dup(0) }
    })
}

impl State {
    fn add_dm(
        &mut self,
        device: &std::sync::Arc<super::state::Device>,
        context: *mut ibv_context,
        handle: u32,
        bytes: Bytes,
        imported: bool,
    ) -> *mut ibv_dm {
        let copies = self.config.device_memory_copies;
        let (alloc, raw) = Alloc::new(ibv_dm {
            context,
            memcpy_to_dm: copies.then_some(memcpy_to_dm as _),
            memcpy_from_dm: copies.then_some(memcpy_from_dm as _),
            comp_mask: 0,
            handle,
        });
        own(raw, device);
        self.dms.insert(raw.addr(), Dm { alloc, context: context.addr(), handle, bytes, imported });
        raw
    }

    fn end_dm(&mut self, raw: *mut ibv_dm, imported: bool, verb: &'static str) -> c_int {
        let Some(dm) = self.dm(raw.addr(), verb) else { return libc::EINVAL };
        let (Bytes { memory, len }, handle) = (dm.bytes, dm.handle);
        if dm.imported != imported {
            let origin = if imported { "allocated" } else { "imported" };
            self.violation(format!("{verb} of {origin} device memory"));
            return libc::EINVAL;
        }
        if self.mrs.values().any(|mr| mr.dm == Some(raw.addr())) {
            self.violation(format!("{verb} of device memory that is registered"));
            return libc::EBUSY;
        }
        if !imported {
            if self.dms.values().any(|dm| dm.handle == handle && dm.imported) {
                self.violation(format!("{verb} of device memory with imports"));
            }
            drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(memory.0, len)) });
        }
        let dm = self.dms.remove(&raw.addr()).unwrap();
        self.retire(dm.alloc);
        0
    }

    fn dm_bytes(&mut self, raw: *mut ibv_dm, offset: u64, len: usize, verb: &'static str) -> Result<*mut u8, c_int> {
        if let Some(errno) = self.fault(verb) {
            return Err(errno);
        }
        let Bytes { memory, len: all } = self.dm(raw.addr(), verb).ok_or(libc::EINVAL)?.bytes;
        if offset.checked_add(len as u64).is_none_or(|end| end > all as u64) {
            self.violation(format!("{verb} beyond device memory"));
            return Err(libc::EFAULT);
        }
        Ok(unsafe { memory.0.add(offset as usize) })
    }
}
