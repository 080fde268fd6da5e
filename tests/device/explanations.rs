//! Explanations of failed work and calls. Each test provokes a failure, and its explanation names the cause.

use rdma_safe::error::Verb;
use rdma_safe::explain::{Explanation, Network};
use rdma_safe::mr::Pages;
use rdma_safe::qp::QueuePairAttributes;
use rdma_safe::{
    Access, CompletionError, ConnectOptions, Endpoint, Errno, Error, Operation, ProtectionDomain, QueuePairState,
    RemoteMemory, Sge, WcOpcode, WcStatus, Work,
};

use crate::support::lab::{self, Data, Lab, MEMORY, Mode, Op, Wc, Wr};
use crate::support::link::{Link, connected};
use crate::support::{DEADLINE, Rdma, device, error_of};

/// Two connected ends with few retries.
fn with_few_retries(rdma: &Rdma, pd: &ProtectionDomain) -> (Endpoint, Endpoint) {
    let options = ConnectOptions::default().retry_count(6).rnr_retry(1).min_rnr_timer(1);
    let mut ends = (rdma.endpoint(pd).build().unwrap(), rdma.endpoint(pd).build().unwrap());
    let (first, second) = (ends.0.address(), ends.1.address());
    ends.0.connect_with(&second, &options).unwrap();
    ends.1.connect_with(&first, &options).unwrap();
    ends
}

/// The endpoint's explanation of the next completion, which must be a failure.
#[track_caller]
fn explained(endpoint: &mut Endpoint) -> Explanation {
    let failed = error_of(endpoint.wait(DEADLINE).unwrap().ok());
    let explanation = endpoint.explain(&failed);
    assert_eq!(explanation.error(), failed.error());
    assert_eq!(failed.explain().causes()[0], explanation.causes()[0], "{failed}");
    explanation
}

/// Checks that the explanation contains each of `words`, the network and the type of the queue pair.
#[track_caller]
fn expect_words(rdma: &Rdma, explanation: &Explanation, words: &[&str]) {
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

/// The explanation of a failed completion of the raw queue pair `lab.a`.
#[track_caller]
fn explain_raw(lab: &Lab, wc: &Wc, operation: WcOpcode) -> Explanation {
    let error = CompletionError::new(wc.status, 0, wc.wr_id);
    lab.a.qp.explain(&error, operation)
}

#[test]
fn a_wrong_rkey_is_explained_by_key_range_and_access() {
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
        expect_words(&rdma, &explanation, &["remote access error", "the rkey does not", "exceeds the region", right]);
    }
}

#[test]
fn a_range_beyond_the_region_is_explained_by_key_range_and_access() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::EXTENDED);
    let beyond = Op::Read(lab.b.memory.remote(MEMORY - 4));
    lab.a.post(&[Wr::new(1, beyond, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
    let wc = lab.a.next();
    assert_eq!(wc.status, WcStatus::REM_ACCESS_ERR);
    expect_words(
        &rdma,
        &explain_raw(&lab, &wc, WcOpcode::RDMA_READ),
        &["RDMA_READ on", "exceeds the region", "REMOTE_READ"],
    );
}

#[test]
fn a_missing_access_right_of_the_queue_pair_is_explained() {
    let Some(rdma) = device() else { return };
    let mut lab =
        Lab::builder(&rdma, Mode::EXTENDED).link(Link { access: Access::REMOTE_READ, ..Link::default() }).build();
    let write = Op::Write(lab.b.memory.remote(0));
    lab.a.post(&[Wr::new(1, write, Data::One(lab.a.memory.sge(0..8)))]).unwrap();
    let wc = lab.a.next();
    let explanation = explain_raw(&lab, &wc, WcOpcode::RDMA_WRITE);
    // IBTA allows both statuses.
    match wc.status {
        WcStatus::REM_INV_REQ_ERR => {
            expect_words(&rdma, &explanation, &["queue pair does not allow this", "peer_access"])
        }
        status => {
            assert_eq!(status, WcStatus::REM_ACCESS_ERR);
            expect_words(&rdma, &explanation, &["region or queue pair was set up without Access::REMOTE_WRITE"]);
        }
    }
}

#[test]
fn a_peer_without_receives_is_explained_with_the_retry_attributes() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, b) = with_few_retries(&rdma, &pd);
    for _ in 0..2 {
        a.send(pd.allocate(8).unwrap()).unwrap();
    }
    let explanation = explained(&mut a);
    assert_eq!(explanation.error().status, WcStatus::RNR_RETRY_EXC_ERR);
    expect_words(&rdma, &explanation, &["no receive posted", "rnr_retry", "min_rnr_timer", "SEND on"]);
    let peer = format!("peer: queue pair {:#08x}", b.address().qp_num);
    assert!(explanation.facts().contains(&peer), "{explanation}");
    if rdma.is_rxe() {
        assert!(explanation.facts().contains(&"rnr_retry 1".to_owned()), "{explanation}");
    }

    let behind = explained(&mut a);
    assert_eq!(behind.error().status, WcStatus::WR_FLUSH_ERR);
    expect_words(&rdma, &behind, &["error state", "the first failed completion"]);
    assert!(behind.facts().is_empty(), "{behind}");
}

