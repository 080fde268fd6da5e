//! A peer may write exposed memory at any time, and bytes that change behind a `&[u8]` are undefined behaviour.

use rdma_safe::ExposedRegion;

fn main() {}

fn deref(region: &ExposedRegion) -> &[u8] {
    region //~ E0308
}

fn deref_mut(region: &mut ExposedRegion) -> &mut [u8] {
    &mut *region //~ E0308
}

fn index(region: &ExposedRegion) -> &[u8] {
    &region[..] //~ E0608
}

fn as_ref(region: &ExposedRegion) -> &[u8] {
    region.as_ref() //~ E0599 as_ref
}

fn as_slice(region: &ExposedRegion) -> &[u8] {
    region.as_slice() //~ E0599 as_slice
}
