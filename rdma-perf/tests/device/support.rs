//! Runs the tool on the device under test, with time limits.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdma_safe::{Device, PortState};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Longest wait for an expected event, on a busy emulated machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Arguments that select the device under test.
pub(crate) struct Rdma {
    arguments: Vec<String>,
    is_rxe: bool,
    is_soft: bool,
}

/// The device under test, or `None` after printing why the test is skipped. Without another device it is soft0.
pub(crate) fn device() -> Option<Rdma> {
    let name = variable("RDMA_DEVICE");
    if rdma_safe::soft::install_by_default() && name.is_none() {
        eprintln!("no RDMA device found: using soft0, the software RNIC of this library");
    }
    let port = variable("RDMA_PORT").map_or(1, |port| port.parse().expect("RDMA_PORT is a number"));
    let device = match &name {
        Some(name) => Device::by_name(name),
        None => Device::first(),
    };
    let context = match device.and_then(|device| device.open()) {
        Ok(context) => context,
        // If a device is named, a skip is unexpected.
        Err(error) if name.is_some() => panic!("RDMA_DEVICE: {error}"),
        Err(error) => return skip(&error.to_string()),
    };
    let name = context.device_name().to_owned();
    let state = context.query_port(port).expect("RDMA_PORT names a port of the device").state();
    if state != PortState::ACTIVE {
        return skip(&format!("{name} port {port} is in {state}, not active"));
    }
    let mut arguments = vec!["--device".to_owned(), name, "--ib-port".to_owned(), port.to_string()];
    if let Some(index) = variable("RDMA_GID_INDEX") {
        arguments.extend(["--gid-index".to_owned(), index]);
    }
    let is_soft = context.device_name().starts_with("soft");
    Some(Rdma { arguments, is_rxe: context.attributes().vendor_id() == 0xff_ffff, is_soft })
}

