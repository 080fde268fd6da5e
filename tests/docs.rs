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

fn source(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path))
        .unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// All tests, and all else in Rust that a document may name.
fn everything() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = BTreeSet::new();
    for directory in ["rdma-sys/src", "rdma-sys/tests", "rdma-safe/src", "rdma-safe/tests", "tests"] {
        collect(&root.join(directory), &mut names);
    }
    names
}

/// Names of the functions that follow `#[test]`, with other attributes in between or without.
fn tests_in(text: &str) -> Vec<String> {
    let is_name = |c: char| c == '_' || c.is_ascii_alphanumeric();
    let after = text.split("#[test]\n").skip(1).map(str::trim_start);
    let signature = after.filter_map(|rest| {
        let mut lines = rest.lines().map(str::trim);
        lines.find(|line| !line.starts_with("#[") && !line.starts_with("//"))
    });
    let names = signature.filter_map(|line| line.strip_prefix("fn "));
    names.map(|rest| rest.split(|c| !is_name(c)).next().unwrap_or_default().to_owned()).collect()
}

/// What the test harness runs.
fn all_tests() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directories = ["rdma-sys/src", "rdma-sys/tests", "rdma-safe/src", "rdma-safe/tests", "tests"];
    directories
        .iter()
        .flat_map(|directory| texts_below(&root.join(directory)))
        .flat_map(|text| tests_in(&text))
        .collect()
}

#[test]
fn only_what_the_harness_runs_counts_as_a_test() {
    let text =
        "fn helper() {}\n#[test]\n#[cfg(unix)]\n// Why.\nfn one() {}\n    #[test]\n    fn two_2() {}\nfn after() {}\n";
    assert_eq!(tests_in(text), ["one", "two_2"]);
    let tests = all_tests();
    assert!(tests.len() > 300 && tests.contains("only_what_the_harness_runs_counts_as_a_test"), "{}", tests.len());
    assert!(!tests.contains("all_tests"));
}

#[test]
fn every_test_that_the_soundness_document_names_exists() {
    let names = everything();
    let document = source("docs/soundness.md");
    let table = document.split_once("| fault | shown by |").expect("the table of faults").1;
    let rows: Vec<_> = table.lines().skip(2).take_while(|line| line.starts_with('|')).collect();
    assert!(rows.len() >= 15, "{} rows", rows.len());
    let named = |row: &str| -> Vec<String> {
        let tests = row.split('|').nth(2).expect("two columns");
        tests.split('`').skip(1).step_by(2).filter(|name| name.contains('_')).map(str::to_owned).collect()
    };
    let missing: Vec<_> = rows.iter().flat_map(|row| named(row)).filter(|name| !names.contains(name)).collect();
    assert!(missing.is_empty(), "no such tests: {missing:?}");
    let without: Vec<_> = rows.iter().filter(|row| named(row).is_empty()).collect();
    assert!(without.is_empty(), "nothing shows that these are impossible: {without:?}");
}

/// What is between backticks.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// A row of docs/coverage.md.
struct Row<'a> {
    functions: Vec<&'a str>,
    place: &'a str,
    tests: Vec<&'a str>,
    softroce: &'a str,
}

fn coverage(document: &str) -> Vec<Row<'_>> {
    let rows = document.lines().filter(|line| line.starts_with("| `"));
    rows.map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [functions, place, tests, softroce] = cells[..] else { panic!("four columns: {line}") };
        Row { functions: quoted(functions), place, tests: quoted(tests), softroce }
    })
    .collect()
}

