//! The address of a queue pair as the two ends exchange it over TCP.

use std::fmt;

use rdma_safe::Gid;

/// Address of a queue pair. It is sent in the format of rdma-core's ping-pongs: `LID:QPN:PSN:GID` in hexadecimal digits, and a NUL.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Address {
    pub(crate) lid: u16,
    pub(crate) qp_num: u32,
    pub(crate) psn: u32,
    /// Zero for none.
    pub(crate) gid: Gid,
}

/// The peer sent something else than an address.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Malformed {
    text: String,
}

impl Address {
    pub(crate) const NONE: Address = Address { lid: 0, qp_num: 0, psn: 0, gid: Gid::ZERO };

    /// `0000:000000:000000:`, 32 digits and the NUL.
    pub(crate) const LEN: usize = 52;

    pub(crate) fn encode(&self) -> [u8; Self::LEN] {
        let gid: String = self.gid.0.iter().map(|byte| format!("{byte:02x}")).collect();
        // Queue pair and packet numbers have 24 bits. Wider ones would leave no room for the NUL.
        let text = format!("{:04x}:{:06x}:{:06x}:{gid}\0", self.lid, self.qp_num & 0xff_ffff, self.psn & 0xff_ffff);
        text.into_bytes().try_into().expect("every field has its width")
    }

    pub(crate) fn decode(message: &[u8; Self::LEN]) -> Result<Self, Malformed> {
        let malformed = || Malformed { text: message.escape_ascii().to_string() };
        let text = message.split(|byte| *byte == 0).next().unwrap_or_default();
        let text = std::str::from_utf8(text).map_err(|_| malformed())?;
        let mut fields = text.split(':');
        let mut number = |max: u32| {
            let digits = fields.next().filter(|field| field.bytes().all(|digit| digit.is_ascii_hexdigit()))?;
            u32::from_str_radix(digits, 16).ok().filter(|value| *value <= max)
        };
        let (lid, qp_num, psn) = (number(0xffff), number(0xff_ffff), number(0xff_ffff));
        let gid = fields.next().and_then(gid).filter(|_| fields.next().is_none());
        match (lid, qp_num, psn, gid) {
            (Some(lid), Some(qp_num), Some(psn), Some(gid)) => Ok(Address { lid: lid as u16, qp_num, psn, gid }),
            _ => Err(malformed()),
        }
    }
}

fn gid(digits: &str) -> Option<Gid> {
    if digits.len() != 32 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u128::from_str_radix(digits, 16).ok().map(|value| Gid(value.to_be_bytes()))
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Address { lid, qp_num, psn, gid } = self;
        write!(f, "LID {lid:#06x}, QPN {qp_num:#08x}, PSN {psn:#08x}, GID {gid}")
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the peer is not a ping-pong of this kind: it sent \"{}\" instead of its address", self.text)
    }
}

impl std::error::Error for Malformed {}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGE: &[u8; Address::LEN] = b"0012:0000ab:fedcba:00000000000000000000ffff0a090901\0";

    fn address() -> Address {
        Address { lid: 0x12, qp_num: 0xab, psn: 0xfe_dcba, gid: "::ffff:10.9.9.1".parse().unwrap() }
    }

    #[test]
    fn an_address_has_the_bytes_of_c() {
        assert_eq!(&address().encode(), MESSAGE);
        assert_eq!(Address::decode(MESSAGE), Ok(address()));
    }

    #[test]
    fn the_widest_address_fits() {
        let widest = Address { lid: 0xffff, qp_num: 0xff_ffff, psn: 0xff_ffff, gid: Gid([0xff; 16]) };
        assert_eq!(Address::decode(&widest.encode()), Ok(widest));
        let wider = Address { qp_num: u32::MAX, psn: u32::MAX, ..widest };
        assert_eq!(wider.encode(), widest.encode());
    }

    #[test]
    fn an_address_prints_as_in_c() {
        assert_eq!(address().to_string(), "LID 0x0012, QPN 0x0000ab, PSN 0xfedcba, GID ::ffff:10.9.9.1");
        let none = Address { gid: Gid::ZERO, ..address() };
        assert_eq!(none.to_string(), "LID 0x0012, QPN 0x0000ab, PSN 0xfedcba, GID ::");
    }

    #[test]
    fn other_bytes_are_rejected_and_shown() {
        let with = |at: usize, byte: u8| {
            let mut message = *MESSAGE;
            message[at] = byte;
            message
        };
        for (at, byte) in [(0, b'+'), (0, b' '), (3, b'g'), (4, b'0'), (11, 0), (18, b';'), (25, b'-'), (51, b'0')] {
            assert!(Address::decode(&with(at, byte)).is_err(), "{byte} at {at}");
        }
        let mut request = [b' '; Address::LEN];
        request[..16].copy_from_slice(b"GET / HTTP/1.1\r\n");
        let error = Address::decode(&request).unwrap_err().to_string();
        assert!(error.contains(r#"it sent "GET / HTTP/1.1\r\n"#), "{error}");
        assert!(Address::decode(&[0xff; Address::LEN]).is_err());
    }

    #[test]
    fn fields_may_be_narrower_as_in_c() {
        let mut message = [0; Address::LEN];
        message[..41].copy_from_slice(b"1:ab:fedcba:00000000000000000000ffff0a090901"[..41].try_into().unwrap());
        assert!(Address::decode(&message).is_err(), "a truncated GID");
        message[..44].copy_from_slice(b"1:ab:fedcba:00000000000000000000ffff0a090901");
        assert_eq!(Address::decode(&message), Ok(Address { lid: 1, ..address() }));
    }
}
