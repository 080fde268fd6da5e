//! Rules for the sources that neither rustfmt nor clippy checks.

use std::fs;
use std::path::{Path, PathBuf};

/// Root directory of the workspace.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Files that `cargo xtask bindgen` generates.
const GENERATED: [&str; 1] = ["rdma-sys/src/bindings.rs"];

/// Maximum line length.
const COLUMNS: usize = 132;
/// Maximum number of lines of a file.
const LINES: usize = 600;

/// Adds all Rust files below `directory`.
fn collect(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// Names and contents of all Rust files that are not generated.
fn handwritten_files() -> Vec<(String, String)> {
    let root = Path::new(ROOT);
    let mut files = Vec::new();
    collect(root, &mut files);
    let names = files.iter().map(|path| (path.strip_prefix(root).unwrap().to_str().unwrap(), path));
    let ours = names.filter(|(name, _)| !GENERATED.contains(name));
    ours.map(|(name, path)| (name.to_owned(), fs::read_to_string(path).unwrap())).collect()
}

#[test]
fn no_line_exceeds_the_maximum_length() {
    let files = handwritten_files();
    assert!(files.len() > 300, "{}", files.len());
    let lines = files.iter().flat_map(|(name, text)| text.lines().zip(1..).map(move |(line, n)| (name, n, line)));
    let long: Vec<_> =
        lines.filter(|(.., line)| line.chars().count() > COLUMNS).map(|(name, n, _)| (name, n)).collect();
    assert_eq!(long, [], "lines of more than {COLUMNS} characters");
}

#[test]
fn no_file_exceeds_the_maximum_number_of_lines() {
    let files = handwritten_files();
    let lengths = files.iter().map(|(name, text)| (name, text.lines().count()));
    let long: Vec<_> = lengths.filter(|(_, lines)| *lines > LINES).collect();
    assert_eq!(long, [], "files of more than {LINES} lines");
}

/// rdma-soft is a separate package below rdma-safe, so it has its own copy of the table.
#[test]
fn soft0_and_rdma_safe_use_the_same_state_transitions() {
    let root = Path::new(ROOT);
    let table = |path: &str| fs::read_to_string(root.join(path)).unwrap();
    let (whole, ours) = (table("rdma-safe/src/qp/state_table.csv"), table("rdma-soft/src/device/qp_states.csv"));
    let is_ours = |line: &&str| line.split(',').nth(2).is_some_and(|kind| matches!(kind, "RC" | "UC" | "UD"));
    let expected: Vec<_> = whole.lines().filter(is_ours).collect();
    assert!(expected.len() > 60, "{}", expected.len());
    assert_eq!(ours.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>(), expected);
}
