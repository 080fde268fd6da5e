//! The layout of each message, written by hand from chapter 12 of the specification.
//!
//! Bit offsets count from the most significant bit of a byte. Byte offsets count from the end of the MAD header.

use rdma_soft::wire::cm::{
    AdditionalInfo, Answered, Apr, Drep, Dreq, Lap, Message, Mra, Path, Rej, RejectReason, Rep, Req, Rtu, SidrRep,
    SidrReq, SidrStatus,
};

/// Bytes of a message.
pub(crate) const LEN: usize = 232;

/// A field of a message of type `M`.
pub(crate) struct Field<M> {
    pub(crate) name: String,
    /// Byte offset, bit offset and width in bits of each part, the most significant part first.
    parts: Vec<(usize, usize, usize)>,
    /// Greatest value. Greater ones are reserved.
    greatest: u64,
    set: Set<M>,
}

type SetNumber<M> = dyn Fn(&mut M, u64);
type SetBytes<M> = dyn Fn(&mut M, &[u8]);

enum Set<M> {
    Number(Box<SetNumber<M>>),
    Bytes(Box<SetBytes<M>>),
}

impl<M> Field<M> {
    /// Sets the field to a value made from the seed, of which some bits may not fit. Writes the bits that fit to `body`.
    pub(crate) fn set(&self, message: &mut M, body: &mut [u8; LEN], seed: u64) {
        match &self.set {
            Set::Number(set) => {
                set(message, seed);
                self.write(body, &self.fitting(seed).to_be_bytes());
            }
            Set::Bytes(set) => {
                let bytes: Vec<u8> =
                    (0..self.width() / 8).map(|i| seed.rotate_left(8 * (i as u32 % 8)) as u8 ^ i as u8).collect();
                set(message, &bytes);
                self.write(body, &bytes);
            }
        }
    }

    /// Like [`Field::set`], but without the bits that do not fit.
    pub(crate) fn set_fitting(&self, message: &mut M, seed: u64) {
        match &self.set {
            Set::Number(set) => set(message, self.fitting(seed)),
            Set::Bytes(_) => self.set(message, &mut [0; LEN], seed),
        }
    }

    /// Writes the greatest value of the field.
    pub(crate) fn fill(&self, body: &mut [u8; LEN]) {
        match &self.set {
            Set::Number(_) => self.write(body, &self.greatest.to_be_bytes()),
            Set::Bytes(_) => self.write(body, &vec![0xff; self.width() / 8]),
        }
    }

    fn fitting(&self, seed: u64) -> u64 {
        (seed & (u64::MAX >> (64 - self.width()))).min(self.greatest)
    }

    fn width(&self) -> usize {
        self.parts.iter().map(|(.., width)| width).sum()
    }

    /// Bit offsets from the start of the message, the most significant bit first.
    pub(crate) fn bits(&self) -> impl Iterator<Item = usize> {
        self.parts.iter().flat_map(|&(byte, bit, width)| 8 * byte + bit..8 * byte + bit + width)
    }

    /// Writes the last bits of `value`, one by one.
    fn write(&self, body: &mut [u8; LEN], value: &[u8]) {
        let skipped = 8 * value.len() - self.width();
        for (i, at) in self.bits().enumerate() {
            let from = skipped + i;
            let bit = value[from / 8] >> (7 - from % 8) & 1;
            let mask = 0x80 >> (at % 8);
            body[at / 8] = body[at / 8] & !mask | if bit == 1 { mask } else { 0 };
        }
    }
}

/// Byte offsets of a path's fields.
struct PathLayout {
    lids: [usize; 2],
    gids: [usize; 2],
    flow_label: usize,
    traffic_class: usize,
    hop_limit: usize,
    rate: usize,
    level: usize,
    ack_timeout: usize,
}

/// Builds the list of a message's fields.
struct Fields<M>(Vec<Field<M>>);

