//! Connecting queue pairs and endpoints by the addresses that their peers exchange.

use rdma_safe::address::AddressError;
use rdma_safe::qp::ModifyError;
use rdma_safe::{Access, ConnectOptions, Error, Gid, InitOptions, LinkLayer, Mtu, QueuePairAddress, QueuePairState};

use crate::support::lab::{Data, Memory, Op, Wr, next_ok, post};
use crate::support::{device, error_of};

#[test]
fn queue_pairs_connect_by_the_addresses_that_init_returns() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let mut cq = rdma.completion_queue(8).build().unwrap();
    let (mut a, mut b) = (pd.queue_pair(&cq, &cq).build().unwrap(), pd.queue_pair(&cq, &cq).build().unwrap());
    let options = InitOptions::default().port(rdma.port).gid_index(rdma.gid.index).peer_access(Access::REMOTE_WRITE);
    let (to_a, to_b) = (a.init(&options.psn(5)).unwrap(), b.init(&options).unwrap());
    assert_eq!((to_a.qp_num, to_a.psn, to_a.gid), (a.number(), 5, rdma.gid.gid));
    let with_mtu = ConnectOptions::default().mtu(Mtu::MTU_512);
    a.connect(&to_b, &with_mtu).unwrap();
    b.connect(&to_a, &with_mtu).unwrap();
    let memory = Memory::new(&pd, 16);
    memory.put(0, b"by write");
    let write = Wr::new(9, Op::Write(memory.remote(8)), Data::One(memory.sge(0..8)));
    post(a.send_batch(), &[write]).unwrap();
    next_ok(&mut cq, 9);
    assert_eq!(memory.get(8..16), b"by write");
    drop((a, b));
}

#[test]
fn a_queue_pair_connects_only_after_init() {
    let Some(rdma) = device() else { return };
    let pd = rdma.pd();
    let cq = rdma.completion_queue(8).build().unwrap();
    let options = InitOptions::default().port(rdma.port).gid_index(rdma.gid.index);
    let peer = pd.queue_pair(&cq, &cq).build().unwrap().init(&options).unwrap();
    let mut qp = pd.queue_pair(&cq, &cq).build().unwrap();
    let error = error_of(qp.connect(&peer, &ConnectOptions::default()));
    assert!(matches!(error, Error::NotInitialised), "{error}");
    assert_eq!(qp.state(), QueuePairState::RESET);
}

#[test]
fn an_endpoint_does_not_connect_to_an_invalid_address() {
    let Some(rdma) = device() else { return };
    let mut endpoint = rdma.endpoint(&rdma.pd()).build().unwrap();
    let address = endpoint.address();
    let mut refused = |address: QueuePairAddress| match error_of(endpoint.connect(&address)) {
        Error::Modify(error) => *error,
        error => panic!("{error:?}"),
    };
    let error = refused(QueuePairAddress::new(u32::MAX, address.psn, address.gid, address.mtu).with_lid(address.lid));
    assert!(matches!(error, ModifyError::OutOfRange { attribute: "dest_qp_num", .. }), "{error}");
    if rdma.query_port(rdma.port).unwrap().link_layer() == LinkLayer::ETHERNET {
        let error = refused(QueuePairAddress::new(address.qp_num, address.psn, Gid::ZERO, address.mtu));
        let expected = rdma.port;
        assert!(
            matches!(error, ModifyError::Address(AddressError::MissingGlobalRoute { port }) if port == expected),
            "{error}"
        );
    }
    endpoint.connect(&address).unwrap();
}
