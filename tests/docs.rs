//! What the documents name exists.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Adds the functions of every Rust file below `directory`, and the names of the files.
fn collect(directory: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let functions = text.split("fn ").skip(1).filter_map(|rest| {
                rest.split_once(|c: char| c != '_' && !c.is_ascii_alphanumeric()).map(|(name, _)| name.to_owned())
            });
            names.extend(functions);
            names.insert(path.file_stem().unwrap().to_string_lossy().into_owned());
        }
    }
}

#[test]
fn every_test_that_the_soundness_document_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = BTreeSet::new();
    for directory in ["rdma-sys/src", "rdma-sys/tests", "rdma-safe/src", "rdma-safe/tests", "tests"] {
        collect(&root.join(directory), &mut names);
    }
    let document = fs::read_to_string(root.join("docs/soundness.md")).unwrap();
    let table = document.split_once("| fault | shown by |").expect("the table of faults").1;
    let rows: Vec<_> = table.lines().skip(2).take_while(|line| line.starts_with('|')).collect();
    assert!(rows.len() >= 15, "{} rows", rows.len());
    let named = |row: &str| -> Vec<String> {
        let tests = row.split('|').nth(2).expect("two columns");
        tests.split('`').skip(1).step_by(2).filter(|name| name.contains('_')).map(str::to_owned).collect()
    };
    let missing: Vec<_> = rows.iter().flat_map(|row| named(row)).filter(|name| !names.contains(name)).collect();
    assert!(missing.is_empty(), "no such tests: {missing:?}");
    let without = rows.iter().filter(|row| named(row).is_empty()).count();
    assert_eq!(without, 1, "only what rdma-safe does not wrap has no test");
}