impl<M: 'static> Fields<M> {
    fn number(self, name: &str, byte: usize, bit: usize, width: usize, set: impl Fn(&mut M, u64) + 'static) -> Self {
        self.split(name, &[(byte, bit, width)], set)
    }

    /// A number of several parts.
    fn split(mut self, name: &str, parts: &[(usize, usize, usize)], set: impl Fn(&mut M, u64) + 'static) -> Self {
        let width: usize = parts.iter().map(|(.., width)| width).sum();
        let greatest = u64::MAX >> (64 - width);
        self.0.push(Field { name: name.into(), parts: parts.to_vec(), greatest, set: Set::Number(Box::new(set)) });
        self
    }

    fn bytes(mut self, name: &str, byte: usize, len: usize, set: impl Fn(&mut M, &[u8]) + 'static) -> Self {
        let parts = vec![(byte, 0, 8 * len)];
        self.0.push(Field { name: name.into(), parts, greatest: 0, set: Set::Bytes(Box::new(set)) });
        self
    }

    /// The kind of the answered message. Value 3 is reserved.
    fn answered(self, byte: usize, set: impl Fn(&mut M, Answered) + 'static) -> Self {
        let of = |value| match value & 3 {
            0 => Answered::Req,
            1 => Answered::Rep,
            _ => Answered::Other,
        };
        let mut fields = self.number("answers", byte, 0, 2, move |m, v| set(m, of(v)));
        fields.0.last_mut().unwrap().greatest = 2;
        fields
    }

    /// Additional information, with the byte offset and width of its length.
    fn info(
        self,
        len: (usize, usize),
        byte: usize,
        of: impl Fn(&mut M) -> &mut AdditionalInfo + Copy + 'static,
    ) -> Self {
        self.number("info.len", len.0, 0, len.1, move |m, v| of(m).len = v as u8).bytes(
            "info.bytes",
            byte,
            72,
            move |m, v| of(m).bytes.copy_from_slice(v),
        )
    }

    fn path(self, path: &str, at: &PathLayout, of: impl Fn(&mut M) -> &mut Path + Copy + 'static) -> Self {
        let name = |field| format!("{path}.{field}");
        self.number(&name("local_lid"), at.lids[0], 0, 16, move |m, v| of(m).local_lid = v as u16)
            .number(&name("remote_lid"), at.lids[1], 0, 16, move |m, v| of(m).remote_lid = v as u16)
            .bytes(&name("local_gid"), at.gids[0], 16, move |m, v| of(m).local_gid.copy_from_slice(v))
            .bytes(&name("remote_gid"), at.gids[1], 16, move |m, v| of(m).remote_gid.copy_from_slice(v))
            .number(&name("flow_label"), at.flow_label, 0, 20, move |m, v| of(m).flow_label = v as u32)
            .number(&name("traffic_class"), at.traffic_class, 0, 8, move |m, v| of(m).traffic_class = v as u8)
            .number(&name("hop_limit"), at.hop_limit, 0, 8, move |m, v| of(m).hop_limit = v as u8)
            .number(&name("rate"), at.rate, 2, 6, move |m, v| of(m).rate = v as u8)
            .number(&name("service_level"), at.level, 0, 4, move |m, v| of(m).service_level = v as u8)
            .number(&name("subnet_local"), at.level, 4, 1, move |m, v| of(m).subnet_local = v & 1 == 1)
            .number(&name("ack_timeout"), at.ack_timeout, 0, 5, move |m, v| of(m).ack_timeout = v as u8)
    }
}

/// A kind of message.
pub(crate) trait Kind: Clone + 'static {
    /// Attribute id in the MAD header.
    const ATTRIBUTE: u16;

    fn fields() -> Vec<Field<Self>>;

    fn wrap(self) -> Message;

    fn unwrap(message: Message) -> Self;
}

macro_rules! kind {
    ($kind:ident = $attribute:literal, $fields:expr) => {
        impl Kind for $kind {
            const ATTRIBUTE: u16 = $attribute;

            fn fields() -> Vec<Field<Self>> {
                let add: fn(Fields<$kind>) -> Fields<$kind> = $fields;
                add(Fields(Vec::new())).0
            }

            fn wrap(self) -> Message {
                Message::$kind(self)
            }

            fn unwrap(message: Message) -> Self {
                match message {
                    Message::$kind(message) => message,
                    other => panic!("{other:?}"),
                }
            }
        }
    };
}

