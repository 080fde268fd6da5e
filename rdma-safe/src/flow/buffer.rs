//! Attributes of a flow and its specifications, one behind the other as the provider reads them.

use std::mem::MaybeUninit;

use rdma_sys::*;

/// `struct ibv_flow_attr`, and right behind it the specifications, each as long as its `size` says.
///
/// The attributes have 20 bytes, which need an alignment of 4, and the specifications need one of 4 or 8. In C one declares a
/// packed structure, and the pointers in it lie where they happen to. Here the first specification is at an address that is a
/// multiple of 8: the attributes begin 4 bytes behind one. The sizes of specifications are multiples of 8, except that of a tag,
/// which is to be the last.
pub(super) struct Buffer {
    words: Vec<MaybeUninit<u64>>,
}

/// Where the attributes begin, in bytes.
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
    /// `None` for more specifications than can be counted.
    pub(super) fn new(attr: ibv_flow_attr, specs: &[ibv_flow_spec]) -> Option<Self> {
        let num_of_specs = u8::try_from(specs.len()).ok()?;
        // SAFETY: every member of the union begins with its type and its size, which were set.
        let size_of_spec = |spec: &ibv_flow_spec| usize::from(unsafe { spec.__bindgen_anon_1.hdr.size });
        let size = ATTR + specs.iter().map(size_of_spec).sum::<usize>();
        // 255 of the largest, with 88 bytes each, fit.
        let attr = ibv_flow_attr { size: size as u16, num_of_specs, ..attr };
        let mut words = vec![MaybeUninit::new(0_u64); (START + size).div_ceil(8)];
        let start = words.as_mut_ptr().cast::<u8>();
        // SAFETY: there is room for `START + size` bytes, which are the attributes, at a multiple of 4 by the assertion above, and
        // the specifications. A size is that of the member that was set, and at most that of the union, so that many bytes can be
        // copied; padding among them stays what it is, and nobody here reads it.
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
