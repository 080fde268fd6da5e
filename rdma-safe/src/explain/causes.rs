//! Likely causes of each status, including those of devices that deviate from the InfiniBand specification.

use super::{Network, WorkContext};
use crate::device::Quirks;
use crate::{QueuePairType, WcOpcode, WcStatus};

const SENDS: &[WcOpcode] = &[WcOpcode::SEND, WcOpcode::TSO];
const RECEIVES: &[WcOpcode] = &[WcOpcode::RECV, WcOpcode::RECV_RDMA_WITH_IMM];
const WRITES: &[WcOpcode] = &[WcOpcode::RDMA_WRITE, WcOpcode::ATOMIC_WRITE];
const ATOMICS: &[WcOpcode] = &[WcOpcode::COMP_SWAP, WcOpcode::FETCH_ADD];
const READS_AND_ATOMICS: &[WcOpcode] = &[WcOpcode::RDMA_READ, WcOpcode::COMP_SWAP, WcOpcode::FETCH_ADD];
/// Operations that need a key of the peer.
const ONE_SIDED: &[WcOpcode] = &[
    WcOpcode::RDMA_WRITE,
    WcOpcode::ATOMIC_WRITE,
    WcOpcode::RDMA_READ,
    WcOpcode::COMP_SWAP,
    WcOpcode::FETCH_ADD,
    WcOpcode::FLUSH,
];
/// Operations that may consume a receive of the peer.
const CONSUMING: &[WcOpcode] = &[WcOpcode::SEND, WcOpcode::TSO, WcOpcode::RDMA_WRITE];
/// Operations that write to local memory.
const LOCAL_WRITES: &[WcOpcode] =
    &[WcOpcode::RECV, WcOpcode::RECV_RDMA_WITH_IMM, WcOpcode::RDMA_READ, WcOpcode::COMP_SWAP, WcOpcode::FETCH_ADD];
/// Operations that change keys.
const KEY_CHANGES: &[WcOpcode] = &[WcOpcode::BIND_MW, WcOpcode::LOCAL_INV];

/// Likely causes, the most likely first; at least one.
pub(super) fn of(status: WcStatus, work: &WorkContext) -> Vec<&'static str> {
    let causes: &[(bool, &'static str)] = &match status {
        WcStatus::LOC_LEN_ERR => too_long(work),
        WcStatus::LOC_QP_OP_ERR => local_qp_operation(work),
        WcStatus::LOC_PROT_ERR => local_protection(work),
        WcStatus::WR_FLUSH_ERR => flushed(work),
        WcStatus::MW_BIND_ERR => window_bind(),
        WcStatus::BAD_RESP_ERR => bad_response(),
        WcStatus::LOC_ACCESS_ERR => local_access(),
        WcStatus::REM_INV_REQ_ERR => remote_invalid_request(work),
        WcStatus::REM_ACCESS_ERR => remote_access(work),
        WcStatus::REM_OP_ERR => remote_operation(work),
        WcStatus::RETRY_EXC_ERR => retry_exceeded(work),
        WcStatus::RNR_RETRY_EXC_ERR => rnr_retry_exceeded(work),
        WcStatus::RESP_TIMEOUT_ERR => response_timeout(work),
        _ => Vec::new(),
    };
    let mut causes: Vec<_> = causes.iter().filter_map(|(applies, cause)| applies.then_some(*cause)).collect();
    if causes.is_empty() {
        causes.push(status.explain());
    }
    causes
}

