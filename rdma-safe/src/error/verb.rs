//! The function behind an error.

use std::fmt;

/// Groups of functions whose errors have the same usual causes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Family {
    /// Creates an object of the device.
    Create,
    /// Registers memory.
    Register,
    /// Destroys an object.
    Destroy,
    /// Any other verb.
    Other,
    /// A function of librdmacm.
    Cm,
}

macro_rules! verbs {
    ($($family:ident { $($(#[$doc:meta])* $verb:ident = $name:literal,)+ })+) => {
        /// A function that failed: a verb of libibverbs, a function of librdmacm, or a system call.
        ///
        /// Printed as its C name. Functions of librdmacm keep the prefix `Rdma`.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum Verb {
            $($(#[doc = concat!("`", $name, "`")] $(#[$doc])* $verb,)+)+
        }

        impl Verb {
            /// The name in C, such as `ibv_reg_mr`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $($(Verb::$verb => $name,)+)+
                }
            }

            pub(crate) const fn family(self) -> Family {
                match self {
                    $($(Verb::$verb)|+ => Family::$family,)+
                }
            }
        }
    };
}

verbs! {
    Create {
        AllocBuf = "ibv_alloc_buf",
        AllocDm = "ibv_alloc_dm",
        AllocDmah = "ibv_alloc_dmah",
        AllocMw = "ibv_alloc_mw",
        AllocNullMr = "ibv_alloc_null_mr",
        AllocParentDomain = "ibv_alloc_parent_domain",
        AllocPd = "ibv_alloc_pd",
        AllocTd = "ibv_alloc_td",
        CreateAh = "ibv_create_ah",
        CreateCompChannel = "ibv_create_comp_channel",
        CreateCompCntr = "ibv_create_comp_cntr",
        CreateCounters = "ibv_create_counters",
        CreateCq = "ibv_create_cq",
        CreateFlow = "ibv_create_flow",
        CreateFlowActionEsp = "ibv_create_flow_action_esp",
        CreateQp = "ibv_create_qp",
        CreateQpEx = "ibv_create_qp_ex",
        CreateRwqIndTable = "ibv_create_rwq_ind_table",
        CreateSrq = "ibv_create_srq",
        CreateWq = "ibv_create_wq",
        OpenDevice = "ibv_open_device",
        OpenQp = "ibv_open_qp",
        OpenXrcd = "ibv_open_xrcd",
    }
    Register {
        RegBufMr = "ibv_reg_buf_mr",
        RegDmabufMr = "ibv_reg_dmabuf_mr",
        RegMr = "ibv_reg_mr",
        RegMrEx = "ibv_reg_mr_ex",
        RegMrIova = "ibv_reg_mr_iova",
    }
    Destroy {
        CloseXrcd = "ibv_close_xrcd",
        DeallocDmah = "ibv_dealloc_dmah",
        DeallocMw = "ibv_dealloc_mw",
        DeallocPd = "ibv_dealloc_pd",
        DeallocTd = "ibv_dealloc_td",
        DeregMr = "ibv_dereg_mr",
        DestroyAh = "ibv_destroy_ah",
        DestroyCompChannel = "ibv_destroy_comp_channel",
        DestroyCompCntr = "ibv_destroy_comp_cntr",
        DestroyCounters = "ibv_destroy_counters",
        DestroyCq = "ibv_destroy_cq",
        DestroyFlow = "ibv_destroy_flow",
        DestroyFlowAction = "ibv_destroy_flow_action",
        DestroyQp = "ibv_destroy_qp",
        DestroyRwqIndTable = "ibv_destroy_rwq_ind_table",
        DestroySrq = "ibv_destroy_srq",
        DestroyWq = "ibv_destroy_wq",
        FreeBuf = "ibv_free_buf",
        FreeDm = "ibv_free_dm",
    }
    Other {
        Fcntl = "fcntl(2)",
        AdviseMr = "ibv_advise_mr",
        AttachCountersPointFlow = "ibv_attach_counters_point_flow",
        AttachMcast = "ibv_attach_mcast",
        BindMw = "ibv_bind_mw",
        DetachMcast = "ibv_detach_mcast",
        DmExportDmabufFd = "ibv_dm_export_dmabuf_fd",
        ExportBufDmabufFd = "ibv_export_buf_dmabuf_fd",
        ForkInit = "ibv_fork_init",
        GetAsyncEvent = "ibv_get_async_event",
        GetCqEvent = "ibv_get_cq_event",
        GetDeviceList = "ibv_get_device_list",
        GetPkeyIndex = "ibv_get_pkey_index",
        GetSrqNum = "ibv_get_srq_num",
        ImportDevice = "ibv_import_device",
        ImportDm = "ibv_import_dm",
        ImportMr = "ibv_import_mr",
        ImportPd = "ibv_import_pd",
        IncCompCntr = "ibv_inc_comp_cntr",
        IncErrCompCntr = "ibv_inc_err_comp_cntr",
        InitAhFromWc = "ibv_init_ah_from_wc",
        MemcpyFromDm = "ibv_memcpy_from_dm",
        MemcpyToDm = "ibv_memcpy_to_dm",
        ModifyCq = "ibv_modify_cq",
        ModifyFlowActionEsp = "ibv_modify_flow_action_esp",
        ModifyQp = "ibv_modify_qp",
        ModifyQpRateLimit = "ibv_modify_qp_rate_limit",
        ModifySrq = "ibv_modify_srq",
        ModifyWq = "ibv_modify_wq",
        PollCq = "ibv_poll_cq",
        QpAttachCompCntr = "ibv_qp_attach_comp_cntr",
        QueryCompCntrCaps = "ibv_query_comp_cntr_caps",
        QueryDeviceEx = "ibv_query_device_ex",
        QueryEce = "ibv_query_ece",
        QueryGid = "ibv_query_gid",
        QueryGidEx = "ibv_query_gid_ex",
        QueryGidTable = "ibv_query_gid_table",
        QueryPkey = "ibv_query_pkey",
        QueryPort = "ibv_query_port",
        QueryPortSpeed = "ibv_query_port_speed",
        QueryQp = "ibv_query_qp",
        QueryRtValuesEx = "ibv_query_rt_values_ex",
        QuerySrq = "ibv_query_srq",
        ReadCompCntr = "ibv_read_comp_cntr",
        ReadCounters = "ibv_read_counters",
        ReadErrCompCntr = "ibv_read_err_comp_cntr",
        ReqNotifyCq = "ibv_req_notify_cq",
        ResizeCq = "ibv_resize_cq",
        SetCompCntr = "ibv_set_comp_cntr",
        SetEce = "ibv_set_ece",
        SetErrCompCntr = "ibv_set_err_comp_cntr",
        PthreadAtfork = "pthread_atfork(3)",
        Mmap = "mmap(2)",
        Madvise = "madvise(2)",
        Mbind = "mbind(2)",
        PollFd = "poll(2)",
        ///
        /// Polling a completion queue: `ibv_poll_cq(3)`, or `ibv_start_poll` and `ibv_next_poll`.
        Polling = "polling",
        ///
        /// Posting work: `ibv_post_send(3)`, `ibv_post_recv(3)`, `ibv_wr_complete` or a similar function.
        Posting = "posting",
    }
    Cm {
        RdmaAccept = "rdma_accept",
        RdmaBindAddr = "rdma_bind_addr",
        RdmaConnect = "rdma_connect",
        RdmaCreateEventChannel = "rdma_create_event_channel",
        RdmaCreateId = "rdma_create_id",
        RdmaDestroyId = "rdma_destroy_id",
        RdmaDisconnect = "rdma_disconnect",
        RdmaEstablish = "rdma_establish",
        RdmaGetCmEvent = "rdma_get_cm_event",
        RdmaGetRemoteEce = "rdma_get_remote_ece",
        RdmaGetaddrinfo = "rdma_getaddrinfo",
        RdmaInitQpAttr = "rdma_init_qp_attr",
        RdmaJoinMulticast = "rdma_join_multicast",
        RdmaJoinMulticastEx = "rdma_join_multicast_ex",
        RdmaLeaveMulticast = "rdma_leave_multicast",
        RdmaListen = "rdma_listen",
        RdmaMigrateId = "rdma_migrate_id",
        RdmaNotify = "rdma_notify",
        RdmaQueryAddrinfo = "rdma_query_addrinfo",
        RdmaReject = "rdma_reject",
        RdmaRejectEce = "rdma_reject_ece",
        RdmaResolveAddr = "rdma_resolve_addr",
        RdmaResolveAddrinfo = "rdma_resolve_addrinfo",
        RdmaResolveRoute = "rdma_resolve_route",
        RdmaSetLocalEce = "rdma_set_local_ece",
        RdmaSetOption = "rdma_set_option",
        RdmaWriteCmEvent = "rdma_write_cm_event",
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
