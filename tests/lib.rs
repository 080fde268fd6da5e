//! What several of the tests beside this file share.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

/// Root directory of the workspace.
pub const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Runs `cargo build` or `cargo check` for rdma-safe and rdma-pool, with the features that the README names.
///
/// Returns the file of the library `name` with this extension: `rlib` or `rmeta`.
#[must_use]
pub fn library(name: &str, command: &str, extension: &str) -> PathBuf {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(ROOT).args([command, "--package", "rdma-safe", "--package", "rdma-pool"]);
    cargo.args(["--features", "rdma-safe/serde,rdma-safe/soft"]);
    let output = cargo.arg("--message-format=json").output().expect("cargo starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("JSON is UTF-8");
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut artifacts = messages.filter(|message| message["target"]["name"] == name);
    let library = artifacts.find_map(|message| {
        let files = message["filenames"].as_array()?.iter().filter_map(Value::as_str);
        files.map(PathBuf::from).find(|file| file.extension().is_some_and(|of| of == extension))
    });
    library.expect("cargo names the library")
}
