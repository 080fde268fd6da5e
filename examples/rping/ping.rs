//! One ping: the messages between client and server.
//!
//! ```text
//! client                                  server
//!        address of the text  ------------->      reads the text
//!                             <------------- done
//!        address of the sink  ------------->      writes the text
//!                             <------------- done
//! ```

use std::time::Duration;

use common::Result;
use rdma_safe::cm::Connection;
use rdma_safe::mr::Pages;
use rdma_safe::{
    Access, Buffer, Completion, Endpoint, EndpointBuilder, ExposedRegion, Operation, ProtectionDomain, RemoteMemory,
    WcStatus,
};

pub(crate) const MIN_SIZE: u32 = 26;
pub(crate) const MAX_SIZE: u32 = 64 * 1024;

/// Longest wait for the peer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Length of a message: address, key and length of memory in network byte order.
const MESSAGE: usize = 16;

pub(crate) fn endpoint(builder: EndpointBuilder<'_>) -> EndpointBuilder<'_> {
    builder.send_depth(16).recv_depth(2).events(true).peer_access(Access::REMOTE_READ | Access::REMOTE_WRITE)
}

/// Posts receives for the messages of the peer, which sends one at a time.
pub(crate) fn post_receives(endpoint: &mut Endpoint) -> Result<()> {
    for _ in 0..2 {
        let inbox = endpoint.pd().allocate(MESSAGE)?;
        endpoint.receive(inbox)?;
    }
    Ok(())
}

fn encode(memory: RemoteMemory) -> [u8; MESSAGE] {
    let mut bytes = [0; MESSAGE];
    bytes[..8].copy_from_slice(&memory.address.to_be_bytes());
    bytes[8..12].copy_from_slice(&memory.rkey.to_be_bytes());
    bytes[12..].copy_from_slice(&(memory.len as u32).to_be_bytes());
    bytes
}

fn decode(message: &[u8]) -> Result<RemoteMemory> {
    let message: [u8; MESSAGE] =
        message.try_into().map_err(|_| format!("a message of {} bytes is not one of rping", message.len()))?;
    let (address, key_and_len) = message.split_at(8);
    let (rkey, len) = key_and_len.split_at(4);
    let word = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().expect("four bytes"));
    let address = u64::from_be_bytes(address.try_into().expect("eight bytes"));
    Ok(RemoteMemory { address, rkey: word(rkey), len: word(len).into() })
}

/// Waits for the next completion of an operation. `None` when the peer has closed the connection.
fn next(connection: &mut Connection, operation: Operation) -> Result<Option<Completion>> {
    loop {
        let done = connection.wait(TIMEOUT)?;
        if done.status == WcStatus::WR_FLUSH_ERR {
            return Ok(None);
        }
        let done = done.ok()?;
        if done.operation == operation {
            return Ok(Some(done));
        }
        // The send of a message that the peer has already answered.
    }
}

/// Takes the completions of the last sends: a disconnect flushes those that the peer has not acknowledged.
pub(crate) fn finish_sends(connection: &mut Connection) -> Result<()> {
    while connection.sends_in_flight() != 0 && next(connection, Operation::Send)?.is_some() {}
    Ok(())
}

fn send(connection: &mut Connection, message: [u8; MESSAGE]) -> Result<()> {
    let mut outbox = connection.pd().allocate(MESSAGE)?;
    outbox.fill_from(&message)?;
    connection.send(outbox)?;
    Ok(())
}

/// Waits for the peer's next message, and posts a receive for the one after it.
fn receive(connection: &mut Connection) -> Result<Option<RemoteMemory>> {
    let Some(done) = next(connection, Operation::Receive)? else { return Ok(None) };
    let inbox = done.buffer.ok_or("the receive returned no buffer")?;
    let memory = decode(&inbox)?;
    connection.receive(inbox)?;
    Ok(Some(memory))
}

