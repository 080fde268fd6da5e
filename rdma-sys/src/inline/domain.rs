//! Inline functions of XRC domains, thread domains and parent domains.

use core::ffi::c_int;

use super::extended;
use crate::bindings::*;

extended! {
    /// Opens an XRC domain: `ibv_open_xrcd(3)`.
    fn ibv_open_xrcd(
        context: *mut ibv_context,
        xrcd_init_attr: *mut ibv_xrcd_init_attr,
    ) -> *mut ibv_xrcd = open_xrcd of context;

    /// Closes an XRC domain: `ibv_close_xrcd(3)`. The C function does not check whether the operation exists.
    fn ibv_close_xrcd(xrcd: *mut ibv_xrcd) -> c_int = close_xrcd of (*xrcd).context;

    /// Allocates a thread domain: `ibv_alloc_td(3)`.
    fn ibv_alloc_td(
        context: *mut ibv_context,
        init_attr: *mut ibv_td_init_attr,
    ) -> *mut ibv_td = alloc_td of context;

    /// Frees a thread domain: `ibv_dealloc_td(3)`.
    fn ibv_dealloc_td(td: *mut ibv_td) -> c_int = dealloc_td of (*td).context;

    /// Allocates a parent domain: `ibv_alloc_parent_domain(3)`.
    fn ibv_alloc_parent_domain(
        context: *mut ibv_context,
        attr: *mut ibv_parent_domain_init_attr,
    ) -> *mut ibv_pd = alloc_parent_domain of context;
}
