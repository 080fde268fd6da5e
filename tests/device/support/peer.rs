//! A peer that is killed: the calling test once more, in a process of its own, where it plays another part.

use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, Stdio};

const PART: &str = "RDMA_TEST_PART";
const MARK: &str = "the peer: ";

/// The part that this process plays, if it is such a peer.
pub(crate) fn part() -> Option<String> {
    std::env::var(PART).ok()
}

/// Tells the process that has started this one.
pub(crate) fn say(what: impl std::fmt::Display) {
    println!("\n{MARK}{what}");
}

/// Waits to be killed, or for the end of the process that should have done it.
pub(crate) fn wait_for_the_end() -> ! {
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
    std::process::exit(1);
}

/// It is killed when it is dropped, at the latest.
pub(crate) struct Peer {
    child: Child,
    said: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts `test` as a peer that plays `part`.
    pub(crate) fn start(test: &str, part: impl std::fmt::Display) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("the test's program has a path"))
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(PART, part.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test's program runs");
        let said = BufReader::new(child.stdout.take().expect("piped"));
        Peer { child, said }
    }

    /// The next that it says. It has a watchdog of its own.
    #[track_caller]
    pub(crate) fn hear(&mut self) -> String {
        let mut all = String::new();
        loop {
            let mut line = String::new();
            let read = self.said.read_line(&mut line).expect("text");
            assert_ne!(read, 0, "the peer has ended; it wrote:\n{all}");
            if let Some(said) = line.strip_prefix(MARK) {
                return said.trim_end().to_owned();
            }
            all += &line;
        }
    }

    /// Kills it, by a signal that it can neither catch nor answer. When this returns the process is gone.
    #[track_caller]
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("a child that was not waited for");
        self.killed();
    }

    /// Waits until it has played its part, and well.
    #[track_caller]
    pub(crate) fn succeeds(mut self) {
        let mut all = String::new();
        self.said.read_to_string(&mut all).expect("text");
        let status = self.child.wait().expect("a child can be waited for");
        assert!(status.success() && all.contains("1 passed"), "{status}\n{all}");
    }

    /// Waits for its end by that signal.
    #[track_caller]
    pub(crate) fn killed(mut self) {
        let status = self.child.wait().expect("a child can be waited for");
        assert_eq!(status.signal(), Some(libc::SIGKILL), "the peer has ended by itself: {status}");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