fn skip<T>(reason: &str) -> Option<T> {
    assert!(variable("RDMA_REQUIRE_DEVICE").as_deref() != Some("1"), "RDMA_REQUIRE_DEVICE is set, but {reason}");
    println!("skipped: {reason}");
    None
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl Rdma {
    /// Whether it is kernel SoftRoCE, whose capabilities are known.
    pub(crate) fn is_rxe(&self) -> bool {
        self.is_rxe
    }

    /// Whether it is soft0, which works inside the processes of both ends.
    pub(crate) fn is_soft(&self) -> bool {
        self.is_soft
    }

    /// Starts the tool with the words of `arguments` on this device.
    #[track_caller]
    pub(crate) fn start(&self, arguments: &str) -> Running {
        Running::start(arguments.split_whitespace().chain(self.arguments.iter().map(String::as_str)), arguments)
    }

    /// Runs the tool to completion.
    #[track_caller]
    pub(crate) fn run(&self, arguments: &str) -> Output {
        self.start(arguments).output()
    }

    /// Runs a test with `--loopback` and returns its report.
    #[track_caller]
    pub(crate) fn measure(&self, arguments: &str) -> Report {
        self.run(&format!("{arguments} --loopback --format json")).report()
    }

    /// A number of messages: `soft` on soft0, or `emulated` on a device that may be emulated and a hundred times slower.
    pub(crate) fn count_of(&self, soft: u64, emulated: u64) -> u64 {
        if self.is_soft() { soft } else { emulated }
    }

    /// Starts a server on a free port.
    #[track_caller]
    pub(crate) fn server(&self, arguments: &str) -> Server {
        let running = self.start(&format!("server --port 0 {arguments}"));
        let line = running.wait_for_error("serving on TCP port ");
        let port = line.split_whitespace().find_map(|word| word.parse().ok());
        Server { running, port: port.unwrap_or_else(|| panic!("no port in `{line}`")) }
    }
}

/// A running server on this host.
pub(crate) struct Server {
    pub(crate) running: Running,
    pub(crate) port: u16,
}

impl Server {
    /// Arguments of a client of this server: `server.client("write bw", "--iters 5")`.
    pub(crate) fn client(&self, test: &str, options: &str) -> String {
        format!("{test} 127.0.0.1 --port {} {options}", self.port)
    }
}

/// The running tool, killed on drop.
pub(crate) struct Running {
    child: Child,
    what: String,
    stdout: Stream,
    stderr: Stream,
}

/// Collects the output of a pipe.
struct Stream {
    text: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Stream {
    fn read(pipe: impl Read + Send + 'static) -> Stream {
        let text = Arc::new(Mutex::new(String::new()));
        let all = Arc::clone(&text);
        let reader = std::thread::spawn(move || {
            let mut pipe = BufReader::new(pipe);
            let mut line = Vec::new();
            while pipe.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
                all.lock().unwrap().push_str(&String::from_utf8_lossy(&line));
                line.clear();
            }
        });
        Stream { text, reader: Some(reader) }
    }

    fn so_far(&self) -> String {
        self.text.lock().unwrap().clone()
    }

    fn whole(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        self.so_far()
    }
}

impl Running {
    #[track_caller]
    fn start<'a>(words: impl Iterator<Item = &'a str>, what: &str) -> Running {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rdma-perf"));
        command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("rdma-perf starts");
        let stdout = Stream::read(child.stdout.take().expect("a pipe"));
        let stderr = Stream::read(child.stderr.take().expect("a pipe"));
        Running { child, what: what.to_owned(), stdout, stderr }
    }

    /// Waits until a line of standard error contains `text`, and returns the line.
    #[track_caller]
    pub(crate) fn wait_for_error(&self, text: &str) -> String {
        self.wait_for(&self.stderr, text)
    }

    /// Waits until a line of standard output contains `text`, and returns the line.
    #[track_caller]
    pub(crate) fn wait_for_output(&self, text: &str) -> String {
        self.wait_for(&self.stdout, text)
    }

    #[track_caller]
    fn wait_for(&self, stream: &Stream, text: &str) -> String {
        let start = Instant::now();
        loop {
            let so_far = stream.so_far();
            if let Some(line) = so_far.lines().find(|line| line.contains(text)) {
                return line.to_owned();
            }
            assert!(
                start.elapsed() < DEADLINE,
                "`{}` does not say `{text}`, but: {so_far}\n{}",
                self.what,
                self.stderr.so_far()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Standard error so far.
    pub(crate) fn errors(&self) -> String {
        self.stderr.so_far()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the tool handles Ctrl-C.
    #[track_caller]
    pub(crate) fn wait_for_handler(&self) {
        let start = Instant::now();
        let catches = || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap_or_default();
            let mask =
                status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigCgt:")?.trim(), 16).ok());
            mask.is_some_and(|mask| mask >> (Signal::INT.as_raw() - 1) & 1 != 0)
        };
        while !catches() {
            assert!(start.elapsed() < DEADLINE, "`{}` does not handle Ctrl-C: {}", self.what, self.stderr.so_far());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the tool has a thread of this name, which means that the run has begun.
    #[track_caller]
    pub(crate) fn wait_for_thread(&self, name: &str) {
        let start = Instant::now();
        let has = || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).into_iter().flatten().flatten();
            tasks
                .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok())
                .any(|comm| comm.trim() == name)
        };
        while !has() {
            assert!(start.elapsed() < DEADLINE, "`{}` has no thread {name}: {}", self.what, self.stderr.so_far());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a process number");
        kill_process(pid, signal).expect("the process exists until it is awaited");
    }

    /// Waits until the tool ends.
    #[track_caller]
    pub(crate) fn output(self) -> Output {
        self.output_within(DEADLINE)
    }

    /// Waits until the tool ends, for at most `limit`.
    #[track_caller]
    pub(crate) fn output_within(mut self, limit: Duration) -> Output {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                break status;
            }
            let so_far = self.stderr.so_far();
            assert!(start.elapsed() < limit, "`{}` does not end within {limit:?}: {so_far}", self.what);
            std::thread::sleep(Duration::from_millis(5));
        };
        let (stdout, stderr) = (self.stdout.whole(), self.stderr.whole());
        Output { what: std::mem::take(&mut self.what), status, stdout, stderr }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Has no effect after the process was awaited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Output and status of the tool.
pub(crate) struct Output {
    pub(crate) what: String,
    status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Output {
    /// Standard output of a successful run.
    #[track_caller]
    pub(crate) fn success(&self) -> &str {
        self.expect_status(0);
        &self.stdout
    }

    /// Standard error of a run that failed with `status`. It must contain all of `texts`.
    #[track_caller]
    pub(crate) fn failure(&self, status: i32, texts: &[&str]) -> &str {
        self.expect_status(status);
        for text in texts {
            assert!(self.stderr.contains(text), "`{}` does not say `{text}`, but: {}", self.what, self.stderr);
        }
        &self.stderr
    }

    #[track_caller]
    fn expect_status(&self, status: i32) {
        let found = self.status.code().or(self.status.signal().map(|signal| 128 + signal));
        assert_eq!(found, Some(status), "`{}`: {}{}", self.what, self.stdout, self.stderr);
    }

    /// The report of a successful run.
    #[track_caller]
    pub(crate) fn report(&self) -> Report {
        Report::parse(&self.what, self.success())
    }
}

/// A report in JSON.
pub(crate) struct Report {
    pub(crate) what: String,
    json: Value,
}

impl Report {
    #[track_caller]
    pub(crate) fn parse(what: &str, text: &str) -> Report {
        let json = serde_json::from_str(text).unwrap_or_else(|error| panic!("`{what}`: {error}: {text}"));
        Report { what: what.to_owned(), json }
    }

    #[track_caller]
    pub(crate) fn load(path: &Path) -> Report {
        let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Report::parse(&path.display().to_string(), &text)
    }

    /// The value at `pointer`, such as `/plan/cq_mod`, or null.
    pub(crate) fn at(&self, pointer: &str) -> &Value {
        self.json.pointer(pointer).unwrap_or(&Value::Null)
    }

    pub(crate) fn rows(&self) -> &[Value] {
        self.at("/rows").as_array().map_or(&[], Vec::as_slice)
    }

    /// The only row.
    #[track_caller]
    pub(crate) fn row(&self) -> &Value {
        assert_eq!(self.rows().len(), 1, "`{}`", self.what);
        &self.rows()[0]
    }

    /// An integer of each row.
    pub(crate) fn counts(&self, pointer: &str) -> Vec<u64> {
        self.rows().iter().filter_map(|row| row.pointer(pointer)?.as_u64()).collect()
    }

    /// A number of the only row.
    #[track_caller]
    pub(crate) fn number(&self, pointer: &str) -> f64 {
        let number = self.row().pointer(pointer).and_then(Value::as_f64);
        number.unwrap_or_else(|| panic!("`{}` has no {pointer}: {}", self.what, self.row()))
    }
}

/// A temporary directory, removed on drop.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("rdma-perf-device-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.0);
    }
}
