use crate::case::{Case, case};
use crate::world::Provider;

pub fn cases() -> Vec<Case> {
    vec![
        case!(ibv_create_flow(w; w.qp(), w.attr.cast()) of ibv_create_flow),
        case!(ibv_destroy_flow(w; w.flow) of ibv_destroy_flow),
        case!(ibv_create_flow_action_esp(w; w.context(), w.attr.cast()) of create_flow_action_esp),
        case!(ibv_modify_flow_action_esp(w; w.flow_action, w.attr.cast()) of modify_flow_action_esp),
        case!(ibv_destroy_flow_action(w; w.flow_action) of destroy_flow_action),
        case!(ibv_create_counters(w; w.context(), w.attr.cast()) of create_counters),
        case!(ibv_destroy_counters(w; w.counters) of destroy_counters),
        case!(ibv_attach_counters_point_flow(w; w.counters, w.attr.cast(), w.flow) of attach_counters_point_flow),
        case!(ibv_read_counters(w; w.counters, w.numbers.cast(), 3, 4) of read_counters),
        case!(ibv_open_xrcd(w; w.context(), w.attr.cast()) of open_xrcd),
        // C checks neither for the extended context nor for the operation.
        case!(ibv_close_xrcd(w; w.xrcd) of close_xrcd).only(&[Provider::Has, Provider::Covers]),
        case!(ibv_alloc_td(w; w.context(), w.attr.cast()) of alloc_td),
        case!(ibv_dealloc_td(w; w.td) of dealloc_td),
        case!(ibv_alloc_parent_domain(w; w.context(), w.attr.cast()) of alloc_parent_domain),
    ]
}
