//! Measures sockets of this machine, for comparison with soft0. `cargo xtask bench soft` runs it.
//!
//! - `kernel_yardstick pingpong BYTES N` prints half the mean round-trip time of UDP datagrams of that size, in microseconds,
//!   between two processes that poll their sockets.
//! - `kernel_yardstick sleep BYTES N` prints half the median round-trip time of TCP messages of that size, in microseconds, between
//!   two processes that sleep until something arrives.
//! - `kernel_yardstick stream N` prints the MB/s (10⁶ bytes) of N messages of 64 KiB by UDP, sent with segmentation offload (GSO)
//!   and received with receive offload (GRO) by one thread.
//!
//! The program starts itself as the other process, and passes an address to connect to.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::{Child, Command};
use std::time::Instant;

/// Bytes of a datagram. A message has 16 of them.
const SEGMENT: usize = 4096;
const MESSAGE: usize = 1 << 16;

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |index: usize| -> Option<u32> { words.get(index).and_then(|text| text.parse().ok()) };
    let address = || -> Option<SocketAddr> { words.get(1).and_then(|text| text.parse().ok()) };
    match (words.first(), address(), number(1), number(2)) {
        (Some(&"pingpong"), None, Some(bytes), Some(rounds)) => println!("{:.3}", pingpong(bytes, rounds)?),
        (Some(&"pingpong"), Some(to), ..) => echo_datagrams(to)?,
        (Some(&"sleep"), None, Some(bytes), Some(rounds)) => println!("{:.3}", sleep(bytes, rounds)?),
        (Some(&"sleep"), Some(to), _, Some(bytes)) => echo_stream(to, bytes)?,
        (Some(&"stream"), None, Some(messages), None) => println!("{:.1}", stream(messages)?),
        _ => {
            eprintln!("usage: kernel_yardstick pingpong BYTES N | sleep BYTES N | stream N");
            std::process::exit(2);
        }
    }
    Ok(())
}

/// Starts the other process.
fn start(test: &str, to: SocketAddr, bytes: u32) -> io::Result<Child> {
    Command::new(std::env::current_exe()?).args([test, &to.to_string(), &bytes.to_string()]).spawn()
}

/// Creates two sockets that are connected to each other.
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

/// Echoes datagrams to `to` until an empty one arrives. Sends an empty one first.
fn echo_datagrams(to: SocketAddr) -> io::Result<()> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.connect(to)?;
    socket.set_nonblocking(true)?;
    let mut buffer = vec![0; MESSAGE];
    let mut len = 0;
    loop {
        socket.send(&buffer[..len])?;
        len = receive(&socket, &mut buffer)?;
        if len == 0 {
            return Ok(());
        }
    }
}

fn pingpong(bytes: u32, rounds: u32) -> io::Result<f64> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    let mut echo = start("pingpong", socket.local_addr()?, bytes)?;
    let mut buffer = vec![0; bytes as usize + 1];
    let (_, peer) = socket.recv_from(&mut buffer)?;
    socket.connect(peer)?;
    socket.set_nonblocking(true)?;
    let warm_up = rounds / 10;
    let mut start = Instant::now();
    for round in 0..warm_up + rounds {
        if round == warm_up {
            start = Instant::now();
        }
        socket.send(&buffer[..bytes as usize])?;
        receive(&socket, &mut buffer)?;
    }
    let elapsed = start.elapsed();
    socket.send(&[])?;
    echo.wait()?;
    Ok(elapsed.as_secs_f64() * 1e6 / f64::from(rounds) / 2.0)
}

/// Echoes messages to `to` until the connection ends.
fn echo_stream(to: SocketAddr, bytes: u32) -> io::Result<()> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; bytes as usize];
    while stream.read_exact(&mut buffer).is_ok() {
        stream.write_all(&buffer)?;
    }
    Ok(())
}

fn sleep(bytes: u32, rounds: u32) -> io::Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut echo = start("sleep", listener.local_addr()?, bytes)?;
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; bytes as usize];
    let mut halves = Vec::with_capacity(rounds as usize);
    for round in 0..rounds / 10 + rounds {
        let start = Instant::now();
        stream.write_all(&buffer)?;
        stream.read_exact(&mut buffer)?;
        if round >= rounds / 10 {
            halves.push(start.elapsed().as_secs_f64() * 1e6 / 2.0);
        }
    }
    drop(stream);
    echo.wait()?;
    halves.sort_by(f64::total_cmp);
    Ok(halves[halves.len() / 2])
}

fn set(socket: &UdpSocket, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the pointer and the length describe `value`.
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
    let (mut buffer, mut message_buffer) = (vec![0; MESSAGE], vec![0; MESSAGE]);
    let warm_up = messages / 10;
    let mut start = Instant::now();
    for message in 0..warm_up + messages {
        if message == warm_up {
            start = Instant::now();
        }
        // One send takes less than 64 KiB, the limit of a UDP datagram.
        for part in data.chunks(MESSAGE - SEGMENT) {
            here.send(part)?;
        }
        let mut done = 0;
        while done < MESSAGE {
            let len = receive(&there, &mut buffer)?;
            // Copy the data to its place in the message.
            message_buffer[done..done + len].copy_from_slice(&buffer[..len]);
            done += len;
        }
    }
    let elapsed = start.elapsed();
    assert!(message_buffer == data, "the received data differs");
    Ok(MESSAGE as f64 * f64::from(messages) / elapsed.as_secs_f64() / 1e6)
}
