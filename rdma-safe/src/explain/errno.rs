//! Explanations of `errno`, by verb.

use crate::error::{Family, Verb, use_soft0};
use crate::{Errno, Error};

impl Error {
    /// The usual cause of this error, with advice.
    ///
    /// Depends on the verb and `errno`, or on the status of failed work. `None` if the message is already complete.
    #[must_use]
    pub fn explain(&self) -> Option<&'static str> {
        match self {
            Error::Work(error) => Some(error.status.explain()),
            Error::Unsupported { .. } => Some(
                "the device, its provider library or the kernel lacks it: see Context::attributes or `ibv_devinfo -v` for \
                 the supported features",
            ),
            error => error.call().and_then(|(verb, errno)| cause(verb, errno)),
        }
    }
}

/// The usual cause of a failed verb, unless it is obvious from the `errno`.
pub(crate) fn cause(verb: Verb, errno: Errno) -> Option<&'static str> {
    let family = verb.family();
    if family == Family::Cm {
        return cm_cause(verb, errno);
    }
    let (creates, registers, destroys) =
        (family == Family::Create, family == Family::Register, family == Family::Destroy);
    Some(match (verb, errno.0) {
        (_, libc::ENOMEM) if registers => {
            "registered memory is locked, so the locked-memory limit may be too small: see `ulimit -l`, raise it in \
             /etc/security/limits.conf (memlock) or with LimitMEMLOCK= of the systemd unit"
        }
        (Verb::CreateAh | Verb::CreateCompChannel | Verb::AllocPd, libc::ENOMEM) => {
            "the device or the kernel is out of such objects or of memory: see the limits in Context::attributes"
        }
        (_, libc::ENOMEM) if creates || verb == Verb::ResizeCq || verb == Verb::ModifySrq => {
            "queues use locked memory, so the locked-memory limit (`ulimit -l`) may be too small; or the device is out of \
             such objects: see the limits in Context::attributes"
        }
        (Verb::Posting, libc::ENOMEM | libc::ENOSPC) => "the queue is full: poll completions first",
        (Verb::Posting, libc::EINVAL) => {
            "the work request is invalid, or the queue pair is in the wrong state; QueuePair::query returns the state"
        }
        (Verb::OpenDevice, libc::EPERM | libc::EACCES) => {
            "this user may not open /dev/infiniband/uverbs*: check owner and mode, and the device cgroup of a container"
        }
        (Verb::ModifyQp, libc::EPERM) => {
            "a queue key with the highest bit set, and some changes of raw queue pairs, need privileges (CAP_NET_RAW)"
        }
        (Verb::CreateQp | Verb::CreateFlow, libc::EPERM | libc::EACCES) => {
            "raw packet queue pairs and flows need privileges (CAP_NET_RAW)"
        }
        (Verb::BindMw, libc::EPERM) => "window, region and queue pair must belong to the same protection domain",
        (_, libc::EPERM | libc::EACCES) if registers => {
            "the memory may not be locked (memlock is 0 and CAP_IPC_LOCK is missing), or is not writable, like a mapping \
             of a file that is open read-only"
        }
        (_, libc::EFAULT) if registers => {
            "part of the range is not mapped, or cannot be locked, like device memory, or is not writable although the \
             access includes writing"
        }
        (Verb::RegDmabufMr, libc::EINVAL | libc::EBADF) => {
            "the descriptor must belong to a DMA-BUF that contains these bytes, and offset and address must have the same \
             offset within a page"
        }
        (Verb::RegMrIova, libc::EINVAL) => {
            "iova and the memory must have the same offset within a page, and no address may wrap; \
             remote write and remote atomic access need local write access, and some devices reject unsupported flags"
        }
        (Verb::AllocDmah, libc::EINVAL) => {
            "a hint has two bits; mlx5 requires DmaHandleBuilder::hint, and memory_type together with cpu"
        }
        (Verb::AllocDmah, libc::EPERM) => {
            "the CPU of a DMA handle must be one that the calling thread may run on: see `taskset -p`"
        }
        (Verb::ExportBufDmabufFd, libc::ENODATA) => {
            "the provider has allocated ordinary memory; it allocates a DMA-BUF in a confidential guest, in a domain from \
             ProtectionDomain::unprotected_domain"
        }
        (Verb::RegMrEx, libc::EINVAL) => {
            "iova and the memory must have the same offset within a page, and must not be set for memory of the provider \
             that is a DMA-BUF; remote write and remote atomic access need local write access, and some devices reject \
             unsupported flags"
        }
        (Verb::AdviseMr, libc::EFAULT | libc::EPERM | libc::ENOENT) => {
            "each range must be within a region of this domain that was registered with Access::ON_DEMAND, and with local \
             write access for Advice::PrefetchWrite"
        }
        (_, libc::EINVAL) if registers => {
            "remote write and remote atomic access need local write access, and some devices reject unsupported flags"
        }
        (_, libc::EOPNOTSUPP | libc::ENOSYS) if registers => "the device does not support one of the access flags",
        (Verb::CreateQp, libc::EINVAL) => {
            "a capacity beyond the device's limits, an unsupported type, or a combination of scatter/gather elements and \
             inline data that the device does not support"
        }
        (Verb::CreateCq, libc::EINVAL) => "a number of entries or a completion vector beyond the device's limits",
        (Verb::ResizeCq, libc::EINVAL) => "more entries than the device allows, or fewer than the present completions",
        (Verb::ModifySrq, libc::EINVAL) => "more than the device allows, or less than the posted receives or the limit",
        (Verb::CreateAh, libc::EINVAL) => {
            "on RoCE an address needs a global route; its GID index and port must exist, and the peer must be resolvable"
        }
        (Verb::GetPkeyIndex, libc::ENOENT) => "the port's table does not contain the partition key",
        (Verb::QueryGidEx | Verb::QueryGid, libc::ENODATA) => "the entry of the GID table is empty",
        (Verb::ImportDevice, libc::EINVAL | libc::ENODEV) => {
            "the descriptor must belong to a context (Context::command_fd) on an existing device"
        }
        (Verb::ImportPd | Verb::ImportMr | Verb::ImportDm, libc::ENOENT) => {
            "the handle must belong to such an object of the imported context"
        }
        (_, libc::EMFILE | libc::ENFILE) => OUT_OF_DESCRIPTORS,
        (_, libc::EBUSY) if destroys => {
            "other objects still use it: objects that other code has created from its raw handle, bound memory windows, \
             attached multicast groups or flows"
        }
        (_, libc::EAGAIN) if creates || registers => {
            "the device or the kernel has temporarily run out of resources: other processes use them, or the limit of an \
             rdma cgroup is reached"
        }
        (_, libc::ENOSPC) if creates || verb == Verb::AttachMcast => "a table of the device is full",
        (_, libc::EIO | libc::ENODEV) => "the device failed, is being reset, or was unplugged: see the kernel's log",
        (_, libc::ETIMEDOUT) => "the firmware of the device, or a peer that had to be resolved, did not answer in time",
        (_, libc::EOPNOTSUPP | libc::ENOSYS) => "the device, its provider library or the kernel lacks it",
        _ => return None,
    })
}

