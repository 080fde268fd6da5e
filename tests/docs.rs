//! Checks that the items and tests that the documents name exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Root directory of the workspace.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Directories whose functions and tests a document may mention.
const DIRECTORIES: [&str; 11] = [
    "rdma-sys/src",
    "rdma-sys/tests",
    "rdma-safe/src",
    "rdma-safe/tests",
    "rdma-pool/src",
    "rdma-pool/tests",
    "rdma-async/src",
    "rdma-async/tests",
    "rdma-msg/src",
    "rdma-msg/tests",
    "tests",
];

/// Adds the names of all Rust files below `directory`, and of their functions.
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

/// Contents of a file of the workspace.
fn source(path: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Names of all Rust files and functions, including tests, that a document may mention.
fn all_names() -> BTreeSet<String> {
    let root = Path::new(ROOT);
    let mut names = BTreeSet::new();
    for directory in DIRECTORIES {
        collect(&root.join(directory), &mut names);
    }
    names
}

/// Names of the functions with the attribute `#[test]`.
fn tests_in(text: &str) -> Vec<String> {
    let is_name = |c: char| c == '_' || c.is_ascii_alphanumeric();
    let after = text.split("#[test]\n").skip(1).map(str::trim_start);
    let signature = after.filter_map(|text| {
        let mut lines = text.lines().map(str::trim);
        lines.find(|line| !line.starts_with("#[") && !line.starts_with("//"))
    });
    let names = signature.filter_map(|line| line.strip_prefix("fn "));
    names.map(|rest| rest.split(|c| !is_name(c)).next().unwrap_or_default().to_owned()).collect()
}

/// Names of all tests below `directories` of the workspace.
fn tests_below(directories: &[&str]) -> BTreeSet<String> {
    let texts = directories.iter().flat_map(|directory| texts_below(&Path::new(ROOT).join(directory)));
    texts.flat_map(|text| tests_in(&text)).collect()
}

/// Names of all tests that the harness runs.
fn all_tests() -> BTreeSet<String> {
    tests_below(&DIRECTORIES)
}

#[test]
fn only_functions_with_the_test_attribute_count_as_tests() {
    let text =
        "fn helper() {}\n#[test]\n#[cfg(unix)]\n// Why.\nfn one() {}\n    #[test]\n    fn two_2() {}\nfn after() {}\n";
    assert_eq!(tests_in(text), ["one", "two_2"]);
    let tests = all_tests();
    assert!(
        tests.len() > 300 && tests.contains("only_functions_with_the_test_attribute_count_as_tests"),
        "{}",
        tests.len()
    );
    assert!(!tests.contains("all_tests"));
}

#[test]
fn every_test_that_the_soundness_document_names_exists() {
    let names = all_names();
    let document = source("docs/soundness.md");
    let table = document.split_once("| fault | shown by |").expect("the table of faults exists").1;
    let rows: Vec<_> = table.lines().skip(2).take_while(|line| line.starts_with('|')).collect();
    assert!(rows.len() >= 15, "{} rows", rows.len());
    let named = |row: &str| -> Vec<String> {
        let tests = row.split('|').nth(2).expect("two columns");
        tests.split('`').skip(1).step_by(2).filter(|name| name.contains('_')).map(str::to_owned).collect()
    };
    let missing: Vec<_> = rows.iter().flat_map(|row| named(row)).filter(|name| !names.contains(name)).collect();
    assert!(missing.is_empty(), "no such tests: {missing:?}");
    let without: Vec<_> = rows.iter().filter(|row| named(row).is_empty()).collect();
    assert!(without.is_empty(), "faults without a test: {without:?}");
}

/// Parts of `cell` between backticks.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// A row of a table in docs/coverage.md.
struct Row<'a> {
    functions: Vec<&'a str>,
    place: &'a str,
    tests: Vec<&'a str>,
    softroce: &'a str,
}

/// Rows of the tables in docs/coverage.md.
fn coverage(document: &str) -> Vec<Row<'_>> {
    let rows = document.lines().filter(|line| line.starts_with("| `"));
    rows.map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [functions, place, tests, softroce] = cells[..] else { panic!("expected four columns: {line}") };
        Row { functions: quoted(functions), place, tests: quoted(tests), softroce }
    })
    .collect()
}

/// Functions of the C API: those that the libraries export, and the inline functions that rdma-sys reimplements.
fn c_functions() -> BTreeSet<String> {
    let symbols = source("rdma-sys/symbols.tsv");
    let exported = symbols.lines().filter_map(|line| line.split_once(".so.1\t")?.1.split('\t').next());
    let mut names: BTreeSet<String> = exported.map(str::to_owned).collect();
    let exported = names.len();
    for text in texts_below(&Path::new(ROOT).join("rdma-sys/src/inline")) {
        let functions = text.split("fn ").skip(1).filter_map(|rest| rest.split(['(', '<']).next());
        let prefixes = ["ibv_", "rdma_", "ib_addr_"];
        let is_c_function = |name: &&str| {
            prefixes.iter().any(|prefix| name.trim_start_matches('_').starts_with(prefix)) || *name == "verbs_get_ctx"
        };
        names.extend(functions.filter(is_c_function).map(str::to_owned));
    }
    assert!(exported > 150 && names.len() > exported + 100, "{exported} exported of {}", names.len());
    names
}

