//! Runs the program on soft0, with time limits.

#![allow(dead_code, reason = "no test uses all helpers")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Longest wait for an expected event. Only a test that fails reaches it.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// The running program, killed on drop.
pub(crate) struct Cat {
    pid: Pid,
    has_exited: bool,
    stdin: Option<ChildStdin>,
    /// Pieces of standard output.
    stdout: Receiver<Vec<u8>>,
    output: Vec<u8>,
    /// Lines of standard error.
    stderr: Receiver<String>,
    errors: String,
    exit: Receiver<ExitStatus>,
}

/// How the program has ended.
#[derive(Debug)]
pub(crate) struct Exit {
    /// Exit status; `None` after a signal that was not handled.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Cat {
    #[track_caller]
    pub(crate) fn start<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rdma-cat"));
        command.args(arguments).env("RDMA_DEVICE", "soft0");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Cat::watch(command.spawn().unwrap())
    }

    fn watch(mut child: Child) -> Self {
        let pid = Pid::from_child(&child);
        let (mut stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let (pieces, output) = mpsc::channel();
        std::thread::spawn(move || {
            let mut piece = vec![0; 1 << 16];
            // When the test no longer waits, this closes the pipe.
            while let Ok(len @ 1..) = stdout.read(&mut piece) {
                if pieces.send(piece[..len].to_vec()).is_err() {
                    break;
                }
            }
        });
        let (lines, errors) = mpsc::channel();
        std::thread::spawn(move || {
            BufReader::new(stderr).lines().map_while(Result::ok).all(|line| lines.send(line).is_ok())
        });
        let stdin = child.stdin.take();
        let (exited, exit) = mpsc::channel();
        std::thread::spawn(move || exited.send(child.wait().unwrap()));
        let (output, stdout) = (Vec::new(), output);
        Cat { pid, has_exited: false, stdin, stdout, output, stderr: errors, errors: String::new(), exit }
    }

    /// Listens at a free port. Returns the address, too.
    #[track_caller]
    pub(crate) fn listen<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> (Self, String) {
        let mut words: Vec<_> = ["-l", "127.0.0.1:0"].iter().map(|word| OsStr::new(word).to_owned()).collect();
        words.extend(arguments.into_iter().map(|word| word.as_ref().to_owned()));
        let mut listener = Cat::start(words);
        let line = listener.wait_for_error("listening at ");
        let address = line.strip_prefix("listening at ").unwrap().to_owned();
        (listener, address)
    }

    /// Writes to standard input. Blocks while the program does not read.
    #[track_caller]
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    }

    /// Writes to standard input in a thread, and closes it.
    pub(crate) fn feed(&mut self, bytes: Vec<u8>) {
        let mut stdin = self.stdin.take().unwrap();
        // Fails if the program ends earlier, which the test finds out by its output.
        std::thread::spawn(move || stdin.write_all(&bytes));
    }

    /// Closes standard input.
    pub(crate) fn end_input(&mut self) {
        self.stdin = None;
    }

    /// Closes the pipe that standard output goes to.
    pub(crate) fn break_output(&mut self) {
        self.stdout = mpsc::channel().1;
    }

    /// Waits until standard output has `len` bytes, and returns all so far.
    #[track_caller]
    pub(crate) fn wait_for_output(&mut self, len: usize) -> &[u8] {
        let start = Instant::now();
        while self.output.len() < len {
            let piece = self.stdout.recv_timeout(DEADLINE.saturating_sub(start.elapsed()));
            self.output.extend(piece.unwrap_or_else(|error| panic!("{len} bytes of output: {error}")));
        }
        &self.output
    }

    /// Waits for a line of standard error with this text.
    #[track_caller]
    pub(crate) fn wait_for_error(&mut self, text: &str) -> String {
        let start = Instant::now();
        loop {
            let line = self.stderr.recv_timeout(DEADLINE.saturating_sub(start.elapsed()));
            let line = line.unwrap_or_else(|error| panic!("no `{text}`: {error}: {}", self.errors));
            self.errors += &line;
            self.errors.push('\n');
            if line.contains(text) {
                return line;
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid, signal).unwrap();
    }

    /// Waits for the end of the program.
    #[track_caller]
    pub(crate) fn exit(mut self) -> Exit {
        let status = self.exit.recv_timeout(DEADLINE);
        let Ok(status) = status else {
            panic!("the program has not ended; it said: {}", self.stderr.try_iter().collect::<Vec<_>>().join("\n"))
        };
        self.has_exited = true;
        // The pipes have ended with the program.
        self.output.extend(self.stdout.iter().flatten());
        for line in self.stderr.iter() {
            self.errors += &line;
            self.errors.push('\n');
        }
        let (stdout, stderr) = (std::mem::take(&mut self.output), std::mem::take(&mut self.errors));
        assert!(!stderr.contains("panicked"), "{stderr}");
        Exit { code: status.code(), stdout, stderr }
    }

    /// Waits for the end of the program, which must be orderly. Returns its standard output.
    #[track_caller]
    pub(crate) fn succeed(self) -> Vec<u8> {
        let exit = self.exit();
        assert_eq!(exit.code, Some(0), "{}", exit.stderr);
        exit.stdout
    }

    /// Waits for the end of the program, which must be an error with this text.
    #[track_caller]
    pub(crate) fn fail(self, text: &str) {
        let exit = self.exit();
        assert!(exit.code == Some(1) && exit.stderr.contains(text), "{:?}: {}", exit.code, exit.stderr);
    }
}

impl Drop for Cat {
    fn drop(&mut self) {
        if !self.has_exited && self.exit.try_recv().is_err() {
            let _ = kill_process(self.pid, Signal::KILL);
        }
    }
}

/// A directory that is removed on drop.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("rdma-cat-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Scratch(path)
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Names of the files, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Waits until `is_so`.
    #[track_caller]
    pub(crate) fn wait_until(&self, is_so: impl Fn(&Path) -> bool) {
        let start = Instant::now();
        while !is_so(&self.0) {
            assert!(start.elapsed() < DEADLINE, "not in time; the files are {:?}", self.names());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Random bytes, different for each seed.
pub(crate) fn random(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(next).collect()
}

/// The bytes are the same. Does not print megabytes if not.
#[track_caller]
pub(crate) fn assert_same(found: &[u8], expected: &[u8]) {
    let differs = found.iter().zip(expected).position(|(found, expected)| found != expected);
    assert!(found == expected, "{} bytes of {}, different at {differs:?}", found.len(), expected.len());
}
