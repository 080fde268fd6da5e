//! The messages over TCP: one JSON value in each line.
//!
//! ```text
//! client                         server
//!        hello   ------------->         connects its queue pair
//!                <------------- welcome
//!        report  ------------->
//! ```

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::Result;
use rdma_safe::{QueuePairAddress, RemoteMemory};
use serde_json::{Value, json};

use crate::client::Counted;
use crate::{Stop, TICK};

/// Longest message in bytes.
const MAX_LEN: usize = 4096;

/// A connection to the other end.
pub(crate) struct Peer<'s> {
    stream: TcpStream,
    name: String,
    stop: &'s Stop,
}

impl<'s> Peer<'s> {
    pub(crate) fn new(stream: TcpStream, timeout: Duration, stop: &'s Stop) -> Result<Self> {
        let name = stream.peer_addr().map_or_else(|_| "the peer".into(), |address| address.to_string());
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(TICK))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Peer { stream, name, stop })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn send_hello(&mut self, address: &QueuePairAddress) -> Result<()> {
        self.send(&json!({ "queue_pair": address }))
    }

    pub(crate) fn receive_hello(&mut self, limit: Duration) -> Result<QueuePairAddress> {
        let hello = self.receive(limit)?;
        self.field(&hello, "queue_pair", serde_json::from_value)
    }

    pub(crate) fn send_welcome(&mut self, address: &QueuePairAddress, counter: &RemoteMemory) -> Result<()> {
        self.send(&json!({ "queue_pair": address, "counter": counter }))
    }

    pub(crate) fn receive_welcome(&mut self, limit: Duration) -> Result<(QueuePairAddress, RemoteMemory)> {
        let welcome = self.receive(limit)?;
        Ok((
            self.field(&welcome, "queue_pair", serde_json::from_value)?,
            self.field(&welcome, "counter", serde_json::from_value)?,
        ))
    }

    pub(crate) fn send_report(&mut self, counted: &Counted) -> Result<()> {
        self.send(&json!({ "counted": counted.total() }))
    }

    /// Waits without a limit: a client may count for any time.
    pub(crate) fn receive_report(&mut self) -> Result<u64> {
        let report = self.receive(Duration::MAX)?;
        self.field(&report, "counted", serde_json::from_value)
    }

    fn send(&mut self, message: &Value) -> Result<()> {
        let line = format!("{message}\n");
        let sent = self.stream.write_all(line.as_bytes());
        sent.map_err(|error| format!("cannot send to {}: {error}", self.name).into())
    }

    fn receive(&mut self, limit: Duration) -> Result<Value> {
        let (start, mut line) = (Instant::now(), Vec::new());
        let mut byte = [0];
        while line.len() < MAX_LEN {
            self.stop.check()?;
            match self.stream.read(&mut byte) {
                Ok(0) => return Err(format!("{} closed the connection; see its output", self.name).into()),
                Ok(_) if byte == *b"\n" => return self.parse(&line),
                Ok(_) => line.push(byte[0]),
                // The errors of a socket timeout.
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    if start.elapsed() >= limit {
                        return Err(format!("{} sent nothing within {} s", self.name, limit.as_secs()).into());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("cannot receive from {}: {error}", self.name).into()),
            }
        }
        self.parse(&line)
    }

    fn parse(&self, line: &[u8]) -> Result<Value> {
        serde_json::from_slice(line).map_err(|_| self.unknown_message(&String::from_utf8_lossy(line)))
    }

    /// Reads a field of `message`.
    fn field<T>(&self, message: &Value, name: &str, read: fn(Value) -> serde_json::Result<T>) -> Result<T> {
        read(message[name].clone()).map_err(|_| self.unknown_message(&message.to_string()))
    }

    fn unknown_message(&self, text: &str) -> Box<dyn std::error::Error + Send + Sync> {
        let start: String = text.chars().take(60).collect();
        format!("{} is not this program: it sent \"{}\"", self.name, start.escape_debug()).into()
    }
}
