//! Kinds of asynchronous events.

use rdma_sys::*;

use crate::named::named;

named! {
    /// What an asynchronous event reports: `enum ibv_event_type`, described in ibv_get_async_event(3).
    ///
    /// Kernels to come have more kinds; their numbers are kept.
    #[doc(alias = "ibv_event_type_str")]
    pub struct AsyncEventType(u32) as "asynchronous event" {
        /// A completion queue is in error: it overran, and completions are lost.
        CQ_ERR = IBV_EVENT_CQ_ERR.0 => "CQ_ERR",
        /// A queue pair went to the error state, for a reason that no completion can report.
        QP_FATAL = IBV_EVENT_QP_FATAL.0 => "QP_FATAL",
        /// A queue pair got an invalid request.
        QP_REQ_ERR = IBV_EVENT_QP_REQ_ERR.0 => "QP_REQ_ERR",
        /// A peer asked a queue pair for what it may not do.
        QP_ACCESS_ERR = IBV_EVENT_QP_ACCESS_ERR.0 => "QP_ACCESS_ERR",
        /// The first packet arrived at a queue pair that is in RTR.
        COMM_EST = IBV_EVENT_COMM_EST.0 => "COMM_EST",
        /// A queue pair in SQD has no send in progress any more.
        SQ_DRAINED = IBV_EVENT_SQ_DRAINED.0 => "SQ_DRAINED",
        /// A connection went over to its alternate path.
        PATH_MIG = IBV_EVENT_PATH_MIG.0 => "PATH_MIG",
        /// A connection could not go over to its alternate path.
        PATH_MIG_ERR = IBV_EVENT_PATH_MIG_ERR.0 => "PATH_MIG_ERR",
        /// The device is broken. Nothing but closing it helps.
        DEVICE_FATAL = IBV_EVENT_DEVICE_FATAL.0 => "DEVICE_FATAL",
        /// A port's link is up.
        PORT_ACTIVE = IBV_EVENT_PORT_ACTIVE.0 => "PORT_ACTIVE",
        /// A port's link is down.
        PORT_ERR = IBV_EVENT_PORT_ERR.0 => "PORT_ERR",
        /// A port has another LID.
        LID_CHANGE = IBV_EVENT_LID_CHANGE.0 => "LID_CHANGE",
        /// A port has other partition keys.
        PKEY_CHANGE = IBV_EVENT_PKEY_CHANGE.0 => "PKEY_CHANGE",
        /// A port has another subnet manager.
        SM_CHANGE = IBV_EVENT_SM_CHANGE.0 => "SM_CHANGE",
        /// A shared receive queue is in error, and takes no more work.
        SRQ_ERR = IBV_EVENT_SRQ_ERR.0 => "SRQ_ERR",
        /// A shared receive queue has fewer receives left than its limit, which is now disarmed.
        SRQ_LIMIT_REACHED = IBV_EVENT_SRQ_LIMIT_REACHED.0 => "SRQ_LIMIT_REACHED",
        /// A queue pair in the error state takes no more receives from its shared receive queue.
        QP_LAST_WQE_REACHED = IBV_EVENT_QP_LAST_WQE_REACHED.0 => "QP_LAST_WQE_REACHED",
        /// The subnet manager wants to be told again what was registered with it.
        CLIENT_REREGISTER = IBV_EVENT_CLIENT_REREGISTER.0 => "CLIENT_REREGISTER",
        /// A port has other GIDs.
        GID_CHANGE = IBV_EVENT_GID_CHANGE.0 => "GID_CHANGE",
        /// A work queue went to the error state.
        WQ_FATAL = IBV_EVENT_WQ_FATAL.0 => "WQ_FATAL",
        /// The speed of one or more ports changed.
        DEVICE_SPEED_CHANGE = IBV_EVENT_DEVICE_SPEED_CHANGE.0 => "DEVICE_SPEED_CHANGE",
    }
}
