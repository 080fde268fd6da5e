//! Likely causes by status. Where devices deviate from IBTA, what the deviation means stands with the others.

use super::{Circumstances, Network};
use crate::{QueuePairType, Quirks, WcOpcode, WcStatus};

const SENDS: &[WcOpcode] = &[WcOpcode::SEND, WcOpcode::TSO];
const RECEIVES: &[WcOpcode] = &[WcOpcode::RECV, WcOpcode::RECV_RDMA_WITH_IMM];
const WRITES: &[WcOpcode] = &[WcOpcode::RDMA_WRITE, WcOpcode::ATOMIC_WRITE];
const ATOMICS: &[WcOpcode] = &[WcOpcode::COMP_SWAP, WcOpcode::FETCH_ADD];
const READS_AND_ATOMICS: &[WcOpcode] = &[WcOpcode::RDMA_READ, WcOpcode::COMP_SWAP, WcOpcode::FETCH_ADD];
/// What needs a key of the peer.
const ONE_SIDED: &[WcOpcode] = &[
    WcOpcode::RDMA_WRITE,
    WcOpcode::ATOMIC_WRITE,
    WcOpcode::RDMA_READ,
    WcOpcode::COMP_SWAP,
    WcOpcode::FETCH_ADD,
    WcOpcode::FLUSH,
];
/// What may take a receive of the peer.
const TAKING: &[WcOpcode] = &[WcOpcode::SEND, WcOpcode::TSO, WcOpcode::RDMA_WRITE];
/// What writes to memory here.
const FILLING: &[WcOpcode] =
    &[WcOpcode::RECV, WcOpcode::RECV_RDMA_WITH_IMM, WcOpcode::RDMA_READ, WcOpcode::COMP_SWAP, WcOpcode::FETCH_ADD];
/// What changes keys.
const KEYS: &[WcOpcode] = &[WcOpcode::BIND_MW, WcOpcode::LOCAL_INV];

/// Likely causes, likeliest first; at least one.
pub(super) fn of(status: WcStatus, work: &Circumstances) -> Vec<&'static str> {
    let causes: &[(bool, &'static str)] = &match status {
        WcStatus::LOC_LEN_ERR => too_long(work),
        WcStatus::LOC_QP_OP_ERR => invalid_here(work),
        WcStatus::LOC_PROT_ERR => local_protection(work),
        WcStatus::WR_FLUSH_ERR => flushed(work),
        WcStatus::MW_BIND_ERR => window(),
        WcStatus::BAD_RESP_ERR => bad_response(),
        WcStatus::LOC_ACCESS_ERR => local_access(),
        WcStatus::REM_INV_REQ_ERR => invalid_there(work),
        WcStatus::REM_ACCESS_ERR => remote_access(work),
        WcStatus::REM_OP_ERR => remote_operation(work),
        WcStatus::RETRY_EXC_ERR => unanswered(work),
        WcStatus::RNR_RETRY_EXC_ERR => not_ready(work),
        WcStatus::RESP_TIMEOUT_ERR => late(work),
        _ => Vec::new(),
    };
    let mut causes: Vec<_> = causes.iter().filter_map(|(applies, cause)| applies.then_some(*cause)).collect();
    if causes.is_empty() {
        causes.push(status.explain());
    }
    causes
}

