//! Kinds of asynchronous events.

use rdma_sys::*;

use crate::named::named;

named! {
    /// Type of an asynchronous event: `enum ibv_event_type`, described in ibv_get_async_event(3).
    ///
    /// Types that newer kernels add keep their numbers.
    #[doc(alias = "ibv_event_type_str")]
    pub struct AsyncEventType(u32) as "asynchronous event" {
        /// A completion queue is in error: it overran, and completions are lost.
        CQ_ERR = IBV_EVENT_CQ_ERR.0 => "CQ_ERR",
        /// A queue pair entered the error state for a reason that no completion can report.
        QP_FATAL = IBV_EVENT_QP_FATAL.0 => "QP_FATAL",
        /// A queue pair received an invalid request.
        QP_REQ_ERR = IBV_EVENT_QP_REQ_ERR.0 => "QP_REQ_ERR",
        /// A peer requested an access that a queue pair does not allow.
        QP_ACCESS_ERR = IBV_EVENT_QP_ACCESS_ERR.0 => "QP_ACCESS_ERR",
        /// The first packet arrived at a queue pair in RTR.
        COMM_EST = IBV_EVENT_COMM_EST.0 => "COMM_EST",
        /// The send queue of a queue pair in SQD has drained.
        SQ_DRAINED = IBV_EVENT_SQ_DRAINED.0 => "SQ_DRAINED",
        /// A connection migrated to its alternate path.
        PATH_MIG = IBV_EVENT_PATH_MIG.0 => "PATH_MIG",
        /// A connection could not migrate to its alternate path.
        PATH_MIG_ERR = IBV_EVENT_PATH_MIG_ERR.0 => "PATH_MIG_ERR",
        /// The device has failed and can only be closed.
        DEVICE_FATAL = IBV_EVENT_DEVICE_FATAL.0 => "DEVICE_FATAL",
        /// The link of a port is up.
        PORT_ACTIVE = IBV_EVENT_PORT_ACTIVE.0 => "PORT_ACTIVE",
        /// The link of a port is down.
        PORT_ERR = IBV_EVENT_PORT_ERR.0 => "PORT_ERR",
        /// The LID of a port changed.
        LID_CHANGE = IBV_EVENT_LID_CHANGE.0 => "LID_CHANGE",
        /// The partition keys of a port changed.
        PKEY_CHANGE = IBV_EVENT_PKEY_CHANGE.0 => "PKEY_CHANGE",
        /// The subnet manager of a port changed.
        SM_CHANGE = IBV_EVENT_SM_CHANGE.0 => "SM_CHANGE",
        /// A shared receive queue is in error and takes no more work.
        SRQ_ERR = IBV_EVENT_SRQ_ERR.0 => "SRQ_ERR",
        /// The receives of a shared receive queue have fallen below its limit, which is now disarmed.
        SRQ_LIMIT_REACHED = IBV_EVENT_SRQ_LIMIT_REACHED.0 => "SRQ_LIMIT_REACHED",
        /// A queue pair in the error state takes no more receives from its shared receive queue.
        QP_LAST_WQE_REACHED = IBV_EVENT_QP_LAST_WQE_REACHED.0 => "QP_LAST_WQE_REACHED",
        /// The subnet manager requests clients to register again.
        CLIENT_REREGISTER = IBV_EVENT_CLIENT_REREGISTER.0 => "CLIENT_REREGISTER",
        /// The GIDs of a port changed.
        GID_CHANGE = IBV_EVENT_GID_CHANGE.0 => "GID_CHANGE",
        /// A work queue entered the error state.
        WQ_FATAL = IBV_EVENT_WQ_FATAL.0 => "WQ_FATAL",
        /// The speed of one or more ports changed.
        DEVICE_SPEED_CHANGE = IBV_EVENT_DEVICE_SPEED_CHANGE.0 => "DEVICE_SPEED_CHANGE",
    }
}
