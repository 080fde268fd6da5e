//! Programs that must not compile: each file closes one way to misuse a device, and says which.
//!
//! The expected messages are those of the current stable compiler. To accept those of a newer one, after looking at them:
//! `TRYBUILD=overwrite cargo test --test compile_fail`.

#[test]
fn misuse_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
