//! Where the two hosts wait for each other.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::network::Host;

/// A port that nothing else has.
const PORT: u16 = 18_700;

/// For the other host to be where this one is.
const LIMIT: Duration = Duration::from_secs(150);

/// A connection by which each host hears of the other.
pub(crate) struct Meeting(TcpStream);

impl Meeting {
    /// Waits for the other host to come, too.
    pub(crate) fn of(host: &Host) -> Meeting {
        let stream = if host.is_first {
            let listener = TcpListener::bind((host.own.as_str(), PORT)).expect("the port is free");
            listener.accept().expect("the other host comes").0
        } else {
            let begun = Instant::now();
            loop {
                match TcpStream::connect((host.peer.as_str(), PORT)) {
                    Ok(stream) => break stream,
                    Err(error) => assert!(begun.elapsed() < LIMIT, "the other host does not come: {error}"),
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        };
        stream.set_read_timeout(Some(LIMIT)).expect("a timeout");
        Meeting(stream)
    }

    /// Returns when the other host has called it as often.
    pub(crate) fn together(&mut self) {
        self.0.write_all(b".").expect("the other host is there");
        self.0.read_exact(&mut [0]).expect("the other host comes");
    }
}
