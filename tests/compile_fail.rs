//! Programs that must not compile: each file closes one way to misuse a device, and says which.
//!
//! The expected messages are those of the current stable compiler. To accept those of a newer one, after looking at them:
//! `TRYBUILD=overwrite cargo test --test compile_fail`.

/// Messages differ from release to release of the compiler.
const COMPILER: &str = "rustc 1.95.";

#[test]
fn misuse_does_not_compile() {
    let version = std::process::Command::new("rustc").arg("--version").output().expect("cargo has run rustc");
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    if !version.starts_with(COMPILER) {
        println!("skipped: the expected messages are those of {COMPILER}x, and this is {version}");
        return;
    }
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
