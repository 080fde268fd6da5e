//! The device file, which exists only for programs that have the library preloaded.

mod library;

use std::ffi::{CStr, c_char, c_int};
use std::io::Error;
use std::process::Command;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

const DEVICE: &str = "/dev/infiniband/uverbs-soft0";

/// Runs a system program with the library preloaded. Returns its output, and whether it succeeded.
fn preloaded(program: &str, arguments: &[&str]) -> (String, bool) {
    let output = Command::new(program).args(arguments).env("LD_PRELOAD", library::build().unwrap()).output().unwrap();
    (String::from_utf8(output.stdout).unwrap() + &String::from_utf8_lossy(&output.stderr), output.status.success())
}

/// Loads the shared object in addition to the libraries of the test.
fn library() -> Library {
    // SAFETY: the library runs only initialisers of Rust's standard library and lookups of functions.
    unsafe { Library::open(Some(library::build().unwrap()), RTLD_NOW | RTLD_LOCAL) }.unwrap()
}

#[test]
fn the_device_file_is_readable_and_writable() {
    // `test` calls stat(2) and faccessat(2), and `stat` calls statx(2).
    for (question, answer) in [("-e", true), ("-c", true), ("-r", true), ("-w", true), ("-x", false), ("-f", false)] {
        assert_eq!(preloaded("/usr/bin/test", &[question, DEVICE]).1, answer, "{question}");
    }
    let (text, _) = preloaded("stat", &["-c", "%F %a %t:%T", DEVICE]);
    assert_eq!(text.trim(), "character special file 666 e7:c0");
    let (text, success) = preloaded("cat", &[DEVICE]);
    assert!(!success && text.contains("No such file"), "the device file was opened: {text}");
}

#[test]
fn other_files_are_unaffected() {
    assert!(preloaded("/usr/bin/test", &["-d", "/dev"]).1);
    for absent in ["/dev/infiniband/uverbs-soft1", "/dev/infiniband/uverbs-soft", "/dev/infiniband/uverbs-soft00"] {
        assert!(!preloaded("/usr/bin/test", &["-e", absent]).1, "{absent}");
    }
    let (text, _) = preloaded("stat", &["-c", "%F", "/dev/null", "/"]);
    assert_eq!(text, "character special file\ndirectory\n");
}

/// Also tests the functions of programs built before glibc 2.33.
#[test]
fn errno_is_preserved_and_invalid_pointers_fail_with_efault() {
    type Access = unsafe extern "C" fn(*const c_char, c_int) -> c_int;
    type Stat = unsafe extern "C" fn(c_int, *const c_char, *mut libc::stat) -> c_int;
    let library = library();
    let device = c"/dev/infiniband/uverbs-soft0";
    // SAFETY: the functions have these types. They get strings, or invalid pointers that only the kernel reads.
    unsafe {
        let access = library.get::<Access>(b"access").unwrap();
        let xstat = library.get::<Stat>(b"__xstat").unwrap();
        let errno = libc::__errno_location();
        let ask = |path: *const c_char, mode| {
            *errno = libc::EXDEV;
            (access(path, mode), Error::last_os_error().raw_os_error())
        };
        assert_eq!(ask(device.as_ptr(), libc::R_OK | libc::W_OK), (0, Some(libc::EXDEV)));
        assert_eq!(ask(device.as_ptr(), libc::X_OK), (-1, Some(libc::EACCES)));
        assert_eq!(ask(c"/dev/null".as_ptr(), libc::F_OK), (0, Some(libc::EXDEV)));
        assert_eq!(ask(c"/absent".as_ptr(), libc::F_OK), (-1, Some(libc::ENOENT)));
        assert_eq!(ask(std::ptr::dangling(), libc::F_OK), (-1, Some(libc::EFAULT)));
        let describe = |path: &CStr| {
            let mut stat: libc::stat = std::mem::zeroed();
            // The version of 64-bit architectures.
            let version = if cfg!(target_arch = "x86_64") { 1 } else { 0 };
            (xstat(version, path.as_ptr(), &mut stat), stat.st_mode & libc::S_IFMT)
        };
        assert_eq!(describe(device), (0, libc::S_IFCHR));
        assert_eq!(describe(c"/dev"), (0, libc::S_IFDIR));
        assert_eq!(describe(c"/absent").0, -1);
        assert_eq!(xstat(if cfg!(target_arch = "x86_64") { 1 } else { 0 }, device.as_ptr(), std::ptr::null_mut()), -1);
        assert_eq!(Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
    }
}
