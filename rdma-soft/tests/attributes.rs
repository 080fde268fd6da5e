//! Attributes of a RoCE device that existing programs rely on.

mod datagrams;

use std::mem::offset_of;
use std::ptr::null_mut;

use rdma_soft::abi::{ibv_reg_mr, *};
use rdma_sys::*;

use datagrams::{datagrams, next_completion, send};

/// Opens a context, which stays open.
fn context() -> *mut ibv_context {
    // SAFETY: the list has one device, and stays.
    unsafe { ibv_open_device(*ibv_get_device_list(null_mut())) }
}

/// The provider's part of a context.
fn extended(context: *mut ibv_context) -> &'static verbs_context {
    // SAFETY: the context is the last field of a `verbs_context`, and stays open.
    unsafe { &*context.byte_sub(offset_of!(verbs_context, context)).cast() }
}

#[test]
#[cfg(all(target_env = "gnu", target_pointer_width = "64"))]
#[cfg_attr(miri, ignore = "it opens sockets and uses the C allocator")]
fn a_device_structure_has_room_for_verbs_device() {
    // `sizeof(struct verbs_device)` in rdma-core's driver.h since version 19.
    const VERBS_DEVICE: usize = 712;
    // SAFETY: Rust's default allocator uses the C library's, so the device is a block of the latter.
    let room = unsafe { libc::malloc_usable_size((*ibv_get_device_list(null_mut())).cast()) };
    assert!(room >= VERBS_DEVICE, "{room}");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn the_device_reports_attributes_that_programs_require() {
    let context = context();
    let mut attr = ibv_device_attr_ex::zeroed();
    let query = extended(context).query_device_ex.unwrap();
    // SAFETY: the structure has this size.
    assert_eq!(unsafe { query(context, null_mut(), &mut attr, size_of_val(&attr)) }, 0);
    assert_eq!((attr.orig_attr.phys_port_cnt, attr.phys_port_cnt_ex), (1, 1));
    let guid = u64::from_be(attr.orig_attr.node_guid);
    assert_eq!((attr.orig_attr.vendor_id, guid >> 40), (0x02_500f, 0x02_500f));
    // UCX uses atomic operations only if the device has this capability.
    assert_eq!(attr.orig_attr.atomic_cap, IBV_ATOMIC_HCA);
    let word = IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP.0 as u16;
    assert_eq!((attr.pci_atomic_caps.fetch_add, attr.pci_atomic_caps.compare_swap), (word, word));
    let mut port = ibv_port_attr::zeroed();
    // SAFETY: the structure has this size.
    assert_eq!(unsafe { extended(context).query_port.unwrap()(context, 1, &mut port, size_of_val(&port)) }, 0);
    assert_eq!((port.active_width, port.active_speed), (1, 32), "one lane of 25 Gbit/s");
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn empty_creation_flags_are_accepted() {
    // SAFETY: each object is created from the previous ones, which stay.
    unsafe {
        let context = context();
        let pd = ibv_alloc_pd(context);
        let cq = ibv_create_cq(context, 1, null_mut(), null_mut(), 0);
        let create = |create_flags: ibv_qp_create_flags| {
            let mut init = ibv_qp_init_attr_ex {
                send_cq: cq,
                recv_cq: cq,
                qp_type: IBV_QPT_RC,
                comp_mask: (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS).0,
                pd,
                create_flags: create_flags.0,
                ..ibv_qp_init_attr_ex::zeroed()
            };
            extended(context).create_qp_ex.unwrap()(context, &mut init)
        };
        assert!(!create(ibv_qp_create_flags(0)).is_null());
        assert!(create(IBV_QP_CREATE_SCATTER_FCS).is_null());
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EOPNOTSUPP));
    }
}

/// The device has two GID indices for its only address. UCX reads the packet type from the completion.
#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_datagram_completion_reports_ipv4_and_can_be_answered() {
    // SAFETY: all arguments are valid as the verbs require.
    unsafe {
        let context = context();
        let pd = ibv_alloc_pd(context);
        let [from, to] = [(); 2].map(|()| datagrams(pd));
        let mut gids = [ibv_gid { raw: [0; 16] }; 3];
        let known: Vec<_> = (0..).zip(&mut gids).map(|(index, gid)| ibv_query_gid(context, 1, index, gid)).collect();
        assert_eq!(known, [0, 0, -1]);
        assert_eq!(gids[0].raw, gids[1].raw);
        for sgid_index in [0, 1] {
            let mut received = [0_u8; 64];
            let mr = ibv_reg_mr(pd, received.as_mut_ptr().cast(), received.len(), IBV_ACCESS_LOCAL_WRITE.0 as i32);
            let mut sge = ibv_sge { addr: received.as_mut_ptr() as u64, length: 64, lkey: (*mr).lkey };
            let mut wr = ibv_recv_wr { sg_list: &mut sge, num_sge: 1, ..ibv_recv_wr::zeroed() };
            let ops = &(*context).ops;
            assert_eq!(ops.post_recv.unwrap()(to, &mut wr, &mut null_mut()), 0);
            let grh = ibv_global_route { dgid: gids[0], sgid_index, ..ibv_global_route::zeroed() };
            let peer = ibv_ah_attr { grh, is_global: 1, port_num: 1, ..ibv_ah_attr::zeroed() };
            send(from, to, peer);
            let wc = next_completion(to);
            assert_eq!((wc.status, wc.byte_len, wc.wc_flags), (IBV_WC_SUCCESS, 44, IBV_WC_GRH.0));
            assert_eq!(wc.sl, 0xa, "the packet type must be IPv4 and UDP");
            let mut back = ibv_ah_attr::zeroed();
            let grh = received.as_mut_ptr().cast();
            assert_eq!(ibv_init_ah_from_wc(context, 1, &mut { wc }, grh, &mut back), 0);
            assert_eq!((back.is_global, back.sl, back.grh.dgid.raw), (1, 0, gids[0].raw));
            assert_eq!(ibv_dereg_mr(mr), 0);
        }
    }
}
