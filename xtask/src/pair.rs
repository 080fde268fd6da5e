//! Runs a server and, once it listens, a client on the same machine.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::{process, softroce, wait};

/// Default TCP port of rdma-core's ping-pongs, of perftest, and of their counterparts here.
const PORT: u16 = 18_515;
/// Time limit for the server to listen.
const LISTEN_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for one run. With their default options, these programs take a few seconds at most.
const LIMIT: Duration = Duration::from_secs(120);

/// The time limit, or practically none if the clock counts instructions. The host then enforces a limit on the guest.
fn limit(limit: Duration) -> Duration {
    const UNLIMITED: Duration = Duration::from_secs(100_000_000);
    if std::env::var_os(softroce::COUNTS_INSTRUCTIONS).is_some() { UNLIMITED } else { limit }
}

/// An end of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Server,
    Client,
}

/// [`run_on`] with [`PORT`].
pub(crate) fn run(server: Command, client: Command, on_line: impl FnMut(End, &str)) -> Result<[i32; 2]> {
    run_on(PORT, server, client, on_line)
}

/// Runs `server`, and `client` once a socket listens on `port`, and returns the statuses of both.
///
/// Calls `on_line` for each line that either program writes. Kills both at the time limit.
fn run_on(port: u16, server: Command, client: Command, mut on_line: impl FnMut(End, &str)) -> Result<[i32; 2]> {
    let deadline = Instant::now() + limit(LIMIT);
    let (sender, lines) = channel();
    let mut children = Children(Vec::new());
    children.start(server, End::Server, &sender)?;
    let server_status = wait::until(limit(LISTEN_LIMIT), || {
        let ended = children.0[0].try_wait().ok().flatten();
        (ended.is_some() || is_listening(port)).then_some(ended)
    });
    match server_status {
        Some(None) => children.start(client, End::Client, &sender)?,
        Some(Some(status)) => {
            drop(sender);
            relay(&lines, deadline, &mut on_line);
            bail!("the server ended before the client started: {status}");
        }
        None => bail!("the server does not listen on port {port}"),
    }
    drop(sender);
    if !relay(&lines, deadline, &mut on_line) {
        bail!("not finished after {} s", LIMIT.as_secs());
    }
    let mut statuses = [0; 2];
    for (status, child) in statuses.iter_mut().zip(&mut children.0) {
        *status = process::shell_status(child.wait()?);
    }
    Ok(statuses)
}

/// [`client_output_on`] with [`PORT`].
pub(crate) fn client_output(server: Command, client: Command) -> Result<Vec<String>> {
    client_output_on(PORT, server, client)
}

/// A free TCP port, for programs with a port option.
pub(crate) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port())
}

/// Runs `server` and `client` and returns the lines that the client writes.
///
/// # Errors
/// If one of them fails, with the output of both.
pub(crate) fn client_output_on(port: u16, server: Command, client: Command) -> Result<Vec<String>> {
    let (mut lines, mut output) = (Vec::new(), String::new());
    let statuses = run_on(port, server, client, |end, line| {
        output.push_str(&format!("\n  {end:?}: {line}"));
        if end == End::Client {
            lines.push(line.to_owned());
        }
    });
    match statuses {
        Ok([0, 0]) => Ok(lines),
        Ok(statuses) => bail!("exit statuses of server and client: {statuses:?}:{output}"),
        Err(error) => bail!("{error:#}:{output}"),
    }
}

/// The running programs. Dropping this value kills them.
struct Children(Vec<Child>);

impl Children {
    fn start(&mut self, mut command: Command, end: End, lines: &Sender<(End, String)>) -> Result<()> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run `{}`", process::display(&command)))?;
        if let Some(stdout) = child.stdout.take() {
            forward(stdout, end, lines.clone());
        }
        if let Some(stderr) = child.stderr.take() {
            forward(stderr, end, lines.clone());
        }
        self.0.push(child);
        Ok(())
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Fails if the program has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn forward(stream: impl Read + Send + 'static, end: End, lines: Sender<(End, String)>) {
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if lines.send((end, line)).is_err() {
                return;
            }
        }
    });
}

/// Passes lines to `on_line` until both programs have closed their outputs. Returns false if `deadline` comes first.
fn relay(lines: &Receiver<(End, String)>, deadline: Instant, on_line: &mut impl FnMut(End, &str)) -> bool {
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((end, line)) => on_line(end, &line),
            Err(RecvTimeoutError::Disconnected) => return true,
            Err(RecvTimeoutError::Timeout) => return false,
        }
    }
}

/// Whether a socket listens on `port`.
///
/// A test connection would not do: the server would accept it as its client.
fn is_listening(port: u16) -> bool {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    tables.iter().any(|table| fs::read_to_string(table).is_ok_and(|table| has_listener(&table, port)))
}

fn has_listener(table: &str, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let suffix = format!(":{port:04X}");
    table.lines().skip(1).any(|socket| {
        let mut fields = socket.split_whitespace();
        let local = fields.nth(1).unwrap_or_default();
        local.ends_with(&suffix) && fields.nth(1) == Some(LISTEN)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listening_socket_is_distinguished_from_a_connected_one() {
        let header = "  sl  local_address rem_address   st tx_queue rx_queue\n";
        let socket = |state: &str| format!("{header}   0: 00000000:4853 00000000:0000 {state} 00000000:00000000\n");
        assert!(has_listener(&socket("0A"), PORT));
        assert!(!has_listener(&socket("01"), PORT));
        assert!(!has_listener(header, PORT));
    }
}
