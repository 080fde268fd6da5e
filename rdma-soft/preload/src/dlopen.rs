//! Support of programs that open libibverbs or librdmacm with `dlopen`, such as NCCL, rdma-mummy and Python with ctypes.
//!
//! Preloading overrides the symbols that a program is linked with, but not the symbols of a library that it opens by name. A link
//! of that name in a directory of `LD_LIBRARY_PATH` would override them, too. But libmlx5 and librdmacm would then find this
//! library instead of the system's, whose private functions they need.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::transmute;
use core::ptr::null_mut;

use crate::next::Next;

const NAMES: [&CStr; 4] = [c"libibverbs.so.1", c"libibverbs.so", c"librdmacm.so.1", c"librdmacm.so"];

/// Prefixes of the versions of functions in these libraries.
const VERSIONS: [&[u8]; 2] = [b"IBVERBS_", b"RDMACM_"];

static NEXT_DLOPEN: Next = Next::new(c"dlopen");
static NEXT_DLVSYM: Next = Next::new(c"dlvsym");

/// Looks the interposed functions up, so that later calls need not.
pub(crate) fn resolve() {
    _ = (NEXT_DLOPEN.get(), NEXT_DLVSYM.get());
}

/// Opens this library for the names of libibverbs and librdmacm, and passes other names on.
///
/// The C library searches the run path of its caller, which it finds by the return address on the stack. An optimized build
/// jumps to the C library's `dlopen`, so the program stays the caller. In other builds the caller is this library, which has no
/// run path.
#[unsafe(no_mangle)]
unsafe extern "C" fn dlopen(file: *const c_char, mode: c_int) -> *mut c_void {
    let symbol = NEXT_DLOPEN.get();
    if symbol.is_null() {
        return null_mut();
    }
    // SAFETY: the function of that name has this type.
    let function =
        unsafe { transmute::<*mut c_void, unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void>(symbol) };
    // SAFETY: the caller passes a string, or null.
    let is_replaced = !file.is_null() && NAMES.contains(&unsafe { CStr::from_ptr(file) });
    let file = if is_replaced { own_name().unwrap_or(file) } else { file };
    // SAFETY: the caller keeps the contract of the function of this name.
    unsafe { function(file, mode) }
}

/// Finds the functions of this library under every `IBVERBS_` and `RDMACM_` version, and passes other symbols on.
///
/// The functions of this library have no versions. Other calls continue with a jump, as in [`dlopen`], since `RTLD_NEXT` depends on
/// the caller.
#[unsafe(no_mangle)]
unsafe extern "C" fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void {
    type Find = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;
    let symbol = NEXT_DLVSYM.get();
    if symbol.is_null() {
        return null_mut();
    }
    // SAFETY: the function of that name has this type.
    let function = unsafe { transmute::<*mut c_void, Find>(symbol) };
    // SAFETY: the caller passes a string.
    let version_name = unsafe { CStr::from_ptr(version) }.to_bytes();
    let is_replaced = VERSIONS.iter().any(|prefix| version_name.starts_with(prefix));
    if is_replaced && handle != libc::RTLD_NEXT && handle != libc::RTLD_DEFAULT {
        // SAFETY: as above.
        let own = unsafe { own_symbol(handle, name) };
        if !own.is_null() {
            return own;
        }
    }
    // SAFETY: the caller keeps the contract of the function of this name.
    unsafe { function(handle, name, version) }
}

/// Returns a symbol of `handle` if it belongs to this library, or null.
///
/// # Safety
/// The handle is open, and the name is a string.
#[inline(never)]
unsafe fn own_symbol(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller keeps the contract above.
    let symbol = unsafe { libc::dlsym(handle, name) };
    let own = own_info().map(|info| info.dli_fbase);
    if !symbol.is_null() && own.is_some() && info(symbol).map(|info| info.dli_fbase) == own {
        symbol
    } else {
        null_mut()
    }
}

/// The name under which this library was loaded. Opening that name again returns this library.
#[inline(never)]
fn own_name() -> Option<*const c_char> {
    own_info().map(|info| info.dli_fname).filter(|name| !name.is_null())
}

fn own_info() -> Option<libc::Dl_info> {
    info(own_name as *const c_void)
}

/// Returns the library of an address.
fn info(address: *const c_void) -> Option<libc::Dl_info> {
    let mut info =
        libc::Dl_info { dli_fname: null_mut(), dli_fbase: null_mut(), dli_sname: null_mut(), dli_saddr: null_mut() };
    // SAFETY: `dladdr` takes any address. The strings that it returns are valid while the library is loaded.
    let is_known = unsafe { libc::dladdr(address, &mut info) } != 0;
    is_known.then_some(info)
}
