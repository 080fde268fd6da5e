//! What kernel UDP does on this machine, to hold soft0 against: `cargo xtask bench soft` runs it.
//!
//! `udp_yardstick pingpong BYTES N` prints the microseconds of half a round trip of datagrams of that size between two threads that
//! never wait; `udp_yardstick stream N` prints the MB/s (10⁶ bytes) of N messages of 64 KiB, sent with segmentation offload and
//! received with its counterpart, by one thread.

use std::io::{self, ErrorKind};
use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::time::Instant;

/// What goes into a datagram, of which a message has 16.
const SEGMENT: usize = 4096;
const MESSAGE: usize = 1 << 16;

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize| -> Option<u32> { arguments.get(index).and_then(|text| text.parse().ok()) };
    match (arguments.first().map(String::as_str), number(1), number(2)) {
        (Some("pingpong"), Some(bytes), Some(rounds)) => println!("{:.3}", pingpong(bytes, rounds)?),
        (Some("stream"), Some(messages), None) => println!("{:.1}", stream(messages)?),
        _ => {
            eprintln!("usage: udp_yardstick pingpong BYTES N | udp_yardstick stream N");
            std::process::exit(2);
        }
    }
    Ok(())
}

/// Two sockets that are connected to each other.
fn sockets() -> io::Result<[UdpSocket; 2]> {
    let pair = [UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?];
    pair[0].connect(pair[1].local_addr()?)?;
    pair[1].connect(pair[0].local_addr()?)?;
    pair.iter().try_for_each(|socket| socket.set_nonblocking(true))?;
    Ok(pair)
}

fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match socket.recv(buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            result => return result,
        }
    }
}

fn pingpong(bytes: u32, rounds: u32) -> io::Result<f64> {
    let [here, there] = sockets()?;
    let warm_up = rounds / 10;
    let echo = std::thread::spawn(move || {
        let mut buffer = vec![0; bytes as usize + 1];
        for _ in 0..warm_up + rounds {
            let len = receive(&there, &mut buffer)?;
            there.send(&buffer[..len])?;
        }
        io::Result::Ok(())
    });
    let mut buffer = vec![0; bytes as usize + 1];
    let mut start = Instant::now();
    for round in 0..warm_up + rounds {
        if round == warm_up {
            start = Instant::now();
        }
        here.send(&buffer[..bytes as usize])?;
        receive(&here, &mut buffer)?;
    }
    let elapsed = start.elapsed();
    echo.join().map_err(|_| io::Error::other("the other thread ended"))??;
    Ok(elapsed.as_secs_f64() * 1e6 / f64::from(rounds) / 2.0)
}

fn set(socket: &UdpSocket, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the value is as long as it is said to be.
    let result = unsafe {
        let len = size_of_val(&value) as libc::socklen_t;
        libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), len)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn stream(messages: u32) -> io::Result<f64> {
    let [here, there] = sockets()?;
    set(&here, libc::SOL_UDP, libc::UDP_SEGMENT, SEGMENT as libc::c_int)?;
    set(&there, libc::SOL_UDP, libc::UDP_GRO, 1)?;
    let data = vec![0x5a; MESSAGE];
    let (mut buffer, mut landed) = (vec![0; MESSAGE], vec![0; MESSAGE]);
    let warm_up = messages / 10;
    let mut start = Instant::now();
    for message in 0..warm_up + messages {
        if message == warm_up {
            start = Instant::now();
        }
        // A datagram holds a little less than 64 KiB.
        for part in data.chunks(MESSAGE - SEGMENT) {
            here.send(part)?;
        }
        let mut done = 0;
        while done < MESSAGE {
            let len = receive(&there, &mut buffer)?;
            // To where the message belongs.
            landed[done..done + len].copy_from_slice(&buffer[..len]);
            done += len;
        }
    }
    let elapsed = start.elapsed();
    assert!(landed == data, "what was sent has arrived");
    Ok(MESSAGE as f64 * f64::from(messages) / elapsed.as_secs_f64() / 1e6)
}
