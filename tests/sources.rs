//! What the sources keep to that neither rustfmt nor clippy sees to.

use std::fs;
use std::path::{Path, PathBuf};

/// Made by `cargo xtask`.
const GENERATED: [&str; 2] = ["rdma-sys/src/bindings.rs", "rdma-sys/src/symbols.rs"];

const COLUMNS: usize = 132;
const LINES: usize = 600;

fn below(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            below(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

fn written_by_hand() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    below(root, &mut files);
    let names = files.iter().map(|path| (path.strip_prefix(root).unwrap().to_str().unwrap(), path));
    let ours = names.filter(|(name, _)| !GENERATED.contains(name));
    ours.map(|(name, path)| (name.to_owned(), fs::read_to_string(path).unwrap())).collect()
}

#[test]
fn no_line_is_too_long_to_be_read() {
    let files = written_by_hand();
    assert!(files.len() > 300, "{}", files.len());
    let lines = files.iter().flat_map(|(name, text)| text.lines().zip(1..).map(move |(line, n)| (name, n, line)));
    let long: Vec<_> =
        lines.filter(|(.., line)| line.chars().count() > COLUMNS).map(|(name, n, _)| (name, n)).collect();
    assert_eq!(long, [], "lines of more than {COLUMNS} characters");
}

#[test]
fn a_file_is_about_one_thing() {
    let files = written_by_hand();
    let lengths = files.iter().map(|(name, text)| (name, text.lines().count()));
    let long: Vec<_> = lengths.filter(|(_, lines)| *lines > LINES).collect();
    assert_eq!(long, [], "files of more than {LINES} lines");
}

/// soft0 cannot read what rdma-safe has: it is below it, and each is a package of its own.
#[test]
fn soft0_changes_states_as_rdma_safe_expects_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = |path: &str| fs::read_to_string(root.join(path)).unwrap();
    let (whole, ours) = (table("rdma-safe/src/qp/state_table.csv"), table("rdma-soft/src/device/qp_states.csv"));
    let is_ours = |line: &&str| line.split(',').nth(2).is_some_and(|kind| matches!(kind, "RC" | "UC" | "UD"));
    let expected: Vec<_> = whole.lines().filter(is_ours).collect();
    assert!(expected.len() > 60, "{}", expected.len());
    assert_eq!(ours.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>(), expected);
}
