//! Compares rdma-safe's checks of state changes with the kernel's, for every change and attribute.

use rdma_safe::device::TransportType;
use rdma_safe::qp::{AttributeMask, ModifyError, QueuePairAttributes};
use rdma_safe::{CompletionQueue, Error, ProtectionDomain, QueuePair, QueuePairState};

use crate::support::link::{Link, PSN, address};
use crate::support::{Rdma, device, within_deadline};

const FROM: [QueuePairState; 6] = [
    QueuePairState::RESET,
    QueuePairState::INIT,
    QueuePairState::RTR,
    QueuePairState::RTS,
    QueuePairState::SQD,
    QueuePairState::ERR,
];

/// `None`: the change does not name a state.
const TO: [Option<QueuePairState>; 9] = [
    None,
    Some(QueuePairState::RESET),
    Some(QueuePairState::INIT),
    Some(QueuePairState::RTR),
    Some(QueuePairState::RTS),
    Some(QueuePairState::SQD),
    Some(QueuePairState::SQE),
    Some(QueuePairState::ERR),
    Some(QueuePairState::UNKNOWN),
];

/// The attributes that ibv_modify_qp(3) requires on a reliable connection.
fn required(from: QueuePairState, to: Option<QueuePairState>) -> AttributeMask {
    use AttributeMask as A;
    match (from, to) {
        (QueuePairState::RESET, Some(QueuePairState::INIT)) => A::ACCESS_FLAGS | A::PKEY_INDEX | A::PORT,
        (QueuePairState::INIT, Some(QueuePairState::RTR)) => {
            A::AV | A::PATH_MTU | A::DEST_QPN | A::RQ_PSN | A::MAX_DEST_RD_ATOMIC | A::MIN_RNR_TIMER
        }
        (QueuePairState::RTR, Some(QueuePairState::RTS)) => {
            A::SQ_PSN | A::TIMEOUT | A::RETRY_CNT | A::RNR_RETRY | A::MAX_QP_RD_ATOMIC
        }
        _ => A::empty(),
    }
}

/// Attributes with valid values for every bit of `mask`.
fn attributes(
    rdma: &Rdma,
    mask: AttributeMask,
    from: QueuePairState,
    to: Option<QueuePairState>,
    peer: u32,
) -> QueuePairAttributes {
    let link = Link::default();
    let mut set = QueuePairAttributes::new();
    if let Some(to) = to {
        set = set.set_state(to);
    }
    for bit in mask {
        set = match bit {
            AttributeMask::CUR_STATE => set.set_cur_state(from),
            AttributeMask::EN_SQD_ASYNC_NOTIFY => set.set_sqd_event(false),
            AttributeMask::ACCESS_FLAGS => set.set_access(link.access),
            AttributeMask::PKEY_INDEX => set.set_pkey_index(0),
            AttributeMask::PORT => set.set_port(rdma.port),
            AttributeMask::QKEY => set.set_qkey(0x1111),
            AttributeMask::AV => set.set_address(address(rdma)),
            AttributeMask::PATH_MTU => set.set_path_mtu(rdma.query_port(rdma.port).unwrap().active_mtu()),
            AttributeMask::TIMEOUT => set.set_timeout(link.timeout),
            AttributeMask::RETRY_CNT => set.set_retry_count(link.retry_count),
            AttributeMask::RNR_RETRY => set.set_rnr_retry(link.rnr_retry),
            AttributeMask::RQ_PSN => set.set_rq_psn(PSN),
            AttributeMask::MAX_QP_RD_ATOMIC => set.set_max_rd_atomic(link.rd_atomic),
            AttributeMask::MIN_RNR_TIMER => set.set_min_rnr_timer(link.min_rnr_timer),
            AttributeMask::SQ_PSN => set.set_sq_psn(PSN),
            AttributeMask::MAX_DEST_RD_ATOMIC => set.set_max_dest_rd_atomic(link.rd_atomic),
            AttributeMask::DEST_QPN => set.set_dest_qp_num(peer),
            other => panic!("{other} cannot be set"),
        };
    }
    assert_eq!(set.mask() - AttributeMask::STATE, mask);
    set
}

/// The attributes that this crate can set, without the rate limit, for which each driver has its own rules.
fn settable() -> AttributeMask {
    let mut mask = AttributeMask::all();
    mask.remove(AttributeMask::STATE | AttributeMask::RATE_LIMIT | AttributeMask::CAP);
    mask.remove(AttributeMask::ALT_PATH | AttributeMask::PATH_MIG_STATE);
    mask
}

/// A queue pair that connects to itself, in `state`.
fn in_state(rdma: &Rdma, pd: &ProtectionDomain, cq: &CompletionQueue, state: QueuePairState) -> QueuePair {
    let mut qp = pd.queue_pair(cq, cq).send_depth(1).recv_depth(1).build().unwrap();
    let link = Link::default();
    let number = qp.number();
    let to = |state| QueuePairAttributes::new().set_state(state);
    let steps: &[QueuePairAttributes] =
        &[link.to_init(rdma), link.to_rtr(rdma, number), link.to_rts(), to(QueuePairState::SQD)];
    let count = match state {
        QueuePairState::RESET => 0,
        QueuePairState::INIT => 1,
        QueuePairState::RTR => 2,
        QueuePairState::RTS | QueuePairState::ERR => 3,
        QueuePairState::SQD => 4,
        other => panic!("no test starts in {other}"),
    };
    for step in &steps[..count] {
        qp.modify(step).unwrap();
    }
    if state == QueuePairState::ERR {
        qp.modify(&to(state)).unwrap();
    }
    if state == QueuePairState::SQD {
        // Until the queue is drained no change but to ERR is allowed.
        within_deadline("a drained queue", || (qp.query().unwrap().as_raw().sq_draining == 0).then_some(()));
    }
    assert_eq!(qp.query().unwrap().state(), Some(state));
    qp
}

