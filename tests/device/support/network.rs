//! Network namespaces, which have their own interfaces, ports and Unix sockets, as containers do.

use std::process::{Command, Stdio};

/// Ends of the cable of [`lay_cable`].
pub(crate) const ENDS: [&str; 2] = ["end0", "end1"];

fn run(program: &str, arguments: &str) -> Result<(), String> {
    let output = Command::new(program).args(arguments.split(' ')).stdin(Stdio::null()).output();
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Err(format!("{program}: {error}")),
    }
}

/// Whether this process may create namespaces and interfaces. Prints why the test is skipped otherwise.
pub(crate) fn are_available() -> bool {
    let tried = run("unshare", &format!("--net ip link add {} type veth peer name {}", ENDS[0], ENDS[1]));
    if let Err(reason) = &tried {
        println!("skipped: this process cannot create a network: {reason}");
    }
    tried.is_ok()
}

/// Moves the calling thread to a new namespace with a loopback interface, and with it all threads and processes that it starts.
///
/// Call it before the first verb, whose sockets stay in their namespace.
pub(crate) fn enter_new() {
    // SAFETY: it only changes the namespace of the calling thread.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0, "{}", std::io::Error::last_os_error());
    ip("link set lo up");
}

/// Runs `ip` with these arguments in the namespace of the calling thread.
#[track_caller]
pub(crate) fn ip(arguments: &str) {
    run("ip", arguments).unwrap();
}

/// Creates two interfaces that are connected to each other.
pub(crate) fn lay_cable() {
    ip(&format!("link add {} type veth peer name {}", ENDS[0], ENDS[1]));
}

/// Gives an end of the cable an address. Fails if the namespace of the calling thread does not have this end.
pub(crate) fn plug_in(end: usize, address: &str) -> Result<(), String> {
    run("ip", &format!("addr add {address}/24 dev {}", ENDS[end]))?;
    run("ip", &format!("link set {} up", ENDS[end]))
}

/// Moves the second end of the cable to the namespace of a thread.
pub(crate) fn pass_end(thread: &str) {
    ip(&format!("link set {} netns {thread}", ENDS[1]));
}

/// Id of the calling thread.
pub(crate) fn thread() -> i32 {
    // SAFETY: no arguments.
    unsafe { libc::gettid() }
}
