use std::mem::offset_of;
use std::ptr::null;

use rdma_sys::*;

use crate::case::{Case, case};
use crate::world::World;

pub fn cases() -> Vec<Case> {
    // A null pointer if the first number is 0.
    fn input(w: &World) -> *const ibv_query_device_ex_input {
        if unsafe { (*w.numbers)[0] } == 0 { null() } else { w.device_input }
    }
    fn set(w: &World, given: u64, comp_mask: u32) {
        unsafe {
            (*w.numbers)[0] = given;
            (*w.device_input).comp_mask = comp_mask;
        }
    }
    vec![
        case!(verbs_get_ctx(w; w.context())).with("", offset_of!(verbs_context, query_port)),
        case!(___ibv_query_port(w; w.context(), 0xfe, w.port_attr))
            .with("query_port", offset_of!(verbs_context, query_port)),
        case!(ibv_query_port(w; w.context(), 0xfe, w.port_attr))
            .with("query_port", offset_of!(verbs_context, query_port)),
        case!(ibv_query_gid_ex(w; w.context(), 1 << 31, 2, w.gid_entries.cast(), 3)),
        case!(ibv_query_gid_table(w; w.context(), w.gid_entries.cast(), 2, 3)),
        case!(ibv_query_rt_values_ex(w; w.context(), w.attr.cast()) of query_rt_values),
        case!(ibv_query_device_ex(w; w.context(), input(w), w.device_attr))
            .with("query_device_ex", offset_of!(verbs_context, query_device_ex))
            .variants(&[
                ("without input", |w| set(w, 0, 1)),
                ("with input", |w| set(w, 1, 0)),
                ("with an input that asks for something", |w| set(w, 1, 1 << 31)),
            ]),
    ]
}
