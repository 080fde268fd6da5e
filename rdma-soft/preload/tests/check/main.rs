//! The checker in a program in C: it is started by the environment, and reports a misuse of each kind with its place.

#[path = "../library/mod.rs"]
mod library;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use soft::check::Kind;

/// The folder of rdma-core's headers, or `None` after printing why. With `RDMA_REQUIRE_HEADERS=1` a missing folder is a failure.
fn include() -> Option<PathBuf> {
    let include = std::env::var_os("RDMA_CORE_INCLUDE").map(PathBuf::from);
    if include.is_none() {
        let line = "RDMA_CORE_INCLUDE is not set (the include folder of rdma-core's headers)";
        assert!(std::env::var_os("RDMA_REQUIRE_HEADERS").is_none_or(|value| value != "1"), "{line}");
        println!("skipped: check: {line}");
    }
    include
}

/// The compiled program.
struct Program {
    file: PathBuf,
    library: PathBuf,
}

impl Program {
    fn compile(name: &str, include: &Path) -> Program {
        let library = library::build().unwrap();
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/check/misuse.c");
        let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        cc.args(["-Wall", "-Wextra", "-O1", "-I"])
            .args([include, &source, &library])
            .args(["-pthread", "-o"])
            .arg(&file);
        let output = cc.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Program { file, library }
    }

    /// Runs the program with options of the checker. Returns its output and its reports.
    fn run(&self, kind: &str, options: &str) -> (Output, Vec<Value>) {
        let json = self.file.with_extension(kind);
        _ = std::fs::remove_file(&json);
        let mut command = Command::new(&self.file);
        command.arg(kind).env("LD_PRELOAD", &self.library);
        command.env("RDMA_SOFT_CHECK", format!("json={},{options}", json.display())).env("MISUSE_REPORTS", &json);
        let output = command.output().unwrap();
        let text = std::fs::read_to_string(&json).unwrap_or_default();
        _ = std::fs::remove_file(&json);
        (output, text.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        _ = std::fs::remove_file(&self.file);
    }
}

#[test]
fn a_program_of_each_kind_is_reported_with_its_place() {
    let Some(include) = include() else { return };
    let program = Program::compile("misuse", &include);
    for kind in Kind::ALL {
        // Some misuses have others as a consequence.
        let options = match kind {
            Kind::SendChanged => "suppress=receiver-not-ready",
            Kind::CqOverrun => "suppress=cq-can-overrun",
            Kind::Memlock => "memlock=65536",
            _ => "1",
        };
        let (output, reports) = program.run(kind.name(), options);
        let context = format!("{kind}: {output:?}");
        assert_eq!(output.status.code(), Some(66), "{context}");
        assert_eq!(reports.iter().map(|report| &report["kind"]).collect::<Vec<_>>(), [kind.name()], "{context}");
        let stdout = String::from_utf8(output.stdout).unwrap();
        let place: Vec<u64> = stdout.split_whitespace().map(|number| number.parse().unwrap()).collect();
        let found = ["qp", "wr_id", "address"].map(|field| reports[0][field].as_u64().unwrap_or(0));
        assert_eq!(found.as_slice(), place, "{context}");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains(&format!("rdma-soft check: {kind}: ")), "{context}");
    }
}

#[test]
fn a_correct_program_keeps_its_exit_status() {
    let Some(include) = include() else { return };
    let program = Program::compile("correct", &include);
    let (output, reports) = program.run("none", "1");
    assert_eq!((output.status.code(), reports, output.stderr), (Some(0), Vec::new(), Vec::new()));
    let (output, reports) = program.run("leaked", "exit=0");
    assert_eq!((output.status.code(), reports.len()), (Some(0), 1));
    let (output, reports) = program.run("leaked", "suppress=leaked");
    assert_eq!((output.status.code(), reports), (Some(0), Vec::new()));
    let (output, _) = program.run("none", "suppress=everything");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("RDMA_SOFT_CHECK: suppress=everything: unknown kind"), "{stderr}");
}
