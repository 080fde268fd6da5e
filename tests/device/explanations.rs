//! What failed work and calls are explained by: each failure is provoked, and the words name what provoked it.

use rdma_safe::{
    Access, CompletionError, ConnectOptions, Endpoint, Errno, Error, Explanation, Network, Operation, Pages,
    ProtectionDomain, QueuePairAttributes, QueuePairState, RemoteMemory, Sge, WcOpcode, WcStatus, Work,
};

use crate::support::lab::{self, Data, Lab, MEMORY, Mode, Op, Wc, Wr};
use crate::support::link::{Link, connected};
use crate::support::{DEADLINE, Rdma, device, error_of};

/// Two connected ends that do not wait for receives.
fn impatient(rdma: &Rdma, pd: &ProtectionDomain) -> (Endpoint, Endpoint) {
    let options = ConnectOptions::default().retry_count(6).rnr_retry(1).min_rnr_timer(1);
    let mut ends = (rdma.endpoint(pd).build().unwrap(), rdma.endpoint(pd).build().unwrap());
    let (first, second) = (ends.0.address(), ends.1.address());
    ends.0.connect_with(&second, &options).unwrap();
    ends.1.connect_with(&first, &options).unwrap();
    ends
}

/// What the endpoint says of the next completion, which must be a failure.
#[track_caller]
fn explained(endpoint: &mut Endpoint) -> Explanation {
    let failed = error_of(endpoint.wait(DEADLINE).unwrap().ok());
    let explanation = endpoint.explain(&failed);
    assert_eq!(explanation.error(), failed.error());
    assert_eq!(failed.explain().causes()[0], explanation.causes()[0], "{failed}");
    explanation
}

/// Each of `words` must be there; what kind of a device and connection it was must be, too.
#[track_caller]
fn names(rdma: &Rdma, explanation: &Explanation, words: &[&str]) {
    let text = explanation.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is missing: {text}");
    }
    let network = rdma.network(rdma.port).unwrap();
    assert!(!rdma.is_rxe() || network == Some(Network::Roce), "{network:?}");
    if let Some(network) = network {
        assert!(text.contains(&format!("on an RC queue pair over {network}: ")), "{text}");
    }
    assert!(text.contains("(vendor error 0x"), "{text}");
}

/// The explanation of a failed completion of `lab.a`.
#[track_caller]
fn raw(lab: &Lab, wc: &Wc, operation: WcOpcode) -> Explanation {
    let error = CompletionError { status: wc.status, vendor_error: 0, wr_id: wc.wr_id, qp_num: wc.qp_num };
    lab.a.qp.explain(&error, operation)
}

#[test]
fn a_wrong_key_is_explained_by_key_range_and_right() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let region = pd.expose(Pages::new(64).unwrap(), Access::REMOTE).unwrap();
    let wrong = RemoteMemory { rkey: region.remote().rkey ^ 0xff, ..region.remote() };
    for (operation, right) in
        [(Operation::Write, "REMOTE_WRITE"), (Operation::Read, "REMOTE_READ"), (Operation::Atomic, "REMOTE_ATOMIC")]
    {
        let (mut a, _b) = connected(rdma.endpoint(&pd).peer_access(Access::REMOTE));
        let buffer = pd.allocate(8).unwrap();
        a.post(match operation {
            Operation::Write => Work::write(buffer, wrong),
            Operation::Read => Work::read(buffer, wrong),
            _ => Work::fetch_add(buffer, wrong, 1),
        })
        .unwrap();
        let explanation = explained(&mut a);
        assert_eq!(explanation.error().status, WcStatus::REM_ACCESS_ERR);
        names(&rdma, &explanation, &["remote access error", "the rkey is not", "leaves the region", right]);
    }
}

