//! What is behind an `errno`, by verb.

use crate::{Errno, Error};

impl Error {
    /// What usually is behind such an error, and what to look at: by verb and `errno`, or by the status of work that failed. `None`
    /// where the message itself says all that there is to say.
    #[must_use]
    pub fn explain(&self) -> Option<&'static str> {
        match self {
            Error::Work(error) => Some(error.status.explain()),
            Error::Unsupported { .. } => Some(
                "the device, its provider library or the kernel lacks it: see what there is in Context::attributes, or by \
                 `ibv_devinfo -v`",
            ),
            error => error.call().and_then(|(verb, errno)| cause(verb, errno)),
        }
    }
}

/// What usually is behind it, if more is known than the name of the `errno` says.
pub(crate) fn cause(verb: &str, errno: Errno) -> Option<&'static str> {
    if verb.starts_with("rdma_") {
        return connecting(verb, errno);
    }
    let registers = verb.starts_with("ibv_reg_") || verb == "ibv_rereg_mr";
    let creates = ["ibv_create_", "ibv_alloc_", "ibv_open_"].iter().any(|prefix| verb.starts_with(prefix));
    let destroys = ["ibv_destroy_", "ibv_dealloc_", "ibv_dereg_", "ibv_close_", "ibv_free_", "ibv_unimport_"]
        .iter()
        .any(|prefix| verb.starts_with(prefix));
    Some(match (verb, errno.0) {
        (_, libc::ENOMEM) if registers => {
            "registered memory is locked, so the locked-memory limit may be too small: see `ulimit -l`, raise it in \
             /etc/security/limits.conf (memlock) or with LimitMEMLOCK= of the systemd unit"
        }
        ("ibv_create_ah" | "ibv_create_comp_channel" | "ibv_alloc_pd", libc::ENOMEM) => {
            "the device or the kernel is out of such objects or of memory: see the limits in Context::attributes"
        }
        (_, libc::ENOMEM) if creates || verb == "ibv_resize_cq" || verb == "ibv_modify_srq" => {
            "queues are locked memory, too, so the locked-memory limit (`ulimit -l`) may be too small; or the device is out of \
             such objects: see the limits in Context::attributes"
        }
        ("posting", libc::ENOMEM | libc::ENOSPC) => "the queue is full: take completions first",
        ("posting", libc::EINVAL) => {
            "the provider found the work request or the state of the queue pair wrong; QueuePair::query tells the state"
        }
        ("ibv_open_device", libc::EPERM | libc::EACCES) => {
            "this user may not open /dev/infiniband/uverbs*: see their owner and mode, and the device cgroup of a container"
        }
        ("ibv_modify_qp", libc::EPERM) => {
            "a queue key with the highest bit set, and some changes of raw queue pairs, are for privileged users \
             (CAP_NET_RAW)"
        }
        ("ibv_create_qp" | "ibv_create_flow", libc::EPERM | libc::EACCES) => {
            "raw packet queue pairs and flows are for privileged users (CAP_NET_RAW)"
        }
        ("ibv_bind_mw", libc::EPERM) => "window, region and queue pair must be of one protection domain",
        (_, libc::EPERM | libc::EACCES) if registers => {
            "the memory may not be locked (memlock is 0 and CAP_IPC_LOCK is missing), or not be written, as a mapping of \
             a file that is open for reading only"
        }
        (_, libc::EFAULT) if registers => {
            "part of the range is not mapped, or not writable while the access includes writing, or cannot be locked, as \
             memory of a device"
        }
        ("ibv_reg_dmabuf_mr", libc::EINVAL | libc::EBADF) => {
            "the descriptor must be of a DMA-BUF that has these bytes, and offset and address agree within a page"
        }
        ("ibv_reg_mr_iova", libc::EINVAL) => {
            "the address that is to name the first byte must lie as far into a page as the memory does, and no address may wrap; \
             remote write and remote atomic access need local write access, and some devices refuse flags they lack"
        }
        ("ibv_alloc_dmah", libc::EINVAL) => {
            "a hint has two bits; mlx5 wants DmaHandleBuilder::hint in any case, and cpu only together with memory_type"
        }
        ("ibv_alloc_dmah", libc::EPERM) => {
            "the CPU of a DMA handle must be one that the calling thread may run on: see `taskset -p`"
        }
        ("ibv_export_buf_dmabuf_fd", libc::ENODATA) => {
            "the provider has made it of ordinary memory; of a DMA-BUF it does in a confidential guest, in a domain from \
             ProtectionDomain::unprotected_domain"
        }
        ("ibv_reg_mr_ex", libc::EINVAL) => {
            "an address that is to name the first byte must lie as far into a page as the memory does, and memory of the provider \
             that is a DMA-BUF has its own; remote write and remote atomic access need local write access, and some devices refuse \
             flags they lack"
        }
        ("ibv_advise_mr", libc::EFAULT | libc::EPERM | libc::ENOENT) => {
            "each range must lie in a region of this domain that was registered with Access::ON_DEMAND, and with local write \
             access for Advice::PrefetchWrite"
        }
        (_, libc::EINVAL) if registers => {
            "remote write and remote atomic access need local write access, and some devices refuse flags they lack"
        }
        (_, libc::EOPNOTSUPP | libc::ENOSYS) if registers => "the device does not support one of the access flags",
        ("ibv_create_qp", libc::EINVAL) => {
            "a capacity beyond the device's limits, a type that it lacks, or more scatter/gather elements or inline \
             data than go together with each other"
        }
        ("ibv_create_cq", libc::EINVAL) => "a number of entries or a completion vector beyond the device's limits",
        ("ibv_resize_cq", libc::EINVAL) => "more entries than the device allows, or fewer than there are completions",
        ("ibv_modify_srq", libc::EINVAL) => {
            "more than the device allows, or less than what is posted or than the limit"
        }
        ("ibv_create_ah", libc::EINVAL) => {
            "on RoCE an address needs a global route; its GID index and port must exist, and the peer be resolvable"
        }
        ("ibv_get_pkey_index", libc::ENOENT) => "the port's table does not hold the partition key",
        ("ibv_query_gid_ex" | "ibv_query_gid", libc::ENODATA) => "the entry of the GID table is empty",
        ("ibv_import_device", libc::EINVAL | libc::ENODEV) => {
            "the descriptor must be that of a context (Context::command_fd) on a device that is there"
        }
        ("ibv_import_pd" | "ibv_import_mr" | "ibv_import_dm", libc::ENOENT) => {
            "the handle must be of such an object of the context whose descriptor was imported"
        }
        (_, libc::EMFILE | libc::ENFILE) => OUT_OF_DESCRIPTORS,
        (_, libc::EBUSY) if destroys => {
            "something that was made from it is still there: objects made by other code from its raw handle, bound memory \
             windows, attached multicast groups or flows"
        }
        (_, libc::EAGAIN) if creates || registers => {
            "the device or the kernel is out of what this needs for now: other processes hold it, or the limit of an rdma \
             cgroup is reached"
        }
        (_, libc::ENOSPC) if creates || verb == "ibv_attach_mcast" => "a table of the device is full",
        (_, libc::EIO | libc::ENODEV) => "the device failed, is being reset, or was unplugged: see the kernel's log",
        (_, libc::ETIMEDOUT) => "the firmware of the device, or a peer that had to be resolved, did not answer in time",
        (_, libc::EOPNOTSUPP | libc::ENOSYS) => "the device, its provider library or the kernel lacks it",
        _ => return None,
    })
}

