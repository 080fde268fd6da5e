//! Messages from a guest to the host, over one virtio serial port.
//!
//! A single ordered stream preserves the order of standard output and standard error. It also makes their end exact: when
//! [`Frame::Exit`] arrives, all output has arrived.

use std::io::{self, ErrorKind, Read, Write};

/// Name of the virtio serial port.
pub(crate) const PORT: &str = "xtask.softroce";

/// Longest payload that a reader accepts. Writers send much less at a time.
const MAX_PAYLOAD: u32 = 1 << 20;

/// A message from the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// The guest's init runs, and the port works.
    Hello,
    /// The device is ready, and the command starts.
    Started,
    /// Standard output of the command.
    Stdout(Vec<u8>),
    /// Standard error of the command.
    Stderr(Vec<u8>),
    /// A kernel message of level warning or worse since the command started.
    Kernel(String),
    /// The command has ended with this status, and all its output has been sent.
    Exit(i32),
    /// The guest cannot run the command.
    Failed(String),
}

impl Frame {
    /// Writes the frame with a single call. Threads that share `out` behind a lock do not interleave frames.
    pub(crate) fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        let number;
        let (kind, payload): (u8, &[u8]) = match self {
            Frame::Hello => (b'h', &[]),
            Frame::Started => (b's', &[]),
            Frame::Stdout(bytes) => (b'o', bytes),
            Frame::Stderr(bytes) => (b'e', bytes),
            Frame::Kernel(line) => (b'k', line.as_bytes()),
            Frame::Exit(status) => {
                number = status.to_le_bytes();
                (b'x', &number)
            }
            Frame::Failed(message) => (b'f', message.as_bytes()),
        };
        let length = u32::try_from(payload.len()).map_err(|_| io::Error::from(ErrorKind::InvalidInput))?;
        let mut bytes = Vec::with_capacity(5 + payload.len());
        bytes.push(kind);
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(payload);
        out.write_all(&bytes)
    }

    /// Reads the next frame. Returns `None` if the stream ends between two frames.
    pub(crate) fn read_from(input: &mut impl Read) -> io::Result<Option<Frame>> {
        let mut kind = [0];
        match input.read_exact(&mut kind) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error),
        }
        let mut length = [0; 4];
        input.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length);
        if length > MAX_PAYLOAD {
            return Err(io::Error::new(ErrorKind::InvalidData, format!("frame of {length} bytes")));
        }
        let mut payload = vec![0; length as usize];
        input.read_exact(&mut payload)?;
        let text = |payload: Vec<u8>| String::from_utf8_lossy(&payload).into_owned();
        Ok(Some(match kind[0] {
            b'h' => Frame::Hello,
            b's' => Frame::Started,
            b'o' => Frame::Stdout(payload),
            b'e' => Frame::Stderr(payload),
            b'k' => Frame::Kernel(text(payload)),
            b'x' => {
                let status = payload.try_into().map_err(|_| io::Error::from(ErrorKind::InvalidData))?;
                Frame::Exit(i32::from_le_bytes(status))
            }
            b'f' => Frame::Failed(text(payload)),
            other => {
                return Err(io::Error::new(ErrorKind::InvalidData, format!("frame of kind {other:#x}")));
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_back_in_order() {
        let frames = [
            Frame::Hello,
            Frame::Started,
            Frame::Stdout(b"out\0\xff".to_vec()),
            Frame::Stderr(Vec::new()),
            Frame::Kernel("rdma_rxe: oops".into()),
            Frame::Failed("no device".into()),
            Frame::Exit(-3),
        ];
        let mut wire = Vec::new();
        for frame in &frames {
            frame.write_to(&mut wire).unwrap();
        }
        let mut input = wire.as_slice();
        for frame in &frames {
            assert_eq!(Frame::read_from(&mut input).unwrap().as_ref(), Some(frame));
        }
        assert_eq!(Frame::read_from(&mut input).unwrap(), None);
    }

    #[test]
    fn a_truncated_frame_is_an_error() {
        let mut wire = Vec::new();
        Frame::Stdout(vec![1; 100]).write_to(&mut wire).unwrap();
        assert!(Frame::read_from(&mut &wire[..50]).is_err());
    }

    #[test]
    fn invalid_frames_are_refused_without_allocating() {
        assert!(Frame::read_from(&mut [b'o', 0xff, 0xff, 0xff, 0xff].as_slice()).is_err());
        assert!(Frame::read_from(&mut [b'?', 0, 0, 0, 0].as_slice()).is_err());
    }
}
