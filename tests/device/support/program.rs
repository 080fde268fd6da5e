//! Programs of this workspace and of others, run by tests.

#[path = "../../../rdma-soft/preload/tests/library/mod.rs"]
mod library;

use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdma_safe::soft;

use super::skip;

/// Time limit of a program, which only ends one that hangs. A ping-pong takes two seconds on an idle emulated machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// A program of rdma-core or its counterpart here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Program {
    C { file: PathBuf, preload: Option<PathBuf> },
    Rust(PathBuf),
}

impl Program {
    /// A program of rdma-core, which comes with a package.
    pub(crate) fn of_rdma_core(name: &str, package: &str) -> Option<Program> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        match std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file()) {
            Some(file) if soft::is_installed() => match preload() {
                Ok(library) => Some(Program::C { file, preload: Some(library) }),
                Err(reason) => skip(&reason),
            },
            Some(file) => Some(Program::C { file, preload: None }),
            None if soft::is_installed() => {
                println!("skipped: there is no {name} in PATH, which nothing but this test needs on soft0");
                None
            }
            None => skip(&format!("there is no {name} in PATH; it comes with rdma-core (package {package})")),
        }
    }

    /// An example of this workspace.
    pub(crate) fn example(name: &str) -> Option<Program> {
        let file = beside_tests().join("examples").join(name);
        if file.is_file() {
            return Some(Program::Rust(file));
        }
        skip(&format!("{} is not there; build it with `cargo build --example {name}`", file.display()))
    }

    pub(crate) fn start_with(&self, arguments: &[&str]) -> Running {
        self.start_in(&[], arguments)
    }

    /// With more variables than this process has.
    pub(crate) fn start_in(&self, environment: &[(&str, String)], arguments: &[&str]) -> Running {
        let (Program::C { file, .. } | Program::Rust(file)) = self;
        let command = format!("{} {}", file.display(), arguments.join(" "));
        let mut program = Command::new(file);
        if let Program::C { preload: Some(library), .. } = self {
            program.env("LD_PRELOAD", library);
        }
        let mut child = program
            .args(arguments)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let output = Arc::new(Output::default());
        output.read(child.stdout.take().expect("piped"));
        output.read(child.stderr.take().expect("piped"));
        Running { child, output, command }
    }
}

/// The library that C programs preload for soft0, or the reason why there is none.
fn preload() -> Result<PathBuf, String> {
    // A build that panics stores nothing, so the next test builds again and shows cargo's errors, too.
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let (library, _) = built.get_or_insert_with(|| (library::build(), Instant::now()));
    library.clone()
}

/// The result of the build, and when it ended. Locked during the build.
static BUILT: Mutex<Option<(Result<PathBuf, String>, Instant)>> = Mutex::new(None);

/// When the build ended; waits for one that is running. Tests do not pay for its time.
pub(crate) fn built_at() -> Option<Instant> {
    BUILT.lock().ok()?.as_ref().map(|(_, at)| *at)
}

/// `target/debug`, or whatever is built instead.
fn beside_tests() -> PathBuf {
    let tests = std::env::current_exe().expect("the test's program has a path");
    tests.parent().and_then(|deps| deps.parent()).expect("it lies in target/…/deps").to_owned()
}

/// What a program writes, as it comes.
#[derive(Default)]
struct Output {
    written: Mutex<Written>,
    more: Condvar,
}

#[derive(Default)]
struct Written {
    text: String,
    /// Pipes that more can come from.
    open: usize,
}

impl Output {
    /// Reads lines until the end, in a thread of its own.
    fn read(self: &Arc<Self>, from: impl Read + Send + 'static) {
        self.written().open += 1;
        let output = Arc::clone(self);
        std::thread::spawn(move || {
            for line in BufReader::new(from).lines().map_while(Result::ok) {
                output.written().text.extend([&line, "\n"]);
                output.more.notify_all();
            }
            output.written().open -= 1;
            output.more.notify_all();
        });
    }

    fn written(&self) -> MutexGuard<'_, Written> {
        self.written.lock().expect("no reader panics")
    }

    /// Waits until `enough` was written; all there is then, or if it is not within `limit`, the error.
    fn wait(&self, limit: Duration, enough: impl Fn(&Written) -> bool) -> Result<String, String> {
        let waited = self.more.wait_timeout_while(self.written(), limit, |written| !enough(written));
        let (written, result) = waited.expect("no reader panics");
        let text = written.text.clone();
        if result.timed_out() { Err(text) } else { Ok(text) }
    }
}

/// A program that runs, and is killed if it is dropped before it ends.
pub(crate) struct Running {
    child: Child,
    output: Arc<Output>,
    /// As it was called.
    pub(crate) command: String,
}

impl Running {
    /// Waits for its end; its status and all it wrote.
    #[track_caller]
    pub(crate) fn finish(&mut self) -> (ExitStatus, String) {
        self.finish_within(PATIENCE)
    }

    /// As [`Running::finish`], for `limit`.
    #[track_caller]
    pub(crate) fn finish_within(&mut self, limit: Duration) -> (ExitStatus, String) {
        let text = self.output.wait(limit, |written| written.open == 0);
        let text = text.unwrap_or_else(|text| panic!("{} does not end; it wrote:\n{text}", self.command));
        // Its pipes close when it ends.
        (self.child.wait().expect("a child can be waited for"), text)
    }

    /// Waits until it has written `wanted`.
    #[track_caller]
    pub(crate) fn wait_for(&self, wanted: &str) {
        if let Err(text) = self.output.wait(PATIENCE, |written| written.text.contains(wanted)) {
            panic!("{} does not write {wanted:?}, but:\n{text}", self.command);
        }
    }
}

impl Running {
    /// Its process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended; [`finish`](Self::finish) then does not wait.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child can be waited for").is_some()
    }

    /// Ends it without a word: SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it runs");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("a free port");
    listener.local_addr().expect("an address").port()
}