/// As [`cause`], of functions of librdmacm, to which an `errno` means something else.
fn connecting(call: &str, errno: Errno) -> Option<&'static str> {
    Some(match (call, errno.0) {
        ("rdma_create_event_channel", libc::EPERM | libc::ENODEV | libc::ENOENT) => {
            "the kernel has no connection management, or no device: load its module (`modprobe rdma_ucm`), and see `rdma link`"
        }
        ("rdma_create_event_channel", libc::EACCES) => {
            "this user may not open /dev/infiniband/rdma_cm: see its owner and mode, and the device cgroup of a container"
        }
        // No kernel says so, and everything begins with this call.
        ("rdma_create_event_channel", libc::EOPNOTSUPP) => {
            "soft0 has no connection manager: exchange addresses out of band (QueuePairAddress), or take a device of the kernel: \
             see `rdma link`"
        }
        ("rdma_bind_addr" | "rdma_listen", libc::EADDRINUSE) => {
            "another id has the port: take another one, or 0, which finds a free one"
        }
        // The kernel says so of a port, too, where one of the two that want it does for every address.
        ("rdma_bind_addr", libc::EADDRNOTAVAIL) => {
            "another id may have the port, and it or this one at every address: take another port, or 0, which finds a free one; \
             or no device has the address: it must be that of a network interface that `rdma link` names"
        }
        ("rdma_bind_addr" | "rdma_resolve_addr", libc::EADDRNOTAVAIL | libc::ENODEV) => {
            "no device has the address, or leads there: it must be that of a network interface that `rdma link` names, or, of \
             InfiniBand itself, the GID of an InfiniBand port"
        }
        ("rdma_resolve_addr", libc::ENETUNREACH | libc::EHOSTUNREACH) => {
            "the host has no route to the address: see `ip route get`, whose interface must be one that `rdma link` names"
        }
        ("rdma_resolve_route", libc::EINVAL) => {
            "an address must be resolved before: Id::resolve_address, and wait for EventKind::AddressResolved"
        }
        ("rdma_resolve_route", libc::ENODEV) => {
            "no network interface of the device leads there, as none does to 127.0.0.1 over RoCE: take the address of an interface \
             that `rdma link` names, also for this host itself"
        }
        ("rdma_connect", libc::EINVAL) => {
            "a route must be resolved before (Id::resolve_route, and wait for EventKind::RouteResolved), an id connects once, and \
             the device must have the resources (ConnectParameters::responder_resources, initiator_depth)"
        }
        ("rdma_init_qp_attr", libc::EINVAL) => {
            "the id is not that far: for INIT it needs a device, that is an address that was resolved or a request; for RTR and \
             RTS a request, or the peer's answer (EventKind::ConnectResponse)"
        }
        ("rdma_accept" | "rdma_reject", libc::EINVAL) => {
            "the id must have come with a request that was not answered yet, and of which the peer has not let go"
        }
        ("rdma_join_multicast" | "rdma_join_multicast_ex", ENOTSUPP) => {
            "over RoCE v2 the kernel joins groups of IPv4 only: take one of those, or join by a socket and attach to the group \
             (DatagramEndpoint::attach_mcast)"
        }
        ("rdma_disconnect", libc::EINVAL) => "there is no connection to end",
        ("rdma_set_option", libc::EINVAL) => {
            "the value is out of range, or the id is past the call that would have used it"
        }
        (_, libc::ENXIO) => "its device was removed, and the kernel has let go of the id: it can only be dropped",
        (_, libc::EMFILE | libc::ENFILE) => OUT_OF_DESCRIPTORS,
        _ => return None,
    })
}

