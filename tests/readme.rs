//! Compiles the samples of the README without warnings, and runs them on soft0.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rdma_tests::{ROOT, library};

/// The Rust code of the README.
fn samples() -> Vec<String> {
    let document = fs::read_to_string(Path::new(ROOT).join("README.md")).expect("the README can be read");
    let blocks = document.split("\n```rust\n").skip(1);
    blocks.map(|rest| rest.split_once("\n```\n").expect("the end of the block").0.to_owned()).collect()
}

/// Compiles `sample` with `libraries`, which have a name and a file each. Warnings are errors.
fn compile(sample: &str, name: &str, libraries: &[(&str, PathBuf)]) -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    let source = program.with_extension("rs");
    fs::write(&source, sample).expect("the sample can be written");
    let mut rustc = Command::new("rustc");
    rustc.args(["--edition=2024", "--crate-name=sample", "--deny=warnings"]);
    for (name, library) in libraries {
        rustc.arg("-L").arg(format!("dependency={}", library.with_file_name("deps").display()));
        rustc.arg("--extern").arg(format!("{name}={}", library.display()));
    }
    rustc.arg("-o").arg(&program).arg(&source);
    let output = rustc.output().expect("rustc starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::remove_file(source).expect("the source exists");
    program
}

/// Runs a sample on soft0, and returns what it prints.
fn run(program: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    command.args(arguments).env_remove("RDMA_SYS_LIBIBVERBS");
    // Without other devices, a new user sets no variable. With them, soft0 has to be named.
    match fs::exists("/sys/class/infiniband_verbs") {
        Ok(false) => command.env_remove("RDMA_DEVICE"),
        _ => command.env("RDMA_DEVICE", "soft0"),
    };
    let output = command.output().expect("the sample starts");
    let [printed, errors] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).expect("text"));
    assert!(output.status.success() && errors.is_empty(), "{}\n{printed}{errors}", output.status);
    fs::remove_file(program).expect("the program exists");
    printed
}

#[test]
fn the_samples_of_the_readme_run_on_soft0_without_warnings() {
    let samples = samples();
    let [endpoints, by_address, pool, asynchronous, messages] = &samples[..] else {
        panic!("{} samples", samples.len())
    };
    let libraries = ["rdma_safe", "rdma_pool"].map(|name| (name, library(name, "build", "rlib")));
    let program = compile(endpoints, "endpoints", &libraries);
    assert_eq!(run(&program, &[]), "Receive: Some(\"hello\")\nSend: Some(\"hello\")\n");
    // Another run of this test may use the default address at the same time.
    let [.., a, b] = std::process::id().to_be_bytes();
    let program = compile(by_address, "by_address", &libraries);
    assert_eq!(run(&program, &[&format!("127.201.{a}.{b}:7471")]), "Receive: Some(\"hello\")\n");
    let program = compile(pool, "pool", &libraries);
    assert_eq!(run(&program, &[]), "received \"hello\"\n0 bytes of the pool are in use\n");
    // These need more crates, so they are examples.
    for (name, sample, printed) in
        [("hello_async", asynchronous, "Some(\"hello\")\n"), ("hello_messages", messages, "5 bytes\n1000000 bytes\n")]
    {
        let example = fs::read_to_string(Path::new(ROOT).join(format!("examples/{name}.rs"))).expect("the example");
        assert_eq!(example.split_once("\n\n").expect("a comment comes first").1, format!("{sample}\n"));
        let mut build = Command::new(env!("CARGO"));
        build.current_dir(ROOT).args(["build", "--package", "rdma-examples", "--example", name]);
        assert!(build.status().expect("cargo starts").success());
        let built = libraries[0].1.with_file_name(format!("examples/{name}"));
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        fs::copy(built, &program).expect("the example can be copied");
        assert_eq!(run(&program, &[]), printed);
    }
}