#[test]
fn a_destroyed_peer_is_explained_with_its_address() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, b) = with_few_retries(&rdma, &pd);
    let peer = b.address();
    drop(b);
    a.send(pd.allocate(8).unwrap()).unwrap();
    let explanation = explained(&mut a);
    assert_eq!(explanation.error().status, WcStatus::RETRY_EXC_ERR);
    expect_words(&rdma, &explanation, &["the peer is gone", "RTR or RTS", "path MTU", "retry_count"]);
    let network = match rdma.network(rdma.port).unwrap() {
        Some(Network::InfiniBand) => "subnet manager",
        Some(Network::Roce) => "UDP port 4791",
        _ => "addresses",
    };
    expect_words(&rdma, &explanation, &[network]);
    let facts = explanation.facts().join(", ");
    assert!(facts.contains(&format!("queue pair {:#08x}", peer.qp_num)), "{facts}");
    if rdma.is_rxe() {
        let route = format!("GID {} from GID index {}", peer.gid, rdma.gid.index);
        assert!(facts.contains(&route) && facts.contains("retry_count 6"), "{facts}");
    }
    assert!(!facts.contains("the port is"), "the port is active: {facts}");
}

#[test]
fn a_wrong_local_key_is_explained_at_the_sender() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::EXTENDED);
    lab.b.receive(1, 0..64).unwrap();
    let sge = lab.a.memory.sge(0..8);
    lab.a.post(&[Wr::new(1, Op::Send, Data::One(Sge { lkey: sge.lkey ^ 0xff, ..sge }))]).unwrap();
    let wc = lab.a.next();
    assert_eq!(wc.status, lab::local_failure(&rdma), "{wc:?}");
    let explanation = explain_raw(&lab, &wc, WcOpcode::SEND);
    if rdma.is_newer_rxe() {
        // The first failure is not reported, only the flush.
        expect_words(&rdma, &explanation, &["SEND on", "moved the queue pair to the error state"]);
    } else {
        expect_words(&rdma, &explanation, &["lkey", "protection domain"]);
    }
}

#[test]
fn a_too_long_message_is_explained_at_both_ends() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let (mut a, mut b) = connected(rdma.endpoint(&pd));
    b.receive(pd.allocate(15).unwrap()).unwrap();
    a.send(pd.allocate(16).unwrap()).unwrap();
    let (sent, received) = (explained(&mut a), explained(&mut b));
    expect_words(&rdma, &sent, &["SEND on", "longer than the receive"]);
    expect_words(&rdma, &received, &["RECV on", "longer than the posted receive"]);
}

#[test]
fn flushed_work_is_explained_by_the_error_state() {
    let Some(rdma) = device() else { return };
    let mut lab = Lab::new(&rdma, Mode::EXTENDED);
    lab.a.receive(1, 0..64).unwrap();
    lab.a.qp.modify(&QueuePairAttributes::new().set_state(QueuePairState::ERR)).unwrap();
    let wc = lab.a.next();
    assert_eq!(wc.status, WcStatus::WR_FLUSH_ERR);
    expect_words(
        &rdma,
        &explain_raw(&lab, &wc, WcOpcode::RECV),
        &["RECV on", "moved the queue pair to the error state"],
    );
}

#[test]
fn unmapped_memory_is_explained_by_verb_and_errno() {
    let Some(rdma) = device() else { return };
    let page = 4096;
    // SAFETY: a new mapping without access rights, to which no reference exists.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), page, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    assert_ne!(address, libc::MAP_FAILED);
    // SAFETY: the registration fails. Even if it succeeded, no work request would use the region.
    let error = error_of(unsafe { rdma.pd().register_raw(address.cast(), page, Access::LOCAL_WRITE) });
    assert_eq!((error.verb(), error.errno()), (Some(Verb::RegMr), Some(Errno(libc::EFAULT))), "{error}");
    let cause = error.explain().expect("an explanation");
    assert!(cause.contains("not mapped") && error.to_string().ends_with(cause), "{error}");
    // SAFETY: the mapping from above, which is not used.
    assert_eq!(unsafe { libc::munmap(address, page) }, 0);
}

#[test]
fn a_missing_partition_key_is_explained_by_verb() {
    let Some(rdma) = device() else { return };
    let error = error_of(rdma.pkey_index(rdma.port, 0x1234));
    assert_eq!(error.verb(), Some(Verb::GetPkeyIndex), "{error}");
    assert!(matches!(error, Error::Verb { .. }));
}