kind!(Req = 0x10, |fields| {
    let primary = PathLayout {
        lids: [52, 54],
        gids: [56, 72],
        flow_label: 88,
        rate: 91,
        traffic_class: 92,
        hop_limit: 93,
        level: 94,
        ack_timeout: 95,
    };
    let alternate = PathLayout {
        lids: [96, 98],
        gids: [100, 116],
        flow_label: 132,
        rate: 135,
        traffic_class: 136,
        hop_limit: 137,
        level: 138,
        ack_timeout: 139,
    };
    fields
        .number("local_id", 0, 0, 32, |m, v| m.local_id = v as u32)
        .number("vendor_id", 5, 0, 24, |m, v| m.vendor_id = v as u32)
        .number("service", 8, 0, 64, |m, v| m.service = v)
        .number("guid", 16, 0, 64, |m, v| m.guid = v)
        .number("qkey", 28, 0, 32, |m, v| m.qkey = v as u32)
        .number("qpn", 32, 0, 24, |m, v| m.qpn = v as u32)
        .number("responder_resources", 35, 0, 8, |m, v| m.responder_resources = v as u8)
        .number("initiator_depth", 39, 0, 8, |m, v| m.initiator_depth = v as u8)
        .number("remote_timeout", 43, 0, 5, |m, v| m.remote_timeout = v as u8)
        .number("transport", 43, 5, 2, |m, v| m.transport = v as u8)
        .number("flow_control", 43, 7, 1, |m, v| m.flow_control = v & 1 == 1)
        .number("psn", 44, 0, 24, |m, v| m.psn = v as u32)
        .number("local_timeout", 47, 0, 5, |m, v| m.local_timeout = v as u8)
        .number("retry_count", 47, 5, 3, |m, v| m.retry_count = v as u8)
        .number("pkey", 48, 0, 16, |m, v| m.pkey = v as u16)
        .number("mtu", 50, 0, 4, |m, v| m.mtu = v as u8)
        .number("rdc_exists", 50, 4, 1, |m, v| m.rdc_exists = v & 1 == 1)
        .number("rnr_retry_count", 50, 5, 3, |m, v| m.rnr_retry_count = v as u8)
        .number("max_cm_retries", 51, 0, 4, |m, v| m.max_cm_retries = v as u8)
        .number("srq", 51, 4, 1, |m, v| m.srq = v & 1 == 1)
        .number("extended_transport", 51, 5, 3, |m, v| m.extended_transport = v as u8)
        .bytes("private_data", 140, 92, |m, v| m.private_data.copy_from_slice(v))
        .path("path", &primary, |m| &mut m.path)
        .path("alternate", &alternate, |m| m.alternate.get_or_insert_default())
});

kind!(Mra = 0x11, |fields| fields
    .number("local_id", 0, 0, 32, |m, v| m.local_id = v as u32)
    .number("remote_id", 4, 0, 32, |m, v| m.remote_id = v as u32)
    .answered(8, |m, v| m.answers = v)
    .number("timeout", 9, 0, 5, |m, v| m.timeout = v as u8)
    .bytes("private_data", 10, 222, |m, v| m.private_data.copy_from_slice(v)));

kind!(Rej = 0x12, |fields| {
    fields
        .number("local_id", 0, 0, 32, |m, v| m.local_id = v as u32)
        .number("remote_id", 4, 0, 32, |m, v| m.remote_id = v as u32)
        .answered(8, |m, v| m.answers = v)
        .number("reason", 10, 0, 16, |m, v| m.reason = RejectReason(v as u16))
        .bytes("private_data", 84, 148, |m, v| m.private_data.copy_from_slice(v))
        .info((9, 7), 12, |m| &mut m.info)
});

kind!(Rep = 0x13, |fields| fields
    .number("local_id", 0, 0, 32, |m, v| m.local_id = v as u32)
    .number("remote_id", 4, 0, 32, |m, v| m.remote_id = v as u32)
    .number("qkey", 8, 0, 32, |m, v| m.qkey = v as u32)
    .number("qpn", 12, 0, 24, |m, v| m.qpn = v as u32)
    .split("vendor_id", &[(15, 0, 8), (19, 0, 8), (23, 0, 8)], |m, v| m.vendor_id = v as u32)
    .number("psn", 20, 0, 24, |m, v| m.psn = v as u32)
    .number("responder_resources", 24, 0, 8, |m, v| m.responder_resources = v as u8)
    .number("initiator_depth", 25, 0, 8, |m, v| m.initiator_depth = v as u8)
    .number("ack_delay", 26, 0, 5, |m, v| m.ack_delay = v as u8)
    .number("failover", 26, 5, 2, |m, v| m.failover = v as u8)
    .number("flow_control", 26, 7, 1, |m, v| m.flow_control = v & 1 == 1)
    .number("rnr_retry_count", 27, 0, 3, |m, v| m.rnr_retry_count = v as u8)
    .number("srq", 27, 3, 1, |m, v| m.srq = v & 1 == 1)
    .number("guid", 28, 0, 64, |m, v| m.guid = v)
    .bytes("private_data", 36, 196, |m, v| m.private_data.copy_from_slice(v)));