#[test]
fn a_range_beyond_the_region_is_explained_by_key_range_and_right() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::ALL[0]);
    let beyond = Op::Read(lab.b.memory.remote(MEMORY - 4));
    lab.a.post(&[Wr::new(1, beyond, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
    let wc = lab.a.next();
    assert_eq!(wc.status, WcStatus::REM_ACCESS_ERR);
    names(&rdma, &raw(&lab, &wc, WcOpcode::RDMA_READ), &["RDMA_READ on", "leaves the region", "REMOTE_READ"]);
}

#[test]
fn a_right_that_the_queue_pair_lacks_is_explained() {
    let Some(rdma) = device() else { return };
    let mut lab =
        Lab::builder(&rdma, Mode::ALL[0]).link(Link { access: Access::REMOTE_READ, ..Link::default() }).build();
    let write = Op::Write(lab.b.memory.remote(0));
    lab.a.post(&[Wr::new(1, write, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
    let wc = lab.a.next();
    let explanation = raw(&lab, &wc, WcOpcode::RDMA_WRITE);
    // IBTA leaves open which of the two it is.
    match wc.status {
        WcStatus::REM_INV_REQ_ERR => names(&rdma, &explanation, &["queue pair does not allow this", "peer_access"]),
        status => {
            assert_eq!(status, WcStatus::REM_ACCESS_ERR);
            names(&rdma, &explanation, &["region or queue pair was set up without Access::REMOTE_WRITE"]);
        }
    }
}

#[test]
fn a_peer_without_receives_is_explained_with_the_retries() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, b) = impatient(&rdma, &pd);
    for _ in 0..2 {
        a.send(pd.allocate(8).unwrap()).unwrap();
    }
    let explanation = explained(&mut a);
    assert_eq!(explanation.error().status, WcStatus::RNR_RETRY_EXC_ERR);
    names(&rdma, &explanation, &["no receive posted", "rnr_retry", "min_rnr_timer", "SEND on"]);
    let peer = format!("peer: queue pair {:#08x}", b.address().qp_num);
    assert!(explanation.facts().contains(&peer), "{explanation}");
    if rdma.is_rxe() {
        assert!(explanation.facts().contains(&"rnr_retry 1".to_owned()), "{explanation}");
    }

    let behind = explained(&mut a);
    assert_eq!(behind.error().status, WcStatus::WR_FLUSH_ERR);
    names(&rdma, &behind, &["error state", "the completion that failed first"]);
    assert!(behind.facts().is_empty(), "{behind}");
}

#[test]
fn a_peer_that_is_gone_is_explained_with_its_address() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, b) = impatient(&rdma, &pd);
    let peer = b.address();
    drop(b);
    a.send(pd.allocate(8).unwrap()).unwrap();
    let explanation = explained(&mut a);
    assert_eq!(explanation.error().status, WcStatus::RETRY_EXC_ERR);
    names(&rdma, &explanation, &["the peer is gone", "RTR or RTS", "path MTU", "retry_count"]);
    let network = match rdma.network(rdma.port).unwrap() {
        Some(Network::InfiniBand) => "subnet manager",
        Some(Network::Roce) => "UDP port 4791",
        _ => "addresses",
    };
    names(&rdma, &explanation, &[network]);
    let facts = explanation.facts().join(", ");
    assert!(facts.contains(&format!("queue pair {:#08x}", peer.qp_num)), "{facts}");
    if rdma.is_rxe() {
        let route = format!("GID {} from GID index {}", peer.gid, rdma.gid.index);
        assert!(facts.contains(&route) && facts.contains("retry_count 6"), "{facts}");
    }
    assert!(!facts.contains("the port is"), "it is active: {facts}");
}

#[test]
fn a_wrong_local_key_is_explained_at_the_sender() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::ALL[0]);
    lab.b.receive(1, 0..64).unwrap();
    let sge = lab.a.memory.sge(0..8);
    lab.a.post(&[Wr::new(1, Op::Send, Data::One(Sge { lkey: sge.lkey ^ 0xff, ..sge }))]).unwrap();
    let wc = lab.a.next();
    assert_eq!(wc.status, lab::local_failure(&rdma), "{wc:?}");
    let explanation = raw(&lab, &wc, WcOpcode::SEND);
    if rdma.is_newer_rxe() {
        // It does not say what came first.
        names(&rdma, &explanation, &["SEND on", "moved the queue pair to the error state"]);
    } else {
        names(&rdma, &explanation, &["lkey", "protection domain"]);
    }
}

#[test]
fn a_message_that_is_too_long_is_explained_at_both_ends() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd));
    b.receive(pd.allocate(15).unwrap()).unwrap();
    a.send(pd.allocate(16).unwrap()).unwrap();
    let (sent, received) = (explained(&mut a), explained(&mut b));
    names(&rdma, &sent, &["SEND on", "longer than the receive"]);
    names(&rdma, &received, &["RECV on", "longer than the posted receive"]);
}

#[test]
fn work_that_was_flushed_points_to_what_came_first() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::ALL[0]);
    lab.a.receive(1, 0..64).unwrap();
    lab.a.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::ERR)).unwrap();
    let wc = lab.a.next();
    assert_eq!(wc.status, WcStatus::WR_FLUSH_ERR);
    names(&rdma, &raw(&lab, &wc, WcOpcode::RECV), &["RECV on", "moved the queue pair to the error state"]);
}

#[test]
fn memory_that_is_not_there_is_explained_by_verb_and_errno() {
    let Some(rdma) = device() else { return };
    let page = 4096;
    // SAFETY: a fresh mapping that nobody may access; nothing refers to it.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), page, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    assert_ne!(address, libc::MAP_FAILED);
    // SAFETY: the device gets no access to it, as it cannot be registered; if it were, nothing would use the region.
    let error = error_of(unsafe { rdma.pd().register_raw(address.cast(), page, Access::LOCAL_WRITE) });
    assert_eq!((error.verb(), error.errno()), (Some("ibv_reg_mr"), Some(Errno(libc::EFAULT))), "{error}");
    let cause = error.explain().expect("an explanation");
    assert!(cause.contains("not mapped") && error.to_string().ends_with(cause), "{error}");
    // SAFETY: the mapping from above, which nothing uses.
    assert_eq!(unsafe { libc::munmap(address, page) }, 0);
}

#[test]
fn a_partition_key_that_is_not_there_is_explained_by_verb_and_errno() {
    let Some(rdma) = device() else { return };
    let error = error_of(rdma.pkey_index(rdma.port, 0x1234));
    assert_eq!(error.verb(), Some("ibv_get_pkey_index"), "{error}");
    assert!(matches!(error, Error::Verb { .. }));
}
