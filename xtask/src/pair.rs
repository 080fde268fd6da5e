//! One run of two programs that talk to each other: a server, and a client on the same machine once the server listens.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::{process, softroce, wait};

/// The TCP port of rdma-core's ping-pongs, of perftest and of their counterparts here, unless told otherwise.
const PORT: u16 = 18_515;
/// How long a server may take to listen.
const LISTEN_LIMIT: Duration = Duration::from_secs(60);
/// Time for one run: what these programs do by default takes seconds at most.
const LIMIT: Duration = Duration::from_secs(120);

/// The deadline, unless the clock is no measure of it: then whoever supervises the guest has one.
fn limit(limit: Duration) -> Duration {
    const NONE: Duration = Duration::from_secs(100_000_000);
    if std::env::var_os(softroce::COUNTS_INSTRUCTIONS).is_some() { NONE } else { limit }
}

/// An end of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Server,
    Client,
}

/// As [`run_on`], on [`PORT`].
pub(crate) fn run(server: Command, client: Command, line: impl FnMut(End, &str)) -> Result<[i32; 2]> {
    run_on(PORT, server, client, line)
}

/// Runs `server`, and `client` once something listens on `port`, and hands each line either writes to `line`; the
/// statuses of both. Kills both when [`LIMIT`] has passed.
fn run_on(port: u16, server: Command, client: Command, mut line: impl FnMut(End, &str)) -> Result<[i32; 2]> {
    let deadline = Instant::now() + limit(LIMIT);
    let (sender, lines) = channel();
    let mut children = Children(Vec::new());
    children.start(server, End::Server, &sender)?;
    let server_status = wait::until(limit(LISTEN_LIMIT), || {
        let ended = children.0[0].try_wait().ok().flatten();
        (ended.is_some() || listening(port)).then_some(ended)
    });
    match server_status {
        Some(None) => children.start(client, End::Client, &sender)?,
        Some(Some(status)) => {
            drop(sender);
            relay(&lines, deadline, &mut line);
            bail!("the server ended before a client came: {status}");
        }
        None => bail!("the server does not listen on port {port}"),
    }
    drop(sender);
    if !relay(&lines, deadline, &mut line) {
        bail!("not finished after {} s", LIMIT.as_secs());
    }
    let mut statuses = [0; 2];
    for (status, child) in statuses.iter_mut().zip(&mut children.0) {
        *status = process::shell_status(child.wait()?);
    }
    Ok(statuses)
}

/// As [`client_output_on`], on [`PORT`].
pub(crate) fn client_output(server: Command, client: Command) -> Result<Vec<String>> {
    client_output_on(PORT, server, client)
}

/// A free TCP port, for programs that take one as an option.
pub(crate) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port())
}

/// Runs `server` and `client` and returns the lines that the client writes.
///
/// # Errors
/// With the output of both, unless both succeed.
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
        Ok(statuses) => bail!("statuses of server and client {statuses:?}:{output}"),
        Err(error) => bail!("{error:#}:{output}"),
    }
}

/// The programs that run; dropping it ends them.
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
            // Fails for one that has ended.
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

/// Hands on lines until both programs have closed their outputs; whether they did before `deadline`.
fn relay(lines: &Receiver<(End, String)>, deadline: Instant, line: &mut impl FnMut(End, &str)) -> bool {
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((end, text)) => line(end, &text),
            Err(RecvTimeoutError::Disconnected) => return true,
            Err(RecvTimeoutError::Timeout) => return false,
        }
    }
}

/// Whether something listens on `port`. Connecting to find out would be taken for the client.
fn listening(port: u16) -> bool {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    tables.iter().any(|table| fs::read_to_string(table).is_ok_and(|table| listens(&table, port)))
}

fn listens(table: &str, port: u16) -> bool {
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
    fn a_listening_socket_is_told_from_a_connected_one() {
        let header = "  sl  local_address rem_address   st tx_queue rx_queue\n";
        let socket = |state: &str| format!("{header}   0: 00000000:4853 00000000:0000 {state} 00000000:00000000\n");
        assert!(listens(&socket("0A"), PORT));
        assert!(!listens(&socket("01"), PORT));
        assert!(!listens(header, PORT));
    }
}
