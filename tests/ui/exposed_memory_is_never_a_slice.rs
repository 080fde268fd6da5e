//! A peer writes exposed memory at any time; bytes that change under a `&[u8]` are undefined behaviour.

use rdma_safe::ExposedRegion;

fn main() {}

fn deref(region: &ExposedRegion) -> &[u8] {
    region
}

fn deref_mut(region: &mut ExposedRegion) -> &mut [u8] {
    &mut *region
}

fn index(region: &ExposedRegion) -> &[u8] {
    &region[..]
}

fn as_ref(region: &ExposedRegion) -> &[u8] {
    region.as_ref()
}

fn as_slice(region: &ExposedRegion) -> &[u8] {
    region.as_slice()
}