/// Like [`cause`], for functions of librdmacm, where an `errno` has other meanings.
fn cm_cause(verb: Verb, errno: Errno) -> Option<&'static str> {
    Some(match (verb, errno.0) {
        (Verb::RdmaCreateEventChannel, libc::ENODEV) if runs_on_soft0() => {
            soft0_error().unwrap_or("soft0 does not work in a process that was forked after its first verb")
        }
        (Verb::RdmaCreateEventChannel, libc::EPERM | libc::ENODEV | libc::ENOENT) => {
            concat!(
                use_soft0!(),
                "; for a device of the kernel, load the connection manager (`modprobe rdma_ucm`), and see `rdma link`"
            )
        }
        (Verb::RdmaCreateEventChannel, libc::EACCES) => {
            "this user may not open /dev/infiniband/rdma_cm: check owner and mode, and the device cgroup of a container"
        }
        (Verb::RdmaBindAddr | Verb::RdmaListen, libc::EADDRINUSE) => {
            "another id uses the port: use a different one, or 0 for a free one"
        }
        // The kernel also reports this for a port in use, if one of the two ids is bound to all addresses.
        (Verb::RdmaBindAddr, libc::EADDRNOTAVAIL) => {
            "another id may use the port, if one of both is bound to all addresses: take another port, or 0 for a free one; \
             or no device has the address: it must belong to a network interface that `rdma link` lists, or with soft0 to any \
             interface of this host"
        }
        (Verb::RdmaResolveAddr, libc::ENODEV) if runs_on_soft0() => {
            "soft0 without RDMA_SOFT_ADDR reaches only this host, and is reached only from it: to connect to another host, set \
             RDMA_SOFT_ADDR to the address of the network interface that leads there (see `ip route get`), on both hosts"
        }
        (Verb::RdmaResolveAddr, libc::ENETUNREACH | libc::EHOSTUNREACH) if runs_on_soft0() => {
            "the host has no route to the address: see `ip route get`"
        }
        (Verb::RdmaResolveAddr, libc::EADDRNOTAVAIL) if runs_on_soft0() => "the source is no address of this host",
        (Verb::RdmaBindAddr | Verb::RdmaResolveAddr, libc::EADDRNOTAVAIL | libc::ENODEV) => {
            "no device has the address, or leads to it: it must belong to a network interface that `rdma link` lists, or be \
             the GID of an InfiniBand port"
        }
        (Verb::RdmaResolveAddr, libc::ENETUNREACH | libc::EHOSTUNREACH) => {
            "the host has no route to the address: see `ip route get`, whose interface must be one that `rdma link` lists"
        }
        (Verb::RdmaResolveRoute, libc::EINVAL) => {
            "an address must be resolved first: call Id::resolve_address, and wait for EventKind::AddressResolved"
        }
        (Verb::RdmaResolveRoute, libc::ENODEV) => {
            "no network interface of the device leads to the address, for example to 127.0.0.1 over RoCE: even for this host, use \
             the address of an interface that `rdma link` lists"
        }
        (Verb::RdmaConnect, libc::EINVAL) => {
            "a route must be resolved first (Id::resolve_route, then EventKind::RouteResolved), an id connects only once, and \
             the device must have the resources (ConnectParameters::responder_resources, initiator_depth)"
        }
        (Verb::RdmaInitQpAttr, libc::EINVAL) => {
            "it is too early: INIT needs a device, from a resolved address or a request; RTR and RTS need a request, or the \
             peer's reply (EventKind::ConnectResponse)"
        }
        (Verb::RdmaAccept | Verb::RdmaReject, libc::EINVAL) => {
            "the id must belong to a request that is not answered yet, and that the peer has not withdrawn"
        }
        (Verb::RdmaJoinMulticast | Verb::RdmaJoinMulticastEx, ENOTSUPP) => {
            "over RoCE v2 the kernel joins only IPv4 groups: use such a group, or join with a socket and attach to the group \
             (DatagramEndpoint::attach_mcast)"
        }
        (Verb::RdmaDisconnect, libc::EINVAL) => "there is no connection to end",
        (Verb::RdmaSetOption, libc::EINVAL) => "the value is out of range, or it is too late to set it for this id",
        (_, libc::ENXIO) => {
            "its device was removed, and the kernel has destroyed its side of the id: it can only be dropped"
        }
        (_, libc::EMFILE | libc::ENFILE) => OUT_OF_DESCRIPTORS,
        _ => return None,
    })
}

