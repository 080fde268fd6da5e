//! What tests leave out under Miri.

/// Those of `all` that a test runs under Miri, which is slow: one, selected by the name of the test. `cargo xtask soak --only miri`
/// runs all, as does every test without Miri.
pub(crate) fn one_under_miri<T>(all: &[T]) -> &[T] {
    if !cfg!(miri) || std::env::var_os("RDMA_TEST_ALL_MODES").is_some() {
        return all;
    }
    let thread = std::thread::current();
    // libtest names the thread after the test.
    let letters = thread.name().unwrap_or_default().bytes().map(usize::from);
    let one = letters.sum::<usize>() % all.len();
    &all[one..=one]
}
