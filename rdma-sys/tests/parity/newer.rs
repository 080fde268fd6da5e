//! Compares `newer.rs` of the crate with the headers of a newer release.

use std::mem::offset_of;
use std::path::PathBuf;

use rdma_sys::*;

use crate::recorder::{self, Word as _};
use crate::world::{Provider, World};
use crate::{c, constants, inventory};

/// The include folder that `RDMA_CORE_INCLUDE_NEWER` names: rdma-core 65 or newer. It is optional, since only changes
/// to `newer.rs` need it.
fn include() -> Option<PathBuf> {
    let include = std::env::var_os("RDMA_CORE_INCLUDE_NEWER").map(PathBuf::from);
    if include.is_none() {
        println!(
            "skipped: parity of newer types: RDMA_CORE_INCLUDE_NEWER is not set (headers of rdma-core 65 or newer)"
        );
    }
    include
}

macro_rules! facts {
    ($($ty:ident { $($field:ident)* })*) => {
        vec![$(
            (concat!("sizeof(struct ", stringify!($ty), ")"), size_of::<$ty>()),
            (concat!("_Alignof(struct ", stringify!($ty), ")"), align_of::<$ty>()),
            $((concat!("offsetof(struct ", stringify!($ty), ", ", stringify!($field), ")"), offset_of!($ty, $field)),)*
        )*]
    };
}

macro_rules! values {
    ($($name:ident)*) => {
        vec![$((stringify!($name), $name.word() as usize)),*]
    };
}

#[test]
fn newer_types_and_values_match_c() {
    let Some(include) = include() else { return };
    let mut facts = facts! {
        ibv_mr_init_attr { length access comp_mask iova addr fd fd_offset dmah buf }
        ibv_dmah { context }
        ibv_dmah_init_attr { comp_mask cpu_id ph tph_mem_type }
        ibv_comp_cntr_caps { max_value max_counters supported_qp_attach_ops }
        ibv_comp_cntr { context handle }
        ibv_comp_cntr_init_attr { comp_mask flags }
        ibv_qp_attach_comp_cntr_attr { comp_mask op_mask }
    };
    facts.push(("offsetof(struct ibv_comp_cntr_init_attr, type)", offset_of!(ibv_comp_cntr_init_attr, type_)));
    // The argument of a user event: `param` did not grow.
    facts.push(("offsetof(struct rdma_cm_event, param.arg)", offset_of!(rdma_cm_event, param)));
    facts.push(("sizeof(struct rdma_cm_event)", size_of::<rdma_cm_event>()));
    facts.extend(values! {
        IBV_REG_MR_MASK_IOVA IBV_REG_MR_MASK_ADDR IBV_REG_MR_MASK_FD IBV_REG_MR_MASK_FD_OFFSET IBV_REG_MR_MASK_DMAH
        IBV_REG_MR_MASK_BUF IBV_DMAH_INIT_ATTR_MASK_CPU_ID IBV_DMAH_INIT_ATTR_MASK_PH
        IBV_DMAH_INIT_ATTR_MASK_TPH_MEM_TYPE IBV_TPH_MEM_TYPE_VM IBV_TPH_MEM_TYPE_PM IBV_QP_ATTACH_COMP_CNTR_OP_SEND
        IBV_QP_ATTACH_COMP_CNTR_OP_RECV IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_READ
        IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_READ IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_WRITE
        IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_WRITE IBV_COMP_CNTR_TYPE_WRS IBV_COMP_CNTR_TYPE_BYTES
        IBV_EVENT_DEVICE_SPEED_CHANGE IBV_DEVICE_CC_DMA_BOUNCE IBV_ODP_SUPPORT_FLUSH IBV_ODP_SUPPORT_ATOMIC_WRITE
        IBV_QUERY_QP_DATA_IN_ORDER_DEVICE_ONLY IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC
        RDMA_CM_EVENT_ADDRINFO_RESOLVED RDMA_CM_EVENT_ADDRINFO_ERROR RDMA_CM_EVENT_USER RDMA_CM_EVENT_INTERNAL RAI_SA
        RAI_DNS
    });
    let expressions: Vec<String> = facts.iter().map(|(expression, _)| (*expression).to_owned()).collect();
    for ((expression, rust), c) in facts.iter().zip(constants::evaluate("newer", &include, &expressions)) {
        assert_eq!(*rust as i64, c, "{expression}");
    }
    println!("{} facts of newer types alike", facts.len());
}

