//! Connects to the server on a host, or starts one in this process.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;

use super::control::Control;
use super::device::OpenDevice;
use super::server::Server;
use crate::clock::Clock;
use crate::interrupt::Interrupt;

const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Connects to the server on `host`. Without a host it starts a server in this process. `alone` starts no thread.
pub(crate) fn connect(
    host: Option<(&str, u16)>,
    alone: bool,
    opened: &OpenDevice,
    clock: Clock,
    interrupt: &Arc<Interrupt>,
) -> Result<Control> {
    match host {
        Some((host, port)) if alone => Control::connect_single_threaded(host, port, CONNECT_LIMIT, interrupt),
        Some((host, port)) => Control::connect(host, port, CONNECT_LIMIT, Some(interrupt)),
        None => loopback(opened, clock, interrupt),
    }
}

/// Starts a server in this process and connects to it.
fn loopback(opened: &OpenDevice, clock: Clock, interrupt: &Arc<Interrupt>) -> Result<Control> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let server = Server { opened: opened.clone(), clock, max_memory: None, cpus: Vec::new(), is_loopback: true };
    // The server reports failures over the connection.
    std::thread::spawn(move || server.serve(&listener, true));
    Control::connect("127.0.0.1", port, CONNECT_LIMIT, Some(interrupt))
}
