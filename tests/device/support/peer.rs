//! Peers in separate processes, which tests can kill. A peer executes the calling test in another role.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, Stdio};

const ROLE: &str = "RDMA_TEST_ROLE";
const PREFIX: &str = "the peer: ";

/// The role of this process if it is a peer.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Sends a line to the process that started this one.
pub(crate) fn report(what: impl std::fmt::Display) {
    println!("\n{PREFIX}{what}");
}

/// Waits until the process that started this one has sent this line.
pub(crate) fn wait_for(line: &str) {
    let mut read = String::new();
    io::stdin().read_line(&mut read).expect("text");
    assert_eq!(read.trim_end(), line);
}

/// Waits to be killed. Exits if the parent process ends first.
pub(crate) fn wait_to_be_killed() -> ! {
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
    std::process::exit(1);
}

/// A peer process, killed on drop.
pub(crate) struct Peer {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts a process that executes only `test`, in the role `role`.
    pub(crate) fn start(test: &str, role: impl std::fmt::Display) -> Self {
        Peer::start_with(test, role, &[])
    }

    /// Like [`Peer::start`], with these environment variables.
    pub(crate) fn start_with(test: &str, role: impl std::fmt::Display, variables: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("the test's program has a path"))
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(ROLE, role.to_string())
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test's program runs");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Peer { child, output }
    }

    /// Waits for the next line that the peer reports. The peer's own watchdog limits the wait.
    #[track_caller]
    pub(crate) fn next_report(&mut self) -> String {
        let mut all = String::new();
        loop {
            let mut line = String::new();
            let read = self.output.read_line(&mut line).expect("text");
            assert_ne!(read, 0, "the peer has ended with this output:\n{all}");
            if let Some(report) = line.strip_prefix(PREFIX) {
                return report.trim_end().to_owned();
            }
            all += &line;
        }
    }

    /// Sends the peer a line, which [`wait_for`] waits for.
    #[track_caller]
    pub(crate) fn tell(&mut self, line: &str) {
        let stdin = self.child.stdin.as_mut().expect("piped");
        writeln!(stdin, "{line}").expect("the peer reads it");
    }

    /// Kills the peer with SIGKILL and waits until the process is gone.
    #[track_caller]
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("a child that was not waited for");
        self.expect_killed();
    }

    /// Stops the peer with SIGSTOP, and waits until all its threads have stopped.
    #[track_caller]
    pub(crate) fn stop(&self) {
        let (id, mut status) = (self.child.id() as libc::pid_t, 0);
        // SAFETY: it only sends a signal, to a child that was not waited for.
        assert_eq!(unsafe { libc::kill(id, libc::SIGSTOP) }, 0);
        // SAFETY: the status is valid for writes. The child is not reaped unless it has ended, which fails the test.
        assert_eq!(unsafe { libc::waitpid(id, &mut status, libc::WUNTRACED) }, id);
        assert!(libc::WIFSTOPPED(status), "the peer has ended: {status:#x}");
    }

    /// Waits for the end of the peer, whose test must pass.
    #[track_caller]
    pub(crate) fn expect_success(mut self) {
        let mut all = String::new();
        self.output.read_to_string(&mut all).expect("text");
        let status = self.child.wait().expect("a child can be waited for");
        assert!(status.success() && all.contains("1 passed"), "{status}\n{all}");
    }

    /// Waits for the end of the peer, which must die from SIGKILL.
    #[track_caller]
    pub(crate) fn expect_killed(mut self) {
        let status = self.child.wait().expect("a child can be waited for");
        assert_eq!(status.signal(), Some(libc::SIGKILL), "the peer was not killed: {status}");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
