//! Functions that unmap memory, which the checker observes.
//!
//! `free` of the C library does not call them: it makes the system calls itself. The checker notices memory that
//! `free` has unmapped only when the device accesses it.

use core::ffi::{c_int, c_void};

use libc::off_t;

/// Unmaps memory: `munmap(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn munmap(address: *mut c_void, len: usize) -> c_int {
    soft::check::unmapping(address as usize, len, "munmap");
    // SAFETY: the caller keeps the contract of the system call.
    unsafe { libc::syscall(libc::SYS_munmap, address, len) as c_int }
}

/// Gives advice about memory: `madvise(2)`. Some advice drops the content of pages.
#[unsafe(no_mangle)]
unsafe extern "C" fn madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    if matches!(advice, libc::MADV_DONTNEED | libc::MADV_FREE | libc::MADV_REMOVE) {
        soft::check::unmapping(address as usize, len, "madvise");
    }
    // SAFETY: the caller keeps the contract of the system call.
    unsafe { libc::syscall(libc::SYS_madvise, address, len, advice) as c_int }
}

/// Maps memory: `mmap(2)`. With `MAP_FIXED` it replaces other mappings.
#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    if flags & libc::MAP_FIXED != 0 {
        soft::check::unmapping(address as usize, len, "mmap");
    }
    // SAFETY: the caller keeps the contract of the system call.
    unsafe { libc::syscall(libc::SYS_mmap, address, len, prot, flags, fd, offset) as *mut c_void }
}

/// Maps memory: the name of [`mmap`] with `_FILE_OFFSET_BITS=64`, which changes nothing on 64-bit machines.
#[unsafe(no_mangle)]
unsafe extern "C" fn mmap64(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller keeps the contract of the system call.
    unsafe { mmap(address, len, prot, flags, fd, offset) }
}

/// Resizes or moves a mapping: `mremap(2)`. The C function is variadic; `target` is used only with `MREMAP_FIXED`.
#[unsafe(no_mangle)]
unsafe extern "C" fn mremap(
    address: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    target: *mut c_void,
) -> *mut c_void {
    // Growing in place moves nothing, but whether the mapping moves is known only afterwards.
    let (from, len) =
        if flags & libc::MREMAP_MAYMOVE != 0 { (0, old_len) } else { (new_len, old_len.saturating_sub(new_len)) };
    if new_len < old_len || flags & libc::MREMAP_FIXED != 0 {
        soft::check::unmapping(address as usize + from, len, "mremap");
    }
    // SAFETY: the caller keeps the contract of the system call.
    unsafe { libc::syscall(libc::SYS_mremap, address, old_len, new_len, flags, target) as *mut c_void }
}
