//! Detection of the library's release.

use rdma_safe::device::Quirks;

use crate::fake::{Config, Fake};

#[test]
fn softroce_of_a_newer_library_has_fewer_quirks() {
    let fake = Fake::new(Config { vendor_id: 0xff_ffff, ..Config::default() });
    let quirks = fake.open().quirks();
    assert!(quirks.contains(Quirks::INLINE_NEEDS_FLAG | Quirks::REFUSED_SENDS_EXECUTE), "{quirks:?}");
    let fixed = Quirks::ONE_COMPLETION_PER_POLL | Quirks::SGE_LISTS_MISCOUNTED | Quirks::INLINE_LISTS_EMPTY;
    assert!(!quirks.intersects(fixed), "{quirks:?}");
}
