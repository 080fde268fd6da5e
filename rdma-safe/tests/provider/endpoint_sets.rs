//! Sets of endpoints over a provider that reports wrong completions, fails to be polled, or has timestamps.

use rdma_safe::{
    Buffer, Completion, Endpoint, EndpointKey, EndpointSet, Operation, PollError, PostError, ProtectionDomain,
    ReceivePool, WcFields,
};
use rdma_sys::{IBV_WC_RECV, IBV_WC_SUCCESS};

use crate::fake::{Config, Cqe, Fake};
use crate::support::{EXTENDED, Interfaces, builder, done, on_each_interface};

/// A set of endpoints, each with a peer outside the set.
pub(crate) struct Service {
    pub(crate) set: EndpointSet,
    pub(crate) keys: Vec<EndpointKey>,
    pub(crate) peers: Vec<Endpoint>,
}

impl Service {
    /// Each endpoint takes receives from `pool` if there is one, and otherwise has room for eight of its own.
    pub(crate) fn new(
        pd: &ProtectionDomain,
        interfaces: Interfaces,
        endpoints: usize,
        pool: Option<&ReceivePool>,
    ) -> Self {
        let completions = endpoints as u32 * if pool.is_some() { 8 } else { 16 } + pool.map_or(0, |_| 4);
        let set = EndpointSet::builder(pd.context(), completions).classic_poll(!interfaces.extended_cq);
        let mut service = Service { set: set.build().unwrap(), keys: Vec::new(), peers: Vec::new() };
        for _ in 0..endpoints {
            service.add(pd, interfaces, pool);
        }
        service
    }

    pub(crate) fn add(&mut self, pd: &ProtectionDomain, interfaces: Interfaces, pool: Option<&ReceivePool>) {
        let mut endpoint = builder(pd, interfaces);
        if let Some(pool) = pool {
            endpoint = endpoint.receive_pool(pool);
        }
        let key = endpoint.build_in(&mut self.set).unwrap();
        let mut peer = builder(pd, interfaces).build().unwrap();
        let mut endpoint = self.set.endpoint(key).unwrap();
        endpoint.connect(&peer.address()).unwrap();
        peer.connect(&endpoint.address()).unwrap();
        self.keys.push(key);
        self.peers.push(peer);
    }

    /// Sends `text` from a peer to its endpoint.
    pub(crate) fn say(&mut self, peer: usize, text: &[u8]) {
        self.peers[peer].send_inline(text).unwrap();
        assert_eq!(done(&mut self.peers[peer]).operation, Operation::Send);
    }

    /// The next completion, and the index of its endpoint.
    #[track_caller]
    pub(crate) fn next(&mut self) -> (usize, Completion) {
        let (key, completion) = self.set.poll().unwrap().expect("a completion");
        (self.keys.iter().position(|known| *known == key).expect("a key of the set"), completion)
    }

    #[track_caller]
    pub(crate) fn next_text(&mut self) -> (usize, Vec<u8>) {
        let (from, completion) = self.next();
        let completion = completion.ok().unwrap();
        assert_eq!(completion.operation, Operation::Receive);
        (from, completion.buffer.unwrap().to_vec())
    }

    #[track_caller]
    pub(crate) fn nothing(&mut self) {
        assert!(self.set.poll().unwrap().is_none(), "a completion that should not be there");
    }
}

/// A pool of four receives of sixteen bytes.
pub(crate) fn pool(pd: &ProtectionDomain) -> ReceivePool {
    let mut pool = ReceivePool::new(pd, 4).unwrap();
    fill(&mut pool);
    pool
}

/// Posts as many receives as there is room for.
pub(crate) fn fill(pool: &mut ReceivePool) -> usize {
    let before = pool.receives_in_flight();
    while pool.receives_in_flight() < 4 {
        pool.receive(pool.pd().allocate(16).unwrap()).unwrap();
    }
    4 - before
}

fn buffer(pd: &ProtectionDomain, text: &[u8]) -> Buffer {
    let mut buffer = pd.allocate(text.len()).unwrap();
    buffer.copy_from_slice(text);
    buffer
}

#[test]
fn an_unexpected_completion_is_an_error_of_its_endpoint_only() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, 2, None);
        for key in service.keys.clone() {
            service.set.endpoint(key).unwrap().receive(pd.allocate(16).unwrap()).unwrap();
        }
        let key = service.keys[0];
        // SAFETY: the queue pair is valid, and the field is set at creation.
        let cq = unsafe { (*service.set.endpoint(key).unwrap().queue_pair().as_raw()).recv_cq };
        let truth = Cqe { status: IBV_WC_SUCCESS.0, opcode: IBV_WC_RECV.0, byte_len: 4, ..Cqe::default() };
        // A completion of a queue pair that is not in the set.
        fake.inject(cq, Cqe { wr_id: 1 << 63 | 1, qp_num: 0xff_ffff, ..truth });
        assert!(matches!(service.set.poll(), Err(PollError::NotInFlight { .. })));
        // A completion of an endpoint of the set, for a receive that was not posted.
        let number = service.set.endpoint(key).unwrap().queue_pair().number();
        fake.inject(cq, Cqe { wr_id: 1 << 63 | 2, qp_num: number, ..truth });
        assert!(matches!(service.set.poll(), Err(PollError::NotInFlight { wr_id }) if wr_id == 1 << 63 | 2));
        let refused = service.set.endpoint(key).unwrap().send(buffer(&pd, b"doubtful")).unwrap_err();
        assert_eq!((refused.error, refused.buffer.is_some()), (PostError::EndpointFailed, true));
        service.say(1, b"others");
        assert_eq!(service.next_text(), (1, b"others".to_vec()));
        assert_eq!(service.set.remove(key).unwrap().len(), 1);
    });
}

#[test]
fn a_set_can_be_polled_again_after_a_failed_poll() {
    on_each_interface(|fake, interfaces| {
        let pd = fake.pd();
        let mut service = Service::new(&pd, interfaces, 1, None);
        let key = service.keys[0];
        service.set.endpoint(key).unwrap().receive(pd.allocate(16).unwrap()).unwrap();
        let verb = if interfaces.extended_cq { "start_poll" } else { "ibv_poll_cq" };
        fake.fail(verb, libc::EIO);
        assert!(matches!(service.set.poll(), Err(PollError::Provider(_))));
        fake.heal(verb);
        service.say(0, b"later");
        assert_eq!(service.next_text(), (0, b"later".to_vec()));
    });
}

#[test]
fn completions_have_timestamps_if_the_set_requests_them() {
    let wc_flags = (WcFields::STANDARD | WcFields::COMPLETION_TIMESTAMP).bits();
    let fake = Fake::new(Config { wc_flags, ..Config::default() });
    let pd = fake.pd();
    let mut pool = ReceivePool::new(&pd, 1).unwrap();
    let mut set = EndpointSet::builder(pd.context(), 20).timestamps(true).build().unwrap();
    // The option of the endpoint is ignored.
    let key = builder(&pd, EXTENDED).receive_pool(&pool).timestamps(false).build_in(&mut set).unwrap();
    let mut peer = builder(&pd, EXTENDED).build().unwrap();
    let mut endpoint = set.endpoint(key).unwrap();
    endpoint.connect(&peer.address()).unwrap();
    peer.connect(&endpoint.address()).unwrap();
    let id = pool.receive(pd.allocate(16).unwrap()).unwrap();
    peer.send_inline(b"now").unwrap();
    let (whose, message) = set.poll().unwrap().unwrap();
    assert_eq!((whose, message.id), (key, id));
    assert!(message.timestamp.is_some());
}