#[test]
fn every_c_function_is_listed_once_in_the_coverage_tables() {
    let document = source("docs/coverage.md");
    let mut listed = BTreeSet::new();
    for name in coverage(&document).iter().flat_map(|row| &row.functions) {
        assert!(listed.insert((*name).to_owned()), "{name} is listed twice");
    }
    let expected = c_functions();
    let none: [&String; 0] = [];
    assert_eq!(expected.difference(&listed).collect::<Vec<_>>(), none, "not in docs/coverage.md");
    assert_eq!(listed.difference(&expected).collect::<Vec<_>>(), none, "not a function of either library");
}

#[test]
fn items_in_the_coverage_tables_exist() {
    let document = source("docs/coverage.md");
    let (names, run) = (all_names(), all_tests());
    let mut types = BTreeSet::new();
    for entry in texts_below(&Path::new(ROOT).join("rdma-safe/src")) {
        for keyword in ["pub struct ", "pub enum ", "pub trait "] {
            let found =
                entry.split(keyword).skip(1).filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric()).next());
            types.extend(found.map(str::to_owned));
        }
    }
    for Row { functions, place, tests, .. } in coverage(&document) {
        for path in quoted(place) {
            let (of, name) = path.split_once("::").map_or((None, path), |(of, name)| (Some(of), name));
            // A module is known by the name of its file, as in `fork::init`.
            assert!(of.is_none_or(|of| types.contains(of) || names.contains(of)), "{functions:?}: no type {path}");
            assert!(names.contains(name) || of.is_none() && types.contains(name), "{functions:?}: no item {path}");
        }
        assert!(!place.starts_with("not yet"), "{functions:?}: {place}");
        let offered = !quoted(place).is_empty() && !place.starts_with("not ");
        assert!(offered || place.starts_with("not ") || place.starts_with("internal "), "{functions:?}: {place}");
        assert!(!offered || !tests.is_empty(), "{functions:?}: offered but not tested");
        let missing: Vec<_> = tests.iter().filter(|test| !run.contains(**test)).collect();
        assert!(missing.is_empty(), "{functions:?}: no such tests: {missing:?}");
    }
}

/// Contents of all Rust files below `directory`.
fn texts_below(directory: &Path) -> Vec<String> {
    let mut texts = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            texts.extend(texts_below(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            texts.push(fs::read_to_string(path).unwrap());
        }
    }
    texts
}

/// `cargo xtask test` requires further that one of these tests passed on SoftRoCE.
#[test]
fn every_claim_about_softroce_rests_on_a_device_test() {
    let document = source("docs/coverage.md");
    let on_a_device = tests_below(&["tests/device"]);
    for Row { functions, place, tests, softroce } in coverage(&document) {
        match softroce {
            "works" | "deviates" | "refused" | "fails" => {
                assert!(
                    tests.iter().any(|test| on_a_device.contains(*test)),
                    "{functions:?}: no device test: {tests:?}"
                );
            }
            "not tested" => assert!(tests.is_empty() && place.starts_with("not "), "{functions:?}: {place}, {tests:?}"),
            "absent" | "local" => {}
            _ => panic!("{functions:?}: {softroce}"),
        }
    }
}

#[test]
fn functions_with_an_alias_in_rdma_safe_are_listed_as_offered() {
    let document = source("docs/coverage.md");
    let rows = coverage(&document);
    let texts = texts_below(&Path::new(ROOT).join("rdma-safe/src"));
    let aliases =
        texts.iter().flat_map(|text| text.split("doc(alias = \"").skip(1)).filter_map(|rest| rest.split('"').next());
    let mut found = 0;
    for alias in aliases.filter(|alias| alias.starts_with("ibv_") || alias.starts_with("rdma_")) {
        let row = rows.iter().find(|row| row.functions.contains(&alias));
        let row = row.unwrap_or_else(|| panic!("{alias} is an alias in rdma-safe but not a C function"));
        assert!(!row.place.starts_with("not "), "{alias} is offered, but the table says: {}", row.place);
        found += 1;
    }
    assert!(found > 50, "{found} aliases");
}

/// Names of the Cargo features of a crate.
fn features(manifest: &str) -> Vec<&str> {
    let section = manifest.split("\n[features]\n").nth(1).and_then(|rest| rest.split("\n[").next());
    let names = section.unwrap_or_default().lines().filter_map(|line| line.split_once(" = "));
    names.map(|(name, _)| name).filter(|name| !name.starts_with('#')).collect()
}

#[test]
fn the_readme_and_the_crate_documentation_list_every_feature() {
    let manifest = source("rdma-safe/Cargo.toml");
    let features = features(&manifest);
    assert!(features.contains(&"soft"), "{features:?}");
    for (file, row) in [("rdma-safe/README.md", "| `"), ("rdma-safe/src/lib.rs", "//! | `")] {
        let text = source(file);
        for feature in &features {
            let row = format!("{row}{feature}` | ");
            assert!(text.lines().any(|line| line.starts_with(&row)), "{file} does not list the feature {feature}");
        }
    }
}
