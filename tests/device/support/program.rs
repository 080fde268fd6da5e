//! Programs that the tests run: examples of this workspace and programs of rdma-core.

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

/// Time limit of a program. Only a program that hangs reaches it: a ping-pong takes two seconds on an idle emulated machine.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(120);

/// A program of rdma-core, or an example of this workspace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Program {
    C { file: PathBuf, preload: Option<PathBuf> },
    Rust(PathBuf),
}

impl Program {
    /// A program of rdma-core, part of the distribution's `package`. `None` after printing why the test is skipped.
    pub(crate) fn of_rdma_core(name: &str, package: &str) -> Option<Program> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        match std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file()) {
            Some(file) if soft::is_installed() => match preload() {
                Ok(library) => Some(Program::C { file, preload: Some(library) }),
                Err(reason) => skip(&reason),
            },
            Some(file) => Some(Program::C { file, preload: None }),
            None if soft::is_installed() => {
                println!("skipped: {name} is not in PATH; on soft0 only this test needs it");
                None
            }
            None => skip(&format!("{name} is not in PATH; it is part of rdma-core (package {package})")),
        }
    }

    /// An example of this workspace. `None` after printing why the test is skipped.
    pub(crate) fn example(name: &str) -> Option<Program> {
        Program::in_file(target_dir().join("examples").join(name), &format!("--example {name}"))
    }

    /// The program of a package of this workspace. `None` after printing why the test is skipped.
    #[allow(dead_code, reason = "only the tests between two hosts use it")]
    pub(crate) fn of_package(name: &str) -> Option<Program> {
        Program::in_file(target_dir().join(name), &format!("--package {name}"))
    }

    fn in_file(file: PathBuf, option: &str) -> Option<Program> {
        if file.is_file() {
            return Some(Program::Rust(file));
        }
        skip(&format!("{} does not exist; build it with `cargo build {option}`", file.display()))
    }

    pub(crate) fn start_with(&self, arguments: &[&str]) -> Running {
        self.start_in(&[], arguments)
    }

    /// Starts the program with additional environment variables.
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
    // A build that panics stores no result, so the next test builds again and shows cargo's errors.
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let (library, _) = built.get_or_insert_with(|| (library::build(), Instant::now()));
    library.clone()
}

/// Result and end of the build. Locked during the build.
static BUILT: Mutex<Option<(Result<PathBuf, String>, Instant)>> = Mutex::new(None);

/// The end of the build, or `None` if there was none. Waits for a build that is running.
///
/// The build time does not count toward the time limit of a test.
pub(crate) fn built_at() -> Option<Instant> {
    BUILT.lock().ok()?.as_ref().map(|(_, at)| *at)
}

/// The target directory of the current profile, such as `target/debug`.
fn target_dir() -> PathBuf {
    let tests = std::env::current_exe().expect("the test's program has a path");
    tests.parent().and_then(|deps| deps.parent()).expect("the program is in target/…/deps").to_owned()
}

/// Output of a running program.
#[derive(Default)]
struct Output {
    written: Mutex<Written>,
    changed: Condvar,
}

#[derive(Default)]
struct Written {
    text: String,
    /// Pipes that are still open.
    open: usize,
}

impl Output {
    /// Starts a thread that reads all lines of a pipe.
    fn read(self: &Arc<Self>, from: impl Read + Send + 'static) {
        self.written().open += 1;
        let output = Arc::clone(self);
        std::thread::spawn(move || {
            for line in BufReader::new(from).lines().map_while(Result::ok) {
                output.written().text.extend([&line, "\n"]);
                output.changed.notify_all();
            }
            output.written().open -= 1;
            output.changed.notify_all();
        });
    }

    fn written(&self) -> MutexGuard<'_, Written> {
        self.written.lock().expect("no reader panics")
    }

    /// Waits until `is_done` is true, for at most `limit`. Returns the output so far, as an error after a timeout.
    fn wait(&self, limit: Duration, is_done: impl Fn(&Written) -> bool) -> Result<String, String> {
        let waited = self.changed.wait_timeout_while(self.written(), limit, |written| !is_done(written));
        let (written, result) = waited.expect("no reader panics");
        let text = written.text.clone();
        if result.timed_out() { Err(text) } else { Ok(text) }
    }
}

/// A running program, killed on drop.
pub(crate) struct Running {
    child: Child,
    output: Arc<Output>,
    /// The command line.
    pub(crate) command: String,
}

impl Running {
    /// Waits until the program ends, for at most [`TIME_LIMIT`]. Returns its status and output.
    #[track_caller]
    pub(crate) fn finish(&mut self) -> (ExitStatus, String) {
        self.finish_within(TIME_LIMIT)
    }

    /// Like [`Running::finish`], for at most `limit`.
    #[track_caller]
    pub(crate) fn finish_within(&mut self, limit: Duration) -> (ExitStatus, String) {
        let text = self.output.wait(limit, |written| written.open == 0);
        let text = text.unwrap_or_else(|text| panic!("{} does not end; its output:\n{text}", self.command));
        // The pipes close when the program ends.
        (self.child.wait().expect("a child can be waited for"), text)
    }

    /// Waits until the output contains `wanted`.
    #[track_caller]
    pub(crate) fn wait_for(&self, wanted: &str) {
        if let Err(text) = self.output.wait(TIME_LIMIT, |written| written.text.contains(wanted)) {
            panic!("{} does not write {wanted:?}; its output:\n{text}", self.command);
        }
    }
}

impl Running {
    /// The process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether the program has ended, so that [`finish`](Self::finish) does not wait.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child can be waited for").is_some()
    }

    /// Kills the program with SIGKILL.
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
