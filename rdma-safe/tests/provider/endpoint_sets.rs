//! A set of endpoints with their peers, for the tests of removal.

use rdma_safe::{Completion, Endpoint, EndpointKey, EndpointSet, Operation, ProtectionDomain, ReceivePool};

use crate::support::{Interfaces, builder, done};

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