/// Functions that both libraries export, and shims of those that their headers have inline.
fn functions_of_c() -> BTreeSet<String> {
    let symbols = source("rdma-sys/symbols.tsv");
    let exported = symbols.lines().filter_map(|line| line.split_once(".so.1\t")?.1.split('\t').next());
    let mut names: BTreeSet<String> = exported.map(str::to_owned).collect();
    let exported = names.len();
    for text in texts_below(&Path::new(env!("CARGO_MANIFEST_DIR")).join("rdma-sys/src/inline")) {
        let functions = text.split("fn ").skip(1).filter_map(|rest| rest.split(['(', '<']).next());
        let prefixes = ["ibv_", "rdma_", "ib_addr_"];
        let of_c = |name: &&str| {
            prefixes.iter().any(|prefix| name.trim_start_matches('_').starts_with(prefix)) || *name == "verbs_get_ctx"
        };
        names.extend(functions.filter(of_c).map(str::to_owned));
    }
    assert!(exported > 150 && names.len() > exported + 100, "{exported} exported of {}", names.len());
    names
}

#[test]
fn every_function_of_c_is_in_the_tables_of_coverage_once() {
    let document = source("docs/coverage.md");
    let mut listed = BTreeSet::new();
    for name in coverage(&document).iter().flat_map(|row| &row.functions) {
        assert!(listed.insert((*name).to_owned()), "{name} is there twice");
    }
    let expected = functions_of_c();
    let none: [&String; 0] = [];
    assert_eq!(expected.difference(&listed).collect::<Vec<_>>(), none, "not in docs/coverage.md");
    assert_eq!(listed.difference(&expected).collect::<Vec<_>>(), none, "no function of either library");
}

#[test]
fn what_the_table_of_coverage_names_exists() {
    let document = source("docs/coverage.md");
    let (names, run) = (everything(), all_tests());
    let mut types = BTreeSet::new();
    for entry in texts_below(&Path::new(env!("CARGO_MANIFEST_DIR")).join("rdma-safe/src")) {
        for keyword in ["pub struct ", "pub enum ", "pub trait "] {
            let found =
                entry.split(keyword).skip(1).filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric()).next());
            types.extend(found.map(str::to_owned));
        }
    }
    for Row { functions, place, tests, softroce } in coverage(&document) {
        assert!(["works", "refused", "fails", "absent", "local"].contains(&softroce), "{functions:?}: {softroce}");
        for path in quoted(place) {
            let (of, name) = path.split_once("::").map_or((None, path), |(of, name)| (Some(of), name));
            assert!(of.is_none_or(|of| types.contains(of)), "{functions:?}: no type {path}");
            assert!(names.contains(name) || of.is_none() && types.contains(name), "{functions:?}: no {path}");
        }
        assert!(!place.starts_with("not yet"), "{functions:?}: {place}");
        let offered = !quoted(place).is_empty() && !place.starts_with("not ");
        assert!(offered || place.starts_with("not ") || place.starts_with("internal "), "{functions:?}: {place}");
        assert!(!offered || !tests.is_empty(), "{functions:?} is offered, and not tested");
        let missing: Vec<_> = tests.iter().filter(|test| !run.contains(**test)).collect();
        assert!(missing.is_empty(), "{functions:?}: no such tests: {missing:?}");
    }
}

/// The text of every Rust file below `directory`.
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

#[test]
fn what_rdma_safe_offers_is_not_called_missing() {
    let document = source("docs/coverage.md");
    let rows = coverage(&document);
    let texts = texts_below(&Path::new(env!("CARGO_MANIFEST_DIR")).join("rdma-safe/src"));
    let aliases =
        texts.iter().flat_map(|text| text.split("doc(alias = \"").skip(1)).filter_map(|rest| rest.split('"').next());
    let mut found = 0;
    for alias in aliases.filter(|alias| alias.starts_with("ibv_") || alias.starts_with("rdma_")) {
        let row = rows.iter().find(|row| row.functions.contains(&alias));
        let row = row.unwrap_or_else(|| panic!("{alias} is an alias of rdma-safe, and no function of C"));
        assert!(!row.place.starts_with("not "), "{alias} is offered, and the table says: {}", row.place);
        found += 1;
    }
    assert!(found > 50, "{found} aliases");
}
