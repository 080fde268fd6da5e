//! The shared object.

use std::path::PathBuf;
use std::process::Command;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use serde_json::Value;

/// Compiles it, since a test does not depend on a shared object of its own package.
pub(crate) fn file() -> PathBuf {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--package", "rdma-soft-preload", "--lib", "--message-format", "json"]);
    let output = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let messages = output.stdout.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
    let mut files = messages.flat_map(|message: Value| message["filenames"].as_array().cloned().unwrap_or_default());
    let path =
        files.find_map(|file| file.as_str().filter(|file| file.ends_with("/librdma_soft.so")).map(PathBuf::from));
    path.unwrap()
}

/// Loads it, beside what the test itself is linked with.
pub(crate) fn library() -> Library {
    // SAFETY: its initialisers are those of the standard library.
    unsafe { Library::open(Some(file()), RTLD_NOW | RTLD_LOCAL) }.unwrap()
}