#[test]
fn newer_functions_have_the_types_of_c() {
    let Some(include) = include() else { return };
    // C cannot print a type, so the compiler compares these types with the declarations.
    let types = [
        ("ibv_alloc_buf", "void *(*)(struct ibv_pd *, size_t, struct ibv_buf **)"),
        ("ibv_alloc_dmah", "struct ibv_dmah *(*)(struct ibv_context *, struct ibv_dmah_init_attr *)"),
        ("ibv_create_comp_cntr", "struct ibv_comp_cntr *(*)(struct ibv_context *, struct ibv_comp_cntr_init_attr *)"),
        ("ibv_dealloc_dmah", "int (*)(struct ibv_dmah *)"),
        ("ibv_destroy_comp_cntr", "int (*)(struct ibv_comp_cntr *)"),
        ("ibv_dm_export_dmabuf_fd", "int (*)(struct ibv_dm *)"),
        ("ibv_export_buf_dmabuf_fd", "int (*)(struct ibv_buf *)"),
        ("ibv_free_buf", "void (*)(struct ibv_buf *)"),
        ("ibv_inc_comp_cntr", "int (*)(struct ibv_comp_cntr *, uint64_t)"),
        ("ibv_inc_err_comp_cntr", "int (*)(struct ibv_comp_cntr *, uint64_t)"),
        (
            "ibv_qp_attach_comp_cntr",
            "int (*)(struct ibv_qp *, struct ibv_comp_cntr *, struct ibv_qp_attach_comp_cntr_attr *)",
        ),
        ("_ibv_query_comp_cntr_caps", "int (*)(struct ibv_context *, struct ibv_comp_cntr_caps *, size_t)"),
        ("ibv_query_port_speed", "int (*)(struct ibv_context *, uint32_t, uint64_t *)"),
        ("ibv_read_comp_cntr", "int (*)(struct ibv_comp_cntr *, uint64_t *)"),
        ("ibv_read_err_comp_cntr", "int (*)(struct ibv_comp_cntr *, uint64_t *)"),
        ("ibv_reg_buf_mr", "struct ibv_mr *(*)(struct ibv_pd *, struct ibv_buf *, void *, size_t, int)"),
        ("ibv_reg_mr_ex", "struct ibv_mr *(*)(struct ibv_pd *, struct ibv_mr_init_attr *)"),
        ("ibv_set_comp_cntr", "int (*)(struct ibv_comp_cntr *, uint64_t)"),
        ("ibv_set_err_comp_cntr", "int (*)(struct ibv_comp_cntr *, uint64_t)"),
        ("rdma_query_addrinfo", "int (*)(struct rdma_cm_id *, struct rdma_addrinfo **)"),
        (
            "rdma_resolve_addrinfo",
            "int (*)(struct rdma_cm_id *, const char *, const char *, const struct rdma_addrinfo *)",
        ),
        ("rdma_write_cm_event", "int (*)(struct rdma_cm_id *, enum rdma_cm_event_type, int, uint64_t)"),
        ("repoll_create", "int (*)(int)"),
        ("repoll_ctl", "int (*)(int, int, int, struct epoll_event *)"),
        ("repoll_wait", "int (*)(int, struct epoll_event *, int, int)"),
    ];
    let expressions = types.map(|(name, ty)| format!("__builtin_types_compatible_p(__typeof__(&{name}), {ty})"));
    let same = constants::evaluate("newer-functions", &include, &expressions);
    for ((name, ty), same) in types.iter().zip(same) {
        assert_eq!(same, 1, "{name} is no {ty}");
    }
}

#[test]
fn newer_inlines_behave_like_c() {
    let Some(include) = include() else { return };
    let newer: Vec<String> = match c::include() {
        Some(older) => inventory::all(&include).difference(&inventory::all(&older)).cloned().collect(),
        None => return,
    };
    assert_eq!(newer, ["ibv_query_comp_cntr_caps"]);

    // `inlines` also installs the table of recorders that the Rust functions call.
    c::inlines().unwrap();
    let library = c::compile("inlines-newer", &c::source(), &include, &["-DPARITY_COMP_CNTR"]);
    c::install(&library);
    type Query = unsafe extern "C" fn(*mut ibv_context, *mut ibv_comp_cntr_caps) -> i32;
    let in_c = unsafe { library.get::<Query>(b"c_ibv_query_comp_cntr_caps\0") }.unwrap();
    let world = World::new();
    for answer in [0, 22] {
        let run = |call: &dyn Fn(*mut ibv_context, *mut ibv_comp_cntr_caps) -> i32| {
            world.reset(Provider::Has, 0);
            recorder::start(&world, answer);
            (call(world.context(), world.attr.cast()), recorder::log(), world.bytes())
        };
        let c = run(&|context, caps| unsafe { in_c(context, caps) });
        let rust = run(&|context, caps| unsafe { ibv_query_comp_cntr_caps(context, caps) });
        assert_eq!(c.1.len(), 1);
        assert!(c == rust, "{:?} {:?}", (c.0, c.1), (rust.0, rust.1));
    }
}
