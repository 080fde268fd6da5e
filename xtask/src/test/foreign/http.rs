//! curl and h2load as clients of an HTTP server over RDMA, which they reach by the example `tcp_bridge`.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::Tests;
use super::packages::Root;
use super::watch::Watch;
use crate::{process, wait, workspace};

/// Only a program that hangs reaches this limit.
const LIMIT: Duration = Duration::from_secs(120);

/// Bytes that curl uploads and gets back.
const UPLOAD: usize = 4 << 20;

/// Arguments of h2load and its number of requests. `BODY` stands for a file of 16 KiB, which the server sends back.
const LOADS: [(&str, usize); 3] =
    [("-n 10000 -c 8 -m 100", 10_000), ("-n 2000 -c 4 -m 100 -d BODY", 2000), ("-n 2000 -c 8 --h1 -d BODY", 2000)];

const BODY: usize = 16 << 10;

pub(super) fn run(tests: &mut Tests) {
    // The longer way converts from TCP to RDMA, back, and again to RDMA.
    for bridges in [1, 3] {
        for version in ["--http1.1", "--http2-prior-knowledge"] {
            tests.count(&format!("curl {version} over {bridges} bridges"), |root| transfer(root, bridges, version));
        }
        for (arguments, requests) in LOADS {
            let name = format!("h2load {arguments} over {bridges} bridges");
            tests.count(&name, |root| load(root, bridges, arguments, requests));
        }
    }
    tests.count("tcp_bridge outlives failed connections", outlives_failures);
    tests.count("tcp_bridge passes on the end of one direction", passes_on_ends);
}

/// An example of this workspace. Dropping it kills it.
struct Running {
    child: Child,
    /// Where it listens.
    address: String,
}