/// Internal error of the kernel that some calls return.
const ENOTSUPP: i32 = 524;

const OUT_OF_DESCRIPTORS: &str = "the process, or the system, is out of file descriptors: see `ulimit -n`";

/// Like [`cause`], as a suffix of a message.
pub(crate) fn advice(verb: Verb, errno: Errno) -> String {
    cause(verb, errno).map(|cause| format!("; {cause}")).unwrap_or_default()
}

/// Advice on a device that cannot be opened.
pub(crate) fn advice_on_opening(device: &str, errno: Errno) -> &'static str {
    if matches!(errno.0, libc::EMFILE | libc::ENFILE) {
        return OUT_OF_DESCRIPTORS;
    }
    if device.starts_with("soft") {
        return soft0_error().unwrap_or("soft0 has written the reason to standard error");
    }
    "check that /dev/infiniband/uverbs* exists and that this user may open it"
}

/// The reason why soft0 is not available, if it runs in this process.
fn soft0_error() -> Option<&'static str> {
    #[cfg(feature = "soft")]
    return crate::soft::setup_error();
    #[cfg(not(feature = "soft"))]
    None
}

/// Whether this crate has installed soft0.
pub(crate) fn runs_on_soft0() -> bool {
    #[cfg(feature = "soft")]
    return crate::soft::is_installed();
    #[cfg(not(feature = "soft"))]
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::CmError;
    use crate::{Access, PostError, WcStatus};

    #[test]
    fn the_memlock_limit_is_mentioned_for_calls_that_lock_memory() {
        let error = Error::RegisterMemory { len: 1, access: Access::empty(), errno: Errno(libc::ENOMEM) };
        assert_eq!((error.verb(), error.errno()), (Some(Verb::RegMr), Some(Errno(libc::ENOMEM))));
        let text = error.explain().unwrap();
        assert!(text.contains("ulimit -l") && error.to_string().contains(text), "{error}");
        assert!(cause(Verb::CreateQp, Errno(libc::ENOMEM)).unwrap().contains("ulimit -l"));
        assert!(!cause(Verb::AllocPd, Errno(libc::ENOMEM)).unwrap().contains("ulimit -l"));
    }

    #[test]
    fn advice_on_opening_depends_on_the_device() {
        let text = |device: &str, errno| Error::OpenDevice { device: device.into(), errno: Errno(errno) }.to_string();
        assert!(text("soft0", libc::EINVAL).ends_with("; soft0 has written the reason to standard error"));
        assert!(text("soft0", libc::EMFILE).ends_with(OUT_OF_DESCRIPTORS));
        assert!(text("mlx5_0", libc::EPERM).contains("/dev/infiniband/uverbs*"));
    }

    #[test]
    fn the_cause_of_an_errno_depends_on_the_verb() {
        let of = |verb, errno| cause(verb, Errno(errno)).unwrap();
        assert!(of(Verb::ModifyQp, libc::EPERM).contains("queue key"));
        assert!(of(Verb::OpenDevice, libc::EPERM).contains("/dev/infiniband"));
        assert!(of(Verb::BindMw, libc::EPERM).contains("protection domain"));
        assert!(of(Verb::RegMr, libc::EPERM).contains("CAP_IPC_LOCK"));
        assert!(of(Verb::RegMr, libc::EFAULT).contains("not mapped"));
        assert!(of(Verb::DestroyQp, libc::EBUSY).contains("multicast"));
        assert!(of(Verb::CreateQp, libc::EAGAIN).contains("cgroup"));
        assert_eq!(cause(Verb::QueryQp, Errno(libc::EBUSY)), None, "nothing was to be destroyed");
        assert_eq!(cause(Verb::QueryQp, Errno(0)), None);
    }

    #[test]
    fn librdmacm_errors_are_explained_by_steps_and_addresses() {
        let of = |verb, errno| Error::from(CmError::Call { verb, errno: Errno(errno) });
        let early = of(Verb::RdmaConnect, libc::EINVAL);
        assert_eq!((early.verb(), early.errno()), (Some(Verb::RdmaConnect), Some(Errno(libc::EINVAL))));
        assert!(early.to_string().ends_with(early.explain().unwrap()), "{early}");
        assert!(early.to_string().contains("Id::resolve_route"), "{early}");
        let elsewhere = of(Verb::RdmaBindAddr, libc::ENODEV).to_string();
        assert!(elsewhere.contains("rdma link") && !elsewhere.contains("unplugged"), "{elsewhere}");
        assert!(of(Verb::RdmaBindAddr, libc::EADDRNOTAVAIL).to_string().contains("take another port"));
        assert!(of(Verb::RdmaResolveRoute, libc::ENODEV).to_string().contains("127.0.0.1"));
        assert!(of(Verb::RdmaJoinMulticast, ENOTSUPP).to_string().contains("only IPv4 groups"));
        assert!(of(Verb::RdmaCreateEventChannel, libc::EPERM).to_string().contains("modprobe rdma_ucm"));
        assert_eq!(of(Verb::RdmaCreateId, libc::ETIMEDOUT).explain(), None, "no firmware was asked");
    }

    #[test]
    fn an_error_without_a_call_has_no_errno() {
        for error in [Error::NoDevice, Error::NoChannel, Error::Post(PostError::SharedReceives)] {
            assert_eq!((error.verb(), error.errno(), error.explain()), (None, None, None), "{error}");
        }
        let failed =
            crate::CompletionError { status: WcStatus::RETRY_EXC_ERR, vendor_error: 0, wr_id: 0, qp_num: None };
        assert_eq!(Error::from(failed).explain(), Some(WcStatus::RETRY_EXC_ERR.explain()));
        let posting = Error::Post(PostError::MaybePosted { errno: Errno(libc::EINVAL) });
        assert!(posting.explain().unwrap().contains("QueuePair::query"));
        let lacking = Error::Unsupported { device: "x0".into(), feature: "flows" };
        assert!(lacking.explain().unwrap().contains("ibv_devinfo -v"));
    }

    #[test]
    fn the_message_of_a_verb_ends_with_its_cause() {
        let error = Error::Verb { verb: Verb::AllocTd, device: "x0".into(), errno: Errno(libc::EIO) };
        assert!(error.to_string().ends_with(error.explain().unwrap()), "{error}");
        assert!(error.to_string().starts_with("ibv_alloc_td failed on x0: "), "{error}");
    }
}
