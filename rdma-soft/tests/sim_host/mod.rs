//! The simulated host of the transport tests.

use std::collections::{BTreeMap, VecDeque};
use std::net::Ipv4Addr;
use std::sync::LazyLock;

use rdma_soft::transport::{Access, Completion, Host, Outgoing, Payload, Place, ReceiveId, Status};
use rdma_soft::wire::{Data, Header, ICRC, IcrcSeed, Path, RemoteRange, Transport};

pub(crate) const MTU: u32 = 256;
pub(crate) const RKEY: u32 = 0x1234;
pub(crate) const BASE: u64 = 0x10_0000;
pub(crate) const MEMORY: usize = 8192;
pub(crate) const RECEIVE: usize = 4096;

/// A simulated host: memory that its peer may access, receives, and data of work.
#[derive(Default)]
pub(crate) struct SimHost {
    pub(crate) memory: Vec<u8>,
    receives: VecDeque<ReceiveId>,
    pub(crate) received: BTreeMap<u64, Vec<u8>>,
    pub(crate) data: BTreeMap<u64, Vec<u8>>,
    /// No memory is accessible to the peer.
    pub(crate) is_closed: bool,
    /// The peer has no access to the queue pair.
    pub(crate) denies_access: bool,
    /// A message may restart in a receive that an incomplete message has used.
    pub(crate) restarts_receives: bool,
    pub(crate) completions: Vec<Completion>,
}

impl SimHost {
    pub(crate) fn new() -> Self {
        SimHost { memory: vec![0; MEMORY], ..SimHost::default() }
    }

    pub(crate) fn post_receive(&mut self, id: u64) {
        self.receives.push_back(ReceiveId(id));
    }

    fn payload(&self, payload: Payload) -> &[u8] {
        match payload {
            Payload::None => &[],
            Payload::Work { id, offset, len } => &self.data[&id][offset as usize..][..len as usize],
            Payload::Remote { place, len } => &self.memory[place.0 as usize..][..len as usize],
        }
    }

    /// Encodes a packet, so that the peer sees only what a network carries.
    pub(crate) fn encode(&self, outgoing: &Outgoing, transport: Transport) -> Vec<u8> {
        let Outgoing { operation, psn, ack_request, solicited, payload } = *outgoing;
        let header = Header {
            transport,
            operation,
            pkey: 0xffff,
            dest_qp: 2,
            psn,
            solicited,
            ack_request,
            migrated: true,
            congestion: (false, false),
        };
        let payload = self.payload(payload);
        let mut bytes = header.encode(payload.len()).to_vec();
        bytes.extend(payload);
        bytes.resize(bytes.len() + Header::padding(payload.len()) + ICRC, 0);
        SEED.write(0, &mut bytes);
        bytes
    }
}

/// Path of all packets.
static SEED: LazyLock<IcrcSeed> = LazyLock::new(|| {
    IcrcSeed::new(&Path::V4 { source: Ipv4Addr::LOCALHOST, dest: Ipv4Addr::LOCALHOST, source_port: 1 })
});

/// Whether the invariant CRC of a packet matches.
pub(crate) fn has_valid_icrc(packet: &[u8]) -> bool {
    SEED.identify(0, &mut packet.to_vec()) == Some(0)
}

impl Host for SimHost {
    fn allows(&self, _: Access) -> bool {
        !self.denies_access
    }

    fn open(&self, range: &RemoteRange, _: Access) -> Option<Place> {
        let end = range.address.checked_add(range.len.into())?;
        let is_open = !self.is_closed && range.rkey == RKEY && range.address >= BASE && end <= BASE + MEMORY as u64;
        is_open.then(|| Place(range.address - BASE))
    }

    fn store(&mut self, place: Place, data: Data<'_>) {
        self.memory[place.0 as usize..][..data.len()].copy_from_slice(&data.to_vec());
    }

    fn update(&mut self, place: Place, change: &dyn Fn(u64) -> u64) -> u64 {
        let word: &mut [u8; 8] = (&mut self.memory[place.0 as usize..][..8]).try_into().unwrap();
        let old = u64::from_ne_bytes(*word);
        *word = change(old).to_ne_bytes();
        old
    }

    fn receive(&mut self) -> Option<ReceiveId> {
        self.receives.pop_front()
    }

    fn fill(&mut self, receive: ReceiveId, offset: u32, data: Data<'_>) -> Result<(), Status> {
        if offset as usize + data.len() > RECEIVE {
            return Err(Status::LocalLength);
        }
        let received = self.received.entry(receive.0).or_default();
        if self.restarts_receives && offset == 0 {
            received.clear();
        }
        assert_eq!(received.len(), offset as usize, "a part of the message is missing or repeated");
        received.extend(data.to_vec());
        Ok(())
    }

    fn invalidate(&mut self, rkey: u32) -> bool {
        rkey == RKEY
    }

    fn returned(&mut self, work: u64, offset: u32, data: Data<'_>) -> Result<(), Status> {
        self.data.get_mut(&work).unwrap()[offset as usize..][..data.len()].copy_from_slice(&data.to_vec());
        Ok(())
    }

    fn complete(&mut self, completion: Completion) {
        self.completions.push(completion);
    }
}

/// Bytes that depend on seed and position. Copied from an array, because Miri is slow with single bytes.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    const PLACES: usize = 4096;
    static NOISE: [u8; PLACES + MEMORY] = {
        let (mut noise, mut at, mut state) = ([0; PLACES + MEMORY], 0, 1_u64);
        while at < noise.len() {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            noise[at] = (state >> 56) as u8;
            at += 1;
        }
        noise
    };
    NOISE[(seed as usize).wrapping_mul(31) % PLACES..][..len].to_vec()
}
