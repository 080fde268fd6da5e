//! Builds librdma_soft.so, since cargo builds no shared objects for tests.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

/// Compiles the shared object and returns its path.
///
/// # Errors
/// If cargo cannot be run. Panics if the library does not compile.
pub(crate) fn build() -> Result<PathBuf, String> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--package", "rdma-soft-preload", "--lib", "--message-format", "json"]);
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    let output =
        cargo.output().map_err(|error| format!("cannot run {} to build librdma_soft.so: {error}", env!("CARGO")))?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let messages = output.stdout.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
    let mut files = messages.flat_map(|message: Value| message["filenames"].as_array().cloned().unwrap_or_default());
    let file =
        files.find_map(|file| file.as_str().filter(|file| file.ends_with("/librdma_soft.so")).map(PathBuf::from));
    Ok(file.expect("cargo does not list librdma_soft.so"))
}
