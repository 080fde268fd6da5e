//! The ping-pong examples with the C programs of the same names, and their errors.

use std::time::Duration;

use crate::support::program::{Program, Running, TIME_LIMIT, free_port};
use crate::support::{Rdma, device, lossless_device, within};

/// Interval between two polls of procfs.
const PAUSE: Duration = Duration::from_millis(2);

/// `transport` is `rc`, `uc`, `ud`, `srq` or `xsrq`.
impl Program {
    fn c(transport: &str) -> Option<Program> {
        Program::of_rdma_core(&format!("ibv_{transport}_pingpong"), "ibverbs-utils")
    }

    fn rust(transport: &str) -> Option<Program> {
        Program::example(&format!("{transport}_pingpong"))
    }

    /// Starts the program on the device under test.
    pub(crate) fn start(&self, rdma: &Rdma, arguments: &[&str]) -> Running {
        let gid = rdma.gid.index.to_string();
        let port = rdma.port.to_string();
        let device = ["-d", rdma.device_name(), "-i", &port, "-g", &gid];
        self.start_with(&[&device, arguments].concat())
    }
}

/// Waits until a process listens on `port`. Does not connect, since the programs accept only one connection.
pub(crate) fn wait_for_listener(port: u16) {
    let wanted = format!(":{port:04X} ");
    const LISTEN: &str = " 0A ";
    within(TIME_LIMIT, &format!("a listener on port {port}"), || {
        std::thread::sleep(PAUSE);
        ["/proc/net/tcp", "/proc/net/tcp6"].iter().find_map(|table| {
            let table = std::fs::read_to_string(table).ok()?;
            let listens = |line: &&str| {
                line.split_whitespace().nth(1).is_some_and(|local| format!("{local} ").ends_with(&wanted))
                    && line.contains(LISTEN)
            };
            table.lines().find(listens).map(drop)
        })
    });
}

/// Runs `server` and `client` with the same arguments. Both must succeed and print the expected figures.
fn run_pair(rdma: &Rdma, server: &Program, client: &Program, arguments: &[&str], size: u64, iters: u64) {
    let port = free_port().to_string();
    let (size_text, iters_text) = (size.to_string(), iters.to_string());
    let common = [&["-p", &port, "-s", &size_text, "-n", &iters_text, "-r", "8"], arguments].concat();
    let mut first = server.start(rdma, &common);
    if matches!(client, Program::C { .. }) {
        // Our client waits for its server, the C client does not.
        wait_for_listener(port.parse().expect("a number"));
    }
    let mut second = client.start(rdma, &[&common[..], &["127.0.0.1"]].concat());
    let (ends, total) = ([second.finish(), first.finish()], 2 * size * iters);
    let has_finished = ends.each_ref().map(|(status, _)| status.success());
    for (running, (status, text)) in [&second, &first].into_iter().zip(&ends) {
        // The other end has finished and exited. If its last ACK was lost, it is not retransmitted.
        if rdma.loses_packets() && has_finished.contains(&true) && text.contains("transport retry counter exceeded") {
            continue;
        }
        assert!(status.success(), "{}: {status}\n{text}\nthe other end:\n{}{}", running.command, ends[0].1, ends[1].1);
        for wanted in [&format!("{total} bytes in "), &format!("{iters} iters in "), "remote address: "] {
            assert!(text.contains(wanted), "{} did not write {wanted:?}:\n{text}", running.command);
        }
        assert!(!text.contains("invalid data"), "{}:\n{text}", running.command);
    }
}

/// Polling, events, and posting by the extended interface.
const MODES: [&[&str]; 3] = [&["-c"], &["-c", "-e"], &["-c", "-N"]];
/// Message sizes and numbers of iterations.
const SIZES: [(u64, u64); 3] = [(1, 100), (4096, 100), (1 << 20, 5)];

#[test]
fn our_client_runs_with_the_c_server() {
    let Some(rdma) = device() else { return };
    let (Some(ours), Some(c)) = (Program::rust("rc"), Program::c("rc")) else { return };
    for mode in MODES {
        for (size, iters) in SIZES {
            run_pair(&rdma, &c, &ours, mode, size, iters);
        }
    }
}

#[test]
fn our_server_runs_with_the_c_client() {
    let Some(rdma) = device() else { return };
    let (Some(ours), Some(c)) = (Program::rust("rc"), Program::c("rc")) else { return };
    for mode in MODES {
        for (size, iters) in SIZES {
            run_pair(&rdma, &ours, &c, mode, size, iters);
        }
    }
}

#[test]
fn our_client_runs_with_our_server() {
    let Some(rdma) = device() else { return };
    let Some(ours) = Program::rust("rc") else { return };
    let mtu = rdma.query_port(rdma.port).unwrap().active_mtu().to_string();
    for mode in [&["-c", "-m", &mtu][..], &["-c", "-e"], &["-c", "-N", "-e"]] {
        run_pair(&rdma, &ours, &ours, mode, 5000, 200);
    }
}