/// The bytes before the NUL.
fn text_of(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

pub(crate) struct Client {
    /// Memory that the server reads.
    source: ExposedRegion,
    /// Memory that the server writes.
    sink: ExposedRegion,
    size: usize,
}

impl Client {
    pub(crate) fn new(pd: &ProtectionDomain, size: u32) -> Result<Self> {
        let size = size as usize;
        let source = pd.expose(Pages::new(size)?, Access::REMOTE_READ)?;
        let sink = pd.expose(Pages::new(size)?, Access::REMOTE_WRITE)?;
        Ok(Client { source, sink, size })
    }

    /// Sends a ping and returns the text that came back. `None` when the server has closed the connection.
    pub(crate) fn ping(&mut self, connection: &mut Connection, number: u32, validate: bool) -> Result<Option<String>> {
        let text = text(number, self.size);
        self.source.write(0, &text)?;
        for memory in [&self.source, &self.sink] {
            let message = encode(RemoteMemory { len: self.size as u64, ..memory.remote() });
            send(connection, message)?;
            if receive(connection)?.is_none() {
                return Ok(None);
            }
        }
        let mut returned = vec![0; self.size];
        self.sink.read(0, &mut returned)?;
        if validate && returned != text {
            return Err(format!("ping {number} came back changed").into());
        }
        Ok(Some(String::from_utf8_lossy(text_of(&returned)).into_owned()))
    }
}

/// Returns the text of a ping, as in the C program: the number, letters, and a NUL. The first letter advances with each ping.
fn text(number: u32, size: usize) -> Vec<u8> {
    const LETTERS: u32 = 122 - 65 + 1;
    let mut text = format!("rdma-ping-{number}: ").into_bytes();
    let letters = (number % LETTERS..).map(|letter| 65 + (letter % LETTERS) as u8);
    text.extend(letters.take(size.saturating_sub(text.len())));
    text.truncate(size);
    text[size - 1] = 0;
    text
}

pub(crate) struct Server {
    /// Buffer of the read and the write. `None` while either is in flight.
    buffer: Option<Buffer>,
}

impl Server {
    pub(crate) fn new(pd: &ProtectionDomain) -> Result<Self> {
        Ok(Server { buffer: Some(pd.allocate(MAX_SIZE as usize)?) })
    }

    /// Serves one ping and returns its text. `None` when the client has closed the connection.
    pub(crate) fn pong(&mut self, connection: &mut Connection) -> Result<Option<String>> {
        let Some(source) = receive(connection)? else { return Ok(None) };
        let mut buffer = self.buffer.take().ok_or("the buffer of the server is in flight")?;
        if source.len > buffer.capacity() as u64 {
            return Err(format!("a text of {} bytes is too long: at most {MAX_SIZE}", source.len).into());
        }
        buffer.set_len(source.len as usize)?;
        connection.read(buffer, source)?;
        let Some(done) = next(connection, Operation::Read)? else { return Ok(None) };
        let mut buffer = done.buffer.ok_or("the read returned no buffer")?;
        let text = text_of(&buffer).to_vec();
        send(connection, [0; MESSAGE])?;

        let Some(sink) = receive(connection)? else { return Ok(None) };
        buffer.set_len((text.len() + 1).min(buffer.capacity()))?;
        connection.write(buffer, sink)?;
        let Some(done) = next(connection, Operation::Write)? else { return Ok(None) };
        self.buffer = done.buffer;
        send(connection, [0; MESSAGE])?;
        Ok(Some(String::from_utf8_lossy(&text).into_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_in_network_byte_order() {
        let memory = RemoteMemory { address: 0x0102_0304_0506_0708, rkey: 0x090a_0b0c, len: 0x0d0e_0f10 };
        assert_eq!(encode(memory), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        assert_eq!(decode(&encode(memory)).unwrap(), memory);
        assert!(decode(&[0; 15]).is_err());
    }

    #[test]
    fn texts_are_those_of_c() {
        assert_eq!(text(0, 26), b"rdma-ping-0: ABCDEFGHIJKL\0");
        assert_eq!(text(1, 26), b"rdma-ping-1: BCDEFGHIJKLM\0");
        assert_eq!(text(57, 26), b"rdma-ping-57: zABCDEFGHIJ\0");
        assert_eq!(text(58, 26), b"rdma-ping-58: ABCDEFGHIJK\0");
    }
}
