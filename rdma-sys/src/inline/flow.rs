//! Inline functions of flow steering and counters.

use core::ffi::c_int;

use super::extended;
use crate::bindings::*;

extended! {
    /// Steers packets to a queue pair: `ibv_create_flow(3)`.
    fn ibv_create_flow(
        qp: *mut ibv_qp,
        flow: *mut ibv_flow_attr,
    ) -> *mut ibv_flow = ibv_create_flow of (*qp).context;

    /// Removes a flow rule: `ibv_destroy_flow(3)`.
    fn ibv_destroy_flow(flow_id: *mut ibv_flow) -> c_int = ibv_destroy_flow of (*flow_id).context;

    /// Creates an IPsec action for flow rules: `ibv_create_flow_action_esp(3)`.
    fn ibv_create_flow_action_esp(
        ctx: *mut ibv_context,
        esp: *mut ibv_flow_action_esp_attr,
    ) -> *mut ibv_flow_action = create_flow_action_esp of ctx;

    /// Modifies an IPsec action: `ibv_modify_flow_action_esp(3)`.
    fn ibv_modify_flow_action_esp(
        action: *mut ibv_flow_action,
        esp: *mut ibv_flow_action_esp_attr,
    ) -> c_int = modify_flow_action_esp of (*action).context;

    /// Destroys a flow action: `ibv_destroy_flow_action(3)`.
    fn ibv_destroy_flow_action(
        action: *mut ibv_flow_action,
    ) -> c_int = destroy_flow_action of (*action).context;

    /// Creates a set of counters: `ibv_create_counters(3)`.
    fn ibv_create_counters(
        context: *mut ibv_context,
        init_attr: *mut ibv_counters_init_attr,
    ) -> *mut ibv_counters = create_counters of context;

    /// Destroys a set of counters: `ibv_destroy_counters(3)`.
    fn ibv_destroy_counters(
        counters: *mut ibv_counters,
    ) -> c_int = destroy_counters of (*counters).context;

    /// Attaches counters to a flow rule: `ibv_attach_counters_point_flow(3)`.
    fn ibv_attach_counters_point_flow(
        counters: *mut ibv_counters,
        attr: *mut ibv_counter_attach_attr,
        flow: *mut ibv_flow,
    ) -> c_int = attach_counters_point_flow of (*counters).context;

    /// Reads a set of counters: `ibv_read_counters(3)`.
    fn ibv_read_counters(
        counters: *mut ibv_counters,
        counters_value: *mut u64,
        ncounters: u32,
        flags: u32,
    ) -> c_int = read_counters of (*counters).context;
}