/// Runs both programs of an unreliable transport in both roles.
fn run_unreliable(transport: &str, sizes: &[(u64, u64)]) {
    let Some(rdma) = lossless_device() else { return };
    let (Some(ours), Some(c)) = (Program::rust(transport), Program::c(transport)) else { return };
    for mode in [&["-c"][..], &["-c", "-e"]] {
        for (size, iters) in sizes {
            run_pair(&rdma, &c, &ours, mode, *size, *iters);
            run_pair(&rdma, &ours, &c, mode, *size, *iters);
        }
    }
    run_pair(&rdma, &ours, &ours, &["-c"], 1000, 100);
}

#[test]
fn uc_pingpong_runs_with_the_c_program() {
    run_unreliable("uc", &[(1, 100), (100_000, 5)]);
}

#[test]
fn ud_pingpong_runs_with_the_c_program() {
    let Some(rdma) = device() else { return };
    let mtu = rdma.query_port(rdma.port).unwrap().active_mtu().bytes().unwrap();
    run_unreliable("ud", &[(1, 100), (mtu.into(), 100)]);
    let Some(ours) = Program::rust("ud") else { return };
    let size = (mtu + 1).to_string();
    let (status, text) = ours.start(&rdma, &["-s", &size]).finish();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("ud_pingpong: ") && text.contains(&format!("{size} bytes is too long")), "{text}");
}

#[test]
fn srq_pingpong_runs_with_the_c_program() {
    let Some(rdma) = device() else { return };
    let (Some(ours), Some(c)) = (Program::rust("srq"), Program::c("srq")) else { return };
    for (mode, size, iters) in [
        (&["-c", "-q", "3"][..], 1, 100),
        (&["-c", "-e", "-q", "3"], 100_000, 20),
        (&["-c", "-q", "16", "-r", "32"], 4096, 200),
    ] {
        run_pair(&rdma, &c, &ours, mode, size, iters);
        run_pair(&rdma, &ours, &c, mode, size, iters);
    }
    // As many receives as queue pairs.
    run_pair(&rdma, &ours, &ours, &["-c", "-e", "-q", "8"], 1000, 100);
}

#[test]
fn different_numbers_of_queue_pairs_are_refused() {
    let Some(rdma) = device() else { return };
    let Some(ours) = Program::rust("srq") else { return };
    let port = free_port().to_string();
    let mut server = ours.start(&rdma, &["-p", &port, "-q", "2"]);
    let mut client = ours.start(&rdma, &["-p", &port, "-q", "3", "--timeout", "5", "127.0.0.1"]);
    let (status, text) = server.finish();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("the peer has 3 queue pairs, and this end 2"), "{text}");
    let (status, text) = client.finish();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("closed the connection") && !text.contains("panicked"), "{text}");
}

#[test]
fn an_unreliable_run_without_a_peer_times_out() {
    let Some(rdma) = device() else { return };
    for transport in ["uc", "ud"] {
        let Some(ours) = Program::rust(transport) else { return };
        let port = free_port().to_string();
        let arguments = ["-p", &port, "-s", "100", "-n", "100000000"];
        let mut server = ours.start(&rdma, &[&arguments[..], &["--timeout", "1"]].concat());
        // The client must not give up before a slow server listens.
        let client = ours.start(&rdma, &[&arguments[..], &["--timeout", "60", "127.0.0.1"]].concat());
        client.wait_for("remote address: ");
        drop(client);
        let (status, text) = server.finish();
        assert_eq!(status.code(), Some(1), "{text}");
        assert!(text.contains("within 1 s") && !text.contains("panicked"), "{text}");
    }
}

/// Runs our program, which must end with status 1 and a message that contains all of `wanted`.
#[track_caller]
fn expect_failure(arguments: &[&str], wanted: &[&str]) {
    let Some(ours) = Program::rust("rc") else { return };
    let (status, text) = ours.start_with(arguments).finish();
    assert_eq!(status.code(), Some(1), "{arguments:?}: {status}\n{text}");
    for part in [&["rc_pingpong: "], wanted].concat() {
        assert!(text.contains(part), "{arguments:?} did not print {part:?}:\n{text}");
    }
    assert!(!text.contains("panicked"), "{text}");
}