/// Modifies the queue pair without this crate's checks.
fn kernel(qp: &QueuePair, attributes: &QueuePairAttributes) -> Result<(), i32> {
    let mut raw = *attributes.as_raw();
    let verbs = rdma_safe::sys::verbs().unwrap();
    // SAFETY: the queue pair is valid, and the call does not keep the attributes.
    match unsafe { (verbs.ibv_modify_qp)(qp.as_raw(), &mut raw, attributes.mask().bits() as i32) } {
        0 => Ok(()),
        errno => Err(errno),
    }
}

#[test]
fn the_verdict_on_every_change_and_attribute_is_the_kernels() {
    let Some(rdma) = device() else { return };
    if rdma.transport_type() != TransportType::IB {
        return;
    }
    let pd = rdma.pd();
    let cq = rdma.completion_queue(4).build().unwrap();
    let (mut tried, mut allowed, mut differences) = (0, 0, Vec::new());
    for from in FROM {
        for to in TO {
            let base = required(from, to);
            let toggles = std::iter::once(AttributeMask::empty()).chain(settable());
            // A refused change leaves the queue pair as it was, so the next change can use it.
            let (mut ours, mut theirs) = (in_state(&rdma, &pd, &cq, from), in_state(&rdma, &pd, &cq, from));
            for toggle in toggles {
                tried += 1;
                let mask = base.symmetric_difference(toggle);
                let set = |qp: &QueuePair| attributes(&rdma, mask, from, to, qp.number());
                let (mine, kernels) = (ours.modify(&set(&ours)), kernel(&theirs, &set(&theirs)));
                let change = || match to {
                    Some(to) => format!("{from} to {to} with {mask}"),
                    None => format!("{from} with {mask}"),
                };
                // Newer SoftRoCE checks attributes only if the state changes.
                let unchecked = to.is_none() && rdma.is_newer_rxe();
                assert!(!unchecked || kernels.is_ok(), "{}: {kernels:?}", change());
                if mine.is_ok() != kernels.is_ok() && !unchecked {
                    differences.push(format!("{}: here {mine:?}, kernel {kernels:?}", change()));
                }
                if let Err(error) = &mine {
                    check_reason(error, base, toggle, &change());
                }
                if mine.is_ok() || kernels.is_ok() {
                    allowed += 1;
                    let expected = to.unwrap_or(from);
                    if mine.is_ok() && kernels.is_ok() {
                        assert_eq!(ours.state(), expected, "{}", change());
                        assert_eq!(ours.query().unwrap().state(), Some(expected), "{}", change());
                        assert_eq!(theirs.query().unwrap().state(), Some(expected), "{}", change());
                    }
                    (ours, theirs) = (in_state(&rdma, &pd, &cq, from), in_state(&rdma, &pd, &cq, from));
                }
            }
        }
    }
    println!("{tried} changes, {allowed} of them allowed");
    assert!(differences.is_empty(), "{} differences:\n{}", differences.len(), differences.join("\n"));
    assert!(tried > 900 && allowed > 50, "{tried} changes, {allowed} allowed");
}

/// Checks that a refusal names exactly the toggled attribute, unless the state change does not exist.
fn check_reason(error: &Error, base: AttributeMask, toggle: AttributeMask, change: &str) {
    let Error::Modify(error) = error else { panic!("{change}: {error:?}") };
    match &**error {
        ModifyError::InvalidTransition { .. } => {}
        ModifyError::Attributes { missing, excess, .. } => {
            assert_eq!((*missing, *excess), (base & toggle, toggle - base), "{change}");
        }
        other => panic!("{change} is refused by the device: {other}"),
    }
}

#[test]
fn a_wrong_current_state_is_refused() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let cq = rdma.completion_queue(4).build().unwrap();
    let mut qp = in_state(&rdma, &pd, &cq, QueuePairState::INIT);
    let wrong = Link::default().to_rts().set_cur_state(QueuePairState::RTR);
    let error = qp.modify(&wrong).unwrap_err();
    let Error::Modify(error) = error else { panic!("{error:?}") };
    let ModifyError::InvalidTransition { transition } = *error else { panic!("{error:?}") };
    assert_eq!((transition.from, transition.to), (QueuePairState::INIT, QueuePairState::RTS));
    assert_eq!(qp.query().unwrap().state(), Some(QueuePairState::INIT));
}

#[test]
fn a_refused_change_leaves_the_queue_pair_as_it_was() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let cq = rdma.completion_queue(4).build().unwrap();
    let mut qp = in_state(&rdma, &pd, &cq, QueuePairState::INIT);
    let number = qp.number();
    let link = Link::default();
    for _ in 0..3 {
        qp.modify(&link.to_rts()).unwrap_err();
        qp.modify(&link.to_rtr(&rdma, number).set_timeout(3)).unwrap_err();
        assert_eq!(qp.state(), QueuePairState::INIT);
        assert_eq!(qp.query().unwrap().state(), Some(QueuePairState::INIT));
    }
    qp.modify(&link.to_rtr(&rdma, number)).unwrap();
    qp.modify(&link.to_rts()).unwrap();
    assert_eq!(qp.query().unwrap().state(), Some(QueuePairState::RTS));
}
