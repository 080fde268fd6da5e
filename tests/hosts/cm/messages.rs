//! The captured messages of both connection managers, as tshark and this workspace's codec decode them.

use std::collections::{BTreeMap, BTreeSet};

use rdma_soft::wire::Packet;
use rdma_soft::wire::cm::{Mad, Message};

use super::connections::TOS;
use crate::capture::Capture;
use crate::network::Host;

/// Attributes of the messages, and the names that tshark gives them.
const NAMES: [(u16, &str); 9] = [
    (0x10, "ConnectRequest"),
    (0x11, "MsgRcptAck"),
    (0x12, "ConnectReject"),
    (0x13, "ConnectReply"),
    (0x14, "ReadyToUse"),
    (0x15, "DisconnectRequest"),
    (0x16, "DisconnectReply"),
    (0x17, "ServiceIDResReq"),
    (0x18, "ServiceIDResReqResp"),
];

/// The host that has sent a packet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Sender {
    Rxe,
    Soft,
}

/// The messages of a capture.
#[derive(Default)]
pub(super) struct Messages {
    /// All messages, with their senders and the addresses that they came from.
    all: Vec<(Sender, String, Message)>,
    /// Types of service of each sender's packets of data.
    data_tos: BTreeMap<Sender, BTreeSet<u8>>,
    /// Types of service of each sender's messages.
    message_tos: BTreeMap<Sender, BTreeSet<u8>>,
}

impl Messages {
    /// Stops a capture, and decodes all messages.
    ///
    /// Fails if tshark calls a packet malformed, if tshark and the codec disagree about the kind of a message, or if the codec
    /// encodes a message to different bytes.
    pub(super) fn of(capture: Capture, host: &Host) -> Messages {
        let own_ipv6 = host.link_local();
        let fields = [
            "ip.src",
            "ipv6.src",
            "ip.dsfield",
            "ipv6.tclass",
            "infiniband.mad.attributeid",
            "_ws.col.Info",
            "udp.payload",
        ];
        let mut messages = Messages::default();
        for packet in capture.finish_with(&fields) {
            let [four, six, class_of_four, class_of_six, attribute, info, payload] = &packet[..] else {
                panic!("{packet:?}")
            };
            let from = format!("{four}{six}");
            let is_own = from == host.own || own_ipv6.as_ref() == Some(&from);
            let sender = if is_own { Sender::Soft } else { Sender::Rxe };
            let tos = number(&format!("{class_of_four}{class_of_six}")) as u8;
            if attribute.is_empty() {
                messages.data_tos.entry(sender).or_default().insert(tos);
                continue;
            }
            messages.message_tos.entry(sender).or_default().insert(tos);
            let bytes = bytes(payload);
            let decoded = Packet::parse(&bytes).unwrap_or_else(|error| panic!("{error:?}: {packet:?}"));
            let payload = decoded.payload.to_vec();
            let mad = Mad::decode(&payload).unwrap_or_else(|error| panic!("{error}: {packet:?}"));
            assert_eq!(mad.encode(), payload[..], "reserved fields are zero: {:?}", mad.message);
            let attribute = number(attribute) as u16;
            let (_, name) = NAMES.iter().find(|(of, _)| *of == attribute).unwrap_or_else(|| panic!("{packet:?}"));
            assert_eq!(info, &format!("CM: {name}"), "{:?}", mad.message);
            messages.all.push((sender, from, mad.message));
        }
        messages
    }

    /// Prints the settings in the first request, reply and delay of both managers.
    pub(super) fn show_settings(&self) {
        for sender in [Sender::Rxe, Sender::Soft] {
            let (mut requests, mut replies, mut delays) = (Vec::new(), Vec::new(), Vec::new());
            for message in self.from(sender) {
                match message {
                    Message::Req(req) => {
                        let timeouts = (req.remote_timeout, req.local_timeout, req.path.ack_timeout);
                        requests.push((timeouts, req.max_cm_retries, req.path.rate, req.path.hop_limit));
                    }
                    Message::Rep(rep) => replies.push((rep.ack_delay, rep.failover)),
                    Message::Mra(mra) => delays.push(mra.timeout),
                    _ => {}
                }
            }
            println!("{sender:?}: REQ with timeouts of peer, own, ACK; retries; rate; hops: {:?}", requests.first());
            println!("{sender:?}: REP with ACK delay, failover: {:?}; MRA: {:?}", replies.first(), delays.first());
        }
    }

    /// The messages of a sender.
    fn from(&self, sender: Sender) -> impl Iterator<Item = &Message> {
        self.all.iter().filter(move |(from, ..)| *from == sender).map(|(.., message)| message)
    }

    /// Fails unless both managers have sent each kind of message, over IPv4 and over IPv6.
    pub(super) fn expect_all_kinds(&self) {
        for sender in [Sender::Rxe, Sender::Soft] {
            let kinds: BTreeSet<&str> = self.from(sender).map(name).collect();
            let missing: Vec<_> = NAMES.iter().filter(|(_, name)| !kinds.contains(name)).collect();
            assert!(missing.is_empty(), "{sender:?} has not sent {missing:?}");
        }
        for (sender, is_ipv6) in [Sender::Rxe, Sender::Soft].into_iter().flat_map(|of| [(of, false), (of, true)]) {
            let count = self.all.iter().filter(|(of, from, _)| *of == sender && from.contains(':') == is_ipv6).count();
            assert!(count > 0, "{sender:?} has sent no message over IPv{}", if is_ipv6 { 6 } else { 4 });
        }
    }

    /// Fails unless packets of both hosts have the type of service that a program has set.
    pub(super) fn expect_tos(&self) {
        for sender in [Sender::Rxe, Sender::Soft] {
            let [data, messages] = [&self.data_tos, &self.message_tos].map(|of| &of[&sender]);
            assert_eq!(data, &BTreeSet::from([0, TOS]), "packets of data of {sender:?}");
            assert_eq!(messages, &BTreeSet::from([0, TOS]), "messages of {sender:?}");
        }
    }
}

fn name(message: &Message) -> &'static str {
    match message {
        Message::Req(_) => "ConnectRequest",
        Message::Mra(_) => "MsgRcptAck",
        Message::Rej(_) => "ConnectReject",
        Message::Rep(_) => "ConnectReply",
        Message::Rtu(_) => "ReadyToUse",
        Message::Dreq(_) => "DisconnectRequest",
        Message::Drep(_) => "DisconnectReply",
        Message::SidrReq(_) => "ServiceIDResReq",
        Message::SidrRep(_) => "ServiceIDResReqResp",
        Message::Lap(_) | Message::Apr(_) => panic!("RoCE has no path migration: {message:?}"),
    }
}

/// Reads a number of tshark, with or without `0x`.
fn number(text: &str) -> u64 {
    let parsed = text.strip_prefix("0x").map_or_else(|| text.parse(), |hex| u64::from_str_radix(hex, 16));
    parsed.unwrap_or_else(|_| panic!("not a number: {text:?}"))
}

/// Reads bytes of tshark.
fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(|digit| *digit != b':').collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).expect("text"), 16).expect("hexadecimal");
    digits.chunks(2).map(byte).collect()
}
