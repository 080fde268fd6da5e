//! Programs that open libibverbs by name.

mod library;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::process::Command;

/// Set if the test runs as a program that has the library preloaded.
const INSIDE: &str = "RDMA_SOFT_TEST_DLOPEN";

#[test]
fn dlopen_of_libibverbs_opens_soft0_and_other_names_pass_through() {
    if std::env::var_os(INSIDE).is_some() {
        return open_libraries();
    }
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", "dlopen_of_libibverbs_opens_soft0_and_other_names_pass_through"]);
    let output = program.env("LD_PRELOAD", library::build().unwrap()).env(INSIDE, "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

fn open_libraries() {
    type List = unsafe extern "C" fn(*mut c_int) -> *mut *mut c_void;
    type Name = unsafe extern "C" fn(*mut c_void) -> *const c_char;
    for name in [c"libibverbs.so", c"libibverbs.so.1", c"librdmacm.so", c"librdmacm.so.1"] {
        // SAFETY: the functions have these types, and the list has one device.
        unsafe {
            let library = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            assert!(!library.is_null(), "{name:?}");
            // NCCL asks for a version of each function.
            let list = libc::dlvsym(library, c"ibv_get_device_list".as_ptr(), c"IBVERBS_1.1".as_ptr());
            let channel = libc::dlvsym(library, c"rdma_create_event_channel".as_ptr(), c"RDMACM_1.0".as_ptr());
            let device_name = libc::dlsym(library, c"ibv_get_device_name".as_ptr());
            assert!(!list.is_null() && !device_name.is_null() && !channel.is_null(), "{name:?}");
            let (list, device_name) =
                (std::mem::transmute::<*mut c_void, List>(list), std::mem::transmute::<*mut c_void, Name>(device_name));
            let mut count = 0;
            let devices = list(&mut count);
            assert_eq!((count, CStr::from_ptr(device_name(*devices))), (1, c"soft0"));
            assert_eq!(libc::dlclose(library), 0);
        }
    }
    // SAFETY: each name is a string, or null for the program itself.
    unsafe {
        assert!(!libc::dlopen(std::ptr::null(), libc::RTLD_NOW).is_null());
        let libm = libc::dlopen(c"libm.so.6".as_ptr(), libc::RTLD_NOW);
        assert!(!libc::dlsym(libm, c"cos".as_ptr()).is_null());
        assert!(libc::dlopen(c"libibverbs.so.999".as_ptr(), libc::RTLD_NOW).is_null());
        // Neither function clears the error of the dynamic linker.
        libc::access(c"/".as_ptr(), libc::F_OK);
        let error = libc::dlerror();
        assert!(!error.is_null() && CStr::from_ptr(error).to_string_lossy().contains("libibverbs.so.999"));
        assert!(libc::dlvsym(libm, c"cos".as_ptr(), c"IBVERBS_1.1".as_ptr()).is_null());
        assert!(!libc::dlerror().is_null());
    }
}
