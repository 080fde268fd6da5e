//! A barrier between the two hosts.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::network::Host;

/// A TCP port that no other test uses.
const PORT: u16 = 18_700;

/// Time limit for the other host to reach the barrier.
const LIMIT: Duration = Duration::from_secs(150);

/// A connection between the hosts that synchronizes them.
pub(crate) struct Barrier(TcpStream);

impl Barrier {
    /// Connects to the other host, and waits for it if necessary.
    pub(crate) fn new(host: &Host) -> Barrier {
        let listener = host.is_first.then(|| {
            let listener = TcpListener::bind((host.own.as_str(), PORT)).expect("the port is free");
            listener.set_nonblocking(true).expect("the mode can be set");
            listener
        });
        let start = Instant::now();
        let stream = loop {
            let stream = match &listener {
                Some(listener) => listener.accept().map(|(stream, _)| stream),
                None => TcpStream::connect((host.peer.as_str(), PORT)),
            };
            match stream {
                Ok(stream) => break stream,
                Err(error) => assert!(start.elapsed() < LIMIT, "no connection to the other host: {error}"),
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        stream.set_read_timeout(Some(LIMIT)).expect("the timeout can be set");
        Barrier(stream)
    }

    /// Waits until the other host has called this as often.
    pub(crate) fn wait(&mut self) {
        self.0.write_all(b".").expect("the other host is connected");
        self.0.read_exact(&mut [0]).expect("the other host reaches the barrier");
    }

    /// Waits until the process at the other host has ended.
    pub(crate) fn wait_for_end(&mut self) {
        let mut rest = Vec::new();
        match self.0.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
            Err(error) => panic!("the other process does not end: {error}"),
        }
    }

    /// Sends a line to the other host, and returns the line that it sends with the same call.
    pub(crate) fn exchange(&mut self, line: &str) -> String {
        self.0.write_all(format!("{line}\n").as_bytes()).expect("the other host is connected");
        let mut received = Vec::new();
        while received.last() != Some(&b'\n') {
            let mut byte = [0];
            self.0.read_exact(&mut byte).expect("the other host sends a line");
            received.push(byte[0]);
        }
        String::from_utf8(received).expect("text").trim_end().to_owned()
    }
}
