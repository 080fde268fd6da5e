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

/// When the client starts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ready<'a> {
    /// A TCP socket listens on this port.
    Tcp(u16),
    /// An id of soft0 listens, and the name of its socket contains this text: `/PORT/`, or `/PORT/ADDRESS`.
    Soft(&'a str),
    /// An id of the kernel's connection manager listens on this port.
    Kernel(u16),
    /// The server has written a line with this text.
    Line(&'a str),
}

/// When the server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ends {
    /// The server ends after its work.
    Itself,
    /// The server runs until it is killed, after the client has ended.
    Killed,
}

/// Runs `server` and `client` on [`PORT`], and returns the statuses of both. Calls `on_line` for each line that either writes.
pub(crate) fn run(server: Command, client: Command, on_line: impl FnMut(End, &str)) -> Result<[i32; 2]> {
    run_when(Ready::Tcp(PORT), Ends::Itself, server, client, on_line)
}

/// Runs `server`, and `client` once the server is ready, and returns the statuses of both. A server that was killed has status 0.
///
/// Calls `on_line` for each line that either program writes. Kills both at the time limit.
fn run_when(
    ready: Ready<'_>,
    ends: Ends,
    server: Command,
    client: Command,
    mut on_line: impl FnMut(End, &str),
) -> Result<[i32; 2]> {
    let deadline = Instant::now() + limit(LIMIT);
    let (sender, lines) = channel();
    let mut children = Children(Vec::new());
    children.start(server, End::Server, &sender)?;
    let mut has_written = false;
    let server_status = wait::until(limit(LISTEN_LIMIT), || {
        let ended = children.0[0].try_wait().ok().flatten();
        for (end, line) in lines.try_iter() {
            has_written |= matches!(ready, Ready::Line(text) if line.contains(text));
            on_line(end, &line);
        }
        let is_ready = match ready {
            Ready::Tcp(port) => is_listening(port),
            Ready::Soft(name) => is_soft_listening(name),
            Ready::Kernel(port) => is_kernel_listening(port),
            Ready::Line(_) => has_written,
        };
        (ended.is_some() || is_ready).then_some(ended)
    });
    match server_status {
        Some(None) => children.start(client, End::Client, &sender)?,
        Some(Some(status)) => {
            drop(sender);
            relay(&lines, deadline, &mut on_line);
            bail!("the server ended before the client started: {status}");
        }
        None => bail!("the server is not ready ({ready:?})"),
    }
    drop(sender);
    if ends == Ends::Killed {
        let [server, client] = &mut children.0[..] else { bail!("two programs were started") };
        let left = deadline.saturating_duration_since(Instant::now());
        let client_has_ended = wait::until(left, || {
            lines.try_iter().for_each(|(end, line)| on_line(end, &line));
            client.try_wait().ok().flatten()
        });
        if let Some(client_status) = client_has_ended {
            let server_status = server.try_wait()?;
            server.kill()?;
            server.wait()?;
            relay(&lines, deadline, &mut on_line);
            return match server_status {
                None => Ok([0, process::shell_status(client_status)]),
                Some(status) => bail!("the server has ended: {status}"),
            };
        }
    }
    if !relay(&lines, deadline, &mut on_line) {
        bail!("not finished after {} s", LIMIT.as_secs());
    }
    let mut statuses = [0; 2];
    for (status, child) in statuses.iter_mut().zip(&mut children.0) {
        *status = process::shell_status(child.wait()?);
    }
    Ok(statuses)
}

/// Runs `server` and `client` on [`PORT`] and returns the lines that the client writes.
///
/// # Errors
/// As [`output`].
pub(crate) fn client_output(server: Command, client: Command) -> Result<Vec<String>> {
    let [_, lines] = output(Ready::Tcp(PORT), Ends::Itself, server, client)?;
    Ok(lines)
}

/// A free TCP port, for programs with a port option.
pub(crate) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port())
}