kind!(Rtu = 0x14, |fields| fields
    .number("local_id", 0, 0, 32, |m, v| m.local_id = v as u32)
    .number("remote_id", 4, 0, 32, |m, v| m.remote_id = v as u32)
    .bytes("private_data", 8, 224, |m, v| m.private_data.copy_from_slice(v)));

kind!(Dreq = 0x15, |fields| fields
    .number("local_id", 0, 0, 32, |m, v| m.local_id = v as u32)
    .number("remote_id", 4, 0, 32, |m, v| m.remote_id = v as u32)
    .number("remote_qpn", 8, 0, 24, |m, v| m.remote_qpn = v as u32)
    .bytes("private_data", 12, 220, |m, v| m.private_data.copy_from_slice(v)));

kind!(Drep = 0x16, |fields| fields
    .number("local_id", 0, 0, 32, |m, v| m.local_id = v as u32)
    .number("remote_id", 4, 0, 32, |m, v| m.remote_id = v as u32)
    .bytes("private_data", 8, 224, |m, v| m.private_data.copy_from_slice(v)));

kind!(SidrReq = 0x17, |fields| fields
    .number("id", 0, 0, 32, |m, v| m.id = v as u32)
    .number("pkey", 4, 0, 16, |m, v| m.pkey = v as u16)
    .number("service", 8, 0, 64, |m, v| m.service = v)
    .bytes("private_data", 16, 216, |m, v| m.private_data.copy_from_slice(v)));

kind!(SidrRep = 0x18, |fields| {
    fields
        .number("id", 0, 0, 32, |m, v| m.id = v as u32)
        .number("status", 4, 0, 8, |m, v| m.status = SidrStatus(v as u8))
        .split("vendor_id", &[(6, 0, 16), (11, 0, 8)], |m, v| m.vendor_id = v as u32)
        .number("qpn", 8, 0, 24, |m, v| m.qpn = v as u32)
        .number("service", 12, 0, 64, |m, v| m.service = v)
        .number("qkey", 20, 0, 32, |m, v| m.qkey = v as u32)
        .bytes("private_data", 96, 136, |m, v| m.private_data.copy_from_slice(v))
        .info((5, 8), 24, |m| &mut m.info)
});

kind!(Lap = 0x19, |fields| {
    let alternate = PathLayout {
        lids: [20, 22],
        gids: [24, 40],
        flow_label: 56,
        traffic_class: 59,
        hop_limit: 60,
        rate: 61,
        level: 62,
        ack_timeout: 63,
    };
    fields
        .number("local_id", 0, 0, 32, |m, v| m.local_id = v as u32)
        .number("remote_id", 4, 0, 32, |m, v| m.remote_id = v as u32)
        .number("qpn", 12, 0, 24, |m, v| m.qpn = v as u32)
        .number("remote_timeout", 15, 0, 5, |m, v| m.remote_timeout = v as u8)
        .bytes("private_data", 64, 168, |m, v| m.private_data.copy_from_slice(v))
        .path("alternate", &alternate, |m| &mut m.alternate)
});

kind!(Apr = 0x1a, |fields| {
    fields
        .number("local_id", 0, 0, 32, |m, v| m.local_id = v as u32)
        .number("remote_id", 4, 0, 32, |m, v| m.remote_id = v as u32)
        .number("status", 9, 0, 8, |m, v| m.status = v as u8)
        .bytes("private_data", 84, 148, |m, v| m.private_data.copy_from_slice(v))
        .info((8, 8), 12, |m| &mut m.info)
});

/// Calls a generic function for each kind of message.
macro_rules! for_each_kind {
    ($function:ident $(, $argument:expr)*) => {
        $function::<Req>($($argument),*);
        $function::<Mra>($($argument),*);
        $function::<Rej>($($argument),*);
        $function::<Rep>($($argument),*);
        $function::<Rtu>($($argument),*);
        $function::<Dreq>($($argument),*);
        $function::<Drep>($($argument),*);
        $function::<SidrReq>($($argument),*);
        $function::<SidrRep>($($argument),*);
        $function::<Lap>($($argument),*);
        $function::<Apr>($($argument),*);
    };
}
pub(crate) use for_each_kind;