#[test]
fn bad_arguments_end_with_status_one_and_the_reason() {
    let Some(rdma) = device() else { return };
    let name = rdma.device_name();
    // Without any device, the message suggests soft0.
    let missing =
        if rdma.is_soft() { ["no_such_device", "soft0"] } else { ["no RDMA device named no_such_device", name] };
    expect_failure(&["-d", "no_such_device"], &missing);
    let ports = rdma.attributes().ports();
    expect_failure(&["-d", name, "-i", "255"], &["no port 255", &format!("its ports are 1 to {ports}")]);
    let used: Vec<u32> = rdma.gids(rdma.port).unwrap().iter().map(|entry| entry.index).collect();
    let empty = (0..256).find(|index| !used.contains(index)).unwrap().to_string();
    let port = rdma.port.to_string();
    expect_failure(&["-d", name, "-i", &port, "-g", &empty], &[&format!("no GID at index {empty}")]);
    if rdma.is_rxe() {
        expect_failure(&["-d", name, "-t"], &["completion"]);
        expect_failure(&["-d", name, "-o"], &["on-demand paging"]);
        let longest = rdma.query_port(rdma.port).unwrap().max_message_size();
        if rdma.is_newer_rxe() {
            assert_eq!(longest, 1 << 31, "exceeds any --size");
        } else {
            let size = (longest + 1).to_string();
            expect_failure(&["-d", name, "-s", &size], &[&format!("{size} bytes is too long")]);
        }
        expect_failure(&["-d", name, "-r", "40000"], &["--rx-depth"]);
    }
}

#[test]
fn a_missing_server_is_an_error_after_the_timeout() {
    let Some(rdma) = device() else { return };
    let port = free_port().to_string();
    let arguments = ["-d", rdma.device_name(), "--timeout", "1", "-p", &port, "127.0.0.1"];
    expect_failure(&arguments, &["cannot connect to 127.0.0.1", "start the server there first"]);
}

/// Starts both ends of a very long run, and waits until both transfer data.
fn start_long_run(rdma: &Rdma, ours: &Program, arguments: &[&str]) -> (Running, Running) {
    let port = free_port().to_string();
    let common = [&["-p", &port, "-n", "100000000", "--timeout", "2"], arguments].concat();
    let server = ours.start(rdma, &common);
    let client = ours.start(rdma, &[&common[..], &["127.0.0.1"]].concat());
    client.wait_for("remote address: ");
    server.wait_for("remote address: ");
    // Both ends transfer data once they consume processor time.
    let ticks = |running: &Running| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", running.id())).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split_whitespace().collect();
        let number = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
        number(11) + number(12)
    };
    let before = (ticks(&server), ticks(&client));
    within(TIME_LIMIT, "a running transfer", || {
        std::thread::sleep(PAUSE);
        (ticks(&server) > before.0 && ticks(&client) > before.1).then_some(())
    });
    (server, client)
}

#[test]
fn a_peer_killed_mid_run_is_an_error_after_the_timeout() {
    let Some(rdma) = device() else { return };
    let Some(ours) = Program::rust("rc") else { return };
    for (mode, kill_server) in [(&[][..], true), (&["-e"], false)] {
        let (mut server, mut client) = start_long_run(&rdma, &ours, mode);
        let (victim, survivor) = if kill_server { (&mut server, &mut client) } else { (&mut client, &mut server) };
        victim.kill();
        let (status, text) = survivor.finish();
        assert_eq!(status.code(), Some(1), "{}: {status}\n{text}", survivor.command);
        // The reason depends on whether a message was in flight.
        let reasons = ["transport retry counter exceeded", "within 2"];
        assert!(reasons.iter().any(|reason| text.contains(reason)), "{}:\n{text}", survivor.command);
        assert!(text.contains("rc_pingpong: ") && !text.contains("panicked"), "{text}");
    }
}

#[test]
fn different_message_sizes_are_an_error() {
    let Some(rdma) = device() else { return };
    let Some(ours) = Program::rust("rc") else { return };
    let port = free_port().to_string();
    let mut server = ours.start(&rdma, &["-p", &port, "-s", "1000", "--timeout", "2"]);
    let client = ours.start(&rdma, &["-p", &port, "-s", "100", "--timeout", "2", "127.0.0.1"]);
    let (status, text) = server.finish();
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains("100 bytes") && text.contains("1000"), "{text}");
    drop(client);
}

#[test]
fn xsrq_pingpong_needs_a_device_with_xrc() {
    let Some(rdma) = device() else { return };
    let (Some(ours), Some(c)) = (Program::rust("xsrq"), Program::c("xsrq")) else { return };
    let has = rdma.attributes().capabilities().contains(rdma_safe::device::DeviceCapabilities::XRC);
    assert!(!(has && rdma.is_rxe()), "SoftRoCE now has XRC");
    if has {
        for (server, client) in [(&ours, &ours), (&c, &ours), (&ours, &c)] {
            let port = free_port().to_string();
            let mut server = server.start(&rdma, &["-p", &port]);
            let mut client = client.start(&rdma, &["-p", &port, "127.0.0.1"]);
            for end in [&mut client, &mut server] {
                let (status, text) = end.finish();
                assert!(status.success() && text.contains("success"), "{}: {text}", end.command);
            }
        }
        return;
    }
    let (status, text) = ours.start(&rdma, &[]).finish();
    let reason = format!("xsrq_pingpong: {} does not support extended reliable connections (XRC)", rdma.device_name());
    assert_eq!(status.code(), Some(1), "{text}");
    assert!(text.contains(&reason), "{text}");
    let (status, text) = c.start(&rdma, &[]).finish();
    assert_eq!(status.code(), Some(1), "{text}");
}