type Causes = Vec<(bool, &'static str)>;

fn too_long(work: &Circumstances) -> Causes {
    let (sent, received) = (work.may_be(SENDS) || work.may_be(ONE_SIDED), work.may_be(RECEIVES));
    vec![
        (received, "the message is longer than the posted receive that it took: agree on a largest message"),
        (
            received && work.may_be_type(QueuePairType::UD),
            "a receive of a datagram needs 40 bytes more than the message, for the global route header",
        ),
        (sent, "the message is longer than the port's max_message_size"),
    ]
}

fn invalid_here(work: &Circumstances) -> Causes {
    let posted = !work.operation.is_some_and(|operation| RECEIVES.contains(&operation));
    let data = work.may_be(SENDS) || work.may_be(RECEIVES) || work.may_be(ONE_SIDED);
    vec![
        (
            work.may_be(&[WcOpcode::ATOMIC_WRITE]),
            "the device took the queue pair for atomic writes, which it lacks (SoftRoCE before Linux 6.2)",
        ),
        (
            work.may_be(RECEIVES),
            "the message is longer than the posted receive, which SoftRoCE reports so instead of as a local length error",
        ),
        (
            data,
            "an lkey that does not cover its range, belongs to another protection domain, or lacks the access that is \
             needed, which SoftRoCE reports so instead of as a local protection error",
        ),
        (
            posted,
            "the work request does not fit the queue pair: an operation that its type or device lacks, or more \
             elements or inline data than it was created for",
        ),
        (
            work.may_be(KEYS),
            "the window or key is of another protection domain, of the wrong type, or not in a state for this",
        ),
    ]
}

fn local_protection(work: &Circumstances) -> Causes {
    vec![
        (true, "an lkey of the work request is of no region, or of one that was deregistered meanwhile"),
        (true, "an element reaches beyond its region: address and length must lie within what was registered"),
        (true, "the region belongs to another protection domain than the queue pair"),
        (
            work.may_be(FILLING),
            "the region was registered without Access::LOCAL_WRITE, which receives, reads and atomics need",
        ),
    ]
}

fn flushed(work: &Circumstances) -> Causes {
    vec![
        (
            true,
            "the queue pair was in the error state when its turn came: the completion that failed first, of whichever of \
             its two queues, says why",
        ),
        (true, "this program moved the queue pair to the error state, to drain or to close it"),
        (
            work.may_be(RECEIVES),
            "receives do not notice by themselves that the peer is gone: a failed send, or the connection manager, did",
        ),
    ]
}

fn window() -> Causes {
    vec![
        (
            true,
            "the region below the window was registered without Access::MW_BIND, or without the rights of the window",
        ),
        (true, "the range of the window is not within its region, or that is of another protection domain"),
        (true, "a window of type 2 is bound already, or was to be bound without a new key"),
    ]
}

fn bad_response() -> Causes {
    vec![
        (
            true,
            "answers of another connection arrived: queue pair numbers or packet sequence numbers do not fit those that \
             the peer was given, for instance after one end alone was reset",
        ),
        (true, "the peer's device or driver is faulty: see its kernel's log"),
    ]
}

fn local_access() -> Causes {
    vec![(
        true,
        "an RDMA write with immediate of the peer touched memory that it may not write: its rkey, range, and the remote \
         rights of region and queue pair here",
    )]
}

fn invalid_there(work: &Circumstances) -> Causes {
    vec![
        (
            work.may_be(SENDS),
            "the message is longer than the receive that the peer had posted for it: agree on a largest message",
        ),
        (
            work.may_be(ONE_SIDED),
            "the peer's queue pair does not allow this operation: InitOptions::peer_access, EndpointBuilder::peer_access",
        ),
        (work.may_be(ATOMICS), "the address is not a multiple of 8, or the peer's device has no atomics"),
        (
            work.may_be(READS_AND_ATOMICS),
            "more reads and atomics were in flight than the peer serves at a time: max_rd_atomic here must not exceed its \
             max_dest_rd_atomic",
        ),
        (
            work.may_be(&[WcOpcode::ATOMIC_WRITE, WcOpcode::FLUSH]),
            "the peer's device lacks the operation, or its memory is of a type that does not allow it",
        ),
        (work.may_be(SENDS), "a send with invalidate named a key that cannot be invalidated"),
    ]
}

fn remote_access(work: &Circumstances) -> Causes {
    let one_sided = work.may_be(ONE_SIDED);
    vec![
        (
            one_sided || work.may_be(SENDS),
            "the rkey is not that of the peer's memory, or not any more: the region was dropped, the window unbound",
        ),
        (one_sided, "the range leaves the region: addresses are the peer's, from its start to before its end"),
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

fn remote_operation(work: &Circumstances) -> Causes {
    vec![
        (
            work.may_be(SENDS),
            "the message is longer than the receive that the peer had posted, or the lkey of that receive is wrong: \
             SoftRoCE reports both so",
        ),
        (true, "the peer's device could not complete it: look at the peer's own completions and its kernel's log"),
    ]
}

fn unanswered(work: &Circumstances) -> Causes {
    vec![
        (
            true,
            "the peer is gone: its process ended, or its queue pair was destroyed, reset, or failed first; both ends then \
             begin anew, with new queue pairs whose addresses they exchange",
        ),
        (true, "the peer was not ready yet: its queue pair must be in RTR or RTS before anything is sent to it"),
        (
            work.may_be_over(Network::Roce) && work.may_have(Quirks::MISSING_RECEIVES_TIME_OUT) && work.may_be(TAKING),
            "the peer is there and had no receive posted for some time, which SoftRoCE of kernel 6.1 reports so, whatever \
             rnr_retry is: post receives before the peer may send",
        ),
        (
            work.may_be_over(Network::Roce),
            "GID index, route or firewall: both GIDs must be of one RoCE version and reach each other (`rdma link`, \
             `ip route get`), and UDP port 4791 be open; one of 127.x.y.z, which soft0 has unless RDMA_SOFT_ADDR gives it \
             another, is reached from its own host only",
        ),
        (
            work.may_be_over(Network::InfiniBand),
            "the peer's LID has changed or the way to it is down: the subnet manager (`ibstat`, `sminfo`, `ibtracert`), \
             partition keys and service level",
        ),
        (
            work.may_be_over(Network::Iwarp),
            "the TCP connection was lost: route and firewall, and whether the peer's process is there",
        ),
        (
            work.network != Some(Network::Iwarp),
            "the addresses do not fit each other: the peer's queue pair number, or packet sequence numbers (sq_psn here, \
             rq_psn there)",
        ),
        (
            work.network != Some(Network::Iwarp),
            "the path MTU is larger than the network carries: small messages then pass and large ones do not",
        ),
        (true, "timeout and retry_count are too short for a network that loses packets or a peer that is busy"),
    ]
}

fn not_ready(work: &Circumstances) -> Causes {
    let takes_receive = work.may_be(SENDS) || work.may_be(&[WcOpcode::RDMA_WRITE]);
    vec![
        (
            takes_receive,
            "the peer had no receive posted (RNR, receiver not ready): post receives before the peer may send, and limit \
             what is in flight to what the peer has posted",
        ),
        (takes_receive, "the peer's shared receive queue ran empty: refill it at its limit event"),
        (true, "rnr_retry here or min_rnr_timer there is too small: 7 retries for ever"),
        (
            work.may_be(&[WcOpcode::RDMA_READ, WcOpcode::COMP_SWAP, WcOpcode::FETCH_ADD, WcOpcode::FLUSH]),
            "the peer's memory was being paged in (on-demand paging)",
        ),
    ]
}

fn late(work: &Circumstances) -> Causes {
    unanswered(work)
}