/// Runs `server` and `client` and returns the lines that each writes.
///
/// # Errors
/// If one of them fails, or if the server ends although it is to be killed, with the output of both.
pub(crate) fn output(ready: Ready<'_>, ends: Ends, server: Command, client: Command) -> Result<[Vec<String>; 2]> {
    let (mut lines, mut output) = ([Vec::new(), Vec::new()], String::new());
    let statuses = run_when(ready, ends, server, client, |end, line| {
        output.push_str(&format!("\n  {end:?}: {line}"));
        lines[usize::from(end == End::Client)].push(line.to_owned());
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

/// Whether an id of the kernel's connection manager listens on a port, in any port space.
fn is_kernel_listening(port: u16) -> bool {
    let listed = process::output(Command::new("rdma").args(["resource", "show", "cm_id"]));
    listed.is_ok_and(|ids| has_kernel_listener(&ids, port))
}

/// An id is listed as `link rxe0/1 cm-idn 0 state LISTEN ps TCP pid 100 comm cmtime src-addr 10.9.9.1:7471 dst-addr 0.0.0.0:0`.
fn has_kernel_listener(ids: &str, port: u16) -> bool {
    let port = format!(":{port}");
    ids.lines().filter(|id| id.contains(" state LISTEN ")).any(|id| {
        let mut words = id.split_whitespace().skip_while(|word| *word != "src-addr");
        words.nth(1).is_some_and(|address| address.ends_with(&port))
    })
}

/// Whether a listening socket of soft0 has a name that contains `part`.
fn is_soft_listening(part: &str) -> bool {
    fs::read_to_string("/proc/net/unix").is_ok_and(|table| has_soft_listener(&table, part))
}

/// Names of these sockets are `@rdma-soft/cm/VERSION/SPACE/PORT/ADDRESS`. A port that is only claimed has a socket that does not
/// listen.
fn has_soft_listener(table: &str, part: &str) -> bool {
    const LISTENS: &str = "00010000";
    table.lines().any(|socket| {
        let mut fields = socket.split_whitespace();
        let (flags, name) = (fields.nth(3).unwrap_or_default(), fields.nth(3).unwrap_or_default());
        flags == LISTENS && name.starts_with("@rdma-soft/cm/") && name.contains(part)
    })
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
    fn a_listening_id_is_distinguished_from_a_claimed_port() {
        let socket =
            |flags| format!("0000000000000000: 00000002 00000000 {flags} 0005 01 1 @rdma-soft/cm/1/0106/7471/::\n");
        assert!(has_soft_listener(&socket("00010000"), "/7471/"));
        assert!(!has_soft_listener(&socket("00010000"), "/747/"));
        assert!(!has_soft_listener(&socket("00010000"), "/7471/127.0.0.1"));
        assert!(!has_soft_listener(&socket("00000000"), "/7471/"));
    }

    #[test]
    fn an_id_of_the_kernel_that_listens_is_distinguished_from_a_connected_one() {
        let id = |state| {
            format!(
                "link rxe0/1 cm-idn 3 state {state} ps TCP pid 9 comm cmtime src-addr 10.9.9.1:7471 dst-addr 0.0.0.0:0\n"
            )
        };
        assert!(has_kernel_listener(&id("LISTEN"), 7471));
        assert!(!has_kernel_listener(&id("LISTEN"), 471));
        assert!(!has_kernel_listener(&id("CONNECT"), 7471));
    }

    #[test]
    fn a_server_that_stays_is_killed_after_the_client() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        let run = |server, client| output(Ready::Line("ready"), Ends::Killed, shell(server), shell(client));
        let [server, client] = run("echo ready; exec sleep 1000", "echo done").unwrap();
        assert_eq!((server, client), (vec!["ready".to_owned()], vec!["done".to_owned()]));
        assert!(run("echo ready; exec sleep 1000", "exit 3").unwrap_err().to_string().contains("[0, 3]"));
        assert!(run("echo ready; exit 4", "sleep 0.2").unwrap_err().to_string().contains('4'));
    }

    #[test]
    fn a_listening_socket_is_distinguished_from_a_connected_one() {
        let header = "  sl  local_address rem_address   st tx_queue rx_queue\n";
        let socket = |state: &str| format!("{header}   0: 00000000:4853 00000000:0000 {state} 00000000:00000000\n");
        assert!(has_listener(&socket("0A"), PORT));
        assert!(!has_listener(&socket("01"), PORT));
        assert!(!has_listener(header, PORT));
    }
}
