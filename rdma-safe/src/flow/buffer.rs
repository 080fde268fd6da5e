//! Memory layout of a flow's attributes and specifications.

use std::mem::MaybeUninit;

use rdma_sys::*;

/// `struct ibv_flow_attr`, directly followed by the specifications, each of the length in its `size`.
///
/// The attributes have 20 bytes and an alignment of 4. Specifications need an alignment of 4 or 8. C programs declare a
/// packed structure, which ignores the alignment of pointers. Here the attributes start at 4 bytes past a multiple of
/// 8, so the first specification is aligned to 8. Sizes of specifications are multiples of 8, except for a tag, which
/// must therefore be the last.
pub(super) struct Buffer {
    words: Vec<MaybeUninit<u64>>,
}

/// Offset of the attributes in bytes.
const START: usize = 4;
const ATTR: usize = size_of::<ibv_flow_attr>();
const _: () = {
    assert!((START + ATTR) % 8 == 0 && START % align_of::<ibv_flow_attr>() == 0);
    assert!(align_of::<ibv_flow_spec>() == 8);
    assert!(size_of::<ibv_flow_spec_eth>() % 8 == 0 && size_of::<ibv_flow_spec_ipv4>() % 8 == 0);
    assert!(size_of::<ibv_flow_spec_ipv4_ext>() % 8 == 0 && size_of::<ibv_flow_spec_ipv6>() % 8 == 0);
    assert!(size_of::<ibv_flow_spec_tcp_udp>() % 8 == 0 && size_of::<ibv_flow_spec_tunnel>() % 8 == 0);
    assert!(size_of::<ibv_flow_spec_gre>() % 8 == 0 && size_of::<ibv_flow_spec_mpls>() % 8 == 0);
    assert!(size_of::<ibv_flow_spec_esp>() % 8 == 0 && size_of::<ibv_flow_spec_action_handle>() % 8 == 0);
    assert!(size_of::<ibv_flow_spec_counter_action>() % 8 == 0 && size_of::<ibv_flow_spec_action_drop>() % 8 == 0);
};

impl Buffer {
    /// `None` if there are more than 255 specifications.
    pub(super) fn new(attr: ibv_flow_attr, specs: &[ibv_flow_spec]) -> Option<Self> {
        let num_of_specs = u8::try_from(specs.len()).ok()?;
        // SAFETY: all members of the union start with type and size, which are set.
        let size_of_spec = |spec: &ibv_flow_spec| usize::from(unsafe { spec.__bindgen_anon_1.hdr.size });
        let size = ATTR + specs.iter().map(size_of_spec).sum::<usize>();
        // 255 specifications of the maximum of 88 bytes fit in 16 bits.
        let attr = ibv_flow_attr { size: size as u16, num_of_specs, ..attr };
        let mut words = vec![MaybeUninit::new(0_u64); (START + size).div_ceil(8)];
        let start = words.as_mut_ptr().cast::<u8>();
        // SAFETY: `words` has room for `START + size` bytes: the attributes, aligned to 4 by the assertion above, and
        // the specifications. Each size is the size of the union's active member, and at most the size of
        // the union, so that many bytes can be copied. Padding among them stays uninitialised, and is not read here.
        unsafe {
            start.add(START).cast::<ibv_flow_attr>().write(attr);
            let mut to = start.add(START + ATTR);
            for spec in specs {
                let size = size_of_spec(spec);
                to.copy_from_nonoverlapping((&raw const *spec).cast(), size);
                to = to.add(size);
            }
        }
        Some(Buffer { words })
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut ibv_flow_attr {
        self.words.as_mut_ptr().cast::<u8>().wrapping_add(START).cast()
    }
}
