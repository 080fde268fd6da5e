//! Creates the guest's RDMA device: rxe0 over a dummy interface, or over the wire to another guest.

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::DEADLINE;
use crate::process;
use crate::softroce::config::Network;
use crate::softroce::rxe;
use crate::wait;

/// UDP port of the handshake between two guests.
const HANDSHAKE_PORT: u16 = 18_514;

/// Creates the device and waits until it is ready. On a wire, also waits until the other guest answers.
pub(super) fn create(network: &Network) -> Result<()> {
    // SAFETY: this is the only thread of process 1.
    unsafe { std::env::set_var("PATH", "/usr/sbin:/usr/bin:/sbin:/bin") };
    modprobe(&["ib_uverbs", "rdma_ucm", "rdma_rxe"])?;
    let _ = rustix::system::sethostname(b"softroce");
    run("ip", &["link", "set", "lo", "up"])?;
    let interface = match network {
        Network::Dummy => {
            modprobe(&["dummy"])?;
            run("ip", &["link", "add", rxe::INTERFACE, "type", "dummy"])?;
            rxe::INTERFACE.to_owned()
        }
        Network::Wire { .. } => {
            modprobe(&["virtio_net"])?;
            virtio_interface()?
        }
    };
    rxe::configure(&interface, network.own())?;
    rxe::wait_until_ready(network.own(), DEADLINE)?;
    if let Network::Wire { peer, own } = network {
        handshake(*own, *peer).context("the other guest does not answer")?;
    }
    Ok(())
}

fn modprobe(modules: &[&str]) -> Result<()> {
    run("modprobe", &[&["--all"], modules].concat())
}

fn run(program: &str, args: &[&str]) -> Result<()> {
    process::output(Command::new(program).args(args)).map(drop)
}

/// The interface whose driver is virtio_net.
fn virtio_interface() -> Result<String> {
    let found = wait::until(DEADLINE, || {
        fs::read_dir("/sys/class/net").ok()?.flatten().find_map(|entry| {
            let driver = fs::read_link(entry.path().join("device/driver")).ok()?;
            let name = || entry.file_name().to_string_lossy().into_owned();
            driver.ends_with("virtio_net").then(name)
        })
    });
    found.context("no virtio network interface")
}

/// Waits for the answer of the other guest, which answers once its own device is ready.
///
/// Afterwards, a thread keeps answering the other guest.
fn handshake(own: Ipv4Addr, peer: Ipv4Addr) -> Result<()> {
    const HELLO: &[u8] = b"hello";
    const ANSWER: &[u8] = b"answer";
    let socket = UdpSocket::bind(SocketAddrV4::new(own, HANDSHAKE_PORT))?;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    let peer = SocketAddrV4::new(peer, HANDSHAKE_PORT);
    // This is longer than the other guest may take to boot.
    let deadline = Instant::now() + 3 * DEADLINE;
    let mut buffer = [0; 16];
    loop {
        // Sending fails until the other guest has connected. The loop ends at the deadline.
        let _ = socket.send_to(HELLO, peer);
        match socket.recv(&mut buffer).map(|length| &buffer[..length]) {
            Ok(message) if message == ANSWER => break,
            Ok(message) if message == HELLO => {
                let _ = socket.send_to(ANSWER, peer);
            }
            _ => {}
        }
        if Instant::now() > deadline {
            bail!("no answer from {peer} within {} s", 3 * DEADLINE.as_secs());
        }
    }
    socket.set_read_timeout(None)?;
    std::thread::spawn(move || {
        let mut buffer = [0; 16];
        while let Ok(length) = socket.recv(&mut buffer) {
            if &buffer[..length] == HELLO {
                let _ = socket.send_to(ANSWER, peer);
            }
        }
    });
    Ok(())
}