type Causes = Vec<(bool, &'static str)>;

fn too_long(work: &WorkContext) -> Causes {
    let (sent, received) = (work.may_be(SENDS) || work.may_be(ONE_SIDED), work.may_be(RECEIVES));
    vec![
        (received, "the message is longer than the posted receive that it consumed: agree on a maximum message length"),
        (
            received && work.may_be_type(QueuePairType::UD),
            "a receive for a datagram needs 40 bytes more than the message, for the global route header",
        ),
        (sent, "the message is longer than the port's max_message_size"),
    ]
}

fn local_qp_operation(work: &WorkContext) -> Causes {
    let posted = !work.operation.is_some_and(|operation| RECEIVES.contains(&operation));
    let data = work.may_be(SENDS) || work.may_be(RECEIVES) || work.may_be(ONE_SIDED);
    vec![
        (
            work.may_be(&[WcOpcode::ATOMIC_WRITE]),
            "the device accepted a queue pair with atomic writes, but does not support them (SoftRoCE before Linux 6.2)",
        ),
        (
            work.may_be(RECEIVES),
            "the message is longer than the posted receive (SoftRoCE does not report a local length error)",
        ),
        (
            data,
            "an lkey that does not cover its range, belongs to another protection domain, or lacks the required access \
             (SoftRoCE does not report a local protection error)",
        ),
        (
            posted,
            "the queue pair does not support the work request: its type or device lacks the operation, or it was \
             created for fewer elements or less inline data",
        ),
        (
            work.may_be(KEY_CHANGES),
            "the window or key belongs to another protection domain, or has the wrong type or state",
        ),
    ]
}

fn local_protection(work: &WorkContext) -> Causes {
    vec![
        (true, "an lkey of the work request belongs to no region, or to one that has been deregistered"),
        (true, "an element exceeds its region: address and length must be within the registered range"),
        (true, "the region belongs to another protection domain than the queue pair"),
        (
            work.may_be(LOCAL_WRITES),
            "the region was registered without Access::LOCAL_WRITE, which receives, reads and atomics need",
        ),
    ]
}

fn flushed(work: &WorkContext) -> Causes {
    vec![
        (
            true,
            "the queue pair was already in the error state: the first failed completion, in either of its queues, has \
             the reason",
        ),
        (true, "this program moved the queue pair to the error state, to drain or to close it"),
        (
            work.may_be(RECEIVES),
            "receives do not detect that the peer is gone: a failed send or the connection manager did",
        ),
    ]
}

fn window_bind() -> Causes {
    vec![
        (true, "the region of the window was registered without Access::MW_BIND, or without the access of the window"),
        (true, "the range of the window is not within its region, or the region belongs to another protection domain"),
        (true, "a window of type 2 is already bound, or was bound without a new key"),
    ]
}

fn bad_response() -> Causes {
    vec![
        (
            true,
            "replies of another connection arrived: queue pair numbers or packet sequence numbers do not match those of \
             the peer, for example after only one end was reset",
        ),
        (true, "the peer's device or driver is faulty: see its kernel's log"),
    ]
}

fn local_access() -> Causes {
    vec![(
        true,
        "an RDMA write with immediate of the peer was not allowed to write to its target: check its rkey and range, and \
         the remote access of the local region and queue pair",
    )]
}

fn remote_invalid_request(work: &WorkContext) -> Causes {
    vec![
        (
            work.may_be(SENDS),
            "the message is longer than the receive that the peer has posted: agree on a maximum message length",
        ),
        (
            work.may_be(ONE_SIDED),
            "the peer's queue pair does not allow this operation: InitOptions::peer_access, EndpointBuilder::peer_access",
        ),
        (work.may_be(ATOMICS), "the address is not a multiple of 8, or the peer's device has no atomics"),
        (
            work.may_be(READS_AND_ATOMICS),
            "more reads and atomics were in flight than the peer accepts: the local max_rd_atomic must not exceed its \
             max_dest_rd_atomic",
        ),
        (
            work.may_be(&[WcOpcode::ATOMIC_WRITE, WcOpcode::FLUSH]),
            "the peer's device lacks the operation, or its type of memory does not allow it",
        ),
        (work.may_be(SENDS), "a send with invalidate named a key that cannot be invalidated"),
    ]
}

fn remote_access(work: &WorkContext) -> Causes {
    let one_sided = work.may_be(ONE_SIDED);
    vec![
        (
            one_sided || work.may_be(SENDS),
            "the rkey does not belong to the peer's memory, or no longer: the region was dropped or the window unbound",
        ),
        (one_sided, "the range exceeds the region: addresses are the peer's, from the start of the region to its end"),
        (
            work.operation.is_some() && work.may_be(WRITES),
            "the peer's region or queue pair was set up without Access::REMOTE_WRITE",
        ),
        (
            work.operation.is_some() && work.may_be(&[WcOpcode::RDMA_READ]),
            "the peer's region or queue pair was set up without Access::REMOTE_READ",
        ),
        (
            work.operation.is_some() && work.may_be(ATOMICS),
            "the peer's region or queue pair was set up without Access::REMOTE_ATOMIC",
        ),
        (
            work.operation.is_none() || work.may_be(&[WcOpcode::FLUSH]),
            "the access flags of the peer's region or queue pair lack this remote right",
        ),
        (one_sided, "the region belongs to another protection domain than the peer's queue pair"),
    ]
}

fn remote_operation(work: &WorkContext) -> Causes {
    vec![
        (
            work.may_be(SENDS),
            "the message is longer than the receive that the peer has posted, or the lkey of that receive is wrong \
             (SoftRoCE reports both like this)",
        ),
        (true, "the peer's device could not complete it: check the peer's completions and its kernel's log"),
    ]
}

fn retry_exceeded(work: &WorkContext) -> Causes {
    vec![
        (
            true,
            "the peer is gone: its process ended, or its queue pair was destroyed, was reset or has failed; both ends \
             must then connect new queue pairs",
        ),
        (true, "the peer was not ready yet: its queue pair must be in RTR or RTS before the first send"),
        (
            work.may_be_over(Network::Roce)
                && work.may_have(Quirks::MISSING_RECEIVES_TIME_OUT)
                && work.may_be(CONSUMING),
            "the peer had no receive posted for some time (SoftRoCE of kernel 6.1 reports this, whatever rnr_retry is): \
             post receives before the peer sends",
        ),
        (
            work.may_be_over(Network::Roce),
            "GID index, route or firewall: both GIDs must have the same RoCE version and reach each other (`rdma link`, \
             `ip route get`), and UDP port 4791 must be open; a GID of 127.x.y.z, the default of soft0 without \
             RDMA_SOFT_ADDR, is reachable only from the same host",
        ),
        (
            work.may_be_over(Network::InfiniBand),
            "the peer's LID has changed or the route to it is down: check the subnet manager (`ibstat`, `sminfo`, \
             `ibtracert`), partition keys and service level",
        ),
        (
            work.may_be_over(Network::Iwarp),
            "the TCP connection was lost: check route and firewall, and whether the peer's process is running",
        ),
        (
            work.network != Some(Network::Iwarp),
            "the addresses do not match: the peer's queue pair number, or packet sequence numbers (local sq_psn, peer's \
             rq_psn)",
        ),
        (
            work.network != Some(Network::Iwarp),
            "the path MTU is larger than the network supports: small messages then arrive and large ones do not",
        ),
        (true, "timeout and retry_count are too small for a network that loses packets or for a busy peer"),
    ]
}

fn rnr_retry_exceeded(work: &WorkContext) -> Causes {
    let consumes_receive = work.may_be(SENDS) || work.may_be(&[WcOpcode::RDMA_WRITE]);
    vec![
        (
            consumes_receive,
            "the peer had no receive posted (RNR, receiver not ready): post receives before the peer sends, and limit \
             the messages in flight to the number of posted receives",
        ),
        (consumes_receive, "the peer's shared receive queue ran empty: refill it at its limit event"),
        (true, "rnr_retry here or min_rnr_timer at the peer is too small: an rnr_retry of 7 is unlimited"),
        (
            work.may_be(&[WcOpcode::RDMA_READ, WcOpcode::COMP_SWAP, WcOpcode::FETCH_ADD, WcOpcode::FLUSH]),
            "the peer's memory was being paged in (on-demand paging)",
        ),
    ]
}

fn response_timeout(work: &WorkContext) -> Causes {
    retry_exceeded(work)
}
