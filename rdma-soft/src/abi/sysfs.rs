//! Reading device attributes from files, for `ibv_devinfo`.

use core::ffi::{CStr, c_char, c_int};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::errors::set_errno;

/// Reads the file `dir`/`file` as a string without the final newline. Returns its length, or sets `errno` and returns -1.
pub unsafe extern "C" fn ibv_read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> c_int {
    // SAFETY: the caller passes two strings.
    let (dir, file) = unsafe { (CStr::from_ptr(dir), CStr::from_ptr(file)) };
    match read(dir, file, size) {
        Ok(text) => {
            // SAFETY: the caller's buffer has `size` bytes. The text and the NUL byte take at most as many.
            unsafe {
                text.as_ptr().copy_to_nonoverlapping(buf.cast(), text.len());
                buf.add(text.len()).write(0);
            }
            c_int::try_from(text.len()).unwrap_or(c_int::MAX)
        }
        Err(error) => {
            set_errno(error.raw_os_error().unwrap_or(libc::EIO));
            -1
        }
    }
}

/// Reads a text of fewer than `size` bytes.
fn read(dir: &CStr, file: &CStr, size: usize) -> io::Result<Vec<u8>> {
    // This does not join paths, since `file` may begin with a slash.
    let path = [dir.to_bytes(), b"/", file.to_bytes()].concat();
    let mut text = Vec::new();
    let limit = u64::try_from(size).unwrap_or(u64::MAX);
    File::open(Path::new(OsStr::from_bytes(&path)))?.take(limit).read_to_end(&mut text)?;
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    if text.len() < size { Ok(text) } else { Err(io::Error::from_raw_os_error(libc::EOVERFLOW)) }
}
