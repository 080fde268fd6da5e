//! Programs that must not compile. Each file in `tests/ui` tries one misuse of a device and describes it.
//!
//! `//~ E0499 name` at the end of a line expects an error or a denied lint of this code there, whose message contains the name.
//! Lines and codes hardly change from one compiler to the next, unlike the rest of a message. `E0803|E0495` stands for a code
//! that was replaced by another.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rdma_tests::{ROOT, library};
use serde_json::Value;

/// Stands for the code of an error without one, because rustc prints only `error`.
const NO_CODE: &str = "error";

/// A diagnostic of the compiler.
#[derive(Debug)]
struct Diagnostic {
    line: u64,
    code: String,
    message: String,
}

/// `//~ CODE WORD…` at the end of a line.
#[derive(Debug)]
struct Expected {
    line: u64,
    code: String,
    words: Vec<String>,
}

impl Expected {
    fn is(&self, found: &Diagnostic) -> bool {
        let has =
            |word: &String| found.message.split(|c: char| c != '_' && !c.is_alphanumeric()).any(|part| part == word);
        self.line == found.line && self.code.split('|').any(|code| code == found.code) && self.words.iter().all(has)
    }
}

fn expected(source: &str) -> Vec<Expected> {
    let lines = source.lines().zip(1..);
    let marks = lines.flat_map(|(text, line)| text.split("//~ ").skip(1).map(move |mark| (line, mark)));
    marks
        .map(|(line, mark)| {
            let mut words = mark.split_whitespace().map(str::to_owned);
            Expected { line, code: words.next().expect("a code follows //~"), words: words.collect() }
        })
        .collect()
}

/// Compiles `program` and returns the diagnostics.
fn compile(program: &Path, library: &Path) -> Vec<Diagnostic> {
    let dependencies = library.parent().expect("it lies in a folder");
    let mut rustc = Command::new("rustc");
    rustc.args(["--edition=2024", "--crate-type=bin", "--emit=metadata", "--error-format=json"]);
    rustc.arg("--out-dir").arg(env!("CARGO_TARGET_TMPDIR"));
    rustc.arg("-L").arg(format!("dependency={}", dependencies.display()));
    rustc.arg("--extern").arg(format!("rdma_safe={}", library.display())).arg(program);
    let output = rustc.output().expect("rustc starts");
    let text = String::from_utf8(output.stderr).expect("JSON is UTF-8");
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).filter_map(|message| diagnostic(&message)).collect()
}

/// The error in a message of the compiler. The last message, which only counts errors, is none.
fn diagnostic(message: &Value) -> Option<Diagnostic> {
    if message["level"] != "error" {
        return None;
    }
    let spans = message["spans"].as_array()?;
    let line = spans.iter().find(|span| span["is_primary"] == true)?["line_start"].as_u64()?;
    let code = message["code"]["code"].as_str().unwrap_or(NO_CODE).to_owned();
    Some(Diagnostic { line, code, message: message["message"].as_str()?.to_owned() })
}

/// Complaints about one program.
fn check(program: &Path, library: &Path) -> Vec<String> {
    let expected = expected(&fs::read_to_string(program).expect("the program can be read"));
    let found = compile(program, library);
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let missing = expected.iter().filter(|one| !found.iter().any(|other| one.is(other)));
    let unexpected = found.iter().filter(|one| !expected.iter().any(|other| other.is(one)));
    let mut complaints: Vec<String> = missing.map(|one| format!("{name}: expected and not found: {one:?}")).collect();
    complaints.extend(unexpected.map(|one| format!("{name}: found and not expected: {one:?}")));
    if expected.is_empty() {
        complaints.push(format!("{name}: expects no error"));
    }
    complaints
}

#[test]
fn misuse_does_not_compile() {
    let entries = fs::read_dir(Path::new(ROOT).join("tests/ui")).expect("the folder can be read");
    let programs: BTreeSet<PathBuf> = entries.map(|entry| entry.expect("an entry can be read").path()).collect();
    assert!(programs.len() > 30, "{}", programs.len());
    let library = library("rdma_safe", "check", "rmeta");
    let (programs, library) = (Vec::from_iter(programs), &*library);
    let halves = programs.chunks(programs.len().div_ceil(2));
    let complaints: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = halves
            .map(|part| {
                scope.spawn(move || part.iter().flat_map(|program| check(program, library)).collect::<Vec<_>>())
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no check panics")).collect()
    });
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

/// A program that compiles, or fails elsewhere or otherwise, must not pass.
#[test]
fn an_error_counts_at_its_line_and_with_its_words_only() {
    let marks = expected("fn f() {}\nf(1); //~ E0061 f //~ E0308|E0309\n");
    let found =
        |line, code: &str, message: &str| Diagnostic { line, code: code.to_owned(), message: message.to_owned() };
    assert_eq!(marks.len(), 2);
    assert!(marks[0].is(&found(2, "E0061", "the function `f` takes no argument")));
    assert!(!marks[0].is(&found(1, "E0061", "the function `f` takes no argument")), "another line");
    assert!(!marks[0].is(&found(2, "E0308", "the function `f` takes no argument")), "another code");
    assert!(!marks[0].is(&found(2, "E0061", "a function takes no argument")), "another function");
    assert!(marks[1].is(&found(2, "E0308", "mismatched types")));
}