/// Of the kernel within, which lets it out in places.
const ENOTSUPP: i32 = 524;

const OUT_OF_DESCRIPTORS: &str = "the process, or the system, is out of file descriptors: see `ulimit -n`";

/// As [`cause`], to be added to a message.
pub(crate) fn advice(verb: &str, errno: Errno) -> String {
    cause(verb, errno).map(|cause| format!("; {cause}")).unwrap_or_default()
}

/// What to look at when a device cannot be opened.
pub(crate) fn advice_on_opening(errno: Errno) -> &'static str {
    match errno.0 {
        // Of no device of the kernel.
        libc::EADDRNOTAVAIL => reason_of_soft0().unwrap_or("soft0 has written the reason to standard error"),
        _ => "check that /dev/infiniband/uverbs* exists and that this user may open it",
    }
}

/// Why it cannot be had, if it is in this process.
fn reason_of_soft0() -> Option<&'static str> {
    #[cfg(feature = "soft")]
    return crate::soft::setup_error();
    #[cfg(not(feature = "soft"))]
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::CmError;
    use crate::{Access, PostError, WcStatus};

    #[test]
    fn memory_that_cannot_be_locked_is_explained_where_it_is_locked() {
        let error = Error::RegisterMemory { len: 1, access: Access::empty(), errno: Errno(libc::ENOMEM) };
        assert_eq!((error.verb(), error.errno()), (Some("ibv_reg_mr"), Some(Errno(libc::ENOMEM))));
        let text = error.explain().unwrap();
        assert!(text.contains("ulimit -l") && error.to_string().contains(text), "{error}");
        assert!(cause("ibv_create_qp", Errno(libc::ENOMEM)).unwrap().contains("ulimit -l"));
        assert!(!cause("ibv_alloc_pd", Errno(libc::ENOMEM)).unwrap().contains("ulimit -l"));
    }

    #[test]
    fn one_errno_means_what_the_verb_makes_of_it() {
        let of = |verb, errno| cause(verb, Errno(errno)).unwrap();
        assert!(of("ibv_modify_qp", libc::EPERM).contains("queue key"));
        assert!(of("ibv_open_device", libc::EPERM).contains("/dev/infiniband"));
        assert!(of("ibv_bind_mw", libc::EPERM).contains("protection domain"));
        assert!(of("ibv_reg_mr", libc::EPERM).contains("CAP_IPC_LOCK"));
        assert!(of("ibv_reg_mr", libc::EFAULT).contains("not mapped"));
        assert!(of("ibv_destroy_qp", libc::EBUSY).contains("multicast"));
        assert!(of("ibv_create_qp", libc::EAGAIN).contains("cgroup"));
        assert_eq!(cause("ibv_query_qp", Errno(libc::EBUSY)), None, "nothing was to be destroyed");
        assert_eq!(cause("ibv_query_qp", Errno(0)), None);
    }

    #[test]
    fn librdmacm_is_told_of_steps_and_addresses_and_not_of_broken_devices() {
        let of = |call, errno| Error::from(CmError::Call { call, errno: Errno(errno) });
        let early = of("rdma_connect", libc::EINVAL);
        assert_eq!((early.verb(), early.errno()), (Some("rdma_connect"), Some(Errno(libc::EINVAL))));
        assert!(early.to_string().ends_with(early.explain().unwrap()), "{early}");
        assert!(early.to_string().contains("Id::resolve_route"), "{early}");
        let elsewhere = of("rdma_bind_addr", libc::ENODEV).to_string();
        assert!(elsewhere.contains("rdma link") && !elsewhere.contains("unplugged"), "{elsewhere}");
        assert!(of("rdma_bind_addr", libc::EADDRNOTAVAIL).to_string().contains("take another port"));
        assert!(of("rdma_resolve_route", libc::ENODEV).to_string().contains("127.0.0.1"));
        assert!(of("rdma_join_multicast", ENOTSUPP).to_string().contains("groups of IPv4 only"));
        assert!(of("rdma_create_event_channel", libc::EPERM).to_string().contains("modprobe rdma_ucm"));
        assert!(of("rdma_create_event_channel", libc::EOPNOTSUPP).to_string().contains("QueuePairAddress"));
        assert_eq!(of("rdma_create_id", libc::ETIMEDOUT).explain(), None, "no firmware was asked");
    }

    #[test]
    fn an_error_without_a_call_has_no_errno() {
        for error in [Error::NoDevice, Error::NoChannel, Error::Post(PostError::SharedReceives)] {
            assert_eq!((error.verb(), error.errno(), error.explain()), (None, None, None), "{error}");
        }
        let failed =
            crate::CompletionError { status: WcStatus::RETRY_EXC_ERR, vendor_error: 0, wr_id: 0, qp_num: None };
        assert_eq!(Error::from(failed).explain(), Some(WcStatus::RETRY_EXC_ERR.explain()));
        let posting = Error::Post(PostError::InDoubt { errno: Errno(libc::EINVAL) });
        assert!(posting.explain().unwrap().contains("QueuePair::query"));
        let lacking = Error::Unsupported { device: "x0".into(), feature: "flows" };
        assert!(lacking.explain().unwrap().contains("ibv_devinfo -v"));
    }

    #[test]
    fn the_message_of_a_verb_ends_with_its_cause() {
        let error = Error::Verb { verb: "ibv_alloc_td", device: "x0".into(), errno: Errno(libc::EIO) };
        assert!(error.to_string().ends_with(error.explain().unwrap()), "{error}");
        assert!(error.to_string().starts_with("ibv_alloc_td failed on x0: "), "{error}");
    }
}
