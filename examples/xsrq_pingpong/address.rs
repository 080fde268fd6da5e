//! The address that each end sends to its peer over TCP.

use std::fmt;

use rdma_safe::Gid;

/// Address of an end. It is sent in the format of rdma-core's `ibv_xsrq_pingpong`: `LID:RECV:SEND:PSN:SRQN:GID` in hexadecimal
/// digits, and a NUL.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Address {
    pub(crate) lid: u16,
    /// Number of the XRC target, which receives.
    pub(crate) recv_qp: u32,
    /// Number of the queue pair that sends.
    pub(crate) send_qp: u32,
    /// First packet number of both queue pairs.
    pub(crate) psn: u32,
    /// Number of the shared receive queue.
    pub(crate) srq: u32,
    /// Zero for none.
    pub(crate) gid: Gid,
}

/// The peer sent something else than an address.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Malformed {
    text: String,
}

impl Address {
    /// `0000:000000:000000:000000:000000:`, 32 digits and the NUL.
    pub(crate) const LEN: usize = 66;

    pub(crate) fn encode(&self) -> [u8; Self::LEN] {
        let Address { lid, recv_qp, send_qp, psn, srq, gid } = *self;
        let mut message = [0; Self::LEN];
        let gid: String = gid.0.iter().map(|byte| format!("{byte:02x}")).collect();
        // Numbers have 24 bits. Wider ones would leave no room for the NUL.
        let [recv_qp, send_qp, psn, srq] = [recv_qp, send_qp, psn, srq].map(|number| number & 0xff_ffff);
        let text = format!("{lid:04x}:{recv_qp:06x}:{send_qp:06x}:{psn:06x}:{srq:06x}:{gid}");
        for (to, from) in message.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        message
    }

    pub(crate) fn decode(message: &[u8; Self::LEN]) -> Result<Self, Malformed> {
        Self::parse(message).ok_or_else(|| Malformed { text: message.escape_ascii().to_string() })
    }

    fn parse(message: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(message.split(|byte| *byte == 0).next()?).ok()?;
        let fields: Vec<&str> = text.split(':').collect();
        let number = |field: &str, max: u32| {
            let digits = Some(field).filter(|field| field.bytes().all(|digit| digit.is_ascii_hexdigit()))?;
            u32::from_str_radix(digits, 16).ok().filter(|value| *value <= max)
        };
        let [lid, recv_qp, send_qp, psn, srq, gid] = fields[..] else { return None };
        let gid = Some(gid).filter(|gid| gid.len() == 32 && gid.bytes().all(|digit| digit.is_ascii_hexdigit()))?;
        Some(Address {
            lid: number(lid, 0xffff)? as u16,
            recv_qp: number(recv_qp, 0xff_ffff)?,
            send_qp: number(send_qp, 0xff_ffff)?,
            psn: number(psn, 0xff_ffff)?,
            srq: number(srq, 0xff_ffff)?,
            gid: Gid(u128::from_str_radix(gid, 16).ok()?.to_be_bytes()),
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Address { lid, recv_qp, send_qp, psn, srq, gid } = self;
        write!(f, "LID {lid:04x}, QPN RECV {recv_qp:06x} SEND {send_qp:06x}, PSN {psn:06x}, SRQN {srq:06x}, GID {gid}")
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the peer is not an xsrq_pingpong: it sent \"{}\" instead of its address", self.text)
    }
}

impl std::error::Error for Malformed {}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGE: &[u8; Address::LEN] = b"0012:0000ab:0000cd:fedcba:000007:00000000000000000000ffff0a090901\0";

    fn address() -> Address {
        let gid = "::ffff:10.9.9.1".parse().unwrap();
        Address { lid: 0x12, recv_qp: 0xab, send_qp: 0xcd, psn: 0xfe_dcba, srq: 7, gid }
    }

    #[test]
    fn an_address_has_the_bytes_of_c() {
        assert_eq!(&address().encode(), MESSAGE);
        assert_eq!(Address::decode(MESSAGE), Ok(address()));
        let widest = Address { lid: 0xffff, recv_qp: 0xff_ffff, srq: 0xff_ffff, gid: Gid([0xff; 16]), ..address() };
        assert_eq!(Address::decode(&widest.encode()), Ok(widest));
    }

    #[test]
    fn an_address_prints_as_in_c() {
        let text = "LID 0012, QPN RECV 0000ab SEND 0000cd, PSN fedcba, SRQN 000007, GID ::ffff:10.9.9.1";
        assert_eq!(address().to_string(), text);
    }

    #[test]
    fn other_bytes_are_rejected_and_shown() {
        for (at, byte) in [(0, b'+'), (0, b' '), (3, b'g'), (4, b'0'), (11, 0), (32, b';'), (65, b'0')] {
            let mut message = *MESSAGE;
            message[at] = byte;
            assert!(Address::decode(&message).is_err(), "{byte} at {at}");
        }
        let mut request = [b' '; Address::LEN];
        request[..16].copy_from_slice(b"GET / HTTP/1.1\r\n");
        let error = Address::decode(&request).unwrap_err().to_string();
        assert!(error.contains(r#"it sent "GET / HTTP/1.1\r\n"#), "{error}");
    }
}
