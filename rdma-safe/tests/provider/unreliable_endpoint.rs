//! The owned API over unreliable connections.

use rdma_safe::mr::Pages;
use rdma_safe::{Endpoint, Error, Operation, PostError, ProtectionDomain, QueuePairType, SendOps, WcStatus, Work};

use crate::support::{Interfaces, builder, connect, done, nothing, on_each_interface};

fn endpoints(pd: &ProtectionDomain, interfaces: Interfaces) -> (Endpoint, Endpoint) {
    let build = || builder(pd, interfaces).qp_type(QueuePairType::UC).build().unwrap();
    let (mut a, mut b) = (build(), build());
    connect(&mut a, &mut b);
    (a, b)
}

#[test]
fn messages_and_writes_arrive_and_their_buffers_come_back() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, mut b) = endpoints(&pd, interfaces);
        assert_eq!(a.queue_pair().qp_type(), QueuePairType::UC);
        b.receive(pd.allocate(16).unwrap()).unwrap();
        let mut outbox = pd.allocate(16).unwrap();
        outbox.fill_from(b"unreliable").unwrap();
        let id = a.send(outbox).unwrap();
        let sent = done(&mut a);
        assert_eq!((sent.id, sent.operation, sent.status), (id, Operation::Send, WcStatus::SUCCESS));
        assert_eq!(&done(&mut b).buffer.unwrap()[..], b"unreliable");

        let exposed = pd.expose(Pages::new(16).unwrap(), rdma_safe::Access::REMOTE_WRITE).unwrap();
        let outbox = sent.buffer.unwrap();
        a.write(outbox, exposed.remote()).unwrap();
        assert_eq!(done(&mut a).operation, Operation::Write);
        let mut seen = [0; 10];
        exposed.read(0, &mut seen).unwrap();
        assert_eq!(&seen, b"unreliable");
    });
}

#[test]
fn an_operation_that_uc_lacks_is_refused_with_the_buffer() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let (mut a, _b) = endpoints(&pd, interfaces);
        let exposed = pd.expose(Pages::new(16).unwrap(), rdma_safe::Access::REMOTE).unwrap();
        let buffer = || pd.allocate(16).unwrap();
        let read = a.read(buffer(), exposed.remote()).unwrap_err();
        assert_eq!(read.error, PostError::NotEnabled { op: SendOps::RDMA_READ });
        assert!(read.buffer.is_some());
        let atomic = a.post(Work::fetch_add(buffer(), exposed.remote(), 1)).unwrap_err();
        assert_eq!(atomic.error, PostError::NotEnabled { op: SendOps::ATOMIC_FETCH_AND_ADD });
        assert!(atomic.buffer.is_some());
        nothing(&mut a);
    });
}

#[test]
fn an_endpoint_of_another_type_is_refused_and_says_which_ones_there_are() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let error = builder(&pd, interfaces).qp_type(QueuePairType::UD).build().unwrap_err();
        assert!(matches!(error, Error::WrongType { qp_type: QueuePairType::UD, .. }), "{error}");
        assert!(error.to_string().contains("build_datagrams"), "{error}");
    });
}
