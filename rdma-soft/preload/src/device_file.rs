//! The device file that programs check before they open a device.
//!
//! UCX lists a device only if `/dev/infiniband/uverbs-soft0` is a character device that it may read and write. soft0 has no kernel
//! driver and so no such file. The functions that describe files therefore answer for that path. Opening it still fails.
//!
//! Each function first calls the function that it interposes, and reads the path only after `ENOENT`. The kernel has then read the
//! path, so it is a string, and there is no such file. All other calls pass through with their result and `errno`.
//!
//! The functions neither allocate nor lock, so signal handlers may call them. That holds once this library is initialised. A call
//! from an earlier initialiser looks its function up, which takes the lock of the dynamic linker.

use core::ffi::{CStr, c_char, c_int, c_uint};
use core::mem::transmute_copy;

use crate::next::Next;

const PATH: &CStr = c"/dev/infiniband/uverbs-soft0";

/// Device number of the kernel's first uverbs device: `INFINIBAND_MAJOR` and `IB_UVERBS_BASE_MINOR`.
const MAJOR: c_uint = 231;
const MINOR: c_uint = 192;
const MODE: u32 = libc::S_IFCHR | 0o666;
const BLOCK: u32 = 4096;

/// Structures that describe a file.
trait Describe {
    fn of_device() -> Self;
}

macro_rules! describe {
    ($($stat:ty),*) => {$(
        impl Describe for $stat {
            fn of_device() -> Self {
                // SAFETY: zeros are valid, since the structure has only integers.
                let mut stat: Self = unsafe { core::mem::zeroed() };
                stat.st_mode = MODE;
                stat.st_nlink = 1;
                stat.st_rdev = libc::makedev(MAJOR, MINOR);
                stat.st_blksize = BLOCK as _;
                stat
            }
        }
    )*};
}

describe!(libc::stat, libc::stat64);

impl Describe for libc::statx {
    fn of_device() -> Self {
        // SAFETY: zeros are valid, since the structure has only integers.
        let mut stat: Self = unsafe { core::mem::zeroed() };
        stat.stx_mask = libc::STATX_TYPE | libc::STATX_MODE | libc::STATX_NLINK | libc::STATX_UID | libc::STATX_GID;
        stat.stx_mode = MODE as u16;
        stat.stx_nlink = 1;
        (stat.stx_rdev_major, stat.stx_rdev_minor) = (MAJOR, MINOR);
        stat.stx_blksize = BLOCK;
        stat
    }
}

fn errno() -> *mut c_int {
    // SAFETY: the function returns a valid pointer to the calling thread's errno, and cannot fail.
    unsafe { libc::__errno_location() }
}

/// Sets `errno` and returns -1.
fn fail(value: c_int) -> c_int {
    // SAFETY: the pointer is valid, and the errno is the calling thread's.
    unsafe { *errno() = value };
    -1
}

/// Calls the interposed function. If that finds no file and the path is the device file's, calls `of_device` instead.
///
/// # Safety
/// `call` calls the interposed function with `path`.
unsafe fn ask(path: *const c_char, call: impl FnOnce() -> c_int, of_device: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: the pointer is valid, and the errno is the calling thread's.
    let before = unsafe { *errno() };
    let result = call();
    // SAFETY: as above.
    if result != -1 || unsafe { *errno() } != libc::ENOENT {
        return result;
    }
    // SAFETY: the kernel has found a string there.
    if unsafe { CStr::from_ptr(path) } != PATH {
        return result;
    }
    // SAFETY: as above.
    unsafe { *errno() = before };
    of_device()
}

/// Answers for the device file, which all users may read and write, and none may execute.
fn access_to_device(mode: c_int) -> c_int {
    if mode & libc::X_OK == 0 { 0 } else { fail(libc::EACCES) }
}

macro_rules! files {
    ($($name:ident($($arg:ident: $ty:ty),*) at $path:ident => $answer:expr;)*) => {
        /// The interposed functions.
        #[allow(non_upper_case_globals, reason = "named after the functions")]
        mod next_of {
            $(pub(super) static $name: super::Next = super::Next::new(match core::ffi::CStr::from_bytes_with_nul(
                concat!(stringify!($name), "\0").as_bytes(),
            ) {
                Ok(name) => name,
                Err(_) => panic!("a name without NUL"),
            });)*
        }

        /// Looks all of them up, so that later calls need not.
        pub(crate) fn resolve() {
            $(_ = next_of::$name.get();)*
        }

        $(#[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
            let symbol = next_of::$name.get();
            if symbol.is_null() {
                return fail(libc::ENOSYS);
            }
            // SAFETY: the function of that name has this type.
            let function: unsafe extern "C" fn($($ty),*) -> c_int = unsafe { transmute_copy(&symbol) };
            // SAFETY: the caller keeps the contract of the interposed function.
            unsafe { ask($path, || function($($arg),*), || $answer) }
        })*
    };
}

/// Describes the device file in the caller's structure.
///
/// # Safety
/// `to` is null or has room for the structure.
unsafe fn describe<T: Describe>(to: *mut T) -> c_int {
    if to.is_null() {
        return fail(libc::EFAULT);
    }
    // SAFETY: the caller keeps the contract above.
    unsafe { to.write(T::of_device()) };
    0
}

files! {
    stat(path: *const c_char, to: *mut libc::stat) at path => describe(to);
    stat64(path: *const c_char, to: *mut libc::stat64) at path => describe(to);
    lstat(path: *const c_char, to: *mut libc::stat) at path => describe(to);
    lstat64(path: *const c_char, to: *mut libc::stat64) at path => describe(to);
    fstatat(dir: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) at path => describe(to);
    fstatat64(dir: c_int, path: *const c_char, to: *mut libc::stat64, flags: c_int) at path => describe(to);
    statx(dir: c_int, path: *const c_char, flags: c_int, mask: c_uint, to: *mut libc::statx) at path => describe(to);
    __xstat(version: c_int, path: *const c_char, to: *mut libc::stat) at path => describe(to);
    __xstat64(version: c_int, path: *const c_char, to: *mut libc::stat64) at path => describe(to);
    __lxstat(version: c_int, path: *const c_char, to: *mut libc::stat) at path => describe(to);
    __lxstat64(version: c_int, path: *const c_char, to: *mut libc::stat64) at path => describe(to);
    __fxstatat(version: c_int, dir: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) at path => describe(to);
    __fxstatat64(version: c_int, dir: c_int, path: *const c_char, to: *mut libc::stat64, flags: c_int) at path => describe(to);
    access(path: *const c_char, mode: c_int) at path => access_to_device(mode);
    eaccess(path: *const c_char, mode: c_int) at path => access_to_device(mode);
    euidaccess(path: *const c_char, mode: c_int) at path => access_to_device(mode);
    faccessat(dir: c_int, path: *const c_char, mode: c_int, flags: c_int) at path => access_to_device(mode);
}