impl Running {
    fn start(root: &Root, watch: &Watch, example: &str, arguments: &[&str]) -> Result<Running> {
        let mut command = Command::new(workspace::target_dir()?.join("debug/examples").join(example));
        watch.of(&mut command);
        command.args(arguments).env("RDMA_DEVICE", "soft0");
        let errors = File::options().append(true).create(true).open(errors(root))?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors);
        let child = command.spawn().with_context(|| format!("cannot run `{}`", process::display(&command)))?;
        let mut running = Running { child, address: String::new() };
        let output = running.child.stdout.take().context("no pipe")?;
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            // An error says that nobody waits for the line any more.
            BufReader::new(output).lines().map_while(Result::ok).for_each(|line| _ = sender.send(line));
        });
        let line = lines.recv_timeout(LIMIT).with_context(|| format!("{example} has not started"))?;
        let address = line.strip_prefix("listening at ").with_context(|| format!("{example}: {line}"))?;
        running.address = address.trim_start_matches("http://").to_owned();
        Ok(running)
    }

    /// Sends SIGINT, after which the program must succeed.
    fn stop(mut self) -> Result<()> {
        let process = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("no process")?;
        kill_process(process, Signal::INT)?;
        match wait::until(LIMIT, || self.child.try_wait().transpose()) {
            Some(status) => ensure!(status?.success(), "{} ends with a failure", self.address),
            None => bail!("{} does not end", self.address),
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails if the program has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the examples write to their standard errors.
fn errors(root: &Root) -> PathBuf {
    root.file("http-errors")
}

/// A server, and bridges to it. The first program is the one that clients connect to.
struct Chain {
    programs: Vec<Running>,
    watch: Watch,
}

impl Chain {
    /// An odd number of bridges leads from TCP to the server.
    fn start(root: &Root, bridges: usize) -> Result<Chain> {
        fs::write(errors(root), "")?;
        let watch = Watch::new(root)?;
        let mut chain = Chain { programs: vec![Running::start(root, &watch, "http_server", &["127.0.0.1:0"])?], watch };
        for index in 0..bridges {
            let (listen, connect) = if index % 2 == 0 { ("tcp", "rdma") } else { ("rdma", "tcp") };
            chain.add_bridge(root, listen, connect)?;
        }
        Ok(chain)
    }

    fn add_bridge(&mut self, root: &Root, listen: &str, connect: &str) -> Result<()> {
        let bridge = bridge(root, &self.watch, listen, connect, self.address())?;
        self.programs.insert(0, bridge);
        Ok(())
    }

    fn address(&self) -> &str {
        self.programs.first().map_or("", |program| &program.address)
    }

    /// Stops all programs. One of them must have sent at least `bytes` over soft0.
    fn stop(self, bytes: usize) -> Result<()> {
        let processes = self.programs.len();
        for program in self.programs {
            program.stop()?;
        }
        self.watch.check("tcp_bridge", processes, bytes as u64)
    }
}

fn bridge(root: &Root, watch: &Watch, listen: &str, connect: &str, server: &str) -> Result<Running> {
    let (listen, connect) = (format!("--listen-{listen}"), format!("--connect-{connect}"));
    Running::start(root, watch, "tcp_bridge", &[&listen, "127.0.0.1:0", &connect, server])
}

/// A client with a time limit.
fn client(root: &Root, program: &str) -> Command {
    let mut command = Command::new("timeout");
    command.arg(LIMIT.as_secs().to_string()).arg(root.path_of(program));
    root.set_library_path(&mut command);
    command
}

fn curl(root: &Root) -> Command {
    let mut command = client(root, "curl");
    command.args(["-q", "--silent", "--show-error", "--fail", "--noproxy", "*"]);
    command
}

/// Writes bytes that differ between positions.
fn write_file(root: &Root, name: &str, len: usize) -> Result<(PathBuf, Vec<u8>)> {
    let bytes: Vec<u8> = (0..len as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let file = root.file(name);
    fs::write(&file, &bytes)?;
    Ok((file, bytes))
}

/// A page, and a body in both directions.
fn transfer(root: &Root, bridges: usize, version: &str) -> Result<()> {
    let chain = Chain::start(root, bridges)?;
    let uri = format!("http://{}/some/page", chain.address());
    let page = process::output(curl(root).args([version, &uri]))?;
    let expected = if version == "--http1.1" { "HTTP/1.1" } else { "HTTP/2.0" };
    ensure!(page == format!("{expected} /some/page over RDMA\n"), "the page is: {page}");

    let (upload, bytes) = write_file(root, "http-upload", UPLOAD)?;
    let download = root.file("http-download");
    fs::write(&download, "")?;
    let mut command = curl(root);
    command.args([version, &uri, "--data-binary", &format!("@{}", upload.display()), "--output"]).arg(&download);
    process::output(&mut command)?;
    ensure!(fs::read(&download)? == bytes, "the downloaded bytes differ from the uploaded ones");
    chain.stop(UPLOAD)
}

/// Many requests at a time. All must succeed.
fn load(root: &Root, bridges: usize, arguments: &str, requests: usize) -> Result<()> {
    let chain = Chain::start(root, bridges)?;
    let (body, _) = write_file(root, "http-body", BODY)?;
    let mut command = client(root, "h2load");
    command.args(arguments.split(' ').map(|word| if word == "BODY" { body.clone() } else { word.into() }));
    let output = process::output(command.arg(format!("http://{}/", chain.address())))?;
    for line in [
        format!("{requests} done, {requests} succeeded, 0 failed, 0 errored, 0 timeout"),
        format!("status codes: {requests} 2xx, 0 3xx, 0 4xx, 0 5xx"),
    ] {
        ensure!(output.contains(&line), "{line:?} is missing:\n{output}");
    }
    chain.stop(if arguments.contains("BODY") { requests * BODY } else { requests })
}

/// A bridge without a server refuses clients, and serves others once there is a server.
fn outlives_failures(root: &Root) -> Result<()> {
    fs::write(errors(root), "")?;
    let watch = Watch::new(root)?;
    let first = Running::start(root, &watch, "http_server", &["127.0.0.1:0"])?;
    let address = first.address.clone();
    let bridge = bridge(root, &watch, "tcp", "rdma", &address)?;
    let page = || process::output(curl(root).arg(format!("http://{}/", bridge.address)));
    page()?;
    // This client stays connected until its server has gone.
    let mut idle = TcpStream::connect(&bridge.address)?;
    idle.set_read_timeout(Some(LIMIT))?;
    idle.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")?;
    idle.read_exact(&mut [0])?;
    drop(first);
    // It gets the rest of its page, and then an end or an error.
    if let Err(error) = idle.read_to_end(&mut Vec::new()) {
        ensure!(error.kind() == std::io::ErrorKind::ConnectionReset, "the idle client: {error}");
    }
    ensure!(page().is_err(), "a page without a server");
    let second = Running::start(root, &watch, "http_server", &[&address])?;
    page()?;
    bridge.stop()?;
    second.stop()?;
    // The first server was killed, and has reported nothing.
    watch.check("tcp_bridge", 2, 1)
}

/// A client ends its direction, and then gets the answer of a server that waits for this end.
fn passes_on_ends(root: &Root) -> Result<()> {
    fs::write(errors(root), "")?;
    let watch = Watch::new(root)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let server = listener.local_addr()?.to_string();
    let beside_server = bridge(root, &watch, "rdma", "tcp", &server)?;
    let beside_client = bridge(root, &watch, "tcp", "rdma", &beside_server.address)?;
    let mut client = TcpStream::connect(&beside_client.address)?;
    client.set_read_timeout(Some(LIMIT))?;
    let answers = thread::spawn(move || -> Result<usize> {
        let (mut stream, _) = listener.accept()?;
        stream.set_read_timeout(Some(LIMIT))?;
        let mut question = Vec::new();
        stream.read_to_end(&mut question)?;
        question.reverse();
        stream.write_all(&question)?;
        Ok(question.len())
    });
    let (_, mut bytes) = write_file(root, "http-body", BODY)?;
    client.write_all(&bytes)?;
    client.shutdown(Shutdown::Write)?;
    let mut answer = Vec::new();
    client.read_to_end(&mut answer)?;
    bytes.reverse();
    ensure!(answer == bytes, "the answer has {} bytes", answer.len());
    ensure!(matches!(answers.join(), Ok(Ok(BODY))), "the server has failed");
    beside_client.stop()?;
    beside_server.stop()?;
    watch.check("tcp_bridge", 2, BODY as u64)
}
